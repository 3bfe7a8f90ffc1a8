"""Hindsight experience replay (Andrychowicz et al. 2017, arXiv:1707.01495)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sansac.config import ConfigError
from sansac.replay import Batch, ReplayBuffer


class Goals(NamedTuple):
    """Where goals lie in a flat observation, and what reaching one pays.

    `reward(achieved, desired, info)` and, where an episode ends at its goal, `terminated` take
    arrays [B, goal], as goal-conditioned environments define `compute_reward` and
    `compute_terminated`.
    """

    achieved: slice
    desired: slice
    reward: Callable[[np.ndarray, np.ndarray, Any], Any]
    terminated: Callable[[np.ndarray, np.ndarray, Any], Any] | None = None


class HindsightReplay(ReplayBuffer):
    """Gives transitions, but for the share `original`, a goal that was achieved in their episode:
    by a step from theirs on (`future`), by its last (`final`) or by any of it (`episode`).

    One-step transitions only. Rows of an environment lie `num_envs` apart; an episode that is under
    way counts as far as it is.
    """

    def __init__(
        self,
        *sizes: int,
        goals: Goals,
        strategy: str,
        original: float,
        num_envs: int,
        seed: int,
        **options: Any,
    ) -> None:
        super().__init__(*sizes, num_envs=num_envs, seed=seed, **options)
        self.goals, self.strategy, self.original = goals, strategy, original
        two = np.zeros((2, goals.achieved.stop - goals.achieved.start), np.float32)
        for name, computed in (("reward", goals.reward), ("terminated", goals.terminated)):
            if computed is not None and np.shape(computed(two, two, {})) != (2,):
                raise ConfigError(
                    f"compute_{name} of two goals, [2, goal], returned the shape "
                    f"{np.shape(computed(two, two, {}))}; expected one value for each, (2,)"
                )
        self.num_envs = num_envs
        self.stream = torch.Generator().manual_seed(seed)
        self.steps = 0  # of all environments together, since the start
        # First and last step of a row's episode, as counted by `steps`; -1 while it is under way.
        self.first = np.zeros(self.length, np.int64)
        self.last = np.full(self.length, -1, np.int64)
        self.begun = np.arange(num_envs)  # first step of each environment's episode

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
        """As `ReplayBuffer.add`."""
        super().add(observation, action, reward, next_observation, terminated, truncated, log_prob)
        now = self.steps + np.arange(self.num_envs)
        self.first[now % self.length], self.last[now % self.length] = self.begun, -1
        self.steps += self.num_envs
        self._end(np.flatnonzero(terminated | truncated))

    def cut(self, environments: list[int]) -> None:
        super().cut(environments)
        self._end(np.array(environments, np.int64))

    def _end(self, environments: np.ndarray) -> None:
        """The episodes of these environments end with what is there."""
        for i in environments:
            last = self.steps - self.num_envs + i
            oldest = self.steps - self.length  # older rows are overwritten, by any environment's
            count = (last - max(self.begun[i], oldest)) // self.num_envs + 1
            self.last[(last - self.num_envs * np.arange(count)) % self.length] = last
            self.begun[i] = self.steps + i

    def _gather(self, index: Tensor) -> Batch:
        batch = super()._gather(index)
        rows = index.cpu().numpy()
        chosen = self._random(len(rows)) >= self.original
        source = torch.from_numpy(self._source(rows) % self.length)
        goal = self._rows_at("next_observation", source)[:, self.goals.achieved].float()
        relabelled = torch.from_numpy(chosen).to(self.device)[:, None]
        for observation in (batch.observation, batch.next_observation):
            desired = observation[:, self.goals.desired]
            observation[:, self.goals.desired] = torch.where(relabelled, goal, desired)
        reached = batch.next_observation.cpu().numpy()
        ends = reached[:, self.goals.achieved], reached[:, self.goals.desired]
        reward = torch.as_tensor(np.asarray(self.goals.reward(*ends, {}), np.float32))
        reward = torch.where(relabelled[:, 0], reward.to(self.device), batch.reward)
        discount = batch.discount
        if self.goals.terminated is not None:
            over = torch.as_tensor(np.asarray(self.goals.terminated(*ends, {}), bool))
            anew = self.gamma * (~over).float().to(self.device)
            discount = torch.where(relabelled[:, 0], anew, discount)
        return batch._replace(reward=reward, discount=discount)

    def _source(self, rows: np.ndarray) -> np.ndarray:
        """The step, by `steps`, whose achieved goal each row is given."""
        age = (self.position - 1 - rows) % self.length
        now = self.steps - 1 - age
        environment = now % self.num_envs
        newest = self.steps - self.num_envs + environment
        last = np.where(self.last[rows] < 0, newest, self.last[rows])
        if self.strategy == "final":
            return last
        oldest = self.steps - self.size + (environment - (self.steps - self.size)) % self.num_envs
        first = now if self.strategy == "future" else np.maximum(self.first[rows], oldest)
        choices = (last - first) // self.num_envs + 1
        return first + self.num_envs * np.floor(self._random(len(rows)) * choices).astype(int)

    def _random(self, count: int) -> np.ndarray:
        return torch.rand(count, generator=self.stream, dtype=torch.float64).numpy()

    def state_dict(self) -> dict[str, Any]:
        own = {
            "steps": self.steps,
            "first": torch.from_numpy(self.first.copy()),
            "last": torch.from_numpy(self.last.copy()),
            "begun": torch.from_numpy(self.begun.copy()),
            "goal_stream": self.stream.get_state(),
        }
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.steps = state["steps"]
        for name in ("first", "last", "begun"):
            getattr(self, name)[:] = state[name].cpu().numpy()
        self.stream.set_state(state["goal_stream"].cpu())
