"""Soft actor-critic against Stable-Baselines3's, and the faults that others reported of theirs."""

from __future__ import annotations

import copy
import gc
import io
import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium.spaces import Box
from stable_baselines3.common.logger import configure
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import Tensor, nn

from sansac.algorithm import SAC
from sansac.config import Config
from sansac.networks import StackedLinear
from sansac.off_policy import averaged, polyak
from sansac.replay import Batch

OBS, ACT, B = 4, 2, 32


def make_sac(san: bool = False, **fields: Any) -> SAC:
    for section in ("actor", "critic"):
        fields[section] = {"hidden": (16, 16)} | fields.get(section, {})
    return SAC(Config(san=san, **fields), OBS, ACT, "cpu")


def make_batch(seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=stream, dtype=dtype)

    ended = normal(B) > 1
    return Batch(
        observation=normal(B, OBS),
        action=normal(B, ACT).tanh(),
        reward=normal(B) * 3,
        next_observation=normal(B, OBS),
        discount=(normal(B).sigmoid() * ~ended).to(dtype),
        weight=torch.ones(B, dtype=dtype),
    )


both_actors = pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# ---- against Stable-Baselines3 -------------------------------------------------------------------


class Spaces(gym.Env):
    """An environment of the right shape that is never stepped."""

    observation_space = Box(-1, 1, (OBS,))
    action_space = Box(-1, 1, (ACT,))


def in_double(sac: SAC) -> None:
    """Parameters keep their identity, so that the optimisers keep theirs."""
    for module in (sac.actor, sac.critic, sac.target_critic):
        module.double()
    sac.log_alpha.data = sac.log_alpha.data.double()


def make_peer(sac: SAC) -> stable_baselines3.SAC:
    """Stable-Baselines3's SAC with the same weights and settings, in float64."""
    config = sac.config
    automatic = config.sac.temperature == "auto"
    peer = stable_baselines3.SAC(
        "MlpPolicy",
        Spaces(),
        learning_rate=config.actor.learning_rate,
        buffer_size=1,
        tau=config.learning.tau,
        ent_coef=f"auto_{config.sac.initial_temperature}" if automatic else 1.0,
        policy_kwargs={"net_arch": list(config.actor.hidden)},
        device="cpu",
    )
    peer.set_logger(configure(None, []))
    peer.policy.double()
    peer.actor.action_dist.epsilon = 0.0  # type: ignore[attr-defined]
    for module in (peer.actor, peer.critic, peer.critic_target):
        module.extract_features = lambda observation, extractor: observation  # else float32
    if automatic:
        assert peer.log_ent_coef is not None
        peer.log_ent_coef.data = sac.log_alpha.detach().clone().reshape(1)
    else:
        peer.ent_coef_tensor = sac.log_alpha.detach().exp()
    peer.actor.load_state_dict(actor_by_their_names(sac.actor, lambda p: p))
    peer.critic.load_state_dict(critic_by_their_names(sac.critic, lambda p: p))
    peer.critic_target.load_state_dict(critic_by_their_names(sac.target_critic, lambda p: p))
    return peer


def actor_by_their_names(actor: nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Parameters, or what `of` makes of them, of our actor under Stable-Baselines3's names."""
    theirs = {"layers.0": "latent_pi.0", "layers.1": "latent_pi.2", "mean": "mu"}
    values = {}
    for name, parameter in actor.named_parameters():
        module, _, kind = name.rpartition(".")
        values[f"{theirs.get(module, module)}.{kind}"] = of(parameter).detach().clone()
    return values


def critic_by_their_names(critic: nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    values = {}
    stacked = [module for module in critic.modules() if isinstance(module, StackedLinear)]
    for layer, module in enumerate(stacked):
        weight, bias = of(module.weight).detach().clone(), of(module.bias).detach().clone()
        for i in range(2):
            values[f"qf{i}.{2 * layer}.weight"] = weight[i].T
            values[f"qf{i}.{2 * layer}.bias"] = bias[i, 0]
    return values


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def record_at_step(
    optimizer: torch.optim.Optimizer, record: dict[str, Any], name: str, read: Callable[[], Any]
) -> None:
    """Keep what `read` gives just before each step: later losses may add to gradients."""
    optimizer.register_step_pre_hook(lambda *_: record.__setitem__(name, read()))


def assert_close(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("temperature", ["auto", 0.2])
def test_updates_agree_with_stable_baselines3(
    temperature: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, gradients and all parameters over five updates in a row: the same weights, batches
    and noise, in float64, its log epsilon 0, in its order (temperature, critic, actor, Polyak)."""
    rate = {"learning_rate": 1e-3}
    sac = make_sac(
        learning={"tau": 0.05},
        sac={"temperature": temperature, "initial_temperature": 0.5, **rate},
        actor=dict(rate),
        critic=dict(rate),
        normalize_observations=False,
    )
    in_double(sac)
    peer = make_peer(sac)

    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    record_at_step(
        sac.optimizers["actor"], ours, "actor", lambda: actor_by_their_names(sac.actor, gradient)
    )
    record_at_step(
        sac.optimizers["critic"],
        ours,
        "critic",
        lambda: critic_by_their_names(sac.critic, gradient),
    )
    for name, module in (("actor", peer.actor), ("critic", peer.critic)):

        def gradients(module: nn.Module = module) -> dict[str, Tensor]:
            return {key: gradient(p).clone() for key, p in module.named_parameters()}

        record_at_step(module.optimizer, theirs, name, gradients)
    if temperature == "auto":
        record_at_step(
            sac.optimizers["temperature"], ours, "temperature", lambda: gradient(sac.log_alpha)
        )
        assert peer.ent_coef_optimizer is not None and peer.log_ent_coef is not None
        log_alpha = peer.log_ent_coef
        record_at_step(
            peer.ent_coef_optimizer, theirs, "temperature", lambda: gradient(log_alpha)[0].clone()
        )

    stream = torch.Generator()
    stream.set_state(sac.noise.get_state())
    noise = [torch.randn(B, ACT, generator=stream, dtype=torch.float64) for _ in range(10)]
    monkeypatch.setattr(
        torch.distributions.normal, "_standard_normal", lambda *_, **__: noise.pop(0)
    )
    for update in range(5):
        batch = make_batch(update, torch.float64)
        peer.replay_buffer.sample = lambda *_, batch=batch, **__: ReplayBufferSamples(  # type: ignore
            batch.observation,
            batch.action,
            batch.next_observation,
            (batch.discount == 0)[:, None].double(),
            batch.reward[:, None],
            batch.discount[:, None],
        )
        peer.train(gradient_steps=1, batch_size=B)
        metrics = sac.update(batch)

        logged = peer.logger.name_to_value
        assert_close(float(metrics["loss/critic"]), logged["train/critic_loss"])
        assert_close(float(metrics["loss/actor"]), logged["train/actor_loss"])
        assert_close(float(metrics["sac/alpha"]), logged["train/ent_coef"])
        if temperature == "auto":
            assert_close(float(metrics["loss/temperature"]), logged["train/ent_coef_loss"])
            assert_close(sac.log_alpha.detach(), log_alpha.detach()[0])
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_close(ours[name], theirs[name])
        assert_close(actor_by_their_names(sac.actor, lambda p: p), dict(peer.actor.state_dict()))
        for mine, other in ((sac.critic, peer.critic), (sac.target_critic, peer.critic_target)):
            assert_close(critic_by_their_names(mine, lambda p: p), dict(other.state_dict()))
    assert not noise, "both drew as often"


def test_truncated_quantile_critics_learn_from_the_papers_target() -> None:
    """Kuznetsov et al. 2020: pool both critics' quantiles, drop the largest, and let each atom
    stand for the distribution of r + discount (z - alpha log pi)."""
    sac = make_sac(critic={"quantiles": 5, "drop": 3})
    batch = make_batch(0)
    next_action, next_log_prob = make_batch(1).action, make_batch(1).reward
    alpha = torch.tensor(0.3)
    loss, prediction = sac.critic_loss(batch, next_action, next_log_prob, alpha)

    atoms = torch.cat(list(sac.target_critic(batch.next_observation, next_action)), 1)
    atoms = atoms.sort(1)[0][:, :7] - alpha * next_log_prob.reshape(B, 1)
    target = batch.reward.reshape(B, 1) + batch.discount.reshape(B, 1) * atoms
    delta = target[None, :, None, :] - prediction[:, :, :, None]
    huber = torch.where(delta.abs() > 1, delta.abs() - 0.5, delta**2 / 2)
    quantile = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])[:, None]
    expected = ((quantile - (delta < 0).float()).abs() * huber).mean()
    torch.testing.assert_close(loss, expected)


# ---- what an update touches ----------------------------------------------------------------------


@both_actors
def test_an_actor_step_leaves_the_critics_alone(san: bool) -> None:
    """case 16: their parameters and gradients are what the critics' own step left."""
    sac = make_sac(san)
    record: dict[str, Any] = {}

    def critics() -> dict[str, Tensor]:
        gradients = {name: gradient(p) for name, p in sac.critic.named_parameters()}
        return {name: g.clone() for name, g in gradients.items()}

    record_at_step(sac.optimizers["critic"], record, "gradients", critics)
    record_at_step(sac.optimizers["actor"], record, "parameters", lambda: parameters(sac.critic))
    for seed in range(2):
        sac.update(make_batch(seed))
        assert_equal(critics(), record["gradients"])
        assert_equal(parameters(sac.critic), record["parameters"])
        assert all(p.grad is None for p in sac.target_critic.parameters())


def test_a_critic_step_leaves_the_actor_alone() -> None:
    """case 16: the target's action carries no gradient, and neither does the temperature."""
    sac = make_sac()
    before: dict[str, Any] = {}
    record_at_step(sac.optimizers["critic"], before, "actor", lambda: parameters(sac.actor))
    record_at_step(
        sac.optimizers["critic"], before, "none", lambda: [p.grad for p in sac.actor.parameters()]
    )
    start = parameters(sac.actor)
    sac.update(make_batch(0))
    assert_equal(before["actor"], start)
    assert before["none"] == [None] * len(start)


@both_actors
@pytest.mark.parametrize("average", [1.0, 0.1])
def test_each_optimiser_holds_exactly_its_own_parameters(san: bool, average: float) -> None:
    """case 16: all of them, once, and nobody else's; targets and averages belong to none."""
    spiking = {"log_std": "mlp", "log_std_learning_rate": 1e-4}
    sac = make_sac(san, actor={"average": average}, spiking=spiking)
    expected = {
        "actor": list(sac.actor.parameters()),
        "critic": list(sac.critic.parameters()),
        "temperature": [sac.log_alpha],
    }
    assert sac.optimizers.keys() == expected.keys()
    for name, optimizer in sac.optimizers.items():
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(held) == sorted(map(id, expected[name])), name


def test_the_log_std_network_learns_at_its_own_rate() -> None:
    """PopSAN's separate network: exactly its parameters are in the group of that rate."""
    sac = make_sac(
        True,
        actor={"learning_rate": 1e-3},
        spiking={"log_std": "mlp", "log_std_learning_rate": 1e-4},
    )
    rest, head = sac.optimizers["actor"].param_groups
    assert (rest["lr"], head["lr"]) == (1e-3, 1e-4)
    named = dict(sac.actor.named_parameters())
    own = {id(p) for name, p in named.items() if name.startswith("log_std.")}
    assert {id(p) for p in head["params"]} == own
    assert len(own) == 6


def test_learning_rates_anneal_from_their_configured_values() -> None:
    """Over the last half: each keeps its ratio, and annealing twice does not compound."""
    sac = make_sac(
        True,
        learning={"rate_factor": "linear:1:0.1:0.5..1"},
        actor={"learning_rate": 1e-3},
        critic={"learning_rate": 2e-3},
        sac={"learning_rate": 3e-3},
        spiking={"log_std": "mlp", "log_std_learning_rate": 1e-4},
    )
    for progress, factor in ((0.0, 1.0), (0.5, 1.0), (0.75, 0.55), (1.0, 0.1), (1.1, 0.1)):
        sac.set_progress(progress)
        rates = {
            name: [group["lr"] for group in optimizer.param_groups]
            for name, optimizer in sac.optimizers.items()
        }
        assert rates == {
            "actor": pytest.approx([1e-3 * factor, 1e-4 * factor]),
            "critic": pytest.approx([2e-3 * factor]),
            "temperature": pytest.approx([3e-3 * factor]),
        }
        assert sac.learning_rate == rates["actor"][0]


@both_actors
def test_tau_zero_freezes_the_target_and_tau_one_copies(san: bool) -> None:
    """case 15: an inverted average would do the opposite."""
    frozen = make_sac(san, learning={"tau": 0.0})
    copied = make_sac(san, learning={"tau": 1.0})
    start = parameters(frozen.target_critic)
    for seed in range(3):
        frozen.update(make_batch(seed))
        copied.update(make_batch(seed))
    assert_equal(parameters(frozen.target_critic), start)
    assert not torch.equal(frozen.critic.head.weight, start["head.weight"])
    assert_equal(parameters(copied.target_critic), parameters(copied.critic))


def test_the_target_moves_by_tau_towards_the_online_critics() -> None:
    """case 15: target <- (1 - tau) target + tau online, the online ones after their step."""
    sac = make_sac(learning={"tau": 0.25})
    old = parameters(sac.target_critic)
    sac.update(make_batch(0))
    online = parameters(sac.critic)
    for name, value in parameters(sac.target_critic).items():
        torch.testing.assert_close(value, 0.75 * old[name] + 0.25 * online[name])


@both_actors
def test_the_averaged_policy_follows_the_training_actor(san: bool) -> None:
    """`act` evaluates the average, `explore` the current weights."""
    sac = make_sac(san, actor={"average": 0.25})
    old = parameters(sac.policy_actor)
    sac.update(make_batch(0))
    online = parameters(sac.actor)
    for name, value in parameters(sac.policy_actor).items():
        torch.testing.assert_close(value, 0.75 * old[name] + 0.25 * online[name])
    observation = make_batch(1).observation
    acted = sac.act(observation)
    torch.testing.assert_close(acted, sac.policy_actor(sac.normalize(observation))[0].tanh())
    for p in sac.policy_actor.parameters():
        p.data.zero_()
    assert sac.explore(observation).std() > 0.01 > sac.act(observation).abs().max()


def test_without_averaging_the_policy_is_the_training_actor() -> None:
    sac = make_sac()
    assert sac.policy_actor is sac.actor


@pytest.mark.parametrize("quantiles", [1, 5])
@pytest.mark.parametrize("field", ["reward", "discount", "weight"])
def test_columns_of_the_wrong_shape_are_refused(field: str, quantiles: int) -> None:
    """case 17: [B, 1] against [B] would broadcast to [B, B] and train on noise."""
    sac = make_sac(critic={"quantiles": quantiles})
    batch = make_batch(0)
    sac.update(batch)
    with pytest.raises(AssertionError):
        sac.update(batch._replace(**{field: getattr(batch, field)[:, None]}))


def test_the_actor_loss_refuses_a_log_probability_of_the_wrong_shape() -> None:
    """case 17: as above, where the policy's loss is formed."""
    sac, batch = make_sac(), make_batch(0)
    with pytest.raises(AssertionError):
        sac.actor_loss(batch, batch.action, torch.zeros(B, 1), torch.tensor(0.1))


# ---- observations and temperature ----------------------------------------------------------------


def test_an_update_normalises_both_observations_once() -> None:
    """The same statistics for observation and next observation: an update on raw ones equals an
    update without a normaliser on normalised ones."""
    raw, ready = make_sac(), make_sac(normalize_observations=False)
    raw.norm.update(torch.randn(100, OBS, generator=torch.Generator().manual_seed(0)) * 5 + 2)
    before = {key: value.clone() for key, value in raw.norm.state_dict().items()}
    for seed in range(3):
        batch = make_batch(seed)
        normalised = batch._replace(
            observation=raw.norm(batch.observation),
            next_observation=raw.norm(batch.next_observation),
        )
        assert not torch.equal(normalised.observation, batch.observation)
        raw.update(batch)
        ready.update(normalised)
    assert_equal(parameters(raw.actor), parameters(ready.actor))
    assert_equal(parameters(raw.critic), parameters(ready.critic))
    assert_equal(raw.norm.state_dict(), before)  # updating moves no statistics


@pytest.mark.parametrize("entropy", ["auto", -0.5])
def test_the_temperature_rises_while_entropy_is_below_its_target(entropy: str | float) -> None:
    sac = make_sac(sac={"target_entropy": entropy})
    assert sac.target_entropy == (-ACT if entropy == "auto" else entropy)
    for log_prob, rises in ((-sac.target_entropy + 1, True), (-sac.target_entropy - 1, False)):
        loss = sac.temperature_loss(torch.full((B,), log_prob))
        (slope,) = torch.autograd.grad(loss, sac.log_alpha)
        assert (slope < 0) == rises
        assert abs(slope) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_a_fixed_temperature_stays_fixed(temperature: float) -> None:
    """0 included, which is plain actor-critic without an entropy bonus."""
    sac = make_sac(sac={"temperature": temperature})
    assert "temperature" not in sac.optimizers
    for seed in range(3):
        metrics = sac.update(make_batch(seed))
        assert float(metrics["sac/alpha"]) == pytest.approx(temperature)
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert "loss/temperature" not in metrics


# ---- acting and random streams -------------------------------------------------------------------


@both_actors
def test_acting_is_the_tanh_of_the_mean(san: bool) -> None:
    """case 9: deterministic, and without a draw from any stream."""
    sac = make_sac(san)
    observation = make_batch(0).observation
    streams = [sac.noise.get_state(), sac.exploration.get_state(), torch.get_rng_state()]
    action = sac.act(observation)
    with torch.no_grad():
        mean, _ = sac.actor(sac.normalize(observation))
    torch.testing.assert_close(action, mean.tanh())
    assert torch.equal(sac.act(observation), action)
    after = [sac.noise.get_state(), sac.exploration.get_state(), torch.get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(streams, after, strict=True))


def test_exploration_follows_the_policys_distribution() -> None:
    """Moments before the tanh, over many draws at one observation."""
    sac = make_sac()
    observation = make_batch(0).observation[:1].expand(20_000, -1)
    mean, log_std = (x[0].detach() for x in sac.actor(sac.normalize(observation[:1])))
    for draw in (sac.explore(observation), sac.sample(observation, torch.Generator())):
        u = draw.double().atanh()
        error = 4 * log_std.exp() / math.sqrt(len(u))
        assert ((u.mean(0) - mean).abs() < error).all()
        assert ((u.std(0) - log_std.exp()).abs() < error).all()


def test_uniform_exploration_covers_the_whole_interval() -> None:
    sac = make_sac()
    actions = sac.explore_uniformly(torch.zeros(20_000, OBS))
    assert actions.shape == (20_000, ACT)
    counts = np.histogram(actions.numpy().ravel(), bins=10, range=(-1, 1))[0]
    assert counts.sum() == actions.numel()
    assert np.abs(counts - 4000).max() < 4 * math.sqrt(4000)


def test_streams_are_separate_and_the_users_own_is_untouched() -> None:
    """case 8: exploring does not change what updates draw, evaluating changes neither, and the
    seed alone decides, whatever torch's global stream does."""
    torch.manual_seed(1)
    quiet = make_sac(seed=7)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    busy = make_sac(seed=7)
    for seed in range(3):
        observation = make_batch(seed).observation
        busy.explore(observation)
        busy.explore_uniformly(observation)
        busy.sample(observation, torch.Generator().manual_seed(3))
        quiet.update(make_batch(seed))
        busy.update(make_batch(seed))
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(parameters(quiet.actor), parameters(busy.actor))
    assert_equal(parameters(quiet.critic), parameters(busy.critic))
    assert not torch.equal(
        make_sac(seed=8).explore(observation), make_sac(seed=7).explore(observation)
    )


# ---- state ---------------------------------------------------------------------------------------


@both_actors
@pytest.mark.parametrize("average", [1.0, 0.1])
def test_a_restored_agent_learns_on_identically(san: bool, average: float) -> None:
    """case 14 and 27: temperature, its optimiser, target entropy, every network and stream are in
    the state, and the temperature still moves after it was loaded."""
    sections: dict[str, Any] = {
        "sac": {"target_entropy": -0.7},
        "actor": {"average": average, "batch_norm": True},
    }
    whole = make_sac(san, **sections)
    for seed in range(3):
        whole.norm.update(make_batch(seed).observation)
        whole.update(make_batch(seed))
    state = through_a_file(whole.state_dict())
    restored = make_sac(san, seed=99, **sections)
    restored.target_entropy = 0.0
    restored.load_state_dict(state)

    loaded = restored.log_alpha.item()
    assert loaded == whole.log_alpha.item()
    for seed in range(3, 6):
        expected, metrics = whole.update(make_batch(seed)), restored.update(make_batch(seed))
        assert_equal(metrics, expected)
    assert restored.log_alpha.item() != loaded
    assert restored.target_entropy == whole.target_entropy == -0.7
    for name in ("actor", "policy_actor", "critic", "target_critic", "norm"):
        assert_equal(getattr(restored, name).state_dict(), getattr(whole, name).state_dict())
    observation = make_batch(9).observation
    assert torch.equal(restored.explore(observation), whole.explore(observation))
    assert_equal(restored.optimizers["temperature"].state_dict()["state"][0],
                 whole.optimizers["temperature"].state_dict()["state"][0])  # fmt: skip


@both_actors
def test_weights_alone_are_enough_to_act(san: bool) -> None:
    """case 10 and 31: the normaliser's statistics are saved with the policy."""
    sac = make_sac(san, actor={"average": 0.5})
    for seed in range(3):
        sac.norm.update(make_batch(seed).observation * 50 + 7)
        sac.update(make_batch(seed))
    other = make_sac(san, seed=5, actor={"average": 0.5})
    other.load_weights(through_a_file(sac.weights()))
    observation = make_batch(9).observation * 50 + 7
    assert torch.equal(other.act(observation), sac.act(observation))


@both_actors
def test_an_agent_can_be_copied_at_any_time(san: bool) -> None:
    """case 23: after a forward in grad mode and between updates; the copy learns on its own."""
    sac = make_sac(san, actor={"average": 0.5})
    sac.update(make_batch(0))
    sac.actor(make_batch(0).observation)[0].sum().backward()
    twin = copy.deepcopy(sac)
    before = parameters(sac.actor)
    for seed in range(1, 3):
        twin.update(make_batch(seed))
    assert_equal(parameters(sac.actor), before)
    for seed in range(1, 3):
        sac.update(make_batch(seed))
    assert_equal(parameters(twin.actor), parameters(sac.actor))
    assert_equal(parameters(twin.critic), parameters(sac.critic))
    assert twin.log_alpha.item() == sac.log_alpha.item()


# ---- memory and synchronisation ------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@both_actors
def test_acting_and_updating_hold_memory_flat(san: bool) -> None:
    """case 21: no state, graph or history is kept from one call to the next."""
    sac, batch = make_sac(san, actor={"average": 0.5}), make_batch(0)

    def work(times: int) -> int:
        for _ in range(times):
            sac.act(batch.observation)
            sac.explore(batch.observation)
            metrics = sac.update(batch)
        assert not any(value.requires_grad for value in metrics.values())
        return live_tensors()

    few = work(2)
    assert work(30) <= few


@both_actors
@pytest.mark.parametrize("quantiles", [1, 5])
def test_an_update_reads_no_number_back(
    san: bool, quantiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each would wait for the device."""
    sac, batch = make_sac(san, critic={"quantiles": quantiles}), make_batch(0)
    sac.update(batch)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "cpu"):
            patch.setattr(Tensor, name, lambda *_, name=name: pytest.fail(f"Tensor.{name}"))
        with pytest.raises(pytest.fail.Exception, match="__float__"):
            float(batch.reward[0])
        metrics = sac.update(batch)
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())


def test_polyak_moves_parameters_and_statistics_and_counts_nothing() -> None:
    slow, online = (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)) for _ in range(2))
    for tensor in averaged(online):
        nn.init.constant_(tensor, 3.0)
    expected = {k: 0.75 * v + 0.75 for k, v in slow.state_dict().items() if v.is_floating_point()}
    assert "1.running_var" in expected
    polyak(averaged(slow), averaged(online), 0.25)
    for key, value in expected.items():
        torch.testing.assert_close(slow.state_dict()[key], value)
