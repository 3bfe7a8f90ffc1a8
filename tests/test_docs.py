"""What the documentation says is there, and its code runs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Call, comparable, differences, load_state, tiny

import runner
from sansac import config, family, spiking
from sansac.config import Actor, ConfigError, Spiking, load_yaml, resolve
from sansac.manager import Manager
from sansac.spiking import SpikingActor

PAGE = (ROOT / "docs" / "spiking.md").read_text()


def test_the_page_on_spiking_actors_explains_every_field() -> None:
    named = set(re.findall(r"`(?:spiking\.|actor\.)?(\w+)", PAGE))
    normalisation = {"layer_norm", "batch_norm", "batch_norm_momentum", "reestimate_every"}
    assert {*Spiking.model_fields, *normalisation} <= named


def test_the_page_on_spiking_actors_explains_every_choice() -> None:
    words = set(re.findall(r"`([\w-]+)`", PAGE))
    for field in ("encoder", "decoder", "log_std", "surrogate", "membrane", "backend"):
        assert set(Spiking.model_fields[field].annotation.__args__) <= words, field  # type: ignore[union-attr]
    assert set(config.NEURON_NAMES) <= words


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_files_that_a_page_names_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"\]\(([\w./-]+\.md)\)", text):
        assert (path.parent / name).exists(), name
    for name in re.findall(r"configs/[\w]+\.yaml", text):
        assert (ROOT / name).exists(), name


# ---- the walk through deployment -----------------------------------------------------------------

DEPLOY = (ROOT / "docs" / "deploy.md").read_text()


def test_every_option_of_deployment_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("export", "energy", "latency"):
        with pytest.raises(SystemExit):
            runner.main([command, "--help"])
        options = set(re.findall(r"--[a-z]\w+", capsys.readouterr().out))
        own = options - {"--help", "--seed", "--actions", "--seconds", "--no", "--trust"}
        assert {option for option in own if option not in DEPLOY} == set(), command


@pytest.mark.parametrize("name", ["sparse_20", "sparse_10", "sparse_05", "sparse_02"])
def test_a_preset_of_the_sparsity_dial_says_what_its_name_does(name: str) -> None:
    chosen = resolve(load_yaml(ROOT / "configs" / f"{name}.yaml"))
    assert chosen.san and chosen.spiking.firing_penalty > 0
    assert chosen.spiking.target_rate == int(name[-2:]) / 100
    assert f"configs/{name}.yaml" in DEPLOY


@pytest.mark.slow
def test_the_walk_through_deployment_can_be_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """Every command and every code of docs/deploy.md up to the sweep, in its order."""
    runs = {}
    for name, san in (("DENSE", False), ("RUN", True)):
        walker = {"env": "BipedalWalker-v3", "env_kwargs": {}, "final_episodes": 1}
        manager = Manager(tiny(tmp_path / name, san=san, eval_every=0, **walker))
        manager.train()
        runs[name] = str(manager.directory)
    monkeypatch.chdir(tmp_path)
    walked = DEPLOY.partition("## The sparsity dial")[0]
    kinds = []
    for kind, block in re.findall(r"```(\w*)\n(.*?)```", walked, re.S):
        if kind == "python":
            exec(compile(block, "docs/deploy.md", "exec"), {})
        elif re.match("python runner.py|cc ", block):
            for line in block.splitlines():
                words = [runs.get(word, word) for word in line.split()]
                if words[0] == "cc":
                    subprocess.run(words, check=True)
                    continue
                quick = {"export": ["--episodes", "1"], "energy": ["--episodes", "1"],
                         "latency": ["--actions", "20", "--seconds", "0.1"]}  # fmt: skip
                code, _, stderr = call(*words[2:], *quick.get(words[2], []))
                assert code == 0, (line, stderr)
                kinds.append(words[2])
    assert kinds == ["export"] * 5 + ["energy", "latency", "compare"]
    assert (tmp_path / "comparison" / "pareto.png").exists()


# ---- add your own neuron -------------------------------------------------------------------------


@pytest.fixture
def example() -> Iterator[str]:
    """The page's code, run; what it registers is gone afterwards."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.partition("## Add your own neuron")[2], re.S)
    exec(compile(code, "docs/spiking.md", "exec"), {})
    yield code
    del spiking.NEURONS["dynamic"]
    config.NEURON_NAMES.remove("dynamic")


def reference(current: torch.Tensor, time_steps: int, threshold: float) -> torch.Tensor:
    """MDC-SAN's dynamic neuron, written out."""
    v = u = i = torch.zeros_like(current)
    spikes = []
    for _ in range(time_steps):
        i = 0.5 * i + current
        v, u = v + v**2 - v - u + i, u + (-0.172 * v - 0.529 * u)
        fired = v >= threshold
        v, u = torch.where(fired, 0.021, v), u + 0.132 * fired
        spikes.append(fired.float())
    return torch.stack(spikes)


def test_the_example_is_a_neuron_of_30_lines(example: str) -> None:
    assert len(example.strip().splitlines()) <= 30
    torch.manual_seed(0)
    stack = Spiking(neuron="dynamic", time_steps=6)
    actor = SpikingActor(Actor(hidden=(32,)), stack, 5, 2)
    x = torch.randn(64, 5)
    spikes = actor.trace(x)[0].spikes
    assert torch.equal(spikes, reference(actor.layers[0].linear(x), 6, stack.v_threshold))  # type: ignore[union-attr,operator]
    assert 0.05 < spikes.mean() < 0.95
    actor(x)[0].sum().backward()
    slope = actor.get_parameter("layers.0.linear.weight").grad
    assert slope is not None and slope.any() and slope.isfinite().all()


def test_the_example_trains_and_loads(example: str, tmp_path: Path) -> None:
    """With everything that stays the package's: thresholds, schedules, normalisation, resumes."""
    parts = {
        "neuron": "dynamic", "learn_threshold": True, "surrogate_width": "linear:2:1",
        "time_steps": 3,
    }  # fmt: skip
    manager = Manager(tiny(tmp_path, san=True, spiking=parts, actor={"batch_norm": True}))
    assert manager.train()["firing_rate"]
    assert manager.backend == "spikingjelly"
    assert load_yaml(manager.directory / "config.yaml")["spiking"]["neuron"] == "dynamic"
    loaded = Manager.load(manager.directory)
    assert loaded.evaluate(episodes=2)["returns"] == manager.evaluate(episodes=2)["returns"]


@pytest.mark.usefixtures("example")
def test_a_registered_neuron_is_a_choice_of_the_configuration() -> None:
    resolve({"spiking": {"neuron": "dynamic"}})
    with pytest.raises(ConfigError, match="has no kernel"):
        resolve({"spiking": {"neuron": "dynamic", "backend": "native"}})


def test_a_neuron_that_was_not_registered_is_refused_with_a_hint() -> None:
    wanted: dict[str, Any] = {"spiking": {"neuron": "dynamic"}}
    with pytest.raises(ConfigError, match=r"register_neuron, found 'dynamic'"):
        resolve(wanted)


def test_the_name_of_a_neuron_with_a_kernel_is_taken() -> None:
    with pytest.raises(ValueError, match="'lif' is computed by kernels"):
        spiking.register_neuron("lif")


# ---- algorithms ----------------------------------------------------------------------------------


def code_under(page: str, heading: str) -> str:
    text = (ROOT / "docs" / page).read_text().partition(f"## {heading}")[2]
    return re.findall(r"```python\n(.*?)```", text, re.S)[0]


@pytest.fixture
def regression() -> Iterator[None]:
    """The page's algorithm, registered; it is gone afterwards."""
    code = code_under("architecture.md", "Add your own algorithm")
    exec(compile(code, "docs/architecture.md", "exec"), {})
    yield
    del family.ALGORITHMS["regression"]
    config.ALGORITHM_NAMES.remove("regression")


@pytest.mark.usefixtures("regression")
@pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])
def test_an_algorithm_of_your_own_does_the_main_job(san: bool, tmp_path: Path) -> None:
    """It trains with either actor, splits and resumes to the bit, draws by its TD errors, loads."""
    changes: dict[str, Any] = {
        "algorithm": "regression", "san": san,
        "replay": {"sampler": "proportional", "correction": 0.5},
    }  # fmt: skip
    whole = Manager(tiny(tmp_path / "whole", **changes))
    assert len(whole.train()["returns"]) == 2
    half = Manager(tiny(tmp_path / "half", **changes, total_steps=80))
    half.train()
    resumed = Manager.resume(half.directory, total_steps=160)
    resumed.train()
    left, right = comparable(whole.directory), comparable(resumed.directory)
    assert not differences(left["state"]["algorithm"], right["state"]["algorithm"])
    assert whole.directory.name.startswith("regression-")
    again = Manager.load(whole.directory)
    assert again.evaluate(episodes=2)["returns"] == whole.evaluate(episodes=2)["returns"]


@pytest.mark.slow
@pytest.mark.usefixtures("regression")
def test_an_algorithm_of_your_own_learns(tmp_path: Path) -> None:
    """Better than the policy it starts with, whose return on Pendulum is about -1200."""
    made = config.Config.for_env(
        "Pendulum-v1", algorithm="regression", total_steps=8000, final_episodes=10, eval_every=0,
        video=False, wandb="disabled", runs_dir=str(tmp_path),
    )  # fmt: skip
    assert Manager(made).train()["return_mean"] > -700


def test_the_callback_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    scope: dict[str, Any] = {}
    exec(compile(code_under("algorithms.md", "Callbacks"), "docs/algorithms.md", "exec"), scope)
    manager = scope["manager"]
    assert manager.finished and manager.step == 1200
    state = load_state(manager.directory)["callbacks"]
    assert state["Slump-0"]["best"] == float("-inf"), "there was no evaluation on the way"
    slump = scope["Slump"](500)
    for mean, over in ((-900.0, False), (-300.0, False), (-700.0, False), (-801.0, True)):
        slump.evaluation(manager, {"return_mean": mean})
        assert slump.done(manager) == over


def test_the_page_on_algorithms_names_every_one_and_every_option() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert all(f"| `{name}` |" in page for name in config.ALGORITHM_NAMES)
    sections = {"replay": config.Replay, "exploration": config.Exploration, "td3": config.Td3}
    for prefix, section in (sections | {"adaptive": config.Adaptive}).items():
        for name in section.model_fields:
            option = f"{prefix}.{name}"
            found = option in page or option.replace("_", "-") in page
            assert found or option in ("replay.capacity", "td3.smoothing", "td3.smoothing_clip")


def test_the_licence_of_every_pinned_package_is_listed() -> None:
    table = (ROOT / "docs" / "licences.md").read_text().lower()
    pins = re.findall(
        r"^([\w-]+)(?:\[\w+\])?==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.M
    )
    assert len(pins) > 10
    for name, version in pins:
        assert re.search(rf"^\| {name.lower()} \| {re.escape(version)} \| \w+", table, re.M), name
