"""Run directories and checkpoints: nothing is lost, shared, overwritten or executed."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import differences, load_state, tiny

from sansac import checkpoint
from sansac.checkpoint import CheckpointError, load, locked, make_run_dir, save
from sansac.config import ConfigError
from sansac.manager import Manager

STATE = {
    "config": {"env": "E", "learning": {"gamma": 0.5}},
    "algorithm": {"weight": torch.arange(600.0).reshape(30, 20)},
    "counters": {"step": 3, "best_return": None, "last_return": float("-inf")},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a dense actor with its last, previous and best checkpoints."""
    manager = Manager(tiny(tmp_path_factory.mktemp("runs")))
    manager.train()
    return manager.directory


def with_checkpoint(run: Path, target: Path, change: Any = None) -> Path:
    """A copy of a run's configuration and of its last checkpoint, changed in place."""
    (target / "checkpoints").mkdir(parents=True)
    (target / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    state = load_state(run)
    if change:
        change(state)
    torch.save(state, target / "checkpoints" / "last.pt")
    return target


# -- reading and writing ---------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "last.pt"
    save(path, STATE)
    assert differences(load(path), {"format_version": checkpoint.FORMAT_VERSION, **STATE}) == []


def test_the_predecessor_is_kept(tmp_path: Path) -> None:
    last, previous = tmp_path / "c" / "last.pt", tmp_path / "c" / "previous.pt"
    for step in (1, 2, 3):
        save(last, {"step": step}, keep=previous)
        assert load(last)["step"] == step
        assert previous.exists() == (step > 1)
    assert load(previous)["step"] == 2
    assert sorted(p.name for p in last.parent.iterdir()) == ["last.pt", "previous.pt"]


def test_a_file_cut_short_anywhere_is_named_and_its_predecessor_offered(tmp_path: Path) -> None:
    """case 28"""
    path = tmp_path / "last.pt"
    save(path, STATE, keep=tmp_path / "previous.pt")
    save(path, STATE, keep=tmp_path / "previous.pt")
    whole = path.read_bytes()
    for sixteenth in range(16):
        path.write_bytes(whole[: len(whole) * sixteenth // 16])
        with pytest.raises(CheckpointError) as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert str(tmp_path / "previous.pt") in str(caught.value)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"does not exist; .*previous\.pt"):
        load(path)
    assert load(tmp_path / "previous.pt")["counters"]["step"] == 3
    (tmp_path / "previous.pt").unlink()
    with pytest.raises(CheckpointError, match=r"does not exist$"):
        load(path)


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    """case 28: in the weights, in the structure around them, or in the file's first bytes."""
    path = tmp_path / "last.pt"
    save(path, STATE)
    whole = path.read_bytes()
    weights = whole.index(STATE["algorithm"]["weight"].numpy().tobytes())  # type: ignore[index]
    with zipfile.ZipFile(path) as archive:
        names = [info.filename for info in archive.infolist()]
        pickled = whole.index(archive.read(next(n for n in names if n.endswith("data.pkl"))))
    for position in (0, pickled, pickled + 40, weights, weights + 1111, weights + 2399):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged") as caught:
            load(path)
        assert str(path) in str(caught.value)


class Hostile:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("write", [torch.save, "pickle"])
def test_a_pickle_is_not_executed(write: Any, tmp_path: Path) -> None:
    """case 30: in torch's archive, and as a bare pickle."""
    canary, path = tmp_path / "executed", tmp_path / "last.pt"
    content = {"format_version": 1, "algorithm": Hostile(canary)}
    if write == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        write(content, path)
    with pytest.raises(CheckpointError, match=r"last\.pt is damaged or not a sansac checkpoint"):
        load(path)
    assert not canary.exists()


@pytest.mark.parametrize("content", [{"format_version": 99}, {"weights": 1}, [1, 2]])
def test_another_format_names_both_versions(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "last.pt")
    found = content.get("format_version") if isinstance(content, dict) else None
    with pytest.raises(CheckpointError, match=rf"version {found}; this sansac reads 1"):
        load(tmp_path / "last.pt")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [0, 1, 4, 1000])
def test_a_save_that_ends_early_leaves_the_old_checkpoints(after: int, tmp_path: Path) -> None:
    """case 28: at its start, in the middle, and after the last byte; the error passes through."""
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    save(last, {"step": 1}, keep=previous)
    save(last, {"step": 2}, keep=previous)

    def write(file: Any) -> None:
        for _ in range(after):
            file.write(b"some bytes")
        raise Killed

    with pytest.raises(Killed):
        checkpoint.write_atomically(last, write, keep=previous)
    assert (load(last)["step"], load(previous)["step"]) == (2, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "previous.pt"]


@pytest.mark.parametrize("call", ["fsync", "link", "replace"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_kill_between_the_steps_of_a_save_leaves_a_checkpoint(
    call: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """case 28: at each system call, `last` is whole, old or new, and the next save goes well."""
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    save(last, {"step": 1}, keep=previous)
    save(last, {"step": 2}, keep=previous)
    real, count = getattr(os, call), 0

    def killed(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth:
            raise Killed
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, killed)
        reached = False
        try:
            save(last, {"step": 3}, keep=previous)
        except Killed:
            reached = True
    assert reached == (count >= nth)
    assert load(last)["step"] in (2, 3)
    assert load(previous)["step"] in (1, 2)
    save(last, {"step": 4}, keep=previous)
    assert load(last)["step"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "previous.pt"]


def test_what_a_killed_save_left_behind_does_not_matter(tmp_path: Path) -> None:
    """case 28: half a temporary file, and a link to the predecessor."""
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    save(last, {"step": 1}, keep=previous)
    (tmp_path / ".last.pt.tmp").write_bytes(b"half a che")
    (tmp_path / ".previous.pt.tmp").write_bytes(b"half a che")
    assert load(last)["step"] == 1
    save(last, {"step": 2}, keep=previous)
    assert (load(last)["step"], load(previous)["step"]) == (2, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "previous.pt"]


# -- a checkpoint of something else ----------------------------------------------------------------


def test_a_checkpoint_of_another_environment_or_actor_is_refused_by_name(
    run: Path, tmp_path: Path
) -> None:
    def env(state: dict[str, Any]) -> None:
        state["config"]["env"] = "MountainCarContinuous-v0"

    def actor(state: dict[str, Any]) -> None:
        state["config"]["san"] = True

    def sizes(state: dict[str, Any]) -> None:
        state["sizes"] = [17, 6]

    for i, (change, found, expected) in enumerate(
        [
            (env, "MountainCarContinuous-v0", "Pendulum-v1"),
            (actor, "spiking", "dense"),
            (sizes, r"\[17, 6\]", r"\[3, 1\]"),
        ]
    ):
        other = with_checkpoint(run, tmp_path / str(i), change)
        message = rf"last\.pt was saved with \w+ {found}; expected {expected}"
        with pytest.raises(CheckpointError, match=message):
            Manager.load(other)
        with pytest.raises(CheckpointError, match=message):
            Manager.resume(other)


def test_a_checkpoint_of_other_widths_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    """The weights do not fit the configuration beside them."""
    other = with_checkpoint(run, tmp_path / "other")
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["actor"]["hidden"] = [16, 17]
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    for read in (Manager.load, Manager.resume):
        with pytest.raises(CheckpointError, match=r"last\.pt does not fit its config") as caught:
            read(other)
        assert "[16, 16]" in str(caught.value) and "[17, 16]" in str(caught.value)


def test_a_checkpoint_lacking_a_part_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    for part in ("config", "algorithm", "counters", "sizes"):
        other = with_checkpoint(run, tmp_path / part, lambda state, part=part: state.pop(part))
        for read in (Manager.load, Manager.resume):
            with pytest.raises(CheckpointError, match=r"last\.pt") as caught:
                read(other)
            assert part in str(caught.value)


def test_a_truncated_run_can_go_on_from_its_predecessor(run: Path, tmp_path: Path) -> None:
    """case 28: what the message offers works."""
    other = with_checkpoint(run, tmp_path / "other")
    last = other / "checkpoints" / "last.pt"
    last.with_name("previous.pt").write_bytes((run / "checkpoints" / "previous.pt").read_bytes())
    last.write_bytes(last.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"previous\.pt can be tried instead"):
        Manager.resume(other)
    manager = Manager.resume(other, which="previous")
    assert manager.step == load_state(run, "previous")["counters"]["step"] < 160


# -- run directories -------------------------------------------------------------------------------


def test_a_run_directory_is_named_by_actor_seed_and_time(tmp_path: Path) -> None:
    made = make_run_dir(tiny(tmp_path, san=True, seed=4))
    assert made.parent == tmp_path / "Pendulum-v1"
    assert made.is_dir()
    stem, date, clock = made.name.rsplit("-", 2)
    assert stem == "spiking-s4"
    assert date.isdigit() and len(date) == 8 and clock.isdigit() and len(clock) == 6


def test_automatic_names_never_collide(tmp_path: Path) -> None:
    made = [make_run_dir(tiny(tmp_path)) for _ in range(20)]
    assert len(set(made)) == 20


def test_a_taken_name_is_refused_and_left_alone(tmp_path: Path) -> None:
    config = tiny(tmp_path, name="mine")
    made = make_run_dir(config)
    with pytest.raises(ConfigError, match=r"mine exists; choose another --name.*--resume"):
        make_run_dir(config)
    assert list(made.iterdir()) == []
    with pytest.raises(ConfigError, match="exists"):
        Manager(config).train()
    assert list(made.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "becomes"),
    [("../../away", "away"), ("a/b\\c", "a-b-c"), ("/etc/x", "etc-x"), ("two words!", "two-words"),
     ("~root", "root"), ("--name", "name"), ("ünïcode", "ünïcode")],
)  # fmt: skip
def test_a_name_cannot_leave_the_runs_directory(name: str, becomes: str, tmp_path: Path) -> None:
    made = make_run_dir(tiny(tmp_path / "runs", name=name))
    assert made == tmp_path / "runs" / "Pendulum-v1" / becomes
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("env", ["../../away/Task-v0", "..", "/abs/Task-v0", "space/Task-v0"])
def test_an_environment_cannot_leave_the_runs_directory(env: str, tmp_path: Path) -> None:
    made = make_run_dir(tiny(tmp_path / "runs", env=env, name="run"))
    assert made.resolve().is_relative_to(tmp_path / "runs")
    assert made.name == "run"


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"runs_dir: cannot write .*file"):
        make_run_dir(tiny(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot write"):
        make_run_dir(tiny(tmp_path, name="x" * 300))


def test_a_held_run_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="is in use by another process")
    with locked(tmp_path), refused, locked(tmp_path):
        pass
    with locked(tmp_path):  # let go
        pass


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "not a directory"), (tmp_path, "no config.yaml")):
        with pytest.raises(ConfigError, match=reason) as caught:
            checkpoint.read_config(path)
        assert str(path) in str(caught.value)


def test_a_record_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    """run.json is a note about the run, not part of its state."""
    assert checkpoint.read_record(tmp_path) == {}
    (tmp_path / "run.json").write_text("{half")
    assert checkpoint.read_record(tmp_path) == {}
    checkpoint.write_record(tmp_path, {"status": "finished"})
    assert checkpoint.read_record(tmp_path) == {"format_version": 1, "status": "finished"}


def test_a_checkpoint_is_on_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """case 28: without a sync before the rename, a power cut can leave an empty file."""
    order: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *words, name=name, real=real: (order.append(name), real(*words))[1]
        )
    checkpoint.save(tmp_path / "last.pt", {})
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the directory
