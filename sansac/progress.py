"""How far a run is, on stderr: a live display at a terminal, a plain line now and then elsewhere.

Nothing here can hurt training: output that fails is the end of the display and of nothing else.
Durations and rates come from the monotonic clock, so that a clock set back changes none of them.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.status import Status

LINE_SECONDS = 10.0  # between plain lines
SAMPLE_SECONDS = 1.0  # between samples of the counters
WINDOW = 31  # samples that a rate is taken over: the last half minute


class Progress:
    """Percent, elapsed time, ETA, rates, last returns and last evaluation of a run.

        with Progress(config.total_steps, step, "BipedalWalker-v3, spiking") as progress:
            progress.update(step, updates, episode_return=None, evaluation=None)

    `total` and `initial` are environment steps; a resumed run starts its rates at `initial`.
    """

    def __init__(self, total: int, initial: int = 0, description: str = "") -> None:
        self.total, self.step, self.updates = total, initial, 0
        self.description = description
        self.returns: deque[float] = deque(maxlen=10)
        self.evaluation: float | None = None
        self._began = monotonic()
        self._ended: float | None = None
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=WINDOW)
        self._next_sample = self._next_line = self._began
        self._stream = SafeStream(sys.stderr)
        self._live: Live | None = None
        self._running = False

    # -- what a training loop calls ----------------------------------------------------------------

    def update(
        self,
        step: int,
        updates: int,
        *,
        episode_return: float | None = None,
        evaluation: float | None = None,
    ) -> None:
        """Tell the counters; as often as wanted, it costs about a microsecond."""
        if updates and not self.updates:  # warming up says nothing of the speed of learning
            self._samples.clear()
            self._next_sample = self._began
        self.step, self.updates = step, updates
        if episode_return is not None:
            self.returns.append(episode_return)
        if evaluation is not None:
            self.evaluation = evaluation
        now = monotonic()
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_SECONDS
            self._samples.append((now, step, updates))
        if (
            self._running
            and self._live is None
            and (now >= self._next_line or evaluation is not None)
        ):
            self._next_line = now + LINE_SECONDS
            self._stream.line(self.text())

    def note(self, text: str) -> None:
        """Print a line, above the live display if there is one."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.line(text)

    def __enter__(self) -> Self:
        self._began = monotonic()
        self._running = True
        # Only stderr is redirected (so that warnings come out above the bar): stdout is the user's.
        self._live = start_live(
            self._stream, get_renderable=self._render, auto_refresh=True, transient=False,
            refresh_per_second=4, redirect_stdout=False,
        )  # fmt: skip
        if self._live is None:
            self._next_line = self._began + LINE_SECONDS
            self._stream.line(self.text())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended, self._running = monotonic(), False
        live, self._live = self._live, None
        if live is not None:
            live.stop()  # draws the last state and leaves it there
        else:
            self._stream.line(self.text())

    # -- what it shows -----------------------------------------------------------------------------

    def fraction(self) -> float:
        """Done share of the run, 0 to 1."""
        return min(max(self.step / self.total, 0.0), 1.0) if self.total > 0 else 1.0

    def elapsed(self) -> float:
        """Seconds since this process began the run."""
        return (monotonic() if self._ended is None else self._ended) - self._began

    def rates(self) -> tuple[float, float] | None:
        """Environment steps and updates a second over the last half minute; None at the start."""
        samples = list(self._samples)
        if not samples:
            return None
        began, step, updates = samples[0]
        seconds = (monotonic() if self._ended is None else self._ended) - began
        if seconds < SAMPLE_SECONDS or self.step == step:
            return None
        return (self.step - step) / seconds, (self.updates - updates) / seconds

    def eta(self) -> float | None:
        """Seconds to the end at the present rate; None while it is unknown, as it is before the
        first update."""
        rates = self.rates()
        return (self.total - self.step) / rates[0] if rates and self.updates else None

    def status(self) -> str:
        """Rates, returns and evaluation, those that there are."""
        parts = []
        if rates := self.rates():
            parts += [f"{rates[0]:,.0f} steps/s", f"{rates[1]:,.0f} updates/s"]
        if returns := list(self.returns):
            parts.append(f"return {sum(returns) / len(returns):.1f}")
        if self.evaluation is not None:
            parts.append(f"evaluation {self.evaluation:.1f}")
        return ", ".join(parts)

    def text(self) -> str:
        """The state as one line."""
        eta = self.eta()
        name = f"{self.description}: " if self.description else ""
        parts = [
            f"{name}{self.fraction():.1%}",
            f"step {self.step:,} of {self.total:,}",
            f"elapsed {clock(self.elapsed())}",
            f"ETA {clock(eta)}" if eta is not None and self._ended is None else "",
            self.status(),
        ]
        return ", ".join(part for part in parts if part)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        eta = self.eta()
        row = Table.grid(padding=(0, 1), expand=True)
        for _ in range(2):
            row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(
            Text(self.description),
            Text(f"{self.fraction():.1%}"),
            ProgressBar(total=1.0, completed=self.fraction()),
            Text(f"{clock(self.elapsed())}, ETA {'-:--' if eta is None else clock(eta)}"),
        )
        status = Text(self.status() or "starting", no_wrap=True, overflow="ellipsis", style="dim")
        return Group(row, status)


class Activity:
    """What a command is at, on stderr: a spinner at a terminal, a line now and then elsewhere.

    with Activity("evaluating") as activity:
        activity.tell("3 of 100 episodes")  # as often as wanted
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._stream = SafeStream(sys.stderr)
        self._status: Status | None = None
        self._next_line = 0.0

    def tell(self, what: str) -> None:
        if self._status is not None:
            self._status.update(f"{self.name}: {what}")
        elif (now := monotonic()) >= self._next_line:
            self._next_line = now + LINE_SECONDS
            self._stream.line(f"{self.name}: {what}")

    def __enter__(self) -> Self:
        if takes_live(self._stream):
            from rich.console import Console

            console = Console(file=self._stream)  # type: ignore[arg-type]
            self._status = console.status(self.name)
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()


def start_live(stream: SafeStream, **how: Any) -> Live | None:
    """A live display, which its owner draws and stops unless `how` says otherwise (options of
    rich's); None where the stream is no terminal."""
    if not takes_live(stream):
        return None
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)  # type: ignore[arg-type]
    live = Live(console=console, **({"auto_refresh": False, "transient": True} | how))
    live.start()
    return live


def takes_live(stream: SafeStream) -> bool:
    """Whether a stream is a terminal that a display can be drawn over on."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class SafeStream:
    """A text stream that falls silent, for good, where the one it wraps is closed or broken."""

    def __init__(self, stream: TextIO | None) -> None:
        self._wrapped = stream

    def write(self, text: str) -> int:
        try:
            self._try("write", text)
        except UnicodeEncodeError:  # no locale: names are escaped
            self._try("write", text.encode("ascii", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def line(self, text: str) -> None:
        self.write(text + "\n")
        self.flush()

    def isatty(self) -> bool:
        return bool(self._try("isatty"))

    @property
    def encoding(self) -> str:
        return getattr(self._wrapped, "encoding", None) or "utf-8"

    def _try(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._wrapped, method)(*arguments) if self._wrapped else None
        except UnicodeEncodeError:
            raise
        except (OSError, ValueError):  # ValueError is a closed file's
            self._wrapped = None
            return None


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"
