"""Runs that are on disk, sent to wandb: `metrics.jsonl` replayed into one wandb run each.

`logger.py` names, groups and configures them as it does those that are recorded live. What was sent
is remembered in the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sansac.checkpoint import write_atomically
from sansac.config import ConfigError
from sansac.logger import (
    RemoteId,
    Row,
    has_wandb_key,
    log_artifact,
    own_wandb_mode,
    reached,
    reason_of,
    start_wandb,
)

if TYPE_CHECKING:
    from sansac.compare import Run


class SyncError(RuntimeError):
    """A run that could not be sent: says which, why and what to do."""


@dataclass
class Sent:
    """What wandb was given of a run under an id: rows up to a step, so many of that last step, and
    files by name with their times of change."""

    id: str
    mode: str
    step: int = -1
    rows: int = 0
    files: dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, remote: RemoteId, mode: str) -> Sent:
        """Nothing, where nothing was sent under this id in this mode."""
        with suppress(OSError, ValueError, TypeError):
            sent = cls(**json.loads(path.read_text()))
            if (sent.id, sent.mode) == (remote.id, mode):
                return sent
        return cls(remote.id, mode)

    def save(self, path: Path) -> None:
        write_atomically(path, lambda file: file.write(json.dumps(asdict(self)).encode()))

    def lacks(self, rows: list[Row]) -> list[Row]:
        """The rows that are still to be sent."""
        same = [row for row in rows if row["step"] == self.step]
        return same[self.rows :] + [row for row in rows if row["step"] > self.step]

    def add(self, row: Row) -> None:
        self.rows = self.rows + 1 if row["step"] == self.step else 1
        self.step = row["step"]


def wandb_mode() -> str:
    """How runs are sent: online, or as WANDB_MODE says. Raises ConfigError without an account."""
    own = own_wandb_mode()
    if own == "disabled":
        raise ConfigError("WANDB_MODE is disabled, so nothing would be sent: unset it")
    if own != "offline" and not has_wandb_key():
        raise ConfigError(
            "sync needs a wandb account: `wandb login` stores its key, or set WANDB_API_KEY"
        )
    return own or "online"


def sync(run: Run, mode: str, on_row: Callable[[], object] = lambda: None) -> str:
    """Send what wandb lacks of a run, calling `on_row` for each row; returns what was done.

    Raises SyncError where the server is not reached.
    """
    try:
        remote = RemoteId(run.path)
    except RuntimeError as error:
        return f"left alone: {error}"
    try:
        return send(run, remote, mode, on_row)
    finally:
        remote.close()


def send(run: Run, remote: RemoteId, mode: str, on_row: Callable[[], object]) -> str:
    record = run.path / "wandb" / "sent.json"
    sent = Sent.load(record, remote, mode)
    files = {key: file for key, file in artifacts(run) if sent.files.get(key) != changed(file)}
    if not files and not sent.lacks(run.rows):
        return "nothing new"
    try:
        there = start_wandb(run.config, run.path.absolute(), mode, remote)
    except Exception as error:
        raise SyncError(
            f"{run.path}: wandb was not reached ({reason_of(error)}); sync again goes on from here"
        ) from None
    if mode == "online" and reached(there) != sent.step:
        # The server knows better: the run was recorded online, or what was sent is gone.
        sent.step, sent.rows = reached(there), len(run.rows)
    rows = sent.lacks(run.rows)
    try:
        for row in rows:
            there.log(row)
            sent.add(row)
            on_row()
        for key, file in files.items():
            kind = "model" if file.suffix == ".pt" else "video"
            log_artifact(there, file, f"{run.name}-{file.stem if kind == 'model' else kind}", kind)
            sent.files[key] = changed(file)
    finally:
        there.finish()
        sent.save(record)
    where = there.url if mode == "online" else f"{run.path / 'wandb'} (`wandb sync` uploads it)"
    return ", ".join([f"{len(rows)} rows", *files]) + f" sent to {where}"


def artifacts(run: Run) -> Iterator[tuple[str, Path]]:
    """The files that a run keeps on wandb, videos in the order they were made."""
    paths = sorted(run.path.glob("videos/*.mp4"), key=changed)
    best = run.path / "checkpoints" / "best.pt"
    if run.final and best.exists():
        paths.append(best)
    for path in paths:
        yield str(path.relative_to(run.path)), path


def changed(path: Path) -> int:
    return path.stat().st_mtime_ns
