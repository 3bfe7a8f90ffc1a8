"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905): its losses and its update.

The actor is a switch: dense or spiking, it maps normalised observations to the mean and log
standard deviation of a Gaussian before the tanh, and nothing below knows which it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sansac.config import Config
from sansac.exploration import HeldNoise
from sansac.networks import squashed_log_prob, squashed_sample
from sansac.off_policy import OffPolicy, adam, polyak
from sansac.replay import Batch
from sansac.schedules import Schedule, initial


class SAC(OffPolicy):
    """`OffPolicy` with a temperature. Truncated quantile critics, CrossQ, DroQ and REDQ are this
    class with another critic of `sansac.networks`."""

    def __init__(
        self, config: Config, observation_size: int, action_size: int, device: str
    ) -> None:
        super().__init__(config, observation_size, action_size, device)
        temperature, automatic = config.sac.temperature, config.sac.temperature == "auto"
        start = config.sac.initial_temperature if temperature == "auto" else initial(temperature)
        self.log_alpha = torch.tensor(start, device=self.device).log().requires_grad_(automatic)
        target = config.sac.target_entropy
        self.target_entropy = -float(action_size) if target == "auto" else float(target)
        if automatic:
            groups = [([self.log_alpha], config.sac.learning_rate)]
            self.optimizers["temperature"] = adam(groups, config.learning.betas)
        self.held = HeldNoise(config.exploration) if config.exploration.gsde else None

    # -- acting ------------------------------------------------------------------------------

    @torch.no_grad()
    def explore(self, observation: Tensor) -> Tensor:
        """Actions sampled from the current actor, [B, obs] -> [B, act]."""
        mean, log_std = self.actor(self.normalize(observation), self.exploration)
        if self.held is not None:
            return torch.tanh(mean + self.held(self.actor.log_std, self.exploration))
        noise = torch.randn(mean.shape, generator=self.exploration, device=self.device)
        return torch.tanh(mean + log_std.exp() * noise)

    def episodes_ended(self, ended: Tensor) -> None:
        if self.held is not None:
            self.held.redraw(ended, self.exploration)

    @torch.no_grad()
    def log_prob(self, observation: Tensor, action: Tensor) -> Tensor:
        """log pi(a|s) of the current actor, [B, obs], [B, act] -> [B]."""
        mean, log_std = self.actor(self.normalize(observation))
        return squashed_log_prob(mean, log_std, action)

    @torch.no_grad()
    def sample(self, observation: Tensor, stream: torch.Generator) -> Tensor:
        """Actions sampled from the policy with the caller's stream, [B, obs] -> [B, act]."""
        mean, log_std = self.policy_actor(self.normalize(observation))
        noise = torch.randn(mean.shape, generator=stream, device=self.device)
        return torch.tanh(mean + log_std.exp() * noise)

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
        prediction, bootstrap = self.critic.pair(batch, next_action, self.target_critic)
        with torch.no_grad():
            entropy_bonus = alpha * next_log_prob[:, None]
            target = batch.reward[:, None] + batch.discount[:, None] * (bootstrap - entropy_bonus)
        return self.regress(prediction, target, batch.weight), prediction

    def actor_loss(self, batch: Batch, action: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
        """J(pi) = E[alpha log pi(a|s) - Q(s, a)] (paper, eq. 7)."""
        value = self.critic.value(batch.observation, action)
        assert value.shape == log_prob.shape, (value.shape, log_prob.shape)
        return (alpha * log_prob - value).mean() + self.actor.penalty()

    # -- the update --------------------------------------------------------------------------

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One step of critics, then of actor and temperature, then of targets.

        Temperature and actor take part in every learning.policy_delay-th update. Returns detached
        scalar tensors by their tag; nothing here waits for the device.
        """
        batch = self.normalized(batch)
        alpha = self.log_alpha.detach().exp()
        self.updates += 1
        acting = self.updates % self.config.learning.policy_delay == 0
        metrics = {"sac/alpha": alpha}

        if acting:
            self.set_training(True)  # batch statistics, where a stack has them, here alone
            action, log_prob = self._sample(batch.observation)
            self.set_training(False)
        with torch.no_grad():
            next_action, next_log_prob = self._sample(batch.next_observation)

        critic_loss, prediction = self.critic_loss(batch, next_action, next_log_prob, alpha)
        self.optimize(critic_loss, "critic")
        metrics["loss/critic"] = critic_loss.detach()
        metrics["sac/q_mean"] = prediction.detach().mean()

        if acting:
            actor_loss = self.actor_loss(batch, action, log_prob, alpha)
            self._step_actor(actor_loss, log_prob, metrics)

        for slow, online, tau in self.copies:
            polyak(slow, online, tau)
        return metrics

    def _step_actor(self, loss: Tensor, log_prob: Tensor, metrics: dict[str, Tensor]) -> None:
        """A step of the actor, and with it of a learned temperature: neither loss reaches the
        other's parameters, so one backward serves both."""
        metrics["loss/actor"] = loss.detach()
        metrics["sac/entropy"] = -log_prob.detach().mean()
        if "temperature" not in self.optimizers:
            return self.optimize(loss, "actor")
        temperature_loss = self.temperature_loss(log_prob)
        metrics["loss/temperature"] = temperature_loss.detach()
        self.optimize(loss + temperature_loss, "actor", "temperature")

    def _sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(observation, self.noise)
        noise = torch.randn(mean.shape, generator=self.noise, dtype=mean.dtype, device=self.device)
        return squashed_sample(mean, log_std, noise)

    def set_progress(self, progress: float, best_return: float | None = None) -> None:
        super().set_progress(progress, best_return)
        temperature = self.config.sac.temperature
        if isinstance(temperature, Schedule):
            with torch.no_grad():
                self.log_alpha.fill_(temperature.at(progress, best_return)).log_()

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        held = {} if self.held is None else {"held": self.held.state_dict()}
        own = {"log_alpha": self.log_alpha.detach(), "target_entropy": self.target_entropy}
        return super().state_dict() | own | held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            self.log_alpha.copy_(state["log_alpha"])
        self.target_entropy = state["target_entropy"]
        if self.held is not None:
            self.held.load_state_dict(state["held"])
