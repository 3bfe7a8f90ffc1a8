"""Where an update's time goes, and how cost grows: an update's with batch, width and T, training's
with environments and updates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from benchmarks.contenders import Setup, Turn, running, update, updater
from benchmarks.kernels import take_turns
from sansac.plots import COLORS

ROUNDS = {"us": 5, "steps/s": 3}  # of calls, of whole runs
DENSE: dict[str, Any] = {}
SPIKING: dict[str, Any] = {"san": True}


class Curve(NamedTuple):
    """A turn for each value and actor, and which of its numbers is drawn."""

    label: str
    values: tuple[float, ...]
    turn: Callable[[Setup, float, dict[str, Any]], Turn]
    number: str
    actors: dict[str, dict[str, Any]] = {"dense": DENSE, "spiking": SPIKING}  # noqa: RUF012


def with_batch(setup: Setup, value: float, actor: dict[str, Any]) -> Turn:
    return update(actor)(replace(setup, batch=int(value)))


def with_width(setup: Setup, value: float, actor: dict[str, Any]) -> Turn:
    return update(actor)(replace(setup, hidden=(int(value), int(value))))


def with_steps(setup: Setup, value: float, actor: dict[str, Any]) -> Turn:
    return update(actor, {"spiking": {"time_steps": int(value)}})(setup)


def with_environments(setup: Setup, value: float, actor: dict[str, Any]) -> Turn:
    few = {"learning": {"update_to_data": 1e-9}}
    return running(setup.collected, replace(setup, environments=int(value)), actor, few)


def with_ratio(setup: Setup, value: float, actor: dict[str, Any]) -> Turn:
    """As many updates a turn at every ratio, if that is a step of every environment."""
    steps = max(setup.environments, round(setup.trained / 2 / value))
    return running(steps, setup, actor, {"learning": {"update_to_data": value}})


CURVES = {
    "batch": Curve("transitions in a minibatch", (32, 64, 128, 256, 512, 1024), with_batch, "us"),
    "width": Curve("units a hidden layer", (32, 64, 128, 256, 512), with_width, "us"),
    "T": Curve("simulation steps T", (1, 2, 4, 8, 16), with_steps, "us", {"spiking": SPIKING}),
    "environments": Curve(
        "environments side by side", (1, 2, 4, 8, 16, 32), with_environments, "steps/s"
    ),
    "update_to_data": Curve("updates a step", (0.25, 0.5, 1, 2, 4), with_ratio, "steps/s"),
}
AXES = {"us": ("update", "ms"), "steps/s": ("1,000 environment steps", "s")}


def measure(setup: Setup, quick: bool) -> dict[str, Any]:
    """Of each curve, the medians by actor and value: ms an update, s a 1,000 steps."""
    setup = replace(
        setup, seconds=setup.seconds / 4, collected=setup.collected // 2, wandb="disabled"
    )
    results: dict[str, Any] = {}
    console = Console(stderr=True)
    for name, curve in track(CURVES.items(), "curves", console=console, auto_refresh=False):
        values = curve.values[:2] if quick else curve.values
        turns = {
            (actor, value): curve.turn(setup, value, layer)
            for value in values
            for actor, layer in curve.actors.items()
        }
        rounds = take_turns(turns, 1 if quick else ROUNDS[curve.number])
        results[name] = {actor: [] for actor in curve.actors}
        for (actor, value), measured in rounds.items():
            median = statistics.median(turn[curve.number] for turn in measured)
            cost = median / 1000 if curve.number == "us" else 1000 / median
            results[name][actor].append([value, cost])
    return results


PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "optimiser, averaging": ("aten::_fused_adam_", "aten::_foreach_add_", "aten::_foreach_lerp_"),
}
OPERATIONS, REST = "other torch operations", "C kernels, autograd, Python"


def profile(setup: Setup) -> dict[str, dict[str, float]]:
    """Shares of an update's time by actor, as torch's profiler sees it."""
    return {"dense": shares(setup, DENSE), "spiking": shares(setup, SPIKING)}


def shares(setup: Setup, actor: dict[str, Any], updates: int = 50) -> dict[str, float]:
    """Of the time of so many updates; what the profiler itself takes falls mostly to the rest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    call = updater(setup, actor)
    for _ in range(5):
        call()
    with profiler(activities=[ProfilerActivity.CPU]) as profiled:
        start = time.perf_counter()
        for _ in range(updates):
            call()
        wall = (time.perf_counter() - start) * 1e6
    parts = dict.fromkeys((*PARTS, OPERATIONS, REST), 0.0)
    for event in profiled.key_averages():
        named = (part for part, keys in PARTS.items() if event.key in keys)
        other = OPERATIONS if event.key.startswith("aten::") else REST
        parts[next(named, other)] += event.self_cpu_time_total / wall
    parts[REST] = 1 - sum(share for part, share in parts.items() if part != REST)
    return parts


def draw(results: dict[str, Any], directory: Path) -> Path:
    """All curves of `measure` in one picture, DIR/cost.png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3).flat
    for axes, (name, actors) in zip(panels, results.items(), strict=False):
        curve = CURVES[name]
        what, unit = AXES[curve.number]
        for actor, points in actors.items():
            axes.plot(*zip(*points, strict=True), "o-", ms=4, color=COLORS[actor], label=actor)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        values = [value for value, _ in next(iter(actors.values()))]
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xlabel(curve.label)
        axes.set_ylabel(f"{unit} per {what}")
        axes.grid(alpha=0.3)
    last = figure.axes[len(results)]
    last.axis("off")
    last.legend(*figure.axes[0].get_legend_handles_labels(), loc="center", frameon=False)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "cost.png"
    figure.savefig(path)
    return path
