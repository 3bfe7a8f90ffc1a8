"""Environments at fault, each in its own way."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box


class Sound(gym.Env):
    """Ten steps an episode. What breaks its heirs breaks at step `at` of the environment's life, in
    one of its copies where `only` counts them."""

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Box(-1.0, 1.0, (1,))
    made = 0
    length = 10

    def __init__(self, at: int = 60, only: int = -1, render_mode: str | None = None) -> None:
        self.number, type(self).made = type(self).made, type(self).made + 1
        self.at, self.only, self.render_mode = at, only, render_mode
        self.life = self.k = 0

    @property
    def due(self) -> bool:
        return self.life >= self.at and self.only in (-1, self.number)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.k = 0
        return self.observe(), {}

    def step(self, action: np.ndarray) -> Any:
        self.k, self.life = self.k + 1, self.life + 1
        return self.observe(), self.reward(), False, self.k >= self.length, {}

    def observe(self) -> Any:
        return np.float32([self.k / 10, np.cos(self.k)])

    def reward(self) -> Any:
        return 1.0


class RaisesInStep(Sound):
    def step(self, action: np.ndarray) -> Any:
        if self.due:
            raise ValueError("no such joint")
        return super().step(action)


class RaisesInReset(Sound):
    def reset(self, **words: Any) -> Any:
        if self.due:
            raise KeyError("seed")
        return super().reset(**words)


class Unpicklable(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} {code}")


class RaisesItsOwn(Sound):
    def step(self, action: np.ndarray) -> Any:
        if self.due:
            raise Unpicklable(7, "licence")
        return super().step(action)


class Hangs(Sound):
    def step(self, action: np.ndarray) -> Any:
        if self.due:
            time.sleep(3600)
        return super().step(action)


class HangsInReset(Sound):
    def reset(self, **words: Any) -> Any:
        if self.due:
            time.sleep(3600)
        return super().reset(**words)


class Dies(Sound):
    def step(self, action: np.ndarray) -> Any:
        if self.due:
            os.kill(os.getpid(), 9)
        return super().step(action)


class NanObservation(Sound):
    def observe(self) -> Any:
        return np.float32([0, np.nan]) if self.due else super().observe()


class InfiniteObservation(Sound):
    def observe(self) -> Any:
        return np.float32([np.inf, 0]) if self.due else super().observe()


class NanReward(Sound):
    def reward(self) -> Any:
        return np.nan if self.due else 1.0


class InfiniteReward(Sound):
    def reward(self) -> Any:
        return -np.inf if self.due else 1.0


class HugeReward(Sound):
    """Finite, and its square is not."""

    def reward(self) -> Any:
        return 1e30 if self.due else 1.0


class WrongShape(Sound):
    def observe(self) -> Any:
        return np.zeros(3, np.float32) if self.due else super().observe()


class Scalar(Sound):
    def observe(self) -> Any:
        return 0.0 if self.due else super().observe()


class Words(Sound):
    def observe(self) -> Any:
        return ["a", "b"] if self.due else super().observe()


class Complex(Sound):
    def observe(self) -> Any:
        return np.zeros(2, np.complex64) if self.due else super().observe()


class RewardOfTwo(Sound):
    def reward(self) -> Any:
        return np.ones(2) if self.due else 1.0


class FourResults(Sound):
    def step(self, action: np.ndarray) -> Any:
        result = super().step(action)
        return result[:4] if self.due else result


class NoInfo(Sound):
    def reset(self, **words: Any) -> Any:
        return super().reset(**words)[0]


class Doubles(Sound):
    def observe(self) -> Any:
        return super().observe().astype(np.float64)

    def reward(self) -> Any:
        return np.array([1.0])  # of one entry, as older environments give it


class OneBuffer(Sound):
    """Hands out one array, and writes over it at each step; takes the action's array as its own."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.buffer = np.zeros(2, np.float32)

    def observe(self) -> Any:
        self.buffer[:] = super().observe()
        return self.buffer

    def step(self, action: np.ndarray) -> Any:
        action *= 0
        return super().step(action)


class OddInfos(Sound):
    """Its infos fit no array."""

    def step(self, action: np.ndarray) -> Any:
        *result, _ = super().step(action)
        return *result, {"a": np.zeros(self.k), "final_info": object, 3: None}


class EndsAtOnce(Sound):
    length = 1


class NeverEnds(Sound):
    length = 10**12
