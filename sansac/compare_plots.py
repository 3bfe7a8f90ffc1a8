"""Pictures of a comparison: every group has a colour, and a dash or a marker for print in grey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sansac.page import Line, ink, new_figure
from sansac.plots import COLORS

if TYPE_CHECKING:
    from sansac.compare import Comparison, Curve, Group, Improvement

AXES = {
    "step": "environment steps",
    "updates": "gradient updates",
    "minutes": "minutes of collecting and learning",
}


class Look(NamedTuple):
    color: str
    dash: str
    marker: str


ACTORS = {
    "dense": Look(COLORS["dense"], "-", "o"),
    "spiking": Look(COLORS["spiking"], "--", "s"),
}
# The rest of Okabe and Ito's colours.
OTHERS = [
    Look("#009E73", "-", "^"), Look("#D55E00", "--", "v"), Look("#56B4E9", "-.", "D"),
    Look("#CC79A7", ":", "P"), Look("#0072B2", (0, (5, 1)), "X"),  # type: ignore[arg-type]
    Look("#E69F00", (0, (3, 1, 1, 1)), "*"),  # type: ignore[arg-type]
]  # fmt: skip


def looks(groups: Sequence[Group]) -> dict[str, Look]:
    """How each group is drawn; the two actors look the same everywhere."""
    names = [group.name for group in groups]
    taken = {ACTORS[name].color for name in names if name in ACTORS}
    free = [look for look in OTHERS if look.color not in taken]
    others = [name for name in names if name not in ACTORS]
    colors, dashes, markers = zip(*free, strict=True)
    found, n = dict(ACTORS), len(free)
    for i, name in enumerate(others):  # a colour that comes again has another dash and marker
        k = i // n
        found[name] = Look(colors[i % n], dashes[(i + k) % n], markers[(i + 2 * k) % n])
    return found


def draw_curves(comparison: Comparison) -> Figure:
    """Evaluations against environment steps, updates and minutes."""
    figure = new_figure(11, 3.9 + 0.1 * max(0, len(comparison.groups) - 8))
    panels = figure.subplots(1, len(AXES), sharey=True)
    look = looks(comparison.groups)
    for axes, (axis, label) in zip(panels, AXES.items(), strict=True):
        for group in comparison.groups:
            draw_curve(axes, comparison, group, axis, look[group.name])
        if comparison.threshold is not None:
            solved = f"threshold, {comparison.threshold:g}"
            axes.axhline(comparison.threshold, color=ink(), lw=0.9, ls=":", label=solved)
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(thousands))
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("mean return of an evaluation")
    handles, labels = panels[0].get_legend_handles_labels()
    columns = min(4, len(labels), 120 // (max(map(len, labels)) + 12))  # of some 120 letters
    figure.legend(
        handles, labels, loc="outside upper center", ncols=max(columns, 1), handlelength=3.5
    )
    return figure


def thousands(x: float, _: int) -> str:
    return f"{x / 1e3:g}k" if x >= 1e3 else f"{x:g}"


def draw_curve(axes: Axes, comparison: Comparison, group: Group, axis: str, look: Look) -> None:
    for run in group.runs:
        points = run.evaluations
        axes.plot(points[axis], points["return"], color=look.color, lw=0.7, alpha=0.45)
    x, iqm, low, high = comparison.curves[axis][group.name]
    axes.fill_between(x, low, high, color=look.color, alpha=0.2, lw=0)
    label = f"{group.name}, {group.seeds}"
    marker: dict[str, Any] = {"marker": look.marker, "ms": 4 if len(x) < 40 else 0}
    axes.plot(x, iqm, color=look.color, ls=look.dash, lw=2, label=label, **marker)


def draw_final(comparison: Comparison) -> Figure:
    """Seeds of each group, their IQM and its interval."""
    groups = comparison.groups
    figure = new_figure(11, 0.5 * len(groups) + 1.0)
    axes, look = figure.subplots(), looks(groups)
    for i, (group, row) in enumerate(zip(groups, comparison.summaries, strict=True)):
        if not group.finished:
            continue
        color, _, marker = look[group.name]
        axes.plot(group.scores, np.full(len(group.scores), i + 0.16), marker, ms=5, color=color,
                  alpha=0.7, ls="none", mec=ink(), mew=0.4)  # fmt: skip
        axes.hlines(i - 0.12, row["low"], row["high"], color=color, lw=4, alpha=0.6)
        axes.plot(row["iqm"], i - 0.12, "D", ms=7, color=color, mec=ink())
    name_rows(axes, [group.name for group in groups])
    axes.set_xlabel("mean return of a seed's final evaluation")
    return figure


def draw_improvement(improvements: Sequence[Improvement]) -> Figure:
    figure = new_figure(11, 0.4 * len(improvements) + 1.0)
    axes = figure.subplots()
    for i, (_, _, probability, (low, high)) in enumerate(improvements):
        axes.hlines(i, low, high, color=ink(), lw=4, alpha=0.35)
        axes.plot(probability, i, "D", ms=7, color=ink())
    axes.axvline(0.5, color=ink(), lw=0.8, ls=":")
    name_rows(axes, [f"{better} over {than}" for better, than, *_ in improvements])
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("probability that a seed of the first scores higher")
    return figure


def draw_pareto(groups: Sequence[Group]) -> Figure:
    """Score against modelled joules, arithmetic alone and with memory traffic."""
    figure, look = new_figure(11, 4.2), looks(groups)
    panels = figure.subplots(1, 2, sharey=True)
    labels = {"arithmetic": "arithmetic", "with_memory": "with memory traffic"}
    for axes, (kind, label) in zip(panels, labels.items(), strict=True):
        points: list[tuple[float, float]] = []
        for group in groups:
            runs = [run for run in group.finished if run.account]
            if not runs:
                continue
            color, _, marker = look[group.name]
            scores = [run.score for run in runs]
            found = [1e9 * run.joules("agent", kind) for run in runs]
            points += zip(found, scores, strict=True)
            axes.plot(
                found, scores, marker, ms=7, color=color, mec=ink(), mew=0.4, label=group.name
            )
            dense = [run for run in runs if not run.config.san]
            whole = [1e9 * run.joules("dense_all", kind) for run in dense]
            axes.plot(whole, [run.score for run in dense], marker, ms=7, color=color, mfc="none")
            points += zip(whole, [run.score for run in dense], strict=True)
        axes.step(*front(points), where="post", color=ink(), lw=0.9, ls=":")
        axes.set_xlim(left=0)
        axes.set_xlabel(f"nJ an action, modelled, {label}")
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("mean return of the final evaluation")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=min(4, len(names)))
    return figure


def front(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Energies and scores of the points that no other beats in both, by energy."""
    energies: list[float] = []
    scores: list[float] = []
    for energy, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not scores or score > scores[-1]:
            energies.append(energy)
            scores.append(score)
    return energies, scores


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """The first row on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(alpha=0.25, axis="x")
    axes.tick_params(axis="y", length=0)


def curve_lines(comparison: Comparison) -> list[list[Line]]:
    """What `draw_curves` draws of the groups."""
    return [
        [line_of(comparison, name, curve) for name, curve in comparison.curves[axis].items()]
        for axis in AXES
    ]


def profile_lines(comparison: Comparison) -> list[list[Line]]:
    """What `draw_profile` draws."""
    profiles = comparison.profiles
    return [[line_of(comparison, name, profile) for name, profile in profiles.items()]]


def line_of(comparison: Comparison, name: str, curve: Curve) -> Line:
    return Line(name, looks(comparison.groups)[name].color, *curve)


def draw_profile(comparison: Comparison) -> Figure:
    """Share of seeds above each return."""
    figure = new_figure(11, 3.8)
    axes, look = figure.subplots(), looks(comparison.groups)
    for group in comparison.groups:
        if not group.finished:
            continue
        color, dash, _ = look[group.name]
        returns, share, low, high = comparison.profiles[group.name]
        axes.fill_between(returns, low, high, color=color, alpha=0.15, lw=0)
        label = f"{group.name}, {group.seeds}"
        axes.plot(returns, share, color=color, ls=dash, lw=2, label=label)
    axes.set_xlabel("return")
    axes.set_ylabel("share of seeds that score above it")
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside upper center", ncols=min(4, len(comparison.profiles)),
                  handlelength=3.5)  # fmt: skip
    return figure
