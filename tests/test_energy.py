"""Operations against SpikingJelly's op_counter, NeuroBench and counts by hand; joules by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Call, tiny
from neurobench.metrics.workload import ActivationSparsity, SynapticOperations
from neurobench.models import TorchModel
from snntorch import SpikingNeuron
from spikingjelly.activation_based.op_counter import (
    DispatchCounterMode,
    MACCounter,
    SynOpCounter,
)
from test_export import STACKS, agent
from torch import Tensor, nn

from sansac import energy, export
from sansac.config import Actor, ConfigError, Spiking
from sansac.manager import Manager
from sansac.spiking import SpikingActor

EPISODES = 2


def played(manager: Manager) -> np.ndarray:
    """Observations of the episodes that `energy` plays."""
    return energy.play(manager, EPISODES, 0, lambda _: None)[0]


def neurobench(net: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    """NeuroBench's own synaptic operations, all of them, and activation sparsity."""
    model, operations = TorchModel(net), SynapticOperations()
    model.add_activation_module(SpikingNeuron)
    model.register_hooks()
    sparsity = []
    for batch in batches:
        with torch.no_grad():
            output = model(batch)
        operations(model, output, (batch, None))
        sparsity.append(ActivationSparsity()(model, output, (batch, None)))
        model.reset_hooks()
    model.cleanup_hooks()
    return {"macs": operations.MAC, "accumulates": operations.AC, "sparsity": sparsity}


# -- counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [name for name in STACKS if STACKS[name].get("san")])
def test_counts_are_those_of_spikingjelly_and_neurobench(stack: str, tmp_path: Path) -> None:
    """Over the same episodes: multiply-accumulates and synaptic operations, to the last one."""
    manager = agent(tmp_path / "agent", **STACKS[stack])
    seen, actor = played(manager), export.plain_actor(manager.algorithm)
    x, n = energy.normalized(manager, seen), len(seen)
    counts = energy.count(actor, x)

    macs, synops = MACCounter(), SynOpCounter()
    with DispatchCounterMode([macs, synops]), torch.no_grad():
        actor(x)
    theirs = sum(v for op, v in macs.get_counts()["Global"].items() if "mm" in str(op))
    grouped = manager.config.spiking.decoder == "population"  # no product of theirs
    population = manager.config.spiking.output_population
    own = n * manager.action_size * population if grouped else 0
    assert counts.all_macs * n == pytest.approx(theirs + own, rel=1e-12)
    assert counts.accumulates * n == pytest.approx(synops.get_total(), rel=1e-12)

    found = neurobench(actor, [x])
    if not grouped:
        assert counts.macs * n == pytest.approx(found["macs"], rel=1e-12)
    assert counts.accumulates * n == pytest.approx(found["accumulates"], rel=1e-12)


@pytest.mark.parametrize("stack", ["lif-folded", pytest.param("popsan", marks=pytest.mark.slow)])
def test_sparsity_is_neurobenchs_of_the_same_network_in_snntorch(
    stack: str, tmp_path: Path
) -> None:
    import nir
    from snntorch.import_nir import import_from_nir

    manager = agent(tmp_path / "agent", **STACKS[stack])
    seen = played(manager)
    export.export(manager, "nir", tmp_path / "out", episodes=0)
    before = export.load_onnx(tmp_path / "out/preprocessing.onnx", "observation", "input")
    graph, state = import_from_nir(nir.read(tmp_path / "out/actor.nir")), None

    class Stepped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = graph

        def forward(self, step: Tensor) -> Tensor:
            nonlocal state
            output, state = self.graph(step, state)
            return output

    found = neurobench(Stepped(), list(torch.from_numpy(before(seen))))
    actor = export.plain_actor(manager.algorithm)
    counts = energy.count(actor, energy.normalized(manager, seen))
    assert counts.activation_sparsity == pytest.approx(np.mean(found["sparsity"]), rel=1e-12)
    rates = manager.policy.firing_rates(seen)
    widths = [layer.linear.out_features for layer in actor.layers]
    assert 1 - counts.activation_sparsity == pytest.approx(np.average(rates, weights=widths))


@pytest.mark.parametrize("stack", ["dense", "dense-folded"])
def test_a_dense_actors_counts_are_neurobenchs(stack: str, tmp_path: Path) -> None:
    manager = agent(tmp_path / "agent", **STACKS[stack])
    actor, x = export.plain_actor(manager.algorithm), energy.normalized(manager, played(manager))
    first, second = actor.layers
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), actor.mean)
    counts, found = energy.count(actor, x), neurobench(net, [x])
    assert counts.macs * len(x) == pytest.approx(found["macs"], rel=1e-12)
    assert counts.activation_sparsity == pytest.approx(found["sparsity"][0], rel=1e-12)
    assert counts.all_macs == 3 * 16 + 16 * 16 + 16 * 1
    assert counts.accumulates == counts.neuron_updates == 0


def by_hand(san: bool) -> Any:
    """Two inputs, two hidden units, one output; weights such that unit 0 always fires and unit 1
    never does."""
    changes = {"actor": {"hidden": [2]}, "spiking": {"time_steps": 3, "decoder": "membrane"}}
    actor = export.plain_actor(Manager(tiny(san=san, **changes)).algorithm)
    linear = actor.layers[0].linear if san else actor.layers[0]
    linear.weight.zero_()
    linear.bias.copy_(torch.tensor([1.0, -1.0]))
    return actor


def test_a_spiking_count_by_hand() -> None:
    actor = by_hand(san=True)
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]])
    counts = energy.count(actor, x)
    assert counts.macs == (3 * 2 + 1 * 2) / 2  # the current, computed once
    assert counts.all_macs == 3 * 2
    assert counts.accumulates == 3 * 1 * 1  # three steps, one spike, one integrator
    assert counts.synapses == 3 * 2 * 1
    assert counts.neuron_updates == 3 * (2 + 1)  # neurons and the integrator
    assert counts.neuron_macs == 3 * (2 + 1) and counts.neuron_accumulates == 3 * (2 + 1)
    assert counts.activation_sparsity == 0.5
    weights, state = 4 + 3, 2 * 3 * (2 + 1)
    first, last = 3 + 2 + 2, 3 * 2 / 32 + 3 * (1 + 1)  # inputs, biases, outputs
    assert counts.memory_words == pytest.approx(weights + state + first + last)
    assert energy.footprint(actor) == (3 * 2 + 2) + (2 * 1 + 1) + 2


def test_poisson_spikes_are_accumulated() -> None:
    """No product of spikes is a multiplication, the first one's neither."""
    config = Spiking(encoder="poisson", time_steps=3, input_population=2)
    actor = SpikingActor(Actor(hidden=(4, 4)), config, 3, 2)
    x = torch.randn(5, 3)
    counts = energy.count(actor, x)
    assert counts.synapses == 3 * (6 * 4 + 4 * 4) and counts.all_macs == 4 * 2
    assert counts.macs <= counts.all_macs and 0 < counts.accumulates < counts.synapses


def test_memory_of_grouped_products_and_integrators_by_hand() -> None:
    """Every bias is read and every output written; an integrator has one state, a cuba two."""
    x = torch.zeros(1, 2)
    population = Spiking(decoder="population", output_population=3, time_steps=2)
    actor = SpikingActor(Actor(hidden=(5,)), population, 2, 4)
    *_, readout = energy.spiking_products(actor, x)
    assert readout.words == 4 * 3 + 4 + 4 and readout.all_operations == 4 * 3
    membrane = Spiking(neuron="cuba", decoder="membrane", time_steps=3)
    actor = SpikingActor(Actor(hidden=(4,)), membrane, 2, 4)
    assert energy.neuron_costs(actor).words == 2 * 3 * (2 * 4 + 4)


def test_an_actor_whose_products_are_of_no_spikes_has_no_break_even_rate(tmp_path: Path) -> None:
    alone = agent(tmp_path / "agent", **STACKS["one-layer"])  # its read-out takes mean spikes
    result = energy.account(alone, None, episodes=1)
    assert "spike_rate" not in result and energy.break_even_rows(result) == []


def test_a_dense_count_by_hand() -> None:
    counts = energy.count(by_hand(san=False), torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]]))
    assert counts.macs == (3 * 2 + 1 * 2) / 2 + 1  # one unit is above 0
    assert counts.all_macs == 3 * 2 + 2
    assert counts.activation_sparsity == 0.5
    assert counts.memory_words == pytest.approx(4 + 1 + (3 + 2 + 2) + (2 + 1 + 1))


# -- joules ------------------------------------------------------------------------------------


def test_joules_are_counts_times_prices() -> None:
    counts = energy.Counts(100, 200, 1000, 5000, 64, 10, 20, 3000, 0.5)
    found = energy.joules(counts, energy.Model(4.6, 0.9, 4, ""), held=1000)  # 4 KB: 1.25 pJ/B
    arithmetic = 4.6 * 110 + 0.9 * 1020
    assert found["arithmetic"] == pytest.approx(arithmetic * 1e-12)
    assert found["with_memory"] == pytest.approx((arithmetic + 3000 * 4 * 1.25) * 1e-12)
    for held, price in ((3000, 2.5), (100_000, 12.5), (1_000_000, 162.5)):
        found = energy.joules(counts, energy.Model(4.6, 0.9, 4, ""), held)
        assert found["with_memory"] == pytest.approx((arithmetic + 12000 * price) * 1e-12)


def test_an_account_puts_equal_precision_on_both_sides(tmp_path: Path) -> None:
    spiking = agent(tmp_path / "spiking", **STACKS["lif-folded"])
    dense = agent(tmp_path / "dense", **STACKS["dense-folded"])
    alone = energy.account(spiking, None, episodes=EPISODES)
    both = energy.account(spiking, dense, episodes=EPISODES)
    assert set(alone["action"]) == {"agent", "dense_all"}
    assert set(both["action"]) == {"agent", "dense_all", "dense_without_zeros"}
    assert both["action"]["dense_all"]["macs"] == alone["action"]["dense_all"]["macs"]
    for model in both["models"].values():
        rates = model["break_even_rate"]
        assert rates["dense_all"] == pytest.approx(model["mac"] / (4 * model["accumulate"]))
        active = 1 - both["action"]["dense_without_zeros"]["activation_sparsity"]
        assert rates["dense_without_zeros"] == pytest.approx(rates["dense_all"] * active)
        for side, rate in rates.items():
            assert model["side"][side] == ("below" if both["spike_rate"] < rate else "above")
        for side, counts in both["action"].items():
            macs = counts["macs"] + counts["neuron_macs"]
            accumulates = counts["accumulates"] + counts["neuron_accumulates"]
            picojoules = model["mac"] * macs + model["accumulate"] * accumulates
            assert model["joules"][side]["arithmetic"] == pytest.approx(picojoules * 1e-12)
    assert both["nvml_training_joules"] is None
    assert both["episode"]["macs"] == pytest.approx(
        both["action"]["agent"]["macs"] * both["length_mean"]
    )
    own = energy.account(dense, None, episodes=EPISODES)
    assert own["action"]["agent"] == own["action"]["dense_without_zeros"]
    assert "spike_rate" not in own


def test_the_break_even_rate_is_where_a_product_of_spikes_costs_a_dense_one(
    tmp_path: Path,
) -> None:
    """At that rate, T r m n accumulates cost what m n multiply-accumulates do."""
    manager = agent(tmp_path / "agent", **STACKS["lif"])
    for model in energy.account(manager, None, episodes=1)["models"].values():
        rate, steps = model["break_even_rate"]["dense_all"], manager.config.spiking.time_steps
        assert steps * rate * model["accumulate"] == pytest.approx(model["mac"])


@pytest.mark.parametrize(
    "word", ["chip", "chip=1", "=1,2", "chip=1,0", "chip=1,2,3,4", "c=1,2,.5", "c=1,nan", "c=inf,1"]
)
def test_a_model_that_cannot_be_read_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME=MAC,AC"):
        energy.parse_models((word,))


def test_models_of_a_users_own() -> None:
    found = energy.parse_models(("chip=2.0,0.4,1", "other=1,2"))
    assert [(m.mac, m.accumulate, m.bytes) for m in found.values()] == [(2, 0.4, 1), (1, 2, 4)]


# -- the command -------------------------------------------------------------------------------


def test_the_command_counts_and_keeps_its_result(tmp_path: Path, call: Call) -> None:
    manager = Manager(tiny(tmp_path, san=True))
    manager.train()
    run = manager.directory
    agent(tmp_path / "dense")
    words = ("--episodes", EPISODES, "--dense", tmp_path / "dense", "--model", "chip=2,0.4,1")
    code, stdout, _ = call("energy", run, *words)
    assert code == 0
    for told in ("synaptic accumulates", "chip", "break-even", "modelled, not measured", "NVML"):
        assert told in stdout
    code, stdout, _ = call("energy", run, *words, "--json")
    result = json.loads(stdout)
    assert code == 0 and result == json.loads((run / energy.FILE).read_text())
    final = manager.evaluate(EPISODES)
    assert result["return_mean"] == pytest.approx(final["return_mean"])
    assert result["firing_rate"] == pytest.approx(final["firing_rate"])
    assert math.isfinite(result["models"]["chip"]["joules"]["agent"]["with_memory"])


def test_what_cannot_be_counted_is_refused(tmp_path: Path, call: Call) -> None:
    agent(tmp_path / "spiking", san=True)
    run = tmp_path / "spiking"
    for words, message in (
        (("--episodes", 0), "--episodes must be at least 1"),
        (("--dense", run), "expected a dense agent of Pendulum-v1"),
        (("--dense", tmp_path / "none"), "is not a directory"),
        (("--model", "chip"), "expected NAME=MAC,AC"),
    ):
        code, _, stderr = call("energy", run, *words)
        assert code == 2 and message in stderr


def test_an_agent_directory_stays_as_it_is(tmp_path: Path, call: Call) -> None:
    agent(tmp_path / "agent")
    before = sorted(path.name for path in (tmp_path / "agent").iterdir())
    assert call("energy", tmp_path / "agent", "--episodes", 1)[0] == 0
    assert sorted(path.name for path in (tmp_path / "agent").iterdir()) == before
