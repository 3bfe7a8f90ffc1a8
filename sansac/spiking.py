"""The spiking actor: encoder -> layers of SpikingJelly neurons -> decoder.

Membrane state lives for one control step: it starts at reset inside every forward pass, so a pass
is a function of its input alone. Currents and spikes have shape [T, B, N]; a current that is
constant over the T simulation steps is computed once, [B, N].
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from spikingjelly.activation_based import neuron, surrogate
from torch import Tensor, nn

from sansac import kernels
from sansac.config import Actor as ActorConfig
from sansac.config import Spiking as SpikingConfig
from sansac.networks import LOG_STD_MAX, LOG_STD_MIN, mlp, normalisation

SURROGATES = {
    "rectangle": surrogate.Rect,
    "triangle": surrogate.PiecewiseQuadratic,
    "atan": surrogate.ATan,
    "sigmoid": surrogate.Sigmoid,
    "fast_sigmoid": surrogate.SuperSpike,
}


class LayerTrace(NamedTuple):
    """What one layer did in a pass: voltages before reset and spikes, each [T, B, N]."""

    voltage: Tensor
    spikes: Tensor


class PopulationEncoder(nn.Module):
    """PopSAN's encoder (Tang et al. 2020, arXiv:2010.09635): Gaussian fields, deterministic spikes.

    Entry s drives `population` fields with A = exp(-(s - mean)^2 / (2 std^2)); each field is an
    integrator that fires above 0.999 and then subtracts it. Mean and width are learned; the
    gradient passes a spike unchanged (straight-through).
    """

    threshold = 0.999

    def __init__(self, config: SpikingConfig, observation_size: int) -> None:
        super().__init__()
        self.time_steps = config.time_steps
        self.size = observation_size * config.input_population
        centres = torch.linspace(-config.input_range, config.input_range, config.input_population)
        if config.input_population == 1:
            centres = torch.zeros(1)
        self.mean = nn.Parameter(centres.repeat(observation_size, 1))
        self.std = nn.Parameter(torch.full_like(self.mean, config.input_std))

    def forward(self, observation: Tensor) -> Tensor:
        """[B, obs] -> spikes [T, B, obs * population]."""
        distance = observation[:, :, None] - self.mean
        activation = torch.exp(-0.5 * distance.square() / self.std.square()).flatten(1)
        voltage = torch.zeros_like(activation)
        spikes = []
        for _ in range(self.time_steps):
            voltage = voltage + activation
            hard = (voltage > self.threshold).to(voltage.dtype)
            spike = hard + (voltage - voltage.detach())
            spikes.append(spike)
            voltage = voltage - spike * self.threshold
        return torch.stack(spikes)


class SpikingLayer(nn.Module):
    """A product, the normalisation of its current, and neurons."""

    def __init__(self, inputs: int, width: int, actor: ActorConfig, config: SpikingConfig) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(inputs, width)
        # A normalised current of half the threshold, give or take as much, neither silences nor
        # saturates a neuron at the start.
        self.norm = normalisation(actor, width, config.v_threshold / 2, config.v_threshold / 2)
        self.node = make_node(config)

    def current(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., width]; time is folded into the batch for the product."""
        return self.norm(self.linear(x.flatten(0, -2))).unflatten(0, x.shape[:-1])

    def forward(self, x: Tensor, output: kernels.Output) -> Tensor:
        """[T, B, inputs], or [B, inputs] where constant over time -> spikes or voltages
        [T, B, width], or mean spikes [B, width]."""
        config, current = self.config, self.current(x)
        backend: kernels.Backend = config.backend
        if backend == "spikingjelly" and output == "voltages":
            backend = "torch"  # SpikingJelly keeps the voltage before reset to itself
        shared: dict[str, Any] = {
            "time_steps": config.time_steps,
            "constant": x.dim() == 2,
            "v_threshold": config.v_threshold,
            "v_reset": 0.0,
            "surrogate": config.surrogate,
            "alpha": 1 / config.surrogate_width,
            "detach_reset": config.detach_reset,
            "output": output,
            "backend": backend,
        }
        if config.neuron == "cuba":
            return kernels.cuba_lif(
                current, c_decay=config.current_decay, v_decay=config.voltage_decay, **shared
            )
        return kernels.lif(current, tau=config.tau, decay_input=config.decay_input, **shared)

    @torch.no_grad()
    def trace(self, x: Tensor) -> LayerTrace:
        """What the neurons do in `forward`, with their voltages before reset."""
        return LayerTrace(self(x, "voltages"), self(x, "spikes"))


class PopulationReadout(nn.Module):
    """PopSAN's decoder: each action entry reads its own group of output rates.

    [B, act * population] -> [B, act].
    """

    def __init__(self, action_size: int, population: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(population)
        self.weight = nn.Parameter(torch.empty(action_size, population).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(action_size).uniform_(-bound, bound))

    def forward(self, rate: Tensor) -> Tensor:
        return (rate.unflatten(1, self.weight.shape) * self.weight).sum(-1) + self.bias


class SpikingActor(nn.Module):
    """Normalised observations to a Gaussian before the tanh, through spiking layers."""

    def __init__(
        self, actor: ActorConfig, config: SpikingConfig, observation_size: int, action_size: int
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder: nn.Module = nn.Identity()
        inputs = observation_size
        if config.encoder == "population":
            self.encoder = PopulationEncoder(config, observation_size)
            inputs = self.encoder.size
        widths = [inputs, *actor.hidden]
        self.readout: nn.Module = nn.Linear(widths[-1], action_size)
        if config.decoder == "population":
            widths.append(action_size * config.output_population)
            self.readout = PopulationReadout(action_size, config.output_population)
        self.layers = nn.ModuleList(SpikingLayer(m, n, actor, config) for m, n in pairwise(widths))
        if config.log_std == "shared":
            self.log_std: nn.Module = nn.Linear(widths[-1], action_size)
        elif config.log_std == "linear":
            self.log_std = nn.Linear(observation_size, action_size)
        else:
            self.log_std = mlp([observation_size, *actor.hidden, action_size])

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """[B, obs] -> mean and log standard deviation, each [B, act]."""
        x = self.encoder(observation)
        for layer in self.layers[:-1]:
            x = layer(x, "spikes")
        rate = self.layers[-1](x, "mean")  # a linear read-out of mean spikes costs one product
        log_std = self.log_std(rate if self.config.log_std == "shared" else observation)
        return self.readout(rate), log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    @torch.no_grad()
    def trace(self, observation: Tensor) -> list[LayerTrace]:
        """[B, obs] -> voltages and spikes of every spiking layer, encoder excluded."""
        traces: list[LayerTrace] = []
        x = self.encoder(observation)
        for layer in self.layers:
            assert isinstance(layer, SpikingLayer)
            traces.append(layer.trace(x))
            x = traces[-1].spikes
        return traces

    def statistics(self, observation: Tensor) -> dict[str, Tensor]:
        """Scalars by tag for each layer (the output population is the last one).

        firing_rate: spikes a neuron a simulation step; in_window: share of voltages where the
        surrogate passes a gradient (within half its width of the threshold); silent and saturated:
        share of neurons that never, or always, fire over the batch.
        """
        values: dict[str, Tensor] = {}
        for i, (voltage, spikes) in enumerate(self.trace(observation)):
            rate = spikes.mean((0, 1))
            near = (voltage - self.config.v_threshold).abs() < self.config.surrogate_width / 2
            values[f"spiking/firing_rate/{i}"] = rate.mean()
            values[f"spiking/in_window/{i}"] = near.float().mean()
            values[f"spiking/silent/{i}"] = (rate == 0).float().mean()
            values[f"spiking/saturated/{i}"] = (rate == 1).float().mean()
        return values


def make_node(config: SpikingConfig) -> nn.Module:
    """The SpikingJelly neuron of a configuration, hard reset to 0."""
    shape = SURROGATES[config.surrogate](alpha=1 / config.surrogate_width)
    if config.neuron == "cuba":
        node = neuron.CUBALIFNode(
            config.current_decay, config.voltage_decay, config.v_threshold, 0.0, shape
        )
        node.detach_reset = config.detach_reset
        return node
    return neuron.LIFNode(
        tau=config.tau,
        decay_input=config.decay_input,
        v_threshold=config.v_threshold,
        v_reset=0.0,
        surrogate_function=shape,
        detach_reset=config.detach_reset,
    )
