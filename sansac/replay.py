"""Ring buffer of n-step transitions and its uniform sampler."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Batch(NamedTuple):
    """A minibatch; B transitions, each spanning the m <= n steps actually taken."""

    observation: Tensor  # [B, obs]
    action: Tensor  # [B, act], the tanh's, in [-1, 1]
    reward: Tensor  # [B], sum_k gamma^k r_k
    next_observation: Tensor  # [B, obs], m steps later
    discount: Tensor  # [B], gamma^m; 0 after a terminated step, never after a truncated one
    weight: Tensor  # [B], of the per-sample loss


COLUMNS = ("observation", "action", "reward", "next_observation", "discount")


class ReplayBuffer:
    """The last `capacity` transitions of `num_envs` environments stepped side by side.

    n-step sums are formed as steps arrive, so a window can cross neither an episode, nor an
    environment, nor the write head. Floats are stored as float32, uint8 stays uint8.

    With `likelihood` a row keeps log mu(a|s) of the policy that acted. With a `directory` the rows
    lie in files there, mapped into memory, with `slack` rows more, so that what a checkpoint saw is
    not overwritten before the next one.
    """

    def __init__(
        self,
        capacity: int,
        observation_size: int,
        action_size: int,
        *,
        num_envs: int,
        n_step: int,
        gamma: float,
        seed: int,
        observation_dtype: type[np.generic] | np.dtype[Any] = np.float32,
        device: str | torch.device = "cpu",
        likelihood: bool = False,
        directory: Path | None = None,
        slack: int = 0,
    ) -> None:
        self.capacity, self.n_step, self.gamma = capacity, n_step, gamma
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        dtype = np.dtype(np.uint8 if observation_dtype == np.uint8 else np.float32)
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "observation": ((observation_size,), dtype),
            "action": ((action_size,), np.float32),
            "reward": ((), np.float32),
            "next_observation": ((observation_size,), dtype),
            "discount": ((), np.float32),
        }
        if likelihood:
            shapes["log_prob"] = ((), np.float32)
        self.length, self.window = capacity + slack, capacity  # rows there are, and are drawn from
        self.directory, self.found = directory, False  # found: files were there
        self.written = 0  # rows written in all, those before the state that was loaded included
        if directory is None:
            # zeros, not empty: pages are taken from the system only as rows are written.
            self.rows = {
                key: torch.from_numpy(np.zeros((self.length, *shape), kind)).to(self.device)
                for key, (shape, kind) in shapes.items()
            }
        else:
            self.rows = self._mapped(directory, shapes)
        self.position = self.size = 0
        self.drawn = torch.zeros(0, dtype=torch.int64)  # rows of the last sample
        # Steps whose window is still open: slot t mod n of each environment.
        self.pending = {
            "observation": np.zeros((n_step, num_envs, observation_size), dtype),
            "action": np.zeros((n_step, num_envs, action_size), np.float32),
            "reward": np.zeros((n_step, num_envs), np.float64),
            "open": np.zeros((n_step, num_envs), bool),
        }
        if likelihood:
            self.pending["log_prob"] = np.zeros((n_step, num_envs), np.float32)
        self.clock = 0

    def _mapped(
        self, directory: Path, shapes: dict[str, tuple[tuple[int, ...], Any]]
    ) -> dict[str, Tensor]:
        """The rows in files, those that are there already or new ones of zeros."""
        directory.mkdir(parents=True, exist_ok=True)
        paths = {key: directory / f"{key}.bin" for key in shapes}
        furthest = directory / "furthest.bin"  # the largest `written` of all who wrote here
        lengths = {
            path.stat().st_size / (math.prod(shapes[key][0]) * np.dtype(shapes[key][1]).itemsize)
            if path.is_file()
            else 0
            for key, path in paths.items()
        }
        length = lengths.pop()
        self.found = not lengths and length >= 1 and length % 1 == 0 and furthest.is_file()
        if self.found:
            self.length = int(length)
        mode: Literal["r+", "w+"] = "r+" if self.found else "w+"
        self.furthest = np.memmap(furthest, np.int64, mode, shape=(1,))
        self.written = int(self.furthest[0]) + self.length  # past what any state tells of
        self.maps = {
            key: np.memmap(paths[key], kind, mode, shape=(self.length, *shape))
            for key, (shape, kind) in shapes.items()
        }
        return {key: torch.from_numpy(array) for key, array in self.maps.items()}

    @staticmethod
    def bytes_needed(capacity: int, observation_size: int, action_size: int, itemsize: int) -> int:
        return capacity * (2 * observation_size * itemsize + 4 * action_size + 8)

    def add(
        self,
        observation: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        next_observation: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        log_prob: np.ndarray | None = None,
    ) -> None:
        """Add a step of every environment: arrays [num_envs, ...].

        `next_observation` is the true last observation where an episode ended; `log_prob`, of the
        unscaled action, belongs to a buffer with `likelihood`.
        """
        pending, n = self.pending, self.n_step
        slot = self.clock % n
        pending["observation"][slot] = observation
        pending["action"][slot] = action
        pending["reward"][slot] = 0.0
        pending["open"][slot] = True
        if log_prob is not None:
            pending["log_prob"][slot] = log_prob
        age = (self.clock - np.arange(n)) % n
        self.clock += 1
        pending["reward"] += self.gamma ** age[:, None] * reward

        done = terminated | truncated
        for k in np.argsort(-age):  # oldest first
            closing = pending["open"][k] & (done | (age[k] == n - 1))
            if not closing.any():
                continue
            discount = self.gamma ** (age[k] + 1) * ~terminated
            firsts = {key: rows[k, closing] for key, rows in pending.items() if key != "open"}
            self._write(
                **firsts,
                next_observation=next_observation[closing],
                discount=discount[closing],
            )
            pending["open"][k] &= ~closing

    def cut(self, environments: list[int]) -> None:
        """The episodes of these environments go no further; their open windows are dropped."""
        self.pending["open"][:, environments] = False

    def _write(self, **columns: np.ndarray) -> Tensor:
        """Write rows at the head; where they are now."""
        count = len(columns["reward"])
        where = torch.arange(self.position, self.position + count) % self.length
        for key, values in columns.items():
            rows = self.rows[key]
            rows[where] = torch.as_tensor(values, dtype=rows.dtype).to(rows.device)
        self.position = (self.position + count) % self.length
        self.size = min(self.size + count, self.length)
        if self.directory is not None:
            self.written += count
            self.furthest[0] = max(self.furthest[0], self.written)
        return where

    @property
    def available(self) -> int:
        """Transitions that are drawn from, the newest."""
        return min(self.size, self.window)

    def sample(self, batch_size: int) -> Batch:
        """A fresh draw, with replacement. Raises ValueError where the buffer is empty."""
        if self.size == 0:
            raise ValueError("cannot sample from an empty replay buffer: add transitions first")
        self.drawn = self._draw(batch_size)
        return self._gather(self.drawn)

    def _draw(self, batch_size: int) -> Tensor:
        """Rows, [batch_size], uniformly."""
        drawn = torch.randint(
            self.available, (batch_size,), generator=self.generator, device=self.device
        )
        newest = self.available < self.size
        return (self.position - 1 - drawn) % self.length if newest else drawn

    def _gather(self, index: Tensor) -> Batch:
        columns = {key: self._rows_at(key, index) for key in COLUMNS}
        for key in ("observation", "next_observation"):
            columns[key] = columns[key].float()
        return Batch(**columns, weight=torch.ones(len(index), device=self.device))

    def _rows_at(self, key: str, index: Tensor) -> Tensor:
        rows = self.rows[key]  # those in files are in the CPU's memory
        return rows.index_select(0, index.to(rows.device)).to(self.device)

    @property
    def drawn_log_prob(self) -> Tensor:
        """log mu(a|s) of the last sample, [B]."""
        return self._rows_at("log_prob", self.drawn)

    def state_dict(self) -> dict[str, Any]:
        """Filled rows, open windows, counters and the sampler's stream: tensors and numbers. Rows
        in files stay there."""
        if self.directory is not None:
            for array in (*self.maps.values(), self.furthest):
                array.flush()
        kept = self.rows if self.directory is None else {}
        return {
            "rows": {key: rows[: self.size].clone() for key, rows in kept.items()},
            "size": self.size,
            "window": self.window,
            "pending": {key: torch.from_numpy(value.copy()) for key, value in self.pending.items()},
            "position": self.position,
            "length": self.length,
            "written": self.written,
            "clock": self.clock,
            "stream": self.generator.get_state(),
        }

    def holds(self, state: dict[str, Any]) -> bool:
        """Whether the rows that a state tells of are still there. Rows in files are not: where a
        file is damaged, or whoever wrote after the checkpoint went past the spare rows."""
        if self.directory is None:
            return True
        if not self.found or state["length"] != self.length:
            return False
        return int(self.furthest[0]) - state["written"] <= self.length - self.capacity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.size, self.window = state["size"], state["window"]
        self.written = state["written"]
        for key, rows in (self.rows if self.directory is None else {}).items():
            rows[: self.size] = state["rows"][key]
        for key, value in state["pending"].items():
            self.pending[key][...] = value.cpu().numpy()
        self.position, self.clock = int(state["position"]), int(state["clock"])
        if state["stream"].numel() == self.generator.get_state().numel():
            self.generator.set_state(state["stream"].cpu())
