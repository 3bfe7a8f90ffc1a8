"""Evaluation: every statistic against a value worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import Line, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from sansac import evaluation
from sansac.environments import EVALUATION, TRAINING, Episodic, episode_seed
from sansac.evaluation import evaluate, random_return, run_episode
from sansac.manager import Manager


class Scripted(Line):
    """Line whose n-th episode has a length and, at its end, a reward of its own."""

    script = [(2, 10.0), (4, -6.0), (1, 100.0), (3, 2.0), (2, 4.0)]  # noqa: RUF012

    def reset(self, **arguments: Any) -> Any:
        result = super().reset(**arguments)
        self.length, self.final = self.script[(self.episode - 1) % len(self.script)]
        return result

    def step(self, action: np.ndarray) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, self.final * (terminated or truncated), terminated, truncated, info


def agent(san: bool = False, **changes: Any) -> Manager:
    return Manager(tiny(env="Line", san=san, **changes), make_env=Line)


def test_the_statistics_are_those_of_the_returns() -> None:
    """Returns 10, -6, 100, 2, 4: the interquartile mean leaves one out at each end."""
    result = evaluate(agent().policy, Scripted, episodes=5, seed=0)
    assert result == {
        "returns": [10.0, -6.0, 100.0, 2.0, 4.0],
        "return_mean": 22.0,
        "return_std": pytest.approx(((144 + 784 + 6084 + 400 + 324) / 5) ** 0.5),
        "return_iqm": pytest.approx((2 + 4 + 10) / 3),
        "return_min": -6.0,
        "return_max": 100.0,
        "length_mean": 12 / 5,
    }


def test_one_episode_has_statistics_too() -> None:
    result = evaluate(agent().policy, Scripted, episodes=1, seed=0)
    assert result is not None
    assert (result["return_mean"], result["return_std"], result["return_iqm"]) == (10, 0, 10)


def test_random_actions_are_played_in_the_episodes_of_an_evaluation() -> None:
    """The return is that of the actions drawn, which are uniform; the episodes are the same."""
    seeds: list[int] = []

    class Acted(Line):
        def reset(self, *, seed: int | None = None, **arguments: Any) -> Any:
            seeds.append(seed or 0)
            return super().reset(seed=seed, **arguments)

        def step(self, action: np.ndarray) -> Any:
            observation, _, *rest = super().step(action)
            return observation, float(action[0]), *rest

    low, high = Acted().action_space.low[0], Acted().action_space.high[0]
    mean = random_return(lambda: Acted(length=40), episodes=100, seed=7)
    spread = 40 * (high - low) / 12**0.5 / 4000**0.5
    assert 0 < abs(mean - 40 * (low + high) / 2) < 4 * spread
    assert seeds == [episode_seed(EVALUATION, 7, episode) for episode in range(100)]
    assert mean == random_return(lambda: Acted(length=40), episodes=100, seed=7)


def test_a_return_is_the_undiscounted_sum_to_the_end_of_the_episode() -> None:
    """Both ends count, a terminated and a truncated one."""
    for terminates in (True, False):
        env = Episodic(Line(length=6, terminates=terminates))
        total, observations = run_episode(agent().policy, env, seed=0)
        assert total == 6 * 10 + (1 + 2 + 3 + 4 + 5 + 6)
        np.testing.assert_allclose(observations[:, 0], np.arange(6) / 6, rtol=1e-6)


def test_firing_rates_are_of_all_steps_of_all_episodes() -> None:
    """An episode weighs by its length: the same as one pass over every observation met."""
    manager = agent(san=True, actor={"hidden": [16, 8]})
    for layer in manager.algorithm.actor.layers:
        torch.nn.init.constant_(layer.linear.bias, 0.3)

    class Moving(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.met: list[np.ndarray] = []

        def _observe(self) -> np.ndarray:
            self.met.append(np.float32([self.life % 7 - 3, self.k]))
            return self.met[-1]

    env = Moving()
    result = evaluate(manager.policy, lambda: env, episodes=5, seed=0)
    assert result is not None
    ends = np.cumsum([length + 1 for length, _ in Scripted.script]) - 1
    met = np.array([o for i, o in enumerate(env.met) if i not in ends])
    assert len(met) == 12
    assert result["firing_rate"] == pytest.approx(manager.policy.firing_rates(met))
    assert len(result["firing_rate"]) == 2 and min(result["firing_rate"]) > 0


def test_sampled_actions_differ_and_follow_the_seed() -> None:
    """case 9: only when asked for, drawn from the policy, from a stream of the evaluation's own."""

    def actions(stochastic: bool, seed: int) -> np.ndarray:
        env = Line()
        evaluate(policy, lambda: env, episodes=3, seed=seed, stochastic=stochastic)
        return np.array(env.actions)

    policy = agent().policy
    state = torch.random.get_rng_state()
    sampled = actions(True, 0)
    assert (actions(True, 0) == sampled).all()
    assert (actions(True, 1) != sampled).any()
    assert len(np.unique(sampled, axis=0)) == 15
    np.testing.assert_array_equal(actions(False, 0), actions(False, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (sampled >= [-1, 2]).all() and (sampled <= [3, 6]).all()


def test_sampled_actions_have_the_policys_mean_and_spread() -> None:
    policy = agent().policy
    observation = np.zeros(2, np.float32)
    with torch.no_grad():
        mean, log_std = policy.algorithm.policy_actor(torch.zeros(1, 2))
    generator = torch.Generator().manual_seed(0)
    drawn = np.array([policy.sample(observation, generator) for _ in range(3000)])
    low, high = np.float64([-1, 2]), np.float64([3, 6])
    u = np.arctanh(2 * (drawn - low) / (high - low) - 1)
    np.testing.assert_allclose(u.mean(0), mean[0].numpy(), atol=0.1)
    np.testing.assert_allclose(u.std(0), log_std[0].exp().numpy(), rtol=0.1)


def test_every_episode_is_run_on_its_own_seed_to_its_end() -> None:
    """The first N to finish would favour short episodes; a signal alone cuts one short."""
    seeds: list[int] = []

    class Noted(Scripted):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seeds.append(-1 if seed is None else seed)
            return super().reset(seed=seed, options=options)

    told: list[float] = []
    evaluate(agent().policy, Noted, episodes=4, seed=9, on_episode=told.append)
    assert seeds == [episode_seed(EVALUATION, 9, i) for i in range(4)]
    assert told == [10.0, -6.0, 100.0, 2.0]
    stopped = evaluate(agent().policy, Noted, episodes=9, seed=9, should_stop=lambda: len(told) > 4,
                       on_episode=told.append)  # fmt: skip
    assert stopped is None and len(told) == 5


@given(st.integers(0, 2**40), st.lists(st.integers(0, 10**6), min_size=1, max_size=2))
@settings(max_examples=50)
def test_training_and_evaluation_never_share_a_seed(seed: int, index: list[int]) -> None:
    training, testing = (episode_seed(p, seed, *index) for p in (TRAINING, EVALUATION))
    assert training % 2 == 0 and testing % 2 == 1
    assert max(training, testing) < 2**31


def test_an_environment_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_EPISODE_STEPS", 30)
    result = evaluate(agent().policy, lambda: Line(length=10**9), episodes=2, seed=0)
    assert result is not None and result["length_mean"] == 30


def test_the_environment_is_closed_whatever_happens() -> None:
    closed: list[bool] = []

    class Failing(Line):
        def step(self, action: np.ndarray) -> Any:
            raise RuntimeError("simulator lost")

        def close(self) -> None:
            closed.append(True)

    with pytest.raises(RuntimeError, match="simulator lost"):
        evaluate(agent().policy, Failing, episodes=1, seed=0)
    assert closed == [True]


def test_an_observation_of_float64_is_accepted() -> None:
    """case 5"""
    policy = agent().policy
    assert (policy(np.zeros(2, np.float64)) == policy(np.zeros(2, np.float32))).all()
