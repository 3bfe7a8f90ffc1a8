"""The off-policy family: losses and steps against Stable-Baselines3 and sb3-contrib where they have
the algorithm, by hand where they do not; and the main job of each, with both actors."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch
from conftest import Call, comparable, differences, tiny
from sb3_contrib.common.torch_layers import BatchRenorm
from stable_baselines3.common.logger import configure
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from test_algorithm import (
    ACT,
    OBS,
    B,
    Spaces,
    actor_by_their_names,
    assert_close,
    assert_equal,
    critic_by_their_names,
    make_batch,
    parameters,
    through_a_file,
)
from torch import Tensor, nn

import runner
from sansac import sweep
from sansac.algorithm import SAC
from sansac.config import ALGORITHM_NAMES, Config, ConfigError, merge, presets_for, resolve
from sansac.family import ALGORITHMS, make_algorithm, register_algorithm
from sansac.manager import Manager
from sansac.networks import DropoutCritic, EnsembleCritic, StackedBatchRenorm, squashed_log_prob
from sansac.off_policy import OffPolicy
from sansac.replay import Batch
from sansac.sac_v import SACV
from sansac.td3 import TD3

SMALL = {
    "learning": {"batch_size": 16, "learning_starts": 40},
    "actor": {"hidden": [16, 16], "batch_norm": False},
    "critic": {"hidden": [16, 16]},
    "normalize_observations": False,
}


def make(algorithm: str, san: bool = False, double: bool = False, **changes: Any) -> Any:
    """An agent of an algorithm's preset, small."""
    layers = {"san": san, "algorithm": algorithm} | SMALL
    for name, value in changes.items():
        old = layers.get(name)
        layers[name] = old | value if isinstance(old, dict) else value
    agent = make_algorithm(Config.for_env("none", **layers), OBS, ACT, "cpu")
    if double:
        for module in vars(agent).values():
            if isinstance(module, nn.Module):
                module.double()
        if isinstance(agent, SAC):
            agent.log_alpha.data = agent.log_alpha.data.double()
    return agent


def doubled(batch: Batch) -> Batch:
    """The convention of peers whose loss is a square and not half of one."""
    return batch._replace(weight=2 * batch.weight)


def samples(batch: Batch) -> Callable[..., ReplayBufferSamples]:
    return lambda *_, **__: ReplayBufferSamples(
        batch.observation,
        batch.action,
        batch.next_observation,
        (batch.discount == 0)[:, None].double(),
        batch.reward[:, None],
        batch.discount[:, None],
    )


def prepared(peer: Any) -> Any:
    peer.set_logger(configure(None, []))
    peer.policy.double()
    for module in peer.policy.modules():
        if hasattr(module, "extract_features"):
            module.extract_features = lambda observation, extractor: observation  # else float32
    return peer


RATE = {"learning_rate": 1e-3}
PEER = {"learning_rate": 1e-3, "buffer_size": 1, "tau": 0.05, "device": "cpu"}
NET = {"net_arch": [16, 16]}


# -- TD3 and DDPG ----------------------------------------------------------------------------------


def deterministic(actor: nn.Module) -> dict[str, Tensor]:
    """The parameters of our policy under Stable-Baselines3's names."""
    theirs = {"layers.0": "mu.0", "layers.1": "mu.2", "mean": "mu.4"}
    found = {}
    for name, parameter in actor.named_parameters():
        module, _, kind = name.rpartition(".")
        if module in theirs:
            found[f"{theirs[module]}.{kind}"] = parameter.detach().clone()
    return found


def critics(critic: nn.Module, copies: int) -> dict[str, Tensor]:
    named = critic_by_their_names(critic, lambda p: p) if copies == 2 else {}
    if copies == 1:
        for i, layer in enumerate([*critic.layers, critic.head]):  # type: ignore[union-attr,list-item]
            named[f"qf0.{2 * i}.weight"] = layer.weight.detach()[0].T.clone()
            named[f"qf0.{2 * i}.bias"] = layer.bias.detach()[0, 0].clone()
    return named


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_deterministic_updates_agree_with_stable_baselines3(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and all parameters, targets too, over six updates in float64: smoothing, delay and
    twins for TD3, none of them for DDPG."""
    agent = make(name, double=True, actor=RATE, critic=RATE, learning={"tau": 0.05})
    assert isinstance(agent, TD3)
    copies = agent.critic.copies
    kind = stable_baselines3.TD3 if name == "td3" else stable_baselines3.DDPG
    peer = prepared(kind("MlpPolicy", Spaces(), policy_kwargs=NET, **PEER))
    for actor, mine in ((peer.actor, agent.actor), (peer.actor_target, agent.target_actor)):
        actor.load_state_dict(deterministic(mine))
    for critic, mine in ((peer.critic, agent.critic), (peer.critic_target, agent.target_critic)):
        critic.load_state_dict(critics(mine, copies))

    stream = torch.Generator()
    stream.set_state(agent.noise.get_state())
    unit = [torch.randn(B, ACT, generator=stream, dtype=torch.float64) for _ in range(6)]
    deviations = []

    def normal_(self: Tensor, mean: float, deviation: float) -> Tensor:
        deviations.append(deviation)
        return self.copy_(deviation * unit.pop(0)) if deviation else self.zero_()

    monkeypatch.setattr(Tensor, "normal_", normal_)
    seen = []
    for update in range(6):
        batch = make_batch(update, torch.float64)
        peer.replay_buffer.sample = samples(batch)
        peer.train(gradient_steps=1, batch_size=B)
        metrics = agent.update(doubled(batch))
        logged = peer.logger.name_to_value
        assert_close(float(metrics["loss/critic"]), logged["train/critic_loss"])
        seen.append("loss/actor" in metrics)
        if seen[-1]:
            assert_close(float(metrics["loss/actor"]), logged["train/actor_loss"])
        for actor, mine in ((peer.actor, agent.actor), (peer.actor_target, agent.target_actor)):
            assert_close(deterministic(mine), dict(actor.state_dict()))
        for critic, mine in (
            (peer.critic, agent.critic), (peer.critic_target, agent.target_critic)
        ):  # fmt: skip
            assert_close(critics(mine, copies), dict(critic.state_dict()))
    assert seen == ([False, True] * 3 if name == "td3" else [True] * 6)
    assert set(deviations) == {0.2 if name == "td3" else 0.1}  # DDPG's is clipped to 0


def test_the_targets_action_stays_within_bounds() -> None:
    agent = make("td3", td3={"smoothing": 5.0, "smoothing_clip": 0.5})
    plain = torch.tanh(agent.target_actor(make_batch(0).next_observation)[0])
    smoothed = agent.smoothed(make_batch(0).next_observation)
    assert smoothed.abs().max() <= 1
    assert (smoothed - plain).abs().max() <= 0.5 + 1e-6
    assert ((smoothed - plain).abs() > 0.4).any()


def test_a_deterministic_policy_has_no_log_std_to_learn() -> None:
    agent = make("td3")
    start = parameters(agent.actor)
    for seed in range(4):
        agent.update(make_batch(seed))
    moved = {n for n, p in parameters(agent.actor).items() if not torch.equal(p, start[n])}
    assert moved == {name for name in start if not name.startswith("log_std.")}


@pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])
def test_the_proxy_comes_near_the_actor_and_stands_in_for_it(san: bool) -> None:
    """A dense network whose fit improves, that no slow average moves, and that targets use."""
    proxy = {"target_actor": "proxy", "smoothing": 0.0, "proxy_learning_rate": 1e-2}
    agent = make("td3", san, td3=proxy, actor={"learning_rate": 1e-6})
    assert type(agent.target_actor).__name__ == "DenseActor"
    assert len(agent.copies) == 1
    with torch.no_grad():
        (agent.actor.readout if san else agent.actor.mean).weight.mul_(5)
    losses = []
    for seed in range(400):
        metrics = agent.update(make_batch(seed % 2))
        losses += [float(metrics["loss/proxy"])] if "loss/proxy" in metrics else []
    assert len(losses) == 200
    assert np.mean(losses[-20:]) < 0.1 * losses[0]
    batch = make_batch(999)
    expected = torch.tanh(agent.target_actor(batch.next_observation)[0])
    assert torch.equal(agent.smoothed(batch.next_observation), expected)


# -- truncated quantile critics and CrossQ ---------------------------------------------------------


def entropic_peer(kind: Any, agent: SAC, **options: Any) -> Any:
    """A peer of sb3-contrib with a learned temperature and its log epsilon 0."""
    start = agent.config.sac.initial_temperature
    peer = prepared(kind("MlpPolicy", Spaces(), ent_coef=f"auto_{start}", **options))
    peer.actor.action_dist.epsilon = 0.0
    peer.log_ent_coef.data = agent.log_alpha.detach().clone().reshape(1)
    peer.actor.load_state_dict(actor_by_their_names(agent.actor, lambda p: p))
    return peer


def agree(agent: SAC, peer: Any, metrics: dict[str, Tensor]) -> None:
    logged = peer.logger.name_to_value
    assert_close(float(metrics["loss/critic"]), logged["train/critic_loss"])
    assert_close(agent.log_alpha.detach(), peer.log_ent_coef.detach()[0])
    if "loss/actor" in metrics:
        assert_close(float(metrics["loss/actor"]), logged["train/actor_loss"])
    assert_close(actor_by_their_names(agent.actor, lambda p: p), dict(peer.actor.state_dict()))


def test_quantile_updates_agree_with_sb3_contrib(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make("tqc", double=True, actor=RATE, critic=RATE, sac=RATE, learning={"tau": 0.05})
    policy = NET | {"n_quantiles": 25, "n_critics": 2}
    peer = entropic_peer(
        sb3_contrib.TQC, agent, policy_kwargs=policy, top_quantiles_to_drop_per_net=2, **PEER
    )
    for critic, mine in ((peer.critic, agent.critic), (peer.critic_target, agent.target_critic)):
        critic.load_state_dict(critics(mine, 2))
    stream = torch.Generator()
    stream.set_state(agent.noise.get_state())
    noise = [torch.randn(B, ACT, generator=stream, dtype=torch.float64) for _ in range(10)]
    monkeypatch.setattr(
        torch.distributions.normal, "_standard_normal", lambda *_, **__: noise.pop(0)
    )
    for update in range(5):
        batch = make_batch(update, torch.float64)
        peer.replay_buffer.sample = samples(batch)
        peer.train(gradient_steps=1, batch_size=B)
        metrics = agent.update(batch)
        # Their Huber weights are float32, ours of the critics' own precision.
        torch.testing.assert_close(
            float(metrics["loss/critic"]), peer.logger.name_to_value["train/critic_loss"]
        )
        agree_closely(critics(agent.critic, 2), dict(peer.critic.state_dict()))
        agree_closely(critics(agent.target_critic, 2), dict(peer.critic_target.state_dict()))
        agree_closely(actor_by_their_names(agent.actor, lambda p: p), dict(peer.actor.state_dict()))


def agree_closely(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-7)


def crossq_critics(critic: Any) -> dict[str, Tensor]:
    """Ours under sb3-contrib's names: norm, product, ReLU; norm, product, ReLU; norm, product."""
    named = {}
    for i, layer in enumerate([*critic.layers, critic.head]):
        norm = critic.renorms[i]
        for copy_ in range(2):
            at = f"qf{copy_}.{3 * i}"
            named[f"{at}.scale"] = norm.weight.detach()[copy_, 0].clone()
            named[f"{at}.bias"] = norm.bias.detach()[copy_, 0].clone()
            named[f"{at}.ra_mean"] = norm.running_mean[copy_, 0].clone()
            named[f"{at}.ra_var"] = norm.running_var[copy_, 0].clone()
            named[f"{at}.steps"] = norm.passes.clone()
            named[f"qf{copy_}.{3 * i + 1}.weight"] = layer.weight.detach()[copy_].T.clone()
            named[f"qf{copy_}.{3 * i + 1}.bias"] = layer.bias.detach()[copy_, 0].clone()
    return named


def test_crossq_updates_agree_with_sb3_contrib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the end of the warm-up of its batch renormalisation, with its delayed policy."""
    warmup = 3
    agent = make("crossq", double=True, critic={"batch_norm_warmup": warmup})
    assert agent.target_critic is agent.critic and not agent.copies
    options = {key: value for key, value in PEER.items() if key != "tau"}
    peer = entropic_peer_with_plain_actor(agent, warmup, options)
    peer.critic.load_state_dict(crossq_critics(agent.critic))

    stream = torch.Generator()
    stream.set_state(agent.noise.get_state())
    noise: list[Tensor] = []
    for update in range(1, 10):
        draws = [torch.randn(B, ACT, generator=stream, dtype=torch.float64)
                 for _ in range(2 if update % 3 == 0 else 1)]  # fmt: skip
        noise += reversed(draws)  # they draw for the next state first
    monkeypatch.setattr(
        torch.distributions.normal, "_standard_normal", lambda *_, **__: noise.pop(0)
    )
    for update in range(9):
        batch = make_batch(update, torch.float64)
        peer.replay_buffer.sample = samples(batch)
        peer.train(gradient_steps=1, batch_size=B)
        metrics = agent.update(batch)
        assert ("loss/actor" in metrics) == (update % 3 == 2)
        agree(agent, peer, metrics)
        assert_close(crossq_critics(agent.critic), dict(peer.critic.state_dict()))
    assert not noise


def entropic_peer_with_plain_actor(agent: SAC, warmup: int, options: dict[str, Any]) -> Any:
    peer = sb3_contrib.CrossQ(
        "MlpPolicy", Spaces(), ent_coef=f"auto_{agent.config.sac.initial_temperature}",
        policy_kwargs={"net_arch": [16, 16]}, policy_delay=3, **options,
    )  # fmt: skip
    policy = peer.policy
    policy.actor_kwargs["batch_norm"] = False
    policy.actor = peer.actor = policy.make_actor()
    betas = agent.config.learning.betas
    policy.actor.optimizer = torch.optim.Adam(policy.actor.parameters(), lr=1e-3, betas=betas)
    prepared(peer)
    peer.actor.action_dist.epsilon = 0.0
    peer.log_ent_coef.data = agent.log_alpha.detach().clone().reshape(1)
    for group in peer.ent_coef_optimizer.param_groups:
        group["betas"] = betas
    for module in peer.policy.modules():
        if isinstance(module, BatchRenorm):
            module.warmup_steps = warmup
    peer.actor.load_state_dict(actor_by_their_names(agent.actor, lambda p: p))
    return peer


def test_batch_renormalisation_of_each_copy_is_sb3_contribs() -> None:
    """Outputs, gradients and statistics, before and after the warm-up, then by running ones."""
    torch.manual_seed(0)
    ours = StackedBatchRenorm(2, 5, warmup=4)
    theirs = [BatchRenorm(5, warmup_steps=4) for _ in range(2)]
    for step in range(12):
        x = torch.randn(2, 32, 5) * (1 + step) + step
        left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        if step == 10:
            for module in (ours, *theirs):
                module.eval()
        y = ours(left)
        expected = torch.stack([norm(part) for norm, part in zip(theirs, right, strict=True)])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-3, atol=1e-4)


# -- REDQ, DroQ, SAC-V by hand ---------------------------------------------------------------------


def test_redq_takes_the_minimum_of_two_drawn_anew_and_follows_the_mean_of_all() -> None:
    agent = make("redq", critic={"copies": 5})
    assert isinstance(agent.critic, EnsembleCritic)
    batch = make_batch(0)
    values = torch.randn(5, B)
    agent.target_critic.forward = lambda *_: values[..., None]
    pairs = {(i, j): values[[i, j]].amin(0) for i in range(5) for j in range(i)}
    counts = dict.fromkeys(pairs, 0)
    for _ in range(600):
        target = agent.target_critic.target(batch.next_observation, batch.action)[:, 0]
        counts[next(k for k, v in pairs.items() if torch.equal(v, target))] += 1
    assert min(counts.values()) > 30, "each of the ten pairs about sixty times"
    value = agent.critic.value(batch.observation, batch.action)
    assert_close_32(value, agent.critic(batch.observation, batch.action).mean((0, 2)))


def assert_close_32(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right)


def test_droq_drops_units_of_a_share_and_keeps_their_mean() -> None:
    agent = make("droq", critic={"dropout": 0.25})
    assert isinstance(agent.critic, DropoutCritic)
    x = torch.ones(2, 500, 64)
    dropped = agent.critic.dropped(x)
    assert set(dropped.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    batch = make_batch(0)
    first = agent.critic.target(batch.observation, batch.action)
    assert not torch.equal(first, agent.critic.target(batch.observation, batch.action))


def test_dropout_of_nothing_is_the_plain_critic() -> None:
    """The same networks with a keep of all: the stack is Linear, dropout, LayerNorm, ReLU."""
    agent = make("droq", critic={"dropout": 1e-12})
    batch = make_batch(0)
    x = torch.cat([batch.observation, batch.action], -1)
    for copy_ in range(2):
        y = x
        for layer, norm in zip(agent.critic.layers, agent.critic.norms, strict=True):
            y = y @ layer.weight[copy_] + layer.bias[copy_]
            y = nn.functional.layer_norm(y, (16,), norm.weight[copy_, 0], norm.bias[copy_, 0])
            y = y.relu()
        y = y @ agent.critic.head.weight[copy_] + agent.critic.head.bias[copy_]
        assert_close_32(agent.critic(batch.observation, batch.action)[copy_], y)


@pytest.mark.parametrize("name", ["redq", "droq"])
def test_the_policy_follows_once_for_twenty_updates_of_the_critics(name: str) -> None:
    agent = make(name)
    assert agent.config.learning.update_to_data == 20
    start, steps = parameters(agent.actor), []
    for seed in range(40):
        before = parameters(agent.critic)
        metrics = agent.update(make_batch(seed))
        assert not torch.equal(before["head.weight"], agent.critic.head.weight)
        steps.append("loss/actor" in metrics)
        if seed < 19:
            assert_equal(parameters(agent.actor), start)
    assert [i for i, acted in enumerate(steps) if acted] == [19, 39]


def test_a_value_network_is_normalised_as_the_critics_are() -> None:
    for layer_norm in (False, True):
        agent = make("sac-v", critic={"layer_norm": layer_norm})
        kinds = {type(module) for module in agent.target_value.modules()}
        assert (nn.LayerNorm in kinds) == layer_norm
        assert any(norm is not None for norm in agent.critic.norms) == layer_norm


@pytest.mark.parametrize("temperature", ["auto", 0.3])
def test_a_value_network_learns_the_papers_equations(temperature: str | float) -> None:
    """Haarnoja et al. 2018, eq. 5 to 13, with torch's own Adam and autograd over three updates."""
    agent = make(
        "sac-v", double=True, actor=RATE, critic=RATE, learning={"tau": 0.05},
        sac={"temperature": temperature, "initial_temperature": 0.3, **RATE},
    )  # fmt: skip
    assert isinstance(agent, SACV)
    actor, critic, value, slow = map(
        copy.deepcopy, (agent.actor, agent.critic, agent.value, agent.target_value)
    )
    log_alpha = agent.log_alpha.detach().clone().requires_grad_()
    adams = {
        name: torch.optim.Adam(parameters, lr=1e-3)
        for name, parameters in (
            ("actor", actor.parameters()), ("critic", critic.parameters()),
            ("value", value.parameters()), ("alpha", [log_alpha]),
        )
    }  # fmt: skip
    stream = torch.Generator()
    stream.set_state(agent.noise.get_state())
    for seed in range(3):
        batch = make_batch(seed, torch.float64)._replace(weight=torch.rand(B).double())
        mean, log_std = actor(batch.observation)
        normal = torch.distributions.Normal(mean, log_std.exp())
        u = mean + log_std.exp() * torch.randn(B, ACT, generator=stream, dtype=torch.float64)
        action = u.tanh()
        log_prob = (normal.log_prob(u) - (1 - action**2).log()).sum(1)
        alpha = log_alpha.detach().exp()
        q = critic(batch.observation, action).squeeze(-1).min(0)[0]
        value_loss = (
            batch.weight * (value(batch.observation)[:, 0] - (q - alpha * log_prob).detach()) ** 2
        ).mean() / 2
        target = batch.reward + batch.discount * slow(batch.next_observation)[:, 0].detach()
        predicted = critic(batch.observation, batch.action).squeeze(-1)
        critic_loss = (batch.weight * (predicted - target) ** 2).mean(1).sum() / 2
        alpha_loss = -(log_alpha * (log_prob.detach() - ACT)).mean()

        metrics = agent.update(batch)
        assert_close(metrics["loss/value"], value_loss.detach())
        assert_close(metrics["loss/critic"], critic_loss.detach())
        losses = [("value", value_loss), ("critic", critic_loss)]
        losses += [("alpha", alpha_loss)] if temperature == "auto" else []
        for name, loss in losses:
            adams[name].zero_grad()
            loss.backward(retain_graph=True)
            adams[name].step()
        # The actor follows the critics as their step has left them.
        q = critic(batch.observation, action).squeeze(-1).min(0)[0]
        actor_loss = (alpha * log_prob - q).mean()
        assert_close(metrics["loss/actor"], actor_loss.detach())
        adams["actor"].zero_grad()
        actor_loss.backward()
        adams["actor"].step()
        with torch.no_grad():
            for old, new in zip(slow.parameters(), value.parameters(), strict=True):
                old.copy_(0.95 * old + 0.05 * new)
        pairs = [(actor, agent.actor), (critic, agent.critic), (value, agent.value),
                 (slow, agent.target_value)]  # fmt: skip
        for reference, mine in pairs:
            torch.testing.assert_close(
                parameters(mine), parameters(reference), rtol=1e-8, atol=1e-8
            )
        torch.testing.assert_close(agent.log_alpha.detach(), log_alpha.detach())


def test_the_likelihood_of_an_action_is_that_of_its_sample() -> None:
    mean, log_std, noise = (make_batch(seed).action * 2 for seed in range(3))
    u = mean + log_std.exp() * noise
    transform = torch.distributions.TanhTransform()
    peer = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean.double(), log_std.double().exp()), [transform]
    )
    action = u.tanh().clamp(-0.999, 0.999)
    expected = peer.log_prob(action.double()).sum(-1).float()
    found = squashed_log_prob(mean, log_std, action)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert squashed_log_prob(mean, log_std, torch.ones_like(mean)).isfinite().all()


# -- the main job ----------------------------------------------------------------------------------

both = pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])
every = pytest.mark.parametrize("name", ALGORITHM_NAMES)


def small(tmp_path: Path, name: str, **changes: Any) -> Config:
    """Tiny, of an algorithm's preset."""
    base = tiny(tmp_path).model_dump(exclude_unset=True)
    base["learning"] |= {"update_to_data": 0.2, "policy_delay": 2 if name == "td3" else 1}
    layer = {**base, "algorithm": name}
    for key, value in changes.items():
        layer[key] = layer[key] | value if isinstance(layer.get(key), dict) else value
    return resolve(merge(presets_for({"env": "none", "algorithm": name}), layer))


@every
@both
def test_an_agent_goes_through_a_file(name: str, san: bool) -> None:
    """Loaded, it learns on as the other does, to the bit; and it can be copied at any time."""
    agent = make(name, san)
    twin = make(name, san, seed=5)
    for seed in range(3):
        agent.update(make_batch(seed))
    agent.explore(make_batch(0).observation)
    copy.deepcopy(agent)
    twin.load_state_dict(through_a_file(agent.state_dict()))
    for seed in range(3, 7):
        left, right = agent.update(make_batch(seed)), twin.update(make_batch(seed))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[tag], right[tag]) for tag in left)
        x = make_batch(seed).observation
        assert torch.equal(agent.explore(x), twin.explore(x))
    assert not differences(agent.state_dict(), twin.state_dict())


@every
@both
def test_td_errors_are_those_of_the_last_update(name: str, san: bool) -> None:
    agent = make(name, san)
    agent.update(make_batch(0))
    error = agent.td_error
    assert error.shape == (B,) and (error >= 0).all()
    gap = agent.prediction.mean((0, 2)) - agent.target.mean(-1)
    assert (error >= gap.abs() - 1e-5).all()


class Halt:
    """Ends a run by the signal at a step."""

    def __init__(self, manager: Manager, step: int) -> None:
        collect = manager.collect

        def stopping() -> None:
            collect()
            if manager.step >= step and not manager.interrupted:
                manager._ask_to_end(15)

        manager.collect = stopping  # type: ignore[method-assign]


RESUMED = [
    ("td3", False, {}),
    ("td3", True, {"td3": {"target_actor": "proxy"},
                   "exploration": {"kind": "ou", "noise": "linear:0.9:0.01"}}),
    ("sac-v", True, {"replay": {"sampler": "proportional", "ratio": 0.3}}),
    ("crossq", False, {"replay": {"sampler": "rank"}}),
    ("droq", False, {"exploration": {"gsde": True, "gsde_steps": 3}}),
    ("redq", True, {"adaptive": {"moves": "update_to_data", "low": 0.1, "every": 3}}),
    ("sac", False, {"replay": {"storage": "disk", "capacity": 60}}),
    ("tqc", False, {"replay": {"retention": "ess", "least_ess": 0.9}, "adaptive": {"every": 2}}),
]  # fmt: skip


QUICK = ("crossq", "redq", "sac")


@pytest.mark.parametrize(
    ("name", "san", "parts"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}",
                     marks=() if case[0] in QUICK or "td3" in case[2] else pytest.mark.slow)
        for case in RESUMED
    ],
)  # fmt: skip
def test_a_split_run_equals_an_unbroken_one(
    name: str, san: bool, parts: dict[str, Any], tmp_path: Path
) -> None:
    """To the bit, with every stream, controller and priority."""
    parts = {"total_steps": 120, **parts}
    whole = Manager(small(tmp_path / "whole", name, san=san, **parts))
    whole.train()
    split = Manager(small(tmp_path / "split", name, san=san, **parts))
    Halt(split, 86)
    assert split.train() == {}
    resumed = Manager.resume(split.directory)
    resumed.train()
    assert not differences(comparable(whole.directory), comparable(resumed.directory))
    loaded = Manager.load(whole.directory)
    assert loaded.schedule_point == (loaded.algorithm.progress, whole.best_return)
    assert loaded.algorithm.progress >= 1  # schedules are at their end


@every
def test_commands_take_every_algorithm(name: str, tmp_path: Path, call: Call) -> None:
    """Its preset by one option, a directory by its name, evaluation, a saved agent, its export,
    its account and its comparison."""
    words = ["--env", "Pendulum-v1", "--env-kwargs", "max_episode_steps=30", "--algorithm", name,
             "--total-steps", 64, "--num-envs", 2, "--learning.learning-starts", 32,
             "--learning.batch-size", 16, "--learning.update-to-data", 0.2, "--eval-every", 0,
             "--final-episodes", 1, "--no-video", "--wandb", "disabled", "--actor.hidden", 8,
             "--critic.hidden", 8, "--runs-dir", tmp_path, "--san"]  # fmt: skip
    code, out, _ = call("train", *words)
    assert code == 0
    run = Path(out.splitlines()[-1])
    prefix = "spiking-s0" if name == "sac" else f"{name}-spiking-s0"
    assert run.name.startswith(prefix)
    config = Manager.load(run).config
    preset = Config.for_env("Pendulum-v1", algorithm=name)
    assert config.critic.copies == preset.critic.copies
    assert config.learning.policy_delay == preset.learning.policy_delay
    manager = Manager.load(run)
    manager.save(tmp_path / "agent")
    loaded = Manager.load(tmp_path / "agent")
    assert loaded.evaluate(1)["returns"] == manager.evaluate(1)["returns"]
    assert loaded.evaluate(1, stochastic=True)["returns"] != manager.evaluate(1)["returns"]
    words = ["--out", tmp_path / "c", "--format", "c", "--episodes", 1, "--json"]
    code, out, _ = call("export", tmp_path / "agent", *words)
    told = json.loads(out)
    assert code == 0 and told["exported_return"] == pytest.approx(told["policy_return"], abs=1e-3)
    assert call("energy", run, "--episodes", 1)[0] == 0
    assert call("compare", run, "--out", tmp_path / "comparison")[0] == 0


@pytest.mark.parametrize(
    ("layer", "complaint"),
    [
        ({"algorithm": "ppo"}, "expected one of sac, sac-v, td3"),
        ({"algorithm": "tqc"}, r"critic\.quantiles"),
        ({"algorithm": "redq"}, r"critic\.subset"),
        ({"algorithm": "droq"}, r"critic\.dropout"),
        ({"algorithm": "crossq"}, r"critic\.batch_norm"),
        ({"algorithm": "ddpg"}, r"critic\.copies 2"),
        ({"algorithm": "td3", "critic": {"batch_norm": True}}, "target network"),
        ({"critic": {"batch_norm": True, "dropout": 0.1}}, "exclude each other"),
        ({"critic": {"subset": 3}}, r"critic\.copies \(2\)"),
        ({"algorithm": "td3", "exploration": {"gsde": True}}, "likelihood"),
        ({"algorithm": "td3", "replay": {"sampler": "rank", "ratio": 0.5}}, "likelihood"),
        ({"replay": {"ratio": 0.5}}, "sampler"),
        ({"replay": {"sampler": "rank", "hindsight": "future"}}, "draws uniformly"),
        ({"replay": {"hindsight": "future"}, "learning": {"n_step": 3}}, "n_step"),
        ({"adaptive": {"moves": "batch_size"}}, "must lie between"),
    ],
)
def test_what_does_not_go_together_is_refused(layer: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve(layer)


def test_later_layers_win_over_an_algorithms_preset(tmp_path: Path) -> None:
    """Defaults < environment < algorithm < file < options."""
    (tmp_path / "mine.yaml").write_text("td3: {smoothing: 0.4}\nexploration: {noise: 0.5}\n")
    words = ["--env", "BipedalWalker-v3", "--algorithm", "td3", "--exploration.noise", "0.3"]
    words += ["--config", str(tmp_path / "mine.yaml")]
    base = runner.defaults(runner.look_ahead(words))
    asked = runner.parse(
        runner.Train, "train", words, default=runner.Train(options=resolve(base))
    ).options
    assert asked.critic.quantiles == 1, "the algorithm over the environment"
    assert asked.learning.gamma == 0.995, "the environment over the defaults"
    assert asked.td3.smoothing == 0.4, "a file over the algorithm"
    assert asked.exploration.noise == 0.3, "an option over the file"


def test_a_sweep_over_algorithms_gives_each_its_preset(tmp_path: Path) -> None:
    axes = sweep.parse_axes((), (), ["algorithm=sac,td3,crossq"])
    asked = sweep.Asked({}, {"env": "Pendulum-v1"}, axes)
    _, found = sweep.plan(None, asked, 1)
    configs = {config.algorithm: config for _, config in found}
    assert configs["td3"].learning.policy_delay == 2
    assert configs["crossq"].critic.batch_norm and not configs["sac"].critic.batch_norm
    names = [sweep.label(point, config) for point, config in found]
    assert names == ["dense-s0-sac", "dense-s0-td3", "dense-s0-crossq"]


def test_a_registered_name_is_taken() -> None:
    with pytest.raises(ValueError, match="'td3' is taken"):
        register_algorithm("td3", TD3)


def test_names_and_classes_go_together() -> None:
    assert list(ALGORITHMS) == ALGORITHM_NAMES
    assert all(issubclass(kind, OffPolicy) for kind in ALGORITHMS.values())
