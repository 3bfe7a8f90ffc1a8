"""Timing of one action: engines, percentiles and deadlines."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import Call, tiny
from test_export import STACKS, agent

from sansac import export_c, latency
from sansac.manager import Manager


class Sleeper:
    """An action that takes as long as it is told, its own clock included."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = iter(seconds)

    def __call__(self, _: np.ndarray) -> np.ndarray:
        time.sleep(next(self.seconds))
        return np.zeros(1)


def test_percentiles_are_of_the_times_told() -> None:
    found = latency.percentiles(np.arange(1, 1002) / 1000)
    assert found == pytest.approx({"p50": 0.501, "p90": 0.901, "p99": 0.991, "p99.9": 1.0})


def test_what_takes_longer_is_measured_so() -> None:
    seconds = [0.0] * latency.WARM_UP + [0.002, 0.02, 0.002]
    measured = latency.time_actions(Sleeper(seconds), np.zeros((2, 1)), 3)
    assert measured[1] > 0.02 and (measured >= 0.002).all()


def test_missed_deadlines_are_counted() -> None:
    """A late action also costs those that it delays: 0.25 s at 10 Hz ends after two more ticks."""
    seen = np.zeros((1, 1))
    assert latency.count_missed(Sleeper([0.0] * 5), seen, 5, 5) == 0
    assert latency.count_missed(Sleeper([0.0, 0.25, 0.0, 0.0, 0.0, 0.0]), seen, 10, 6) == 2


def test_the_command_times_every_engine(tmp_path: Path, call: Call) -> None:
    manager = Manager(tiny(tmp_path, san=True))
    manager.train()
    run, words = manager.directory, ("--actions", 50, "--seconds", 0.1)
    code, stdout, _ = call("latency", run, *words)
    assert code == 0
    for told in ("Python", "ONNX", "C", "p99.9", "500 Hz: deadlines missed of 50"):
        assert told in stdout
    code, stdout, _ = call("latency", run, *words, "--json")
    result = json.loads(stdout)
    assert code == 0 and result == json.loads((run / latency.FILE).read_text())
    for found in result["engines"].values():
        times = [found[f"p{p:g}"] for p in latency.PERCENTILES]
        assert times == sorted(times) and times[0] > 0
        assert all(0 <= found[f"missed_{rate}hz"] <= rate * 0.1 for rate in latency.RATES)
    code, _, stderr = call("latency", run, "--actions", 0)
    assert code == 2 and "--actions" in stderr


def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = agent(tmp_path / "agent", **(STACKS["lif"] | {"spiking": {"encoder": "poisson"}}))
    engines = latency.measure(manager, actions=3, seconds=0.02)["engines"]
    assert "random" in engines["onnx"]["absent"] and engines["python"]["p50"] > 0
    monkeypatch.setattr(export_c, "compiler", lambda: None)
    tables = latency.tables(latency.measure(manager, actions=3, seconds=0.02))
    assert any("no C compiler" in row[1] for row in tables[1][1])
