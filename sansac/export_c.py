"""A policy as one C99 file for microcontrollers: tables made here, the code of actor.c after them.

float32 repeats the arithmetic of `inference.action_mean` in its order. int8 has int8 weights, a
step an output neuron, and int32 sums; what enters a product that is not fed by spikes is rounded to
8 bits, its step the calibration observations' largest value / 127. Voltages stay float32 in both.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sansac.config import ConfigError
from sansac.environments import ActionScale
from sansac.inference import neuron
from sansac.networks import DenseActor, fold_batch_norm
from sansac.off_policy import OffPolicy
from sansac.spiking import MembraneReadout, SpikingActor, readout_linear

SOURCE = Path(__file__).with_name("actor.c")
FLAGS = (
    "-std=c99", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion",
    "-Wshadow", "-Wdouble-promotion", "-Wstrict-prototypes", "-Wmissing-prototypes", "-Werror",
)  # fmt: skip


class Layer(NamedTuple):
    """A product and what it ends in: neurons of these constants, ReLU, or nothing."""

    weight: np.ndarray  # [inputs, outputs]
    bias: np.ndarray
    spikes: bool  # whether spikes enter it
    decay: float = 0.0
    threshold: float = 0.0


def source(
    algorithm: OffPolicy, scale: ActionScale, calibration: np.ndarray | None
) -> tuple[str, dict[str, Any]]:
    """The file, with int8 weights where there are observations to calibrate on, [N, obs]; and what
    it takes: flash and RAM in bytes, operations an action."""
    actor: Any = fold_batch_norm(algorithm.policy_actor).cpu().eval()
    layers = read_layers(actor)
    steps = None if calibration is None else input_steps(algorithm, actor, calibration)
    spiking = isinstance(actor, SpikingActor)
    norm = algorithm.norm if algorithm.config.normalize_observations else None
    tables: list[tuple[str, np.ndarray]] = []
    if norm is not None:
        tables += [("centre", norm.centre.cpu().numpy()), ("scale", norm.scale.cpu().numpy())]
    tables += [("low", scale.low), ("high", scale.high)]
    if spiking and actor.encoder is not None:
        tables.append(("field_mean", array(actor.encoder.mean).ravel()))
        tables.append(("field_std", array(actor.encoder.std).ravel()))
    rows, neurons = [], 0
    for i, layer in enumerate(layers):
        cells = [f"weight_{i}", f"bias_{i}"]
        if steps is None:
            tables.append((f"weight_{i}", layer.weight.ravel()))
        else:
            quantised, step = quantise(layer.weight)
            tables += [(f"weight_{i}", quantised.ravel()), (f"weight_step_{i}", step)]
            cells += [f"weight_step_{i}", literal(steps[i])]
        tables.append((f"bias_{i}", layer.bias))
        inputs, outputs = layer.weight.shape
        if spiking:
            cells += [literal(layer.decay), literal(layer.threshold), str(neurons)]
            neurons += outputs if i < len(layers) - 1 else 0
        rows.append("{" + ", ".join([*cells, str(inputs), str(outputs)]) + "}")
    widest = max(max(layer.weight.shape) for layer in layers)
    defined = definitions(algorithm, actor, layers, neurons, widest, steps is not None)
    text = "\n".join([
        f"/* The policy of a sansac agent on {algorithm.config.env}, {algorithm.config.actor_name} "
        f"actor, {'float32' if steps is None else 'int8'}.",
        " * sansac_act() below is all that is called; -DSANSAC_PIPE adds a main(). */",
        "#ifdef __clang__", "#pragma STDC FP_CONTRACT OFF", "#endif",
        "#include <math.h>", "#include <stdint.h>", "#include <string.h>", "",
        *(f"#define {name} {value}" for name, value in defined.items()), "",
        *(table(name, values) for name, values in tables),
        struct(spiking, steps is not None),
        "static const struct layer layers[LAYERS] = {", ",\n".join(rows), "};", "",
    ])  # fmt: skip
    flash = sum(a.size * (1 if a.dtype == np.int8 else 4) for _, a in tables)
    return text + SOURCE.read_text(), {
        "flash_bytes": flash,
        "ram_bytes": ram(actor, neurons, widest, steps is not None),
        **operations(actor, layers, neurons),
    }


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def read_layers(actor: Any) -> list[Layer]:
    """Every product of a folded actor, the read-out last."""
    if isinstance(actor, DenseActor):
        products = [*actor.layers, actor.mean]
        return [Layer(array(p.weight).T.copy(), array(p.bias), False) for p in products]
    spikes = actor.config.encoder == "population"
    layers = []
    for i, layer in enumerate(actor.layers):
        of, linear = neuron(actor, i), layer.linear
        weight = array(linear.weight).T.copy()
        layers.append(Layer(weight, array(linear.bias), spikes or i > 0, of.decay, of.v_threshold))
    linear, membrane = readout_linear(actor), isinstance(actor.readout, MembraneReadout)
    return [*layers, Layer(array(linear.weight).T.copy(), array(linear.bias), membrane)]


@torch.no_grad()
def input_steps(algorithm: OffPolicy, actor: Any, observations: np.ndarray) -> list[float]:
    """The 8-bit step of each product's input over raw observations [N, obs]; 1 for spikes."""
    x = algorithm.normalize(torch.from_numpy(observations).to(algorithm.device)).cpu()
    if isinstance(actor, SpikingActor):
        first = x if actor.encoder is None else actor.encoder.activation(x)
        analogue = actor.config.encoder != "population"
        steps = [step(first) if analogue else 1.0] + [1.0] * (len(actor.layers) - 1)
        return [*steps, 1.0 if actor.config.decoder == "membrane" else 1 / actor.config.time_steps]
    steps = [step(x)]
    for layer in actor.layers:
        x = torch.relu(layer(x))
        steps.append(step(x))
    return steps


def step(x: Tensor) -> float:
    return float(x.abs().max()) / 127 or 1.0


def quantise(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 weights [inputs, outputs] and the step of each output."""
    steps = np.abs(weight).max(0) / 127
    steps[steps == 0] = 1.0
    return np.rint(weight / steps).astype(np.int8), steps.astype(np.float32)


def definitions(
    algorithm: OffPolicy, actor: Any, layers: list[Layer], neurons: int, widest: int, int8: bool
) -> dict[str, Any]:
    """What actor.c is compiled with."""
    defined: dict[str, Any] = {
        "INT8": int(int8),
        "OBSERVATIONS": algorithm.norm.mean.numel(),
        "ACTIONS": layers[-1].weight.shape[1],
        "LAYERS": len(layers),
        "WIDEST": widest,
        "NORMALIZED": int(algorithm.config.normalize_observations),
        "CLIP": literal(algorithm.norm.clip),
        "STEPS": 0,
    }
    if not isinstance(actor, SpikingActor):
        return defined
    config = actor.config
    return defined | {
        "STEPS": config.time_steps,
        "NEURONS": neurons,
        "CURRENT_BASED": int(config.neuron == "cuba"),
        "CURRENT_DECAY": literal(config.current_decay),
        "DECAY_INPUT": int(config.decay_input),
        "FIELDS": 0 if actor.encoder is None else config.input_population,
        "ENCODED_SPIKES": int(config.encoder == "population"),
        "LAST": 1,
        "MEAN": 2,
        "MAX": 3,
        "MEMBRANE": config.membrane.upper() if config.decoder == "membrane" else 0,
        "MEMBRANE_TAU": literal(config.membrane_tau),
    }


def struct(spiking: bool, int8: bool) -> str:
    parts = [f"const {'int8_t' if int8 else 'float'} *weight; /* [inputs][outputs] */"]
    parts += ["const float *bias;"]
    parts += ["const float *weight_step; float input_step;"] * int8
    parts += ["float decay, threshold; int first; /* its first neuron */"] * spiking
    return "\n".join(["struct layer {", *(f"    {part}" for part in parts),
                      "    int inputs, outputs;", "};", ""])  # fmt: skip


def table(name: str, values: np.ndarray) -> str:
    if values.dtype == np.int8:
        kind, cells = "int8_t", [str(value) for value in values.tolist()]
    else:
        kind, cells = "float", [literal(value) for value in values]
    lines = [", ".join(cells[i : i + 12]) for i in range(0, len(cells), 12)]
    return f"static const {kind} {name}[{len(cells)}] = {{\n" + ",\n".join(lines) + "};\n"


def literal(value: float) -> str:
    """A float constant of C that reads back to the same float32."""
    text = f"{np.float32(value):.9g}"
    return (text if set(text) & set(".e") else text + ".0") + "f"


def ram(actor: Any, neurons: int, widest: int, int8: bool) -> int:
    """Static working memory of actor.c: `x`, `current`; of a spiking actor also `first`, `spikes`,
    `counts`, `activation`, voltages and synapses; of int8 `sums`."""
    size = 4 * 2 * widest + 4 * widest * int8
    if isinstance(actor, SpikingActor):
        config = actor.config
        size += 4 * widest + widest + widest * (config.decoder != "membrane")
        size += 4 * widest * (config.encoder == "population")
        size += 4 * neurons * (2 if config.neuron == "cuba" else 1)
    return size


def operations(actor: Any, layers: Iterable[Layer], neurons: int) -> dict[str, int]:
    """At most, in one action: where inputs are 0 and neurons silent there are fewer."""
    time_steps = actor.config.time_steps if isinstance(actor, SpikingActor) else 0
    return {
        "macs": sum(layer.weight.size for layer in layers if not layer.spikes),
        "most_accumulates": time_steps * sum(layer.weight.size for layer in layers if layer.spikes),
        "neuron_updates": time_steps * neurons,
    }


def told(result: dict[str, Any]) -> list[str]:
    """What a file takes, as text."""
    lines = [
        f"precision: {result['precision']}",
        f"flash: {result['flash_bytes']:,} bytes of tables, and the code",
        f"RAM: {result['ram_bytes']:,} bytes, static",
        f"operations an action: {result['macs']:,} multiply-accumulates, at most "
        f"{result['most_accumulates']:,} accumulates, {result['neuron_updates']:,} neuron updates",
    ]
    if result["calibrated_on"]:
        lines.insert(1, f"calibrated on {result['calibrated_on']}")
    return lines


# -- compiling ---------------------------------------------------------------------------------


def compiler() -> list[str] | None:
    """The C compiler of this machine, or the one that $CC names; None where it is not there."""
    if given := shlex.split(os.environ.get("CC", "")):
        return given if shutil.which(given[0]) else None
    found = [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    return found[:1] or None


def build(file: Path, target: Path, *more: str) -> None:
    """Compile with warnings as errors. Raises ConfigError without a compiler, or where it fails."""
    command = compiler()
    if command is None:
        raise ConfigError("there is no C compiler: install gcc or clang, or name one in CC")
    done = subprocess.run(
        [*command, *FLAGS, *more, str(file), "-lm", "-o", str(target)],
        capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode:
        raise ConfigError(f"{command[0]} does not compile {file}: {done.stderr}")


def load(file: Path) -> Callable[[np.ndarray], np.ndarray]:
    """The file compiled into this process: an observation [obs] to an action [act]. It raises
    ValueError for an observation that is not finite."""
    with tempfile.TemporaryDirectory() as directory:
        build(file, Path(directory) / "actor.so", "-shared", "-fPIC")
        library = ctypes.CDLL(str(Path(directory) / "actor.so"))
    text = file.read_text()
    observations, actions = (
        int(text.split(f"#define {name} ", 1)[1].split(None, 1)[0])
        for name in ("OBSERVATIONS", "ACTIONS")
    )
    observation, action = np.zeros(observations, np.float32), np.zeros(actions, np.float32)
    pointers = ctypes.c_void_p(observation.ctypes.data), ctypes.c_void_p(action.ctypes.data)

    def act(given: np.ndarray) -> np.ndarray:
        observation[:] = given
        if library.sansac_act(*pointers):
            raise ValueError(f"observation is not finite: {given}")
        return action.copy()

    return act
