"""Exported policies against runtimes and simulators that we did not write: onnxruntime,
SpikingJelly's NIR import, snnTorch, Norse, the C compiler."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Call, tiny
from gymnasium.spaces import Box, flatten
from gymnasium.wrappers import DtypeObservation
from test_hindsight import Reach, reaching

from sansac import export, export_c
from sansac.config import ConfigError
from sansac.environments import EVALUATION, ActionScale, Episodic, episode_seed
from sansac.evaluation import Policy, run_episode
from sansac.manager import Manager
from sansac.networks import RunningNorm

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

# Stacks by name: what each adds to a tiny configuration.
STACKS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense-folded": {"actor": {"batch_norm": True}},
    "lif": {"san": True},
    "lif-folded": {"san": True, "actor": {"batch_norm": True}, "spiking": {"time_steps": 4}},
    "lif-decayed": {"san": True, "spiking": {"decay_input": True, "tau": 2.0, "v_threshold": 0.1}},
    "plif": {"san": True, "spiking": {"neuron": "plif", "learn_threshold": True, "time_steps": 3}},
    "popsan": {
        "san": True,
        "spiking": {
            "neuron": "cuba", "encoder": "population", "decoder": "population", "time_steps": 5,
            "log_std": "mlp",
        },
    },
    "mdc": {
        "san": True,
        "spiking": {"encoder": "population-current", "decoder": "membrane", "time_steps": 3},
    },
    "output-population": {
        "san": True, "actor": {"batch_norm": True}, "spiking": {"decoder": "population"},
    },
    "membrane-max": {"san": True, "spiking": {"decoder": "membrane", "membrane": "max"}},
    "spikes-alone": {
        "san": True, "actor": {"hidden": [16]},
        "spiking": {"encoder": "population", "decoder": "membrane", "membrane": "mean"},
    },
    "one-layer": {"san": True, "actor": {"hidden": [16]}},
    "cuba-raw": {"san": True, "spiking": {"neuron": "cuba"}, "normalize_observations": False},
}  # fmt: skip
SPIKING = [name for name, stack in STACKS.items() if stack.get("san")]
QUICK = ("dense-folded", "lif-folded")


def agent(directory: Path, **changes: Any) -> Manager:
    """An agent of a tiny configuration as if trained: all that training moves is off its start."""
    manager = Manager(tiny(**changes))
    algorithm, generator = manager.algorithm, torch.Generator().manual_seed(3)
    spread = torch.linspace(0.5, 2, manager.observation_size)
    seen = torch.randn(500, manager.observation_size, generator=generator) * spread + 0.3
    algorithm.norm.update(seen)
    with torch.no_grad():
        for tensor in algorithm.policy_actor.state_dict().values():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator)
                tensor.mul_(1 + 0.5 * noise).add_(0.05 * noise)
    manager.save(directory)
    return Manager.load(directory)


def observations_of(manager: Manager, count: int = 60) -> np.ndarray:
    """Usual observations, some that the clip cuts, and some that it cuts everywhere."""
    generator, norm = np.random.default_rng(4), manager.algorithm.norm
    assert isinstance(norm, RunningNorm)
    usual = generator.normal(0.3, 1.5, (count, manager.observation_size)).astype(np.float32)
    usual[-8:-4] *= 20
    usual[-4:] *= 1e4
    return usual


def stacks(names: Any, quick: tuple[str, ...] = QUICK) -> Any:
    """A test of each stack, all but the quick ones slow."""
    slow = pytest.mark.slow
    marked = [pytest.param(name, marks=() if name in quick else slow) for name in names]
    return pytest.mark.parametrize("stack", marked)


def near(act: Callable[[np.ndarray], np.ndarray], manager: Manager, tolerance: float) -> None:
    for observation in observations_of(manager):
        difference = np.abs(act(observation) - manager.policy(observation)).max()
        assert difference <= tolerance, (observation, difference)


# -- ONNX and torch.export ---------------------------------------------------------------------


@stacks(STACKS)
def test_onnxruntime_gives_the_policys_actions(stack: str, tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    manager = agent(tmp_path / "agent", **STACKS[stack])
    result = export.export(manager, "onnx", tmp_path / "out", episodes=2)
    file = tmp_path / "out" / "actor.onnx"
    model = onnx.load(file)
    onnx.checker.check_model(model)
    (opset,) = (o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    assert opset == result["opset"] == export.OPSET

    session = onnxruntime.InferenceSession(file)
    seen = observations_of(manager)
    for count in (1, 7, len(seen)):  # any batch
        (actions,) = session.run(None, {"observation": seen[:count]})
        assert np.abs(actions - manager.policy(seen[:count])).max() < 1e-5
    assert result["largest_difference"] < 1e-5 and result["differing"] == 0
    assert result["exported_return"] == pytest.approx(result["policy_return"], abs=1e-2)


@stacks(STACKS)
def test_a_torch_program_gives_the_policys_actions(stack: str, tmp_path: Path) -> None:
    manager = agent(tmp_path / "agent", **STACKS[stack])
    export.export(manager, "torch", tmp_path / "out", episodes=0)
    module = torch.export.load(tmp_path / "out" / "actor.pt2").module()
    seen = observations_of(manager)
    for count in (1, 7, len(seen)):
        actions = module(torch.from_numpy(seen[:count])).detach().numpy()
        assert np.abs(actions - manager.policy(seen[:count])).max() < 1e-5


@pytest.mark.slow
def test_layer_norm_and_connections_go_where_they_can(tmp_path: Path) -> None:
    """What NIR and C refuse, torch.export (and so ONNX) holds."""
    changes = STACKS["popsan"] | {"actor": {"layer_norm": True}}
    changes["spiking"] = changes["spiking"] | {"output_connections": True}
    manager = agent(tmp_path / "agent", **changes)
    export.export(manager, "torch", tmp_path / "out", episodes=0)
    near(export.load("torch", tmp_path / "out"), manager, 1e-5)


# -- C -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS)
def test_compiled_c_gives_the_policys_actions(stack: str, tmp_path: Path) -> None:
    """Compiled with warnings as errors; where the policy itself is fused C, to the bit."""
    manager = agent(tmp_path / "agent", **STACKS[stack])
    result = export.export(manager, "c", tmp_path / "out", episodes=2)
    act = export.load("c", tmp_path / "out")
    manager.policy(np.zeros(manager.observation_size))
    near(act, manager, 0.0 if manager.policy.fused else 2e-6)
    assert result["exported_return"] == pytest.approx(result["policy_return"], abs=1e-3)
    if manager.config.san:
        rates = manager.policy.firing_rates(observations_of(manager))
        assert rates is not None and min(rates) > 0.02 and max(rates) < 0.98  # spikes decide


@pytest.mark.parametrize("stack", STACKS)
def test_int8_rounds_to_what_its_formula_says(stack: str, tmp_path: Path) -> None:
    """The compiled file against int8 arithmetic in numpy; close to the policy for a dense actor,
    whose error does not jump as a spike's does."""
    manager = agent(tmp_path / "agent", **STACKS[stack])
    result = export.export(manager, "c", tmp_path / "out", int8=True, episodes=2)
    assert result["precision"] == "int8" and result["calibrated_on"] == "5 episodes of the policy"
    act = export.load("c", tmp_path / "out")
    seen, _ = export.calibration(manager)
    if not manager.config.san:
        for observation in seen[:20]:
            expected = quantised_dense(manager, seen, observation)
            assert act(observation) == pytest.approx(expected, abs=1e-5)
    differences = [np.abs(act(o) - manager.policy(o)).max() for o in seen[:100]]
    assert np.median(differences) < 0.05 * manager.scale.high.max()


def quantised_dense(manager: Manager, seen: np.ndarray, observation: np.ndarray) -> np.ndarray:
    actor = export.plain_actor(manager.algorithm)
    normalize = export.normalizer(manager.algorithm)
    x, all_x = (normalize(torch.from_numpy(a)).numpy() for a in (observation, seen))
    products = [*actor.layers, actor.mean]
    for i, layer in enumerate(products):
        weight, bias = layer.weight.numpy(), layer.bias.numpy()
        step, weight_step = np.abs(all_x).max() / 127, np.abs(weight).max(1) / 127
        q = np.floor(x / np.float32(step) + np.float32(0.5)).clip(-127, 127)
        x = bias + np.rint(weight / weight_step[:, None]) @ q * step * weight_step
        all_x = all_x @ weight.T + bias
        if i < len(products) - 1:
            x, all_x = np.maximum(x, 0), np.maximum(all_x, 0)
    return manager.scale(np.tanh(x))


@pytest.mark.parametrize("int8", [False, True])
def test_observations_that_are_not_finite_are_rejected(int8: bool, tmp_path: Path) -> None:
    manager = agent(tmp_path / "agent", **STACKS["lif"])
    export.export(manager, "c", tmp_path / "out", int8=int8, episodes=0)
    act = export.load("c", tmp_path / "out")
    for value in (np.nan, np.inf, -np.inf):
        for entry in range(manager.observation_size):
            observation = np.zeros(manager.observation_size, np.float32)
            observation[entry] = value
            with pytest.raises(ValueError, match="not finite"):
                act(observation)
    huge = np.full(manager.observation_size, np.finfo(np.float32).max, np.float32)
    assert np.isfinite(act(huge)).all()


@stacks(STACKS)
@pytest.mark.parametrize("int8", [False, True])
def test_flash_and_ram_are_what_the_compiler_makes_of_them(
    stack: str, int8: bool, tmp_path: Path
) -> None:
    manager = agent(tmp_path / "agent", **STACKS[stack])
    result = export.export(manager, "c", tmp_path / "out", int8=int8, episodes=0)
    target = tmp_path / "actor.o"
    export_c.build(tmp_path / "out" / "actor.c", target, "-c", "-O0")
    sizes: dict[str, int] = {}
    listing = subprocess.run(["size", "-A", target], capture_output=True, text=True, check=True)
    for name, size in re.findall(r"^\.(\S+)\s+(\d+)", listing.stdout, re.MULTILINE):
        kind = name.split(".")[0]
        sizes[kind] = sizes.get(kind, 0) + int(size)
    assert sizes["bss"] - result["ram_bytes"] in range(0, 200)  # alignment
    # read-only data are the tables, the layers' pointers (`data` before linking) and literals
    tables = sizes["rodata"] + sizes.get("data", 0)
    assert tables - result["flash_bytes"] in range(0, 64 * 12 + 256)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_every_compiler_at_hand_takes_it_without_a_warning(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    monkeypatch.setenv("CC", compiler)
    for stack, changes in STACKS.items():
        manager = agent(tmp_path / stack, **changes)
        for int8 in (False, True):
            out = tmp_path / f"{stack}-{int8}"
            export.export(manager, "c", out, int8=int8, episodes=0)
            export_c.build(out / "actor.c", out / "actor", "-DSANSAC_PIPE")


def test_the_compilers_own_dialect_of_c_takes_it_too(tmp_path: Path) -> None:
    """What a project of a user's own compiles with; warnings are errors here too."""
    for stack in ("dense", "lif-folded", "popsan"):
        export.export(agent(tmp_path / stack, **STACKS[stack]), "c", tmp_path / "c", episodes=0,
                      overwrite=True)  # fmt: skip
        export_c.build(tmp_path / "c" / "actor.c", tmp_path / "actor.o", "-std=gnu17", "-c")


@pytest.mark.parametrize(("low", "high"), [(-0.4, 0.7), (-1.3, 0.2), (1.9, 2.0)])
def test_actions_stay_within_uneven_bounds(low: float, high: float, tmp_path: Path) -> None:
    """Saturated ones too, and those of C are the policy's to the bit."""
    manager = agent(tmp_path / "agent")
    space = Box(low, high, (1,), np.float32)
    algorithm, scale = manager.algorithm, ActionScale(space)
    means = torch.linspace(-12, 12, 100_001)[:, None]  # rounding reaches past a bound near it
    assert all(map(space.contains, export.Output(scale)(means).numpy()))
    head = algorithm.policy_actor.mean
    for bias in (-1e4, 0.0, 1e4):
        with torch.no_grad():
            head.bias.fill_(bias)
        policy, plain = Policy(algorithm, scale), export.Deployed(algorithm, scale)
        (tmp_path / "actor.c").write_text(export_c.source(algorithm, scale, None)[0])
        compiled = export_c.load(tmp_path / "actor.c")
        for observation in observations_of(manager):
            action = compiled(observation)
            assert np.array_equal(action, policy(observation)) and space.contains(action)
            (other,) = plain(torch.from_numpy(observation)[None]).detach().numpy()
            assert space.contains(other) and abs(other - action) < 1e-6


def test_c_drives_a_bipedal_walker_over_a_pipe(tmp_path: Path) -> None:
    """An episode with the compiled program, and the same with Python: the same score."""
    walker = {"env": "BipedalWalker-v3", "env_kwargs": {}}
    manager = agent(tmp_path / "agent", **walker, **STACKS["lif-folded"])
    export.export(manager, "c", tmp_path / "out", episodes=0)
    program = tmp_path / "actor"
    export_c.build(tmp_path / "out" / "actor.c", program, "-DSANSAC_PIPE")
    env, seed = Episodic(manager.evaluation_env()), episode_seed(EVALUATION, 0, 0)
    expected, observations = run_episode(manager.policy, env, seed)
    with subprocess.Popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout

        def act(observation: np.ndarray) -> np.ndarray:
            process.stdin.write(" ".join(f"{x:.9g}" for x in observation) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return np.array(process.stdout.readline().split(), np.float32)  # type: ignore[union-attr]

        score, walked = run_episode(act, env, seed)
        nan = " ".join(["nan", *["0"] * (manager.observation_size - 1)])
        process.stdin.write(f"{nan}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "rejected\n"
        process.stdin.close()
        assert process.wait(10) == 0
    assert len(observations) > 20
    assert (score, len(walked)) == (expected, len(observations))
    process = subprocess.run([program], input="0.5 word", capture_output=True, text=True)
    assert process.returncode == 1


# -- NIR ---------------------------------------------------------------------------------------


def simulated(directory: Path, inputs: np.ndarray, simulator: str) -> list[np.ndarray]:
    """Spikes of each layer, [T, B, neurons], and the outputs, of inputs [T, B, n] from the initial
    state, in a simulator of others."""
    import nir

    graph, file = nir.read(directory / "actor.nir"), directory / "actor.nir"
    if simulator == "spikingjelly":
        from spikingjelly.activation_based.nir_exchange import import_from_nir

        net = import_from_nir(file, dt=export.DT)
    elif simulator == "snntorch":
        from snntorch.import_nir import import_from_nir

        net = import_from_nir(graph)
    else:
        import norse.torch

        net = norse.torch.from_nir(graph, dt=export.DT)
    neurons = [name for name, node in graph.nodes.items() if "LIF" in type(node).__name__]
    spikes: dict[str, list[np.ndarray]] = {name: [] for name in sorted(neurons)}

    def record(name: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            spikes[name].append(first.detach().numpy())

        return hook

    for name in neurons:
        net.get_submodule(name).register_forward_hook(record(name))
    outputs, state = [], None
    with torch.no_grad():
        for step in torch.from_numpy(inputs):
            output, state = net(step, state)
            outputs.append(output.numpy())
    return [np.stack(rows) for rows in (*spikes.values(), outputs)]


def check_spikes(manager: Manager, out: Path, seen: np.ndarray, simulator: str) -> None:
    """Spikes to the last one, and actions, of observations [B, obs]."""
    before = export.load_onnx(out / "preprocessing.onnx", "observation", "input")
    after = export.load_onnx(out / "postprocessing.onnx", "output", "action")
    *spikes, outputs = simulated(out, before(seen), simulator)
    expected = [layer.numpy() for layer in manager.policy._spikes(seen)]
    assert len(spikes) == len(expected)
    for found, wanted in zip(spikes, expected, strict=True):
        assert 0.02 < wanted.mean() < 0.98
        assert np.array_equal(found, wanted)
    assert np.abs(after(outputs) - manager.policy(seen)).max() < 1e-5


@stacks(SPIKING, ("lif-folded", "popsan"))
def test_other_simulators_spike_as_the_policy_does(
    stack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SpikingJelly, snnTorch, and Norse where its neuron is the same: a leak that divides the
    input too."""
    manager = agent(tmp_path / "agent", **STACKS[stack])
    result = export.export(manager, "nir", tmp_path / "out", episodes=0)
    seen = observations_of(manager)[:-4]  # ones that are cut everywhere are compared as actions
    for simulator in ("spikingjelly", "snntorch", *["norse"] * (stack == "lif-decayed")):
        check_spikes(manager, tmp_path / "out", seen, simulator)
    near(export.load("nir", tmp_path / "out"), manager, 1e-5)
    if manager.config.spiking.encoder == "current" and manager.config.normalize_observations:
        check_stated_clip(manager, result, (tmp_path / "out" / "README.md").read_text())


def check_stated_clip(manager: Manager, result: dict[str, Any], card: str) -> None:
    """The clip in raw units: so many standard deviations about the mean."""
    norm, clip = manager.algorithm.norm, manager.config.observation_clip
    reach = clip * (norm.var + 1e-8).sqrt().numpy()
    assert result["centre"] == pytest.approx(norm.mean.numpy(), rel=1e-5)
    assert result["reach"] == pytest.approx(reach, rel=1e-5)
    assert f"| 0 | {result['centre'][0]:.6g} | {result['reach'][0]:.6g} |" in card


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["lif-folded", "lif-decayed", "popsan"])
def test_a_thousand_observations_of_walking_spike_alike(stack: str, tmp_path: Path) -> None:
    walker = {"env": "BipedalWalker-v3", "env_kwargs": {}}
    manager = agent(tmp_path / "agent", **walker, **STACKS[stack])
    env, seen = Episodic(manager.evaluation_env()), []
    for episode in range(40):
        seen.append(run_episode(manager.policy, env, episode_seed(EVALUATION, 0, episode))[1])
        if sum(map(len, seen)) >= 1000:
            break
    observations = np.concatenate(seen)[:1000]
    assert len(observations) == 1000
    export.export(manager, "nir", tmp_path / "out", episodes=0)
    for simulator in ("spikingjelly", "snntorch", *["norse"] * (stack == "lif-decayed")):
        check_spikes(manager, tmp_path / "out", observations, simulator)


# -- what is refused ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[export.Format, dict[str, Any], str, dict[str, Any]]] = {
    "dense in NIR": ("nir", {}, "no neurons.*onnx", {"san": True}),
    "clif": (
        "onnx", {"san": True, "spiking": {"neuron": "clif"}}, "'clif'.*spiking.neuron lif",
        {"spiking": {"neuron": "lif"}},
    ),
    "poisson": (
        "c", {"san": True, "spiking": {"encoder": "poisson"}}, "random.*spiking.encoder population",
        {"spiking": {"encoder": "population"}},
    ),
    "LayerNorm in C": ("c", {"actor": {"layer_norm": True}}, "LayerNorm.*actor.batch_norm",
                       {"actor": {"layer_norm": False, "batch_norm": True}}),
    "levels in C": (
        "c", {"actor": {"levels": 3}}, "ReLUs.*actor.levels 0", {"actor": {"levels": 0}},
    ),
    "connections in NIR": (
        "nir", {"san": True, "spiking": {"decoder": "population", "output_connections": True}},
        "connections.*no spiking.output_connections", {"spiking": {"output_connections": False}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_actor_that_cannot_be_exported_is_told_why_and_what_can(
    case: str, tmp_path: Path
) -> None:
    format, changes, message, nearest = REFUSED[case]
    manager = agent(tmp_path / "agent", **changes)
    with pytest.raises(ConfigError, match=message):
        export.export(manager, format, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]
    changes = changes | nearest | {k: changes.get(k, {}) | v for k, v in nearest.items()
                                   if isinstance(v, dict)}  # fmt: skip
    export.check_exportable(agent(tmp_path / "other", **changes).algorithm, format)


def test_a_time_constant_that_was_learned_to_be_1_is_refused_in_nir(tmp_path: Path) -> None:
    manager = agent(tmp_path / "agent", san=True, spiking={"neuron": "plif"})
    with torch.no_grad():
        manager.algorithm.policy_actor.layers[0].node.w.fill_(20.0)
    with pytest.raises(ConfigError, match=r"learned to be 1; .*--format c"):
        export.export(manager, "nir", tmp_path / "nir")
    export.export(manager, "c", tmp_path / "c", episodes=1)


def test_a_neuron_of_a_users_own_is_refused(tmp_path: Path) -> None:
    from sansac.config import NEURON_NAMES
    from sansac.spiking import NEURONS, register_neuron

    register_neuron("mine")(NEURONS["alif"])
    try:
        manager = agent(tmp_path / "agent", san=True, spiking={"neuron": "mine"})
        with pytest.raises(ConfigError, match="'mine' exists in no other simulator"):
            export.export(manager, "nir", tmp_path / "out")
    finally:
        del NEURONS["mine"]
        NEURON_NAMES.remove("mine")


def test_a_directory_in_use_and_int8_elsewhere_are_refused(tmp_path: Path) -> None:
    manager = agent(tmp_path / "agent")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="not empty"):
        export.export(manager, "c", tmp_path / "out")
    with pytest.raises(ConfigError, match="--int8: only --format c"):
        export.export(manager, "onnx", tmp_path / "new", int8=True)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="cannot write"):
        export.export(manager, "c", tmp_path / "agent" / "config.yaml" / "out")
    export.export(manager, "c", tmp_path / "out", episodes=0, overwrite=True)
    assert (tmp_path / "out" / "mine.txt").read_text() == "kept"
    export.export(manager, "torch", tmp_path / "out", episodes=0, overwrite=True)
    names = {"mine.txt", "README.md", "actor.pt2"}  # the card tells of no file of C
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    manager = agent(tmp_path / "agent")
    with torch.no_grad():
        next(iter(manager.algorithm.policy_actor.parameters())).view(-1)[0] = torch.nan
    with pytest.raises(ConfigError, match="not all finite"):
        export.export(manager, "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_and_a_failure_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = agent(tmp_path / "agent", **STACKS["lif"])
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"pip install -e \.\[export\]"):
        export.export(manager, "onnx", tmp_path / "out")
    monkeypatch.setattr(export_c, "compiler", lambda: ["false"])
    with pytest.raises(ConfigError, match="does not compile"):
        export.export(manager, "c", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]


def test_observations_of_another_type_are_played_as_the_policy_sees_them(tmp_path: Path) -> None:
    """MuJoCo's are float64."""
    agent(tmp_path / "agent", **STACKS["lif-folded"])
    make_env = partial(DtypeObservation, dtype=np.float64)
    manager = Manager.load(tmp_path / "agent", make_env=lambda: make_env(gym.make("Pendulum-v1")))
    for format in ("onnx", "torch", "c"):
        found = export.export(manager, format, tmp_path / format, episodes=1)
        assert found["largest_difference"] < 1e-5


def test_an_entry_that_hardly_varies_keeps_its_precision_in_nir(tmp_path: Path) -> None:
    """Its mean, folded into a bias, would cancel against a product 10,000 times as large."""
    manager = agent(tmp_path / "agent", **STACKS["lif"])
    norm = manager.algorithm.norm
    with torch.no_grad():
        norm.mean[0], norm.var[0] = 1000.0, 0.0
        norm.refresh()
    export.export(manager, "nir", tmp_path / "out", episodes=0)
    act = export.load("nir", tmp_path / "out")
    for observation in observations_of(manager)[:-8]:
        observation[0] = 1000.0
        assert np.abs(act(observation) - manager.policy(observation)).max() < 1e-5


def test_goals_are_told_in_their_order(tmp_path: Path) -> None:
    manager = reaching(tmp_path, "future")
    card = export.export(manager, "c", tmp_path / "out", episodes=0)
    space = Reach.observation_space
    parts = {key: np.full(2, i, np.float32) for i, key in enumerate(space.spaces)}
    order = [list(parts)[int(i)] for i in flatten(space, parts)[::2]]  # as Gymnasium lays them
    assert card["goal_order"] == [f"{key} [2]" for key in order]
    assert ", ".join(card["goal_order"]) in (tmp_path / "out" / "README.md").read_text()


def test_without_the_compiler_that_is_named_the_file_is_written_all_the_same(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent(tmp_path / "agent")
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    code, stdout, stderr = call("export", tmp_path / "agent", "--format", "c", "--out",
                                tmp_path / "out")  # fmt: skip
    assert code == 0 and (tmp_path / "out" / "actor.c").exists()
    assert "no C compiler" in stdout + stderr


# -- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--format", "nir"), marks=pytest.mark.slow),
        pytest.param(("--format", "onnx"), marks=pytest.mark.slow),
        pytest.param(("--format", "torch"), marks=pytest.mark.slow),
        ("--format", "c"),
        ("--format", "c", "--int8"),
    ],
    ids=" ".join,
)
def test_the_command_writes_checks_and_tells(
    words: tuple[str, ...], tmp_path: Path, call: Call
) -> None:
    agent(tmp_path / "agent", **STACKS["lif-folded"])
    run, out = tmp_path / "agent", tmp_path / "out"
    code, stdout, stderr = call("export", run, *words, "--out", out, "--episodes", 2)
    assert code == 0, stderr
    assert stdout.splitlines()[-1] == str(out)
    assert "Played beside the policy over 2 episodes" in stdout
    assert ("flash" in stdout and "RAM" in stdout) == (words[1] == "c")
    assert "WARNING" not in stdout + stderr
    words = (*words, "--out", str(out), "--episodes", "1", "--json")
    code, _, stderr = call("export", run, *words)
    assert code == 2 and "not empty" in stderr
    code, stdout, _ = call("export", run, *words, "--overwrite")
    result = json.loads(stdout)
    assert code == 0 and set(result["files"]) == {path.name for path in out.iterdir()}
    assert result["policy_return"] == pytest.approx(result["exported_return"], abs=5)


def test_replay_observations_calibrate_a_run(tmp_path: Path) -> None:
    """A run's own buffer; its best checkpoint and agent directories have none."""
    manager = Manager(tiny(tmp_path))
    manager.train()
    run = Manager.load(manager.directory)
    observations, origin = export.calibration(run)
    assert origin == "the replay buffer"
    rows = manager.replay.rows["observation"][: manager.replay.size].numpy()
    assert np.array_equal(observations, rows)
    on_disk = Manager(tiny(tmp_path, replay={"storage": "disk"}, name="disk"))
    on_disk.train()  # its rows are not in the checkpoint
    assert "episodes" in export.calibration(Manager.load(on_disk.directory))[1]
