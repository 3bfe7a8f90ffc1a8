"""The controller and what is drawn from: effective sample size, windows, files."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Line, comparable, differences, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sansac import manager as module
from sansac.adaptive import MOST, Controller, effective_sample_size
from sansac.config import Config
from sansac.manager import Manager
from sansac.replay import ReplayBuffer

# -- the measure and the controller ----------------------------------------------------------------


@given(st.lists(st.floats(-600, 600), min_size=1, max_size=50))
def test_effective_sample_size_is_between_one_and_all(logs: list[float]) -> None:
    share = effective_sample_size(torch.tensor(logs))
    assert 1 / len(logs) - 1e-9 <= share <= 1 + 1e-9


def test_effective_sample_size_by_hand() -> None:
    assert effective_sample_size(torch.zeros(8) + 3) == pytest.approx(1)
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    expected = weights.sum() ** 2 / (4 * (weights**2).sum())
    assert effective_sample_size(torch.tensor(weights).log()) == pytest.approx(expected)
    assert effective_sample_size(torch.tensor([0.0, -900.0, -900.0])) == pytest.approx(1 / 3)


@pytest.mark.parametrize("power", [1, -1])
def test_it_moves_the_right_way_inside_its_bounds(power: int) -> None:
    controller = Controller(2.0, low=0.5, high=8.0, target=0.4, power=power)
    assert controller.move(0.4) is False and controller.value == 2
    assert controller.move(0.2) and controller.value == pytest.approx(2 * MOST**-power)
    controller.value = 2.0
    assert controller.move(0.44) and controller.value == pytest.approx(2 * 1.1**power)
    for share, end in ((1e-6, 0.5 if power == 1 else 8.0), (1.0, 8.0 if power == 1 else 0.5)):
        for _ in range(40):
            controller.move(share)
        assert controller.value == pytest.approx(end)
        assert not controller.move(share), "at a bound nothing changes"


def controlled(tmp_path: Path, target: float, **changes: Any) -> list[dict[str, float]]:
    """Rows of a run whose policy moves fast away from its data, or hardly at all."""
    config = tiny(tmp_path, total_steps=260, **changes)
    layer = {"target": target, "every": 2} | changes.get("adaptive", {})
    config = Config(**(config.model_dump() | {"adaptive": layer}))
    manager = Manager(config)
    manager.train()
    rows = [json.loads(line) for line in (manager.directory / "metrics.jsonl").open()]
    return [row for row in rows if "adaptive/effective_sample_size" in row]


@pytest.mark.slow
def test_updates_become_fewer_where_the_data_are_left_behind(tmp_path: Path) -> None:
    """At a target above what there is, and more at one below it; updates follow."""
    moves = {"moves": "update_to_data", "low": 0.1, "high": 3.0}
    few = controlled(tmp_path / "few", 0.99, adaptive=moves, actor={"learning_rate": 1e-2})
    many = controlled(tmp_path / "many", 0.01, adaptive=moves)
    lows = [row["adaptive/update_to_data"] for row in few if "adaptive/update_to_data" in row]
    highs = [row["adaptive/update_to_data"] for row in many if "adaptive/update_to_data" in row]
    assert lows[-1] < 0.5 < 1 < highs[-1]
    assert all(0.1 <= value <= 3.0 for value in lows + highs)
    assert many[-1]["updates"] > 2 * few[-1]["updates"]


def test_batches_grow_where_the_data_are_left_behind(tmp_path: Path) -> None:
    moves = {"moves": "batch_size", "low": 8, "high": 64}
    seen: list[int] = []
    original = ReplayBuffer.sample

    def spy(self: ReplayBuffer, batch_size: int) -> Any:
        seen.append(batch_size)
        return original(self, batch_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplayBuffer, "sample", spy)
        rows = controlled(tmp_path, 0.99, adaptive=moves, actor={"learning_rate": 1e-2})
    assert seen[0] == 16 and 20 < max(seen) <= 64
    assert rows[-1]["adaptive/batch_size"] == pytest.approx(seen[-1], abs=1)


def test_an_ess_window_shrinks_to_data_that_the_policy_still_makes(tmp_path: Path) -> None:
    rows = controlled(
        tmp_path, 0.5, replay={"retention": "ess", "least_ess": 0.999, "capacity": 1000},
        actor={"learning_rate": 1e-2},
    )  # fmt: skip
    windows = [row["replay/window"] for row in rows if "replay/window" in row]
    assert windows[-1] < 0.6 * max(windows) and min(windows) >= 16


def test_a_policy_that_stays_has_all_of_its_own_data(tmp_path: Path) -> None:
    """Without learning, mu is pi: the ratio is 1 but for the warm-up's uniform actions."""
    manager = Manager(tiny(tmp_path, total_steps=200, adaptive={
        "moves": "update_to_data", "low": 0.1}, actor={"learning_rate": 1e-12},
        learning={"learning_starts": 40, "batch_size": 16}, normalize_observations=False,
    ))  # fmt: skip
    ratios: list[torch.Tensor] = []
    control = manager._control

    def spy() -> None:
        ratios.append(manager._log_ratio())
        control()

    manager._control = spy  # type: ignore[method-assign]
    manager.train()
    ratio = torch.cat(ratios)
    uniform = (ratio.abs() > 1e-3).float().mean()
    assert 0 < uniform < 0.6
    assert (ratio.abs() < 1e-3).float().mean() > 0.4


# -- windows and files -----------------------------------------------------------------------------


def numbered(count: int, capacity: int, **options: Any) -> ReplayBuffer:
    shared: dict[str, Any] = {"num_envs": 1, "n_step": 1, "gamma": 0.9, "seed": 0}
    replay = ReplayBuffer(capacity, 1, 1, **(shared | options))
    fill(replay, range(count))
    return replay


def fill(replay: ReplayBuffer, numbers: range) -> None:
    for number in numbers:
        one, no = np.array([[number]], np.float32), np.array([False])
        replay.add(one, one * 0, one[0], one, no, no)


@pytest.mark.parametrize("count", [30, 100, 250])
def test_a_window_draws_the_newest_alike(count: int) -> None:
    """Before the ring is full, when it is, and after it has gone round."""
    replay = numbered(count, 100)
    replay.window = 20
    drawn = replay.sample(20_000).reward.numpy().astype(int)
    counts = np.bincount(drawn - (count - 20), minlength=20)
    assert len(counts) == 20 and chisquare(counts).pvalue > 1e-3


def test_the_window_is_the_configurations(tmp_path: Path) -> None:
    manager = Manager(tiny(tmp_path, replay={"retention": "window", "window": 50}))
    manager.train()
    assert manager.replay.available == 50


def test_rows_in_files_are_those_in_memory(tmp_path: Path) -> None:
    left, right = numbered(130, 100), numbered(130, 100, directory=tmp_path / "rows", slack=40)
    a, b = (np.unique(r.sample(5000).reward.numpy()) for r in (left, right))
    assert np.array_equal(a, b) and len(a) == 100
    assert (tmp_path / "rows" / "reward.bin").stat().st_size == 4 * 140


def test_what_a_checkpoint_saw_is_there_after_more_was_written(tmp_path: Path) -> None:
    """A process that wrote on and died is as if it had not; uint8 stays uint8."""
    options: dict[str, Any] = {
        "directory": tmp_path / "rows", "slack": 50, "observation_dtype": np.uint8
    }  # fmt: skip
    replay = numbered(230, 100, **options)
    state = replay.state_dict()
    assert not state["rows"]
    expected = [replay.sample(64) for _ in range(3)]
    fill(replay, range(1000, 1050))
    again = numbered(0, 100, **options, seed=7)
    assert again.found and again.rows["observation"].dtype == torch.uint8
    again.load_state_dict(state)
    for batch in expected:
        assert all(torch.equal(a, b) for a, b in zip(batch, again.sample(64), strict=True))


def test_a_buffer_beyond_memory_is_refused_only_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "sysconf", lambda name: 1000)
    with pytest.raises(module.ConfigError, match=r"--replay.storage disk"):
        Manager(tiny(tmp_path, replay={"capacity": 1_000_000}))
    Manager(tiny(tmp_path, replay={"capacity": 1_000_000, "storage": "disk"}))


def test_a_run_whose_files_are_gone_says_so_and_refills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = Manager(tiny(tmp_path, total_steps=100, replay={"storage": "disk"}))
    manager.train()
    for file in (manager.directory / "replay").iterdir():
        file.unlink()
    Manager.resume(manager.directory, total_steps=180).train()
    assert "no longer has the rows of last.pt: refilling to 140" in capsys.readouterr().err


@settings(max_examples=30)
@given(first=st.integers(0, 60), later=st.integers(0, 40), again=st.integers(0, 40))
def test_rows_in_files_are_those_of_a_state_or_known_not_to_be(
    first: int, later: int, again: int
) -> None:
    """A process writes on after a checkpoint, ends, and one that went on from there does too."""
    with tempfile.TemporaryDirectory() as directory:

        def opened() -> ReplayBuffer:
            sizes = {"num_envs": 1, "n_step": 1, "slack": 15}
            return ReplayBuffer(20, 1, 1, gamma=0.9, seed=0, directory=Path(directory), **sizes)

        def add(replay: ReplayBuffer, count: int, value: float) -> None:
            for i in range(count):
                row = np.full((1, 1), value + i, np.float32)
                over = np.zeros(1, bool)
                replay.add(row, row, row[0], row, over, over)

        def kept(replay: ReplayBuffer) -> list[float]:
            ages = np.arange(1, replay.available + 1)
            return replay.rows["reward"][(replay.position - ages) % replay.length].tolist()

        replay = opened()
        add(replay, first, 0.0)
        state, expected = replay.state_dict(), kept(replay)
        add(replay, later, 1000.0)
        for value, count in ((2000.0, again), (3000.0, 0)):
            replay = opened()
            assert replay.holds(state) == (max(later, again if value > 2000 else 0) <= 15)
            if not replay.holds(state):
                return
            replay.load_state_dict(state)
            assert kept(replay) == expected
            add(replay, count, value)


@pytest.mark.parametrize("name", ["reward", "observation"])
def test_a_file_of_rows_cut_short_is_not_taken_for_whole(name: str, tmp_path: Path) -> None:
    def opened() -> ReplayBuffer:
        sizes = {"num_envs": 1, "n_step": 1, "slack": 5}
        return ReplayBuffer(20, 2, 1, gamma=0.9, seed=0, directory=tmp_path, **sizes)

    state = opened().state_dict()
    assert opened().holds(state)
    for size in (40, 0):
        os.truncate(tmp_path / f"{name}.bin", size)
        assert not opened().holds(state)


def test_rows_on_disk_leave_a_run_as_it_is_in_memory(tmp_path: Path) -> None:
    """As long as nothing is overwritten, to the bit."""
    changes: dict[str, Any] = {"learning": {"n_step": 3}}
    runs = []
    for storage in ("memory", "disk"):
        config = tiny(tmp_path / storage, replay={"storage": storage}, **changes)
        runs.append(Manager(config))
        runs[-1].train()
    left, right = (comparable(run.directory) for run in runs)
    for part in (left, right):
        del part["state"]["replay"]
    assert not differences(left, right)


def test_a_step_keeps_the_likelihood_of_its_own_action(tmp_path: Path) -> None:
    """With n steps a row tells of its first; the warm-up's is that of uniform actions."""
    config = tiny(
        tmp_path, env="Line", env_kwargs={}, learning={"n_step": 3, "learning_starts": 40},
        replay={"sampler": "proportional", "ratio": 0.5}, actor={"learning_rate": 1e-12},
        normalize_observations=False,
    )  # fmt: skip
    manager = Manager(config, make_env=Line)
    manager.train()
    rows = {key: values[: manager.replay.size] for key, values in manager.replay.rows.items()}
    warm, later = rows["log_prob"][:30], rows["log_prob"][-60:]
    assert torch.allclose(warm, torch.full_like(warm, -2 * math.log(2))) or len(warm) == 0
    algorithm: Any = manager.algorithm
    now = algorithm.log_prob(rows["observation"][-60:], rows["action"][-60:])
    torch.testing.assert_close(later, now, rtol=1e-3, atol=1e-3)
