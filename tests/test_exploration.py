"""Noise on actions: its distribution over steps, environments and episodes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from test_family import make

from sansac.config import Exploration
from sansac.exploration import ActionNoise
from sansac.manager import Manager
from sansac.networks import StateDependentStd


def series(config: Exploration, steps: int, envs: int = 200) -> np.ndarray:
    noise, stream = ActionNoise(config), torch.Generator().manual_seed(0)
    like = torch.zeros(envs, 1)
    return np.stack([noise(like, stream).numpy()[:, 0] for _ in range(steps)])


@pytest.mark.parametrize(("kind", "reversion"), [("gaussian", 0.15), ("ou", 0.15), ("ou", 0.5)])
def test_noise_has_unit_spread_and_the_memory_of_its_kind(kind: Any, reversion: float) -> None:
    """An Ornstein-Uhlenbeck process forgets by (1 - r) a step; Gaussian noise at once."""
    values = series(Exploration(kind=kind, reversion=reversion), 600)[100:]
    assert values.std() == pytest.approx(1, abs=0.03)
    keep = 1 - reversion if kind == "ou" else 0.0
    for lag in (1, 3, 8):
        correlation = (values[lag:] * values[:-lag]).mean()
        assert correlation == pytest.approx(keep**lag, abs=0.04)


def test_an_episode_begins_without_what_the_last_one_left() -> None:
    noise, stream = ActionNoise(Exploration(kind="ou")), torch.Generator().manual_seed(0)
    like = torch.zeros(3, 2)
    for _ in range(50):
        noise(like, stream)
    noise.end(torch.tensor([True, False, True]))
    assert noise.value is not None
    assert (noise.value[[0, 2]] == 0).all() and (noise.value[1] != 0).all()


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_training_actions_stay_in_bounds_and_spread_as_asked(name: str) -> None:
    agent = make(name, exploration={"kind": "gaussian", "noise": 0.2})
    observation = torch.zeros(5000, 4)
    off = agent.explore(observation) - agent.act(observation)
    assert float(off.std()) == pytest.approx(0.2, rel=0.05)
    agent = make(name, exploration={"kind": "gaussian", "noise": 50.0})
    assert agent.explore(observation).abs().max() == 1


def test_the_warm_up_is_uniform() -> None:
    actions = make("td3").explore_uniformly(torch.zeros(20_000, 4)).numpy()
    histogram, _ = np.histogram(actions, bins=10, range=(-1, 1))
    assert histogram.sum() == actions.size
    assert np.abs(histogram / actions.size - 0.1).max() < 0.01


# -- gSDE ------------------------------------------------------------------------------------------


def test_the_spread_of_held_noise_is_the_policys_own() -> None:
    """Over many matrices, features E has the standard deviation that the head tells the loss."""
    torch.manual_seed(0)
    head = StateDependentStd(6, 2)
    torch.nn.init.normal_(head.weight)
    features = torch.randn(1, 6)
    matrices = head.weight.exp() * torch.randn(40_000, 6, 2)
    spread = torch.einsum("bf,nfa->na", features, matrices).std(0)
    torch.testing.assert_close(spread, head(features)[0].exp(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])
def test_a_matrix_is_held_for_its_steps_and_no_longer_than_an_episode(san: bool) -> None:
    """In one state the action then stays; another environment has another one."""
    agent = make("sac", san, exploration={"gsde": True, "gsde_steps": 4})
    observation = torch.randn(1, 4).expand(3, 4)
    actions = torch.stack([agent.explore(observation) for _ in range(9)])
    same = [torch.equal(a, b) for a, b in itertools.pairwise(actions)]
    assert same == [True, True, True, False, True, True, True, False]
    assert not torch.equal(actions[0, 0], actions[0, 1])
    before = agent.explore(observation)
    agent.episodes_ended(torch.tensor([False, True, False]))
    after = agent.explore(observation)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_the_heads_deviations_learn_and_features_do_not_feel_it() -> None:
    agent = make("sac", exploration={"gsde": True})
    start = agent.actor.log_std.weight.detach().clone()
    from test_algorithm import make_batch

    agent.update(make_batch(0))
    assert not torch.equal(agent.actor.log_std.weight, start)
    features = torch.randn(5, 16, requires_grad=True)
    agent.actor.log_std(features).sum().backward()
    assert features.grad is None


def test_noise_inside_neurons_is_for_exploration_of_any_algorithm() -> None:
    """A spiking TD3 actor explores by it even without noise on actions."""
    stack = {"charge_noise": 0.5, "time_steps": 3}
    for name in ("td3", "sac-v"):
        agent = make(name, True, spiking=stack, exploration={"noise": 0.0})
        observation = torch.randn(1, 4).expand(64, 4)
        assert agent.act(observation).std(0).max() == pytest.approx(0, abs=1e-6)
        assert agent.explore(observation).std(0).min() > 1e-3


def test_training_ends_noise_with_its_episode(tmp_path: Any) -> None:
    manager = Manager(tiny(tmp_path, algorithm="td3", exploration={"kind": "ou"}))
    ended: list[list[bool]] = []
    tell = manager.algorithm.episodes_ended
    manager.algorithm.episodes_ended = lambda e: (ended.append(e.tolist()), tell(e))[1]  # type: ignore[method-assign,assignment,func-returns-value]
    manager.train()
    assert ended == [[True, True]] * 2
