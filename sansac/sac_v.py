"""Soft actor-critic with a value network (Haarnoja et al. 2018, arXiv:1801.01290), its temperature
fixed or learned (arXiv:1812.05905)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sansac.algorithm import SAC
from sansac.config import Config
from sansac.networks import mlp
from sansac.off_policy import adam, polyak
from sansac.replay import Batch


class SACV(SAC):
    """`SAC` whose critics bootstrap from a slow copy of V(s) in place of slow critics."""

    slow_critic = False

    def __init__(
        self, config: Config, observation_size: int, action_size: int, device: str
    ) -> None:
        super().__init__(config, observation_size, action_size, device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            widths = [observation_size, *config.critic.hidden, 1]
            self.value = mlp(widths, config.critic.layer_norm).to(device)
        self.target_value = self.slow_copy(self.value)
        groups = [(self.value.parameters(), config.critic.learning_rate)]
        self.optimizers["value"] = adam(groups, config.learning.betas)

    def value_loss(self, batch: Batch, action: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
        """J(V) = E[1/2 (V(s) - (min_i Q_i(s, a) - alpha log pi(a|s)))^2], a ~ pi (paper, eq. 5)."""
        with torch.no_grad():
            target = self.critic.value(batch.observation, action) - alpha * log_prob
        value = self.value(batch.observation).squeeze(-1)
        assert value.shape == target.shape, (value.shape, target.shape)
        return 0.5 * ((value - target).square() * batch.weight).mean()

    def q_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """J(Q) against y = r + discount V'(s') (paper, eq. 7 and 8); n-step sums as in `SAC`.

        Returns the loss and the critics' prediction, [copies, B, quantiles].
        """
        with torch.no_grad():
            bootstrap = self.target_value(batch.next_observation)
            target = batch.reward[:, None] + batch.discount[:, None] * bootstrap
        prediction = self.critic(batch.observation, batch.action)
        return self.regress(prediction, target, batch.weight), prediction

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One step of value, critics, actor with temperature, and targets, in this order.

        Temperature and actor take part in every learning.policy_delay-th update. Returns detached
        scalar tensors by their tag; nothing here waits for the device.
        """
        batch = self.normalized(batch)
        alpha = self.log_alpha.detach().exp()
        self.updates += 1
        acting = self.updates % self.config.learning.policy_delay == 0
        metrics = {"sac/alpha": alpha}

        self.set_training(True)  # batch statistics, where a stack has them, here alone
        action, log_prob = self._sample(batch.observation)
        self.set_training(False)

        value_loss = self.value_loss(batch, action, log_prob, alpha)
        self.optimize(value_loss, "value")
        metrics["loss/value"] = value_loss.detach()

        critic_loss, prediction = self.q_loss(batch)
        self.optimize(critic_loss, "critic")
        metrics["loss/critic"] = critic_loss.detach()
        metrics["sac/q_mean"] = prediction.detach().mean()

        if acting:
            actor_loss = self.actor_loss(batch, action, log_prob, alpha)
            self._step_actor(actor_loss, log_prob, metrics)

        for slow, online, tau in self.copies:
            polyak(slow, online, tau)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        own = {"value": self.value.state_dict(), "target_value": self.target_value.state_dict()}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.value.load_state_dict(state["value"])
        self.target_value.load_state_dict(state["target_value"])
