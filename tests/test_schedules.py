"""Schedules: their values by hand, their text, and that everything scheduled follows them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st

from sansac.config import ConfigError, load_yaml, resolve
from sansac.logger import read_metrics
from sansac.manager import Manager
from sansac.schedules import KINDS, Schedule, at, read

number = st.floats(1e-3, 1e3)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("linear:1:3", [1, 1, 1.5, 2, 2.5, 3, 3]),
        ("linear:1:0.1:0.5..1", [1, 1, 1, 1, 0.55, 0.1, 0.1]),
        ("exponential:1:0.0001", [1, 1, 0.1, 0.01, 0.001, 0.0001, 0.0001]),
        ("cosine:2:0", [2, 2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0, 0]),
        ("cosine:2:0:0.25..0.75", [2, 2, 2, 1, 0, 0, 0]),
    ],
)
def test_values_by_hand(text: str, values: list[float]) -> None:
    schedule = read(text)
    shares = (-0.1, 0.0, 0.25, 0.5, 0.75, 1.0, 1.1)
    assert [at(schedule, share) for share in shares] == pytest.approx(values)


def test_a_schedule_by_return_follows_the_best_so_far() -> None:
    schedule = read("return:2:1:-100..300")
    returns = (None, -200.0, -100.0, 0.0, 100.0, 300.0, 400.0)
    assert [at(schedule, 0.9, best) for best in returns] == [2, 2, 2, 1.75, 1.5, 1, 1]


def test_the_presets_fall_is_what_recorded_runs_had_to_the_bit() -> None:
    """0.1 + 0.9 left / share: the formula of the annealing that this schedule has replaced."""
    schedule = resolve(load_yaml(Path("bipedalwalker"))).learning.rate_factor
    for step in range(0, 150_001, 8):
        left = max(0.0, 1 - step / 150_000)
        assert at(schedule, step / 150_000) == (1.0 if left >= 0.4 else 0.1 + 0.9 * left / 0.4)


@given(
    kind=st.sampled_from(sorted(KINDS)), start=number, end=number,
    share=st.floats(-0.5, 1.5), since=st.floats(0, 0.4), until=st.floats(0.5, 1),
)  # fmt: skip
def test_values_lie_between_the_ends_and_text_gives_the_same(
    kind: str, start: float, end: float, share: float, since: float, until: float
) -> None:
    schedule = Schedule(kind, start, end, since, until)
    assert read(str(schedule)) == schedule
    value = schedule.at(share, share)
    slack = 1e-9 * max(start, end)
    assert min(start, end) - slack <= value <= max(start, end) + slack
    assert schedule.at(since, since) == start and schedule.at(until, until) == end


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fast", "expected a number or KIND"),
        ("linear:1", "expected a number or KIND"),
        ("linear:1:2:3:4", "expected a number or KIND"),
        ("linear:1:x", "expected a number or KIND"),
        ("linear:1:nan", "finite"),
        ("linear:1:2:0.5..0.5", "not below"),
        ("linear:1:2:0.5..2", "shares of training"),
        ("exponential:1:0", "above 0"),
        ("return:1:2", "names no returns"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve({"exploration": {"noise": text}})


def test_both_ends_lie_in_the_options_bounds() -> None:
    with pytest.raises(ConfigError, match="above 0, found linear"):
        resolve({"learning": {"update_to_data": "linear:1:0"}})
    with pytest.raises(ConfigError, match="at most 1, found 2"):
        resolve({"replay": {"correction": 2}})


# -- what follows them -----------------------------------------------------------------------------


def rows(run: Path, tag: str) -> list[tuple[int, float]]:
    return [(row["step"], row[tag]) for row in read_metrics(run / "metrics.jsonl") if tag in row]


def trained(tmp_path: Path, **changes: Any) -> Manager:
    manager = Manager(tiny(tmp_path, **changes))
    manager.train()
    return manager


def test_the_temperature_follows_its_schedule(tmp_path: Path) -> None:
    manager = trained(tmp_path, sac={"temperature": "exponential:1:0.01"})
    seen = rows(manager.directory, "sac/alpha")
    assert len(seen) > 3
    for step, alpha in seen:
        assert alpha == pytest.approx(0.01 ** (step / 160), rel=1e-5)


def test_the_exploration_noise_follows_its_schedule() -> None:
    """The spread of many actions at three points of training."""
    manager = Manager(tiny(algorithm="td3", exploration={"noise": "linear:0.3:0.1"}))
    observation = torch.zeros(4000, 3)
    for progress, sigma in ((0.0, 0.3), (0.5, 0.2), (1.0, 0.1)):
        manager.algorithm.set_progress(progress)
        spread = (manager.algorithm.explore(observation) - manager.algorithm.act(observation)).std()
        assert float(spread) == pytest.approx(sigma, rel=0.1)


def test_the_correction_of_priorities_follows_its_schedule(tmp_path: Path) -> None:
    manager = trained(
        tmp_path, replay={"sampler": "proportional", "correction": "linear:0.4:1:0..0.5"}
    )
    seen = rows(manager.directory, "replay/correction")
    for step, beta in seen:
        assert beta == pytest.approx(min(1.0, 0.4 + 0.6 * step / 80))


def test_updates_to_data_follow_their_schedule(tmp_path: Path) -> None:
    """What is due is the sum over steps of the ratio at each."""
    manager = trained(tmp_path, learning={"update_to_data": "linear:0.25:2"})
    steps = np.arange(42, 161, 2)
    # The ratio that holds between two steps is the one at the first of them.
    due = 2 * sum(0.25 + 1.75 * (step - 2) / 160 for step in steps)
    assert manager.updates == pytest.approx(due, abs=1.5)
