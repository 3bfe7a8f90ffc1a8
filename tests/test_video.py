"""Videos: the episode that is evaluated, and under it what the actor did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
import torch
from conftest import Line, tiny
from PIL import ImageColor

from sansac.environments import EVALUATION, Episodic, env_factory, episode_seed
from sansac.evaluation import run_episode
from sansac.manager import Manager
from sansac.plots import COLORS
from sansac.video import COLUMN, MARGIN, MAX_ROWS, Overlay, record_video

SPIKE = np.array(ImageColor.getrgb(COLORS["spiking"]))


def agent(san: bool = False, **changes: Any) -> Manager:
    """Some neurons of a spiking one fire, and some do not."""
    manager = Manager(tiny(env="Line", san=san, **changes), make_env=Line)
    if san:
        for layer in manager.algorithm.actor.layers:  # type: ignore[union-attr]
            torch.nn.init.uniform_(layer.linear.bias, -0.5, 1.0)
    return manager


def filmed(manager: Manager) -> gym.Env:
    return env_factory(manager.config, "rgb_array")()


def test_a_video_shows_every_step_of_the_episode(tmp_path: Path) -> None:
    """Frames of 48 x 32 are seven times as large, over a band."""
    path = tmp_path / "videos" / "episode.mp4"
    total = record_video(agent().policy, Line(length=6, render_mode="rgb_array"), 0, path)
    assert total == 81
    frames = iio.imread(path)
    assert frames.shape[::2] == (6, 48 * 7) and frames.shape[1] > 32 * 7
    assert iio.immeta(path)["fps"] == 20
    shades = frames[:, : 32 * 7].mean((1, 2, 3))
    np.testing.assert_allclose(shades, [40, 80, 120, 160, 200, 0], atol=6)
    bands = frames[:, 32 * 7 :].astype(int)
    assert (np.abs(np.diff(bands, axis=0)).max((1, 2, 3)) > 60).all(), "step and return move on"


@pytest.mark.parametrize("san", [False, True])
def test_the_video_is_the_first_episode_of_the_evaluation(tmp_path: Path, san: bool) -> None:
    """case 11: the walker on film is the one whose return is reported."""
    limit = {"max_episode_steps": 20}
    manager = Manager(tiny(env="BipedalWalker-v3", env_kwargs=limit, san=san))
    path = tmp_path / "walker.mp4"
    film = Manager(manager.config)
    total = record_video(film.policy, filmed(film), 4, path)
    assert total == manager.evaluate(episodes=1, seed=4)["returns"][0]
    assert film.evaluate(episodes=1, seed=4) == manager.evaluate(episodes=1, seed=4)
    frames = iio.imread(path)
    assert frames.shape[::2] == (20, 600) and frames.shape[1] > 400
    walker = frames[:, :400]
    changes = np.abs(np.diff(walker.astype(int), axis=0)).mean((1, 2, 3))
    assert (changes > 0).all(), "the walker moves"
    assert len(np.unique(walker[0].reshape(-1, 3), axis=0)) > 10, "there is something to see"


def overlaid(manager: Manager, observations: np.ndarray, width: int) -> np.ndarray:
    """The last picture of an episode of these observations, over white frames of 20 rows."""
    overlay = Overlay(manager.policy)
    frame = np.full((20, width, 3), 255, np.uint8)
    for step, observation in enumerate(observations, 1):
        picture = overlay(frame, observation, step, 1.5 * step)
    assert (picture[:20] == 255).all(), "the frame is left alone"
    return picture[20:]


def rasters(band: np.ndarray) -> list[np.ndarray]:
    """The blocks of rows that hold spikes, as booleans [rows, columns within the margins]."""
    spikes = (band == SPIKE).all(2)[:, MARGIN:-MARGIN]
    rows = np.flatnonzero(spikes.any(1))
    blocks = np.split(rows, np.flatnonzero(np.diff(rows) > 20) + 1)
    return [spikes[block[0] : block[-1] + 1] for block in blocks]


@pytest.mark.parametrize(("steps", "width", "shown"), [(5, 640, 5), (90, 340, 54)])
def test_every_spike_of_the_recent_steps_is_there(steps: int, width: int, shown: int) -> None:
    """Against the actor's own traces; the newest spikes are at the right."""
    manager = agent(san=True, actor={"hidden": [40, 20]})
    observations = np.random.default_rng(0).normal(size=(steps, 2)).astype(np.float32)
    traces = manager.algorithm.policy_actor.trace(torch.from_numpy(observations))  # type: ignore[union-attr]
    drawn = rasters(overlaid(manager, observations, width))
    assert len(drawn) == 2
    for picture, (_, spikes) in zip(drawn, traces, strict=True):
        expected = spikes.bool().numpy().transpose(1, 0, 2)[-shown:].reshape(-1, spikes.shape[2]).T
        assert 0.1 < expected.mean() < 0.9
        tall = MAX_ROWS // len(expected)
        wanted = expected.repeat(tall, 0).repeat(COLUMN, 1)
        fired = np.flatnonzero(wanted.any(1))  # rows of the first and last that fire
        wanted = wanted[fired[0] : fired[-1] + 1]
        assert (picture[:, -wanted.shape[1] :] == wanted).all()
        assert not picture[:, : -wanted.shape[1]].any()


def test_a_wide_layer_is_thinned_and_a_dense_actor_has_no_raster() -> None:
    observations = np.zeros((3, 2), np.float32)
    wide = rasters(overlaid(agent(san=True, actor={"hidden": [256]}), observations, 400))
    assert len(wide) == 1 and 50 < len(wide[0]) <= MAX_ROWS
    dense = overlaid(agent(), observations, 400)
    assert not (dense == SPIKE).all(2).any() and dense.max() > 200 and len(dense) < 40


def test_filming_draws_from_no_stream_of_the_actors() -> None:
    """A Poisson encoder draws spikes: those of the evaluation stay what they are."""
    manager = agent(san=True, spiking={"encoder": "poisson"})
    seed = episode_seed(EVALUATION, 0, 0)
    plain = run_episode(manager.policy, Episodic(Line()), seed)
    overlay, frame = Overlay(manager.policy), np.zeros((8, 400, 3), np.uint8)
    state = torch.random.get_rng_state()
    env = Line()
    overlaid = run_episode(
        manager.policy, Episodic(env), seed, on_step=lambda o, r: [overlay(frame, o, 1, r), None][1]
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert plain[0] == overlaid[0] and (plain[1] == overlaid[1]).all()
