"""The spiking actor against the published PopSAN code and against SpikingJelly's own neurons."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spikingjelly.activation_based import functional, neuron, surrogate
from torch import Tensor, nn

from sansac.algorithm import SAC
from sansac.config import Actor, Config, Spiking
from sansac.replay import Batch
from sansac.spiking import (
    IntegrateAndFire,
    PopulationEncoder,
    SpikingActor,
    SpikingLayer,
    load_popsan,
    straight_through,
)

GOLDEN = Path(__file__).parent / "golden"
OBS, ACT, B = 5, 2, 32


def make_actor(actor: dict[str, Any] | None = None, seed: int = 0, **spiking: Any) -> SpikingActor:
    torch.manual_seed(seed)
    hidden = {"hidden": (16, 12)} | (actor or {})
    return SpikingActor(Actor(**hidden), Spiking(**spiking), OBS, ACT).eval()


def observations(seed: int = 0, batch: int = B) -> Tensor:
    return torch.randn(batch, OBS, generator=torch.Generator().manual_seed(seed))


def gradients(actor: nn.Module, observation: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Of a random linear function of both heads, with respect to every parameter."""
    actor.zero_grad()
    stream = torch.Generator().manual_seed(seed)
    heads = actor(observation)
    sum((head * torch.randn(head.shape, generator=stream)).sum() for head in heads).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in actor.named_parameters()
    }


# ---- the published PopSAN ------------------------------------------------------------------------


class Golden:
    """One file of golden vectors, and our actor with its parameters."""

    def __init__(self, name: str, hidden: tuple[int, ...], input_pop: int, output_pop: int) -> None:
        with np.load(GOLDEN / f"popsan_{name}.npz") as file:
            self.of = {key: torch.from_numpy(file[key]) for key in file.files}
        self.spiking = Spiking(
            time_steps=5,
            encoder="population",
            neuron="cuba",
            decoder="population",
            log_std="mlp",
            surrogate="rectangle",
            surrogate_width=1.0,
            v_threshold=0.5,
            current_decay=0.5,
            voltage_decay=0.75,
            input_population=input_pop,
            output_population=output_pop,
        )
        sizes = self.of["obs"].shape[1], self.of["mu"].shape[1]
        self.actor = SpikingActor(Actor(hidden=hidden), self.spiking, *sizes)
        # PopSAN's parameter for each of ours; theirs may carry dimensions of size one more.
        self.theirs = {
            "encoder.mean": "encoder.mean",
            "encoder.std": "encoder.std",
            "readout.weight": "decoder.decoder.weight",
            "readout.bias": "decoder.decoder.bias",
        }
        for kind in ("weight", "bias"):
            for i in range(2):
                self.theirs[f"layers.{i}.linear.{kind}"] = f"snn.hidden_layers.{i}.{kind}"
            self.theirs[f"layers.2.linear.{kind}"] = f"snn.out_pop_layer.{kind}"
            for i in (0, 2, 4):
                self.theirs[f"log_std.{i}.{kind}"] = f"log_std_network.{i}.{kind}"
        self.initial = {name: p.detach().clone() for name, p in self.actor.named_parameters()}
        with torch.no_grad():
            for name, p in self.actor.named_parameters(remove_duplicate=False):
                p.copy_(self.of[f"param.{self.theirs[name]}"].reshape(p.shape))

    def spikes(self, key: str) -> Tensor:
        return self.of[key].float()


@pytest.fixture(
    params=[("small", (8, 8), 4, 3), ("bipedal", (64, 64), 10, 10)], ids=lambda case: case[0]
)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(*request.param)


def test_population_spikes_are_popsans(golden: Golden) -> None:
    spikes = golden.actor.encoder(golden.of["obs"])
    assert torch.equal(spikes, golden.spikes("encoder_spikes"))
    assert 0.01 < spikes.mean() < 0.99


def test_receptive_fields_start_as_popsans(golden: Golden) -> None:
    """Means evenly on [-3, 3], a variance of 0.15: the published initial values."""
    mean, std = golden.initial["encoder.mean"], golden.initial["encoder.std"]
    even = np.linspace(-3, 3, mean.shape[1], dtype=np.float32)
    np.testing.assert_allclose(mean.numpy(), np.tile(even, (len(mean), 1)), atol=1e-6)
    np.testing.assert_allclose(std.numpy() ** 2, 0.15, rtol=1e-6)


def test_layer_spikes_and_voltages_are_popsans(golden: Golden) -> None:
    """Spikes exactly; voltages to 1e-6, relative to the largest of the layer."""
    for i, (voltage, spikes) in enumerate(golden.actor.trace(golden.of["obs"])):
        assert torch.equal(spikes, golden.spikes(f"layer{i}.spikes"))
        expected = golden.of[f"layer{i}.volt"]
        assert (voltage - expected).abs().max() <= 1e-6 * max(1, expected.abs().max())
        assert spikes.unique().tolist() == [0, 1]


@pytest.mark.parametrize("backend", ["auto", "torch", "spikingjelly"])
def test_heads_are_popsans(golden: Golden, backend: str) -> None:
    """Mean and log standard deviation to 1e-6, whatever computes the neurons."""
    use_backend(golden.actor, backend)
    mean, log_std = golden.actor(golden.of["obs"])
    torch.testing.assert_close(mean, golden.of["mu"], rtol=0, atol=1e-6)
    torch.testing.assert_close(log_std, golden.of["log_std"], rtol=0, atol=1e-6)
    torch.testing.assert_close(mean.tanh(), golden.of["action_deterministic"], rtol=0, atol=1e-6)
    rate = golden.actor.trace(golden.of["obs"])[-1].spikes.mean(0)
    torch.testing.assert_close(rate, golden.of["pop_activity"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "torch", "spikingjelly"])
def test_gradients_are_popsans(golden: Golden, backend: str) -> None:
    """To 1e-5, relative to the largest entry of a parameter where that is above 1."""
    use_backend(golden.actor, backend)
    mean, _ = golden.actor(golden.of["obs"])
    loss = (mean * golden.of["mu_weight"]).sum()
    torch.testing.assert_close(loss, golden.of["loss"], rtol=1e-5, atol=1e-5)
    loss.backward()
    compared = 0
    for name, p in golden.actor.named_parameters():
        if name.startswith("log_std."):
            assert p.grad is None
            continue
        assert p.grad is not None
        expected = golden.of[f"grad.{golden.theirs[name]}"].reshape(p.shape)
        assert expected.abs().max() > 0
        error = (p.grad - expected).abs().max()
        assert error <= 1e-5 * max(1, expected.abs().max()), name
        compared += 1
    assert compared == sum(key.startswith("grad.") for key in golden.of)


def use_backend(actor: SpikingActor, backend: str) -> None:
    for layer in actor.layers:
        layer.config = layer.config.model_copy(update={"backend": backend})  # type: ignore[operator,union-attr]


# ---- SpikingJelly's neurons, stepped by hand -----------------------------------------------------


class StraightThrough(torch.autograd.Function):
    """Spikes above a threshold, with a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, voltage: Tensor, threshold: float) -> Tensor:
        return (voltage > threshold).to(voltage.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


SHAPES = {
    "rectangle": surrogate.Rect,
    "triangle": surrogate.PiecewiseQuadratic,
    "atan": surrogate.ATan,
    "sigmoid": surrogate.Sigmoid,
    "fast_sigmoid": surrogate.SuperSpike,
}


def jelly_node(layer: nn.Module) -> nn.Module:
    """SpikingJelly's neuron with the constants, and the learned time constant, of a layer."""
    config = layer.config
    shape = SHAPES[config.surrogate](alpha=1 / config.surrogate_width)
    if config.neuron == "clif":
        return neuron.ComplementaryLIFNode(config.tau, config.v_threshold, shape)
    if config.neuron == "plif":
        node = neuron.ParametricLIFNode(
            init_tau=config.tau,
            decay_input=config.decay_input,
            v_threshold=config.v_threshold,
            surrogate_function=shape,
            detach_reset=config.detach_reset,
        )
        torch.testing.assert_close(node.w, layer.node.w)
        node.w = layer.node.w
        return node
    if config.neuron == "cuba":
        node = neuron.CUBALIFNode(
            c_decay=config.current_decay,
            v_decay=config.voltage_decay,
            v_threshold=config.v_threshold,
            surrogate_function=shape,
        )
        node.detach_reset = config.detach_reset
        return node
    return neuron.LIFNode(
        tau=config.tau,
        decay_input=config.decay_input,
        v_threshold=config.v_threshold,
        surrogate_function=shape,
        detach_reset=config.detach_reset,
    )


class ByHand(nn.Module):
    """The same network, one simulation step after the other, each neuron SpikingJelly's."""

    def __init__(self, actor: SpikingActor) -> None:
        super().__init__()
        self.actor = actor
        self.nodes = nn.ModuleList(jelly_node(layer) for layer in actor.layers)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        actor, config = self.actor, self.actor.config
        functional.reset_net(self.nodes)
        for node, layer in zip(self.nodes, actor.layers, strict=True):
            if config.learn_threshold:
                node.v_threshold = layer.get_parameter("log_threshold").exp()
        spikes, self.spikes = [], []
        charge: Any = 0.0
        for _ in range(config.time_steps):
            x = observation
            if config.encoder != "current":
                mean = actor.encoder.get_parameter("mean")
                std = actor.encoder.get_parameter("std")
                field = torch.exp(-((observation[:, :, None] - mean) ** 2) / (2 * std**2))
                x = field.flatten(1)
            if config.encoder == "population":
                charge = charge + x
                x = StraightThrough.apply(charge, 0.999)
                charge = charge - x * 0.999
            for layer, node in zip(actor.layers, self.nodes, strict=True):
                linear, norm = layer.get_submodule("linear"), layer.get_submodule("norm")
                x = node(norm(linear(x)))
            spikes.append(x)
        self.spikes = torch.stack(spikes)
        rate = self.spikes.mean(0)
        if config.decoder == "population":
            weight, bias = (
                actor.readout.get_parameter("weight")[..., 0],
                actor.readout.get_parameter("bias")[..., 0],
            )
            groups = rate.reshape(len(rate), ACT, config.output_population)
            mean = torch.stack([(groups[:, a] * weight[a]).sum(1) + bias[a] for a in range(ACT)], 1)
        elif config.decoder == "membrane":
            decode = {"last": "last_mem", "mean": "mean-mem", "max": "max-mem"}[config.membrane]
            integrator = neuron.NonSpikingLIFNode(tau=config.membrane_tau, decode=decode)
            mean = integrator(actor.readout.get_submodule("linear")(self.spikes))
        else:
            mean = actor.readout(rate)
        head = actor.log_std(rate if config.log_std == "shared" else observation)
        return mean, head.clamp(-20, 2)


def assert_as_by_hand(actor: SpikingActor) -> None:
    """Both heads and all gradients; and the case is one in which something happens."""
    observation, by_hand = observations(), ByHand(actor)
    with torch.no_grad():
        expected = by_hand(observation)
        for ours, theirs in zip(actor(observation), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert torch.equal(actor.trace(observation)[-1].spikes, by_hand.spikes)
    assert 0.02 < by_hand.spikes.mean() < 0.98
    wanted = gradients(by_hand, observation)
    for name, found in gradients(actor, observation).items():
        expected_gradient = wanted[f"actor.{name}"]
        scale = max(1, expected_gradient.abs().max())
        torch.testing.assert_close(found, expected_gradient, rtol=0, atol=1e-5 * float(scale))
        if actor.config.surrogate_width >= 1 or "log_std" in name:
            assert expected_gradient.any(), name


@pytest.mark.parametrize("neuron_kind", ["lif", "plif", "cuba", "clif"])
@pytest.mark.parametrize("encoder", ["current", "population", "population-current"])
@pytest.mark.parametrize("decoder", ["rate", "membrane", "population"])
@pytest.mark.parametrize("log_std", ["shared", "linear", "mlp"])
def test_every_part_is_spikingjellys_network(
    neuron_kind: str, encoder: str, decoder: str, log_std: str
) -> None:
    assert_as_by_hand(
        make_actor(
            neuron=neuron_kind,
            encoder=encoder,
            decoder=decoder,
            log_std=log_std,
            time_steps=4,
            v_threshold=0.2,
            input_population=4,
            output_population=3,
        )
    )


@pytest.mark.parametrize("neuron_kind", ["lif", "plif", "cuba", "clif"])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("detach_reset", [False, True])
def test_every_surrogate_is_spikingjellys(neuron_kind: str, shape: str, detach_reset: bool) -> None:
    assert_as_by_hand(
        make_actor(
            neuron=neuron_kind,
            surrogate=shape,
            surrogate_width=0.7,
            detach_reset=detach_reset,
            time_steps=3,
            v_threshold=0.2,
        )
    )


@pytest.mark.parametrize(
    ("actor", "spiking"),
    [
        ({"layer_norm": True}, {"time_steps": 2}),
        ({"batch_norm": True}, {"time_steps": 3, "neuron": "cuba"}),
        ({"hidden": (20,)}, {"time_steps": 1, "v_threshold": 0.2}),
        ({"hidden": (20, 20, 20)}, {"time_steps": 6, "v_threshold": 0.1}),
        ({}, {"decay_input": True, "tau": 2.0, "v_threshold": 0.1, "time_steps": 5}),
        ({}, {"neuron": "cuba", "current_decay": 0.0, "voltage_decay": 0.9, "v_threshold": 0.2}),
        ({}, {"neuron": "plif", "decay_input": True, "tau": 3.0, "v_threshold": 0.1}),
        ({}, {"neuron": "clif", "tau": 2.0, "v_threshold": 0.1, "time_steps": 6}),
        ({"batch_norm": True}, {"neuron": "clif", "tau": 4.0, "time_steps": 4}),
        ({}, {"decoder": "membrane", "membrane": "mean", "v_threshold": 0.2, "time_steps": 4}),
        ({}, {"decoder": "membrane", "membrane": "max", "v_threshold": 0.2, "time_steps": 4}),
        ({}, {"decoder": "membrane", "membrane_tau": 1.0, "v_threshold": 0.2, "time_steps": 3}),
    ],
)
def test_other_stacks_are_spikingjellys_network(
    actor: dict[str, Any], spiking: dict[str, Any]
) -> None:
    assert_as_by_hand(make_actor(actor, **spiking))


@pytest.mark.parametrize("neuron_kind", ["lif", "plif", "cuba", "clif"])
@pytest.mark.parametrize("backend", ["auto", "torch", "spikingjelly"])
def test_learned_thresholds_are_spikingjellys_with_that_threshold(
    neuron_kind: str, backend: str
) -> None:
    """Their gradients included, and whatever computes the neurons."""
    actor = make_actor(
        neuron=neuron_kind, learn_threshold=True, v_threshold=0.2, time_steps=4, backend=backend
    )
    for layer, value in zip(actor.layers, (-1.4, -1.8), strict=True):
        nn.init.constant_(layer.get_parameter("log_threshold"), value)
    assert_as_by_hand(actor)
    rates = [trace.spikes.mean() for trace in actor.trace(observations())]
    for layer in actor.layers:
        nn.init.constant_(layer.get_parameter("log_threshold"), -0.5)
    assert rates > [trace.spikes.mean() for trace in actor.trace(observations())]


def test_any_number_of_time_steps_is_spikingjellys_network() -> None:
    """1 to 64, voltages decaying over many silent steps included."""
    for time_steps in range(1, 65):
        actor = make_actor({"hidden": (4,)}, time_steps=time_steps, v_threshold=0.4)
        by_hand = ByHand(actor)
        torch.testing.assert_close(actor(observations()), by_hand(observations()))
        assert torch.equal(actor.trace(observations())[0].spikes, by_hand.spikes)


def test_adaptive_thresholds_by_hand() -> None:
    """Tau 2, threshold 1, each spike raising it by (1 - 0.5) 1, half of which stays a step.

    A current of 1.2 charges to 1.2 after a spike and to 1.8 after none; the rise before each step
    is 0, 0.5, 0.25, 0.625, 0.3125.
    """
    config = Spiking(
        neuron="alif", tau=2.0, v_threshold=1.0, adaptation=1.0, adaptation_decay=0.5, time_steps=5
    )
    layer = constant_layer(config, 1.2)
    voltage, spikes = layer.trace(torch.zeros(1, 1))
    assert spikes[:, 0, 0].tolist() == [1, 0, 1, 0, 1]
    raised = torch.tensor([0, 0.5, 0.25, 0.625, 0.3125])
    charged = torch.tensor([1.2, 1.2, 1.8, 1.2, 1.8])
    torch.testing.assert_close(voltage[:, 0, 0], charged - raised)
    plain = constant_layer(config.model_copy(update={"adaptation": 0.0}), 1.2)
    assert plain.trace(torch.zeros(1, 1)).spikes.mean() == 1


@pytest.mark.parametrize("detach_reset", [False, True])
def test_adaptive_thresholds_have_the_gradient_of_a_plain_loop(detach_reset: bool) -> None:
    config = Spiking(
        neuron="alif", tau=3.0, adaptation=0.8, time_steps=6, detach_reset=detach_reset,
        learn_threshold=True,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = SpikingLayer(OBS, 9, Actor(), config)
    spike_of = surrogate.Rect(alpha=1.0)

    def loop(x: Tensor) -> Tensor:
        current, threshold = layer.linear(x), layer.get_parameter("log_threshold").exp()
        voltage = raised = torch.zeros_like(current)
        spikes = []
        for _ in range(6):
            voltage = voltage - voltage / 3.0 + current
            spike = spike_of(voltage - (threshold + raised))
            raised = 0.8 * raised + (1 - 0.8) * 0.8 * spike
            voltage = voltage * (1 - (spike.detach() if detach_reset else spike))
            spikes.append(spike)
        return torch.stack(spikes)

    assert 0.1 < loop(observations()).mean() < 0.9
    compare_layers(lambda x: layer(x, "spikes"), loop, layer)


def constant_layer(config: Spiking, current: float) -> SpikingLayer:
    """One neuron whose current is the same at every step."""
    layer = SpikingLayer(1, 1, Actor(), config)
    nn.init.zeros_(layer.linear.weight)
    nn.init.constant_(layer.linear.bias, current)
    return layer


def compare_layers(ours: Any, theirs: Any, layer: nn.Module) -> None:
    """Two functions of observations with the same parameters: spikes equal, gradients to 1e-5."""
    found, expected = [], []
    for function, record in ((ours, found), (theirs, expected)):
        layer.zero_grad()
        x = observations().requires_grad_()
        spikes = function(x)
        weight = torch.randn(spikes.shape, generator=torch.Generator().manual_seed(0))
        (spikes * weight).sum().backward()
        record += [spikes.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
    assert torch.equal(found[0], expected[0])
    for left, right in zip(found[1:], expected[1:], strict=True):
        assert right.any()
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("neuron_kind", ["cuba", "lif"])
@pytest.mark.parametrize("time_steps", [1, 2, 5])
def test_connections_are_spikingjellys_intra_layer_connections(
    neuron_kind: str, time_steps: int
) -> None:
    """ILC-SAN's output population: the grouped map is its grouped convolution."""
    config = Spiking(
        neuron=neuron_kind, tau=4.0, time_steps=time_steps, decoder="population",
        output_connections=True, v_threshold=0.3,
    )  # fmt: skip
    torch.manual_seed(1)
    layer = SpikingLayer(OBS, ACT * 3, Actor(), config, groups=ACT)
    assert layer.connections is not None
    weight, bias = layer.connections.weight, layer.connections.bias
    nn.init.normal_(weight, std=0.5)

    def theirs(x: Tensor) -> Tensor:
        constants: dict[str, Any] = {"v_threshold": 0.3, "surrogate_function": surrogate.Rect(1.0)}
        if neuron_kind == "cuba":
            node = neuron.ILCCUBALIFNode(ACT, 3, **constants)
        else:
            node = neuron.ILCLIFNode(ACT, 3, v_decay=0.75, **constants)
        del node.conn.weight, node.conn.bias
        node.conn.weight, node.conn.bias = weight.transpose(1, 2).reshape(-1, 1, 3), bias.flatten()
        return node(layer.linear(x).expand(time_steps, -1, -1).clone())

    if time_steps == 1:  # nothing to connect yet
        assert torch.equal(layer(observations(), "spikes"), theirs(observations()))
    else:
        compare_layers(lambda x: layer(x, "spikes"), theirs, layer)
        without = SpikingLayer(OBS, ACT * 3, Actor(), config)
        without.load_state_dict(layer.state_dict(), strict=False)
        assert not torch.equal(without(observations(), "spikes"), theirs(observations()))


def test_connections_stay_within_an_actions_population() -> None:
    actor = make_actor(
        encoder="population", decoder="population", neuron="cuba", output_connections=True,
        output_population=4, time_steps=4, v_threshold=0.05,
    )  # fmt: skip
    before, _ = actor(observations())
    with torch.no_grad():
        actor.layers[-1].get_parameter("connections.weight")[1].fill_(5.0)
    after, _ = actor(observations())
    assert torch.equal(after[:, 0], before[:, 0])
    assert not torch.equal(after[:, 1], before[:, 1])


@pytest.mark.parametrize("shape", ["rectangle", "triangle", "atan", "sigmoid"])
@pytest.mark.parametrize("width", [0.5, 2.0])
def test_a_surrogates_area_is_one_whatever_its_width(shape: str, width: float) -> None:
    """What `spiking.surrogate_width` says of every shape but `fast_sigmoid`."""
    config = Spiking(surrogate=shape, surrogate_width=width, time_steps=1, v_threshold=1.0)
    layer = SpikingLayer(1, 1, Actor(), config).double()
    with torch.no_grad():
        layer.linear.weight.fill_(1)
        layer.linear.bias.fill_(0)
    voltage = torch.linspace(-299, 301, 1_000_001, dtype=torch.float64, requires_grad=True)
    layer(voltage[:, None], "mean").sum().backward()
    assert voltage.grad is not None
    area = torch.trapezoid(voltage.grad, voltage.detach()).item()
    assert area == pytest.approx(1, abs=0.01)
    passed = voltage.detach()[voltage.grad > voltage.grad.max() / 100]
    assert (passed.min() + passed.max()).item() / 2 == pytest.approx(1, abs=0.01)


# ---- population coding by hand -------------------------------------------------------------------


def test_a_field_fires_as_often_as_it_is_near() -> None:
    """Activations 1, 1/2 and 1/4: every step, every second, every fourth (0.999 is subtracted)."""
    config = Spiking(encoder="population", input_population=3, input_std=1.0, time_steps=8)
    encoder = PopulationEncoder(config, 1)
    away = np.sqrt(2 * np.log([1, 2, 4]))
    with torch.no_grad():
        encoder.mean.copy_(torch.tensor(away)[None])
    spikes = encoder(torch.zeros(1, 1))
    assert spikes[:, 0].T.tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 1],
        [0, 1, 0, 1, 0, 1, 0, 1],
        [0, 0, 0, 1, 0, 0, 0, 1],
    ]


def test_a_single_field_is_centred() -> None:
    config = Spiking(encoder="population", input_population=1, input_std=0.5)
    encoder = PopulationEncoder(config, 2)
    assert encoder.mean.tolist() == [[0.0], [0.0]]
    assert encoder.std.tolist() == [[0.5], [0.5]]
    assert encoder(torch.tensor([[0.0, 9.0]]))[:, 0].tolist() == [[1, 0]] * config.time_steps


# ---- a forward pass is a function of its input ---------------------------------------------------


STACKS: list[dict[str, Any]] = [
    {},
    {"neuron": "cuba", "encoder": "population", "decoder": "population", "log_std": "mlp"},
    {"neuron": "lif", "encoder": "population", "v_threshold": 0.2, "surrogate": "atan"},
    {"neuron": "clif", "v_threshold": 0.2},
    {"neuron": "alif", "encoder": "population-current", "v_threshold": 0.1},
    {"neuron": "plif", "encoder": "poisson", "v_threshold": 0.1, "learn_threshold": True},
    {"neuron": "cuba", "decoder": "population", "output_connections": True, "v_threshold": 0.1},
]
each_stack = pytest.mark.parametrize(
    "stack", STACKS, ids=["current", "popsan", "mixed", "clif", "alif", "plif", "ilc"]
)


def heads(actor: SpikingActor, observation: Tensor) -> Tensor:
    return torch.cat(actor(observation), 1)


@each_stack
def test_nothing_leaks_from_one_call_into_the_next(stack: dict[str, Any]) -> None:
    """case 20: neither a call, a trace, a backward, nor a changed batch size leaves a trace."""
    actor = make_actor(time_steps=4, **stack)
    first, slopes = heads(actor, observations()), gradients(actor, observations())
    actor(observations(1, batch=3))
    actor.trace(observations(2, batch=7))
    actor.statistics(observations(2, batch=1))
    with torch.no_grad():
        actor(observations(3) * 100)
    assert torch.equal(heads(actor, observations()), first)
    again = gradients(actor, observations())
    assert all(torch.equal(again[name], slopes[name]) for name in slopes)


def test_two_passes_can_be_open_before_either_backward() -> None:
    """case 20: as in an update, where the policy is asked twice before its loss."""
    actor = make_actor(time_steps=3)
    alone = gradients(actor, observations())["layers.0.linear.weight"]
    actor.zero_grad()
    stream = torch.Generator().manual_seed(0)
    opened = actor(observations())
    actor(observations(1, batch=5))
    sum((h * torch.randn(h.shape, generator=stream)).sum() for h in opened).backward()
    weight = actor.layers[0].get_parameter("linear.weight")
    assert weight.grad is not None and torch.equal(weight.grad, alone)


@each_stack
@pytest.mark.parametrize("norm", [{}, {"layer_norm": True}, {"batch_norm": True}])
def test_the_result_does_not_depend_on_how_a_batch_is_split(
    stack: dict[str, Any], norm: dict[str, bool]
) -> None:
    """case 20: down to single observations, batch statistics being frozen outside the loss."""
    actor = make_actor(norm, time_steps=4, **stack)
    for module in actor.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean, std=0.1)  # type: ignore[arg-type]
    with torch.no_grad():
        whole = heads(actor, observations())
        for size in (1, 5, B - 1):
            parts = [heads(actor, part) for part in observations().split(size)]
            torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)


@each_stack
@pytest.mark.parametrize("layer_norm", [False, True])
def test_train_and_eval_mode_are_the_same(stack: dict[str, Any], layer_norm: bool) -> None:
    """case 22: the same spikes, and the same surrogate gradients."""
    actor = make_actor({"layer_norm": layer_norm}, time_steps=4, **stack)
    actor.eval()
    evaluated, slopes = heads(actor, observations()), gradients(actor, observations())
    actor.train()
    assert torch.equal(heads(actor, observations()), evaluated)
    assert torch.equal(actor.trace(observations())[-1].spikes.mean(0), rate_of(actor))
    for name, slope in gradients(actor, observations()).items():
        assert torch.equal(slope, slopes[name])
        assert slope.any(), name


def rate_of(actor: SpikingActor) -> Tensor:
    """The mean spikes that the read-out is given in a forward pass."""
    seen: list[Tensor] = []
    hook = actor.readout.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    actor(observations())
    hook.remove()
    return seen[0].detach()


@each_stack
def test_grad_mode_changes_nothing(stack: dict[str, Any]) -> None:
    actor = make_actor(time_steps=4, **stack)
    with torch.no_grad():
        without = heads(actor, observations())
    assert torch.equal(heads(actor, observations()).detach(), without)


@each_stack
@pytest.mark.parametrize("backend", ["torch", "spikingjelly"])
def test_every_backend_gives_the_same(stack: dict[str, Any], backend: str) -> None:
    """Spikes are equal, so heads are too; gradients to rounding."""
    actor, other = (make_actor(time_steps=4, backend=b, **stack) for b in ("auto", backend))
    assert torch.equal(rate_of(actor), rate_of(other))
    wanted = gradients(other, observations())
    for name, slope in gradients(actor, observations()).items():
        torch.testing.assert_close(slope, wanted[name], rtol=1e-4, atol=1e-5)


@each_stack
def test_an_actor_can_be_copied_after_any_pass(stack: dict[str, Any]) -> None:
    """case 23: a node that keeps its state cannot be, after a forward in grad mode."""
    actor = make_actor(time_steps=4, **stack)
    actor(observations())
    actor.trace(observations())
    twin = copy.deepcopy(actor)
    assert torch.equal(heads(twin, observations()), heads(actor, observations()))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in actor.parameters()}


# ---- what a layer does ---------------------------------------------------------------------------


@each_stack
def test_the_trace_is_what_the_forward_pass_does(stack: dict[str, Any]) -> None:
    """Every layer's spikes, and voltages that explain them."""
    actor = make_actor(time_steps=4, **stack)
    traces = actor.trace(observations())
    assert len(traces) == len(actor.layers)
    assert torch.equal(traces[-1].spikes.mean(0), rate_of(actor))
    x = observations() if actor.encoder is None else actor.encoder(observations())
    for trace, layer in zip(traces, actor.layers, strict=True):
        x = layer(x, "spikes")
        assert torch.equal(trace.spikes, x)
        assert trace.voltage.shape == trace.spikes.shape == (4, B, layer.linear.out_features)  # type: ignore[union-attr]
        margin = trace.voltage - actor.config.v_threshold
        clear = margin.abs() > 1e-6
        assert torch.equal((margin >= 0)[clear], (trace.spikes == 1)[clear])
        assert not trace.spikes.requires_grad


def test_statistics_by_hand() -> None:
    """case 25: saturation shows, not only silence.

    A LIF of tau 2 has voltage v/2 + x. With threshold 1, T = 4 and currents
        neuron 0: 1.0 -> 1, 1, 1, 1 fires always; 0.6 -> 0.6, 0.9, 1.05 (fires), 0.6
        neuron 1: 0.15 -> at most 0.3, silent;  neuron 2: 10 -> fires always, far above
    spikes are 4 + 1 + 0 + 8 of 24; the 8 voltages of neuron 0 lie within 1/2 of the threshold.
    """
    config = Spiking(time_steps=4, tau=2.0, v_threshold=1.0, surrogate_width=1.0)
    actor = SpikingActor(Actor(hidden=(3,)), config, 1, 1)
    linear = actor.layers[0].linear  # type: ignore[union-attr]
    assert isinstance(linear, nn.Linear)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0], [0.0], [0.0]]))
        linear.bias.copy_(torch.tensor([0.0, 0.15, 10.0]))
    observation = torch.tensor([[1.0], [0.6]])
    voltage, spikes = actor.trace(observation)[0]
    torch.testing.assert_close(voltage[:, 1, 0], torch.tensor([0.6, 0.9, 1.05, 0.6]))
    assert spikes[:, :, 0].T.tolist() == [[1, 1, 1, 1], [0, 0, 1, 0]]
    values = {tag: float(value) for tag, value in actor.statistics(observation).items()}
    assert values == pytest.approx(
        {
            "spiking/firing_rate/0": 13 / 24,
            "spiking/in_window/0": 8 / 24,
            "spiking/silent/0": 1 / 3,
            "spiking/saturated/0": 1 / 3,
        }
    )


def test_statistics_count_every_spiking_layer() -> None:
    """The output population is the last."""
    actor = make_actor(encoder="population", decoder="population")
    names = ("firing_rate", "in_window", "silent", "saturated")
    expected = {f"spiking/{name}/{i}" for name, i in itertools.product(names, range(3))}
    expected.add("spiking/outside_range")
    assert set(actor.statistics(observations())) == expected


# ---- Poisson spikes ------------------------------------------------------------------------------


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poisson_encoder(time_steps: int) -> PopulationEncoder:
    config = Spiking(encoder="poisson", input_population=3, input_std=1.0, time_steps=time_steps)
    return PopulationEncoder(config, OBS)


def test_poisson_rates_converge_to_the_activations() -> None:
    """To within 5 standard errors, with a stream over rows and steps, without one over steps."""
    encoder, observation = poisson_encoder(64), observations(batch=1)
    expected = encoder.activation(observation)[0]
    many = encoder(observation.expand(500, -1), stream())
    assert many.unique().tolist() == [0, 1]
    for spikes in (many, encoder(observation)):
        count = spikes.shape[0] * spikes.shape[1]
        error = (expected * (1 - expected) / count).sqrt()
        assert ((spikes.mean((0, 1)) - expected).abs() <= 5 * error + 1e-6).all()
    assert 0.1 < expected.mean() < 0.9


def test_poisson_spikes_pass_their_gradient_to_the_activation() -> None:
    encoder = poisson_encoder(6)
    fields = list(encoder.parameters())
    found = torch.autograd.grad(encoder(observations(), stream()).sum(), fields)
    expected = torch.autograd.grad(6 * encoder.activation(observations()).sum(), fields)
    torch.testing.assert_close(found, expected)


def test_poisson_draws_are_their_streams() -> None:
    """The same seed draws the same, and drawing on draws anew; rows draw independently."""
    encoder, shared = poisson_encoder(8), stream()
    same = observations(batch=1).expand(2, -1)
    first = encoder(same, shared)
    assert torch.equal(encoder(same, stream()), first)
    assert not torch.equal(encoder(same, shared), first)
    assert not torch.equal(first[:, 0], first[:, 1])


def test_without_a_stream_poisson_spikes_are_a_function_of_the_observation() -> None:
    """So evaluation is reproducible, alone or in a batch, and no global stream moves."""
    encoder, before = poisson_encoder(8), torch.get_rng_state()
    whole = encoder(observations())
    assert torch.equal(encoder(observations()), whole)
    for i in range(B):
        assert torch.equal(encoder(observations()[i : i + 1])[:, 0], whole[:, i])
    assert torch.equal(torch.get_rng_state(), before)


def test_population_current_is_the_activation_itself() -> None:
    config = Spiking(encoder="population-current", input_population=3, input_std=1.0)
    encoder = PopulationEncoder(config, 2)
    current = encoder(torch.tensor([[0.0, 3.0]]))
    near, far = np.exp(-4.5), np.exp(-18)
    torch.testing.assert_close(current, torch.tensor([[near, 1, near, far, near, 1]]).float())


# ---- noise ---------------------------------------------------------------------------------------


def noise_of(output: Any, **noise: float) -> Tensor:
    """What a stream adds to a layer's output, [T, 4000, 3] or [4000, 3]."""
    config = Spiking(time_steps=4, tau=2.0, v_threshold=0.2, **noise)
    torch.manual_seed(0)
    layer, x = SpikingLayer(OBS, 3, Actor(), config), observations(batch=1).expand(4000, -1)
    with torch.no_grad():
        return layer(x, output, stream()) - layer(x, output)


def test_charge_noise_is_independent_in_every_step() -> None:
    """The first voltage has the noise of one current."""
    noise = noise_of("voltages", charge_noise=0.3)[0]
    assert noise.mean().abs() < 0.02
    assert noise.std().item() == pytest.approx(0.3, rel=0.03)
    config = Spiking(time_steps=2, tau=2.0, v_threshold=99.0, charge_noise=0.3)
    voltage = constant_layer(config, 1.0)(torch.zeros(20_000, 1), "voltages", stream())[..., 0]
    added = voltage[1] - voltage[0] / 2 - 1  # a LIF of tau 2 keeps half
    assert added.std().item() == pytest.approx(0.3, rel=0.03)
    assert torch.corrcoef(torch.stack([voltage[0], added]).detach())[0, 1].abs() < 0.03


@pytest.mark.parametrize(("output", "deviation"), [("spikes", 0.3), ("mean", 0.15)])
def test_transmission_noise_reaches_what_the_layer_sends(output: str, deviation: float) -> None:
    """Of the mean over 4 steps, half as much."""
    noise = noise_of(output, transmission_noise=0.3)
    assert noise.mean().abs() < 0.01
    assert noise.std().item() == pytest.approx(deviation, rel=0.03)


def test_noise_is_for_training_and_exploration_alone() -> None:
    """Acting, evaluating and looking at an actor show the actor without it."""
    noisy, quiet = (
        SAC(Config(san=True, actor={"hidden": (16, 12)}, spiking=noise), OBS, ACT, "cpu")
        for noise in ({"charge_noise": 0.5, "transmission_noise": 0.5}, {})
    )
    observation = observations()
    assert torch.equal(noisy.act(observation), quiet.act(observation))
    assert torch.equal(noisy.sample(observation, stream()), quiet.sample(observation, stream()))
    shown = [sac.actor.statistics(observation) for sac in (noisy, quiet)]  # type: ignore[operator]
    assert shown[0] == shown[1]
    assert not torch.equal(noisy.explore(observation), quiet.explore(observation))
    assert noisy.update(a_batch())["loss/actor"] != quiet.update(a_batch())["loss/actor"]


# ---- schedules and penalties ---------------------------------------------------------------------


def widths(actor: SpikingActor) -> float:
    """The one surrogate width of all layers."""
    (width,) = {layer.surrogate_width for layer in actor.layers}
    return float(width)  # type: ignore[arg-type]


def test_surrogates_narrow_over_their_share_of_training() -> None:
    actor = make_actor(surrogate_width="linear:3:1:0..0.5")
    moved = []
    for progress in (0.0, 0.1, 0.25, 0.4, 0.5, 0.9, 1.1):
        actor.set_progress(progress, best_return=99.0)
        moved.append(widths(actor))
    assert moved == pytest.approx([3.0, 2.6, 2.0, 1.4, 1.0, 1.0, 1.0])


def test_surrogates_narrow_with_the_return() -> None:
    """Whatever the share of training; before the first evaluation they stay as they start."""
    actor = make_actor(surrogate_width="return:3:1:-100..300")
    moved = []
    for best in (None, -200.0, -100.0, 0.0, 100.0, 300.0, 400.0):
        actor.set_progress(0.9, best)
        moved.append(widths(actor))
    assert moved == pytest.approx([3.0, 3.0, 3.0, 2.5, 2.0, 1.0, 1.0])


@pytest.mark.parametrize("neuron_kind", ["lif", "alif"])
def test_a_scheduled_width_is_the_width_of_the_gradient(neuron_kind: str) -> None:
    """In the kernels and in neurons that are stepped."""
    stack: dict[str, Any] = {"neuron": neuron_kind, "time_steps": 3, "surrogate": "triangle"}
    moving = make_actor(surrogate_width="linear:4:1:0..0.5", **stack)
    for progress, width in ((0.0, 4.0), (0.25, 2.5), (1.0, 1.0)):
        moving.set_progress(progress)
        still = gradients(make_actor(surrogate_width=width, **stack), observations())
        for name, slope in gradients(moving, observations()).items():
            torch.testing.assert_close(slope, still[name], rtol=1e-6, atol=1e-7)


def test_without_a_schedule_the_width_stays() -> None:
    actor = make_actor(surrogate_width=0.7)
    actor.set_progress(0.0)
    assert widths(actor) == 0.7


def test_the_firing_penalty_by_hand() -> None:
    """A layer that fires at every second step, one at every step, one never; target 0.2.

    A LIF of tau 2 under currents 0.7 (0.7, 1.05: fires), 1 and 0 at threshold 1.
    """
    config = Spiking(time_steps=4, tau=2.0, v_threshold=1.0, firing_penalty=2.0, target_rate=0.2)
    actor = SpikingActor(Actor(hidden=(2, 2, 2)), config, 1, 1)
    for layer, current in zip(actor.layers, (0.7, 1.0, 0.0), strict=True):
        nn.init.zeros_(layer.get_parameter("linear.weight"))
        nn.init.constant_(layer.get_parameter("linear.bias"), current)
    expected = 2.0 * (0.3**2 + 0.8**2)
    actor.eval()
    actor(torch.zeros(3, 1))
    assert actor.penalty() == 0.0  # asked for by no training pass
    assert float(actor.statistics(torch.zeros(3, 1))["spiking/firing_penalty"]) == (
        pytest.approx(expected)
    )
    actor.train()
    actor(torch.zeros(3, 1))
    actor.eval()
    actor(torch.ones(3, 1))
    penalty = actor.penalty()
    assert isinstance(penalty, Tensor) and penalty.item() == pytest.approx(expected)
    assert actor.penalty() == 0.0  # counted once


@pytest.mark.parametrize("decoder", ["rate", "membrane", "population"])
@pytest.mark.parametrize("neuron_kind", ["lif", "alif"])
def test_the_firing_penalty_lowers_rates(neuron_kind: str, decoder: str) -> None:
    actor = make_actor(
        neuron=neuron_kind, decoder=decoder, firing_penalty=1.0, target_rate=0.05, v_threshold=0.1
    )
    optimizer = torch.optim.Adam(actor.parameters(), 0.02)

    def rates() -> list[float]:
        return [float(trace.spikes.mean()) for trace in actor.trace(observations())]

    before = rates()
    for _ in range(60):
        actor.train()
        actor(observations())
        penalty = actor.penalty()
        assert isinstance(penalty, Tensor)
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
    assert all(after < rate for after, rate in zip(rates(), before, strict=True))
    assert max(rates()) < 0.15 < max(before)


def test_the_firing_penalty_is_part_of_the_actors_loss_once() -> None:
    """The pass on next observations, for the target, adds nothing."""
    free, pressed = (
        SAC(
            Config(
                san=True,
                actor={"hidden": (16, 12)},
                spiking={"firing_penalty": weight, "target_rate": 0.0, "v_threshold": 0.1},
            ),
            OBS, ACT, "cpu",
        )
        for weight in (0.0, 10.0)
    )  # fmt: skip
    batch = a_batch()
    actor = pressed.actor
    assert isinstance(actor, SpikingActor)
    expected = actor.statistics(pressed.normalize(batch.observation))["spiking/firing_penalty"]
    difference = pressed.update(batch)["loss/actor"] - free.update(batch)["loss/actor"]
    assert expected > 0.1
    torch.testing.assert_close(difference, expected, rtol=1e-4, atol=1e-5)


# ---- what is learned -----------------------------------------------------------------------------


@pytest.mark.parametrize("neuron_kind", ["lif", "plif", "cuba", "clif", "alif"])
def test_thresholds_and_time_constants_learn_and_are_kept(neuron_kind: str) -> None:
    """Of each layer its own, in the weights that a checkpoint and an agent hold."""
    spiking = {"neuron": neuron_kind, "learn_threshold": True, "v_threshold": 0.2, "time_steps": 3}
    config = Config(san=True, actor={"hidden": (16, 12)}, spiking=spiking)
    sac = SAC(config, OBS, ACT, "cpu")
    names = [f"layers.{i}.log_threshold" for i in range(2)]
    names += [f"layers.{i}.node.w" for i in range(2)] if neuron_kind == "plif" else []
    start = {name: sac.actor.get_parameter(name).item() for name in names}
    for _ in range(5):
        sac.update(a_batch())
    kept = sac.weights()["actor"]
    for name in names:
        assert kept[name].item() != start[name]
        assert kept[name].item() == sac.actor.get_parameter(name).item()
    assert len({kept[name].item() for name in names}) == len(names)
    twin = SAC(config, OBS, ACT, "cpu")
    twin.load_weights(sac.weights())
    assert torch.equal(twin.act(observations()), sac.act(observations()))


def test_fixed_constants_are_no_parameters() -> None:
    names = {name for name, _ in make_actor(neuron="lif").named_parameters()}
    assert not any("threshold" in name or "node" in name for name in names)


# ---- published parameters ------------------------------------------------------------------------


def published(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A golden file's parameters under the names of the published code, and all that it holds."""
    with np.load(GOLDEN / f"popsan_{name}.npz") as file:
        of = {key: torch.from_numpy(file[key]) for key in file.files}
    prefix = "param."
    return {key.removeprefix(prefix): of[key] for key in of if key.startswith(prefix)}, of


@pytest.mark.parametrize("name", ["small", "bipedal"])
def test_published_popsan_parameters_give_published_outputs(name: str) -> None:
    given, of = published(name)
    mean, log_std = load_popsan(given)(of["obs"])
    torch.testing.assert_close(mean, of["mu"], rtol=0, atol=1e-6)
    torch.testing.assert_close(log_std, of["log_std"], rtol=0, atol=1e-6)
    longer, _ = load_popsan(given, time_steps=9)(of["obs"])
    assert not torch.equal(longer, mean)


def test_popsan_without_its_log_std_network_has_a_new_one() -> None:
    given, of = published("small")
    actor = load_popsan({k: v for k, v in given.items() if not k.startswith("log_std_network")})
    mean, log_std = actor(of["obs"])
    torch.testing.assert_close(mean, of["mu"], rtol=0, atol=1e-6)
    assert not torch.allclose(log_std, of["log_std"])
    assert actor.config.log_std == "mlp"


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_popsan_of_any_depth_and_width(depth: int) -> None:
    """What we build from its parameters, renamed, is the actor they came from."""
    config = Spiking(
        time_steps=5, encoder="population", neuron="cuba", decoder="population", log_std="mlp",
        input_population=4, output_population=1,
    )  # fmt: skip
    torch.manual_seed(depth)
    actor = SpikingActor(Actor(hidden=tuple(range(7, 7 + depth))), config, OBS, 1)
    theirs = {f"layers.{i}.linear": f"snn.hidden_layers.{i}" for i in range(depth)}
    theirs |= {f"layers.{depth}.linear": "snn.out_pop_layer", "readout": "decoder.decoder"}
    given = {}
    for name, value in actor.state_dict().items():
        module, _, kind = name.rpartition(".")
        module = theirs.get(module, module).replace("log_std.", "log_std_network.")
        given[f"{module}.{kind}"] = value
    given["encoder.mean"], given["encoder.std"] = actor.encoder.mean[None], actor.encoder.std[None]
    given["decoder.decoder.weight"] = actor.readout.weight.transpose(1, 2)
    given["decoder.decoder.bias"] = actor.readout.bias[:, 0]
    assert torch.equal(heads(load_popsan(given), observations()), heads(actor, observations()))


@pytest.mark.parametrize(
    "name",
    [
        "encoder.mean", "encoder.std", "snn.hidden_layers.0.bias", "snn.hidden_layers.1.weight",
        "snn.out_pop_layer.bias", "decoder.decoder.weight", "log_std_network.2.weight",
    ],
)  # fmt: skip
def test_a_missing_popsan_parameter_is_named(name: str) -> None:
    given, _ = published("small")
    del given[name]
    with pytest.raises(ValueError, match=name.replace(".", r"\.").replace("1.weight", "1.bias")):
        load_popsan(given)


@pytest.mark.parametrize("name", ["snn.extra.weight", "readout.weight", "encoder.extra"])
def test_a_popsan_parameter_that_is_left_over_is_named(name: str) -> None:
    given, _ = published("small")
    with pytest.raises(ValueError, match=name):
        load_popsan(given | {name: torch.zeros(2, 3, 1)})


def test_a_popsan_parameter_of_another_shape_is_named() -> None:
    given, _ = published("small")
    given["snn.hidden_layers.0.weight"] = given["snn.hidden_layers.0.weight"].T
    with pytest.raises(ValueError, match=r"hidden_layers\.0\.weight has shape \(12, 8\)"):
        load_popsan(given)


# ---- batch statistics ----------------------------------------------------------------------------


def make_sac(**actor: Any) -> SAC:
    config = Config(san=True, actor={"hidden": (16, 12), "batch_norm": True} | actor)
    return SAC(config, OBS, ACT, "cpu")


def running(actor: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in actor.named_buffers()}


def unchanged(actor: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in actor.named_buffers())


def a_batch(**columns: Tensor) -> Batch:
    batch = Batch(
        observations(1) * 3 + 1,
        observations(2)[:, :ACT].tanh(),
        observations(3)[:, 0],
        observations(4) * 50 - 20,
        torch.full((B,), 0.99),
        torch.ones(B),
    )
    return batch._replace(**columns)


def test_batch_statistics_move_in_the_actors_loss_alone() -> None:
    """Once an update, by the momentum, from the current observations: not from the next ones, and
    not in rollouts or evaluation."""
    sac = make_sac(batch_norm_momentum=0.1)
    sac.norm.update(observations(5) * 2)
    start = running(sac.actor)
    assert any("running_mean" in name for name in start)
    batch = a_batch()
    sac.explore(batch.observation)
    sac.act(batch.observation)
    sac.sample(batch.observation, torch.Generator())
    sac.actor.trace(sac.normalize(batch.observation))  # type: ignore[operator]
    sac.actor.statistics(sac.normalize(batch.observation))  # type: ignore[operator]
    assert unchanged(sac.actor, start)

    with torch.no_grad():
        layer = sac.actor.layers[0]  # type: ignore[index]
        current = layer.linear(sac.normalize(batch.observation))  # type: ignore[union-attr]
    twin = copy.deepcopy(sac)
    sac.update(batch)
    norm = sac.actor.get_submodule("layers.0.norm")
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None and norm.running_var is not None
    torch.testing.assert_close(norm.running_mean, 0.1 * current.mean(0))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * current.var(0))
    assert norm.num_batches_tracked == 1
    assert not sac.actor.training

    twin.update(a_batch(next_observation=observations(6)))
    assert unchanged(twin.actor, running(sac.actor))


def test_the_actors_loss_uses_the_batch_and_everything_else_does_not() -> None:
    """Batch statistics in the loss: shifting every current of a layer by a constant changes
    nothing there, and does change what is acted with frozen statistics."""
    left = make_sac()
    right = copy.deepcopy(left)
    with torch.no_grad():
        right.actor.get_parameter("layers.0.linear.bias").add_(0.5)
    batch = a_batch(discount=torch.zeros(B))  # so that the target's action does not matter
    assert not torch.allclose(left.act(batch.observation), right.act(batch.observation))
    ours, theirs = left.update(batch), right.update(batch)
    torch.testing.assert_close(ours["loss/actor"], theirs["loss/actor"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["sac/entropy"], theirs["sac/entropy"], rtol=1e-4, atol=1e-5)


def test_the_averaged_policy_averages_batch_statistics_too() -> None:
    """Evaluated weights go with statistics of their own age."""
    sac = make_sac(average=0.25, batch_norm_momentum=0.5)
    old = running(sac.policy_actor)
    sac.update(a_batch())
    online = running(sac.actor)
    for name, value in running(sac.policy_actor).items():
        if value.is_floating_point():
            torch.testing.assert_close(value, 0.75 * old[name] + 0.25 * online[name])
            assert not torch.equal(value, old[name])


@pytest.mark.parametrize("momentum", [0.01, "kalman"])
def test_reestimation_reaches_the_actor_and_the_averaged_policy(momentum: float | str) -> None:
    """Both have the statistics of all observations under their own weights; nothing else moves."""
    sac = make_sac(batch_norm_momentum=momentum, average=0.2)
    sac.norm.update(observations(5) * 2)
    for seed in range(3):
        sac.update(a_batch(observation=observations(seed)))
    before = {name: p.clone() for name, p in sac.actor.named_parameters()}
    many = observations(7, batch=500)
    sac.reestimate(many)
    for actor in (sac.actor, sac.policy_actor):
        layer = actor.layers[0]  # type: ignore[index]
        current = layer.linear(sac.normalize(many))  # type: ignore[union-attr]
        norm = layer.norm  # type: ignore[union-attr]
        torch.testing.assert_close(norm.running_mean, current.mean(0))
        torch.testing.assert_close(norm.running_var, current.var(0))
    assert all(torch.equal(p, before[name]) for name, p in sac.actor.named_parameters())
    assert not sac.actor.training


def test_batch_normalised_currents_start_around_half_the_threshold() -> None:
    """So that neurons neither start silent nor saturated."""
    actor = make_actor({"batch_norm": True}, v_threshold=0.8, encoder="population", time_steps=3)
    actor.train()
    layer = actor.layers[0]
    current = layer.current(actor.encoder(observations(batch=256)))  # type: ignore[operator,union-attr]
    assert current.shape == (3, 256, 16)
    folded = current.flatten(0, 1)
    torch.testing.assert_close(folded.mean(0), torch.full((16,), 0.4), rtol=0, atol=1e-4)
    torch.testing.assert_close(folded.std(0), torch.full((16,), 0.4), rtol=0, atol=2e-3)


@given(
    steps=st.integers(1, 16),
    rows=st.integers(0, 5),
    fields=st.integers(1, 9),
    seed=st.integers(0, 2**31 - 1),
)
@settings(max_examples=40)
def test_the_encoders_integrator_is_its_equations_in_autograd(
    steps: int, rows: int, fields: int, seed: int
) -> None:
    stream = torch.Generator().manual_seed(seed)
    plain = torch.rand(rows, fields, generator=stream).requires_grad_()
    voltage, spikes = torch.zeros_like(plain), []
    for _ in range(steps):
        voltage = voltage + plain
        spikes.append(straight_through(voltage > 0.999, voltage))
        voltage = voltage - spikes[-1] * 0.999
    expected = torch.stack(spikes)
    activation = plain.detach().requires_grad_()
    found = IntegrateAndFire.apply(activation, steps, 0.999)
    assert torch.equal(found, expected)
    upstream = torch.randn(expected.shape, generator=stream)
    (slope,) = torch.autograd.grad(expected, plain, upstream)
    torch.testing.assert_close(torch.autograd.grad(found, activation, upstream)[0], slope)
