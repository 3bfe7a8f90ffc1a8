"""The learning curve: what is drawn is what was logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pytest
from conftest import tiny
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.image import imread

from sansac.checkpoint import write_config
from sansac.plots import COLORS, plot_learning_curve

ROWS: list[dict[str, Any]] = [
    {"step": 40, "train/episode_return": -3.0},
    {"step": 80, "train/episode_return": 5.0},
    {"step": 80, "eval/return_mean": 1.0, "eval/return_min": -2.0, "eval/return_max": 4.0},
    {"step": 160, "eval/return_mean": 8.0, "eval/return_min": 7.0, "eval/return_max": 9.0},
]


@pytest.fixture
def axes_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plots rows of metrics; gives the axes that were drawn, and the picture."""
    figures: list[matplotlib.figure.Figure] = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure: matplotlib.figure.Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)

    def plot(rows: list[dict[str, Any]], **config: Any) -> tuple[Axes, np.ndarray]:
        write_config(tiny(**config), tmp_path)
        lines = (json.dumps({"updates": 0, "time": 0.0, **row}) + "\n" for row in rows)
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
        path = plot_learning_curve(tmp_path)
        assert path == tmp_path / "plots" / "learning_curve.png"
        return figures[-1].axes[0], imread(path)

    return plot


@pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])
def test_the_curve_shows_episodes_and_evaluations(san: bool, axes_of: Any) -> None:
    axes, picture = axes_of(ROWS, san=san, seed=6)
    actor = "spiking" if san else "dense"
    assert axes.get_title() == f"Pendulum-v1, {actor} actor, seed 6"
    assert axes.get_xlabel() == "environment steps"
    assert axes.get_ylabel() == "undiscounted return"
    (line,) = axes.get_lines()
    np.testing.assert_array_equal(line.get_xydata(), [[80, 1], [160, 8]])
    assert to_hex(line.get_color()).upper() == COLORS[actor]
    episodes, band = axes.collections
    np.testing.assert_array_equal(episodes.get_offsets(), [[40, -3], [80, 5]])
    corners = {tuple(point) for point in band.get_paths()[0].vertices}
    assert {(80, -2), (80, 4), (160, 7), (160, 9)} <= corners
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["training episode", "evaluation, range", "evaluation, mean"]
    assert picture.shape == (504, 840, 4)
    assert len(np.unique(picture.reshape(-1, 4), axis=0)) > 50


def test_a_run_without_episodes_or_evaluations_has_a_curve_too(axes_of: Any) -> None:
    for rows, lines in ((ROWS[:2], 0), (ROWS[2:], 1), ([], 0)):
        axes, picture = axes_of(rows)
        assert len(axes.get_lines()) == lines
        assert axes.get_ylabel() and picture.size
