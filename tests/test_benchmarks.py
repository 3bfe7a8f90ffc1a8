"""The training benchmark: what it counts as products, and that each of its parts runs. No timing is
asserted: a test's machine is never quiet."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import tiny
from matplotlib.image import imread
from torch.nn.utils import parameters_to_vector
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import contenders, converted, costs, minutes, reference, train
from benchmarks.contenders import QUICK, Setup
from sansac.algorithm import SAC
from sansac.config import load_yaml
from sansac.evaluation import evaluate
from sansac.manager import Manager

FAST = (
    "update", "limit", "spiking-t2-linear", "quantiles", "sampling", "buffer", "collect", "logging",
    "action", "action-slow",
)  # fmt: skip


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The benchmark sets torch's threads for its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["dense", "spiking", "popsan"])
def test_the_products_of_an_update_are_those_that_torch_counts(name: str) -> None:
    layers = {"dense": {}, "spiking": contenders.spiking(5, "shared")}
    layer: dict[str, Any] = layers[name] if name in layers else load_yaml(Path(name))
    setup = Setup(batch=16)
    update, products = contenders.updater(setup, layer), contenders.product_calls(setup, layer)
    update()
    with FlopCounterMode(display=False) as expected:
        update()
    with FlopCounterMode(display=False) as found:
        for product in products:
            product()
    assert found.get_total_flops() == expected.get_total_flops()


def test_the_products_of_a_dense_update_are_those_of_its_equations() -> None:
    """Passes: actor on both observations, its gradients; target, online critics and their
    gradients, critics in the actor's loss and their gradient with respect to actions."""
    actor, head, critic, value = 24 * 256, 256 * 256, 28 * 256, 256
    actor_pass, critics_pass = actor + head + 2 * 256 * 4, 2 * (critic + head + value)
    gradients = actor_pass + (actor_pass - actor) + critics_pass + (critics_pass - 2 * critic)
    to_actions = 2 * (4 * 256 + head + value)
    products = 2 * actor_pass + 3 * critics_pass + gradients + to_actions
    calls = contenders.product_calls(Setup())
    with FlopCounterMode(display=False) as found:
        for product in calls:
            product()
    assert found.get_total_flops() == 2 * 256 * products


def test_quick_rows_give_a_table_a_file_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "train.json", tmp_path / "page.md"
    page.write_text(
        "before\n<!-- measured: cpu, 1 thread -->\nold\n<!-- end: cpu, 1 thread -->\nafter\n"
    )
    train.main(["--quick", "--rows", *FAST, "--out", str(out), "--markdown", str(page)])
    report = json.loads(out.read_text())
    assert report.keys() == {"machine", "setup", "rows", "rounds", "skipped"}
    assert {"machine", "cores", "threads", "load", "commit", "versions"} <= report["machine"].keys()
    assert [row["name"] for row in report["rows"]] == [r.name for r in train.CPU if r.name in FAST]
    for row in report["rows"]:
        assert row.keys() >= {"what", "of", "to", "target", "at_most", "unit"}
        assert math.isfinite(row["value"]), row
        assert row["met"] is ((row["value"] <= row["target"]) == row["at_most"]), row
    assert not report["skipped"]
    assert all(len(turns) == 2 for turns in report["rounds"].values())
    shown, text = capsys.readouterr().out, page.read_text()
    assert text.startswith("before\n<!--") and text.endswith("-->\nafter\n") and "old" not in text
    for row in report["rows"]:
        assert f"| {row['name']} | {row['what']} |" in text
        assert row["name"] in shown


def test_the_verdict_is_that_of_the_medians() -> None:
    rounds = {
        "a": [{"us": 6.0}, {"us": 5.0}, {"us": 99.0}],
        "b": [{"us": 2.0}, {"us": 1.0}, {"us": 3.0}],
    }
    for target, at_most, unit, met in (
        (3.0, False, "x", True), (3.1, False, "x", False), (3.0, True, "x", True),
        (2.9, True, "x", False), (299.0, False, "%", True), (None, False, "x", None),
    ):  # fmt: skip
        row = train.Row("r", "", ("a", "us"), ("b", "us"), target, at_most, unit)
        (result,) = train.assess([row], rounds)
        assert result["value"] == (300.0 if unit == "%" else 3.0)
        assert result["met"] is met
    (result,) = train.assess([train.Row("r", "", ("a", "us"), ("absent", "us"))], rounds)
    assert result["value"] is result["met"] is None


def test_a_peer_that_is_absent_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = train.main(["--quick", "--rows", "cores-sbx"])
    assert report["rows"][0]["value"] is report["rows"][0]["met"] is None
    assert "requirements-bench.txt" in report["skipped"]["SBX learn"]
    assert "sbx is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "updat"], "unknown updat; choose from update, "),
        (["--threads", "0"], "at least 1, found 0"),
        (["--out", "/nowhere/x.json"], "there is no directory /nowhere"),
        (["--device", "cuda"], "torch sees no GPU"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        train.main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_every_row_has_its_contenders() -> None:
    known = {name for family in contenders.FAMILIES.values() for name in family}
    for rows in train.ROWS.values():
        assert len({row.name for row in rows}) == len(rows)
        assert all(row.contenders() <= known for row in rows)
    assert contenders.FAMILIES.keys() == train.ROUNDS.keys()
    assert all(n >= 5 for family, n in train.ROUNDS.items() if family != "memory")


def test_curves_are_drawn(tmp_path: Path) -> None:
    points = [[value, 1.0 + value] for value in (1, 2, 4)]
    results = {name: dict.fromkeys(c.actors, points) for name, c in costs.CURVES.items()}
    path = costs.draw(results, tmp_path / "new")
    assert path == tmp_path / "new" / "cost.png"
    assert imread(path).shape == (720, 1200, 4)


def test_the_profile_is_the_whole_update() -> None:
    shares = costs.shares(Setup(**QUICK), costs.DENSE, updates=3)  # type: ignore[arg-type]
    assert sum(shares.values()) == pytest.approx(1)
    assert all(0 < share < 1 for share in shares.values())


@pytest.mark.parametrize("part", ["averaging", "critics", "drop", "quantiles"])
def test_plain_forms_learn_what_ours_learn(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an ablation row puts in place of a part differs from it in speed alone."""
    learned = []
    for contender in ("preset", f"preset, {part}"):
        made: list[SAC] = []

        def make(*arguments: Any, made: list[SAC] = made) -> SAC:
            made.append(SAC(*arguments))
            return made[0]

        monkeypatch.setattr(contenders, "SAC", make)
        setup = Setup(batch=32, hidden=(16, 16), seconds=0)
        contenders.FAMILIES["updates"][contender](setup)()
        learned.append(parameters_to_vector(made[0].critic.parameters()))
    torch.testing.assert_close(learned[0], learned[1], rtol=1e-3, atol=1e-5)


def test_minutes_end_where_fresh_episodes_return_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few episodes make a candidate, others decide; a run that never gets there is endless."""
    monkeypatch.setattr(minutes, "EPISODES", 3)
    monkeypatch.setattr(minutes, "WANTED", -math.inf)
    found = minutes.run(tiny(san=True))
    assert found["found"] and found["step"] == 80  # the first evaluation after an update
    (candidate,) = found["candidates"]
    assert candidate["return_min"] <= candidate["return_mean"]
    monkeypatch.setattr(minutes, "WANTED", 0.0)  # no pendulum returns more
    missed = minutes.run(tiny())
    assert not missed["found"] and missed["step"] == 160 and missed["candidates"] == []
    assert 0 < missed["minutes"] < missed["minutes_in_all"]
    report = {"machine": train.machine(Setup()), "runs": [missed, {**missed, "seed": 1}]}
    assert "| dense | 1 | not in" in minutes.markdown(report)
    assert minutes.verdict(report["runs"]).startswith("dense: median seed inf minutes")
    assert minutes.verdict([found]).endswith("met")


@pytest.mark.slow
def test_all_of_it_runs(tmp_path: Path) -> None:
    report = train.main(["--quick", "--curves", str(tmp_path)])
    skipped = set(report["skipped"])
    assert skipped <= {"SBX learn"}
    for row in report["rows"]:
        assert (row["value"] is None) == (skipped & {row["of"][0], *(row["to"] or ())[:1]} != set())
    assert {name: len(c["spiking"]) for name, c in report["curves"].items()} == dict.fromkeys(
        costs.CURVES, 2
    )
    assert (tmp_path / "cost.png").exists()


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_converted_agent_nears_the_dense_one_with_time(
    batch_norm: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = Manager(tiny(tmp_path, name="run", actor={"batch_norm": batch_norm}))
    manager.train()
    out = tmp_path / "converted.json"
    words = [str(manager.run_dir), "--episodes", "3", "--time-steps", "1", "256"]
    converted.main([*words, "--out", str(out)])
    dense, *rows = json.loads(out.read_text())["rows"]
    assert dense["returns"] == pytest.approx(manager.evaluate(3)["returns"], rel=1e-4)
    assert [row["time_steps"] for row in rows] == [1, 256, 1, 256]
    for once, long in zip(rows[::2], rows[1::2], strict=True):
        far, near = (np.abs(np.subtract(row["returns"], dense["returns"])) for row in (once, long))
        assert near.mean() < far.mean()
    assert "converted, 99.9%" in capsys.readouterr().out


def test_a_spiking_agent_is_not_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = Manager(tiny(tmp_path, name="run", san=True))
    manager.train()
    for words in ([str(manager.run_dir)], [str(tmp_path / "none")], [".", "--out", "none/a.json"]):
        with pytest.raises(SystemExit, match="2"):
            converted.main(words)
    told = capsys.readouterr().err
    assert "dense actor" in told and "none" in told and "no directory none" in told


def test_the_reference_is_scored_in_the_episodes_of_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pendulum.json"
    words = ["Pendulum-v1", "--episodes", "2", "--out", str(out)]
    reference.main([*words, "--total-steps", "200", "--seeds", "3"])
    (first,) = json.loads(out.read_text())["runs"]
    assert first["seed"] == 3 and len(first["returns"]) == 2
    reference.main([*words, "--total-steps", "200", "--seeds", "3", "4"])
    assert [run["seed"] for run in json.loads(out.read_text())["runs"]] == [3, 4]
    assert json.loads(out.read_text())["runs"][0] == first, "no seed is run twice"
    assert "IQM over seeds" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        reference.main([*words, "--total-steps", "201"])
    assert "choose another file" in capsys.readouterr().err

    class Still:
        def predict(self, observation: Any, deterministic: bool) -> tuple[Any, None]:
            return self(observation), None

        def __call__(self, observation: Any) -> Any:
            return np.zeros(1, np.float32)

        def firing_rates(self, observations: Any) -> None:
            return None

    def pendulum() -> gym.Env:
        return gym.make("Pendulum-v1")

    ours = evaluate(Still(), pendulum, episodes=3, seed=0)  # type: ignore[arg-type]
    theirs = reference.score(Still(), pendulum, 3)  # type: ignore[arg-type]
    assert ours and theirs == ours["returns"]


def test_the_references_rate_falls_as_rl_zoo_says() -> None:
    found = reference.settings("LunarLander-v3", 100_000)
    assert [found["learning_rate"](left) for left in (1.0, 0.5, 0.0)] == [7.3e-4, 3.65e-4, 0.0]
    assert found["buffer_size"] == 100_000
