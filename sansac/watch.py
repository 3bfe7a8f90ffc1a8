"""A run that is being trained, followed from outside: its files are read and nothing is touched."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sansac.checkpoint import read_config, read_record
from sansac.config import ConfigError
from sansac.logger import Row, parse_row
from sansac.progress import LINE_SECONDS, SafeStream, clock, takes_live

if TYPE_CHECKING:
    from rich.console import RenderableType

LOOK_SECONDS = 1.0
SILENT_SECONDS = 60.0  # without a new row, after which a run may have been killed
RECENT = 30  # rows that the ETA is taken from
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"


class Panel(NamedTuple):
    """What is shown together; a tag that ends in / stands for one a layer."""

    title: str
    tags: tuple[str, ...]


PANELS = (
    Panel("return", ("train/episode_return", "eval/return_mean")),
    Panel("critics' loss", ("loss/critic",)),
    Panel("actor's loss", ("loss/actor",)),
    Panel("mean action value", ("sac/q_mean",)),
    Panel("temperature alpha", ("sac/alpha",)),
    Panel("entropy (nats)", ("sac/entropy",)),
    Panel("firing rate", ("spiking/firing_rate/",)),
    Panel("share in the surrogate's window", ("spiking/in_window/",)),
    Panel("steps and updates a second", ("perf/steps_per_second", "perf/updates_per_second")),
    Panel("GPU utilization (%)", ("gpu/utilization",)),
    Panel("GPU power (W)", ("gpu/power_watts",)),
    Panel("GPU memory (MB)", ("gpu/memory_mb",)),
    Panel("GPU energy (J)", ("gpu/energy_joules",)),
)


Points = list[tuple[int, float]]  # environment steps and values


class Watched:
    """A run directory as it stands at the last `look()`.

    `series` holds the values of each tag. They grow as `metrics.jsonl` does, and begin anew where a
    resume has cut it; a last line that is torn waits for its end. Raises ConfigError for what is no
    run directory.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, read_config(path)
        if not (path / "run.json").is_file():
            raise ConfigError(f"{path} holds no run.json: it is no run directory")
        self.series: dict[str, Points] = {}
        self.recent: deque[Row] = deque(maxlen=RECENT)
        self.record: dict[str, Any] = {}
        self._file, self._offset = 0, 0
        self._changed = time.time()
        self.look()

    def look(self) -> None:
        """Take in what was written since."""
        self.record = read_record(self.path) or self.record  # first: an ended run has all its rows
        try:
            with open(self.path / "metrics.jsonl", "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:
                    self._begin(found.st_ino)
                self._changed = found.st_mtime
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if row := parse_row(line):
                self._take(row)

    def _begin(self, file: int) -> None:
        self.config = read_config(self.path)  # a resume may have changed its lengths
        self.series.clear()
        self.recent.clear()
        self._file, self._offset = file, 0

    def _take(self, row: Row) -> None:
        if row.get("time") is None or not math.isfinite(row["time"]):
            return  # whatever wrote it, it was no run
        self.recent.append(row)
        for tag, value in row.items():
            if "/" in tag and value is not None and math.isfinite(value):
                self.series.setdefault(tag, []).append((row["step"], value))

    # -- how it stands -----------------------------------------------------------------------------

    @property
    def status(self) -> str:
        return str(self.record.get("status", "unknown"))

    @property
    def ended(self) -> bool:
        return self.status in ("finished", "interrupted", "failed")

    @property
    def step(self) -> int:
        return self.recent[-1]["step"] if self.recent else 0

    @property
    def fraction(self) -> float:
        return min(1.0, self.step / self.config.total_steps)

    def eta(self) -> float | None:
        """Seconds of collecting and learning to the end, at the pace of the last rows."""
        rows = self.recent
        if self.ended or len(rows) < 2 or rows[-1]["step"] <= rows[0]["step"]:
            return None
        pace = (rows[-1]["time"] - rows[0]["time"]) / (rows[-1]["step"] - rows[0]["step"])
        return max(0, self.config.total_steps - self.step) * pace

    def standing(self) -> str:
        """Status, step, and what there is to say of time, as one line."""
        total = self.config.total_steps
        parts = [self.status, f"step {self.step:,} of {total:,} ({self.fraction:.1%})"]
        if self.recent:
            parts.append(f"{clock(self.recent[-1]['time'])} of collecting and learning")
        if (eta := self.eta()) is not None:
            parts.append(f"ETA {clock(eta)}")
        if not self.ended and (silence := time.time() - self._changed) > SILENT_SECONDS:
            parts.append(f"nothing new for {clock(silence)}: evaluating, or killed")
        final = (self.record.get("final") or {}) if self.ended else {}
        mean, std = final.get("return_mean"), final.get("return_std")
        if isinstance(mean, float) and isinstance(std, float):
            parts.append(f"final return {mean:.1f} ± {std:.1f}")
        return ", ".join(parts)

    def panel(self, panel: Panel) -> dict[str, Points]:
        """The series of a panel, by tag, of those that were logged."""
        return {
            tag: points
            for wanted in panel.tags
            for tag, points in self.series.items()
            if tag == wanted or (wanted.endswith("/") and tag.startswith(wanted))
        }

    @property
    def title(self) -> str:
        config = self.config
        return f"{self.path.resolve().name}: {config.env}, {config.actor_name} actor"


# -- in the terminal -------------------------------------------------------------------------------


def watch(path: Path) -> None:
    """Show a run until it has ended: a live table at a terminal, plain lines elsewhere, on stdout.

    Raises ConfigError for what is no run directory.
    """
    watched = Watched(path)
    stream = SafeStream(sys.stdout)
    follow_live(watched, stream) if takes_live(stream) else follow_plainly(watched)


def follow_live(watched: Watched, stream: SafeStream) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)  # type: ignore[arg-type]
    utf = stream.encoding.lower().replace("-", "").startswith("utf")
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(
                table(watched, console.width, BLOCKS if utf else ASCII_BLOCKS), refresh=True
            )
            if watched.ended:
                return
            time.sleep(LOOK_SECONDS)
            watched.look()


def follow_plainly(watched: Watched) -> None:
    print(watched.title, flush=True)
    next_line, told = 0.0, -1
    while True:
        evaluations = len(watched.series.get("eval/return_mean", ()))
        now = time.monotonic()
        if now >= next_line or evaluations != told or watched.ended:
            next_line, told = now + LINE_SECONDS, evaluations
            print(line(watched), flush=True)
        if watched.ended:
            return
        time.sleep(LOOK_SECONDS)
        watched.look()


def line(watched: Watched) -> str:
    parts = [watched.standing()]
    for panel in PANELS[:3]:
        for tag, points in watched.panel(panel).items():
            parts.append(f"{name_of(tag)} {number(points[-1][1])}")
    return ", ".join(parts)


def table(watched: Watched, width: int, blocks: str = BLOCKS) -> RenderableType:
    """The run's standing, and the last value and the course of each tag."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True, style="dim")
    rows.add_column(no_wrap=True, justify="right")
    rows.add_column(no_wrap=True, style="cyan")
    for panel in PANELS:
        for tag, points in watched.panel(panel).items():
            values = [value for _, value in points]
            course = sparkline(values, max(8, width - 48), blocks)
            rows.add_row(Text(name_of(tag)), number(values[-1]), Text(course))
    bar = Table.grid(expand=True)
    bar.add_row(ProgressBar(total=1.0, completed=watched.fraction))
    return Group(Text(watched.title, style="bold"), Text(watched.standing()), bar, rows)


def name_of(tag: str) -> str:
    """`spiking/firing_rate/0` -> `firing rate, layer 0`."""
    family, *rest = tag.split("/")
    name = rest[0].replace("_", " ")
    prefix = {"train": "training ", "eval": "evaluation ", "loss": "loss of ", "gpu": "GPU "}
    layer = f", layer {rest[1]}" if len(rest) > 1 else ""
    return f"{prefix.get(family, '')}{name}{layer}"


def number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """A bar a value, or a mean of several where there are more than `width`."""
    means = thinned(values, width)
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * scale)] for mean in means)


def thinned(values: Sequence[float], most: int) -> list[float]:
    """At most `most` values: means over stretches of the same length."""
    count = min(len(values), most)
    edges = [i * len(values) // count for i in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
