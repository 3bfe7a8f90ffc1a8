"""What the algorithms of the family share: networks, acting, optimiser steps, state.

An algorithm is a subclass with an `update(batch)`; `sansac.family` names them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sansac.config import Config
from sansac.networks import DenseActor, RunningNorm, make_critic, reestimate
from sansac.replay import Batch
from sansac.schedules import at
from sansac.spiking import SpikingActor


class OffPolicy:
    """Networks, targets, optimisers and random streams of one agent.

    Observations are raw [B, obs]; actions are the tanh's, in (-1, 1), [B, act].
    """

    prediction: Tensor
    target: Tensor
    slow_critic = True  # whether targets bootstrap from a slow copy of the critics

    def __init__(
        self, config: Config, observation_size: int, action_size: int, device: str
    ) -> None:
        self.config, self.action_size = config, action_size
        self.device = torch.device(device)
        with torch.random.fork_rng(devices=[]):  # leaves the user's own stream untouched
            torch.manual_seed(config.seed)
            self.actor = make_actor(config, observation_size, action_size).to(device)
            self.critic = make_critic(config.critic, observation_size, action_size).to(device)
        self.actor.eval()
        self.batch_norms = [m for m in self.actor.modules() if isinstance(m, nn.BatchNorm1d)]
        self.policy_actor = copy.deepcopy(self.actor) if config.actor.average < 1 else self.actor
        self.norm = RunningNorm(observation_size, config.observation_clip).to(device)
        self.exploration = torch.Generator(self.device).manual_seed(2 * config.seed)
        self.noise = torch.Generator(self.device).manual_seed(2 * config.seed + 1)
        self.critic.stream = self.noise

        self.updates = 0
        self.progress = 0.0  # what schedules follow, with
        self.best_return: float | None = None
        betas = config.learning.betas
        self.optimizers = {
            "actor": adam(actor_groups(self.actor, config), betas),
            "critic": adam([(self.critic.parameters(), config.critic.learning_rate)], betas),
        }
        # Slow copies, what they follow, and at which rate.
        self.copies: list[tuple[list[Tensor], list[Tensor], float]] = []
        self.target_critic = self.critic
        if self.slow_critic and self.critic.has_target:
            self.target_critic = self.slow_copy(self.critic)
            self.target_critic.stream = self.noise  # one stream for both, not a copy of it
        if self.policy_actor is not self.actor:
            follows = averaged(self.policy_actor), averaged(self.actor), config.actor.average
            self.copies.append(follows)

    def slow_copy(self, module: Any) -> Any:
        """A copy that follows `module` at learning.tau, for `polyak` to move."""
        slow = copy.deepcopy(module).requires_grad_(False)
        self.copies.append((averaged(slow), averaged(module), self.config.learning.tau))
        return slow

    # -- acting ------------------------------------------------------------------------------

    def explore_uniformly(self, observation: Tensor) -> Tensor:
        """Uniform actions, one an observation, before the policy is worth following."""
        shape = (len(observation), self.action_size)
        return torch.rand(shape, generator=self.exploration, device=self.device) * 2 - 1

    def explore(self, observation: Tensor) -> Tensor:
        """Actions of training, one an environment, [B, obs] -> [B, act]."""
        raise NotImplementedError

    def sample(self, observation: Tensor, stream: torch.Generator) -> Tensor:
        """Actions sampled from the policy with the caller's stream, [B, obs] -> [B, act]."""
        raise NotImplementedError

    @torch.no_grad()
    def act(self, observation: Tensor) -> Tensor:
        """The deterministic policy: the tanh of the mean, [B, obs] -> [B, act]."""
        return torch.tanh(self.policy_actor(self.normalize(observation))[0])

    def episodes_ended(self, ended: Tensor) -> None:
        """Exploration begins anew in these environments, [B] bool."""

    def normalize(self, observation: Tensor) -> Tensor:
        return self.norm(observation) if self.config.normalize_observations else observation

    # -- the update --------------------------------------------------------------------------

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One step of everything that learns. Returns detached scalar tensors by their tag."""
        raise NotImplementedError

    def normalized(self, batch: Batch) -> Batch:
        return batch._replace(
            observation=self.normalize(batch.observation),
            next_observation=self.normalize(batch.next_observation),
        )

    @property
    def td_error(self) -> Tensor:
        """|Q - y| of each transition of the last update, mean over critics and quantiles, [B]."""
        predicted = self.prediction.detach().mean(-1)
        return (predicted - self.target.mean(-1)).abs().mean(0)

    def regress(self, prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """The critics' loss of predictions, [copies, B, quantiles], against a target, [B, atoms],
        weighted, [B]; `td_error` tells of these two until the next."""
        self.prediction, self.target = prediction.detach(), target
        return self.critic.loss(prediction, target, weight)

    def set_training(self, mode: bool) -> None:
        """`actor.train(mode)` for the few modules that read it: to visit all takes time."""
        for module in (self.actor, *self.batch_norms):
            module.training = mode

    def optimize(self, loss: Tensor, *names: str) -> None:
        """A step of the named optimisers; gradients reach their parameters and no others."""
        optimizers = [self.optimizers[name] for name in names]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [p for group in groups for p in group["params"]]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        torch.autograd.graph.increment_version(parameters)  # torch's fused step does not

    def reestimate(self, observation: Tensor) -> None:
        """Re-estimate BatchNorm's running statistics from raw observations, [B, obs]."""
        for actor in {self.actor, self.policy_actor}:
            reestimate(actor, self.normalize(observation))

    def set_progress(self, progress: float, best_return: float | None = None) -> None:
        """Follow the schedules: `progress` is the share of training done, 0 to 1."""
        self.progress, self.best_return = progress, best_return
        factor = at(self.config.learning.rate_factor, progress, best_return)
        self.actor.set_progress(progress, best_return)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                set_learning_rate(group, group["initial_lr"] * factor)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizers["actor"].param_groups[0]["lr"])

    # -- state -------------------------------------------------------------------------------

    def weights(self) -> dict[str, Any]:
        """What deployment needs: the policy's weights and the normaliser."""
        return {"actor": self.policy_actor.state_dict(), "norm": self.norm.state_dict()}

    def load_weights(self, weights: dict[str, Any]) -> None:
        self.policy_actor.load_state_dict(weights["actor"])
        self.actor.load_state_dict(weights["actor"])
        self.norm.load_state_dict(weights["norm"])

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs, tensors and plain numbers only."""
        return {
            **self.weights(),
            "training_actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "target_critic": self.target_critic.state_dict(),
            "updates": self.updates,
            "optimizers": {name: opt.state_dict() for name, opt in self.optimizers.items()},
            "streams": {
                "exploration": self.exploration.get_state(),
                "noise": self.noise.get_state(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_weights(state)
        self.actor.load_state_dict(state["training_actor"])
        self.critic.load_state_dict(state["critic"])
        self.target_critic.load_state_dict(state["target_critic"])
        self.updates = state["updates"]
        for name, optimizer in self.optimizers.items():
            load_optimizer(optimizer, state["optimizers"][name])
        # A stream belongs to its kind of device; elsewhere the run goes on from a fresh one.
        if state["streams"]["noise"].numel() == self.noise.get_state().numel():
            self.exploration.set_state(state["streams"]["exploration"].cpu())
            self.noise.set_state(state["streams"]["noise"].cpu())


def make_actor(
    config: Config, observation_size: int, action_size: int
) -> DenseActor | SpikingActor:
    """The actor switch: both kinds map [B, obs] to (mean, log_std), each [B, act]."""
    gsde = config.exploration.gsde
    if config.san:
        return SpikingActor(config.actor, config.spiking, observation_size, action_size, gsde)
    return DenseActor(config.actor, observation_size, action_size, gsde)


def actor_groups(actor: nn.Module, config: Config) -> list[tuple[Iterable[Tensor], float]]:
    """The actor's parameters and rate; a log-std head with a rate of its own apart."""
    rate = config.actor.learning_rate
    own_rate = config.spiking.log_std_learning_rate if config.san else None
    if own_rate is None or config.spiking.log_std == "shared":
        return [(actor.parameters(), rate)]
    named = list(actor.named_parameters())
    head = [p for name, p in named if name.startswith("log_std.")]
    rest = [p for name, p in named if not name.startswith("log_std.")]
    return [(rest, rate), (head, own_rate)]


def adam(
    groups: Iterable[tuple[Iterable[Tensor], float]], betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Adam:
    """Adam over (parameters, learning rate) pairs, one fused call a step.

    On CUDA rates are tensors: a recorded step reads anew what `set_learning_rate` writes.
    """
    settings: list[dict[str, Any]] = []
    for parameters, lr in groups:
        parameters = list(parameters)
        cuda = parameters[0].is_cuda
        rate = torch.tensor(lr, device=parameters[0].device) if cuda else lr
        settings.append({"params": parameters, "lr": rate, "initial_lr": lr, "capturable": cuda})
    return torch.optim.Adam(settings, betas=betas, fused=True)


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_state_dict` that keeps what belongs to the device at hand."""
    own = [{key: group[key] for key in ("lr", "capturable")} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        rate = float(group["lr"])
        group.update(kept)
        set_learning_rate(group, rate)


def averaged(module: nn.Module) -> list[Tensor]:
    """What `polyak` moves: parameters and floating-point buffers."""
    tensors = module.state_dict(keep_vars=True).values()
    return [tensor for tensor in tensors if tensor.is_floating_point()]


@torch.no_grad()
def polyak(target: list[Tensor], online: list[Tensor], tau: float) -> None:
    """target <- (1 - tau) target + tau online, in place, one call for all."""
    torch._foreach_lerp_(target, online, tau)
