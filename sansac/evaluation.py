"""A trained policy as a function, and its evaluation over seeded episodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from sansac import kernels
from sansac.environments import (
    EVALUATION,
    MAX_EPISODE_STEPS,
    ActionScale,
    Episodic,
    MakeEnv,
    NonFiniteError,
    episode_seed,
)
from sansac.inference import action_mean
from sansac.off_policy import OffPolicy, averaged
from sansac.spiking import SpikingActor
from sansac.statistics import iqm


class Policy:
    """policy(observation) -> action, numpy in, numpy out, deterministic: the tanh of the mean.

    One observation [obs] gives one action [act] of the environment's own scale; a batch [B, obs]
    gives [B, act]. Raises ValueError for a wrong shape or a value that is not finite.
    """

    def __init__(self, algorithm: OffPolicy, scale: ActionScale) -> None:
        self.algorithm, self.scale = algorithm, scale
        self.observation_size = algorithm.norm.mean.numel()
        norm = algorithm.norm
        self.parameters = [*averaged(algorithm.policy_actor), norm.centre, norm.scale]
        self.version = -1
        self.fused: kernels.ActionMean | None = None

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        array = self._checked(observation)
        if array.ndim == 1 and (fused := self._fused()):
            return self.scale(np.tanh(fused(array), dtype=np.float64))  # as exported C does
        return self.scale(self._run(array, self.algorithm.act))

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its own: what C points to is not copied."""
        return self.__dict__ | {"fused": None, "version": -1}

    def _fused(self) -> kernels.ActionMean | None:
        """The policy in C, made anew where its parameters have changed."""
        version = sum(parameter._version for parameter in self.parameters)
        if version != self.version:
            self.fused, self.version = action_mean(self.algorithm), version
        return self.fused

    def sample(self, observation: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """An action drawn from the policy with a stream of the caller's."""
        array = self._checked(observation)
        return self.scale(self._run(array, lambda x: self.algorithm.sample(x, generator)))

    def _checked(self, observation: np.ndarray) -> np.ndarray:
        array = np.asarray(observation, dtype=np.float32)
        if array.shape[-1:] != (self.observation_size,) or array.ndim > 2:
            raise ValueError(
                f"expected an observation of shape ({self.observation_size},) or "
                f"(batch, {self.observation_size}), found {array.shape}"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"observation is not finite: {array}")
        return array

    def _run(self, array: np.ndarray, act: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
        batch = torch.from_numpy(np.atleast_2d(array)).to(self.algorithm.device)
        return act(batch).cpu().numpy().reshape(*array.shape[:-1], -1)

    def firing_rates(self, observations: np.ndarray) -> list[float] | None:
        """Spikes a neuron a simulation step of each layer over [B, obs]; None for a dense actor."""
        return [float(spikes.mean()) for spikes in self._spikes(observations)] or None

    def spikes(self, observation: np.ndarray) -> list[np.ndarray]:
        """Which neurons of each layer fire when the policy meets [obs]: booleans [T, neurons]; no
        layers for a dense actor."""
        return [spikes[:, 0].bool().cpu().numpy() for spikes in self._spikes(observation[None])]

    def _spikes(self, observations: np.ndarray) -> list[torch.Tensor]:
        """[T, B, neurons] of each spiking layer."""
        actor = self.algorithm.policy_actor
        if not isinstance(actor, SpikingActor):
            return []
        batch = torch.from_numpy(observations).to(self.algorithm.device)
        return [trace.spikes for trace in actor.trace(self.algorithm.normalize(batch))]


def evaluate(
    policy: Policy,
    make_env: MakeEnv,
    *,
    episodes: int,
    seed: int,
    stochastic: bool = False,
    on_episode: Callable[[float], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Run episodes 0..episodes-1, each on a seed derived from (seed, episode), to their end.

    Actions are computed one observation at a time, so an episode's numbers depend on nothing but
    the policy and its seed. Returns `returns`, their statistics, `length_mean` and, for a spiking
    actor, `firing_rate` a layer; None where `should_stop` cut it short.
    """
    env = Episodic(make_env(), role="evaluation environment")
    returns: list[float] = []
    lengths: list[int] = []
    rates: list[list[float]] = []
    try:
        for episode in range(episodes):
            episode_return, observations = run_episode(
                policy, env, episode_seed(EVALUATION, seed, episode), stochastic, should_stop
            )
            if should_stop():
                return None
            returns.append(episode_return)
            lengths.append(len(observations))
            rates += [r] if (r := policy.firing_rates(observations)) else []
            on_episode(episode_return)
    finally:
        env.close()
    result: dict[str, Any] = {
        "returns": returns,
        "return_mean": float(np.mean(returns)),
        "return_std": float(np.std(returns)),
        "return_iqm": float(iqm(returns)),
        "return_min": float(np.min(returns)),
        "return_max": float(np.max(returns)),
        "length_mean": float(np.mean(lengths)),
    }
    if rates:
        result["firing_rate"] = np.average(rates, axis=0, weights=lengths).tolist()
    return result


def random_return(make_env: MakeEnv, *, episodes: int, seed: int) -> float:
    """Mean return of uniformly random actions over the episodes that `evaluate` plays: where the
    scale of returns begins."""
    env = Episodic(make_env(), role="evaluation environment")
    env.action_space.seed(seed)
    try:
        seeds = [episode_seed(EVALUATION, seed, episode) for episode in range(episodes)]
        returns = [run_episode(lambda _: env.action_space.sample(), env, s)[0] for s in seeds]
    finally:
        env.close()
    return float(np.mean(returns))


def summary(result: dict[str, Any]) -> dict[str, str]:
    """The statistics of an evaluation for people to read, each by what it is."""
    rows = {
        "return, mean ± std": f"{result['return_mean']:.1f} ± {result['return_std']:.1f}",
        "return, interquartile mean": f"{result['return_iqm']:.1f}",
        "return, lowest to highest": f"{result['return_min']:.1f} to {result['return_max']:.1f}",
        "episode length, mean": f"{result['length_mean']:.1f}",
    }
    for layer, rate in enumerate(result.get("firing_rate", ())):
        rows[f"firing rate, layer {layer}"] = f"{rate:.3f}"
    return rows


def run_episode(
    policy: Policy | Callable[[np.ndarray], np.ndarray],
    env: gym.Env,
    seed: int,
    stochastic: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[np.ndarray, float], None] = lambda observation, total: None,
) -> tuple[float, np.ndarray]:
    """One episode to its end: its undiscounted return and its observations [steps, obs].

    Actions are `policy(observation)`, or drawn from a Policy where `stochastic`. `on_step` gets the
    observation that a step's action was for, and the return after it.
    """
    act: Callable[[np.ndarray], np.ndarray] = policy
    if stochastic:
        assert isinstance(policy, Policy)
        generator = torch.Generator(policy.algorithm.device).manual_seed(seed)
        act = partial(policy.sample, generator=generator)
    observation, _ = env.reset(seed=seed)
    observations: list[np.ndarray] = []
    total = 0.0
    while not should_stop() and len(observations) < MAX_EPISODE_STEPS:
        observations.append(np.asarray(observation, np.float32))
        observation, reward, terminated, truncated, _ = env.step(act(observations[-1]))
        total += float(reward)
        if not (math.isfinite(total) and np.isfinite(observation).all()):
            raise NonFiniteError(
                f"evaluation episode of seed {seed}, step {len(observations)}: the reward is "
                f"{reward}, the observation {observation}"
            )
        on_step(observations[-1], total)
        if terminated or truncated:
            break
    return total, np.array(observations, np.float32)
