"""Many runs in one directory: actors x seeds x any configuration axes.

A sweep directory holds `queue.json` (what was asked and how every run stands), `configs/` (the
whole configuration of each run), `runs/` and `logs/`. A run is `runner.py train` in a process of
its own, started in the sweep directory, so that nothing in it depends on where that lies. Processes
are this machine's (here), a Ray cluster's or an array job's (`cluster.py`); whoever starts a run
holds its log by `flock`, and the run inherits that lock, so that nothing is run twice.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeVar

from sansac import signals
from sansac.checkpoint import FORMAT_VERSION, locked, read_record, write_atomically, write_config
from sansac.config import (
    Config,
    ConfigError,
    fields,
    load_yaml,
    merge,
    nearest,
    partial,
    plain_yaml,
    presets_for,
    resolve,
    slug,
)
from sansac.sweep_display import Display

RUNNER = Path(__file__).resolve().parent.parent / "runner.py"
MOST = 10_000  # runs of a sweep: more are a slip of the keyboard
TRIES = 3  # starts that one call gives a run whose process is killed
TICK_SECONDS = 0.1  # between looks at the workers
OWN = ("name", "runs_dir")  # what a sweep chooses for its runs

Engine = TypeVar("Engine")
Axes = dict[str, list[Any]]
Point = dict[str, Any]


@dataclass
class Run:
    """One entry of the queue; paths are relative to the sweep directory."""

    id: str
    overrides: Point
    actor: str
    seed: int
    total_steps: int
    config: str
    directory: str
    log: str
    status: Literal["queued", "running", "finished", "failed", "interrupted"] = "queued"
    attempts: int = 0
    exit_code: int | None = None
    final_return: float | None = None


@dataclass
class Asked:
    """What a command line asks for: layers of the configuration, and axes over it."""

    files: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    axes: Axes = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.files or self.options or self.axes)


@dataclass
class Queue:
    """`queue.json`. `base` is the configuration that the axes are laid over."""

    files: dict[str, Any]
    options: dict[str, Any]
    base: dict[str, Any]
    axes: Axes
    runs: list[Run]

    @classmethod
    def load(cls, path: Path) -> Queue:
        try:
            content = json.loads(path.read_text())
            version = content.pop("format_version")
            if version != FORMAT_VERSION:
                raise ValueError(f"format version {version}, expected {FORMAT_VERSION}")
            return cls(**content | {"runs": [Run(**run) for run in content["runs"]]})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged or no queue of a sweep: {error!r}") from None

    def save(self, path: Path) -> None:
        text = json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1)
        write_atomically(path, lambda file: file.write(text.encode()))


# -- axes ------------------------------------------------------------------------------------------


def parse_seeds(words: Iterable[str]) -> list[int]:
    """`["0..2", "7"]` -> `[0, 1, 2, 7]`: each seed once, ranges with both ends."""
    seeds: list[int] = []
    for word in words:
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", word, re.ASCII)
        if not match:
            raise ConfigError(f"--seeds: expected numbers or ranges such as 0..9, found {word!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"--seeds: the range {word} is empty")
        if last - first >= MOST:
            raise ConfigError(f"--seeds: {word} has more than {MOST:,} seeds")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def parse_grid(words: Iterable[str]) -> Axes:
    """`["spiking.time-steps=1,2"]` -> `{"spiking.time_steps": [1, 2]}`; values are YAML."""
    axes: Axes = {}
    known = [name for name in fields() if name not in OWN]
    for word in words:
        key, equals, text = word.partition("=")
        name = key.replace("-", "_")
        if not equals:
            raise ConfigError(f"--grid: expected KEY=VALUE,VALUE..., found {word!r}")
        if name not in (*known, "config"):
            raise ConfigError(f"--grid: unknown option `{key}`{nearest(name, known)}")
        if name in axes:
            raise ConfigError(f"--grid: {key} is given twice")
        try:
            values = plain_yaml(f"[{text}]")
        except ValueError:
            raise ConfigError(f"--grid: the values of {key} are not valid YAML: {text}") from None
        if not values:
            raise ConfigError(f"--grid: {key} has no values")
        if name == "config" and not all(isinstance(value, str) for value in values):
            raise ConfigError(f"--grid: config takes files, found {text}")
        axes[name] = union(values)
    return axes


def parse_axes(actors: Sequence[str], seeds: Sequence[str], grid: Sequence[str]) -> Axes:
    """All axes of a command line. Raises ConfigError naming the one at fault."""
    axes: Axes = {"seed": parse_seeds(seeds)} if seeds else {}
    if actors:
        axes["san"] = union([actor == "spiking" for actor in actors])
    for name, values in parse_grid(grid).items():
        if name in axes:
            option = "--seeds" if name == "seed" else "--actors"
            raise ConfigError(f"--grid: {name} is the axis of {option}; give one of them")
        axes[name] = values
    return axes


def given(arguments: Sequence[str], options: Config, command: str = "sweep") -> dict[str, Any]:
    """The layer of those options that the words of a command line name."""
    known, dumped = fields(), options.dump()
    layer: dict[str, Any] = {}
    for word in arguments:
        if not word.startswith("--"):
            continue
        name = word[2:].partition("=")[0].replace("-", "_")
        name = name if name in known else re.sub(r"(^|\.)no_([^.]+)$", r"\1\2", name)
        if name in OWN:
            raise ConfigError(f"--{name.replace('_', '-')}: a {command} names its runs itself")
        if name in known:
            layer = merge(layer, nest(name, value(dumped, name)))
    return layer


def nest(name: str, value: Any) -> dict[str, Any]:
    """`("spiking.tau", 2)` -> `{"spiking": {"tau": 2}}`."""
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


def union(*lists: list[Any]) -> list[Any]:
    """Each value once, in the order of appearance; 1 and True are two."""
    return list({json.dumps(value): value for values in lists for value in values}.values())


def product(axes: Axes) -> Iterator[Point]:
    """Every point, seed by seed, so that what is done first compares all settings."""
    names = sorted(axes, key=lambda name: name != "seed")
    for values in itertools.product(*(axes[name] for name in names)):
        yield dict(zip(names, values, strict=True))


# -- the queue -------------------------------------------------------------------------------------


def base_of(files: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What the axes are laid over; it may contradict itself where they will put it right."""
    layer = merge(files, options)
    return partial(merge(presets_for(layer), layer)).dump()


def plan(
    queue: Queue | None, asked: Asked, workers: int | None
) -> tuple[Queue, list[tuple[Point, Config]]]:
    """The queue with what is asked for, and the configurations of its new runs. Writes nothing.

    Raises ConfigError for runs that cannot be and for what contradicts the runs there are.
    """
    if queue is None:
        if not asked.axes:
            raise ConfigError("nothing to sweep over: give --actors, --seeds or --grid")
        queue = Queue(asked.files, asked.options, base_of(asked.files, asked.options), {}, [])
    else:
        refuse_contradiction(queue, asked)
    axes = dict(queue.axes)
    for name, values in asked.axes.items():
        axes[name] = union(axes.get(name, []), values)
    if (size := math.prod(map(len, axes.values()))) > MOST:
        raise ConfigError(f"{size:,} runs are more than {MOST:,}")
    old = {json.dumps(point) for point in product(queue.axes)} if queue.runs else set()
    points = [point for point in product(axes) if json.dumps(point) not in old]
    base = queue.base
    if base["threads"] == "auto":  # fixed once, since sums differ between thread counts
        base = base | {"threads": threads_each(min(workers or cores(), len(points)))}
    return replace(queue, base=base, axes=axes), resolved(replace(queue, base=base), points)


def refuse_contradiction(queue: Queue, asked: Asked) -> None:
    """Raises ConfigError where what is asked for is not the base that the queue was made with."""
    if not asked:
        return
    wanted = base_of(merge(queue.files, asked.files), merge(queue.options, asked.options))
    if wanted["threads"] == "auto":
        wanted["threads"] = queue.base["threads"]
    if other := differing(queue.base, wanted, queue.axes):
        raise ConfigError(
            f"{', '.join(other)}: the sweep was begun with another configuration; make it an axis "
            "(--grid), choose another --out, or go on with --out alone"
        )


def differing(base: dict[str, Any], wanted: dict[str, Any], free: Iterable[str]) -> list[str]:
    """Options, other than the free ones, that two dumped configurations set unlike."""
    left_out = {*free, *OWN}
    return [
        f"{name} ({value(base, name)!r} there, {value(wanted, name)!r} now)"
        for name in fields()
        if name not in left_out and value(base, name) != value(wanted, name)
    ]


def resolved(queue: Queue, points: list[Point]) -> list[tuple[Point, Config]]:
    """The configuration of every point. Raises ConfigError with all that is wrong."""
    read = functools.cache(load_yaml)
    found: list[tuple[Point, Config]] = []
    errors: dict[str, Point] = {}
    for point in points:
        axes = dict(point)
        try:
            file = read(Path(axes.pop("config"))) if "config" in axes else {}
            layer = merge(queue.files, file, queue.options, *(nest(*pair) for pair in axes.items()))
            if layer.get("threads", "auto") == "auto":
                layer["threads"] = queue.base["threads"]
            layer |= {"runs_dir": "runs", "name": None}
            found.append((point, resolve(presets_for(layer), layer)))
        except ConfigError as error:
            errors.setdefault(str(error), point)
    if errors:
        raise ConfigError("\n".join(f"{described(p)}: {text}" for text, p in errors.items()))
    return found


def extend(queue: Queue, out: Path, found: list[tuple[Point, Config]]) -> None:
    """Append runs and write their configurations; one that is there already is left out."""
    there = {identity(read_run(out, run)) for run in queue.runs} if found else set()
    names = {run.id for run in queue.runs}
    for part in ("configs", "logs", "runs"):
        (out / part).mkdir(exist_ok=True)
    for point, config in found:
        if (key := identity(config)) in there:
            continue
        there.add(key)
        first = label(point, config)
        numbered = (f"{first}-{i}" for i in itertools.count(2))
        name = next(name for name in itertools.chain([first], numbered) if name not in names)
        names.add(name)
        queue.runs.append(Run(
            id=name, overrides=point, actor=config.actor_name, seed=config.seed,
            total_steps=config.total_steps, config=f"configs/{name}.yaml",
            directory=f"runs/{slug(config.env)}/{name}", log=f"logs/{name}.log",
        ))  # fmt: skip
        write_config(config.model_copy(update={"name": name}), out / "configs", f"{name}.yaml")


def identity(config: Config) -> str:
    """Equal for runs that would be the same: a dense actor reads nothing of `spiking`."""
    left_out = {"name"} if config.san else {"name", "spiking"}
    return config.model_dump_json(exclude=left_out)


def read_run(out: Path, run: Run) -> Config:
    return resolve(load_yaml(out / run.config))


def label(point: Point, config: Config) -> str:
    """A name for a run's directory: actor, seed, and where it stands on every other axis."""
    words = [config.actor_name, f"s{config.seed}"]
    for name, setting in point.items():
        if name not in ("san", "seed") and (config.san or not name.startswith("spiking.")):
            tail = "" if name in ("algorithm", "config", "env") else name.rpartition(".")[2]
            words.append(f"{tail}{shown(name, setting)}")
    return slug("-".join(words))[:120]


def shown(name: str, setting: Any) -> str:
    """The value of an axis in few letters."""
    if name == "config":
        return Path(setting).stem
    return "x".join(map(str, setting)) if isinstance(setting, list) else str(setting)


def described(point: Point) -> str:
    return " ".join(f"{name}={shown(name, setting)}" for name, setting in point.items())


def cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def threads_each(workers: int) -> int:
    """Of every run: two at most, since more do not pay at these sizes."""
    return max(1, min(2, cores() // max(1, workers)))


# -- running ---------------------------------------------------------------------------------------


class Worker(Protocol):
    """The process of a run, wherever it is."""

    @property
    def started(self) -> bool: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Launch = Callable[[Path, Run], Worker | None]  # None where another process holds the run


class Process(subprocess.Popen[bytes]):
    """A run on this machine, in a session of its own: Ctrl-C reaches it through its sweep alone."""

    started = True

    def kill(self) -> None:
        """End the run and what it has started."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def start(out: Path, run: Run) -> Process | None:
    """Begin a run of the sweep in `out`, or go on with it; None where another process holds it."""
    log = claim(out, run)
    if log is None:
        return None
    with log:
        words, environment = command(out, run, log)
        return Process(
            words,
            cwd=out,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def sweep(
    out: Path,
    asked: Asked,
    workers: int | None = None,
    retry: bool = False,
    engine: AbstractContextManager[Launch] | None = None,
) -> tuple[int, list[Run]]:
    """Make or go on with the sweep in `out`: exit code, and how its runs stand.

    `engine` is what launches runs, all that it can at a time unless `workers` says less; without
    one they are processes of this machine. Raises ConfigError before anything is written.
    """
    with opened(out, asked, workers, retry, engine or nullcontext(start)) as (queue, launch):
        limit = workers or (len(queue.runs) if engine else cores())
        code = Workers(out, queue, limit, launch).work()
        return code, queue.runs


@contextmanager
def opened(
    out: Path,
    asked: Asked,
    workers: int | None,
    retry: bool,
    engine: AbstractContextManager[Engine],
) -> Iterator[tuple[Queue, Engine]]:
    """The queue of the sweep in `out`, made or extended by what is asked for, and held; `engine` is
    entered before anything is written. Raises ConfigError."""
    with ExitStack() as stack:
        path, queue = out / "queue.json", None
        if path.exists():
            stack.enter_context(locked(out))
            queue = Queue.load(path)
        elif out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} is there and holds no sweep: choose another --out")
        queue, found = plan(queue, asked, workers)
        entered = stack.enter_context(engine)
        if not path.exists():
            try:
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(out))
            except OSError as error:
                raise ConfigError(f"--out: cannot write {out}: {error.strerror}") from None
            queue.save(path)  # first, so that a kill in what follows leaves a sweep to go on with
        extend(queue, out, found)
        for run in queue.runs:
            look_up(run, out)
            if run.status == "failed" and retry:
                run.status = "queued"
        queue.save(path)
        yield queue, entered


def look_up(run: Run, out: Path) -> None:
    """Take over what the run's own record tells of its end: array tasks leave the queue alone."""
    record = read_record(out / run.directory)
    if run.status == "finished" or "status" not in record or held(out, run):
        return
    if record["status"] == "finished":
        run.status, run.final_return = "finished", record.get("final", {}).get("return_mean")
    elif run.status == "queued":
        run.status = "failed" if record["status"] == "failed" else "interrupted"


class Workers:
    """The processes of a sweep, and what is known of them."""

    def __init__(self, out: Path, queue: Queue, limit: int, launch: Launch = start) -> None:
        self.out, self.queue, self.limit, self.launch = out, queue, limit, launch
        self.processes: dict[str, Worker] = {}
        self.tries: Counter[str] = Counter()  # starts in this call
        self.signals: list[int] = []
        self.told: Counter[str] = Counter()  # signals that a worker was handed on
        self.display = Display(out, queue.runs)

    def work(self) -> int:
        """Run until nothing is left to run, or a signal asks for an end."""
        with signals.handled(self.signals.append), self.display:
            try:
                while self._tick():
                    self.display.refresh()
                    time.sleep(TICK_SECONDS)
            finally:
                self._kill()  # none is left unless something here went wrong
        if self.signals:
            return 128 + self.signals[0]
        return int(any(run.status != "finished" for run in self.queue.runs))

    def _tick(self) -> bool:
        """Take note of what ended, start what can start; whether there is more to wait for."""
        self._forward()
        before = [run.status for run in self.queue.runs]
        for run in self.queue.runs:
            if run.id in self.processes:
                self._watch(run)
            elif run.status == "running" and not held(self.out, run):
                settle(self.out, run, None)
        waiting = [run for run in self.queue.runs if self._may_start(run)]
        for run in waiting[: max(0, self.limit - self._busy())]:
            self._start(run)
        if before != [run.status for run in self.queue.runs]:
            self.queue.save(self.out / "queue.json")
        return bool(self.processes if self.signals else self._busy())

    def _busy(self) -> int:
        """Runs that are launched, or run by others."""
        return sum(run.id in self.processes or run.status == "running" for run in self.queue.runs)

    def _may_start(self, run: Run) -> bool:
        if self.signals or run.id in self.processes:
            return False
        if run.status not in ("queued", "interrupted"):
            return False
        # One that was stopped, and not killed, in this call was stopped on purpose.
        killed = run.exit_code is None or run.exit_code < 0
        return not self.tries[run.id] or (killed and self.tries[run.id] < TRIES)

    def _start(self, run: Run) -> None:
        worker = self.launch(self.out, run)
        if worker is None:  # one that outlived its sweep, or a resume by hand: wait for it
            run.status = "running"
            return
        self.processes[run.id] = worker
        self.tries[run.id] += 1
        self._watch(run)

    def _forward(self) -> None:
        """Hand signals on: a worker is asked once, then killed."""
        for name, worker in self.processes.items():
            told, self.told[name] = self.told[name], min(2, len(self.signals))
            if self.told[name] > told:
                worker.terminate() if self.told[name] == 1 else worker.kill()

    def _watch(self, run: Run) -> None:
        """Take note of a run's start, which an engine may put off, and of its end."""
        worker = self.processes[run.id]
        if worker.started and run.status != "running":
            run.status = "running"
            run.attempts += 1
        code = worker.poll()
        if code is not None:
            del self.processes[run.id]
            if run.status == "running":
                settle(self.out, run, code)

    def _kill(self) -> None:
        for worker in self.processes.values():
            worker.kill()
        while any(worker.poll() is None for worker in self.processes.values()):
            time.sleep(TICK_SECONDS)


def settle(out: Path, run: Run, code: int | None) -> None:
    """How a run stands whose process has ended; without a code, by its own record."""
    record = read_record(out / run.directory)
    run.exit_code = code
    if code == 0 or (code is None and record.get("status") == "finished"):
        run.status = "finished"
        run.final_return = record.get("final", {}).get("return_mean")
    elif code is None or code < 0 or code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        run.status = "interrupted"
    else:
        run.status = "failed"


def claim(out: Path, run: Run) -> BinaryIO | None:
    """The log of a run, locked for as long as it is open here or in a process that inherits it;
    None where another process holds the run."""
    log = open(out / run.log, "ab")  # noqa: SIM115
    if locks(log, fcntl.LOCK_EX) and not in_use(out / run.directory / ".lock"):
        return log
    log.close()
    return None


def command(out: Path, run: Run, log: BinaryIO) -> tuple[list[str], dict[str, str]]:
    """The words that begin a run or go on with it, from the sweep's directory, and the environment
    that they want; told to its log, which must have been claimed."""
    directory = out / run.directory
    if (directory / "config.yaml").exists():
        words = ["--resume", run.directory]
    else:
        clear_beginning(directory)
        words = ["--config", run.config]
    environment = {**os.environ, "OMP_NUM_THREADS": str(read_run(out, run).threads)}
    log.write(f"$ python runner.py train {' '.join(words)}\n".encode())
    log.flush()
    return [sys.executable, str(RUNNER), "train", *words], environment


def clear_beginning(run_dir: Path) -> None:
    """Remove the directory of a run that was killed before it had written its configuration."""
    with suppress(OSError):
        for path in run_dir.glob(".*"):
            path.unlink()
        run_dir.rmdir()


def held(out: Path, run: Run) -> bool:
    """Whether a process holds the run."""
    return in_use(out / run.log) or in_use(out / run.directory / ".lock")


def in_use(path: Path) -> bool:
    """Whether a process holds a lock of the file."""
    try:
        with open(path, "rb") as file:
            return not locks(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def locks(file: BinaryIO, kind: int) -> bool:
    """Lock an open file; whether no other process stands in the way."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def last_lines(path: Path, count: int = 8) -> list[str]:
    """The end of a log."""
    try:
        return path.read_text(errors="replace").splitlines()[-count:]
    except OSError as error:
        return [f"no log: {error.strerror}"]


def value(tree: dict[str, Any], name: str) -> Any:
    """The field of a dumped configuration under a dotted name."""
    return functools.reduce(lambda part, key: part[key], name.split("."), tree)


def report(out: Path, runs: list[Run]) -> None:
    """The table on stdout; what failed, and how to go on, on stderr."""
    from rich.console import Console

    display = Display(out, runs)
    for run in runs:
        display.look(run)
    Console().print(display.table())
    failed = [run for run in runs if run.status == "failed"]
    for run in failed:
        print(f"{run.id} failed, {out / run.log} ends:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in last_lines(out / run.log)), file=sys.stderr)
    if failed:
        print(f"retry with: python runner.py sweep --out {out} --retry", file=sys.stderr)
    if any(run.status in ("queued", "running", "interrupted") for run in runs):
        print(f"go on with: python runner.py sweep --out {out}", file=sys.stderr)
