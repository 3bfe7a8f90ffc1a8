"""The optimiser's step and Polyak averaging, a call each for all tensors of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Adam(torch.optim.Adam):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980): torch's fused kernel and state, with the lists that
    it takes kept from step to step. Forming them anew costs as much as the arithmetic does.

    Made of (parameters, learning rate) pairs. Every parameter has a gradient at every step.
    """

    def __init__(self, groups: Iterable[tuple[Iterable[Tensor], float]]) -> None:
        settings = [{"params": list(p), "lr": lr, "initial_lr": lr} for p, lr in groups]
        super().__init__(settings, fused=True)
        self.lists: list[tuple[list[Tensor], ...]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if not self.lists:
            self.lists = [self._lists(group["params"]) for group in self.param_groups]
        for group, (parameters, averages, squares, steps) in zip(
            self.param_groups, self.lists, strict=True
        ):
            gradients: list[Any] = [p.grad for p in parameters]
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                parameters, gradients, averages, squares, [], steps,
                lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
                weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False,
                maximize=False,
            )  # fmt: skip
            torch.autograd.graph.increment_version(parameters)  # the fused kernel does not

    def _lists(self, parameters: list[Tensor]) -> tuple[list[Tensor], ...]:
        """Parameters, both moments and numbers of steps, as `state` holds them."""
        for p in parameters:
            if p not in self.state:
                self.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in parameters]
        return parameters, *([s[k] for s in states] for k in ("exp_avg", "exp_avg_sq", "step"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what a copy and `load_state_dict` end with: their tensors are others."""
        super().__setstate__(state)
        self.lists = []


def averaged(module: nn.Module) -> list[Tensor]:
    """What `polyak` moves: parameters and floating-point buffers."""
    tensors = module.state_dict(keep_vars=True).values()
    return [tensor for tensor in tensors if tensor.is_floating_point()]


@torch.no_grad()
def polyak(target: list[Tensor], online: list[Tensor], tau: float) -> None:
    """target <- (1 - tau) target + tau online, in place."""
    torch._foreach_lerp_(target, online, tau)
