"""Pictures of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sansac.checkpoint import read_config
from sansac.logger import read_metrics

# Okabe and Ito's colour-blind-safe blue and orange: dense and spiking everywhere.
COLORS = {"dense": "#0072B2", "spiking": "#E69F00"}


def plot_learning_curve(run_dir: Path) -> Path:
    """Returns of training episodes and evaluations against environment steps, a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    config, rows = read_config(run_dir), read_metrics(run_dir / "metrics.jsonl")
    color = COLORS[config.actor_name]
    episodes = np.array(
        [(r["step"], r["train/episode_return"]) for r in rows if "train/episode_return" in r]
    )
    evaluations = np.array(
        [
            [r["step"], *(r[f"eval/return_{k}"] for k in ("mean", "min", "max"))]
            for r in rows
            if "eval/return_mean" in r
        ]
    )
    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if len(episodes):
        axes.scatter(episodes[:, 0], episodes[:, 1], s=5, color="0.7", label="training episode")
    if len(evaluations):
        step, mean, low, high = evaluations.T
        axes.fill_between(step, low, high, color=color, alpha=0.2, lw=0, label="evaluation, range")
        axes.plot(step, mean, "o-", ms=3, color=color, label="evaluation, mean")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("undiscounted return")
    axes.set_title(f"{config.env}, {config.actor_name} actor, seed {config.seed}")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(loc="best", frameon=False)
    path = run_dir / "plots" / "learning_curve.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    return path
