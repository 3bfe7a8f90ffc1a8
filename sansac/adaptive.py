"""A number that follows the effective sample size of minibatches, inside bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOST = 1.25  # times that a number changes at a move


def effective_sample_size(log_ratio: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) of the likelihood ratios w = pi(a|s) / mu(a|s), given as logs, [N]:
    1 where the data come from the policy itself, 1/N where one transition stands for all."""
    logs = log_ratio.double()
    share = 2 * torch.logsumexp(logs, 0) - torch.logsumexp(2 * logs, 0)
    return float(share.exp()) / len(logs)


class Controller:
    """Moves `value` by (share / target)^power, a factor of at most MOST, in [low, high].

    A power of 1 lowers it where the share falls short of the target, one of -1 raises it.
    """

    def __init__(self, value: float, *, low: float, high: float, target: float, power: int) -> None:
        self.value, self.low, self.high = value, low, high
        self.target, self.power = target, power

    def move(self, share: float) -> bool:
        """Move by one measured share; whether the value changed."""
        factor = min(max((share / self.target) ** self.power, 1 / MOST), MOST)
        before, self.value = self.value, min(max(self.value * factor, self.low), self.high)
        return self.value != before

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
