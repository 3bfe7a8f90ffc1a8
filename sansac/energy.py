"""What an action of a trained agent costs: operations over episodes, joules under named models.

Counted is the deployed policy: BatchNorm folded, normalisation folded or left to the sensor, biases
and the log-std head left out. A product fed by spikes costs an accumulate a weight and spike, any
other a multiply-accumulate a weight; those of an input of 0 are skipped, as NeuroBench does. The
current of a constant input is computed once, a rate read-out multiplies mean spikes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sansac import export
from sansac.checkpoint import write_atomically
from sansac.config import Actor as ActorConfig
from sansac.config import ConfigError
from sansac.environments import EVALUATION, Episodic, episode_seed
from sansac.evaluation import run_episode
from sansac.logger import last_value
from sansac.manager import Manager
from sansac.networks import DenseActor
from sansac.spiking import GroupedLinear, MembraneReadout
from sansac.watch import number

FILE = "energy.json"  # in a run directory; `compare` reads it


class Counts(NamedTuple):
    """Operations of one action, means over observations."""

    macs: float  # multiply-accumulates of products, those of an input of 0 skipped
    all_macs: float  # with those
    accumulates: float  # synaptic operations that spikes caused
    synapses: float  # accumulates if every neuron fired at every step
    neuron_updates: float
    neuron_macs: float  # multiply-accumulates inside neurons and receptive fields
    neuron_accumulates: float
    memory_words: float  # weights, activations and states read or written; a spike is a bit
    activation_sparsity: float  # share of zeros among what layers put out


class Model(NamedTuple):
    """Energy of an operation (pJ) at one precision, the same for both actors."""

    mac: float
    accumulate: float
    bytes: int  # of a weight, an activation or a state
    source: str


HOROWITZ = "Horowitz, ISSCC 2014, 45 nm, 0.9 V"
MODELS = {
    "float32-45nm": Model(4.6, 0.9, 4, f"{HOROWITZ}: multiply 3.7 pJ, add 0.9 pJ"),
    "int8-45nm": Model(0.23, 0.03, 1, f"{HOROWITZ}: 8-bit multiply 0.2 pJ, 8-bit add 0.03 pJ"),
    "synop-77fJ": Model(
        0.23, 0.077, 1,
        "77 fJ a synaptic operation of a mixed-signal chip (Qiao et al. 2015, Front. Neurosci. "
        "9:141); it has no multiply-accumulate, which is taken from int8-45nm",
    ),
}  # fmt: skip
# pJ a byte by the smallest memory (bytes) that holds an actor: 64-bit reads of caches of 8 KB,
# 32 KB and 1 MB at 10, 20 and 100 pJ, of DRAM at 1.3 nJ, the lower end (Horowitz, ISSCC 2014).
MEMORIES = ((8 * 2**10, 1.25), (32 * 2**10, 2.5), (2**20, 12.5), (float("inf"), 162.5))


def parse_models(words: tuple[str, ...]) -> dict[str, Model]:
    """`NAME=MAC,AC[,BYTES]`, pJ a multiply-accumulate and an accumulate. Raises ConfigError."""
    found = {}
    for word in words:
        name, _, numbers = word.partition("=")
        try:
            mac, accumulate, *size = map(float, numbers.split(","))
            (width,) = size or [4.0]
            positive = all(0 < price < math.inf for price in (mac, accumulate, width))
            if not name or not positive or width % 1:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"--model: expected NAME=MAC,AC[,BYTES], such as chip=2.0,0.4,1 (pJ a "
                f"multiply-accumulate and an accumulate, bytes a value), found {word!r}"
            ) from None
        found[name] = Model(mac, accumulate, int(width), "given with --model")
    return found


# -- counting ----------------------------------------------------------------------------------


@torch.no_grad()
def count(actor: Any, x: Tensor) -> Counts:
    """Operations of an action of a folded actor over normalised observations, [N, obs]."""
    of = dense_products if isinstance(actor, DenseActor) else spiking_products
    products = [p for rows in x.split(1024) for p in of(actor, rows)]  # spikes of all fill memory
    n = len(x)
    macs = sum(p.operations for p in products if not p.spikes)
    accumulates = sum(p.operations for p in products if p.spikes)
    zeros, outputs = sum(p.zeros for p in products), sum(p.outputs for p in products)
    neurons = neuron_costs(actor)
    words = sum(p.operations + p.words for p in products) / n + neurons.words
    return Counts(
        macs / n,
        sum(p.all_operations for p in products if not p.spikes) / n,
        accumulates / n,
        sum(p.all_operations for p in products if p.spikes) / n,
        *neurons[:3],
        words,
        zeros / outputs if outputs else 0.0,
    )


class Product(NamedTuple):
    """One product over some observations."""

    spikes: bool
    operations: int  # weights that meet an input other than 0
    all_operations: int
    words: float  # its inputs read, its biases read, its outputs written
    outputs: int  # entries that the layer's activation puts out, 0 where it has none
    zeros: int  # of these


def product(
    x: Tensor, fan_out: int, spikes: bool, output: Tensor | None = None, groups: int = 1
) -> Product:
    """Of inputs x, [..., inputs], each of which meets the `fan_out` weights of its group."""
    rows = x.numel() // x.shape[-1]
    words = x.numel() / (32 if spikes else 1) + 2 * rows * groups * fan_out
    operations = int(torch.count_nonzero(x)) * fan_out
    outputs, active = (0, 0) if output is None else (output.numel(), int(output.count_nonzero()))
    return Product(spikes, operations, x.numel() * fan_out, words, outputs, outputs - active)


def dense_products(actor: DenseActor, x: Tensor) -> Iterator[Product]:
    for layer, norm in zip(actor.layers, actor.norms, strict=True):
        y = actor.activation(norm(layer(x)))
        yield product(x, y.shape[-1], False, y)
        x = y
    yield product(x, actor.mean.out_features, False)


def spiking_products(actor: Any, x: Tensor) -> Iterator[Product]:
    inputs = x if actor.encoder is None else actor.encoder(x)
    spikes = actor.config.encoder in ("population", "poisson")
    for layer, trace in zip(actor.layers, actor.trace(x), strict=True):
        yield product(inputs, layer.linear.out_features, spikes, trace.spikes)
        if layer.connections is not None:  # from each step to the next
            groups, _, size = layer.connections.weight.shape
            yield product(trace.spikes[:-1], size, True, groups=groups)
        inputs, spikes = trace.spikes, True
    readout = actor.readout
    if isinstance(readout, MembraneReadout):
        yield product(inputs, readout.linear.out_features, True)
    elif isinstance(readout, GroupedLinear):
        groups, _, size = readout.weight.shape
        yield product(inputs.mean(0), size, False, groups=groups)
    else:
        yield product(inputs.mean(0), readout.out_features, False)


class NeuronCosts(NamedTuple):
    updates: float = 0.0
    macs: float = 0.0
    accumulates: float = 0.0
    words: float = 0.0  # states read and written


def neuron_costs(actor: Any) -> NeuronCosts:
    """Of one action. A leak or a decay is a multiply-accumulate, adding the current an accumulate;
    comparing and resetting are not counted. A receptive field is two multiply-accumulates and an
    accumulate (the exponential is not counted), its integrator an accumulate a step."""
    if isinstance(actor, DenseActor):
        return NeuronCosts()
    config = actor.config
    updates = config.time_steps * sum(layer.linear.out_features for layer in actor.layers)
    kept = states(config.neuron)
    macs, accumulates = updates * kept, 0 if config.neuron == "cuba" else updates
    words = 2 * kept * updates
    if config.decoder == "membrane":
        integrated = config.time_steps * actor.readout.linear.out_features
        updates, macs = updates + integrated, macs + integrated
        accumulates, words = accumulates + integrated, words + 2 * integrated
    if actor.encoder is not None:
        fields = actor.encoder.size
        macs, accumulates = macs + 2 * fields, accumulates + fields
        if config.encoder == "population":
            stepped = config.time_steps * fields
            updates, accumulates, words = (
                updates + stepped,
                accumulates + stepped,
                words + 2 * stepped,
            )
    return NeuronCosts(updates, macs, accumulates, words)


def footprint(actor: Any) -> int:
    """Numbers that a deployed actor holds: weights, biases, fields, and working state: voltages and
    synaptic currents, or a dense actor's widest layer twice."""
    held = sum(p.numel() for name, p in actor.named_parameters() if "log_std" not in name)
    layers = actor.layers
    if isinstance(actor, DenseActor):
        return held + 2 * max(layer.out_features for layer in layers)
    neurons = sum(layer.linear.out_features for layer in layers)
    return held + states(actor.config.neuron) * neurons


def states(neuron: str) -> int:
    """Numbers that a neuron keeps from step to step."""
    return 2 if neuron in ("cuba", "clif", "alif") else 1


# -- joules ------------------------------------------------------------------------------------


def joules(counts: Counts, model: Model, held: int) -> dict[str, float]:
    """Of one action: arithmetic alone, and with memory traffic where `held` numbers are kept."""
    macs = counts.macs + counts.neuron_macs
    arithmetic = model.mac * macs + model.accumulate * (
        counts.accumulates + counts.neuron_accumulates
    )
    size = held * model.bytes
    byte = next(price for bound, price in MEMORIES if size <= bound)
    traffic = counts.memory_words * model.bytes * byte
    return {"arithmetic": arithmetic * 1e-12, "with_memory": (arithmetic + traffic) * 1e-12}


def account(
    manager: Manager,
    dense: Manager | None,
    *,
    episodes: int = 10,
    seed: int = 0,
    models: Mapping[str, Model] = MODELS,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """An agent's counts and joules an action and an episode, beside the dense actor of the task.

    The dense actor has the agent's own hidden layers; its ReLU zeros are known where `dense` is a
    trained one. Raises ConfigError where that is no dense agent of the same task.
    """
    if dense is not None and (dense.config.san or dense.config.env != manager.config.env):
        raise ConfigError(
            f"--dense: expected a dense agent of {manager.config.env}, found a "
            f"{dense.config.actor_name} one of {dense.config.env}"
        )
    observations, returns = play(manager, episodes, seed, on_step)
    actor, steps = export.plain_actor(manager.algorithm), len(observations) / episodes
    counts = count(actor, normalized(manager, observations))
    own = dense if manager.config.san else manager  # whose ReLU zeros are known
    if own is None:
        sizes = manager.observation_size, manager.action_size
        plain = ActorConfig(hidden=manager.config.actor.hidden)
        rival: DenseActor = DenseActor(plain, *sizes).requires_grad_(False)
        relu = count(rival, normalized(manager, observations))
    else:
        seen = observations if own is manager else play(own, episodes, seed, on_step)[0]
        rival = export.plain_actor(own.algorithm)
        relu = count(rival, normalized(own, seen))
    skipped = relu.all_macs - relu.macs
    full = relu._replace(macs=relu.all_macs, memory_words=relu.memory_words + skipped)
    sides = {"agent": (actor, counts), "dense_all": (rival, full)}
    if own is not None:
        sides["dense_without_zeros"] = rival, relu
    result: dict[str, Any] = {
        "env": manager.config.env,
        "actor": manager.config.actor_name,
        "checkpoint": manager.loaded_from,
        "step": manager.step,
        "episodes": episodes,
        "seed": seed,
        "return_mean": float(np.mean(returns)),
        "length_mean": steps,
        "firing_rate": manager.policy.firing_rates(observations),
        "dense_run": None if own is None else str(own.run_dir),
        "action": {name: side._asdict() for name, (_, side) in sides.items()},
        "episode": {name: value * steps for name, value in counts._asdict().items()
                    if name != "activation_sparsity"},
        "footprint_values": {name: footprint(of) for name, (of, _) in sides.items()},
        "models": {name: model._asdict() | {"joules": {
            side: joules(of, model, footprint(who)) for side, (who, of) in sides.items()
        }} for name, model in models.items()},
        "nvml_training_joules": measured(manager),
    }  # fmt: skip
    if counts.synapses:  # none where no product is fed by spikes
        rate, time_steps = counts.accumulates / counts.synapses, actor.config.time_steps
        result |= {"time_steps": time_steps, "spike_rate": rate}
        for name, model in models.items():
            rates = {"dense_all": model.mac / (time_steps * model.accumulate)}
            if own is not None:
                rates["dense_without_zeros"] = rates["dense_all"] * (1 - relu.activation_sparsity)
            result["models"][name]["break_even_rate"] = rates
            result["models"][name]["side"] = {
                against: "below" if rate < even else "above" for against, even in rates.items()
            }
    return result


def normalized(manager: Manager, observations: np.ndarray) -> Tensor:
    algorithm = manager.algorithm
    return algorithm.normalize(torch.from_numpy(observations).to(algorithm.device)).cpu()


def measured(manager: Manager) -> float | None:
    """What NVML says the whole GPU drew while the agent was trained (J); None where it was not."""
    metrics = (manager.run_dir or Path()) / "metrics.jsonl"
    return (last_value(metrics, "gpu/energy_joules") or None) if metrics.exists() else None


def play(
    manager: Manager, episodes: int, seed: int, on_step: Callable[[str], None]
) -> tuple[np.ndarray, list[float]]:
    """Observations of all episodes, [steps, obs], and their returns: those that evaluate runs."""
    env = Episodic(manager.evaluation_env())
    played = []
    for i in range(episodes):
        on_step(f"episode {i + 1} of {episodes}")
        played.append(run_episode(manager.policy, env, episode_seed(EVALUATION, seed, i)))
    env.close()
    return np.concatenate([seen for _, seen in played]), [total for total, _ in played]


def keep(result: dict[str, Any], run_dir: Path, name: str) -> None:
    """Leave a result in a run, where `compare` finds it; an agent directory stays as it is."""
    if (run_dir / "run.json").exists():
        text = json.dumps(result, indent=1) + "\n"
        write_atomically(run_dir / name, lambda file: file.write(text.encode()))


# -- as text -----------------------------------------------------------------------------------

HEADS = {
    "agent": "this agent",
    "dense_all": "dense",
    "dense_without_zeros": "dense, no zeros",
}
ROWS = {
    "macs": "multiply-accumulates",
    "accumulates": "synaptic accumulates",
    "neuron_updates": "neuron updates",
    "memory_words": "values read, written",
}


def tables(result: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Titles and cells: counts, modelled joules, break-even rates, and what was measured. `no
    zeros` skips the products of a ReLU's zeros."""
    title = f"{result['env']}, {result['actor']} actor, step {result['step']:,}: "
    title += f"{result['episodes']} episodes, mean return {result['return_mean']:.1f}"
    joules = result["nvml_training_joules"]
    told = "not measured" if joules is None else f"{joules / 1e3:,.1f} kJ"
    return [
        (title, count_rows(result)),
        ("modelled, not measured", joule_rows(result)),
        ("", break_even_rows(result)),
        ("", [["measured by NVML", "whole GPU, training"], ["", told]]),
    ]


def count_rows(result: dict[str, Any]) -> list[list[str]]:
    action, episode = result["action"], result["episode"]
    blank = [""] * (len(action) - 1)
    rows = [["an action", *(HEADS[side] for side in action), "an episode"]]
    for key, name in ROWS.items():
        cells = [f"{counts[key]:,.0f}" for counts in action.values()]
        rows.append([name, *cells, f"{episode[key]:,.0f}"])
    known = [side != "dense_all" or result["dense_run"] is not None for side in action]
    sparsity = [counts["activation_sparsity"] for counts in action.values()]
    cells = [f"{s:.3f}" if k else "" for s, k in zip(sparsity, known, strict=True)]
    rows.append(["activation sparsity", *cells, ""])
    for precision, size in (("float32", 4), ("int8", 1)):
        held = [number(size * values / 1024) for values in result["footprint_values"].values()]
        rows.append([f"KiB held, {precision}", *held, ""])
    for layer, rate in enumerate(result["firing_rate"] or ()):
        rows.append([f"firing rate, layer {layer}", f"{rate:.3f}", *blank, ""])
    return rows


def joule_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = [["nJ an action", "", *(HEADS[side] for side in result["action"]), "an episode"]]
    for name, model in result["models"].items():
        for kind in ("arithmetic", "with_memory"):
            cells = [number(1e9 * joules[kind]) for joules in model["joules"].values()]
            episode = number(1e6 * model["joules"]["agent"][kind] * result["length_mean"])
            episode += " µJ"
            rows.append([name * (kind == "arithmetic"), kind.replace("_", " "), *cells, episode])
    return rows


def break_even_rows(result: dict[str, Any]) -> list[list[str]]:
    """The rate at which spikes cost what multiplications do; [] where no product is of spikes."""
    if "spike_rate" not in result:
        return []
    against = [side for side in HEADS if side in result["action"] and side != "agent"]
    rows = [["break-even firing rate", *(f"against {HEADS[side]}" for side in against)]]
    for name, model in result["models"].items():
        pairs = [(model["break_even_rate"][side], model["side"][side]) for side in against]
        cells = [f"{rate:.2f}, this agent {side}" for rate, side in pairs]
        rows.append([name, *cells])
    return [*rows, ["this agent's rate", f"{result['spike_rate']:.2f}", *[""] * (len(against) - 1)]]
