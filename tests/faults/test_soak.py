"""Two million environment steps: memory, files, threads and the time of a step stay flat.

The time is the processor's, counted against work that is always the same and done beside it: what
else the machine does slows down both.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import tiny
from gymnasium.spaces import Box

from sansac.manager import Manager

STEPS, EVERY = 2_000_000, 20_000


class Trivial(gym.Env):
    """200 steps an episode, and nothing kept between them."""

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Box(-1.0, 1.0, (2,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.k = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        self.k += 1
        return np.float32(action), -float(action @ action), False, self.k >= 200, {}


def yardstick() -> float:
    """CPU seconds of work that is always the same."""
    began, x = time.thread_time(), torch.zeros(64, 64)
    for _ in range(5000):
        x = torch.tanh(x + 1)
    return time.thread_time() - began


class Samples(list[tuple[float, ...]]):
    """Step, resident MB, open files, threads, CPU seconds of all and then of the yardstick; a
    sample every EVERY steps."""

    def take(self, manager: Manager) -> None:
        if manager.step >= len(self) * EVERY:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
            files = len(os.listdir("/proc/self/fd"))
            threads, now = threading.active_count(), time.process_time()
            self.append((manager.step, memory, files, threads, now, yardstick()))


@pytest.mark.slow
def test_two_million_steps_are_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(
        tmp_path, env="Trivial", san=True, num_envs=8, total_steps=STEPS, log_every=2000,
        eval_every=100_000, checkpoint_every=50_000, tensorboard=True,
        learning={"update_to_data": 0.05, "n_step": 3}, replay={"capacity": 20_000},
    )  # fmt: skip
    manager, samples = Manager(config, make_env=Trivial), Samples()
    collect = manager.collect

    def sampled(*words: Any) -> None:
        samples.take(manager)
        collect()

    monkeypatch.setattr(manager, "collect", sampled)
    manager.train()
    assert not manager.interrupted, "a signal ended the run, whoever sent it"
    assert manager.step == STEPS

    settled = np.array(samples[len(samples) // 5 :])  # the buffer is full, everything was done once
    step, memory, files, threads, seconds, same = settled.T
    million = step / 1e6
    growth = {
        name: float(np.polyfit(million, values, 1)[0])
        for name, values in (("memory", memory), ("files", files), ("threads", threads))
    }
    each = (np.diff(seconds) - same[:-1]) / np.diff(step) * 1e6
    relative = each / same[:-1]
    slowing = float(np.polyfit(million[1:], relative, 1)[0] / np.median(relative))
    print(
        f"\n{STEPS:,} steps, {manager.updates:,} updates: resident memory {memory[-1]:.0f} MB, "
        f"{growth['memory']:+.2f} MB a million steps; {files[-1]:.0f} open files, "
        f"{growth['files']:+.2f}; {threads[-1]:.0f} threads, {growth['threads']:+.2f}; "
        f"{np.median(each):.1f} us of CPU a step, against the yardstick {slowing:+.1%} a million "
        "steps"
    )
    assert abs(growth["memory"]) < 5
    assert abs(growth["files"]) < 0.5 and abs(growth["threads"]) < 0.5
    assert abs(slowing) < 0.1
