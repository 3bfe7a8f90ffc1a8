"""Ring buffer of n-step transitions and its uniform sampler."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class ReplayBuffer:
    """The last `capacity` transitions of `num_envs` environments stepped side by side.

    n-step sums are formed as steps arrive, so a window can cross neither an episode, nor an
    environment, nor the write head. Floats are stored as float32, uint8 stays uint8.
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
        # zeros, not empty: pages are taken from the system only as rows are written.
        self.rows = {
            key: torch.from_numpy(np.zeros((capacity, *shape), kind)).to(self.device)
            for key, (shape, kind) in shapes.items()
        }
        self.position = self.size = 0
        # Steps whose window is still open: slot t mod n of each environment.
        self.pending = {
            "observation": np.zeros((n_step, num_envs, observation_size), dtype),
            "action": np.zeros((n_step, num_envs, action_size), np.float32),
            "reward": np.zeros((n_step, num_envs), np.float64),
            "open": np.zeros((n_step, num_envs), bool),
        }
        self.clock = 0

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
    ) -> None:
        """Add a step of every environment: arrays [num_envs, ...].

        `next_observation` is the true last observation where an episode ended.
        """
        pending, n = self.pending, self.n_step
        slot = self.clock % n
        pending["observation"][slot] = observation
        pending["action"][slot] = action
        pending["reward"][slot] = 0.0
        pending["open"][slot] = True
        age = (self.clock - np.arange(n)) % n
        self.clock += 1
        pending["reward"] += self.gamma ** age[:, None] * reward

        done = terminated | truncated
        for k in np.argsort(-age):  # oldest first
            closing = pending["open"][k] & (done | (age[k] == n - 1))
            if not closing.any():
                continue
            discount = self.gamma ** (age[k] + 1) * ~terminated
            self._write(
                observation=pending["observation"][k, closing],
                action=pending["action"][k, closing],
                reward=pending["reward"][k, closing],
                next_observation=next_observation[closing],
                discount=discount[closing],
            )
            pending["open"][k] &= ~closing

    def _write(self, **columns: np.ndarray) -> None:
        count = len(columns["reward"])
        where = torch.arange(self.position, self.position + count) % self.capacity
        for key, values in columns.items():
            rows = self.rows[key]
            rows[where] = torch.as_tensor(values, dtype=rows.dtype).to(self.device)
        self.position = (self.position + count) % self.capacity
        self.size = min(self.size + count, self.capacity)

    def sample(self, batch_size: int) -> Batch:
        """A fresh uniform draw, with replacement. Raises ValueError where the buffer is empty."""
        if self.size == 0:
            raise ValueError("cannot sample from an empty replay buffer: add transitions first")
        index = torch.randint(
            self.size, (batch_size,), generator=self.generator, device=self.device
        )
        columns = {key: rows.index_select(0, index) for key, rows in self.rows.items()}
        for key in ("observation", "next_observation"):
            columns[key] = columns[key].float()
        return Batch(**columns, weight=torch.ones(batch_size, device=self.device))

    def state_dict(self) -> dict[str, Any]:
        """Filled rows, open windows, counters and the sampler's stream: tensors and numbers."""
        return {
            "rows": {key: rows[: self.size].clone() for key, rows in self.rows.items()},
            "pending": {key: torch.from_numpy(value.copy()) for key, value in self.pending.items()},
            "position": self.position,
            "clock": self.clock,
            "stream": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.size = len(state["rows"]["reward"])
        for key, rows in state["rows"].items():
            self.rows[key][: self.size] = rows
        for key, value in state["pending"].items():
            self.pending[key][...] = value.cpu().numpy()
        self.position, self.clock = int(state["position"]), int(state["clock"])
        if state["stream"].numel() == self.generator.get_state().numel():
            self.generator.set_state(state["stream"].cpu())
