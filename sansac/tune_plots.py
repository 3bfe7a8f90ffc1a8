"""Pictures of a search and of the two short tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator
from scipy.ndimage import gaussian_filter1d

from sansac.page import new_figure
from sansac.plots import COLORS

if TYPE_CHECKING:
    from sansac.probes import LrRange, Probe

# Okabe and Ito's.
BLUE, ORANGE, GREEN = COLORS["dense"], COLORS["spiking"], "#009E73"
# And a dash and a marker each, for print in grey.
LINES = (
    (BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, "-.", "^"), ("#CC79A7", ":", "P"),
    ("#56B4E9", (0, (5, 1)), "D"),
)  # fmt: skip


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


def plot_lr_range(found: LrRange, path: Path) -> None:
    """Loss, its slope and the return against the rate; the suggestion is a line through all."""
    figure = new_figure(7, 7)
    loss, slope, returns = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 2])
    raw = found.actor if found.loss == "actor" else found.critic
    loss.plot(found.rate, raw, color="0.8", lw=0.8, label="a minibatch")
    loss.plot(found.rate, found.smooth, color=BLUE, label="smoothed")
    loss.set(ylabel=f"{found.loss} loss", title=f"{found.title}, learning rate of {found.whose}")
    if found.loss == "critic":
        loss.set_yscale("log")
    slope.axhline(0, color="0.8", lw=0.8)
    slope.plot(found.rate, found.slope, color=BLUE)
    slope.set(ylabel="slope of its log10" if found.loss == "critic" else "its slope")
    there = np.isfinite(found.returns)
    returns.plot(found.rate[there], found.returns[there], "o-", ms=4, color=GREEN)
    returns.set(ylabel="mean return", xlabel="learning rate", xscale="log")
    for axes in (loss, slope, returns):
        axes.grid(alpha=0.3)
        if found.suggestion is not None:
            label = f"suggestion: {found.suggestion:.1e}"
            axes.axvline(found.suggestion, color=ORANGE, ls="--", label=label)
    loss.legend(frameon=False)
    figure.savefig(path)


def plot_optimizers(probes: Sequence[Probe], title: str, path: Path) -> None:
    """Loss and return against updates, a line an optimiser at its best rate."""
    best = {probe.optimizer: probe for probe in reversed(probes)}
    figure = new_figure(9, 3.9)
    loss, returns = figure.subplots(1, 2)
    for (color, dash, marker), probe in zip(LINES, reversed(best.values()), strict=False):
        sigma = max(1.0, len(probe.losses) / 50)
        smooth = gaussian_filter1d(probe.losses, sigma, mode="nearest")
        loss.plot(np.arange(1, len(smooth) + 1), smooth, color=color, ls=dash)
        returns.plot(probe.updates, probe.returns, ls=dash, marker=marker, ms=4, color=color,
                     label=probe.name)  # fmt: skip
    loss.set(xlabel="updates", ylabel="critic loss, smoothed", yscale="log")
    returns.set(xlabel="updates", ylabel="mean return")
    for axes in (loss, returns):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path)
