"""Noise on actions while training: drawn anew, as an Ornstein-Uhlenbeck process, or held (gSDE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn

from sansac.config import Exploration
from sansac.networks import StateDependentStd


class ActionNoise:
    """Noise of standard deviation 1 for every environment, [B, act].

    `gaussian` is independent over time; `ou` is x <- (1 - r) x + sqrt(1 - (1 - r)^2) n, the
    Ornstein-Uhlenbeck process whose stationary standard deviation is 1 (Lillicrap et al. 2016,
    arXiv:1509.02971), from 0 at the start of an episode.
    """

    def __init__(self, config: Exploration) -> None:
        self.keep = 1 - config.reversion if config.kind == "ou" else 0.0
        self.value: Tensor | None = None

    def __call__(self, like: Tensor, stream: Generator) -> Tensor:
        """The noise of this step for actions [B, act]."""
        fresh = torch.randn(like.shape, generator=stream, device=like.device)
        if not self.keep:
            return fresh
        before = torch.zeros_like(like) if self.value is None else self.value
        self.value = self.keep * before + (1 - self.keep**2) ** 0.5 * fresh
        return self.value

    def end(self, ended: Tensor) -> None:
        """These environments, [B] bool, begin an episode."""
        if self.value is not None:
            self.value = self.value.masked_fill(ended[:, None], 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class HeldNoise:
    """gSDE's noise: features times a matrix that an environment holds for `gsde_steps` steps and no
    longer than an episode (Raffin et al. 2022, arXiv:2005.05719)."""

    def __init__(self, config: Exploration) -> None:
        self.steps = config.gsde_steps
        self.matrix: Tensor | None = None  # of standard normals, [B, features, act]
        self.age = 0

    def __call__(self, head: nn.Module, stream: Generator) -> Tensor:
        """The noise, [B, act], for the features of the head's last pass."""
        assert isinstance(head, StateDependentStd)
        shape = (len(head.features), *head.weight.shape)
        if self.matrix is None or self.age % self.steps == 0:
            self.matrix = torch.randn(shape, generator=stream, device=head.weight.device)
        self.age += 1
        return torch.einsum("bf,fa,bfa->ba", head.features, head.weight.exp(), self.matrix)

    def redraw(self, chosen: Tensor, stream: Generator) -> None:
        """A new matrix for these environments, [B] bool."""
        if self.matrix is not None and chosen.any():
            fresh = torch.randn(self.matrix.shape, generator=stream, device=self.matrix.device)
            self.matrix = torch.where(chosen[:, None, None], fresh, self.matrix)

    def state_dict(self) -> dict[str, Any]:
        return {"matrix": self.matrix, "age": self.age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.matrix, self.age = state["matrix"], state["age"]
