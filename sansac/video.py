"""A policy on film: frames of an episode, and under each its numbers and its neurons' spikes."""

from __future__ import annotations

import itertools
import math
from collections import deque
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from sansac.environments import EVALUATION, Episodic, episode_seed
from sansac.evaluation import Policy, run_episode
from sansac.plots import COLORS

MAX_FRAMES = 5_000
MIN_WIDTH = 320  # pixels; smaller frames are enlarged, so that there is room for text
MAX_ROWS = 80  # neurons of a layer that are shown
COLUMN = 3  # pixels of a simulation step
MARGIN = 8
PAPER, STRIPE, INK, SOFT = "#16191d", "#22272d", "#dfe3e8", "#9aa4ae"


def record_video(policy: Policy, env: gym.Env, seed: int, path: Path) -> float:
    """Film one deterministic episode to an MP4 file; returns its return.

    The environment must have been made with `render_mode="rgb_array"`.
    """
    import imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    frames_per_second = env.metadata.get("render_fps") or 30
    env = Episodic(env)
    # A frame at a time: an episode's frames together would be a gigabyte.
    writer: Any = imageio.get_writer(path, fps=frames_per_second, macro_block_size=2)
    overlay, steps = Overlay(policy), itertools.count(1)

    def film(observation: np.ndarray, total: float) -> None:
        step = next(steps)
        if step <= MAX_FRAMES:
            frame = np.asarray(env.render(), np.uint8)
            writer.append_data(overlay(frame, observation, step, total))

    try:
        total, _ = run_episode(policy, env, episode_seed(EVALUATION, seed, 0), on_step=film)
    finally:
        writer.close()
        env.close()
    return total


class Overlay:
    """The band under the frames of an episode: step, return so far and, of a spiking actor, the
    spikes of the last control steps, the newest at the right.

    A row is a neuron, a column a simulation step; the ground changes with every control step.
    Of a layer wider than MAX_ROWS every n-th neuron is shown.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.actor = policy.algorithm.config.actor_name
        self.recent: deque[list[np.ndarray]] = deque()
        self.step = 0

    def __call__(
        self, frame: np.ndarray, observation: np.ndarray, step: int, total: float
    ) -> np.ndarray:
        """The frame [H, W, 3] after `step`, taken at `observation` [obs], with its band."""
        enlarged = math.ceil(MIN_WIDTH / frame.shape[1])
        frame = frame.repeat(enlarged, 0).repeat(enlarged, 1)
        self.step = step
        self.recent.append(self.policy.spikes(observation))
        band = self.band(frame.shape[1], total)
        odd = np.zeros((band.shape[0] % 2 ^ frame.shape[0] % 2, *band.shape[1:]), np.uint8)
        return np.concatenate([frame, band, odd])

    def band(self, width: int, total: float) -> np.ndarray:
        """[H, width, 3]: a line of numbers, and a line and a raster a layer."""
        layers, line = len(self.recent[-1]), self.font.size + MARGIN
        rasters = [self.raster(i, width - 2 * MARGIN) for i in range(layers)]
        height = line + sum(line + len(raster) for raster in rasters) + MARGIN
        image = Image.new("RGB", (width, int(height)), PAPER)
        draw = ImageDraw.Draw(image)
        text = f"{self.actor} actor   step {self.step:,}   return {total:,.1f}"
        draw.text((MARGIN, MARGIN // 2), text, INK, self.font)
        top = line
        for i, raster in enumerate(rasters):
            draw.text((MARGIN, top + MARGIN // 2), self.caption(i), SOFT, self.font)
            image.paste(Image.fromarray(raster), (MARGIN, int(top + line)))
            top += line + len(raster)
        return np.asarray(image)

    @cached_property
    def font(self) -> Any:
        return ImageFont.load_default(13)

    def caption(self, layer: int) -> str:
        neurons = self.recent[-1][layer].shape[1]
        rate = np.mean([spikes[layer] for spikes in self.recent])
        every = math.ceil(neurons / MAX_ROWS)
        shown = f", one in {every} shown" if every > 1 else ""
        return f"layer {layer}: firing rate {rate:.2f}, {neurons} neurons{shown}"

    def raster(self, layer: int, width: int) -> np.ndarray:
        """The spikes of the control steps that have room, [rows, width, 3]."""
        time_steps, neurons = self.recent[-1][layer].shape
        room = max(1, width // (COLUMN * time_steps))
        while len(self.recent) > room:
            self.recent.popleft()
        every = math.ceil(neurons / MAX_ROWS)
        spikes = np.concatenate([step[layer] for step in self.recent])[-width // COLUMN :, ::every]
        ends = np.arange(self.step * time_steps - len(spikes), self.step * time_steps)
        ground = np.array([ImageColor.getrgb(PAPER), ImageColor.getrgb(STRIPE)], np.uint8)
        image = np.where(
            spikes.T[..., None],
            np.array(ImageColor.getrgb(COLORS["spiking"]), np.uint8),
            ground[ends // time_steps % 2],
        )
        tall = max(1, MAX_ROWS // len(image))
        image = image.repeat(tall, 0).repeat(COLUMN, 1)
        empty = np.broadcast_to(ground[0], (len(image), width - image.shape[1], 3))
        return np.concatenate([empty, image], 1)
