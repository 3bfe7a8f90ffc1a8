"""Pictures of what an actor does: drawn for a light and a dark page, readable in grey."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sansac.page import ink, new_figure
from sansac.plots import COLORS
from sansac.spiking import PopulationEncoder

if TYPE_CHECKING:
    from sansac.inspection import Episode, Layer

MAX_ACTIONS = 8  # rows of action traces
# Okabe and Ito's colours; each line has a dash of its own too, for print in grey.
LINES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#56B4E9", "-")]
THRESHOLD = "#D55E00"


def integer_ticks(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def step_lines(axes: Axes, steps: range, color: str, label: str = "") -> None:
    """A thin line where each control step begins."""
    across = axes.get_xaxis_transform()
    axes.vlines(list(steps), 0, 1, transform=across, color=color, lw=0.5, alpha=0.5, label=label)


def draw_raster(episode: Episode, accent: str, steps: range) -> Figure:
    """The layers' activity and the actions of some control steps, on one time axis; above those of
    the whole episode its frames."""
    layers, actions = episode.layers, episode.actions[:, :MAX_ACTIONS]
    whole = len(steps) == episode.steps
    strip = [1.2] if episode.frames and whole else []
    rasters = [float(np.clip(0.012 * len(layer.order), 0.7, 2.4)) for layer in layers]
    heights = [*strip, *rasters, *[0.5] * actions.shape[1]]
    figure = new_figure(11, sum(heights) + 1.0)
    rows = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    if strip:
        draw_frames(rows.pop(0), episode.frames, steps)
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
            step_lines(axes, steps, THRESHOLD)
    rows[-1].set_xlim(steps.start, steps.stop)
    rows[-1].set_xlabel("control step")
    integer_ticks(rows[-1].xaxis)
    figure.align_ylabels(rows)
    return figure


def draw_frames(axes: Axes, frames: dict[int, np.ndarray], steps: range) -> None:
    """Each frame stands to the right of the line that marks its control step; the last is cut at
    the end of the axes."""
    across = axes.get_xaxis_transform()
    starts = list(frames)[:: 1 + (len(frames) - 1) // 8]
    width = starts[1] - starts[0] if len(starts) > 1 else len(steps)
    for start in starts:
        if start + width / 2 > steps.stop:
            break
        room = min(0.97 * width, steps.stop - start)
        seen = round(frames[start].shape[1] * room / (0.97 * width))
        place = axes.inset_axes((start, 0, room, 0.88), transform=across)
        place.imshow(frames[start][:, :seen])
        place.set_anchor("SW")
        place.set_axis_off()
        axes.axvline(start, color=ink(), lw=0.8)
        axes.text(start, 0.93, f" step {start}", transform=across, fontsize=8)
    axes.set_yticks([])
    axes.tick_params(bottom=False)
    axes.spines[:].set_visible(False)


def draw_activity(axes: Axes, layer: Layer, steps: range) -> None:
    """A layer's neurons, sorted, against simulation steps; more spikes, more ink."""
    paper = axes.get_facecolor()
    tint = LinearSegmentedColormap.from_list("ink", [paper, ink()])
    image = layer.activity[steps].reshape(-1, len(layer.order)).T[layer.order].astype(np.float32)
    # Enlarged first, since shrinking one axis of an image blurs the other.
    rows, columns = image.shape
    image = image.repeat(1 + 600 // rows, axis=0).repeat(1 + 1600 // columns, axis=1)
    top = 1.0 if layer.spiking else max(float(np.quantile(layer.activity, 0.99)), 1e-6)
    extent = (steps.start, steps.stop, len(layer.order), 0)
    axes.imshow(image, cmap=tint, vmin=0, vmax=top, aspect="auto", extent=extent)
    axes.set_ylabel(layer.label, rotation=0, ha="right", va="center")
    axes.set_yticks([])


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
        draw_membrane(axes, layers[i], neuron, accent, steps)
        rate = f"{layers[i].rate[neuron]:.2f} spikes a simulation step"
        axes.set_title(f"{layers[i].name}, neuron {neuron}: {rate}", loc="left")
    add_simulation_steps(rows[0], layers[neurons[0][0]].activity.shape[1])
    rows[-1].set_xlim(steps.start, steps.stop)
    rows[-1].set_xlabel("control step (state is reset at each line)")
    integer_ticks(rows[-1].xaxis)
    figure.supylabel("membrane voltage before reset (V)", fontsize=9)
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5)
    return figure


def draw_membrane(axes: Axes, layer: Layer, neuron: int, accent: str, steps: range) -> None:
    assert layer.voltage is not None
    voltage, spikes = layer.voltage[steps, :, neuron], layer.activity[steps, :, neuron]
    time_steps = voltage.shape[1]
    time = np.array(steps)[:, None] + np.arange(1, time_steps + 1) / time_steps
    low, high = layer.threshold - layer.window / 2, layer.threshold + layer.window / 2
    axes.axhspan(low, high, color=ink(), alpha=0.08, lw=0, label="surrogate's window")
    step_lines(axes, steps, ink(), "reset")
    axes.axhline(layer.threshold, color=THRESHOLD, ls="--", lw=1, label="threshold")
    line = membrane_line(voltage, spikes, time, layer.resets_to_zero)
    axes.plot(*line, color=ink(), lw=0.9, marker=".", ms=2.5, label="voltage")
    marker: dict[str, Any] = {"color": accent, "mec": ink(), "mew": 0.5, "ms": 5.5}
    (marks,) = axes.plot(time[spikes], voltage[spikes], "^", clip_on=False, label="spike", **marker)
    marks.set_in_layout(False)


def membrane_line(
    voltage: np.ndarray, spikes: np.ndarray, time: np.ndarray, resets_to_zero: bool
) -> tuple[list[float], list[float]]:
    """Voltages, spikes and their times, each [K, T], as the points of a line, which breaks at NaN:
    from 0 at each control step, and after a spike from 0 or, where that is not known, anew."""
    x: list[float] = []
    y: list[float] = []
    after = 0.0 if resets_to_zero else np.nan
    for times, values, fired in zip(time, voltage, spikes, strict=True):
        x.append(times[0] - 1 / len(times))
        y.append(0.0)
        for moment, value, spike in zip(times, values, fired, strict=True):
            x += [moment, moment] if spike else [moment]
            y += [value, after] if spike else [value]
        x.append(times[-1])
        y.append(np.nan)
    return x, y


def draw_rates(layers: Sequence[Layer], accent: str) -> Figure:
    """Histograms a layer: firing rates of its neurons above, membrane voltages below."""
    spiking = layers[-1].voltage is not None
    figure = new_figure(11, 5.2 if spiking else 2.9)
    grid = figure.subplots(1 + spiking, len(layers), squeeze=False)
    for axes, layer in zip(grid[0], layers, strict=True):
        shares = f"{layer.silent.mean():.0%} silent"
        shares += f", {layer.saturated.mean():.0%} saturated" * spiking
        axes.set_title(f"{layer.label}\n{shares}")
        edges = np.linspace(0, 1 if spiking else max(layer.rate.max(), 1e-6), 31).tolist()
        draw_rate_histogram(axes, layer, edges, accent)
        axes.set_xlabel("spikes a simulation step" if spiking else "mean activation")
        integer_ticks(axes.yaxis)
    grid[0, 0].set_ylabel("neurons")
    for axes, layer in zip(grid[1] if spiking else (), layers, strict=False):
        draw_voltages(axes, layer)
    if spiking:
        first = next(i for i, layer in enumerate(layers) if layer.voltage is not None)
        grid[1, first].set_ylabel("share of voltages")
    keys = [axes.get_legend_handles_labels()[0] for axes in grid[:, -1]]
    figure.legend(handles=[*chain(*keys)], loc="outside upper center", ncols=5)
    return figure


def draw_rate_histogram(axes: Axes, layer: Layer, edges: list[float], accent: str) -> None:
    rest = ~(layer.silent | layer.saturated)
    groups = [
        (layer.rate[rest], "neurons", accent, ""),
        (layer.rate[layer.silent], "silent: never active", ink(), ""),
        (layer.rate[layer.saturated], "saturated: at every step", "0.6", "////"),
    ]
    rates, labels, colors, hatches = zip(*groups[: 3 if layer.spiking else 2], strict=True)
    axes.hist(rates, edges, stacked=True, label=labels, color=colors, hatch=hatches)


def draw_voltages(axes: Axes, layer: Layer) -> None:
    if layer.voltage is None:
        axes.set_axis_off()
        return
    low, high = np.quantile(layer.voltage, [0.005, 0.995])
    left, right = layer.threshold - layer.window / 2, layer.threshold + layer.window / 2
    edges = np.linspace(min(low, left), max(high, right), 61)
    count, _ = np.histogram(layer.voltage, edges)
    axes.stairs(count / layer.voltage.size, edges, color=ink(), fill=True, alpha=0.6)
    axes.axvspan(left, right, color=ink(), alpha=0.1, lw=0, label="surrogate's window")
    axes.axvline(layer.threshold, color=THRESHOLD, ls="--", lw=1.2, label="threshold")
    axes.set_title(f"{layer.in_window:.0%} in window")
    axes.set_xlabel("voltage before reset (V)")


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
        draw_values(axes, episode.observations[:, entry], span)
        draw(axes, i)
        axes.set_title(f"observation {entry}")
        axes.set_xlim(-span, span)
        if i == 0:
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return figure


def draw_values(axes: Axes, values: np.ndarray, span: float) -> None:
    """A histogram along the lower third of a panel."""
    count, edges = np.histogram(values, np.linspace(-span, span, 41))
    height, across = count / (3 * max(count.max(), 1)), axes.get_xaxis_transform()
    look: dict[str, Any] = {"fill": True, "color": ink(), "alpha": 0.18}
    axes.stairs(height, edges, transform=across, label="values in the episode", **look)


def draw_tuning(
    episode: Episode, entries: Sequence[int], values: np.ndarray, curves: np.ndarray, unit: str
) -> Figure:
    """Responses of the first layer's neurons, [entries, V, N], in the colour of its actor."""
    spiking = episode.layers[-1].voltage is not None

    def draw(axes: Axes, i: int) -> None:
        change = np.ptp(curves[i], axis=0)
        low, high = np.quantile(curves[i], [0.25, 0.75], axis=1)
        band: dict[str, Any] = {"color": accent, "alpha": 0.25, "lw": 0}
        axes.fill_between(values, low, high, label="middle half of the neurons", **band)
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
    episode: Episode, encoder: PopulationEncoder, entries: Sequence[int], unit: str
) -> Figure:
    """The Gaussian receptive fields that the population encoder learned."""
    span = encoder.range + 1
    values = torch.linspace(-span, span, 161)
    size = episode.observations.shape[1]
    with torch.no_grad():
        grid = values.to(encoder.mean.device)[:, None].expand(-1, size)
        fields = encoder.activation(grid).unflatten(1, (size, -1)).cpu().numpy()
    outside = np.abs(episode.observations) > encoder.range

    def draw(axes: Axes, i: int) -> None:
        for k in range(fields.shape[2]):
            color, dash = LINES[k % len(LINES)]
            label = None if k else "one receptive field each"
            axes.plot(values, fields[:, entries[i], k], color=color, ls=dash, lw=1, label=label)
        if share := outside[:, entries[i]].mean():
            note = f"{share:.1%} outside the range"
            axes.text(0.5, 0.93, note, ha="center", transform=axes.transAxes, fontsize=7)

    figure = draw_panels(episode, entries, span, draw)
    figure.supylabel("activation of each field", fontsize=9)
    figure.supxlabel(f"observation entry ({unit})", fontsize=9)
    return figure
