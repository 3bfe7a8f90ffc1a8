"""What the documentation says is there, and its code runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, tiny

from sansac import config, spiking
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
    parts = {"neuron": "dynamic", "learn_threshold": True, "surrogate_start": 2.0, "time_steps": 3}
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


def test_the_licence_of_every_pinned_package_is_listed() -> None:
    table = (ROOT / "docs" / "licences.md").read_text().lower()
    pins = re.findall(
        r"^([\w-]+)(?:\[\w+\])?==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.M
    )
    assert len(pins) > 10
    for name, version in pins:
        assert re.search(rf"^\| {name.lower()} \| {re.escape(version)} \| \w+", table, re.M), name
