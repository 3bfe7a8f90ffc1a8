"""How the runs of a sweep stand, on stderr: a live table at a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from sansac.logger import parse_row
from sansac.progress import SafeStream, clock, start_live

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from sansac.sweep import Run

LOOK_SECONDS = 1.0  # between looks at the metrics of running runs
LINE_SECONDS = 30.0  # between plain lines while nothing changes
TAIL_BYTES = 16_384  # of metrics.jsonl: some thirty rows
STYLES = {"running": "cyan", "finished": "green", "failed": "red", "interrupted": "yellow"}


@dataclass
class Seen:
    """What the end of a run's metrics tells."""

    step: int = 0
    evaluation: float | None = None
    episode_return: float | None = None
    seconds_a_step: float | None = None

    def look(self, path: Path) -> None:
        rows = tail(path)
        if not rows:
            return
        first, last = rows[0], rows[-1]
        self.step = last["step"]
        if last["step"] > first["step"]:
            self.seconds_a_step = (last["time"] - first["time"]) / (last["step"] - first["step"])
        for row in rows:
            self.evaluation = row.get("eval/return_mean", self.evaluation)
            self.episode_return = row.get("train/episode_return", self.episode_return)


def tail(path: Path, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The last rows of a `metrics.jsonl`, read from its end."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            lines = file.read().splitlines()
    except OSError:
        return []
    return [row for line in lines if (row := parse_row(line))]


class Display:
    """Shows `runs`, which whoever made it goes on to change.

    with Display(out, runs) as display:
        display.refresh()  # as often as wanted
    """

    def __init__(self, out: Path, runs: list[Run]) -> None:
        self.out, self.runs = out, runs
        self.seen = {run.id: Seen() for run in runs}
        self.shown = {run.id: run.status for run in runs}
        self._stream = SafeStream(sys.stderr)
        self._live: Live | None = None
        self._next_look = self._next_line = 0.0

    def __enter__(self) -> Self:
        for run in self.runs:
            self.look(run)
        self._live = start_live(self._stream)
        return self

    def __exit__(self, *error: object) -> None:
        self._next_look = self._next_line = 0.0
        self.refresh()
        if self._live is not None:
            self._live.stop()

    def look(self, run: Run) -> None:
        self.seen[run.id].look(self.out / run.directory / "metrics.jsonl")

    def refresh(self) -> None:
        """Draw, if a second has passed; tell at once of a run whose status changed."""
        changed = [run for run in self.runs if run.status != self.shown[run.id]]
        self.shown |= {run.id: run.status for run in changed}
        if self._live is None:
            for run in changed:
                self._stream.line(f"{run.id}: {run.status}{ending(run)}")
        now = monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for run in self.runs:
            if run.status == "running" or run in changed:
                self.look(run)
        if self._live is not None:
            height = self._live.console.height - 7
            self._live.update(self.table(height), refresh=True)
        elif now >= self._next_line:
            self._next_line = now + LINE_SECONDS
            self._stream.line(self.text())

    def text(self) -> str:
        """The whole sweep as one line."""
        counts = {"finished": 0}
        for run in self.runs:
            counts[run.status] = counts.get(run.status, 0) + 1
        total = sum(run.total_steps for run in self.runs)
        left = sum(self.left(run) for run in self.runs)
        parts = [f"{1 - left / total:.0%} of {len(self.runs)} runs"]
        parts += [f"{count} {status}" for status, count in counts.items()]
        if (eta := self.eta()) is not None:
            parts.append(f"ETA {clock(eta)}")
        return ", ".join(parts)

    def left(self, run: Run) -> int:
        """Environment steps that a run has before it."""
        over = run.status in ("finished", "failed")  # some stop early, at their return
        return 0 if over else max(0, run.total_steps - self.seen[run.id].step)

    def eta(self) -> float | None:
        """Seconds to the end of the sweep, at the mean pace of its runs and as many at a time."""
        paces = [s.seconds_a_step for s in self.seen.values() if s.seconds_a_step is not None]
        at_a_time = sum(run.status == "running" for run in self.runs)
        if not paces or not at_a_time:
            return None
        left = sum(self.left(run) for run in self.runs)
        return left * sum(paces) / len(paces) / at_a_time

    def table(self, height: int | None = None) -> Table:
        """A row a run; where `height` is short of them, those that run or failed come first."""
        from rich.table import Table

        axes = [name for name in axes_of(self.runs) if name not in ("san", "seed")]
        table = Table(title=self.text(), title_justify="left", title_style="")
        for name in ("actor", "seed", *(axis.rpartition(".")[2] for axis in axes)):
            table.add_column(name, overflow="fold")
        for name in ("step", "%", "return", "ETA"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("status", no_wrap=True)
        rows = self.runs
        if height is not None and len(rows) > height:
            order = ["running", "failed", "interrupted", "queued", "finished"]
            rows = sorted(rows, key=lambda run: order.index(run.status))[: max(1, height)]
            table.caption = f"and {len(self.runs) - len(rows)} more"
        for run in rows:
            table.add_row(*self.row(run, axes), style=STYLES.get(run.status, "dim"))
        return table

    def row(self, run: Run, axes: list[str]) -> list[str]:
        seen = self.seen[run.id]
        eta = ""
        if run.status == "running" and seen.seconds_a_step is not None:
            eta = clock(self.left(run) * seen.seconds_a_step)
        share = f"{min(1.0, seen.step / run.total_steps):.0%}"
        settings = [setting(run, name) for name in axes]
        best = returned(run, seen)
        return [
            run.actor, str(run.seed), *settings, f"{seen.step:,}", share, best, eta, run.status,
        ]  # fmt: skip


def axes_of(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.overrides))


def setting(run: Run, axis: str) -> str:
    """Where a run stands on an axis; a dense actor stands on none of the spiking ones."""
    if axis not in run.overrides or (run.actor == "dense" and axis.startswith("spiking.")):
        return "-"
    value = run.overrides[axis]
    return Path(value).stem if axis == "config" else str(value)


def returned(run: Run, seen: Seen) -> str:
    """The final return, else the last evaluation's, else the last training episode's, marked."""
    value = seen.evaluation if run.final_return is None else run.final_return
    if value is not None:
        return f"{value:.1f}"
    return "" if seen.episode_return is None else f"(training) {seen.episode_return:.1f}"


def ending(run: Run) -> str:
    """What there is to add to a status."""
    if run.status == "finished" and run.final_return is not None:
        return f", return {run.final_return:.1f}"
    return f", exit code {run.exit_code}" if run.status == "failed" else ""
