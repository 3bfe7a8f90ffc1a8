"""The policy in C against the policy in torch."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import nn

from sansac import kernels
from sansac.algorithm import SAC
from sansac.config import Actor, Config, Spiking
from sansac.environments import ActionScale
from sansac.evaluation import Policy
from sansac.inference import action_mean
from sansac.replay import Batch

SCALE = ActionScale(Box(-1.0, 1.0, (3,), np.float32))

pytestmark = pytest.mark.skipif(
    kernels.backend_for("auto", torch.device("cpu")) != "native", reason="no C compiler"
)


def agent(*, san: bool, actor: dict[str, Any] | None = None, normalize: bool = True,
          **spiking: Any) -> SAC:  # fmt: skip
    """An agent whose weights, statistics and normaliser are not the initial ones."""
    config = Config(
        env="Pendulum-v1", san=san, actor=Actor(**{"hidden": (33, 18), **(actor or {})}),
        spiking=Spiking(**spiking), normalize_observations=normalize, observation_clip=1.5,
    )  # fmt: skip
    sac = SAC(config, 7, 3, "cpu")
    torch.manual_seed(0)
    sac.norm.update(2 * torch.randn(50, 7) + 1)
    for module in sac.actor.modules():
        if isinstance(module, nn.BatchNorm1d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None
                nn.init.uniform_(tensor, 0.2, 0.8)
    return sac


def assert_same_actions(sac: SAC) -> None:
    observations = 4 * torch.randn(300, 7, generator=torch.Generator().manual_seed(1))
    policy = Policy(sac, SCALE)
    expected = sac.act(observations).numpy()
    found = np.array([policy(row) for row in observations.numpy()])
    assert policy.fused is not None
    # A voltage at its threshold may fall on either side: a spike more or less, in few actions.
    close = np.isclose(found, expected, atol=1e-5).all(1)
    assert close.mean() > (0.98 if sac.config.san else 0.999)
    assert len(np.unique(expected[:, 0])) > 10


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_dense_policy_is_torchs(batch_norm: bool, normalize: bool) -> None:
    assert_same_actions(agent(san=False, actor={"batch_norm": batch_norm}, normalize=normalize))


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("time_steps", [1, 2, 5])
@pytest.mark.parametrize(
    "neuron",
    [
        {"neuron": "lif", "tau": 1.7},
        {"neuron": "lif", "decay_input": False},
        {"neuron": "plif", "learn_threshold": True},
        {"neuron": "cuba"},
        {"decoder": "population", "output_population": 30},
    ],
)
def test_a_spiking_policy_is_torchs(
    batch_norm: bool, time_steps: int, neuron: dict[str, Any]
) -> None:
    sac = agent(san=True, actor={"batch_norm": batch_norm}, time_steps=time_steps,
                v_threshold=0.4, **neuron)  # fmt: skip
    assert_same_actions(sac)


@pytest.mark.parametrize(
    ("actor", "spiking"),
    [
        ({"layer_norm": True}, {}),
        ({}, {"encoder": "population"}),
        ({}, {"decoder": "membrane"}),
        ({}, {"decoder": "population", "output_connections": True}),
        ({}, {"neuron": "alif"}),
        ({}, {"backend": "torch"}),
        ({}, {"backend": "spikingjelly"}),
    ],
)
def test_other_stacks_stay_with_torch(actor: dict[str, Any], spiking: dict[str, Any]) -> None:
    sac = agent(san=True, actor=actor, **spiking)
    assert action_mean(sac) is None
    observation = np.ones(7, np.float32)
    expected = sac.act(torch.ones(1, 7)).numpy()[0]
    np.testing.assert_array_equal(Policy(sac, SCALE)(observation), expected)


def test_a_dense_actor_of_few_levels_stays_with_torch() -> None:
    sac = agent(san=False, actor={"levels": 3})
    assert action_mean(sac) is None
    expected = sac.act(torch.ones(1, 7)).numpy()[0]
    np.testing.assert_array_equal(Policy(sac, SCALE)(np.ones(7, np.float32)), expected)


@pytest.mark.parametrize("average", [1.0, 0.1])
@pytest.mark.parametrize("san", [False, True])
def test_a_policy_follows_the_weights(san: bool, average: float) -> None:
    """After an update, new statistics, and weights loaded from elsewhere."""
    sac = agent(san=san, actor={"batch_norm": True, "average": average})
    policy, observation = Policy(sac, SCALE), np.full(7, 0.3, np.float32)
    seen = [policy(observation)]
    torch.manual_seed(0)
    batch = Batch(
        torch.randn(64, 7), torch.rand(64, 3), torch.randn(64), torch.randn(64, 7),
        torch.ones(64), torch.ones(64),
    )  # fmt: skip
    other = agent(san=san, actor={"batch_norm": True, "hidden": (33, 18)}).weights()
    changes = [
        lambda: [sac.update(batch) for _ in range(20)],
        lambda: sac.reestimate(torch.randn(500, 7)),
        lambda: sac.norm.update(torch.randn(500, 7)),
        lambda: sac.load_weights(other),
    ]
    for change in changes:
        change()
        seen.append(policy(observation))
        expected = sac.act(torch.from_numpy(observation)[None]).numpy()[0]
        np.testing.assert_allclose(seen[-1], expected, atol=1e-5)
    if not san:  # a spike may not move by as little
        assert all((a != b).any() for a, b in pairwise(seen))


def test_an_action_is_the_callers_to_keep() -> None:
    policy = Policy(agent(san=False), SCALE)
    first = policy(np.ones(7, np.float32))
    kept = first.copy()
    policy(np.zeros(7, np.float32))
    np.testing.assert_array_equal(first, kept)
