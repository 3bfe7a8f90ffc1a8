"""How long one action takes: in this process, in ONNX, in compiled C; batch 1, one thread."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sansac import export, export_c
from sansac.config import ConfigError
from sansac.energy import play
from sansac.manager import Manager

FILE = "latency.json"  # in a run directory; `compare` reads it
WARM_UP = 200  # actions that are not timed
PERCENTILES = (50, 90, 99, 99.9)
RATES = (50, 100, 500)  # control loops (Hz)


def measure(
    manager: Manager,
    *,
    actions: int = 10_000,
    seconds: float = 2.0,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Percentiles of one action's time, and deadlines that control loops miss, by engine.

    `actions` are timed of each engine, on observations of an episode of the policy, and loops run
    for `seconds` each. An engine that this actor or machine does not have is told as the reason.
    """
    observations, _ = play(manager, 1, 0, lambda _: on_step("an episode"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engines: dict[str, Any] = {}
    try:
        for name, make in (
            ("python", lambda: manager.policy),
            ("onnx", lambda: exported(manager, "onnx")),
            ("c", lambda: exported(manager, "c")),
        ):
            try:
                act = make()
            except ConfigError as error:
                engines[name] = {"absent": str(error)}
                continue
            on_step(f"{name}: {actions} actions")
            engines[name] = percentiles(time_actions(act, observations, actions))
            for rate in RATES:
                on_step(f"{name}: {rate} Hz")
                missed = count_missed(act, observations, rate, round(rate * seconds))
                engines[name][f"missed_{rate}hz"] = missed
    finally:
        torch.set_num_threads(threads)
    return {
        "env": manager.config.env,
        "actor": manager.config.actor_name,
        "checkpoint": manager.loaded_from,
        "step": manager.step,
        "actions": actions,
        "ticks": {f"{rate}hz": round(rate * seconds) for rate in RATES},
        "engines": engines,
    }


def exported(manager: Manager, format: export.Format) -> export.Act:
    """The policy as an exported file that has been loaded back. Raises ConfigError."""
    if format == "c" and export_c.compiler() is None:
        raise ConfigError("there is no C compiler: install gcc or clang")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        export.export(manager, format, out, episodes=0)
        return export.load(format, out)


def time_actions(act: export.Act, observations: np.ndarray, actions: int) -> np.ndarray:
    """Seconds of each call."""
    for i in range(WARM_UP):
        act(observations[i % len(observations)])
    seconds = np.empty(actions)
    for i in range(actions):
        observation = observations[i % len(observations)]
        started = time.perf_counter()
        act(observation)
        seconds[i] = time.perf_counter() - started
    return seconds


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    """By name, in seconds."""
    found = np.percentile(seconds, PERCENTILES).tolist()
    return {f"p{p:g}": value for p, value in zip(PERCENTILES, found, strict=True)}


def count_missed(act: export.Act, observations: np.ndarray, rate: float, ticks: int) -> int:
    """Actions of a control loop that are not there when the next tick comes. Tick k is k / rate
    seconds after the first, however late the one before it was."""
    missed, start = 0, time.perf_counter()
    for k in range(ticks):
        time.sleep(max(0.0, start + k / rate - time.perf_counter()))
        act(observations[k % len(observations)])
        missed += time.perf_counter() > start + (k + 1) / rate
    return missed


ENGINES = {"python": "Python", "onnx": "ONNX", "c": "C"}


def tables(result: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Titles and cells; below, why an engine is missing."""
    engines, ticks = result["engines"], result["ticks"]
    there = {name: found for name, found in engines.items() if "absent" not in found}
    rows = [["an action", *(ENGINES[name] for name in there)]]
    for p in PERCENTILES:
        rows.append([f"p{p:g}, ms", *(f"{1e3 * found[f'p{p:g}']:.3f}" for found in there.values())])
    for rate in RATES:
        missed = [f"{found[f'missed_{rate}hz']}" for found in there.values()]
        rows.append([f"{rate} Hz: deadlines missed of {ticks[f'{rate}hz']:,}", *missed])
    absent = [
        [ENGINES[name], found["absent"]] for name, found in engines.items() if name not in there
    ]
    title = f"{result['env']}, {result['actor']}: {result['actions']:,} actions, batch 1"
    return [(title, rows), ("", [["not there", ""], *absent] if absent else [])]
