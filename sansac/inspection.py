"""Seeing inside a trained actor: one episode as pictures and a page that holds them all.

What the pictures show is traced one observation at a time, as the actor acts: the spikes are those
of the episode itself, to the last one.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sansac.checkpoint import write_atomically
from sansac.config import ConfigError
from sansac.environments import EVALUATION, Episodic, env_factory, episode_seed
from sansac.evaluation import run_episode
from sansac.manager import Manager
from sansac.networks import DenseActor
from sansac.plots import COLORS
from sansac.spiking import SpikingActor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = "index.html"
MAX_STEPS = 4_000  # control steps that are traced: pictures of more say no more
MAX_ENTRIES = 24  # panels of observation entries
MAX_ACTIONS = 8  # rows of action traces
ZOOM = 48  # simulation steps that the close-ups show, about

# Okabe and Ito's colours; each line has a dash of its own too, for print in grey.
LINES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#56B4E9", "-")]
THRESHOLD = "#D55E00"
THEMES = {"light": ("#ffffff", "#24292f"), "dark": ("#16191d", "#dfe3e8")}  # paper and ink


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
    """Width around the threshold where the surrogate passes a gradient (V)."""
    resets_to_zero: bool = True

    @property
    def rate(self) -> np.ndarray:
        """Spikes a neuron a simulation step over the episode (mean activation), [N]."""
        return self.activity.mean((0, 1), dtype=np.float64)

    @property
    def silent(self) -> float:
        """Share of neurons that are never active."""
        return float((self.activity == 0).all((0, 1)).mean())

    @property
    def saturated(self) -> float:
        """Share of neurons that fire at every simulation step."""
        return float((self.activity == 1).all((0, 1)).mean())

    @property
    def in_window(self) -> float | None:
        """Share of voltages where the surrogate passes a gradient."""
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
            "" if env.render_mode == "rgb_array" else "the environment renders no frames"
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
            x = F.relu(norm(linear(x)))
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
                config.neuron != "clif",  # which subtracts
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
            response = F.relu(actor.norms[0](actor.layers[0](x)))
        else:
            drive = x if actor.encoder is None else actor.encoder(x)
            response = actor.layers[0](drive, "mean")
        curves.append(response.unflatten(0, (len(values), -1)).mean(1).cpu().numpy())
    return np.stack(curves)


# -- pictures ----------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style(theme: str) -> dict[str, Any]:
    """matplotlib's settings for one of THEMES."""
    paper, ink = THEMES[theme]
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: dict[str, Any] = {name: ink for name in inked}
    settings |= {name: paper for name in ("figure.facecolor", "axes.facecolor")}
    return settings | {
        "savefig.facecolor": paper,
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }


def ink() -> str:
    import matplotlib

    return matplotlib.rcParams["text.color"]


def draw_raster(episode: Episode, accent: str, steps: range) -> Figure:
    """Frames, the layers' activity and the actions of some control steps, on one time axis."""
    layers, actions = episode.layers, episode.actions[:, :MAX_ACTIONS]
    frames = {k: f for k, f in episode.frames.items() if k in steps}
    frames = dict(list(frames.items())[:: 1 + (len(frames) - 1) // 8]) if frames else {}
    whole = len(steps) == episode.steps
    strip = [1.2] if frames and whole else []
    rasters = [float(np.clip(0.012 * len(layer.order), 0.7, 2.4)) for layer in layers]
    heights = [*strip, *rasters, *[0.5] * actions.shape[1]]
    figure = new_figure(11, sum(heights) + 1.0)
    rows = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    if strip:
        draw_frames(rows.pop(0), frames, steps)
    for axes, layer in zip(rows, layers, strict=False):
        draw_activity(axes, layer, steps)
    add_simulation_steps(rows[0], episode.time_steps)
    for i, axes in enumerate(rows[len(layers) :]):
        axes.stairs(actions[steps, i], [*steps, steps.stop], baseline=None, color=accent, lw=0.9)
        low, high = actions[:, i].min(), actions[:, i].max()
        axes.set_ylim(low - 0.1 * (high - low + 1e-6), high + 0.1 * (high - low + 1e-6))
        axes.set_ylabel(f"action {i}", rotation=0, ha="right", va="center")
    if not whole:
        for axes in rows:
            axes.vlines(list(steps), 0, 1, transform=axes.get_xaxis_transform(), color=THRESHOLD,
                        lw=0.5, alpha=0.6)  # fmt: skip
    rows[-1].set_xlim(steps.start, steps.stop)
    rows[-1].set_xlabel("control step")
    figure.align_ylabels(rows)
    return figure


def draw_frames(axes: Axes, frames: dict[int, np.ndarray], steps: range) -> None:
    """Each frame stands to the right of the line that marks its control step."""
    starts = list(frames)
    width = starts[1] - starts[0] if len(starts) > 1 else len(steps)
    for start, frame in frames.items():
        place = axes.inset_axes((start, 0, 0.97 * width, 0.88), transform=axes.get_xaxis_transform())
        place.imshow(frame)
        place.set_anchor("SW")
        place.set_axis_off()
        axes.axvline(start, color=ink(), lw=0.8)
        axes.text(start, 0.93, f" step {start}", transform=axes.get_xaxis_transform(), fontsize=8)
    axes.set_yticks([])
    axes.tick_params(bottom=False)
    axes.spines[:].set_visible(False)


def draw_activity(axes: Axes, layer: Layer, steps: range) -> None:
    """A layer's neurons, sorted, against simulation steps; more spikes, more ink."""
    from matplotlib.colors import LinearSegmentedColormap

    paper = axes.get_facecolor()
    tint = LinearSegmentedColormap.from_list("ink", [paper, ink()])
    image = layer.activity[steps].reshape(-1, len(layer.order)).T[layer.order].astype(np.float32)
    # Few columns would be blurred into one another where many rows are shrunk.
    image = image.repeat(1 + 1600 // image.shape[1], axis=1)
    spikes = layer.activity.dtype == bool
    top = 1.0 if spikes else max(float(np.quantile(layer.activity, 0.99)), 1e-6)
    extent = (steps.start, steps.stop, len(layer.order), 0)
    axes.imshow(image, cmap=tint, vmin=0, vmax=top, aspect="auto", extent=extent)
    axes.set_ylabel(f"{layer.name}\n{'field' if layer.name == 'encoder' else 'neuron'}, sorted")
    axes.set_yticks([0, len(layer.order)])


def add_simulation_steps(axes: Axes, time_steps: int) -> None:
    if time_steps == 1:
        return
    scale = (lambda x: x * time_steps, lambda x: x / time_steps)
    axes.secondary_xaxis("top", functions=scale).set_xlabel("simulation step")


def draw_membranes(
    layers: Sequence[Layer], neurons: Sequence[tuple[int, int]], accent: str, steps: range
) -> Figure:
    """Voltages of some neurons, from reset at each control step on, spikes marked."""
    figure = new_figure(11, 1.05 * len(neurons) + 1.1)
    rows = figure.subplots(len(neurons), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (i, neuron) in zip(rows, neurons, strict=True):
        layer = layers[i]
        draw_membrane(axes, layer, neuron, accent, steps)
        rate = layer.rate[neuron]
        axes.set_title(f"{layer.name}, neuron {neuron}: {rate:.2f} spikes a step", loc="left")
    add_simulation_steps(rows[0], layers[neurons[0][0]].activity.shape[1])
    rows[-1].set_xlim(steps.start, steps.stop)
    rows[-1].set_xlabel("control step (state is reset at each line)")
    figure.supylabel("membrane voltage before reset (V)", fontsize=9)
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5)
    return figure


def draw_membrane(axes: Axes, layer: Layer, neuron: int, accent: str, steps: range) -> None:
    assert layer.voltage is not None
    voltage, spikes = layer.voltage[steps, :, neuron], layer.activity[steps, :, neuron]
    time_steps = voltage.shape[1]
    time = np.array(steps)[:, None] + np.arange(1, time_steps + 1) / time_steps
    after = 0.0 if layer.resets_to_zero else np.nan  # where the voltage goes on from a spike
    x: list[float] = []
    y: list[float] = []
    for start, times, values, fired in zip(steps, time, voltage, spikes, strict=True):
        x.append(start)
        y.append(0.0)
        for moment, value, spike in zip(times, values, fired, strict=True):
            x += [moment] * (1 + spike)
            y += [value, after][: 1 + spike]
        x.append(times[-1])
        y.append(np.nan)
    low, high = layer.threshold - layer.window / 2, layer.threshold + layer.window / 2
    axes.axhspan(low, high, color=ink(), alpha=0.08, lw=0, label="surrogate's window")
    axes.vlines(list(steps), 0, 1, transform=axes.get_xaxis_transform(), color=ink(), lw=0.5,
                alpha=0.45, label="reset")  # fmt: skip
    axes.axhline(layer.threshold, color=THRESHOLD, ls="--", lw=1, label="threshold")
    axes.plot(x, y, color=ink(), lw=0.9, marker=".", ms=2.5, label="voltage")
    (marks,) = axes.plot(time[spikes], voltage[spikes], "^", color=accent, mec=ink(), mew=0.5,
                         ms=5.5, clip_on=False, label="spike")  # fmt: skip
    marks.set_in_layout(False)


def draw_rates(layers: Sequence[Layer], accent: str) -> Figure:
    """Histograms a layer: firing rates of its neurons above, membrane voltages below."""
    spiking = layers[-1].voltage is not None
    figure = new_figure(11, 5 if spiking else 2.8)
    grid = figure.subplots(1 + spiking, len(layers), squeeze=False)
    for axes, layer in zip(grid[0], layers, strict=True):
        shares = f"{layer.silent:.0%} silent" + f", {layer.saturated:.0%} saturated" * spiking
        axes.set_title(f"{layer.name}: {len(layer.order)} neurons\n{shares}")
        edges = np.linspace(0, 1 if spiking else max(layer.rate.max(), 1e-6), 31)
        draw_rate_histogram(axes, layer, edges, accent)
        axes.set_xlabel("spikes a simulation step" if spiking else "mean activation")
    grid[0, 0].set_ylabel("neurons")
    for axes, layer in zip(grid[1] if spiking else (), layers, strict=False):
        if layer.voltage is None:
            axes.set_axis_off()
        else:
            draw_voltages(axes, layer)
    if spiking:
        grid[1, -1].set_ylabel("share of voltages")
    handles, labels = grid[0, -1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3)
    return figure


def draw_rate_histogram(axes: Axes, layer: Layer, edges: np.ndarray, accent: str) -> None:
    rate, activity = layer.rate, layer.activity
    silent, full = (activity == 0).all((0, 1)), (activity == 1).all((0, 1))
    groups = [rate[~silent & ~full], rate[silent], rate[full]]
    labels = ["neurons", "silent: never active", "saturated: at every step"]
    if activity.dtype != bool:
        groups, labels = groups[:2], labels[:2]
    axes.hist(groups, edges, stacked=True, label=labels, color=[accent, ink(), "0.6"][: len(groups)],
              hatch=["", "", "////"][: len(groups)])  # fmt: skip


def draw_voltages(axes: Axes, layer: Layer) -> None:
    assert layer.voltage is not None
    low, high = np.quantile(layer.voltage, [0.005, 0.995])
    half = layer.window / 2
    edges = np.linspace(min(low, layer.threshold - half), max(high, layer.threshold + half), 61)
    count, _ = np.histogram(layer.voltage, edges)
    axes.stairs(count / layer.voltage.size, edges, color=ink(), fill=True, alpha=0.6)
    axes.axvspan(layer.threshold - half, layer.threshold + half, color=ink(), alpha=0.1, lw=0)
    axes.axvline(layer.threshold, color=THRESHOLD, ls="--", lw=1.2)
    axes.set_title(f"{layer.in_window:.0%} in the surrogate's window (grey)")
    axes.set_xlabel("voltage before reset (V); dashed: threshold")


def draw_panels(
    episode: Episode, entries: Sequence[int], span: float, draw: Callable[[Axes, int], None]
) -> Figure:
    """A panel an observation entry, over a histogram of the values it took in the episode."""
    columns = min(6, len(entries))
    lines = -(-len(entries) // columns)
    figure = new_figure(11, (1.45 if columns > 3 else 2.4) * lines + 0.8)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes in grid[len(entries) :]:
        axes.set_axis_off()
    for i, (axes, entry) in enumerate(zip(grid, entries, strict=False)):
        values = episode.observations[:, entry]
        count, edges = np.histogram(values, np.linspace(-span, span, 41))
        axes.stairs(count / (3 * max(count.max(), 1)), edges, fill=True, color=ink(), alpha=0.18,
                    transform=axes.get_xaxis_transform(), label="values in the episode")  # fmt: skip
        draw(axes, i)
        axes.set_title(f"observation {entry}")
        axes.set_xlim(-span, span)
        if i == 0:
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return figure


def draw_tuning(
    episode: Episode, entries: Sequence[int], values: np.ndarray, curves: np.ndarray, unit: str
) -> Figure:
    """Responses of the first layer's neurons, [entries, V, N], in the colour of its actor."""
    spiking = episode.layers[-1].voltage is not None

    def draw(axes: Axes, i: int) -> None:
        change = np.ptp(curves[i], axis=0)
        low, high = np.quantile(curves[i], [0.25, 0.75], axis=1)
        axes.fill_between(values, low, high, color=accent, alpha=0.25, lw=0, label="middle half")
        for k, neuron in enumerate(np.argsort(-change)[: len(LINES)]):
            color, dash = LINES[k]
            label = None if k else "the five neurons that change most"
            axes.plot(values, curves[i][:, neuron], color=color, ls=dash, lw=1.1, label=label)
        axes.plot(values, curves[i].mean(1), color=ink(), lw=2, label="mean of all neurons")

    accent = COLORS["spiking" if spiking else "dense"]
    figure = draw_panels(episode, entries, float(values[-1]), draw)
    figure.supylabel("spikes a simulation step" if spiking else "activation", fontsize=9)
    figure.supxlabel(f"observation entry ({unit})", fontsize=9)
    return figure


def draw_encoder(
    episode: Episode, actor: SpikingActor, entries: Sequence[int], unit: str
) -> Figure:
    """The Gaussian receptive fields that the population encoder learned."""
    assert actor.encoder is not None
    span = actor.encoder.range + 1
    values = torch.linspace(-span, span, 161)
    size = episode.observations.shape[1]
    with torch.no_grad():
        grid = values.to(actor.encoder.mean.device)[:, None].expand(-1, size)
        fields = actor.encoder.activation(grid).unflatten(1, (size, -1)).cpu().numpy()
    outside = np.abs(episode.observations) > actor.encoder.range

    def draw(axes: Axes, i: int) -> None:
        for k in range(fields.shape[2]):
            color, dash = LINES[k % len(LINES)]
            label = None if k else "one receptive field each"
            axes.plot(values, fields[:, entries[i], k], color=color, ls=dash, lw=1, label=label)
        if outside[:, entries[i]].any():
            axes.text(0.5, 0.9, f"{outside[:, entries[i]].mean():.1%} outside", ha="center",
                      transform=axes.transAxes, fontsize=7)  # fmt: skip

    figure = draw_panels(episode, entries, span, draw)
    figure.supylabel("activation of each field", fontsize=9)
    figure.supxlabel(f"observation entry ({unit})", fontsize=9)
    return figure


# -- what is drawn -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A section of the page; `draw` is called once a theme."""

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]


def pictures(
    manager: Manager, episode: Episode, neurons: Sequence[tuple[int, int]], zoom: range
) -> Iterator[Picture]:
    """Everything there is to see in an actor, in the order of the page."""
    actor = manager.algorithm.policy_actor
    spiking = isinstance(actor, SpikingActor)
    accent = COLORS[manager.config.actor_name]
    layers = episode.layers
    what = "spikes" if spiking else "activations"
    yield Picture(
        "raster", "The episode",
        f"Each row of a panel is a neuron, each column a moment, ink its {what}. Neurons of hidden "
        "layers are sorted by the phase of their activity, so that those which act together lie "
        "together; constant ones come last. Encoder fields and output populations keep their own "
        f"order. A frame shows the moment of the line at its left. {episode.no_frames}",
        lambda: draw_raster(episode, accent, range(episode.steps)),
    )  # fmt: skip
    yield Picture(
        "zoom", "A closer look",
        f"Control steps {zoom.start} to {zoom.stop} of the same episode, "
        f"{episode.time_steps} simulation {'steps' if episode.time_steps > 1 else 'step'} each; a "
        "line marks where each begins.",
        lambda: draw_raster(episode, accent, zoom),
    )  # fmt: skip
    if spiking:
        yield Picture(
            "membranes", "Membranes",
            "Voltages start from reset at every control step; where one reaches the threshold, the "
            "neuron spikes and its voltage is reset. Only within the surrogate's window does a "
            "spike pass a gradient in training.",
            lambda: draw_membranes(layers, neurons, accent, zoom),
        )  # fmt: skip
    yield Picture(
        "rates" if spiking else "activations",
        "Firing rates and voltages" if spiking else "Activations",
        "How often each neuron fires over the episode. A silent neuron never does and a saturated "
        "one always does: neither tells the next layer anything."
        if spiking
        else "Mean activation of each neuron over the episode. A silent neuron is at zero all along.",
        lambda: draw_rates(layers, accent),
    )  # fmt: skip
    yield from tuning_pictures(manager, episode)


def tuning_pictures(manager: Manager, episode: Episode) -> Iterator[Picture]:
    actor = manager.algorithm.policy_actor
    normalized = manager.config.normalize_observations
    unit = "standard deviations from its mean" if normalized else "in its own unit"
    spread = np.argsort(-episode.observations.std(0), kind="stable")[:MAX_ENTRIES]
    entries = sorted(int(i) for i in spread)
    size = episode.observations.shape[1]
    which = "" if size <= MAX_ENTRIES else f" The {MAX_ENTRIES} of {size} entries that vary most."
    if isinstance(actor, SpikingActor) and actor.encoder is not None:
        yield Picture(
            "encoder", "Receptive fields",
            f"The Gaussian fields that each observation entry drives, as they were learned.{which}",
            lambda: draw_encoder(episode, actor, entries, unit),
        )  # fmt: skip
    span = 3.0 if normalized else max(1.0, float(np.abs(episode.observations).max()))
    values = torch.linspace(-span, span, 49, device=manager.device)
    seen = torch.from_numpy(episode.observations).to(manager.device)
    curves = tuning(actor, seen, entries, values)
    yield Picture(
        "tuning", "Tuning curves",
        "How the first layer answers one observation entry, the others staying as they were in the "
        f"episode, which the response is a mean over.{which}",
        lambda: draw_tuning(episode, entries, values.cpu().numpy(), curves, unit),
    )  # fmt: skip


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
            sizes = ", ".join(f"{n}:0 to {n}:{len(layers[i].order) - 1}" for n, i in
                              membranes.items())  # fmt: skip
            raise ConfigError(f"--neurons: expected LAYER:NEURON, {sizes}; found {word!r}")
        chosen.append((membranes[name], int(number)))
    for i in () if wanted else membranes.values():
        ranked = np.argsort(layers[i].rate, kind="stable")
        firing = ranked[layers[i].rate[ranked] > 0]
        ranked = firing if len(firing) else ranked
        picks = {int(ranked[int(share * (len(ranked) - 1))]): None for share in (0.25, 0.5, 0.75)}
        chosen += [(i, neuron) for neuron in picks]
    return chosen


# -- the page ----------------------------------------------------------------------------------

CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #24292f; --soft: #59636e;
  --line: #d1d9e0; --accent: ACCENT; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16191d; --ink: #dfe3e8; --soft: #9aa4ae; --line: #3a4148; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(0.8rem, 3vw, 2.5rem) 4rem; max-width: 1240px;
  background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.2rem; overflow-wrap: anywhere; }
h1::after { content: ""; display: block; width: 4rem; border-top: 4px solid var(--accent);
  margin-top: 0.5rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 0.3rem; }
p { max-width: 75ch; margin: 0.3rem 0 0.8rem; color: var(--soft); overflow-wrap: anywhere; }
.note { border-left: 4px solid var(--accent); padding-left: 0.8rem; color: var(--ink); }
.wide { overflow-x: auto; }
.wide img { display: block; width: 100%; height: auto; }
@media (max-width: 760px) { .wide img { width: auto; max-width: none; height: auto;
  min-width: min(100%, 780px); zoom: 0.55; } }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.8rem 0; }
th, td { padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { font-weight: 600; }
th:first-child, .facts td { text-align: left; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
"""


def facts(manager: Manager, episode: Episode) -> dict[str, str]:
    config, actor = manager.config, manager.algorithm.policy_actor
    head = sum(p.numel() for p in actor.log_std.parameters())
    total = sum(p.numel() for p in actor.parameters())
    values = {
        "environment": config.env,
        "checkpoint": f"{manager.loaded_from}, step {manager.step:,}",
        "episode": f"the first evaluation episode of seed {episode.seed}, deterministic actions",
        "return": f"{episode.total:.1f}",
        "length": f"{episode.length:,} control steps",
        "parameters": f"{total:,}, of which {head:,} of the log-std head that acting does not need",
    }
    if episode.length > episode.steps:
        values["shown"] = f"the first {episode.steps:,} control steps"
    if isinstance(actor, SpikingActor):
        layers = [layer for layer in episode.layers if layer.voltage is not None]
        spikes = sum(layer.activity.sum() for layer in layers) / episode.steps
        fields = episode.layers[0].activity.sum() / episode.steps
        from_encoder = f", and {fields:,.0f} of its encoder" * (len(layers) < len(episode.layers))
        stack = config.spiking
        values["spikes a control step"] = f"{spikes:,.0f}{from_encoder}"
        values["stack"] = f"{stack.encoder} encoder, {stack.neuron} neurons, {stack.decoder} decoder"
        values["simulation steps"] = f"{stack.time_steps} a control step"
    return values


def layer_rows(episode: Episode) -> list[list[str]]:
    """The table of layers, its head first."""
    if episode.layers[-1].voltage is None:
        head = ["layer", "neurons", "mean activation", "silent"]
        return [head] + [
            [layer.name, str(len(layer.order)), f"{layer.rate.mean():.3f}", f"{layer.silent:.1%}"]
            for layer in episode.layers
        ]
    rows = [["layer", "neurons", "firing rate", "spikes a control step", "silent", "saturated",
             "in window"]]  # fmt: skip
    for layer in episode.layers:
        window = "–" if layer.in_window is None else f"{layer.in_window:.1%}"
        spikes = layer.activity.sum() / episode.steps
        rows.append(
            [layer.name, str(len(layer.order)), f"{layer.rate.mean():.3f}", f"{spikes:,.1f}",
             f"{layer.silent:.1%}", f"{layer.saturated:.1%}", window]
        )  # fmt: skip
    return rows


def note(manager: Manager) -> str:
    """What a reader of this actor's page should know first."""
    if not manager.config.san:
        return (
            "A dense actor: its layers have real-valued activations. Spikes, membranes, thresholds "
            "and surrogate windows have no meaning here; activations stand in their place."
        )
    if manager.config.spiking.time_steps == 1:
        return (
            "One simulation step a control step: leak and reset never act, so this is a network of "
            "binary activations."
        )
    return ""


def render_page(
    manager: Manager, episode: Episode, name: str, images: list[tuple[Picture, dict[str, bytes]]]
) -> str:
    """The page, which holds its pictures and asks no other file or host for anything."""
    config = manager.config
    title = escape(f"{name}: {config.env}, {config.actor_name} actor")
    remark = note(manager)
    sections = [table({k: [v] for k, v in facts(manager, episode).items()})]
    head, *rows = layer_rows(episode)
    sections.append(f'<h2>Layers</h2><div class="wide">{layer_table(head, rows)}</div>')
    sections += [section(picture, themes) for picture, themes in images]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{CSS.replace("ACCENT", COLORS[config.actor_name])}</style>
</head>
<body>
<h1>{title}</h1>
{f'<p class="note">{escape(remark)}</p>' if remark else ""}
{"".join(sections)}
</body>
</html>
"""


def table(values: dict[str, list[str]]) -> str:
    rows = (
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in values.items()
    )
    return f'<table class="facts">{"".join(rows)}</table>'


def layer_table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def section(picture: Picture, themes: dict[str, bytes]) -> str:
    data = {
        theme: "data:image/png;base64," + base64.b64encode(png).decode()
        for theme, png in themes.items()
    }
    return (
        f'<section id="{picture.name}"><h2>{escape(picture.title)}</h2>'
        f'<p>{escape(picture.caption)}</p><div class="wide"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{data["dark"]}">'
        f'<img alt="{escape(picture.title)}" src="{data["light"]}"></picture></div></section>'
    )


# -- the command -------------------------------------------------------------------------------


def render(picture: Picture, theme: str) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(style(theme)):
        picture.draw().savefig(buffer, format="png")
    return buffer.getvalue()


def check_directory(directory: Path, overwrite: bool) -> None:
    """Raises ConfigError for a file, or for a directory that is not empty unless `overwrite`."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--out: {directory} is no directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise ConfigError(
            f"--out: {directory} is not empty; choose another directory or pass --overwrite"
        )


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
        images.append((picture, {theme: render(picture, theme) for theme in THEMES}))
    directory.mkdir(parents=True, exist_ok=True)
    for picture, themes in images:
        (directory / f"{picture.name}.png").write_bytes(themes["light"])
    page = directory / PAGE
    html = render_page(manager, episode, name, images)
    write_atomically(page, lambda file: file.write(html.encode()))
    return page, episode
