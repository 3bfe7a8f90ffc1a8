"""The dense actor, the critics, the squashed Gaussian and the observation normaliser."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import fuse_linear_bn_eval

from sansac import kernels
from sansac.config import Actor as ActorConfig
from sansac.config import Critic as CriticConfig

if TYPE_CHECKING:
    from sansac.replay import Batch

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0

Actor = TypeVar("Actor", bound=nn.Module)


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a = tanh(u), u = mean + exp(log_std) noise, and its log-probability.

    mean, log_std, noise: [B, A]; returns the action in (-1, 1), [B, A], and log pi(a|s), [B], the
    density of the unscaled action: an affine map to the environment's bounds would subtract the
    constant log of its slope. The tanh correction log(1 - tanh(u)^2) = 2 (log 2 - u -
    softplus(-2u)) is taken from the pre-tanh sample, so it is exact where tanh saturates
    (Haarnoja et al. 2018, arXiv:1812.05905, appendix C, in its stable form).
    """
    u = mean + log_std.exp() * noise
    density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    correction = 2 * (math.log(2) - u - F.softplus(-2 * u))
    return torch.tanh(u), (density - correction).sum(-1)


def squashed_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """log pi(a|s) of given actions in (-1, 1), [B, A] each -> [B]. An action at a bound, where the
    density has no limit, is taken as 1e-6 inside."""
    u = torch.atanh(action.double().clamp(-1 + 1e-6, 1 - 1e-6)).to(mean.dtype)
    noise = (u - mean) * (-log_std).exp()
    return squashed_sample(mean, log_std, noise)[1]


class RunningNorm(nn.Module):
    """Running mean and standard deviation of observations, [B, obs], clipped to [-clip, clip].

    Statistics are merged batch by batch (Chan et al. 1979) in float64; only `update` moves them.
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    scale: Tensor
    centre: Tensor

    def __init__(self, size: int, clip: float) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # What forward applies, kept in float32.
        self.register_buffer("scale", torch.ones(size), persistent=False)
        self.register_buffer("centre", torch.zeros(size), persistent=False)

    @torch.no_grad()
    def update(self, observation: Tensor) -> None:
        batch = observation.to(torch.float64)
        var, mean = torch.var_mean(batch, dim=0, correction=0)
        n, total = len(batch), self.count + len(batch)
        delta = mean - self.mean
        spread = self.var * self.count + var * n + delta.square() * (self.count * n / total)
        self.mean += delta * (n / total)
        self.var.copy_(spread / total)
        self.count.copy_(total)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Derive what forward applies from the statistics."""
        self.scale.copy_((self.var + 1e-8).rsqrt())
        self.centre.copy_(self.mean)

    def forward(self, observation: Tensor) -> Tensor:
        # In this order a constant entry becomes exactly 0, however far from 0 it is.
        return ((observation - self.centre) * self.scale).clamp(-self.clip, self.clip)

    def _load_from_state_dict(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh()


def normalisation(
    config: ActorConfig, width: int, gain: float = 1.0, bias: float = 0.0
) -> nn.Module:
    """What stands between a product and its activation or neuron: [B, width] in and out.

    BatchNorm uses batch statistics in training mode alone, which `SAC` sets for the actor's loss.
    """
    norm: nn.LayerNorm | nn.BatchNorm1d
    if config.layer_norm:
        norm = nn.LayerNorm(width)
    elif config.batch_norm:
        momentum = config.batch_norm_momentum
        norm = (
            KalmanBatchNorm(width)
            if momentum == "kalman"
            else nn.BatchNorm1d(width, momentum=momentum)
        )
    else:
        return nn.Identity()
    nn.init.constant_(norm.weight, gain)
    nn.init.constant_(norm.bias, bias)
    return norm


class KalmanBatchNorm(nn.BatchNorm1d):
    """BatchNorm whose running statistics move by how far a batch's can be trusted.

    After the confidence-adaptive update of CaRe-BN (Xu et al. 2026, arXiv:2509.23791), as a scalar
    Kalman filter a channel and statistic: the batch's m measures a value that drifts,

        K = P / (P + R),  running += K (m - running),  P = K R.

    R, the variance of m, is read off successive batches, E[(m_t - m_{t-1})^2] / 2, since rows that
    are one sample at several time steps say less than their number. Where innovations exceed what
    noise explains, P rises to E[(m - running)^2] - 2 R: a still distribution is averaged ever
    longer, a shift is followed at once. (The paper puts P = E[(m - running)^2], so K >= 1/2.)
    """

    memory = 0.05  # share of a new square in the running means of squares
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    last: Tensor
    noise: Tensor
    surprise: Tensor
    uncertainty: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        for name in ("last", "noise", "surprise", "uncertainty"):  # of mean and variance
            self.register_buffer(name, torch.zeros(2, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] in and out."""
        if not self.training:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        before = self.last.clone()
        y = F.batch_norm(  # with a momentum of 1 it leaves the batch's own statistics in `last`
            x, self.last[0], self.last[1], self.weight, self.bias,
            training=True, momentum=1.0, eps=self.eps,
        )  # fmt: skip
        self.filter(before)
        return y

    @torch.no_grad()
    def filter(self, before: Tensor) -> None:
        """Take in the statistics of the last batch, `before` being those of the one before it."""
        running = torch.stack([self.running_mean, self.running_var])
        innovation = self.last - running
        seen = self.num_batches_tracked
        memory = (1 / seen.clamp_min(1)).clamp_min(self.memory)  # a plain mean at first
        self.noise.lerp_((self.last - before).square() / 2, memory)
        self.surprise.lerp_(innovation.square(), memory)
        prior = torch.maximum(self.uncertainty, self.surprise - 2 * self.noise)
        gain = prior / (prior + self.noise).clamp_min(1e-12)
        gain = torch.where(seen < 2, 1.0, gain)  # it takes two batches to know the noise
        self.uncertainty.copy_(gain * self.noise)
        self.running_mean.copy_(running[0] + gain[0] * innovation[0])
        self.running_var.copy_(running[1] + gain[1] * innovation[1])
        self.num_batches_tracked += 1


@torch.no_grad()
def reestimate(actor: nn.Module, observation: Tensor) -> None:
    """Set BatchNorm's running statistics to those of normalised observations, [B, obs].

    CaRe-BN's re-calibration (Xu et al. 2026, arXiv:2509.23791): each layer is measured on what the
    layers before it send with their new statistics already in place, as they will when it acts.
    """

    def measure(norm: nn.Module, inputs: tuple[Tensor]) -> None:
        var, mean = torch.var_mean(inputs[0], dim=0)
        norm.get_buffer("running_mean").copy_(mean)
        norm.get_buffer("running_var").copy_(var)

    norms = [module for module in actor.modules() if isinstance(module, nn.BatchNorm1d)]
    hooks = [norm.register_forward_pre_hook(measure) for norm in norms]
    try:
        actor(observation)
    finally:
        for hook in hooks:
            hook.remove()


def fold_batch_norm(actor: Actor) -> Actor:
    """A copy of a dense or spiking actor for deployment, its BatchNorm folded into the weights.

    Its actions are those of the actor with running statistics, up to rounding. Raises ValueError
    for LayerNorm, whose statistics are each input's own.
    """
    folded = copy.deepcopy(actor).eval()
    for name, norm in list(folded.named_modules()):
        if isinstance(norm, nn.LayerNorm):
            raise ValueError(f"{name} is a LayerNorm, which does not fold into weights")
        if isinstance(norm, nn.BatchNorm1d):
            # `layers.0` and `norms.0` of a dense actor, `layers.0.linear` and `.norm` of a spiking
            product = name.replace("norms.", "layers.").replace(".norm", ".linear")
            linear = folded.get_submodule(product)
            assert isinstance(linear, nn.Linear)
            folded.set_submodule(product, fuse_linear_bn_eval(linear, norm))
            folded.set_submodule(name, nn.Identity())
    return folded


class DenseActor(nn.Module):
    """Multilayer perceptron: normalised observations to a Gaussian before the tanh."""

    def __init__(
        self, config: ActorConfig, observation_size: int, action_size: int, gsde: bool = False
    ) -> None:
        super().__init__()
        widths = [observation_size, *config.hidden]
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise(widths))
        self.norms = nn.ModuleList(normalisation(config, n) for n in config.hidden)
        self.levels = config.levels
        self.mean = nn.Linear(widths[-1], action_size)
        head = StateDependentStd if gsde else nn.Linear
        self.log_std: nn.Module = head(widths[-1], action_size)

    def forward(
        self, observation: Tensor, stream: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """[B, obs] -> mean and log standard deviation, each [B, act]. There is no noise in it."""
        x = observation
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.activation(norm(layer(x)))
        return self.mean(x), self.log_std(x).clamp(LOG_STD_MIN, LOG_STD_MAX)

    def activation(self, x: Tensor) -> Tensor:
        """ReLU; or of `levels` values from 0 to 1 the nearest, whose gradient is the clip's
        (straight-through, Bengio et al. 2013, arXiv:1308.3432)."""
        if not self.levels:
            return F.relu(x)
        clipped, steps = x.clamp(0, 1), self.levels - 1
        return clipped + ((clipped * steps).round() / steps - clipped).detach()

    def penalty(self) -> float:
        """Nothing is added to the actor's loss."""
        return 0.0

    def set_progress(self, progress: float, best_return: float | None = None) -> None:
        """Nothing changes over training."""


class StateDependentStd(nn.Module):
    """log sigma of noise that is linear in features, noise = features E with E_ij ~ N(0, s_ij^2):
    sigma_j^2 = sum_i features_i^2 s_ij^2 (gSDE, Raffin et al. 2022, arXiv:2005.05719, eq. 5).

    [B, features] -> [B, act]. Features learn nothing from it.
    """

    features: Tensor  # of the last pass

    def __init__(self, features: int, action_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((features, action_size), -3.0))  # log s

    def forward(self, features: Tensor) -> Tensor:
        self.features = features.detach()
        variance = self.features.square() @ (2 * self.weight).exp()
        return 0.5 * (variance + 1e-6).log()


class StackedLinear(nn.Module):
    """`copies` independent linear layers: [C, B, in] -> [C, B, out]."""

    def __init__(self, copies: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(copies, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(copies, 1, outputs))
        bound = 1 / math.sqrt(inputs)  # nn.Linear's own initial range
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class StackedNorm(nn.Module):
    """LayerNorm with a gain and a bias of its own a copy: [C, B, width] in and out."""

    def __init__(self, copies: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(copies, 1, width))
        self.bias = nn.Parameter(torch.zeros(copies, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.layer_norm(x, x.shape[-1:]), self.weight)


class StackedPerceptron(torch.autograd.Function):
    """`copies` perceptrons side by side: product, LayerNorm if `normed`, ReLU; a product ends it.

    observation [B, obs], action [B, act] -> [copies, B, out]. `parameters` are weight and bias of a
    product, then gain and bias of its LayerNorm, layer by layer. One node with a backward by hand,
    where autograd would keep nine; the action gets a gradient, the observation none.
    """

    @staticmethod
    def forward(
        ctx: Any, observation: Tensor, action: Tensor, normed: bool, *parameters: Tensor
    ) -> Tensor:
        *hidden, (last_weight, last_bias) = layered(parameters, normed)
        x = torch.cat([observation, action], -1).expand(len(last_weight), -1, -1)
        kept = []
        for weight, bias, *norm in hidden:
            h = torch.baddbmm(bias, x, weight)
            # In place where no backward follows: the less memory, the more of it in the cache.
            out = None if any(ctx.needs_input_grad) else h
            y, statistics = (
                kernels.norm_relu(h, norm[0], norm[1], out=out) if norm else (h.relu_(), h)
            )
            kept += [x, h, statistics]
            x = y
        ctx.save_for_backward(*parameters, *kept, x)
        ctx.normed, ctx.count, ctx.actions = normed, len(parameters), action.shape[-1]
        return torch.baddbmm(last_bias, x, last_weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        layers = layered(ctx.saved_tensors[: ctx.count], ctx.normed)
        kept = ctx.saved_tensors[ctx.count :]
        learned, to_action = ctx.needs_input_grad[3], None
        found: list[Tensor | None] = []
        for index in reversed(range(len(layers))):
            weight, x = layers[index][0], kept[3 * index]
            if learned:
                found = [x.mT @ gradient, gradient.sum(1, keepdim=True), *found]
            if index == 0:
                break
            gradient, before = gradient @ weight.mT, 3 * (index - 1)
            if ctx.normed:
                gain = layers[index - 1][2]
                gradient, to_gain, to_bias = kernels.norm_relu_backward(
                    gradient, kept[before + 1], gain, x, kept[before + 2], learned
                )
                found = [to_gain, to_bias, *found]
            else:
                torch.ops.aten.threshold_backward(gradient, x, 0, grad_input=gradient)
        if ctx.needs_input_grad[1]:
            to_action = (gradient @ layers[0][0][:, -ctx.actions :].mT).sum(0)
        return None, to_action, None, *(found if learned else [None] * ctx.count)


def layered(parameters: Sequence[Tensor], normed: bool) -> list[Sequence[Tensor]]:
    """The parameters of `StackedPerceptron`, a layer at a time; the last has no LayerNorm."""
    size = 4 if normed else 2
    return [parameters[start : start + size] for start in range(0, len(parameters), size)]


class TwinCritic(nn.Module):
    """Action-value networks Q_i(s, a), stacked, two unless `copies` says otherwise (Fujimoto et al.
    2018, arXiv:1802.09477)."""

    has_target = True  # whether a slow copy of it bootstraps
    stream: torch.Generator | None = None  # of what is random in it

    def __init__(self, config: CriticConfig, observation_size: int, action_size: int) -> None:
        super().__init__()
        self.config, self.copies = config, config.copies
        widths = [observation_size + action_size, *config.hidden]
        self.layers = nn.ModuleList(StackedLinear(self.copies, *pair) for pair in pairwise(widths))
        self.norms = nn.ModuleList(
            StackedNorm(self.copies, n) for n in config.hidden if config.layer_norm
        )
        self.head = StackedLinear(self.copies, widths[-1], config.quantiles)

    def forward(self, observation: Tensor, action: Tensor, frozen: bool = False) -> Tensor:
        """[B, obs], [B, act] -> [copies, B, quantiles]. Frozen, only the action gets a gradient."""
        parts: list[nn.Module] = [*self.layers, self.head]
        if self.norms:  # each behind its product
            parts = [part for pair in zip(self.layers, self.norms, strict=True) for part in pair]
            parts.append(self.head)
        parameters: list[Tensor] = [p for part in parts for p in part.parameters(recurse=False)]
        if frozen:
            parameters = [p.detach() for p in parameters]
        return StackedPerceptron.apply(observation, action, len(self.norms) > 0, *parameters)

    def pair(
        self, batch: Batch, next_action: Tensor, target_critic: TwinCritic
    ) -> tuple[Tensor, Tensor]:
        """Q(s, a), [copies, B, quantiles], and what a target bootstraps from at (s', a')."""
        with torch.no_grad():
            bootstrap = target_critic.target(batch.next_observation, next_action)
        return self(batch.observation, batch.action), bootstrap

    def target(self, observation: Tensor, action: Tensor) -> Tensor:
        """What the Bellman target bootstraps from: min_i Q_i, [B, 1]."""
        return self(observation, action).amin(0)

    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """What the actor maximises: min_i Q_i, [B]."""
        return self(observation, action, frozen=True).amin(0).squeeze(-1)

    def loss(self, prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """1/2 sum_i mean_B weight (Q_i - y)^2; prediction [2, B, 1], target [B, 1], weight [B]."""
        shapes = prediction.shape, target.shape, weight.shape
        assert prediction.shape[1:] == target.shape == (*weight.shape, 1), shapes
        return 0.5 * ((prediction - target).square().sum((0, 2)) * weight).mean()


class QuantileCritic(TwinCritic):
    """Truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269)."""

    def __init__(self, config: CriticConfig, observation_size: int, action_size: int) -> None:
        super().__init__(config, observation_size, action_size)
        self.kept = self.copies * config.quantiles - config.drop
        midpoints = (torch.arange(config.quantiles) + 0.5) / config.quantiles
        self.register_buffer("midpoints", midpoints, persistent=False)

    def target(self, observation: Tensor, action: Tensor) -> Tensor:
        """The pooled quantiles of both critics without the `drop` largest: [B, kept]."""
        return kernels.lowest(self(observation, action), self.kept)

    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """What the actor maximises: the mean of all quantiles, [B]."""
        return self(observation, action, frozen=True).mean((0, 2))

    def loss(self, prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Quantile Huber loss, averaged over critics, quantiles and target atoms (paper, eq. 8).

        prediction [2, B, Q], target [B, K], weight [B].
        """
        shapes = prediction.shape, target.shape, weight.shape
        assert prediction.shape[1:2] == weight.shape, shapes
        assert target.shape == (*weight.shape, self.kept), shapes
        return (QuantileHuber.apply(prediction, target, self.midpoints) * weight).mean()


class QuantileHuber(torch.autograd.Function):
    """Quantile Huber loss a sample, with its gradient formed in the same pass.

    delta = target - prediction, w = |midpoint - 1[delta < 0]|; the loss is w huber(delta) averaged
    over critics, quantiles and atoms, and d loss / d prediction = -w clip(delta, -1, 1). The pairs
    [C, B, Q, K] are the cost of truncated quantile critics, so they are read few times.
    """

    @staticmethod
    def forward(ctx, prediction: Tensor, target: Tensor, midpoints: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        if fused := kernels.quantile_huber(prediction, target):
            loss, slope = fused
            ctx.save_for_backward(slope)
            return loss
        copies, _, quantiles = prediction.shape
        pairs = copies * quantiles * target.shape[1]
        delta = target[:, None, :] - prediction[..., None]
        clipped = delta.clamp(-1, 1)
        midpoint = midpoints[:, None]
        weight = torch.where(delta < 0, 1 - midpoint, midpoint)
        delta.add_(clipped, alpha=-0.5)  # huber(d) = c (d - c / 2), c = clip(d)
        clipped.mul_(weight)
        ctx.save_for_backward(clipped.sum(-1).div_(-pairs))
        return delta.mul_(clipped).sum((0, 2, 3)) / pairs

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (slope,) = ctx.saved_tensors
        return slope * gradient[:, None], None, None


class EnsembleCritic(TwinCritic):
    """Many critics, of which each target takes the minimum of a few drawn anew, while the actor
    follows the mean of all (REDQ, Chen et al. 2021, arXiv:2101.05982, algorithm 1)."""

    def target(self, observation: Tensor, action: Tensor) -> Tensor:
        """min over `subset` critics, drawn without replacement, [B, 1]."""
        value = self(observation, action)
        drawn = torch.rand(self.copies, generator=self.stream, device=value.device).argsort()
        return value[drawn[: self.config.subset]].amin(0)

    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """What the actor maximises: the mean of all Q_i, [B]."""
        return self(observation, action, frozen=True).mean((0, 2))


class DropoutCritic(TwinCritic):
    """Critics with dropout after every product and, with `layer_norm`, LayerNorm before the
    activation (DroQ, Hiraoka et al. 2022, arXiv:2110.02034, algorithm 2)."""

    def forward(self, observation: Tensor, action: Tensor, frozen: bool = False) -> Tensor:
        """[B, obs], [B, act] -> [copies, B, quantiles]; by autograd, which freezes by itself."""
        x = torch.cat([observation, action], -1).expand(self.copies, -1, -1)
        for layer, norm in zip_longest(self.layers, self.norms, fillvalue=nn.Identity()):
            x = F.relu(norm(self.dropped(layer(x))))
        return self.head(x)

    def dropped(self, x: Tensor) -> Tensor:
        """Units are 0 with the probability `dropout`, others scaled to keep the mean; in targets
        and in the actor's loss too."""
        keep = 1 - self.config.dropout
        kept = torch.rand(x.shape, generator=self.stream, dtype=x.dtype, device=x.device) < keep
        return x * kept / keep

    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """What the actor maximises: the mean of all Q_i, [B]."""
        return self(observation, action, frozen=True).mean((0, 2))


class StackedBatchRenorm(nn.Module):
    """Batch renormalisation with statistics of its own a copy: [C, B, width] in and out (Ioffe
    2017, arXiv:1702.03275; constants of Bhatt et al. 2024, arXiv:1902.05605).

    In training mode statistics of the batch, after `warmup` passes corrected towards the running
    ones within bounds; else the running ones.
    """

    momentum, eps, most_scale, most_shift = 0.01, 1e-3, 3.0, 5.0
    running_mean: Tensor
    running_var: Tensor
    passes: Tensor

    def __init__(self, copies: int, width: int, warmup: int) -> None:
        super().__init__()
        self.warmup = warmup
        self.weight = nn.Parameter(torch.ones(copies, 1, width))
        self.bias = nn.Parameter(torch.zeros(copies, 1, width))
        self.register_buffer("running_mean", torch.zeros(copies, 1, width))
        self.register_buffer("running_var", torch.ones(copies, 1, width))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training:
            var, mean = torch.var_mean(x, dim=1, keepdim=True)
            statistics = mean.detach(), var.detach()
            mean, var = self.renormalised(mean, var)
            self.follow(*statistics)
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias

    def renormalised(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and variance to normalise by, [C, 1, width] each."""
        with torch.no_grad():
            running = (self.running_var + self.eps).sqrt()
            scale = ((var + self.eps).sqrt() / running).clamp(1 / self.most_scale, self.most_scale)
            shift = (mean - self.running_mean) / running
            shift = shift.clamp(-self.most_shift, self.most_shift)
            warm = self.passes > self.warmup
            scale, shift = torch.where(warm, scale, 1.0), torch.where(warm, shift, 0.0)
        return mean - shift * var.sqrt() / scale, var / scale.square()

    @torch.no_grad()
    def follow(self, mean: Tensor, var: Tensor) -> None:
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var, self.momentum)
        self.passes += 1


class BatchNormCritic(TwinCritic):
    """Critics with batch renormalisation before every product and no target network (CrossQ, Bhatt
    et al. 2024, arXiv:1902.05605): current and next pairs go through them in one pass, so that
    both are normalised by the statistics of the mixture."""

    has_target = False

    def __init__(self, config: CriticConfig, observation_size: int, action_size: int) -> None:
        super().__init__(config, observation_size, action_size)
        widths = [observation_size + action_size, *config.hidden]
        self.renorms = nn.ModuleList(
            StackedBatchRenorm(self.copies, n, config.batch_norm_warmup) for n in widths
        )
        self.renorms.eval()

    def forward(self, observation: Tensor, action: Tensor, frozen: bool = False) -> Tensor:
        """[B, obs], [B, act] -> [copies, B, quantiles]; by autograd, which freezes by itself."""
        x = torch.cat([observation, action], -1).expand(self.copies, -1, -1)
        *first, last = self.renorms
        for renorm, layer in zip(first, self.layers, strict=True):
            x = F.relu(layer(renorm(x)))
        return self.head(last(x))

    def pair(
        self, batch: Batch, next_action: Tensor, target_critic: TwinCritic
    ) -> tuple[Tensor, Tensor]:
        """Q(s, a), [copies, B, 1], and min_i Q_i(s', a'), [B, 1], of one pass in training mode."""
        self.renorms.train()
        both = self(
            torch.cat([batch.observation, batch.next_observation]),
            torch.cat([batch.action, next_action]),
        )
        self.renorms.eval()
        prediction, following = both.chunk(2, dim=1)
        return prediction, following.detach().amin(0)


def make_critic(config: CriticConfig, observation_size: int, action_size: int) -> TwinCritic:
    kind = TwinCritic
    if config.quantiles > 1:
        kind = QuantileCritic
    elif config.subset:
        kind = EnsembleCritic
    elif config.dropout:
        kind = DropoutCritic
    elif config.batch_norm:
        kind = BatchNormCritic
    return kind(config, observation_size, action_size)


def mlp(widths: Sequence[int], layer_norm: bool = False) -> nn.Sequential:
    """Linear layers of `widths` with ReLU between them, and LayerNorm before each ReLU if asked."""
    *hidden, last = pairwise(widths)
    layers: list[nn.Module] = []
    for m, n in hidden:
        layers += [nn.Linear(m, n), *([nn.LayerNorm(n)] if layer_norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(*last))
