"""The spiking actor: encoder -> layers of SpikingJelly neurons -> decoder.

Membrane state lives for one control step: it starts at reset inside every forward pass, so a pass
is a function of its input, and of the random stream handed to it, alone. Currents and spikes have
shape [T, B, N]; a current that is constant over the T simulation steps is computed once, [B, N].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from spikingjelly.activation_based import functional, neuron, surrogate
from torch import Generator, Tensor, nn

from sansac import kernels
from sansac.config import NEURON_NAMES
from sansac.config import Actor as ActorConfig
from sansac.config import Spiking as SpikingConfig
from sansac.networks import LOG_STD_MAX, LOG_STD_MIN, StateDependentStd, mlp, normalisation
from sansac.schedules import Schedule, initial

SURROGATES = {
    "rectangle": surrogate.Rect,
    "triangle": surrogate.PiecewiseQuadratic,
    "atan": surrogate.ATan,
    "sigmoid": surrogate.Sigmoid,
    "fast_sigmoid": surrogate.SuperSpike,
}


# -- encoders ----------------------------------------------------------------------------------


class PopulationEncoder(nn.Module):
    """PopSAN's encoder (Tang et al. 2020, arXiv:2010.09635): learned Gaussian receptive fields.

    Entry s drives `input_population` fields with A = exp(-(s - mean)^2 / (2 std^2)). What leaves
    them is, by `encoder`: `population`, deterministic spikes of an integrator that fires above
    0.999 and then subtracts it; `population-current`, A itself as analogue current, constant over
    time (MDC-SAN, Zhang et al. 2022, arXiv:2106.07854); `poisson`, a spike with probability A.
    Spikes pass their gradient unchanged to A (straight-through).
    """

    threshold = 0.999
    draws: Tensor

    def __init__(self, config: SpikingConfig, observation_size: int) -> None:
        super().__init__()
        self.kind, self.time_steps = config.encoder, config.time_steps
        self.range = config.input_range
        self.size = observation_size * config.input_population
        centres = torch.linspace(-config.input_range, config.input_range, config.input_population)
        if config.input_population == 1:
            centres = torch.zeros(1)
        self.mean = nn.Parameter(centres.repeat(observation_size, 1))
        self.std = nn.Parameter(torch.full_like(self.mean, config.input_std))
        if config.encoder == "poisson":  # once: a CUDA graph cannot record the making of a stream
            shape, fixed = (config.time_steps, 1, self.size), Generator().manual_seed(0)
            self.register_buffer("draws", torch.rand(shape, generator=fixed), persistent=False)

    def activation(self, observation: Tensor) -> Tensor:
        """[B, obs] -> activations of the fields, [B, obs * population], in (0, 1]."""
        distance = observation[:, :, None] - self.mean
        return torch.exp(-0.5 * distance.square() / self.std.square()).flatten(1)

    def forward(self, observation: Tensor, stream: Generator | None = None) -> Tensor:
        """[B, obs] -> spikes [T, B, obs * population], or currents [B, obs * population]."""
        activation = self.activation(observation)
        if self.kind == "population-current":
            return activation
        if self.kind == "poisson":
            return self._poisson(activation, stream)
        return IntegrateAndFire.apply(activation, self.time_steps, self.threshold)

    def _poisson(self, activation: Tensor, stream: Generator | None) -> Tensor:
        """Without a stream every row meets the same draws, so that evaluation is reproducible."""
        draws = self.draws
        if stream is not None:
            shape = (self.time_steps, *activation.shape)
            draws = torch.rand(shape, generator=stream, device=activation.device)
        return straight_through(draws < activation, activation.expand(self.time_steps, -1, -1))


class IntegrateAndFire(torch.autograd.Function):
    """V += A, S[t] = 1 where V > threshold, V -= S[t] threshold: activations [B, N] -> spikes
    [T, B, N], with dS/dV = 1 (straight-through). One node for what would be four a step."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, time_steps: int, threshold: float) -> Tensor:
        ctx.threshold = threshold
        voltage = torch.zeros_like(activation)
        spikes = voltage.repeat(time_steps, 1, 1)
        for i in range(time_steps):
            voltage += activation
            torch.gt(voltage, threshold, out=spikes[i])
            voltage.sub_(spikes[i], alpha=threshold)
        return spikes

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        to_voltage, total = torch.zeros_like(gradient[0]), torch.zeros_like(gradient[0])
        for to_spike in gradient.unbind()[::-1]:
            to_voltage = torch.add(to_spike, to_voltage, alpha=1 - ctx.threshold)
            total += to_voltage
        return total, None, None


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of `hard` with the gradient of `soft`."""
    return hard.to(soft.dtype) + (soft - soft.detach())


# -- neurons -----------------------------------------------------------------------------------


class AdaptiveLIFNode(neuron.SimpleBaseNode):
    """LIF whose threshold rises with its own spikes (ALIF, Bellec et al. 2018, arXiv:1803.09574).

    H[t] = V[t-1] - V[t-1] / tau + X[t], S[t] = 1 where H[t] >= v_threshold + a[t-1],
    a[t] = decay a[t-1] + (1 - decay) adaptation S[t].
    """

    v: Any  # 0.0 after a reset, then a tensor
    raised: Any

    def __init__(self, config: SpikingConfig, **common: Any) -> None:
        super().__init__(**common)
        self.config = config
        self.register_memory("raised", 0.0)

    def neuronal_charge(self, x: Tensor) -> None:
        self.v = self.v - self.v / self.config.tau + x

    def neuronal_fire(self) -> Tensor:
        spike = self.surrogate_function(self.v - (self.v_threshold + self.raised))
        decay = self.config.adaptation_decay
        self.raised = decay * self.raised + (1 - decay) * self.config.adaptation * spike
        return spike


def current_based(config: SpikingConfig, detach_reset: bool, **common: Any) -> nn.Module:
    node = neuron.CUBALIFNode(config.current_decay, config.voltage_decay, **common)
    node.detach_reset = detach_reset
    return node


def complementary(config: SpikingConfig, detach_reset: bool, **common: Any) -> nn.Module:
    """CLIF (Huang et al. 2024, arXiv:2402.04663): a soft reset, always in the gradient."""
    return neuron.ComplementaryLIFNode(config.tau, **common)


# What makes each choice of `spiking.neuron`: a single-step SpikingJelly neuron, hard reset to 0.
NEURONS: dict[str, Callable[..., nn.Module]] = {
    "lif": lambda config, **common: neuron.LIFNode(config.tau, config.decay_input, **common),
    "plif": lambda config, **common: neuron.ParametricLIFNode(
        config.tau, config.decay_input, **common
    ),
    "cuba": current_based,
    "clif": complementary,
    "alif": AdaptiveLIFNode,
}
FUSED = ("lif", "plif", "cuba")  # those that `kernels` computes


def register_neuron(name: str) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Decorate a class, or a function that makes a neuron, to be the choice `name`.

    It is called with the Spiking configuration and v_threshold, surrogate_function, detach_reset.
    What it makes charges, fires and resets once a call, as a subclass of SpikingJelly's
    `SimpleBaseNode` does. Whoever loads the agent registers it first.
    """
    if name in FUSED:
        raise ValueError(f"the neuron {name!r} is computed by kernels: choose another name")

    def register(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        NEURONS[name] = make
        if name not in NEURON_NAMES:
            NEURON_NAMES.append(name)
        return make

    return register


def make_node(config: SpikingConfig) -> nn.Module:
    """The neuron of a configuration."""
    return NEURONS[config.neuron](
        config,
        v_threshold=config.v_threshold,
        surrogate_function=Surrogate(
            SURROGATES[config.surrogate](1 / initial(config.surrogate_width))
        ),
        detach_reset=config.detach_reset,
    )


def backend_for(config: SpikingConfig, device: torch.device) -> str:
    """What computes the neurons. Raises ValueError where it is absent."""
    if config.neuron not in FUSED:
        return "spikingjelly"
    return kernels.backend_for(config.backend, device)


class LayerTrace(NamedTuple):
    """What one layer did in a pass: voltages before reset and spikes, each [T, B, N]."""

    voltage: Tensor
    spikes: Tensor


class GroupedLinear(nn.Module):
    """A linear map within each of `groups` groups of `inputs` neurons: [B, G * I] -> [B, G, O]."""

    def __init__(self, groups: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)  # nn.Linear's own initial range
        self.weight = nn.Parameter(torch.empty(groups, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(groups, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, self.weight.shape[:2])
        return (grouped[..., None] * self.weight).sum(-2) + self.bias

    @torch.no_grad()
    def as_linear(self) -> nn.Linear:
        """A copy as one product, [B, G * I] -> [B, G * O], the groups' matrices its blocks."""
        groups, inputs, outputs = self.weight.shape
        linear = nn.Linear(groups * inputs, groups * outputs).requires_grad_(False)
        linear.weight.copy_(torch.block_diag(*self.weight.transpose(1, 2)))
        linear.bias.copy_(self.bias.flatten())
        return linear


class SpikingLayer(nn.Module):
    """A product, the normalisation of its current, and neurons.

    `lif`, `plif` and `cuba` run in `kernels`; other neurons, a layer with connections among its own
    neurons, and a learned threshold on the backend `spikingjelly` step SpikingJelly's node.
    """

    def __init__(
        self, inputs: int, width: int, actor: ActorConfig, config: SpikingConfig, groups: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.surrogate_width = initial(config.surrogate_width)
        self.linear = nn.Linear(inputs, width)
        # A normalised current of half the threshold, give or take as much, neither silences nor
        # saturates a neuron at the start.
        self.norm = normalisation(actor, width, config.v_threshold / 2, config.v_threshold / 2)
        self.node = make_node(config)
        self.log_threshold: nn.Parameter | None = None
        if config.learn_threshold:
            self.log_threshold = nn.Parameter(torch.tensor(config.v_threshold).log())
        # Within a group of output neurons, spikes of one step add to the currents of the next
        # (ILC-SAN, Chen et al. 2024, arXiv:2401.05444).
        self.connections = (
            GroupedLinear(groups, width // groups, width // groups) if groups else None
        )

    @property
    def v_threshold(self) -> float | Tensor:
        return self.config.v_threshold if self.log_threshold is None else self.log_threshold.exp()

    def current(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., width]; time is folded into the batch for the product."""
        return self.norm(self.linear(x.flatten(0, -2))).unflatten(0, x.shape[:-1])

    def forward(self, x: Tensor, output: kernels.Output, stream: Generator | None = None) -> Tensor:
        """[T, B, inputs], or [B, inputs] where constant over time -> spikes or voltages
        [T, B, width], or mean spikes [B, width].

        With a stream, Gaussian noise is added to currents and to the spikes that leave the layer,
        independently in every step, neuron and row (NoisySAN, Chen et al. 2024, arXiv:2403.04162,
        whose noise may be coloured over an episode).
        """
        config, current = self.config, self.current(x)
        if stream is not None and config.charge_noise:
            if x.dim() == 2:
                current = current.expand(config.time_steps, -1, -1)
            current = current + config.charge_noise * normal(current, stream)
        learned_there = self.log_threshold is not None and config.backend == "spikingjelly"
        if self.connections is not None or config.neuron not in FUSED or learned_there:
            result = self._stepped(current, output)
        else:
            result = self._fused(current, output)
        if stream is not None and config.transmission_noise and output != "voltages":
            terms = config.time_steps if output == "mean" else 1
            result = result + config.transmission_noise / terms**0.5 * normal(result, stream)
        return result

    def _fused(self, current: Tensor, output: kernels.Output) -> Tensor:
        config = self.config
        backend: kernels.Backend = config.backend
        if backend == "spikingjelly" and output == "voltages":
            backend = "torch"  # SpikingJelly keeps the voltage before reset to itself
        shared: dict[str, Any] = {
            "time_steps": config.time_steps,
            "constant": current.dim() == 2,
            "v_threshold": self.v_threshold,
            "v_reset": 0.0,
            "surrogate": config.surrogate,
            "alpha": 1 / self.surrogate_width,
            "detach_reset": config.detach_reset,
            "output": output,
            "backend": backend,
        }
        if config.neuron == "cuba":
            return kernels.cuba_lif(
                current, c_decay=config.current_decay, v_decay=config.voltage_decay, **shared
            )
        if config.neuron == "plif":
            weight = self.node.get_parameter("w")
            return kernels.parametric_lif(
                current, w=weight, decay_input=config.decay_input, **shared
            )
        return kernels.lif(current, tau=config.tau, decay_input=config.decay_input, **shared)

    def _stepped(self, current: Tensor, output: kernels.Output) -> Tensor:
        """SpikingJelly's node step by step; voltages are less what has raised its threshold."""
        if current.dim() == 2:
            current = current.expand(self.config.time_steps, -1, -1)
        node, shape = self.node, self.node.get_submodule("surrogate_function")
        node.train()  # in eval mode some of SpikingJelly's nodes drop their surrogate gradient
        node.v_threshold = self.v_threshold  # type: ignore[assignment]
        shape.get_submodule("shape").alpha = 1 / self.surrogate_width  # type: ignore[assignment]
        above: list[Tensor] = []
        hook = shape.register_forward_pre_hook(lambda _, inputs: above.append(inputs[0]))
        functional.reset_net(node)
        spikes: list[Tensor] = []
        for step in current:
            if self.connections is not None and spikes:
                step = step + self.connections(spikes[-1]).flatten(1)
            spikes.append(node(step))
        functional.reset_net(node)
        hook.remove()
        # No graph is kept, so that an agent can be copied.
        node.v_threshold = self.config.v_threshold  # type: ignore[assignment]
        if output == "voltages":
            return torch.stack(above) + self.v_threshold
        return torch.stack(spikes) if output == "spikes" else torch.stack(spikes).mean(0)

    @torch.no_grad()
    def trace(self, x: Tensor) -> LayerTrace:
        """What the neurons do in `forward`, with their voltages before reset."""
        return LayerTrace(self(x, "voltages"), self(x, "spikes"))


class Surrogate(nn.Module):
    """A SpikingJelly surrogate of a class that its nodes do not know, so that they always call it
    and a hook can see the voltage above threshold."""

    spiking = True

    def __init__(self, shape: nn.Module) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, above: Tensor) -> Tensor:
        return self.shape(above)


def normal(like: Tensor, stream: Generator) -> Tensor:
    """Standard normal noise of a tensor's shape."""
    return torch.randn(like.shape, generator=stream, dtype=like.dtype, device=like.device)


# -- decoders ----------------------------------------------------------------------------------


class MembraneReadout(nn.Module):
    """A linear map into non-spiking integrators, v[t] = v[t-1] + (x[t] - v[t-1]) / tau, whose last,
    mean or largest voltage is read (after Patel et al. 2021 and Proxy Target, Xu et al. 2025).

    Spikes [T, B, inputs] -> [B, act].
    """

    def __init__(self, inputs: int, action_size: int, config: SpikingConfig) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(inputs, action_size)

    def forward(self, spikes: Tensor) -> Tensor:
        current = self.linear(spikes.flatten(0, 1)).unflatten(0, spikes.shape[:2])
        voltage = torch.zeros_like(current[0])
        voltages = []
        for step in current:
            voltage = voltage + (step - voltage) / self.config.membrane_tau
            voltages.append(voltage)
        if self.config.membrane == "last":
            return voltage
        stacked = torch.stack(voltages)
        return stacked.mean(0) if self.config.membrane == "mean" else stacked.max(0).values


# -- the actor ---------------------------------------------------------------------------------


class SpikingActor(nn.Module):
    """Normalised observations to a Gaussian before the tanh, through spiking layers."""

    def __init__(
        self,
        actor: ActorConfig,
        config: SpikingConfig,
        observation_size: int,
        action_size: int,
        gsde: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder: PopulationEncoder | None = None
        inputs = observation_size
        if config.encoder != "current":
            self.encoder = PopulationEncoder(config, observation_size)
            inputs = self.encoder.size
        pairs = list(pairwise([inputs, *actor.hidden]))
        layers = [SpikingLayer(m, n, actor, config) for m, n in pairs]
        features = actor.hidden[-1]
        if config.decoder == "population":
            population = config.output_population
            groups = action_size if config.output_connections else 0
            features = action_size * population
            layers.append(SpikingLayer(actor.hidden[-1], features, actor, config, groups))
            self.readout: nn.Module = GroupedLinear(action_size, population, 1)
        elif config.decoder == "membrane":
            self.readout = MembraneReadout(features, action_size, config)
        else:
            self.readout = nn.Linear(features, action_size)
        self.layers = nn.ModuleList(layers)
        if config.log_std == "shared":
            head = StateDependentStd if gsde else nn.Linear
            self.log_std: nn.Module = head(features, action_size)
        elif config.log_std == "linear":
            self.log_std = nn.Linear(observation_size, action_size)
        else:
            self.log_std = mlp([observation_size, *actor.hidden, action_size])
        self.rates: list[Tensor] = []  # mean rate of each layer, kept for `firing_penalty`

    def forward(
        self, observation: Tensor, stream: Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """[B, obs] -> mean and log standard deviation, each [B, act].

        `stream` feeds the Poisson encoder and the neurons' noise; without it there is no noise.
        """
        x = observation if self.encoder is None else self.encoder(observation, stream)
        last = len(self.layers) - 1
        penalised = self.training and self.config.firing_penalty > 0
        rates = []
        for i, layer in enumerate(self.layers):
            # A linear read-out of mean spikes costs one product instead of T.
            mean = i == last and self.config.decoder != "membrane"
            x = layer(x, "mean" if mean else "spikes", stream)
            if penalised:
                rates.append(x.mean())
        if penalised:
            self.rates = rates
        rate = x.mean(0) if self.config.decoder == "membrane" else x
        log_std = self.log_std(rate if self.config.log_std == "shared" else observation)
        return self.readout(x).flatten(1), log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def penalty(self) -> Tensor | float:
        """What the last training pass adds to the actor's loss. Asked for once a pass."""
        rates, self.rates = self.rates, []  # no graph is kept: an agent can be copied
        return self.firing_penalty(rates) if rates else 0.0

    def firing_penalty(self, rates: list[Tensor]) -> Tensor:
        """firing_penalty sum_layers max(0, rate - target_rate)^2, of each layer's mean rate."""
        excess = (torch.stack(rates) - self.config.target_rate).clamp_min(0)
        return self.config.firing_penalty * excess.square().sum()

    def set_progress(self, progress: float, best_return: float | None = None) -> None:
        """Move the surrogates' width along its schedule."""
        if not isinstance(self.config.surrogate_width, Schedule):
            return
        width = self.config.surrogate_width.at(progress, best_return)
        for layer in self.layers:
            layer.surrogate_width = width  # type: ignore[assignment]

    @torch.no_grad()
    def trace(self, observation: Tensor) -> list[LayerTrace]:
        """[B, obs] -> voltages and spikes of every spiking layer, encoder excluded, no noise."""
        traces: list[LayerTrace] = []
        x = observation if self.encoder is None else self.encoder(observation)
        for layer in self.layers:
            assert isinstance(layer, SpikingLayer)
            traces.append(layer.trace(x))
            x = traces[-1].spikes
        return traces

    def statistics(self, observation: Tensor) -> dict[str, Tensor]:
        """Scalars by tag for each layer (an output population is the last one).

        firing_rate: spikes a neuron a simulation step; in_window: share of voltages where the
        surrogate passes a gradient (within half its width of the threshold); silent and saturated:
        share of neurons that never, or always, fire over the batch; gradient_norm: of the layer's
        weights in the last actor step; firing_penalty: what firing adds to the actor's loss, where
        it is asked for; outside_range: share of observation entries, [B, obs], beyond the encoder's
        fields.
        """
        values: dict[str, Tensor] = {}
        rates = []
        for i, (layer, (voltage, spikes)) in enumerate(
            zip(self.layers, self.trace(observation), strict=True)
        ):
            assert isinstance(layer, SpikingLayer)
            rate = spikes.mean((0, 1))
            near = (voltage - layer.v_threshold).abs() < layer.surrogate_width / 2
            rates.append(rate.mean())
            values[f"spiking/firing_rate/{i}"] = rates[-1]
            values[f"spiking/in_window/{i}"] = near.float().mean()
            values[f"spiking/silent/{i}"] = (rate == 0).float().mean()
            values[f"spiking/saturated/{i}"] = (rate == 1).float().mean()
            if layer.linear.weight.grad is not None:
                values[f"spiking/gradient_norm/{i}"] = layer.linear.weight.grad.norm()
        if self.config.firing_penalty > 0:
            values["spiking/firing_penalty"] = self.firing_penalty(rates)
        if self.encoder is not None:
            outside = observation.abs() > self.encoder.range
            values["spiking/outside_range"] = outside.float().mean()
        return values


def readout_linear(actor: SpikingActor) -> nn.Linear:
    """The read-out as one product, [B, features] -> [B, act]."""
    readout = actor.readout
    if isinstance(readout, MembraneReadout):
        return readout.linear
    if isinstance(readout, GroupedLinear):
        return readout.as_linear()
    assert isinstance(readout, nn.Linear)
    return readout


def load_popsan(state_dict: Mapping[str, Tensor], time_steps: int = 5) -> SpikingActor:
    """A SpikingActor of the published PopSAN SAC actor's parameters, by their own names.

    `encoder.mean`, `encoder.std` [1, obs, population], `snn.hidden_layers.L.{weight,bias}`,
    `snn.out_pop_layer.{weight,bias}`, `decoder.decoder.{weight,bias}`, and `log_std_network.*`
    where present (else that head is new); sizes are inferred. Its `forward` takes normalised
    observations [B, obs]. Raises ValueError where a parameter is missing or left over.
    """
    given = {key: torch.as_tensor(value) for key, value in state_dict.items()}
    depth = sum(key.startswith("snn.hidden_layers.") and key.endswith(".bias") for key in given)
    try:
        _, observation_size, fields = given["encoder.mean"].shape
        action_size, _, population = given["decoder.decoder.weight"].shape
        hidden = [len(given[f"snn.hidden_layers.{i}.bias"]) for i in range(max(depth, 1))]
    except KeyError as error:
        raise ValueError(f"no PopSAN actor: its parameter {error} is missing") from None
    config = SpikingConfig(
        time_steps=time_steps,
        encoder="population",
        neuron="cuba",
        decoder="population",
        log_std="mlp",
        input_population=fields,
        output_population=population,
    )
    actor = SpikingActor(ActorConfig(hidden=tuple(hidden)), config, observation_size, action_size)
    theirs = {"encoder": "encoder", "readout": "decoder.decoder"}
    theirs |= {f"layers.{i}.linear": f"snn.hidden_layers.{i}" for i in range(depth)}
    theirs |= {f"layers.{depth}.linear": "snn.out_pop_layer"}
    if any(key.startswith("log_std_network.") for key in given):
        theirs |= {f"log_std.{2 * i}": f"log_std_network.{2 * i}" for i in range(depth + 1)}
    own = actor.state_dict()
    pairs = {}  # our name of each of their parameters
    for name in own:
        module, _, kind = name.rpartition(".")
        if module in theirs:
            pairs[f"{theirs[module]}.{kind}"] = name
    if wrong := sorted(pairs.keys() ^ given.keys()):
        raise ValueError(f"no PopSAN actor: missing or left over: {', '.join(wrong)}")
    for key, name in pairs.items():
        found, expected = given[key].shape, own[name].shape
        if [n for n in found if n > 1] != [n for n in expected if n > 1]:  # theirs has more ones
            raise ValueError(f"{key} has shape {tuple(found)}, expected {tuple(expected)}")
        own[name] = given[key].reshape(expected)
    actor.load_state_dict(own)
    return actor
