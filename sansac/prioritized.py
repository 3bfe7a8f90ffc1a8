"""Prioritised experience replay (Schaul et al. 2016, arXiv:1511.05952) on a sum tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sansac.replay import Batch, ReplayBuffer

FAN = 16  # children of a node: few levels, and enough work in each call
FLOOR = 1e-6  # added to an error, so that no transition is lost for good

Array = NDArray[np.float64]
Index = NDArray[np.int64]


class SumTree:
    """Sums over `capacity` leaves of 0 or more, FAN to a node, in float64.

    A changed leaf's ancestors are summed anew from their children, so rounding does not pile up.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        sizes = [-(-capacity // FAN) * FAN]
        while sizes[-1] > FAN:
            sizes.append(-(-(sizes[-1] // FAN) // FAN) * FAN)
        # Leaves first; a level's rows are the children of a node of the next.
        self.levels: list[Array] = [np.zeros((size // FAN, FAN)) for size in sizes]

    @property
    def total(self) -> float:
        return float(self.levels[-1].sum())

    def __getitem__(self, index: Index) -> Array:
        return self.levels[0].reshape(-1)[index]

    def __setitem__(self, index: Index, values: Array | float) -> None:
        """Set leaves, [N]; of one that is named twice the last value holds."""
        self.levels[0].reshape(-1)[index] = values
        for below, above in zip(self.levels[:-1], self.levels[1:], strict=True):
            index = index // FAN
            above.reshape(-1)[index] = below[index].sum(1)

    def fill(self, values: Array) -> None:
        """Set the first leaves, [N], all at once."""
        self.levels[0].reshape(-1)[: len(values)] = values
        for below, above in zip(self.levels[:-1], self.levels[1:], strict=True):
            above.reshape(-1)[: len(below)] = below.sum(1)

    def find(self, mass: Array) -> Index:
        """The leaf where the running sum over leaves passes each mass in [0, total), [N]."""
        node = np.zeros(len(mass), np.int64)
        for level in reversed(self.levels):
            sums = level[node].cumsum(1)
            # The last child stands for what rounding leaves over; never one of no mass.
            mass = np.minimum(mass, np.nextafter(sums[:, -1], 0))
            child = (sums <= mass[:, None]).sum(1)
            before = np.where(child > 0, sums[np.arange(len(node)), child - 1], 0.0)
            mass, node = mass - before, node * FAN + child
        return node


class PrioritizedReplay(ReplayBuffer):
    """Draws transition i with P(i) = p_i^a / sum p^a, p_i proportional to its TD error or, with
    `rank`, to one over the error's rank; new ones enter with the largest p so far.

    A batch's weights are (N P(i))^-b / max, of the per-sample loss. Ranks are those at the last
    sort, which is repeated when half of the buffer has changed. The tree lies in the CPU's memory.
    """

    def __init__(
        self, *sizes: int, exponent: float = 0.6, rank: bool = False, seed: int, **options: Any
    ) -> None:
        super().__init__(*sizes, seed=seed, **options)
        self.exponent, self.rank = exponent, rank
        self.correction = 1.0
        self.tree = SumTree(self.length)
        self.errors = np.zeros(self.length)  # |TD error|, by row
        self.ladder = np.zeros(0)  # those at the last sort, ascending
        self.largest, self.changed = 1.0, 0
        self.stream = torch.Generator().manual_seed(seed)

    def _write(self, **columns: np.ndarray) -> Tensor:
        where = super()._write(**columns)
        rows = where.numpy()
        self.errors[rows] = self.largest
        self.tree[rows] = 1.0 if self.rank else self.largest**self.exponent
        self.changed += len(rows)
        return where

    def _draw(self, batch_size: int) -> Tensor:
        if self.rank and self.changed > self.size // 2:
            self.sort()
        share = torch.rand(batch_size, generator=self.stream, dtype=torch.float64).numpy()
        return torch.from_numpy(self.tree.find(share * self.tree.total)).to(self.device)

    def _gather(self, index: Tensor) -> Batch:
        probability = self.probabilities(index.cpu().numpy())
        scale = (self.size * probability) ** -self.correction
        weight = torch.from_numpy((scale / scale.max()).astype(np.float32))
        return super()._gather(index)._replace(weight=weight.to(self.device))

    def probabilities(self, index: Index) -> Array:
        """P(i) of rows, [N]."""
        return self.tree[index] / self.tree.total

    def reprioritise(
        self, error: Tensor, log_ratio: Tensor | None = None, share: float = 0
    ) -> None:
        """Priorities of the last sample from |TD error|, [B]; with the log likelihood ratio
        log pi - log mu, [B], |TD error|^(1 - share) min(1, pi / mu)^share takes its place."""
        value = error.double() + FLOOR
        if log_ratio is not None:
            ratio = (share * log_ratio.double().clamp(max=0)).exp()
            value = (value ** (1 - share) * ratio).clamp_min(FLOOR)
        errors, rows = value.cpu().numpy(), self.drawn.cpu().numpy()
        self.errors[rows] = errors
        self.largest = max(self.largest, float(errors.max()))
        self.changed += len(rows)
        if self.rank:
            above = len(self.ladder) - np.searchsorted(self.ladder, errors, side="right")
            self.tree[rows] = np.asarray(1.0 + above, np.float64) ** -self.exponent
        else:
            self.tree[rows] = errors**self.exponent

    def sort(self) -> None:
        """Rank all transitions anew, the largest error first."""
        order = np.argsort(-self.errors[: self.size], kind="stable")
        self.ladder = self.errors[order[::-1]]
        leaves = np.empty(self.size)
        leaves[order] = np.arange(1.0, self.size + 1) ** -self.exponent
        self.tree.fill(leaves)
        self.changed = 0

    def state_dict(self) -> dict[str, Any]:
        leaves = self.tree[np.arange(self.size)]
        own = {
            "leaves": torch.from_numpy(leaves),
            "errors": torch.from_numpy(self.errors[: self.size].copy()),
            "ladder": torch.from_numpy(self.ladder.copy()),
            "largest": self.largest,
            "changed": self.changed,
            "priority_stream": self.stream.get_state(),
        }
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.tree.fill(state["leaves"].cpu().numpy())
        self.errors[: self.size] = state["errors"].cpu().numpy()
        self.ladder = state["ladder"].cpu().numpy()
        self.largest, self.changed = state["largest"], state["changed"]
        self.stream.set_state(state["priority_stream"].cpu())
