"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477).

DDPG (Lillicrap et al. 2016, arXiv:1509.02971) is its preset: one critic, no delay, no smoothing.
The actor is the same switch as SAC's, of which the tanh of the mean is the policy; its log-std head
learns nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sansac.config import Config
from sansac.exploration import ActionNoise
from sansac.networks import DenseActor
from sansac.off_policy import OffPolicy, adam, polyak
from sansac.replay import Batch
from sansac.schedules import at


class TD3(OffPolicy):
    """`OffPolicy` with a target actor: a slow copy, or a proxy."""

    def __init__(
        self, config: Config, observation_size: int, action_size: int, device: str
    ) -> None:
        super().__init__(config, observation_size, action_size, device)
        betas = config.learning.betas
        named = self.actor.named_parameters()
        policy = [p for name, p in named if not name.startswith("log_std.")]
        self.optimizers["actor"] = adam([(policy, config.actor.learning_rate)], betas)
        self.action_noise = ActionNoise(config.exploration)
        self.proxy = config.td3.target_actor == "proxy"
        if self.proxy:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                plain = config.actor.model_copy(update={"batch_norm": False, "layer_norm": False})
                self.target_actor: Any = DenseActor(plain, observation_size, action_size).to(device)
            layers = [*self.target_actor.layers, self.target_actor.mean]
            weights = itertools.chain(*(layer.parameters() for layer in layers))
            self.optimizers["proxy"] = adam([(weights, config.td3.proxy_learning_rate)], betas)
        else:
            self.target_actor = self.slow_copy(self.actor)

    # -- acting ------------------------------------------------------------------------------

    @torch.no_grad()
    def explore(self, observation: Tensor) -> Tensor:
        """The current actor's actions with noise, clipped to [-1, 1], [B, obs] -> [B, act]."""
        mean, _ = self.actor(self.normalize(observation), self.exploration)
        sigma = at(self.config.exploration.noise, self.progress, self.best_return)
        noise = self.action_noise(mean, self.exploration)
        return (torch.tanh(mean) + sigma * noise).clamp(-1, 1)

    @torch.no_grad()
    def sample(self, observation: Tensor, stream: torch.Generator) -> Tensor:
        """The policy with Gaussian noise of the caller's stream, [B, obs] -> [B, act]."""
        action = self.act(observation)
        noise = torch.randn(action.shape, generator=stream, device=self.device)
        sigma = at(self.config.exploration.noise, self.progress, self.best_return)
        return (action + sigma * noise).clamp(-1, 1)

    def episodes_ended(self, ended: Tensor) -> None:
        self.action_noise.end(ended)

    # -- losses ------------------------------------------------------------------------------

    def critic_loss(self, batch: Batch, next_action: Tensor) -> tuple[Tensor, Tensor]:
        """(Q_i(s, a) - y)^2 over all critics, y = r + discount min_i Q'_i(s', a') (paper, alg. 1).

        Returns the loss and the online critics' prediction, [copies, B, quantiles].
        """
        prediction, bootstrap = self.critic.pair(batch, next_action, self.target_critic)
        target = batch.reward[:, None] + batch.discount[:, None] * bootstrap
        return self.regress(prediction, target, batch.weight), prediction

    def actor_loss(self, observation: Tensor, action: Tensor) -> Tensor:
        """-E[Q_1(s, pi(s))] (paper, alg. 1)."""
        value = self.critic(observation, action, frozen=True)[0].mean(-1)
        return -value.mean() + self.actor.penalty()

    def proxy_loss(self, observation: Tensor, action: Tensor) -> Tensor:
        """E[|proxy(s) - pi(s)|^2] (after Xu et al. 2025, arXiv:2505.24161)."""
        return F.mse_loss(torch.tanh(self.target_actor(observation)[0]), action)

    # -- the update --------------------------------------------------------------------------

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One step of the critics; every learning.policy_delay-th time of actor and targets too.

        Returns detached scalar tensors by their tag; nothing here waits for the device.
        """
        batch, config = self.normalized(batch), self.config
        self.updates += 1
        critic_loss, prediction = self.critic_loss(batch, self.smoothed(batch.next_observation))
        self.optimize(critic_loss, "critic")
        metrics = {"loss/critic": critic_loss.detach(), "sac/q_mean": prediction.detach().mean()}

        if self.updates % config.learning.policy_delay == 0:
            self.set_training(True)  # batch statistics, where a stack has them, here alone
            action = torch.tanh(self.actor(batch.observation, self.noise)[0])
            self.set_training(False)
            actor_loss = self.actor_loss(batch.observation, action)
            self.optimize(actor_loss, "actor")
            metrics["loss/actor"] = actor_loss.detach()
            if self.proxy:
                metrics["loss/proxy"] = self.fit_proxy(batch.observation)
            for slow, online, tau in self.copies:
                polyak(slow, online, tau)
        return metrics

    @torch.no_grad()
    def smoothed(self, observation: Tensor) -> Tensor:
        """The target actor's action with clipped noise, in [-1, 1] (paper, eq. 14)."""
        action = torch.tanh(self.target_actor(observation)[0])
        smoothing, clip = self.config.td3.smoothing, self.config.td3.smoothing_clip
        if smoothing:
            noise = torch.randn(
                action.shape, generator=self.noise, dtype=action.dtype, device=self.device
            )
            action = (action + (smoothing * noise).clamp(-clip, clip)).clamp(-1, 1)
        return action

    def fit_proxy(self, observation: Tensor) -> Tensor:
        """Steps of the proxy towards the actor; the loss of the last."""
        with torch.no_grad():
            action = torch.tanh(self.actor(observation)[0])
        for _ in range(self.config.td3.proxy_updates):
            loss = self.proxy_loss(observation, action)
            self.optimize(loss, "proxy")
        return loss.detach()

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        own = {
            "target_actor": self.target_actor.state_dict(),
            "action_noise": self.action_noise.state_dict(),
        }
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.target_actor.load_state_dict(state["target_actor"])
        self.action_noise.load_state_dict(state["action_noise"])
