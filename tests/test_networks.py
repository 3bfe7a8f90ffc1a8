"""The squashed Gaussian, the normaliser, the dense actor, the critics and their losses."""

from __future__ import annotations

import io
import math
from itertools import zip_longest
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from sansac.config import Actor, Critic, Spiking
from sansac.networks import (
    DenseActor,
    KalmanBatchNorm,
    QuantileCritic,
    QuantileHuber,
    RunningNorm,
    TwinCritic,
    fold_batch_norm,
    make_critic,
    mlp,
    reestimate,
    squashed_sample,
)
from sansac.spiking import SpikingActor

property_test = settings(max_examples=60, derandomize=True)


# ---- squashed Gaussian ---------------------------------------------------------------------------


def exact_log_prob(mean: float, log_std: float, noise: float) -> float:
    """log density of tanh(mean + exp(log_std) noise), to 50 digits."""
    with mpmath.workdps(50):
        m, s, e = mpmath.mpf(mean), mpmath.exp(log_std), mpmath.mpf(noise)
        u = m + s * e
        gaussian = mpmath.exp(-(e**2) / 2) / (s * mpmath.sqrt(2 * mpmath.pi))
        return float(mpmath.log(gaussian / (1 - mpmath.tanh(u) ** 2)))


@pytest.mark.parametrize("u", [-20.0, -5.0, -0.5, 0.0, 0.5, 5.0, 20.0])
@pytest.mark.parametrize("log_std", [-20.0, -3.0, 0.0, 2.0])
def test_log_probability_is_exact_where_tanh_saturates(u: float, log_std: float) -> None:
    """case 12: in float32, where 1 - tanh(u)^2 is 0 beyond |u| = 9 and atanh is infinite."""
    noise = 0.75
    mean = u - math.exp(log_std) * noise
    mean32 = torch.tensor([[mean]])
    action, log_prob = squashed_sample(mean32, torch.tensor([[log_std]]), torch.tensor([[noise]]))
    assert action.abs().max() <= 1 and torch.isfinite(log_prob).all()
    expected = exact_log_prob(mean32.item(), log_std, noise)
    assert log_prob.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("u", [-20.0, -3.0, 0.0, 20.0])
def test_log_probability_has_the_exact_gradient(u: float) -> None:
    """case 12: d log pi / d mean = 2 tanh(u) at fixed noise, also where tanh saturates."""
    mean = torch.tensor([[u]], requires_grad=True)
    log_std = torch.zeros(1, 1, requires_grad=True)
    _, log_prob = squashed_sample(mean, log_std, torch.tensor([[0.5]]))
    log_prob.sum().backward()
    slope = 2 * math.tanh(u + 0.5)
    assert mean.grad is not None and log_std.grad is not None
    assert mean.grad.item() == pytest.approx(slope, abs=1e-5)
    assert log_std.grad.item() == pytest.approx(-1 + 0.5 * slope, abs=1e-5)


def test_log_probability_agrees_with_torch_distributions() -> None:
    """case 13: of the tanh's action, whatever the environment's bounds are; summed over entries."""
    torch.manual_seed(0)
    mean, log_std, noise = (torch.randn(64, 3, dtype=torch.float64) for _ in range(3))
    log_std = log_std / 2
    action, log_prob = squashed_sample(mean, log_std, noise)
    gaussian = Independent(Normal(mean, log_std.exp()), 1)
    squashed = TransformedDistribution(gaussian, [TanhTransform(cache_size=1)])
    u = mean + log_std.exp() * noise
    sample = squashed.transforms[0](u)  # remembers u, so that no atanh is taken
    torch.testing.assert_close(action, sample, rtol=0, atol=1e-15)
    torch.testing.assert_close(log_prob, squashed.log_prob(sample), rtol=1e-10, atol=1e-10)
    assert log_prob.shape == (64,)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.0, -1.0), (-0.5, 0.5)])
def test_the_density_integrates_to_one(mean: float, log_std: float) -> None:
    """case 13: over actions in (-1, 1), and to 1 over the environment's own interval only with the
    scale's Jacobian."""
    noise = torch.linspace(-9, 9, 200_001, dtype=torch.float64)[:, None]
    means, log_stds = torch.full_like(noise, mean), torch.full_like(noise, log_std)
    action, log_prob = squashed_sample(means, log_stds, noise)
    density, action = log_prob.exp(), action[:, 0]
    assert torch.trapezoid(density, action).item() == pytest.approx(1, abs=1e-6)
    low, high = -1.0, 5.0
    scaled = low + (action + 1) / 2 * (high - low)
    slope = (high - low) / 2
    assert torch.trapezoid(density / slope, scaled).item() == pytest.approx(1, abs=1e-6)


def test_sampling_with_no_noise_gives_the_deterministic_action() -> None:
    mean, log_std = torch.tensor([[0.3, -2.0]]), torch.tensor([[1.0, 0.0]])
    action, _ = squashed_sample(mean, log_std, torch.zeros(1, 2))
    torch.testing.assert_close(action, torch.tensor([[math.tanh(0.3), math.tanh(-2.0)]]))


# ---- observation normaliser ----------------------------------------------------------------------


@property_test
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 10**6))
def test_statistics_are_those_of_everything_seen(sizes: list[int], seed: int) -> None:
    """However the stream was cut into batches, a batch of one included."""
    stream = np.random.default_rng(seed)
    seen = stream.normal(stream.normal(size=3) * 100, stream.uniform(0.1, 50, 3), (sum(sizes), 3))
    norm = RunningNorm(3, clip=10.0)
    for batch in np.split(seen, np.cumsum(sizes)[:-1]):
        norm.update(torch.from_numpy(batch))
    np.testing.assert_allclose(norm.mean.numpy(), seen.mean(0), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(norm.var.numpy(), seen.var(0), rtol=1e-8, atol=1e-8)
    assert norm.count.item() == len(seen)
    expected = np.clip((seen - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), -10, 10)
    normalised = norm(torch.from_numpy(seen.astype(np.float32))).numpy()
    # float32 cannot hold an observation closer than this, in standard deviations
    blur = np.abs(seen).max(0) / np.sqrt(seen.var(0) + 1e-8) * 4e-7
    assert (np.abs(normalised - expected) <= 1e-5 + blur).all()


def test_statistics_of_a_far_away_observation_keep_their_digits() -> None:
    """Sums of squares would lose a standard deviation of 1 at a mean of 10^6 after many batches."""
    stream = np.random.default_rng(0)
    seen = stream.normal(1e6, 1.0, (20_000, 1))
    norm = RunningNorm(1, clip=10.0)
    for batch in np.split(seen, 2000):
        norm.update(torch.from_numpy(batch))
    np.testing.assert_allclose(norm.var.numpy(), seen.var(0), rtol=1e-6)


def test_normalising_moves_no_statistics() -> None:
    norm = RunningNorm(2, clip=3.0)
    norm.update(torch.tensor([[0.0, 10.0], [2.0, 30.0]]))
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    norm.train()
    normalised = norm(torch.tensor([[1.0, 20.0], [3.0, 1000.0]]))
    torch.testing.assert_close(normalised, torch.tensor([[0.0, 0.0], [2.0, 3.0]]))
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())


def test_a_constant_entry_is_normalised_to_zero() -> None:
    """An entry that never moves has no scale; it must not become a NaN."""
    norm = RunningNorm(1, clip=10.0)
    norm.update(torch.zeros(5, 1))
    assert norm(torch.zeros(3, 1)).tolist() == [[0.0]] * 3
    assert norm(torch.tensor([[1.0], [-1.0]])).tolist() == [[10.0], [-10.0]]


def test_a_loaded_normaliser_normalises_alike() -> None:
    """case 31: what it applies is derived anew from the loaded statistics."""
    norm = RunningNorm(4, clip=5.0)
    norm.update(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 7 + 3)
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    restored = RunningNorm(4, clip=5.0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    x = torch.linspace(-20, 20, 40).reshape(10, 4)
    assert torch.equal(norm(x), restored(x))


# ---- actor and critics ---------------------------------------------------------------------------


def test_the_dense_actor_is_the_textbook_network() -> None:
    """Linear, LayerNorm, ReLU; two linear heads; the log standard deviation clamped to [-20, 2]."""
    torch.manual_seed(0)
    actor = DenseActor(Actor(hidden=(8, 6), layer_norm=True), 3, 2)
    with torch.no_grad():
        actor.log_std.weight.mul_(100)
    x = torch.randn(32, 3)
    mean, log_std = actor(x)
    for linear, norm in zip(actor.layers, actor.norms, strict=True):
        assert isinstance(linear, nn.Linear) and isinstance(norm, nn.LayerNorm)
        y = x @ linear.weight.T + linear.bias
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        x = (y * norm.weight + norm.bias).clamp_min(0)
    torch.testing.assert_close(mean, x @ actor.mean.weight.T + actor.mean.bias)
    raw = x @ actor.log_std.weight.T + actor.log_std.bias
    assert (raw > 2).any() and (raw < -20).any()
    torch.testing.assert_close(log_std, raw.clamp(-20, 2))


def test_an_mlp_has_no_activation_after_its_last_layer() -> None:
    assert [type(m) for m in mlp([3, 4, 5, 2])] == [
        nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear,
    ]  # fmt: skip
    assert [type(m) for m in mlp([3, 4, 2], layer_norm=True)] == [
        nn.Linear, nn.LayerNorm, nn.ReLU, nn.Linear,
    ]  # fmt: skip


def single_critic(critic: TwinCritic, index: int) -> nn.Sequential:
    """One of the stacked critics as a network of its own."""
    layers: list[nn.Module] = []
    for linear, norm in zip_longest(critic.layers, critic.norms):
        layers.append(as_linear(linear, index))
        if norm is not None:
            own = nn.LayerNorm(norm.weight.shape[-1])
            own.load_state_dict(
                {"weight": norm.weight[index, 0].detach(), "bias": norm.bias[index, 0].detach()}
            )
            layers.append(own)
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, as_linear(critic.head, index))


def as_linear(stacked: nn.Module, index: int) -> nn.Linear:
    weight, bias = stacked.get_parameter("weight"), stacked.get_parameter("bias")
    linear = nn.Linear(*weight.shape[1:])
    linear.load_state_dict({"weight": weight[index].T.detach(), "bias": bias[index, 0].detach()})
    return linear


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("quantiles", [1, 5])
def test_the_stacked_critics_are_two_separate_networks(layer_norm: bool, quantiles: int) -> None:
    """Values and gradients of each are those of the network alone."""
    torch.manual_seed(0)
    config = Critic(hidden=(8, 6), layer_norm=layer_norm, quantiles=quantiles)
    critic = make_critic(config, 3, 2)
    assert type(critic) is (QuantileCritic if quantiles > 1 else TwinCritic)
    for norm in critic.norms.parameters():
        nn.init.normal_(norm)
    observation, action = torch.randn(16, 3), torch.randn(16, 2)
    values = critic(observation, action)
    assert values.shape == (2, 16, quantiles)
    assert not torch.allclose(values[0], values[1])
    for i in range(2):
        alone = single_critic(critic, i)
        expected = alone(torch.cat([observation, action], 1))
        torch.testing.assert_close(values[i], expected)
        critic.zero_grad()
        values[i].square().sum().backward(retain_graph=True)
        expected.square().sum().backward()
        first, own = critic.layers[0].get_parameter("weight"), alone[0].get_parameter("weight")
        assert first.grad is not None and own.grad is not None
        torch.testing.assert_close(first.grad[i].T, own.grad)
        assert first.grad[1 - i].count_nonzero() == 0


def test_critics_start_in_the_range_of_torchs_own_layers() -> None:
    torch.manual_seed(0)
    critic = make_critic(Critic(hidden=(64,)), 30, 6)
    weight = critic.layers[0].get_parameter("weight")
    assert weight.abs().max() <= 1 / 6  # 1 / sqrt(36)
    assert weight.std().item() == pytest.approx(1 / 6 / math.sqrt(3), rel=0.05)


def fixed_critic(kind: type[TwinCritic], values: Tensor, **config: int) -> TwinCritic:
    """A critic that predicts `values` [2, B, quantiles] whatever it is asked."""
    critic = kind(Critic(hidden=(4,), quantiles=values.shape[-1], **config), 1, 1)
    critic.forward = lambda observation, action, frozen=False: values  # type: ignore[method-assign]
    return critic


def test_plain_critics_take_the_smaller_value() -> None:
    values = torch.tensor([[[1.0], [5.0], [-2.0]], [[2.0], [4.0], [-2.0]]])
    critic, nothing = fixed_critic(TwinCritic, values), torch.zeros(3, 1)
    assert critic.target(nothing, nothing).tolist() == [[1.0], [4.0], [-2.0]]
    assert critic.value(nothing, nothing).tolist() == [1.0, 4.0, -2.0]


def test_quantile_critics_drop_the_largest_of_the_pooled_quantiles() -> None:
    """Both critics together, not each; the actor sees the mean of all."""
    values = torch.tensor([[[1.0, 9.0, 3.0]], [[8.0, 2.0, 7.0]]])
    critic, nothing = fixed_critic(QuantileCritic, values, drop=2), torch.zeros(1, 1)
    assert critic.target(nothing, nothing).sort().values.tolist() == [[1.0, 2.0, 3.0, 7.0]]
    assert critic.value(nothing, nothing).tolist() == [5.0]


def test_plain_critic_loss_by_hand() -> None:
    """1/2 mean over the batch of w ((Q1 - y)^2 + (Q2 - y)^2)."""
    critic = TwinCritic(Critic(hidden=(4,)), 1, 1)
    prediction = torch.tensor([[[1.0], [2.0]], [[3.0], [5.0]]])
    target, weight = torch.tensor([[0.0], [1.0]]), torch.tensor([1.0, 0.5])
    expected = 0.5 * ((1 + 9) * 1.0 + (1 + 16) * 0.5) / 2
    assert critic.loss(prediction, target, weight).item() == pytest.approx(expected)


@pytest.mark.parametrize("quantiles", [1, 5])
@pytest.mark.parametrize("wrong", ["target", "weight", "reversed"])
def test_losses_refuse_shapes_that_would_broadcast(quantiles: int, wrong: str) -> None:
    """case 17: [B, 1] against [B] would broadcast to [B, B] and train on noise; B = 2 and the two
    critics' own dimension are the easiest to mistake."""
    critic = make_critic(Critic(hidden=(4,), quantiles=quantiles, drop=1), 1, 1)
    kept = 1 if quantiles == 1 else 2 * quantiles - 1
    prediction, target, weight = torch.zeros(2, 2, quantiles), torch.zeros(2, kept), torch.ones(2)
    critic.loss(prediction, target, weight)  # the right shapes
    if wrong == "target":
        target = target[:, None, :].expand(2, 2, kept)
    elif wrong == "weight":
        weight = weight[:, None]
    else:
        target = target[0]
    with pytest.raises(AssertionError):
        critic.loss(prediction, target, weight)


# ---- batch normalisation -------------------------------------------------------------------------


def batches(count: int, mean: float, std: float, seed: int = 0, width: int = 50) -> list[Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return [torch.randn(64, width, generator=stream) * std + mean for _ in range(count)]


def errors(norm: nn.BatchNorm1d, seen: list[Tensor], mean: float, std: float) -> Tensor:
    """How far running mean and variance are off, root mean square over channels: [batches, 2]."""
    norm.train()
    found = []
    for x in seen:
        norm(x)
        assert norm.running_mean is not None and norm.running_var is not None
        away = norm.running_mean - mean, norm.running_var - std**2
        found.append(torch.stack([error.square().mean().sqrt() for error in away]))
    return torch.stack(found)


def plain_norm() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(50, momentum=0.01)


def test_kalman_statistics_converge_closer_than_a_fixed_momentum() -> None:
    """On a distribution that stays they come to average all that was seen, from the first batch."""
    seen = batches(600, 0.5, 2.0)
    kalman, plain = (errors(norm, seen, 0.5, 2.0) for norm in (KalmanBatchNorm(50), plain_norm()))
    assert (kalman[20:100].mean(0) < plain[20:100].mean(0) / 3).all()
    assert (kalman[400:].mean(0) < plain[400:].mean(0) * 0.9).all()
    noise = torch.tensor([2.0, 4 * 2**0.5]) / 64**0.5  # of one batch's statistics
    assert (kalman[400:].mean(0) < noise / 12).all()


def test_kalman_statistics_follow_a_shift_at_once() -> None:
    norms = KalmanBatchNorm(50), plain_norm()
    for norm in norms:
        errors(norm, batches(300, 0.0, 1.0), 0.0, 1.0)
    kalman, plain = (errors(norm, batches(300, 1.0, 1.5, seed=1), 1.0, 1.5) for norm in norms)
    assert (kalman[5:40].mean(0) < plain[5:40].mean(0) / 3).all()
    assert (kalman[200:].mean(0) < plain[200:].mean(0)).all()


def test_kalman_statistics_follow_a_drift() -> None:
    """Within about the noise of one batch, where a fixed momentum lags by its memory."""
    norms = KalmanBatchNorm(50), plain_norm()
    for norm in norms:
        for t, x in enumerate(batches(400, 0.0, 1.0)):
            norm.train()
            norm(x + 0.005 * t)
        assert norm.running_mean is not None
    kalman, plain = ((norm.running_mean - 0.005 * 399).abs().mean() for norm in norms)  # type: ignore[operator]
    assert kalman < 1 / 64**0.5 < plain / 3


def test_kalman_statistics_are_not_fooled_by_rows_that_repeat() -> None:
    """A constant current over T steps is one measurement, not T."""
    repeated = [x.repeat(5, 1) for x in batches(600, 0.5, 2.0)]
    norms = KalmanBatchNorm(50), plain_norm()
    kalman, plain = (errors(norm, repeated, 0.5, 2.0)[400:].mean(0) for norm in norms)
    assert (kalman < plain).all()


def test_kalman_normalisation_is_batch_normalisation() -> None:
    """With the batch's statistics in training, with frozen running ones elsewhere."""
    torch.manual_seed(0)
    norm, plain = KalmanBatchNorm(50), plain_norm()
    for module in (norm, plain):
        nn.init.constant_(module.weight, 0.3)
        nn.init.constant_(module.bias, -0.2)
    x = batches(1, 3.0, 2.0)[0].requires_grad_()
    found, expected = (torch.autograd.grad(m(x).square().sum(), x)[0] for m in (norm, plain))
    torch.testing.assert_close(norm(x), plain(x))
    torch.testing.assert_close(found, expected)
    norm.eval()
    before = {name: value.clone() for name, value in norm.named_buffers()}
    away = x * 5 + 9
    scaled = (away - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
    torch.testing.assert_close(norm(away), scaled * 0.3 - 0.2)
    assert all(torch.equal(value, before[name]) for name, value in norm.named_buffers())


def test_a_channel_that_never_moves_stays_finite() -> None:
    norm = KalmanBatchNorm(2)
    for x in batches(50, 0.0, 1.0, width=1):
        norm(torch.cat([x, torch.full_like(x, 0.25)], 1))
    assert all(value.isfinite().all() for value in norm.buffers())
    assert norm.running_mean[1] == 0.25 and norm.running_var[1] == 0


ACTORS = {
    "dense": lambda actor: DenseActor(actor, 5, 2),
    "spiking": lambda actor: SpikingActor(actor, Spiking(time_steps=3), 5, 2),
    "popsan": lambda actor: SpikingActor(
        actor,
        Spiking(
            encoder="population", neuron="cuba", decoder="population", output_connections=True,
            learn_threshold=True,
        ),
        5, 2,
    ),
    "stepped": lambda actor: SpikingActor(actor, Spiking(neuron="alif", decoder="membrane"), 5, 2),
}  # fmt: skip
each_actor = pytest.mark.parametrize("kind", ACTORS)
each_momentum = pytest.mark.parametrize("momentum", [0.1, "kalman"])


def normalised_actor(kind: str, momentum: float | str, **fields: Any) -> nn.Module:
    """An actor whose normalisation has seen some batches and has gains and biases of its own."""
    torch.manual_seed(0)
    actor = ACTORS[kind](
        Actor(hidden=(16, 12), batch_norm=True, batch_norm_momentum=momentum, **fields)
    )
    for name, parameter in actor.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.1, 0.6)
    actor.train()
    for _ in range(5):
        actor(torch.randn(64, 5))
    return actor.eval()


def norms_of(actor: nn.Module) -> list[nn.BatchNorm1d]:
    return [module for module in actor.modules() if isinstance(module, nn.BatchNorm1d)]


@each_actor
@each_momentum
def test_reestimated_statistics_are_those_of_all_batches_together(
    kind: str, momentum: float | str
) -> None:
    """Layer by layer: when the actor acts, every layer's current has what its norm says. By the law
    of total variance, over batches of equal size, variances within and between add up."""
    actor = normalised_actor(kind, momentum)
    stream = torch.Generator().manual_seed(1)
    parts = [torch.randn(100, 5, generator=stream) * 2 + i for i in range(4)]
    reestimate(actor, torch.cat(parts))
    seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms_of(actor)}
    for norm, inputs in seen.items():
        norm.register_forward_pre_hook(lambda _, x, inputs=inputs: inputs.append(x[0]))
    for part in parts:
        actor(part)
    for norm, inputs in seen.items():
        means = torch.stack([x.mean(0) for x in inputs])
        variances = torch.stack([x.var(0, correction=0) for x in inputs])
        count = sum(map(len, inputs))
        total = (variances.mean(0) + means.var(0, correction=0)) * count / (count - 1)
        torch.testing.assert_close(norm.running_mean, means.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm.running_var, total, rtol=1e-4, atol=1e-5)
    assert len(seen) == len(actor.layers)  # type: ignore[arg-type]


def test_reestimating_leaves_no_hook_behind() -> None:
    actor = normalised_actor("spiking", 0.1)
    reestimate(actor, torch.randn(10, 5))
    before = {name: value.clone() for name, value in actor.named_buffers()}
    actor(torch.randn(10, 5))
    assert all(torch.equal(value, before[name]) for name, value in actor.named_buffers())


@each_actor
@each_momentum
def test_batch_normalisation_folds_into_the_weights(kind: str, momentum: float | str) -> None:
    """Equal actions to 1e-5; a layer's spikes equal but where a voltage is that near the threshold;
    the actor itself is left as it was."""
    actor = normalised_actor(kind, momentum)
    before = {name: value.clone() for name, value in actor.state_dict().items()}
    folded = fold_batch_norm(actor)
    assert not norms_of(folded) and norms_of(actor)
    x = torch.randn(256, 5)
    expected, found = actor(x), folded(x)
    far = torch.ones(len(x), dtype=torch.bool)
    if isinstance(actor, SpikingActor):
        assert isinstance(folded, SpikingActor)
        current = x if actor.encoder is None else actor.encoder(x)
        for ours, theirs in zip(folded.layers, actor.layers, strict=True):
            left, right = ours.trace(current), theirs.trace(current)  # type: ignore[operator]
            near = (right.voltage - theirs.v_threshold).abs() < 1e-5  # type: ignore[operator]
            unequal = left.spikes != right.spikes
            # A spike that differs changes what its neuron does from there on.
            assert not (unequal & (near.cumsum(0) == 0)).any()
            far &= ~near.any(-1).any(0)
            current = right.spikes
        assert 0.02 < current.mean() < 0.98
        assert far.float().mean() > 0.9
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left[far].tanh(), right[far].tanh(), rtol=0, atol=1e-5)
    after = actor.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("kind", ["dense", "spiking"])
def test_layer_normalisation_is_refused_by_name(kind: str) -> None:
    actor = ACTORS[kind](Actor(hidden=(8,), layer_norm=True))
    with pytest.raises(ValueError, match=r"norm.* is a LayerNorm, which does not fold"):
        fold_batch_norm(actor)


@pytest.mark.parametrize("kind", ACTORS)
def test_without_normalisation_folding_is_a_copy(kind: str) -> None:
    actor = ACTORS[kind](Actor(hidden=(8,)))
    folded, x = fold_batch_norm(actor), torch.randn(9, 5)
    for left, right in zip(folded(x), actor(x), strict=True):
        assert torch.equal(left, right)
    assert not {id(p) for p in folded.parameters()} & {id(p) for p in actor.parameters()}


# ---- a dense actor of few levels -----------------------------------------------------------------


def test_levels_are_the_nearest_of_evenly_spaced_values_and_learn_through_the_clip() -> None:
    actor = DenseActor(Actor(hidden=(4,), levels=3), 1, 1)
    x = torch.tensor([-1.0, 0.2, 0.3, 0.7, 0.8, 2.0], requires_grad=True)
    y = actor.activation(x)
    assert y.tolist() == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 1, 1, 1, 1, 0]


def test_rates_of_t_steps_are_among_t_plus_1_levels() -> None:
    torch.manual_seed(0)
    spiking = SpikingActor(Actor(hidden=(64, 64)), Spiking(time_steps=4), 8, 2)
    rates = spiking.trace(5 * torch.randn(512, 8))[-1].spikes.mean(0)
    values = DenseActor(Actor(levels=5), 8, 2).activation(torch.linspace(-1, 2, 1000))
    assert len(rates.unique()) == 5
    assert set(rates.unique().tolist()) <= set(values.unique().tolist())


# ---- quantile Huber loss -------------------------------------------------------------------------


def naive_quantile_huber(prediction: Tensor, target: Tensor) -> Tensor:
    """Kuznetsov et al. 2020, eq. 8, a pair at a time: [B]."""
    critics, batch, quantiles = prediction.shape
    losses = []
    for b in range(batch):
        total = prediction.new_zeros(())
        for c in range(critics):
            for q in range(quantiles):
                tau = (2 * q + 1) / (2 * quantiles)
                for y in target[b]:
                    u = y - prediction[c, b, q]
                    huber = 0.5 * u**2 if u.abs() <= 1 else u.abs() - 0.5
                    total = total + abs(tau - float(u < 0)) * huber
        losses.append(total / (critics * quantiles * target.shape[1]))
    return torch.stack(losses)


def quantile_case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    options = {"generator": stream, "dtype": torch.float64}
    prediction = torch.randn(2, 4, 5, **options).mul(2).requires_grad_()
    target = torch.randn(4, 7, **options) * 2
    midpoints = (torch.arange(5, dtype=torch.float64) + 0.5) / 5
    return prediction, target, midpoints


@pytest.mark.parametrize("seed", range(3))
def test_quantile_huber_loss_and_gradient_are_the_papers(seed: int) -> None:
    prediction, target, midpoints = quantile_case(seed)
    weight = torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    loss = QuantileHuber.apply(prediction, target, midpoints)
    expected = naive_quantile_huber(prediction, target)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradient, wanted = (
        torch.autograd.grad((value * weight).sum(), prediction)[0] for value in (loss, expected)
    )
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


def test_quantile_huber_passes_gradcheck_away_from_its_kinks() -> None:
    prediction, target, midpoints = quantile_case()
    delta = (target[:, None, :] - prediction[..., None]).detach().abs()
    assert torch.minimum(delta, (delta - 1).abs()).min() > 1e-4
    assert torch.autograd.gradcheck(
        lambda p: QuantileHuber.apply(p, target, midpoints), prediction, eps=1e-6
    )


def test_quantile_critic_loss_is_the_weighted_mean() -> None:
    critic = QuantileCritic(Critic(hidden=(4,), quantiles=5, drop=3), 1, 1).double()
    prediction, target, _ = quantile_case()
    weight = torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    expected = (naive_quantile_huber(prediction, target) * weight).mean()
    loss = critic.loss(prediction, target, weight)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


def test_minimising_quantile_huber_finds_the_quantiles() -> None:
    """Far from any Huber bend the minimum is close to the quantiles of the target distribution."""
    target = torch.linspace(0, 1000, 10_001, dtype=torch.float64)[None]
    midpoints = (torch.arange(5, dtype=torch.float64) + 0.5) / 5
    at = (1000 * midpoints).expand(2, 1, 5).clone().requires_grad_()
    QuantileHuber.apply(at, target, midpoints).sum().backward()
    beside = (1000 * midpoints + 50).expand(2, 1, 5).clone().requires_grad_()
    QuantileHuber.apply(beside, target, midpoints).sum().backward()
    assert at.grad is not None and beside.grad is not None
    assert at.grad.abs().max() < 1e-4 < beside.grad.min()
