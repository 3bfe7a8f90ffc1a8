"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905): its losses and its update.

The actor is a switch: dense or spiking, it maps normalised observations to the mean and log
standard deviation of a Gaussian before the tanh, and nothing below knows which it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sansac.config import Config
from sansac.networks import DenseActor, RunningNorm, make_critic, reestimate, squashed_sample
from sansac.replay import Batch
from sansac.spiking import SpikingActor


class SAC:
    """Networks, targets, temperature, optimisers and random streams of one agent.

    Observations are raw [B, obs]; actions are the tanh's, in (-1, 1), [B, act].
    """

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
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.norm = RunningNorm(observation_size, config.observation_clip).to(device)

        automatic = config.sac.temperature == "auto"
        start = config.sac.initial_temperature if automatic else float(config.sac.temperature)
        self.log_alpha = torch.tensor(start, device=self.device).log().requires_grad_(automatic)
        target = config.sac.target_entropy
        self.target_entropy = -float(action_size) if target == "auto" else float(target)

        self.optimizers = {
            "actor": adam(actor_groups(self.actor, config)),
            "critic": adam([(self.critic.parameters(), config.critic.learning_rate)]),
        }
        if automatic:
            temperature = adam([([self.log_alpha], config.sac.learning_rate)])
            self.optimizers["temperature"] = temperature
        # Slow copies, what they follow, and at which rate.
        self.copies = [(averaged(self.target_critic), averaged(self.critic), config.learning.tau)]
        if self.policy_actor is not self.actor:
            self.copies.append(
                (averaged(self.policy_actor), averaged(self.actor), config.actor.average)
            )
        self.exploration = torch.Generator(self.device).manual_seed(2 * config.seed)
        self.noise = torch.Generator(self.device).manual_seed(2 * config.seed + 1)

    # -- acting ------------------------------------------------------------------------------

    def explore_uniformly(self, observation: Tensor) -> Tensor:
        """Uniform actions, one an observation, before the policy is worth following."""
        shape = (len(observation), self.action_size)
        return torch.rand(shape, generator=self.exploration, device=self.device) * 2 - 1

    @torch.no_grad()
    def explore(self, observation: Tensor) -> Tensor:
        """Actions sampled from the current actor, [B, obs] -> [B, act]."""
        mean, log_std = self.actor(self.normalize(observation), self.exploration)
        noise = torch.randn(mean.shape, generator=self.exploration, device=self.device)
        return torch.tanh(mean + log_std.exp() * noise)

    @torch.no_grad()
    def sample(self, observation: Tensor, stream: torch.Generator) -> Tensor:
        """Actions sampled from the policy with the caller's stream, [B, obs] -> [B, act]."""
        mean, log_std = self.policy_actor(self.normalize(observation))
        noise = torch.randn(mean.shape, generator=stream, device=self.device)
        return torch.tanh(mean + log_std.exp() * noise)

    @torch.no_grad()
    def act(self, observation: Tensor) -> Tensor:
        """The deterministic policy: the tanh of the mean, [B, obs] -> [B, act]."""
        return torch.tanh(self.policy_actor(self.normalize(observation))[0])

    def normalize(self, observation: Tensor) -> Tensor:
        return self.norm(observation) if self.config.normalize_observations else observation

    # -- losses ------------------------------------------------------------------------------

    def temperature_loss(self, log_prob: Tensor) -> Tensor:
        """J(alpha) = E[-log alpha (log pi(a|s) + target entropy)] (paper, eq. 18, in log alpha)."""
        return -(self.log_alpha * (log_prob.detach() + self.target_entropy)).mean()

    def critic_loss(
        self, batch: Batch, next_action: Tensor, next_log_prob: Tensor, alpha: Tensor
    ) -> tuple[Tensor, Tensor]:
        """J(Q) against y = r + discount (Q'(s', a') - alpha log pi(a'|s')) (paper, eq. 5 and 6).

        With n-step returns, r and discount span the m steps taken: y = sum_k gamma^k r_k +
        gamma^m (...); the entropies in between and an off-policy correction are omitted. Returns
        the loss and the online critics' prediction, [2, B, quantiles].
        """
        with torch.no_grad():
            bootstrap = self.target_critic.target(batch.next_observation, next_action)
            entropy_bonus = alpha * next_log_prob[:, None]
            target = batch.reward[:, None] + batch.discount[:, None] * (bootstrap - entropy_bonus)
        prediction = self.critic(batch.observation, batch.action)
        return self.critic.loss(prediction, target, batch.weight), prediction

    def actor_loss(self, batch: Batch, action: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
        """J(pi) = E[alpha log pi(a|s) - Q(s, a)] (paper, eq. 7)."""
        value = self.critic.value(batch.observation, action)
        assert value.shape == log_prob.shape, (value.shape, log_prob.shape)
        return (alpha * log_prob - value).mean() + self.actor.penalty()

    # -- the update --------------------------------------------------------------------------

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One step of critics, then of actor and temperature, then of target.

        Returns detached scalar tensors by their tag; nothing here waits for the device.
        """
        batch = batch._replace(
            observation=self.normalize(batch.observation),
            next_observation=self.normalize(batch.next_observation),
        )
        alpha = self.log_alpha.detach().exp()

        self._set_training(
            True
        )  # batch statistics, where the stack has them, here and nowhere else
        action, log_prob = self._sample(batch.observation)
        self._set_training(False)
        with torch.no_grad():
            next_action, next_log_prob = self._sample(batch.next_observation)

        critic_loss, prediction = self.critic_loss(batch, next_action, next_log_prob, alpha)
        self._step(critic_loss, "critic")

        actor_loss = self.actor_loss(batch, action, log_prob, alpha)
        metrics = {}
        if "temperature" in self.optimizers:  # neither loss reaches the other's parameters
            temperature_loss = self.temperature_loss(log_prob)
            metrics["loss/temperature"] = temperature_loss.detach()
            self._step(actor_loss + temperature_loss, "actor", "temperature")
        else:
            self._step(actor_loss, "actor")

        for slow, online, tau in self.copies:
            polyak(slow, online, tau)
        return metrics | {
            "loss/critic": critic_loss.detach(),
            "loss/actor": actor_loss.detach(),
            "sac/alpha": alpha,
            "sac/entropy": -log_prob.detach().mean(),
            "sac/q_mean": prediction.detach().mean(),
        }

    def _sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(observation, self.noise)
        noise = torch.randn(mean.shape, generator=self.noise, dtype=mean.dtype, device=self.device)
        return squashed_sample(mean, log_std, noise)

    def _set_training(self, mode: bool) -> None:
        """`actor.train(mode)` for the few modules that read it: to visit all takes time."""
        for module in (self.actor, *self.batch_norms):
            module.training = mode

    def _step(self, loss: Tensor, *names: str) -> None:
        """A step of the named optimisers; gradients reach their parameters and no others."""
        optimizers = [self.optimizers[name] for name in names]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [p for group in groups for p in group["params"]]
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        torch.autograd.graph.increment_version(parameters)  # torch's fused step does not

    def reestimate(self, observation: Tensor) -> None:
        """Re-estimate BatchNorm's running statistics from raw observations, [B, obs]."""
        for actor in {self.actor, self.policy_actor}:
            reestimate(actor, self.normalize(observation))

    def set_progress(self, progress: float, best_return: float | None = None) -> None:
        """Follow the schedules: `progress` is the share of training done, 0 to 1.

        Learning rates stay, then fall linearly to a tenth over the last `learning.anneal` share.
        """
        share, left = self.config.learning.anneal, max(0.0, 1 - progress)
        factor = 1.0 if left >= share else 0.1 + 0.9 * left / share
        self.actor.set_progress(progress, best_return)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

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
            "log_alpha": self.log_alpha.detach(),
            "target_entropy": self.target_entropy,
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
        with torch.no_grad():
            self.log_alpha.copy_(state["log_alpha"])
        self.target_entropy = state["target_entropy"]
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        # A stream belongs to its kind of device; elsewhere the run goes on from a fresh one.
        if state["streams"]["noise"].numel() == self.noise.get_state().numel():
            self.exploration.set_state(state["streams"]["exploration"].cpu())
            self.noise.set_state(state["streams"]["noise"].cpu())


def make_actor(
    config: Config, observation_size: int, action_size: int
) -> DenseActor | SpikingActor:
    """The actor switch: both kinds map [B, obs] to (mean, log_std), each [B, act]."""
    if config.san:
        return SpikingActor(config.actor, config.spiking, observation_size, action_size)
    return DenseActor(config.actor, observation_size, action_size)


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


def adam(groups: Iterable[tuple[Iterable[Tensor], float]]) -> torch.optim.Adam:
    """Adam over (parameters, learning rate) pairs, one fused call a step."""
    settings = [{"params": list(p), "lr": lr, "initial_lr": lr} for p, lr in groups]
    return torch.optim.Adam(settings, fused=True)


def averaged(module: nn.Module) -> list[Tensor]:
    """What `polyak` moves: parameters and floating-point buffers."""
    tensors = module.state_dict(keep_vars=True).values()
    return [tensor for tensor in tensors if tensor.is_floating_point()]


@torch.no_grad()
def polyak(target: list[Tensor], online: list[Tensor], tau: float) -> None:
    """target <- (1 - tau) target + tau online, in place, one call for all."""
    torch._foreach_lerp_(target, online, tau)
