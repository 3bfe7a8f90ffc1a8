"""Pictures of a search and of the two short tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from sansac.page import new_figure
from sansac.plots import COLORS

BLUE, ORANGE, GREEN = COLORS["dense"], COLORS["spiking"], "#009E73"


def plot_history(trials: Sequence[tuple[int, float, str]], title: str, path: Path) -> None:
    """Number, score and state of every trial that has a score, and the best score so far."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    looks = {"finished": ("o", BLUE), "pruned": ("x", "0.6")}
    for state, (marker, color) in looks.items():
        points = [(number, score) for number, score, of in trials if of == state]
        if points:
            label = state if state == "finished" else f"{state}, its last evaluation"
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, marker=marker, color=color, s=22, label=label)
    done = np.array([(number, score) for number, score, state in trials if state == "finished"])
    best = np.maximum.accumulate(done[:, 1])
    axes.step(done[:, 0], best, where="post", color=ORANGE, label="best so far")
    axes.set(xlabel="trial", ylabel="score: mean final return", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


def plot_importances(shares: dict[str, float], title: str, path: Path) -> None:
    """How much each option sets good trials apart, largest on top."""
    figure = new_figure(7, 1.1 + 0.32 * len(shares))
    axes = figure.subplots()
    names = sorted(shares, key=lambda name: shares[name])
    bars = axes.barh(names, [shares[name] for name in names], color=BLUE, height=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set(xlabel="importance (PED-ANOVA, finished trials)", title=title)
    axes.set_xlim(0, 1.12 * max(shares.values()))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
