"""Run directories, their lock, and checkpoints that survive a kill at any moment."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sansac.config import Config, ConfigError, load_yaml, resolve, slug

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1


class CheckpointError(RuntimeError):
    """A file that cannot be loaded: names it, what is wrong, and what can be loaded instead."""


def make_run_dir(config: Config) -> Path:
    """Make `<runs_dir>/<env>/<name>` exclusively; a taken automatic name gets a number."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = slug(config.name or f"{config.agent_name}-s{config.seed}-{stamp}")
    parent = config.runs_dir / slug(config.env)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for candidate in [name] if config.name else [name, *(f"{name}-{i}" for i in range(2, 100))]:
            try:
                (parent / candidate).mkdir()
                return parent / candidate
            except FileExistsError:
                continue
    except (OSError, ValueError) as error:  # ValueError: a zero in it, or what is no text
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"runs_dir: cannot write {parent}: {reason}") from None
    raise ConfigError(
        f"name: {parent / name} exists; choose another --name, or go on with it: "
        f"train --resume {parent / name}"
    )


@contextmanager
def locked(run_dir: Path, wait: bool = False) -> Iterator[None]:
    """Hold the directory for one process. Raises ConfigError where another holds it, or waits, and
    where it cannot be written."""
    try:
        file = open(run_dir / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"cannot write {run_dir}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise ConfigError(f"{run_dir} is in use by another process") from None
        yield


def write_atomically(path: Path, write: Any, keep: Path | None = None) -> None:
    """`write(file)` to a temporary name, sync, rename; `keep` gets the file that stood there.

    Raises OSError naming the path; what stood there stands.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # torch.save tells of a full disk by an error of its own, whose context is the disk's.
        fault = error if isinstance(error, OSError) else error.__context__
        if isinstance(error, (OSError, RuntimeError)) and isinstance(fault, OSError):
            raise OSError(fault.errno, fault.strerror, str(path)) from None
        raise
    if keep is not None and path.exists():
        link = keep.with_name(f".{keep.name}.tmp")
        link.unlink(missing_ok=True)
        try:
            os.link(path, link)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, link)
        os.replace(link, keep)
        link.unlink(missing_ok=True)  # a rename leaves both names where they were one file already
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def save(path: Path, state: dict[str, Any], keep: Path | None = None) -> None:
    """Write a checkpoint of tensors, numbers, strings, lists and mappings.

    Raises CheckpointError where it cannot be written: path, reason, room needed and room left.
    """
    import torch  # here, so that what only reads a run's records starts without it

    content = {"format_version": FORMAT_VERSION, **state}
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, lambda file: torch.save(content, file), keep)
    except OSError as error:
        need, left = Length(), "unknown"
        torch.save(content, need)  # type: ignore[arg-type]
        with suppress(OSError):
            left = f"{shutil.disk_usage(path.parent).free / 1e6:.2f} MB"
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}; it needs {need.bytes / 1e6:.2f} MB, "
            f"free: {left}"
        ) from None


class Length(io.RawIOBase):
    """A file that only counts."""

    bytes = 0

    def write(self, data: Any) -> int:
        self.bytes += len(data)
        return len(data)


class Saver:
    """Writes checkpoints on a thread, one after another; an error is raised by the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def save(self, path: Path, state: dict[str, Any], keep: Path | None = None) -> None:
        """As `save`, of a state that nothing changes any more."""
        self.wait()
        self._pending = self._thread.submit(save, path, state, keep)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def load(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint without executing anything. Raises CheckpointError."""
    import torch

    previous = path.with_name("previous.pt")
    offer = f"; {previous} can be tried instead" if path != previous and previous.exists() else ""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load compares no checksums
            if spoiled := archive.testzip():
                raise zipfile.BadZipFile(f"wrong checksum of {spoiled}")
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist{offer}") from None
    except Exception as error:  # a damaged or hostile file raises almost anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged or not a sansac checkpoint ({reason}){offer}"
        ) from None
    version = state.get("format_version") if isinstance(state, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this sansac reads {FORMAT_VERSION}{offer}"
        )
    return state


def write_config(config: Config, directory: Path, name: str = "config.yaml") -> None:
    text = yaml.safe_dump(config.dump(), sort_keys=False)
    write_atomically(directory / name, lambda file: file.write(text.encode()))


def read_config(directory: Path) -> Config:
    """The configuration of a run or agent directory. Raises ConfigError."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: give a run or an agent directory")
    if not (directory / "config.yaml").is_file():
        raise ConfigError(f"{directory} holds no config.yaml: it is no run or agent directory")
    version = read_record(directory).get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{directory} has format version {version}; this sansac reads {FORMAT_VERSION}"
        )
    return resolve(load_yaml(directory / "config.yaml"))


def write_record(run_dir: Path, record: dict[str, Any]) -> None:
    """run.json: what ran, where, and how it stands."""
    text = json.dumps({"format_version": FORMAT_VERSION, **record}, indent=2)
    write_atomically(run_dir / "run.json", lambda file: file.write(text.encode()))


def read_record(directory: Path, name: str = "run.json") -> dict[str, Any]:
    """A note about a run or an agent and no part of its state; {} where it cannot be read."""
    try:
        record = json.loads((directory / name).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    if not isinstance(record.get("final", {}), dict):
        del record["final"]
    return record
