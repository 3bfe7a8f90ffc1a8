"""Seeing inside a trained actor: one episode as pictures and a page that holds them all.

Spikes are traced one observation at a time, as the actor acts: they are those of the episode
itself, to the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from sansac.checkpoint import write_atomically
from sansac.config import ConfigError
from sansac.environments import EVALUATION, Episodic, env_factory, episode_seed
from sansac.evaluation import run_episode
from sansac.inspection_plots import (
    draw_encoder,
    draw_membranes,
    draw_raster,
    draw_rates,
    draw_tuning,
)
from sansac.manager import Manager
from sansac.networks import DenseActor
from sansac.page import Picture, check_directory, page, render_themes, section, table
from sansac.plots import COLORS
from sansac.spiking import SpikingActor

PAGE = "index.html"
PICTURES = ("raster", "zoom", "membranes", "rates", "activations", "encoder", "tuning")
MAX_STEPS = 4_000  # control steps that are traced: pictures of more say no more
MAX_ENTRIES = 24  # panels of observation entries
MAX_ACTIONS = 8  # rows of action traces
ZOOM = 48  # simulation steps that the close-ups show, about
HARD_RESET = ("lif", "plif", "cuba", "alif")  # `clif` subtracts; of others nothing is known
QUARTILES = (0.25, 0.5, 0.75)


# -- an episode and what the layers did in it --------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer over K control steps of T simulation steps."""

    name: str
    activity: np.ndarray
    """Spikes, [K, T, N]; of a dense layer its activations, with T = 1."""
    order: np.ndarray
    """Neurons as the raster shows them, [N]."""
    voltage: np.ndarray | None = None
    """Membrane voltages before reset, [K, T, N]."""
    threshold: float = 0.0
    window: float = 0.0
    """The surrogate's width around the threshold (V)."""
    resets_to_zero: bool = True

    @property
    def spiking(self) -> bool:
        return self.activity.dtype == bool

    @property
    def label(self) -> str:
        unit = "fields" if self.name == "encoder" else "neurons"
        return self.name.replace(" (", "\n(") + f"\n{len(self.order)} {unit}"

    @property
    def rate(self) -> np.ndarray:
        """Spikes a neuron a simulation step over the episode (mean activation), [N]."""
        return self.activity.mean((0, 1), dtype=np.float64)

    @property
    def silent(self) -> np.ndarray:
        """Which neurons are never active, [N]."""
        return np.asarray(~self.activity.any((0, 1)))

    @property
    def saturated(self) -> np.ndarray:
        """Which neurons fire at every simulation step, [N]; those of a dense layer have no such
        bound."""
        return np.asarray(self.activity.all((0, 1)) & self.spiking)

    @property
    def in_window(self) -> float | None:
        """Share of voltages within the surrogate's width around the threshold."""
        if self.voltage is None:
            return None
        return float((np.abs(self.voltage - self.threshold) < self.window / 2).mean())


@dataclass(frozen=True)
class Episode:
    """A deterministic episode of K control steps, or its first MAX_STEPS."""

    total: float
    """Undiscounted return of the whole episode."""
    length: int
    """Control steps of the whole episode."""
    seed: int
    observations: np.ndarray
    """As the actor sees them, [K, obs]: normalised where the agent normalises."""
    actions: np.ndarray
    """[K, act], of the environment's own scale."""
    frames: dict[int, np.ndarray]
    """Pictures [H, W, 3] by the control step that starts there."""
    no_frames: str
    """Why there are none."""
    layers: list[Layer]

    @property
    def steps(self) -> int:
        return len(self.actions)

    @property
    def time_steps(self) -> int:
        return self.layers[0].activity.shape[1]


class Recorder(gym.Wrapper):
    """Keeps an episode's actions and, at regular steps, its frames: 33 to 64 of a long one."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.actions: list[np.ndarray] = []
        self.frames: dict[int, np.ndarray] = {}
        self.stride = 1
        self.no_frames = (
            "" if env.render_mode == "rgb_array" else "the environment's render_mode gives none"
        )

    def reset(self, **options: Any) -> Any:
        result = self.env.reset(**options)
        self._film()
        return result

    def step(self, action: Any) -> Any:
        self.actions.append(np.array(action))
        result = self.env.step(action)
        self._film()
        return result

    def _film(self) -> None:
        step = len(self.actions)
        if self.no_frames or step % self.stride:
            return
        try:
            frame = np.asarray(self.env.render(), np.uint8)
        except Exception as error:  # a renderer at fault costs no inspection
            self.no_frames = f"rendering failed: {error or type(error).__name__}"
            return
        thin = 1 + frame.shape[1] // 800
        self.frames[step] = frame[::thin, ::thin].copy()
        if len(self.frames) > 64:
            self.stride *= 2
            self.frames = {k: f for k, f in self.frames.items() if k % self.stride == 0}


def record_episode(manager: Manager, seed: int) -> Episode:
    """The first evaluation episode of `seed`, with what every layer of the actor did in it."""
    try:
        env = manager.rendering_env()
    except ConfigError:
        env = env_factory(manager.config)()
    recorder = Recorder(env)
    try:
        own_seed = episode_seed(EVALUATION, seed, 0)
        total, observations = run_episode(manager.policy, Episodic(recorder), own_seed)
    finally:
        recorder.close()
    batch = torch.from_numpy(observations[:MAX_STEPS]).to(manager.device)
    seen = manager.algorithm.normalize(batch)
    steps = len(seen)
    return Episode(
        total=total,
        length=len(observations),
        seed=seed,
        observations=seen.cpu().numpy(),
        actions=np.stack(recorder.actions[:MAX_STEPS]),
        frames={k: frame for k, frame in recorder.frames.items() if k < steps},
        no_frames=recorder.no_frames,
        layers=trace(manager.algorithm.policy_actor, seen),
    )


@torch.no_grad()
def trace(actor: DenseActor | SpikingActor, observations: Tensor) -> list[Layer]:
    """What each layer does for each of [K, obs], an encoder that spikes first."""
    if isinstance(actor, DenseActor):
        outputs, x = [], observations
        for linear, norm in zip(actor.layers, actor.norms, strict=True):
            x = actor.activation(norm(linear(x)))
            outputs.append(x[:, None].cpu().numpy())
        return [Layer(f"layer {i}", x, by_phase(x)) for i, x in enumerate(outputs)]
    config = actor.config
    layers = []
    if actor.encoder is not None and config.encoder != "population-current":
        spikes = stack([actor.encoder(x[None]) for x in observations]).astype(bool)
        layers.append(Layer("encoder", spikes, np.arange(spikes.shape[-1])))
    traces = [actor.trace(x[None]) for x in observations]
    for i, layer in enumerate(actor.layers):
        spikes = stack([row[i].spikes for row in traces]).astype(bool)
        output = config.decoder == "population" and i == len(actor.layers) - 1
        layers.append(
            Layer(
                f"layer {i}" + " (output population)" * output,
                spikes,
                np.arange(spikes.shape[-1]) if output else by_phase(spikes),
                stack([row[i].voltage for row in traces]),
                float(layer.v_threshold),  # type: ignore[arg-type]
                float(layer.surrogate_width),  # type: ignore[arg-type]
                config.neuron in HARD_RESET,
            )
        )
    return layers


def stack(steps: Sequence[Tensor]) -> np.ndarray:
    """K tensors [T, 1, N] as one array [K, T, N]."""
    return torch.cat(list(steps), 1).transpose(0, 1).cpu().numpy()


def by_phase(activity: np.ndarray) -> np.ndarray:
    """[K, T, N] -> an order of the N neurons that puts those which act together side by side.

    They are sorted by angle in the plane of the first two principal components of their activity
    over control steps, so that a periodic gait shows as slanted bands; constant ones come last.
    """
    rate = activity.mean(1, dtype=np.float64)
    rate -= rate.mean(0)
    norm = np.linalg.norm(rate, axis=0)
    rate /= np.maximum(norm, 1e-12)
    plane = np.linalg.eigh(rate.T @ rate)[1][:, -2:]
    angle = np.arctan2(plane[:, 0], plane[:, -1])
    return np.lexsort((angle, norm < 1e-9))


@torch.no_grad()
def tuning(
    actor: DenseActor | SpikingActor, observations: Tensor, entries: Sequence[int], values: Tensor
) -> np.ndarray:
    """Response of the first layer's neurons to one entry after the other, [entries, V, N].

    Each entry is swept over `values`, [V], while the others stay as they were; the response (spikes
    a simulation step, or activation) is a mean over at most 32 of the episode's observations.
    """
    sample = observations[:: 1 + (len(observations) - 1) // 32]
    curves = []
    for entry in entries:
        swept = sample.repeat(len(values), 1, 1)
        swept[..., entry] = values[:, None]
        x = swept.flatten(0, 1)
        if isinstance(actor, DenseActor):
            response = actor.activation(actor.norms[0](actor.layers[0](x)))
        else:
            drive = x if actor.encoder is None else actor.encoder(x)
            response = actor.layers[0](drive, "mean")
        curves.append(response.unflatten(0, (len(values), -1)).mean(1).cpu().numpy())
    return np.stack(curves)


# -- what is drawn -----------------------------------------------------------------------------


RASTER = """Each row of a panel is a neuron, each column a moment, ink its {ink}. Neurons of hidden
layers are sorted by the phase of their activity: those which act together lie together, a periodic
gait shows as slanted bands, and constant ones come last. {kept}Below: the actions, in the
environment's own unit. {frames}"""
KEPT = "Encoder fields and output populations keep their own order. "
ZOOM_IN = """Control steps {first} to {last} of the same episode. A line marks where each begins."""
MEMBRANES = """Voltages start from reset at every control step; where one reaches the threshold, the
neuron spikes and its voltage is reset. Grey is the width of the surrogate around the threshold:
there training passes most of a spike's gradient (all of it, where the surrogate is a rectangle)."""
RATES = """How often each neuron fires over the episode, and the voltages of each layer. A silent
neuron never fires and a saturated one always does: neither tells the next layer anything."""
ACTIVATIONS = (
    "Mean activation of each neuron over the episode. A silent neuron is at zero all along."
)
ENCODER = "The Gaussian fields that each observation entry drives, as they were learned. {which}"
TUNING = """How the first layer answers one observation entry while the others stay as they were in
the episode, which the response is a mean over. {which}"""


def pictures(
    manager: Manager, episode: Episode, neurons: Sequence[tuple[int, int]], zoom: range
) -> Iterator[Picture]:
    """Everything there is to see in an actor, in the order of the page."""
    accent, layers = COLORS[manager.config.actor_name], episode.layers
    spiking, whole = manager.config.san, range(episode.steps)
    ink = "spikes" if spiking else "activation (full from the 99th percentile of its layer on)"
    frames = "A frame shows the moment of the line at its left."
    if episode.no_frames:
        frames = f"There are no frames: {episode.no_frames}."
    text = RASTER.format(ink=ink, kept=KEPT if spiking else "", frames=frames)
    yield Picture("raster", "The episode", text, lambda: draw_raster(episode, accent, whole))
    text = ZOOM_IN.format(first=zoom.start, last=zoom[-1])
    yield Picture("zoom", "A closer look", text, lambda: draw_raster(episode, accent, zoom))
    if spiking:
        yield Picture(
            "membranes",
            "Membranes",
            MEMBRANES,
            lambda: draw_membranes(layers, neurons, accent, zoom),
        )
        rates = "rates", "Firing rates and voltages", RATES
    else:
        rates = "activations", "Activations", ACTIVATIONS
    yield Picture(*rates, lambda: draw_rates(layers, accent))
    yield from tuning_pictures(manager, episode)


def tuning_pictures(manager: Manager, episode: Episode) -> Iterator[Picture]:
    """What the encoder and the first layer make of single observation entries."""
    actor, observations = manager.algorithm.policy_actor, episode.observations
    normalized, size = manager.config.normalize_observations, observations.shape[1]
    unit = "standard deviations from its mean" if normalized else "in its own unit"
    spread = np.argsort(-observations.std(0), kind="stable")[:MAX_ENTRIES]
    entries = sorted(int(i) for i in spread)
    which = f"The {MAX_ENTRIES} of {size} entries that vary most." if size > MAX_ENTRIES else ""
    if isinstance(actor, SpikingActor) and (encoder := actor.encoder) is not None:
        text = ENCODER.format(which=which)
        yield Picture(
            "encoder",
            "Receptive fields",
            text,
            lambda: draw_encoder(episode, encoder, entries, unit),
        )
    span = 3.0 if normalized else max(1.0, float(np.abs(observations).max()))
    values = torch.linspace(-span, span, 49, device=manager.device)
    curves = tuning(actor, torch.from_numpy(observations).to(manager.device), entries, values)
    text, axis = TUNING.format(which=which), values.cpu().numpy()
    yield Picture(
        "tuning", "Tuning curves", text, lambda: draw_tuning(episode, entries, axis, curves, unit)
    )


def choose_neurons(layers: Sequence[Layer], wanted: Sequence[str]) -> list[tuple[int, int]]:
    """(index in `layers`, neuron) of each "LAYER:NEURON"; without any, three a layer that fire:
    seldom, as often as the median, and often. Raises ConfigError for what is not there."""
    membranes = {
        layer.name.split()[1]: i for i, layer in enumerate(layers) if layer.voltage is not None
    }
    if wanted and not membranes:
        raise ConfigError("--neurons: a dense actor has no membranes")
    chosen = []
    for word in wanted:
        name, _, number = word.partition(":")
        neurons = len(layers[membranes[name]].order) if name in membranes else 0
        if not (number.isdecimal() and int(number) < neurons):
            last = {n: f"{n}:{len(layers[i].order) - 1}" for n, i in membranes.items()}
            sizes = ", ".join(f"{n}:0 to {end}" for n, end in last.items())
            raise ConfigError(f"--neurons: expected LAYER:NEURON, {sizes}; found {word!r}")
        chosen.append((membranes[name], int(number)))
    for i in () if wanted else membranes.values():
        ranked = np.argsort(layers[i].rate, kind="stable")
        firing = ranked[layers[i].rate[ranked] > 0]
        ranked = firing if len(firing) else ranked
        picks = {int(ranked[int(share * (len(ranked) - 1))]): None for share in QUARTILES}
        chosen += [(i, neuron) for neuron in picks]
    return chosen


# -- the page ----------------------------------------------------------------------------------

SPIKING_LAYERS = """Firing rate: spikes a neuron a simulation step, 0 to 1. Silent, saturated: share
of neurons that never, or at every simulation step, fire. In window: share of voltages within the
surrogate's width around the threshold."""
DENSE_LAYERS = "Silent: share of neurons that are never active."
DENSE_NOTE = """A dense actor: its layers have real-valued activations. Spikes, membranes,
thresholds and surrogate windows have no meaning here; activations stand in their place."""
BINARY_NOTE = """One simulation step a control step: leak and reset never act, so this is a network
of binary activations."""


def facts(manager: Manager, episode: Episode) -> list[list[str]]:
    """Rows of the table that opens the page."""
    config, actor = manager.config, manager.algorithm.policy_actor
    total = sum(p.numel() for p in actor.parameters())
    head = sum(p.numel() for p in actor.log_std.parameters())
    length = f"{episode.length:,} control steps"
    if episode.length > episode.steps:
        length += f", of which the first {episode.steps:,} are shown"
    rows = [
        ["environment", config.env],
        ["checkpoint", f"{Path(str(manager.loaded_from)).name}, step {manager.step:,}"],
        ["episode", f"the first that evaluate runs with seed {episode.seed}; deterministic"],
        ["return", f"{episode.total:.1f}"],
        ["length", length],
        ["parameters", f"{total:,}, of which {head:,} are the log-std head's, unused here"],
    ]
    if isinstance(actor, SpikingActor):
        spiking = [layer for layer in episode.layers if layer.voltage is not None]
        spikes = sum(layer.activity.sum() for layer in spiking) / episode.steps
        possible = sum(len(layer.order) for layer in spiking) * episode.time_steps
        beside = ", the encoder's not counted" if len(spiking) < len(episode.layers) else ""
        part = config.spiking
        stack = f"{part.encoder} encoder, {part.neuron} neurons, {part.decoder} decoder"
        rows += [
            ["spikes a control step", f"{spikes:,.0f} of {possible:,} possible{beside}"],
            ["stack", f"{stack}, {part.time_steps} simulation steps a control step"],
        ]
    return rows


def layer_rows(episode: Episode) -> list[list[str]]:
    """Rows of the table of layers, its head first."""
    head = ["layer", "neurons", "mean activation", "silent"]
    if episode.layers[-1].spiking:
        head = ["layer", "neurons", "firing rate", "silent", "saturated", "in window"]
        head.append("spikes a control step")
    rows = [head]
    for layer in episode.layers:
        row = [layer.name, f"{len(layer.order):,}", f"{layer.rate.mean():.3f}"]
        row.append(f"{layer.silent.mean():.1%}")
        if layer.spiking:
            row.append(f"{layer.saturated.mean():.1%}")
            row.append("–" if layer.in_window is None else f"{layer.in_window:.1%}")
            row.append(f"{layer.activity.sum() / episode.steps:,.1f}")
        rows.append(row)
    return rows


def render_page(
    manager: Manager, episode: Episode, name: str, images: list[tuple[Picture, dict[str, bytes]]]
) -> str:
    """The page, which holds its pictures and asks no other file or host for anything."""
    config = manager.config
    note = "" if config.san else DENSE_NOTE
    if config.san and config.spiking.time_steps == 1:
        note = BINARY_NOTE
    layers = SPIKING_LAYERS if config.san else DENSE_LAYERS
    return page(
        f"{name}: {config.env}, {config.actor_name} actor",
        f"""{f'<p class="note">{note}</p>' if note else ""}
{table(facts(manager, episode), "facts")}
<h2>Layers</h2>
<p>{layers}</p>
{table(layer_rows(episode))}
{"".join(section(picture, themes) for picture, themes in images)}""",
        COLORS[config.actor_name],
    )


# -- the command -------------------------------------------------------------------------------


def inspect(
    manager: Manager,
    directory: Path,
    *,
    name: str = "agent",
    seed: int = 0,
    at: int | None = None,
    neurons: Sequence[str] = (),
    overwrite: bool = False,
    on_step: Callable[[str], None] = lambda _: None,
) -> tuple[Path, Episode]:
    """Look inside a loaded agent: PNG files and a page in `directory`; the page and the episode.

    `seed` chooses the episode, `at` the control step where the close-ups begin (the middle, unless
    given), `neurons` whose membranes they show, each as "LAYER:NEURON". Raises ConfigError.
    """
    check_directory(directory, overwrite)
    on_step("an episode")
    episode = record_episode(manager, seed)
    chosen = choose_neurons(episode.layers, neurons)
    length = min(episode.steps, max(4, -(-ZOOM // episode.time_steps)))
    start = (episode.steps - length) // 2 if at is None else at
    if not 0 <= start < episode.steps:
        raise ConfigError(f"--at: the episode has control steps 0 to {episode.steps - 1}")
    zoom = range(start, min(start + length, episode.steps))
    images = []
    for picture in pictures(manager, episode, chosen, zoom):
        on_step(picture.name)
        images.append((picture, render_themes(picture.draw)))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot make {directory}: {error.strerror}") from None
    for stale in PICTURES:
        (directory / f"{stale}.png").unlink(missing_ok=True)
    for picture, themes in images:
        (directory / f"{picture.name}.png").write_bytes(themes["light"])
    path = directory / PAGE
    html = render_page(manager, episode, name, images)
    write_atomically(path, lambda file: file.write(html.encode()))
    return path, episode
