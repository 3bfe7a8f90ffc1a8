"""Seeing inside: what is shown is what the actor did, and the page stands on its own."""

from __future__ import annotations

import base64
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Call, Line, tiny
from matplotlib.image import imread

from sansac import inspection
from sansac import page as page_module
from sansac.config import ConfigError
from sansac.evaluation import run_episode
from sansac.inspection import (
    Layer,
    Recorder,
    by_phase,
    choose_neurons,
    inspect,
    record_episode,
    tuning,
)
from sansac.inspection_plots import draw_raster, draw_rates, membrane_line
from sansac.manager import Manager

COMMAND = ("inspect",)  # that `call` runs

STACKS: dict[str, dict[str, Any]] = {
    "default": {},
    "popsan": {
        "encoder": "population", "neuron": "cuba", "decoder": "population", "time_steps": 4,
    },
    "membrane": {"encoder": "population-current", "neuron": "clif", "decoder": "membrane",
                 "time_steps": 3},
    "poisson": {"encoder": "poisson", "neuron": "alif", "time_steps": 2, "learn_threshold": True},
}  # fmt: skip


def agent(stack: str = "default", **changes: Any) -> Manager:
    """An agent of random weights, which inspection cannot tell from a trained one."""
    return Manager(tiny(san=stack != "dense", spiking=STACKS.get(stack, {}), **changes))


def line(**options: Any) -> Manager:
    return Manager(tiny(env="Line", san=True), make_env=lambda: Line(**options))


# -- the episode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS)
def test_spikes_are_those_of_the_episode(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each layer puts out while the policy acts in torch, to the last spike."""
    monkeypatch.setattr("sansac.evaluation.action_mean", lambda _: None)
    manager = agent(stack)
    seen: list[list[torch.Tensor]] = []
    layers = manager.algorithm.policy_actor.layers
    for layer in layers:
        outputs: list[torch.Tensor] = []
        layer.register_forward_hook(lambda *args, outputs=outputs: outputs.append(args[-1]))
        seen.append(outputs)
    result = manager.evaluate(1, seed=3)
    episode = record_episode(manager, seed=3)

    assert episode.total == result["returns"][0]
    assert episode.length == episode.steps == result["length_mean"] == 40
    shown = [layer for layer in episode.layers if layer.name != "encoder"]
    assert len(shown) == len(seen) == len(result["firing_rate"])
    # The pass over all of them that ends an evaluation is not acting: it comes after 40 steps.
    for layer, outputs in zip(shown, seen, strict=True):
        for step, output in enumerate(outputs[:40]):
            spikes = layer.activity[step].astype(np.float32)
            expected = spikes if output.dim() == 3 else spikes.mean(0, dtype=np.float32)
            np.testing.assert_allclose(output.squeeze(-2).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("stack", STACKS)
def test_counts_follow_from_rates(stack: str) -> None:
    manager = agent(stack)
    rates = manager.evaluate(1, seed=1)["firing_rate"]
    episode = record_episode(manager, seed=1)
    time_steps = manager.config.spiking.time_steps
    shown = [layer for layer in episode.layers if layer.name != "encoder"]
    for layer, rate in zip(shown, rates, strict=True):
        neurons = len(layer.order)
        assert layer.activity.shape == layer.voltage.shape == (40, time_steps, neurons)
        assert layer.activity.dtype == bool
        assert layer.activity.sum() == pytest.approx(rate * neurons * time_steps * 40)
        assert layer.rate.mean() == pytest.approx(rate)
        assert (layer.rate[layer.silent] == 0).all() and (layer.rate[~layer.silent] > 0).all()
        assert sorted(layer.order) == list(range(neurons))
        np.testing.assert_array_equal(layer.activity, layer.voltage >= layer.threshold)
    statistics = manager.algorithm.policy_actor.statistics(torch.from_numpy(episode.observations))
    for i, layer in enumerate(shown):
        for tag, value in (
            ("in_window", layer.in_window),
            ("silent", layer.silent.mean()),
            ("saturated", layer.saturated.mean()),
        ):
            assert value == pytest.approx(float(statistics[f"spiking/{tag}/{i}"]), abs=1e-6)


def test_an_encoder_that_spikes_comes_first() -> None:
    for stack, names in (
        ("default", ["layer 0", "layer 1"]),
        ("popsan", ["encoder", "layer 0", "layer 1", "layer 2 (output population)"]),
        ("membrane", ["layer 0", "layer 1"]),
        ("poisson", ["encoder", "layer 0", "layer 1"]),
    ):
        manager = agent(stack)
        episode = record_episode(manager, seed=0)
        assert [layer.name for layer in episode.layers] == names
        if names[0] == "encoder":
            encoder = manager.algorithm.policy_actor.encoder
            seen = torch.from_numpy(episode.observations)
            np.testing.assert_array_equal(
                episode.layers[0].activity, encoder(seen).transpose(0, 1).detach().numpy()
            )


def test_a_dense_actor_shows_activations() -> None:
    manager = agent("dense")
    episode = record_episode(manager, seed=2)
    actor = manager.algorithm.policy_actor
    x = torch.from_numpy(episode.observations)
    for layer, shown in zip(actor.layers, episode.layers, strict=True):
        x = torch.relu(layer(x))
        np.testing.assert_allclose(shown.activity[:, 0], x.detach().numpy(), atol=1e-6)
        assert shown.voltage is None and shown.in_window is None and not shown.saturated.any()


def test_observations_and_actions_are_the_episodes_own() -> None:
    manager = agent()
    manager.algorithm.norm.update(torch.tensor([[1.0, 2, 3], [0, 1, 5]]))
    episode = record_episode(manager, seed=4)
    scaled = manager.algorithm.norm.scale, manager.algorithm.norm.centre
    raw = episode.observations / scaled[0].numpy() + scaled[1].numpy()
    assert np.linalg.norm(raw[:, :2], axis=1) == pytest.approx(1, abs=1e-4)
    for observation, action in zip(raw, episode.actions, strict=True):
        assert manager.policy(observation.astype(np.float32)) == pytest.approx(action, abs=0.2)


def test_a_long_episode_is_shown_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MAX_STEPS", 7)
    episode = record_episode(line(length=20, render_mode="rgb_array"), seed=0)
    assert (episode.length, episode.steps) == (20, 7)
    assert episode.total == sum(10 + k for k in range(1, 21))
    assert len(episode.observations) == len(episode.layers[0].activity) == 7
    assert list(episode.frames) == [0, 1, 2, 3, 4, 5, 6]


# -- frames ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 64, 65, 1000])
def test_frames_are_at_regular_times(length: int) -> None:
    recorder = Recorder(Line(length=length, render_mode="rgb_array"))
    run_episode(line().policy, recorder, seed=0)
    steps = np.array(list(recorder.frames))
    assert steps[0] == 0 and len(steps) <= 64 and len(steps) >= min(length, 32)
    assert len(set(np.diff(steps))) <= 1 and steps[-1] > 0.9 * length - 1
    for step, frame in recorder.frames.items():
        assert (frame == 40 * (step % 6)).all()
    assert len(recorder.actions) == length


def test_no_frames_cost_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    episode = record_episode(line(), seed=0)
    assert episode.frames == {} and "render_mode" in episode.no_frames

    def fail(self: Line) -> None:
        raise OSError("no <display>")

    monkeypatch.setattr(Line, "render", fail)
    episode = record_episode(line(render_mode="rgb_array"), seed=0)
    assert episode.frames == {} and "no <display>" in episode.no_frames
    assert episode.steps == 5


# -- what is drawn ---------------------------------------------------------------------------------


def test_neurons_are_sorted_by_phase() -> None:
    """A travelling wave, shuffled, comes back in order, the constant neurons after it."""
    random = np.random.default_rng(0)
    phase = random.permutation(np.linspace(0, 2 * np.pi, 40, endpoint=False))
    time = np.linspace(0, 12 * np.pi, 240)[:, None]
    wave = np.cos(time - phase) > 0.3
    activity = np.concatenate([np.ones((240, 1)), wave, np.zeros((240, 1))], 1).astype(bool)
    order = by_phase(activity[:, None])
    assert set(order[-2:]) == {0, 41}
    turns = np.diff(phase[order[:-2] - 1]) % (2 * np.pi)
    assert (turns < 0.5).all() or (turns > 2 * np.pi - 0.5).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 3), (5, 1, 1), (3, 2, 2)])
def test_any_layer_has_an_order(shape: tuple[int, int, int]) -> None:
    activity = np.random.default_rng(0).random(shape) > 0.5
    assert sorted(by_phase(activity)) == list(range(shape[2]))


def test_the_raster_shows_every_spike() -> None:
    episode = record_episode(agent("popsan"), seed=0)
    for steps in (range(40), range(10, 14)):
        figure = draw_raster(episode, "C0", steps)
        rasters = [axes for axes in figure.axes if axes.images]
        rasters = [axes for axes in rasters if axes.get_ylabel()]
        for axes, layer in zip(rasters, episode.layers, strict=True):
            image = np.asarray(axes.images[0].get_array())
            columns, rows = len(steps) * 4, len(layer.order)
            tall, wide = image.shape[0] // rows, image.shape[1] // columns
            spikes = layer.activity[steps].reshape(columns, rows).T[layer.order]
            assert (image == spikes.repeat(tall, 0).repeat(wide, 1)).all()
            left, right, bottom, top = axes.images[0].get_extent()
            assert (left, right, bottom, top) == (steps.start, steps.stop, rows, 0)


@pytest.mark.parametrize("length", [5, 40, 70, 100, 736])
def test_frames_stay_within_the_axes(length: int) -> None:
    """All as high as each other; the last may be cut."""
    episode = record_episode(line(length=length, render_mode="rgb_array"), seed=0)
    figure = draw_raster(episode, "C0", range(length))
    figure.draw_without_rendering()
    strip = figure.axes[0]
    frames = [place.images[0].get_window_extent() for place in strip.child_axes]  # type: ignore[attr-defined]
    assert len(frames) > 3
    assert max(frame.x1 for frame in frames) < strip.bbox.x1 + 1
    assert np.ptp([frame.height for frame in frames]) < 2


def test_a_membrane_starts_from_reset_and_falls_to_it() -> None:
    voltage = np.array([[0.2, 0.7], [0.3, 0.4]])
    spikes = voltage > 0.5
    time = np.array([[3.5, 4.0], [4.5, 5.0]])
    x, y = membrane_line(voltage, spikes, time, resets_to_zero=True)
    nan = pytest.approx(np.nan, nan_ok=True)
    assert x == [3, 3.5, 4, 4, 4, 4, 4.5, 5, 5]
    assert y == [0, 0.2, 0.7, 0, nan, 0, 0.3, 0.4, nan]
    _, y = membrane_line(voltage, spikes, time, resets_to_zero=False)
    assert y[3] == nan


def test_histograms_count_every_neuron() -> None:
    activity = np.zeros((10, 2, 8), bool)
    activity[:, :, :3] = True
    activity[:5, 0, 3] = True
    layer = Layer("layer 0", activity, np.arange(8), np.where(activity, 1.0, 0.2), 0.5, 0.8)
    figure = draw_rates([layer], "C0")
    rates, voltages = figure.axes
    assert sum(bar.get_height() for bar in rates.patches) == 8
    assert "layer 0\n8 neurons\n50% silent, 38% saturated" in rates.get_title()
    assert layer.in_window == pytest.approx(1 - activity.mean())
    assert voltages.get_title() == f"{layer.in_window:.0%} in window"


def test_tuning_curves_follow_the_first_layer() -> None:
    """A neuron that looks at one entry alone answers that one, the others not at all."""
    for stack in ("default", "dense"):
        actor = agent(stack).algorithm.policy_actor
        linear = actor.layers[0].linear if stack == "default" else actor.layers[0]
        with torch.no_grad():
            linear.weight.zero_()
            linear.bias.zero_()
            linear.weight[5, 1] = 1.0
        values = torch.linspace(-3, 3, 7)
        curves = tuning(actor, torch.randn(50, 3), [0, 1, 2], values)
        assert curves.shape == (3, 7, 16)
        assert not curves[:, :, np.arange(16) != 5].any()
        assert np.ptp(curves[[0, 2], :, 5], axis=1).max() == 0
        expected = values.clamp(min=0) if stack == "dense" else (values > 0).float()
        np.testing.assert_allclose(curves[1, :, 5], expected)


def test_neurons_that_fire_are_chosen() -> None:
    activity = np.zeros((10, 1, 9), bool)
    for neuron in range(4, 9):
        activity[: neuron - 2, 0, neuron] = True
    layers = [
        Layer("encoder", activity, np.arange(9)),
        Layer("layer 0", activity, np.arange(9), activity * 1.0),
        Layer("layer 1", activity[..., :2], np.arange(2), activity[..., :2] * 1.0),
    ]
    assert choose_neurons(layers, []) == [(1, 5), (1, 6), (1, 7), (2, 0)]
    assert choose_neurons(layers, ["1:1", "0:8"]) == [(2, 1), (1, 8)]
    for wrong in ("0:9", "2:0", "0", "0:-1", "x:1", "0:1.5"):
        with pytest.raises(
            ConfigError, match=re.escape(f"0:0 to 0:8, 1:0 to 1:1; found '{wrong}'")
        ):
            choose_neurons(layers, [wrong])


# -- the page --------------------------------------------------------------------------------------

VOID = {"meta", "img", "source", "link", "br"}


class Page(HTMLParser):
    """Elements in order with their attributes, after a check that tags nest."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open and self.open[-1] != "style" else ""

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


EXPECTED = {
    "popsan": ["raster", "zoom", "membranes", "rates", "encoder", "tuning"],
    "dense": ["raster", "zoom", "activations", "tuning"],
}
EVIL = "<script>alert('1')</script>&amp;\"${x}$"


@pytest.fixture(scope="module", params=["popsan", "dense"])
def page(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    out = tmp_path_factory.mktemp("inspection") / "a" / "b"
    neurons = ["0:3", "2:1"] if request.param == "popsan" else []
    path, episode = inspect(agent(request.param), out, name=EVIL, seed=5, neurons=neurons)
    assert path == out / "index.html"
    return request.param, path, episode


def test_pictures_are_files_with_something_in_them(page: tuple[str, Path, Any]) -> None:
    stack, path, _ = page
    names = {f"{name}.png" for name in EXPECTED[stack]}
    assert {file.name for file in path.parent.iterdir()} == {"index.html", *names}
    for name in names:
        image = imread(path.parent / name)
        height, width = image.shape[:2]
        assert width == 1540 and 300 < height < 3000
        assert image[0, 0, :3] == pytest.approx([1, 1, 1])
        assert image[..., :3].std() > 0.05


def test_the_page_stands_on_its_own(page: tuple[str, Path, Any]) -> None:
    stack, path, _ = page
    parsed = Page(path)
    assert [section["id"] for section in parsed.all("section")] == EXPECTED[stack]
    light = [str(image["src"]) for image in parsed.all("img")]
    dark = [str(source["srcset"]) for source in parsed.all("source")]
    prefix = "data:image/png;base64,"
    for name, bright, night in zip(EXPECTED[stack], light, dark, strict=True):
        assert bright.startswith(prefix) and night.startswith(prefix) and bright != night
        png = base64.b64decode(bright.removeprefix(prefix), validate=True)
        assert png == (path.parent / f"{name}.png").read_bytes()
        assert base64.b64decode(night.removeprefix(prefix), validate=True).startswith(b"\x89PNG")
    assert all(image["alt"] for image in parsed.all("img"))
    html = re.sub(r"base64,[A-Za-z0-9+/=]+", "", path.read_text())
    assert not re.search(r"https?:|//|url\(|@import|<link|<script|<iframe|href", html)
    assert "default-src 'none'" in html


def test_names_are_escaped(page: tuple[str, Path, Any]) -> None:
    _, path, _ = page
    parsed = Page(path)
    assert parsed.all("script") == []
    assert f"{EVIL}: Pendulum-v1" in parsed.text


def test_the_page_tells_the_numbers(page: tuple[str, Path, Any]) -> None:
    stack, path, episode = page
    text = " ".join(Page(path).text.split())
    assert f"return{episode.total:.1f}" in text and "40 control steps" in text
    if stack == "dense":
        assert "have no meaning here" in text and "mean activation" in text
    else:
        spikes = sum(layer.activity.sum() for layer in episode.layers[1:]) / 40
        assert f"{spikes:,.0f} of {(16 + 16 + 3) * 4} possible" in text
        for layer in episode.layers:
            assert f"{layer.name}{len(layer.order)}{layer.rate.mean():.3f}" in text
        assert "population encoder, cuba neurons, population decoder, 4 simulation steps" in text


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of nothing, for speed."""
    monkeypatch.setattr(page_module, "render", lambda draw, theme: b"\x89PNG " + theme.encode())


@pytest.mark.usefixtures("undrawn")
def test_one_simulation_step_is_called_binary(tmp_path: Path) -> None:
    manager = Manager(tiny(san=True, spiking={"time_steps": 1}))
    page, _ = inspect(manager, tmp_path / "one")
    assert "binary activations" in page.read_text()


@pytest.mark.usefixtures("undrawn")
def test_frames_that_fail_are_named_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Line) -> None:
        raise OSError("no <display> {here}")

    monkeypatch.setattr(Line, "render", fail)
    page, _ = inspect(line(render_mode="rgb_array"), tmp_path)
    assert "There are no frames: rendering failed: no <display> {here}." in Page(page).text


@pytest.mark.usefixtures("undrawn")
def test_a_used_directory_is_refused_unless_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    inspect(agent(), out)
    (out / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ConfigError, match="is not empty"):
        inspect(agent("dense"), out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    inspect(agent("dense"), out, overwrite=True)
    names = {"index.html", "notes.txt", "raster.png", "zoom.png", "activations.png", "tuning.png"}
    assert {path.name for path in out.iterdir()} == names
    with pytest.raises(ConfigError, match="no directory"):
        inspect(agent(), out / "notes.txt", overwrite=True)
    with pytest.raises(ConfigError, match="cannot make"):
        inspect(agent(), out / "notes.txt" / "deeper")


@pytest.mark.parametrize("at", [-1, 40])
def test_the_close_up_begins_in_the_episode(at: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control steps 0 to 39"):
        inspect(agent(), tmp_path, at=at)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents")
    agent("popsan").save(path / "spiking")
    agent("dense").save(path / "dense")
    return path


@pytest.mark.usefixtures("undrawn")
def test_the_command_prints_the_page(agents: Path, tmp_path: Path, call: Call) -> None:
    evil = tmp_path / "<script>alert(1)<"
    shutil.copytree(agents / "spiking", evil)
    code, out, err = call(evil, "--seed", "7", "--neurons", "0:3", "2:1", "--at", "2")
    assert (code, out) == (0, f"{evil / 'inspection' / 'index.html'}\n"), err
    parsed = Page(evil / "inspection" / "index.html")
    assert parsed.all("script") == [] and "<script>alert(1)<: Pendulum-v1" in parsed.text
    assert "seed 7" in parsed.text and "Control steps 2 to 13" in parsed.text
    code, out, err = call(evil)
    assert (code, out) == (2, "") and "is not empty" in err and "--overwrite" in err
    assert call(evil, "--overwrite", "--out", evil / "inspection")[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["nowhere"], 2, "nowhere is not a directory"),
        (["."], 2, "no config.yaml"),
        (["spiking", "--seed", "-1"], 2, "--seed"),
        (["spiking", "--neurons", "5:0"], 2, "2:0 to 2:2; found '5:0'"),
        (["spiking", "--at", "99"], 2, "--at"),
        (["spiking", "--checkpoint", "worst"], 1, "worst does not exist"),
        (["dense", "--neurons", "0:0"], 2, "a dense actor has no membranes"),
    ],
)
def test_an_error_is_one_message_and_leaves_nothing(
    words: list[str],
    code: int,
    named: str,
    agents: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(agents)
    found, out, err = call(*words)
    assert (found, out) == (code, "")
    last = err.splitlines()[-1]  # whatever was told of progress before
    assert named in last and last.startswith("error: ") and "Traceback" not in err
    assert not list(agents.glob("*/inspection")) and not (agents / "inspection").exists()
