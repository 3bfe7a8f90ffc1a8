"""Damaged, foreign and hostile files: a named error, what to do, and nothing executed."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, Call, differences, load_state, options, tiny
from injection import Harmed

from sansac import checkpoint
from sansac.checkpoint import CheckpointError
from sansac.manager import Manager


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    manager = Manager(tiny(tmp_path_factory.mktemp("runs"), san=True))
    manager.train()
    manager.save(manager.directory.with_name("agent"))
    return manager.directory


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained.with_name("agent"), tmp_path / "agent")
    return shutil.copytree(trained, tmp_path / "run")


def test_every_sixty_fourth_of_a_checkpoint(run: Path, call: Call) -> None:
    """Cut anywhere, it is named and its predecessor offered, which loads."""
    last = run / "checkpoints" / "last.pt"
    whole = last.read_bytes()
    for part in range(64):
        last.write_bytes(whole[: len(whole) * part // 64])
        with pytest.raises(
            CheckpointError, match=r"last\.pt is damaged .*previous\.pt can be"
        ) as e:
            checkpoint.load(last)
        assert str(last) in str(e.value)
    code, out, err = call("--resume", run, "--total-steps", "200")
    assert (
        (code, out) == (1, "")
        and err.startswith(f"error: {last} is damaged")
        and err.endswith("\n")
    )
    assert call("--resume", run, "--checkpoint", "previous", "--total-steps", "200")[0] == 0
    assert load_state(run)["counters"]["step"] == 200


@pytest.mark.parametrize("flips", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_or_changes_nothing(flips: int, run: Path) -> None:
    last = run / "checkpoints" / "last.pt"
    whole, state = last.read_bytes(), checkpoint.load(last)
    places, found = random.Random(7), 0
    for _ in range(flips):
        damaged = bytearray(whole)
        damaged[places.randrange(len(whole))] ^= 1 << places.randrange(8)
        last.write_bytes(damaged)
        try:
            assert differences(checkpoint.load(last), state) == []  # a gap between two parts
        except CheckpointError as error:
            found += 1
            assert str(last) in str(error) and "previous.pt can be tried" in str(error)
    print(f"\n{found} of {flips} flipped bits lie in what is read")
    assert found > flips / 2


def altered(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s.update(format_version=2), "has format version 2; this sansac reads 1"),
        (lambda s: s["config"].update(env="Other-v0"), "env Other-v0; expected Pendulum-v1"),
        (lambda s: s["config"].update(san=False), "actor dense; expected spiking"),
        (lambda s: s.update(sizes=[4, 1]), r"sizes [4, 1]; expected [3, 1]"),
        (lambda s: s["algorithm"].pop("critic"), "does not fit its config: KeyError: 'critic'"),
        (lambda s: s["counters"].update(step="1"), "does not fit its config: TypeError: a counter"),
        (
            lambda s: s["replay"]["rows"].pop("reward"),
            "does not fit its config: KeyError: 'reward'",
        ),
    ],
    ids=["version", "environment", "actor", "dimensions", "part", "counter", "buffer"],
)
def test_a_checkpoint_of_something_else(
    change: Callable[[dict[str, Any]], None], told: str, run: Path, call: Call
) -> None:
    last = run / "checkpoints" / "last.pt"
    altered(last, change)
    code, out, err = call("--resume", run, "--total-steps", "200")
    assert (code, out) == (1, "")
    assert f"error: {last}" in err and told in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["train", "evaluate", "watch", "compare", "inspect"])
def test_a_run_of_another_format_is_refused(command: str, run: Path, call: Call) -> None:
    record = (run / "run.json").read_text()
    (run / "run.json").write_text(record.replace('"format_version": 1', '"format_version": 2'))
    words = ["--resume", run] if command == "train" else [run]
    code, out, err = call(command, *words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"error: {run} has format version 2; this sansac reads 1"


# -- what would execute ----------------------------------------------------------------------------


class Canary:
    """A pickle that makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def torch_archive(path: Path, canary: Path) -> None:
    """A checkpoint that is right but for one entry."""
    state = torch.load(path, weights_only=True)
    torch.save({**state, "note": Canary(canary)}, path)


def bare_pickle(path: Path, canary: Path) -> None:
    path.write_bytes(pickle.dumps(Canary(canary)))


def old_torch_file(path: Path, canary: Path) -> None:
    torch.save({"a": Canary(canary)}, path, _use_new_zipfile_serialization=False)


def numpy_file(path: Path, canary: Path) -> None:
    with open(path, "wb") as file:
        np.save(file, np.array([Canary(canary)], dtype=object), allow_pickle=True)


def swapped_archive(path: Path, canary: Path) -> None:
    """The archive of a true checkpoint with its pickle replaced."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            hostile = pickle.dumps(Canary(canary))
            archive.writestr(name, hostile if name.endswith("data.pkl") else content)


def yaml_tag(path: Path, canary: Path) -> None:
    path.write_text(f"env: !!python/object/apply:os.mkdir ['{canary}']\n")


KINDS = [
    *(("checkpoints/last.pt", how)
      for how in (torch_archive, bare_pickle, old_torch_file, numpy_file, swapped_archive)),
    ("checkpoints/best.pt", torch_archive),
    ("checkpoints/previous.pt", swapped_archive),
    ("../agent/agent.pt", torch_archive),
    ("config.yaml", yaml_tag),
    ("config.yaml", bare_pickle),
    ("metrics.jsonl", bare_pickle),
    ("run.json", bare_pickle),
    ("run.json", yaml_tag),
]  # fmt: skip
SLOW = 2  # of them, the last


@pytest.mark.parametrize(
    ("file", "write"),
    [*KINDS[:-SLOW], *(pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS[-SLOW:])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_nothing_executes(
    file: str, write: Callable[[Path, Path], None], run: Path, tmp_path: Path, call: Call
) -> None:
    """Whatever reads the file: the canary does not sing, and what needs the file names it."""
    canary = tmp_path / "sang"
    write(run / file, canary)
    which = Path(file).stem if file.startswith("checkpoints") else "last"
    target = run.with_name("agent") if "agent" in file else run
    commands: list[tuple[Any, ...]] = [("evaluate", target, "--checkpoint", which, "--episodes", 1)]
    if which == "last" and "agent" not in file:
        commands.append(("train", "--resume", run, "--total-steps", 170))
    if "json" in file:
        commands.append(("compare", run, "--out", tmp_path / "comparison"))
    for command in commands:
        code, _, err = call(*command)
        assert not canary.exists()
        assert "Traceback" not in err
        if file.endswith((".pt", ".yaml")):
            assert code in (1, 2) and Path(file).name in err


def test_the_canaries_would_sing(run: Path, tmp_path: Path) -> None:
    """Read without care, each of them executes: what the test above refuses is the real thing."""
    for i, (file, write) in enumerate(KINDS):
        canary = tmp_path / f"sang-{i}"
        path = Path(shutil.copy(run / file, tmp_path / f"hostile-{i}"))
        write(path, canary)
        if write is yaml_tag:
            yaml.unsafe_load(path.read_text())
        elif write is bare_pickle:
            pickle.loads(path.read_bytes())
        elif write is numpy_file:
            np.load(path, allow_pickle=True)
        else:
            torch.load(path, weights_only=False)
        assert canary.is_dir()


MODULE = """
from pathlib import Path
Path({sang!r}).mkdir(exist_ok=True)
import gymnasium
from gymnasium.envs.classic_control import PendulumEnv
gymnasium.register("Mine-v0", entry_point=PendulumEnv, max_episode_steps=40)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that makes a directory when it is imported; and that directory."""
    sang = tmp_path / "sang"
    (tmp_path / "of_mine.py").write_text(MODULE.format(sang=str(sang)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("SANSAC_TRUST_ENV", raising=False)
    return sang


def test_an_environment_id_imports_a_module_only_with_trust_env(
    module: Path, run: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["env"] = "of_mine:Mine-v0"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    altered(
        run / "checkpoints" / "last.pt", lambda state: state["config"].update(env=config["env"])
    )
    commands: list[tuple[Any, ...]] = [
        ("train", "--resume", run, "--total-steps", "170"),
        ("train", "--env", "of_mine:Mine-v0", "--config", run / "config.yaml"),
        ("evaluate", run, "--episodes", "1"),
        ("inspect", run, "--out", tmp_path / "inspection"),
        ("export", run, "--format", "c", "--out", tmp_path / "c"),
        ("energy", run, "--episodes", "1"),
        ("latency", run),
        ("sweep", "--out", tmp_path / "sweep", "--env", "of_mine:Mine-v0", "--seeds", "0"),
        ("tune", "--out", tmp_path / "tune", "--env", "of_mine:Mine-v0", "--trials", "1"),
        ("tune", "lr-range", "--env", "of_mine:Mine-v0", "--out", tmp_path / "range"),
    ]
    for words in commands:
        code, out, err = call(*words)
        assert not module.exists() and "Traceback" not in err
        assert code != 0 and "give --trust-env" in out + err, words
    monkeypatch.setenv("SANSAC_TRUST_ENV", "0")  # restored at the end, whatever the commands set
    assert call("evaluate", run, "--episodes", "1", "--trust-env")[0] == 0
    assert module.exists()


@pytest.mark.slow
def test_trust_reaches_processes_that_are_started(module: Path, tmp_path: Path) -> None:
    """Asynchronous environments, and the runs of a sweep."""
    words = options(async_envs=True, env="of_mine:Mine-v0", total_steps=60)
    out = tmp_path / "sweep"
    command = ("sweep", "--out", out, "--seeds", "0", "--workers", "1", "--trust-env", *words)
    harmed = Harmed("runner.py", *command, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    code, _, err = harmed.end()
    assert code == 0, err
