"""How a search stands, on stderr: a live table at a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Self

from sansac.progress import SafeStream, clock, start_live

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

DRAW_SECONDS = 1.0  # between drawings of the live table
LINE_SECONDS = 30.0  # between plain lines while nothing changes
STYLES = {"finished": "green", "failed": "red", "pruned": "dim", "unfinished": "yellow"}


class Row(NamedTuple):
    """A trial as it is shown."""

    trial: str
    score: str
    state: str
    settings: dict[str, str]


class Standing(NamedTuple):
    """A search as it is shown: trials that are over, in all and by kind; the best; those under
    way here."""

    counts: dict[str, int]
    best: str
    rows: list[Row]

    @property
    def over(self) -> int:
        return sum(self.counts[state] for state in ("finished", "pruned", "failed"))


class Display:
    """Shows a search of `total` trials.

    with Display(title, total, look) as display:
        display.refresh()  # as often as wanted; calls look() when it draws
    """

    def __init__(self, title: str, total: int, look: Callable[[], Standing]) -> None:
        self.title, self.total, self.look = title, total, look
        self._stream = SafeStream(sys.stderr)
        self._live: Live | None = None
        self._began, self._next = monotonic(), 0.0
        self._over: int | None = None  # trials that were over when this call began

    def __enter__(self) -> Self:
        self._live = start_live(self._stream)
        self._began, self._over = monotonic(), self.look().over
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._stream.line(self.text(self.look()))

    def note(self, text: str) -> None:
        """A line of its own, above the live table if there is one."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.line(text)

    def refresh(self) -> None:
        """Draw, if it is time."""
        if monotonic() < self._next:
            return
        standing = self.look()
        if self._live is not None:
            self._next = monotonic() + DRAW_SECONDS
            drawn = table(standing.rows, self.text(standing), score="evaluation")
            self._live.update(drawn, refresh=True)
        else:
            self._next = monotonic() + LINE_SECONDS
            self._stream.line(self.text(standing))

    def text(self, standing: Standing) -> str:
        """The whole search as one line."""
        parts = [f"{self.title}: {standing.over} of {self.total} trials"]
        parts += [f"{count} {state}" for state, count in standing.counts.items() if count]
        parts += [standing.best] if standing.best else []
        if (eta := self.eta(standing)) is not None:
            parts.append(f"ETA {clock(eta)}")
        return ", ".join(parts)

    def eta(self, standing: Standing) -> float | None:
        """Seconds to the end at the pace of this call; None before its first trial is over."""
        done = standing.over - (self._over or 0)
        left = self.total - standing.over
        return (monotonic() - self._began) / done * left if done > 0 and left > 0 else None


def table(rows: Sequence[Row], title: str, score: str = "score") -> Table:
    """A row a trial, a column an option."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title), title_justify="left", title_style="", box=SIMPLE_HEAD)
    names = list(dict.fromkeys(name for row in rows for name in row.settings))
    drawn.add_column("trial", justify="right", no_wrap=True)
    drawn.add_column(score, justify="right", no_wrap=True)
    drawn.add_column("state", no_wrap=True)
    for name in names:
        drawn.add_column(re.sub(r"[._]", "\n", name), justify="right", overflow="fold")
    for row in rows:
        cells = [row.settings.get(name, "") for name in names]
        style = STYLES.get(row.state)
        drawn.add_row(row.trial, row.score, row.state, *map(Text, cells), style=style)
    return drawn
