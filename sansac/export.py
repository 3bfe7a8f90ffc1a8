"""A trained agent taken out of Python: NIR, ONNX, torch.export, C.

Every format computes the deterministic policy, a raw observation to an action of the environment's
own scale, and every loader here gives it back as a function, numpy in, numpy out. BatchNorm is
folded into the weights; the log-std head stays behind.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium.spaces.utils import flatdim
from spikingjelly.logger import logger as spikingjelly
from torch import Tensor, nn

from sansac import checkpoint, export_c
from sansac.config import ConfigError
from sansac.environments import EVALUATION, ActionScale, Episodic, episode_seed
from sansac.evaluation import run_episode
from sansac.inference import neuron
from sansac.manager import Manager
from sansac.networks import fold_batch_norm
from sansac.off_policy import OffPolicy
from sansac.page import check_directory
from sansac.spiking import FUSED, MembraneReadout, SpikingActor, readout_linear

Format = Literal["nir", "onnx", "torch", "c"]
Act = Callable[[np.ndarray], np.ndarray]  # one observation [obs] -> one action [act]

FILES = {
    "actor.nir",
    "actor.onnx",
    "actor.pt2",
    "actor.c",
    "preprocessing.onnx",
    "postprocessing.onnx",
}
OPSET = 18  # of every ONNX file written here
EQUAL = 1e-5  # largest difference of actions that rounding explains where no spike tips over
DT = 1e-4  # seconds a simulation step of a NIR graph; what snnTorch and Norse assume
CALIBRATION = 5  # episodes that an int8 file is calibrated on where the run keeps no replay buffer
MOST_CALIBRATION = 10_000  # observations that it is calibrated on


class Check(NamedTuple):
    """What was exported, played beside the policy it came from."""

    episodes: int
    observations: int  # of the policy's episodes
    differing: int  # of those, on how many the actions differ by more than EQUAL
    largest_difference: float  # of an action entry
    policy_return: float  # mean over episodes
    exported_return: float


# -- what can be exported ----------------------------------------------------------------------


def check_exportable(algorithm: OffPolicy, format: Format) -> None:
    """Raises ConfigError with the reason and the nearest setting that can be exported."""
    actor, config = algorithm.policy_actor, algorithm.config
    if not isinstance(actor, SpikingActor):
        if format == "nir":
            refuse(format, "a dense actor has no neurons", "--format onnx, or an agent of --san")
        if config.actor.levels and format == "c":
            refuse(format, "its dense activations are ReLUs", "--format onnx, or actor.levels 0")
    else:
        spiking = actor.config
        if spiking.neuron not in FUSED:
            nearest = f"spiking.neuron lif (or {', '.join(FUSED[1:])})"
            refuse(format, f"the neuron {spiking.neuron!r} exists in no other simulator", nearest)
        if spiking.encoder == "poisson":
            refuse(
                format, "the encoder 'poisson' draws random numbers", "spiking.encoder population"
            )
        if spiking.output_connections and format in ("nir", "c"):
            why = "connections within output populations feed spikes back"
            refuse(format, why, "--format onnx, or no spiking.output_connections")
        taus = [neuron(actor, i).decay for i in range(len(actor.layers))]
        if format == "nir" and spiking.neuron == "plif" and min(taus) <= 1:
            why = "SpikingJelly's time constants are above 1, and one was learned to be 1"
            refuse(format, why, "--format c")
    if config.actor.layer_norm and format in ("nir", "c"):
        why = "LayerNorm takes statistics of every input and does not fold into weights"
        refuse(format, why, "actor.batch_norm, which folds, or --format onnx")


def refuse(format: Format, why: str, nearest: str) -> None:
    raise ConfigError(f"--format {format}: {why}; the nearest that can be exported: {nearest}")


def needed(name: str) -> ModuleType:
    """A package that only exported files need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{error}: pip install -e .[export], or: pip install {name}") from None


# -- the policy as one module of plain torch ---------------------------------------------------


class Deployed(nn.Module):
    """Raw observations [B, obs] -> actions of the environment's scale [B, act]."""

    def __init__(self, algorithm: OffPolicy, scale: ActionScale) -> None:
        super().__init__()
        self.normalize = normalizer(algorithm)
        self.actor = plain_actor(algorithm)
        self.output = Output(scale)

    def forward(self, observation: Tensor) -> Tensor:
        return self.output(self.actor(self.normalize(observation))[0])


class Output(nn.Module):
    """The tanh of the mean, and the environment's scale: [B, act] in and out."""

    low: Tensor
    high: Tensor

    def __init__(self, scale: ActionScale) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(scale.low).float())
        self.register_buffer("high", torch.tensor(scale.high).float())

    def forward(self, mean: Tensor) -> Tensor:
        share = (torch.tanh(mean) + 1) * 0.5
        scaled = (1 - share) * self.low + share * self.high
        return torch.minimum(torch.maximum(scaled, self.low), self.high)  # rounding may pass them


class Normalize(nn.Module):
    """`RunningNorm` as it is now, in float32."""

    centre: Tensor
    scale: Tensor

    def __init__(self, centre: Tensor, scale: Tensor, clip: float) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("centre", centre.cpu().clone())
        self.register_buffer("scale", scale.cpu().clone())

    def forward(self, observation: Tensor) -> Tensor:
        return ((observation - self.centre) * self.scale).clamp(-self.clip, self.clip)


def normalizer(algorithm: OffPolicy) -> nn.Module:
    norm = algorithm.norm
    if not algorithm.config.normalize_observations:
        return nn.Identity()
    return Normalize(norm.centre, norm.scale, norm.clip)


def plain_actor(algorithm: OffPolicy) -> Any:
    """A folded copy of the policy's actor on the CPU: neurons in plain torch, no log-std head."""
    actor: Any = fold_batch_norm(algorithm.policy_actor) if folds(algorithm) else copy.deepcopy(
        algorithm.policy_actor
    )  # fmt: skip
    actor = actor.cpu().eval().requires_grad_(False)
    actor.log_std = nn.Identity()
    for module in actor.modules():
        if hasattr(module, "config"):
            module.config = module.config.model_copy(update={"backend": "torch"})
    return actor


def folds(algorithm: OffPolicy) -> bool:
    return not algorithm.config.actor.layer_norm


# -- ONNX and torch.export ---------------------------------------------------------------------


def export_torch(manager: Manager, out: Path) -> None:
    module, observation = Deployed(manager.algorithm, manager.scale), example(manager)
    torch.export.save(program(module, observation), out / "actor.pt2")


def export_onnx(manager: Manager, out: Path) -> None:
    module = Deployed(manager.algorithm, manager.scale)
    write_onnx(module, example(manager), out / "actor.onnx", "observation", "action")


def example(manager: Manager) -> Tensor:
    return torch.zeros(2, manager.observation_size)


def program(module: nn.Module, x: Tensor, axis: int = 0) -> torch.export.ExportedProgram:
    """A torch.export program of any batch size."""
    with torch.no_grad(), quiet():
        shapes = ({axis: torch.export.Dim("batch")},)
        return torch.export.export(module.eval(), (x,), dynamic_shapes=shapes)


def write_onnx(
    module: nn.Module, x: Tensor, path: Path, input: str, output: str, axis: int = 0
) -> None:
    """One ONNX file of opset OPSET; `axis` of its input is of any size."""
    needed("onnxscript")
    with quiet():
        written = torch.onnx.export(
            program(module, x, axis), opset_version=OPSET, dynamo=True, verbose=False,
            input_names=[input], output_names=[output],
        )  # fmt: skip
    assert written is not None
    written.save(path)


@contextmanager
def quiet() -> Iterator[None]:
    """The exporters tell their progress and their own deprecations; neither is for our user."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    spikingjelly.disable("spikingjelly")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        spikingjelly.enable("spikingjelly")


def load_onnx(path: Path, input: str, output: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function of an array, run by onnxruntime in one thread."""
    runtime = needed("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run([output], {input: x})[0]


# -- NIR ---------------------------------------------------------------------------------------


class Centred(nn.Module):
    """[B, obs] -> [T, B, obs]: less the normaliser's mean and clipped, in raw units, the same at
    every step."""

    centre: Tensor
    reach: Tensor

    def __init__(self, centre: Tensor, reach: Tensor, time_steps: int) -> None:
        super().__init__()
        self.time_steps = time_steps
        self.register_buffer("centre", centre)
        self.register_buffer("reach", reach)

    def forward(self, observation: Tensor) -> Tensor:
        centred = observation - self.centre
        clipped = torch.minimum(torch.maximum(centred, -self.reach), self.reach)
        return clipped.expand(self.time_steps, -1, -1)


class Fields(nn.Module):
    """[B, obs] -> what the population encoder sends into the graph, [T, B, obs * population]."""

    def __init__(self, normalize: nn.Module, encoder: nn.Module, time_steps: int) -> None:
        super().__init__()
        self.normalize, self.encoder, self.time_steps = normalize, encoder, time_steps

    def forward(self, observation: Tensor) -> Tensor:
        x = self.encoder(self.normalize(observation))
        return x if x.dim() == 3 else x.expand(self.time_steps, -1, -1)


class Readout(nn.Module):
    """What the graph puts out, [T, B, act] -> actions [B, act]."""

    def __init__(self, actor: SpikingActor, scale: ActionScale) -> None:
        super().__init__()
        self.membrane: nn.Module | None = None
        if actor.config.decoder == "membrane":
            self.membrane = copy.deepcopy(actor.readout)
            assert isinstance(self.membrane, MembraneReadout)
            self.membrane.linear = nn.Identity()  # type: ignore[assignment]  # the graph's last node
        self.output = Output(scale)

    def forward(self, current: Tensor) -> Tensor:
        return self.output(current.mean(0) if self.membrane is None else self.membrane(current))


def export_nir(manager: Manager, out: Path) -> None:
    """actor.nir, preprocessing.onnx, postprocessing.onnx."""
    for package in ("nir", "nirtorch"):
        needed(package)
    from spikingjelly.activation_based import neuron as neurons
    from spikingjelly.activation_based.nir_exchange import export_to_nir

    algorithm = manager.algorithm
    actor = plain_actor(algorithm)
    products = [layer.linear for layer in actor.layers] + [readout_linear(actor)]
    before: nn.Module
    if actor.encoder is None:
        before, products[0] = fold_norm(algorithm, products[0], actor.config.time_steps)
    else:
        before = Fields(normalizer(algorithm), actor.encoder, actor.config.time_steps)
    parts: list[nn.Module] = []
    for i, product in enumerate(products):
        parts.append(product)
        if i == len(products) - 1:
            break
        of = neuron(actor, i)
        common: dict[str, Any] = {"v_threshold": of.v_threshold, "v_reset": 0.0}
        if of.current_based:
            parts.append(neurons.CUBALIFNode(of.current_decay, of.decay, **common))
        else:
            parts.append(neurons.LIFNode(of.decay, of.decay_input, **common))
    inputs = products[0].in_features
    with quiet():
        export_to_nir(nn.Sequential(*parts), torch.zeros(1, inputs), out / "actor.nir", dt=DT)
    write_onnx(before, example(manager), out / "preprocessing.onnx", "observation", "input")
    after = Readout(actor, manager.scale)
    currents = torch.zeros(actor.config.time_steps, 2, manager.action_size)
    write_onnx(after, currents, out / "postprocessing.onnx", "output", "action", axis=1)


def fold_norm(
    algorithm: OffPolicy, linear: nn.Linear, time_steps: int
) -> tuple[Centred, nn.Linear]:
    """The normaliser's scale folded into a product; its mean, which would cancel there against an
    observation that hardly varies, and its clip are left."""
    folded = copy.deepcopy(linear)
    if algorithm.config.normalize_observations:
        with torch.no_grad():
            folded.weight.mul_(algorithm.norm.scale.cpu())
    return Centred(*centre_and_reach(algorithm), time_steps), folded


def centre_and_reach(algorithm: OffPolicy) -> tuple[Tensor, Tensor]:
    """The normaliser's mean, and how far from it the policy tells observations apart, [obs]."""
    centre, scale = algorithm.norm.centre.cpu(), algorithm.norm.scale.cpu()
    if not algorithm.config.normalize_observations:
        return torch.zeros_like(centre), torch.full_like(centre, torch.inf)
    return centre, algorithm.norm.clip / scale


def load_nir(directory: Path) -> Act:
    """The three parts together, the graph simulated by SpikingJelly."""
    for package in ("nir", "nirtorch"):
        needed(package)
    from spikingjelly.activation_based.nir_exchange import import_from_nir

    before = load_onnx(directory / "preprocessing.onnx", "observation", "input")
    after = load_onnx(directory / "postprocessing.onnx", "output", "action")
    with quiet():
        graph = import_from_nir(directory / "actor.nir", dt=DT)

    @torch.no_grad()
    def act(observation: np.ndarray) -> np.ndarray:
        state, outputs = None, []
        for step in torch.from_numpy(before(observation[None])):
            current, state = graph(step, state)
            outputs.append(current)
        return after(torch.stack(outputs).numpy())[0]

    return act


# -- one command -------------------------------------------------------------------------------


def load(format: Format, directory: Path) -> Act:
    """What a directory of `export` holds, as a function. Raises ConfigError for what is missing."""
    if format == "nir":
        return load_nir(directory)
    if format == "onnx":
        run = load_onnx(directory / "actor.onnx", "observation", "action")
        return lambda observation: run(observation[None])[0]
    if format == "c":
        return export_c.load(directory / "actor.c")
    with quiet():
        module = torch.export.load(directory / "actor.pt2").module()

    @torch.no_grad()
    def act(observation: np.ndarray) -> np.ndarray:
        return module(torch.from_numpy(observation)[None])[0].numpy()

    return act


def export(
    manager: Manager,
    format: Format,
    out: Path,
    *,
    int8: bool = False,
    episodes: int = 10,
    overwrite: bool = False,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write `out` and play it beside the policy; what was written and found, as JSON has it.

    `out` is untouched until all its files are whole. Raises ConfigError for an actor that the
    format cannot hold, for int8 in another format than c, and for packages that are missing.
    """
    check_directory(out, overwrite)
    if int8 and format != "c":
        raise ConfigError(f"--int8: only --format c holds int8 weights, not {format}")
    check_exportable(manager.algorithm, format)
    if not all(p.isfinite().all() for p in manager.algorithm.policy_actor.parameters()):
        raise ConfigError("the agent's weights are not all finite: export an earlier checkpoint")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {out.parent}: {error.strerror}") from None
    result: dict[str, Any] = {
        "format": format,
        "env": manager.config.env,
        "actor": manager.config.actor_name,
        "checkpoint": manager.loaded_from,
        "step": manager.step,
        "observation_size": manager.observation_size,
        "action_size": manager.action_size,
        "goal_order": goal_order(manager),
    }
    try:
        on_step("writing")
        if format == "c":
            observations, origin = calibration(manager) if int8 else (None, None)
            source, sizes = export_c.source(manager.algorithm, manager.scale, observations)
            (part / "actor.c").write_text(source)
            result |= {"precision": "int8" if int8 else "float32", "calibrated_on": origin, **sizes}
        else:
            {"nir": export_nir, "onnx": export_onnx, "torch": export_torch}[format](manager, part)
        if format in ("nir", "onnx"):
            result["opset"] = OPSET
        if format == "nir":
            centre, reach = centre_and_reach(manager.algorithm)
            result |= {"time_steps": manager.config.spiking.time_steps, "dt": DT}
            if manager.config.spiking.encoder == "current":
                result |= {"centre": centre.tolist(), "reach": reach.tolist()}
        if episodes and (format != "c" or export_c.compiler()):
            result |= check(manager, load(format, part), episodes, on_step)._asdict()
        (part / "README.md").write_text(card(result))
        out.mkdir(exist_ok=True)
        result["files"] = sorted(file.name for file in part.iterdir())
        for name in result["files"]:
            os.replace(part / name, out / name)
        for name in FILES - set(result["files"]):  # of another format, which was here before
            (out / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(part)
    return result


def goal_order(manager: Manager) -> list[str]:
    """The parts of a goal-conditioned observation as one vector has them; [] of another."""
    if manager.goals is None:
        return []
    env = manager.evaluation_env()
    space: Any = env.unwrapped.observation_space
    env.close()
    return [f"{key} [{flatdim(part)}]" for key, part in space.spaces.items()]


def calibration(manager: Manager) -> tuple[np.ndarray, str]:
    """Observations [N, obs] that an int8 file is calibrated on, and where they are from: the replay
    buffer in the run's checkpoint, or where there is none episodes that no evaluation uses."""
    last = (manager.run_dir or Path()) / "checkpoints" / "last.pt"
    kept = checkpoint.load(last)["replay"]["rows"] if last.exists() else {}
    if len(kept.get("observation", ())):  # rows on disk are not in the checkpoint
        rows = kept["observation"].float().numpy()
        keep = np.unique(np.linspace(0, len(rows) - 1, MOST_CALIBRATION).astype(int))
        return rows[keep], "the replay buffer"
    env = Episodic(manager.evaluation_env())
    seeds = [episode_seed(EVALUATION, manager.config.seed, i, 1) for i in range(CALIBRATION)]
    episodes = [run_episode(manager.policy, env, seed)[1] for seed in seeds]
    env.close()
    return np.concatenate(episodes)[:MOST_CALIBRATION], f"{CALIBRATION} episodes of the policy"


def check(
    manager: Manager, act: Act, episodes: int, on_step: Callable[[str], None] = lambda _: None
) -> Check:
    """Play `act` and the policy over the same evaluation episodes, each on its own; actions are
    compared on the observations of the policy's."""
    env = Episodic(manager.evaluation_env())
    returns, differences = [], []
    for i in range(episodes):
        on_step(f"episode {i + 1} of {episodes}")
        seed = episode_seed(EVALUATION, 0, i)
        total, observations = run_episode(manager.policy, env, seed)
        differences += [np.abs(act(o) - manager.policy(o)).max() for o in observations]
        returns.append((total, run_episode(act, env, seed)[0]))
    env.close()
    policy, exported = np.mean(returns, axis=0)
    differing = sum(difference > EQUAL for difference in differences)
    return Check(
        episodes, len(differences), int(differing), float(max(differences)),
        float(policy), float(exported),
    )  # fmt: skip


def card(result: dict[str, Any]) -> str:
    """README.md of an exported directory."""
    sizes = f"[{result['observation_size']}]", f"[{result['action_size']}]"
    lines = [
        f"# {result['env']}, {result['actor']} actor, as {result['format']}",
        "",
        f"The deterministic policy of a sansac agent after {result['step']:,} environment steps: "
        f"raw observations {sizes[0]} to actions {sizes[1]} in the environment's own scale.",
        "",
        HOW_TO[result["format"]].format(**{"opset": "", "dt": "", "time_steps": "", **result}),
    ]  # fmt: skip
    if result["goal_order"]:
        lines += ["", f"An observation is, in this order: {', '.join(result['goal_order'])}."]
    if "centre" in result:
        lines += ["", "In raw units:", "", "| entry | mean | clipped beyond |", "|---:|---:|---:|"]
        pairs = zip(result["centre"], result["reach"], strict=True)
        lines += [f"| {i} | {mean:.6g} | {reach:.6g} |" for i, (mean, reach) in enumerate(pairs)]
    if "flash_bytes" in result:
        lines += ["", *(f"- {line}" for line in export_c.told(result))]
    if "largest_difference" in result:
        lines += ["", told(result)]
    return "\n".join(lines) + "\n"


def told(result: dict[str, Any]) -> str:
    return (
        f"Played beside the policy over {result['episodes']} episodes: mean return "
        f"{result['exported_return']:.1f}, the policy's {result['policy_return']:.1f}; on "
        f"{result['differing']:,} of {result['observations']:,} observations the actions differ by "
        f"more than {EQUAL:g}, at most {result['largest_difference']:.1e}."
    )


HOW_TO = {
    "nir": """`actor.nir` holds products and neurons, the normaliser's scale folded into the first
product of an encoder `current`; a step is {dt} s. For one observation: `preprocessing.onnx` (opset
{opset}) maps `observation` [B, obs] to `input` [T, B, n], T = {time_steps}: less the mean and
clipped, or the fields. The graph runs T steps from its initial state. `postprocessing.onnx` maps
its T outputs, `output` [T, B, act], to `action` [B, act]: their mean (or the read-out's
integrator), the tanh and the action scale.""",
    "onnx": """`actor.onnx` (opset {opset}): `observation` [batch, obs] to `action` [batch, act],
float32, any batch. Normalisation, its clip, the simulation steps, the tanh and the action scale are
inside. Observations are not checked for NaN.""",
    "torch": """`torch.export.load("actor.pt2").module()` maps float32 observations [batch, obs] to
actions [batch, act], any batch. Observations are not checked for NaN.""",
    "c": """`actor.c` is C99 and needs nothing but the C library:
`int sansac_act(const float observation[], float action[])` returns 0, or -1 where an observation is
not finite, and then leaves the action alone. `cc -std=c99 -O2 -DSANSAC_PIPE actor.c -lm -o actor`
makes a program that reads an observation a line and answers an action a line.""",
}
