"""Where a run's numbers go: JSON lines always, wandb and TensorBoard if asked for, GPU sampling.

`TAGS` is the one catalogue of what may be logged (`docs/metrics.md` prints it). `metrics.jsonl` is
written at once, by the caller; every other service lives on a thread of its own behind a queue, so
that none of them, slow, broken or killed, can hold up training. A service that fails is reported
once, as a warning of the `logging` module, and dropped.
"""

from __future__ import annotations

import configparser
import errno
import fcntl
import functools
import importlib
import json
import logging
import math
import netrc
import os
import queue
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, SupportsFloat
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from sansac.config import Config

TAGS: dict[str, str] = {
    "train/episode_return": "undiscounted return of one finished training episode (reward)",
    "train/episode_length": "length of that episode (environment steps)",
    "train/episodes": "training episodes finished since the run began (count)",
    "train/buffer_size": "transitions in the replay buffer (count)",
    "replay/correction": "exponent of the importance weights of prioritised replay (0 to 1)",
    "replay/window": "newest transitions that are drawn from (count)",
    "adaptive/effective_sample_size": "of minibatches, as a share of the batch (0 to 1)",
    "adaptive/batch_size": "batch size after the controller's last move (transitions)",
    "adaptive/update_to_data": "updates an environment step after its last move (1)",
    "eval/return_mean": "mean return of the deterministic evaluation episodes (reward)",
    "eval/return_std": "standard deviation of those returns over episodes (reward)",
    "eval/return_iqm": "interquartile mean of those returns (reward)",
    "eval/return_min": "lowest of those returns (reward)",
    "eval/return_max": "highest of those returns (reward)",
    "eval/length_mean": "mean length of the evaluation episodes (environment steps)",
    "eval/firing_rate/<layer>": "spikes a neuron a simulation step while evaluated (0 to 1)",
    "loss/critic": "critics' loss on a minibatch (squared reward, or quantile Huber loss)",
    "loss/actor": "actor's loss, alpha log pi - Q, on a minibatch (reward)",
    "loss/value": "value network's loss on a minibatch (SAC-V, squared reward)",
    "loss/proxy": "how far the proxy target is from the actor (TD3, squared action)",
    "loss/temperature": "temperature's loss on a minibatch, where it is learned (nats)",
    "sac/alpha": "entropy temperature (reward a nat)",
    "sac/entropy": "estimate of the policy's entropy, -log pi of sampled actions (nats)",
    "sac/q_mean": "mean predicted action value on a minibatch (reward)",
    "sac/learning_rate": "learning rate of the actor on its schedule (1)",
    "spiking/firing_rate/<layer>": "spikes a neuron a simulation step (0 to 1)",
    "spiking/in_window/<layer>": "share of voltages where the surrogate passes a gradient (0 to 1)",
    "spiking/silent/<layer>": "share of neurons that never fire over a minibatch (0 to 1)",
    "spiking/saturated/<layer>": "share of neurons that always fire over a minibatch (0 to 1)",
    "spiking/gradient_norm/<layer>": "norm of the actor's gradient in the layer's weights (reward)",
    "spiking/firing_penalty": "what firing above its target adds to the actor's loss (reward)",
    "spiking/outside_range": "share of observation entries outside the encoder's range (0 to 1)",
    "perf/steps_per_second": "environment steps a second of collecting and learning (1/s)",
    "perf/updates_per_second": "updates a second of collecting and learning (1/s)",
    "perf/collect_seconds": "time spent collecting since the last training row (s)",
    "perf/learn_seconds": "time spent learning since the last training row (s)",
    "perf/eval_seconds": "time that the evaluation took (s)",
    "perf/checkpoint_seconds": "time that writing the checkpoint took (s)",
    "perf/memory_mb": "peak resident memory of the process (MB)",
    "gpu/utilization": "share of time in which the GPU ran a kernel (percent)",
    "gpu/memory_mb": "GPU memory in use, by all processes (MB)",
    "gpu/power_watts": "power drawn by the whole GPU (W)",
    "gpu/temperature_celsius": "temperature of the GPU's core (degrees Celsius)",
    "gpu/energy_joules": "energy drawn by the whole GPU during the run, across resumes (J)",
}

INIT_SECONDS = 15.0  # how long wandb may take to reach its server before it records offline
START_SECONDS = 20.0  # how long a run waits for its services to start; they may go on after it
CLOSE_SECONDS = 30.0  # how long the end of a run waits for uploads
HURRIED_SECONDS = 3.0  # how long either of these waits goes on after a signal to end
FAILED_SECONDS = 3.0  # how long the end of a run waits for a service that has failed
STALE_SECONDS = 10.0  # age at which a GPU sample is no longer told
QUEUED_ROWS = 20_000  # rows a service may lag behind before it is dropped as too slow

Row = dict[str, Any]
_FAMILIES = tuple(tag.removesuffix("<layer>") for tag in TAGS if tag.endswith("<layer>"))
_log = logging.getLogger(__name__)


@functools.cache
def check_tag(tag: str) -> None:
    """Raise ValueError for a tag that is not in the catalogue."""
    family = any(tag.startswith(prefix) and tag != prefix for prefix in _FAMILIES)
    if "<" in tag or not (family or tag in TAGS):
        raise ValueError(f"unknown tag {tag!r}: name it in sansac.logger.TAGS and docs/metrics.md")


def reason_of(error: BaseException) -> str:
    """What went wrong, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


class Sink(Protocol):
    """Where rows go: `step`, `updates`, `time` and tags, all plain numbers."""

    def log(self, row: Row) -> None: ...
    def artifact(self, path: Path, name: str, kind: str) -> None: ...
    def close(self) -> None: ...


class Logger:
    """Everything a run records, by tag, against environment steps.

    `resume_step` is the step of the checkpoint that a run goes on from: rows beyond it are cut, so
    rows of the checkpoint's own step must be logged before it is written. None is a fresh run: rows
    of an earlier attempt in the same directory are cut. `hurried` tells whether a signal has asked
    for an end.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        device: str = "cpu",
        resume_step: int | None = None,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        run_dir = run_dir.absolute()
        self._hurried = hurried
        self._metrics = JsonLines(run_dir / "metrics.jsonl", resume_step)
        self._metrics_failed = False
        self._services: list[Background] = []
        mode = wandb_mode(config.wandb)
        if mode != "disabled":
            self._services.append(
                Background(
                    "wandb",
                    lambda: WandbSink(config, run_dir, mode, hurried),
                    release=release_wandb_service,
                )
            )
        if config.tensorboard:
            directory = run_dir / "tensorboard"
            self._services.append(
                Background("TensorBoard", lambda: TensorBoardSink(directory, resume_step))
            )
        deadline = monotonic() + START_SECONDS
        for service in self._services:
            service.wait_started(deadline - monotonic(), hurried)
        self._gpu: GpuMonitor | None = None
        if str(device).startswith("cuda"):
            energy = last_value(run_dir / "metrics.jsonl", "gpu/energy_joules")
            self._gpu = GpuMonitor(str(device), energy_joules=energy)

    def log(
        self, *, step: int, updates: int, time: float, values: Mapping[str, SupportsFloat]
    ) -> None:
        """Record scalars by tag. Tensors become numbers here, and wait for their device here.

        `time` is the run's own clock (seconds of collecting and learning). A tag that is not in
        `TAGS` raises ValueError; what a service does wrong never raises.
        """
        row: Row = {"step": int(step), "updates": int(updates), "time": float(time)}
        for tag, value in values.items():
            check_tag(tag)
            row[tag] = float(value)
        try:
            self._metrics.log(row)
            self._metrics_failed = False
        except OSError as error:
            # A full disk may be freed: every row is tried, the first failure in a row is reported.
            if not self._metrics_failed:
                _log.warning("metrics row of step %d not written: %s", step, error)
            self._metrics_failed = True
        for service in self._services:
            service.log(row)

    def gpu_metrics(self) -> dict[str, float]:
        """Latest `gpu/` values, to be logged with a training row; empty without a GPU."""
        return self._gpu.read() if self._gpu else {}

    def save_artifact(self, path: Path, name: str, kind: str) -> None:
        """Upload a file or directory, the best agent or a video, where a service takes it."""
        for service in self._services:
            service.artifact(path, name, kind)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Flush and end every service within about `timeout` seconds; twice does no harm."""
        deadline = monotonic() + timeout
        if self._gpu:
            self._gpu.close()
        self._metrics.close()
        for service in self._services:
            service.close(deadline - monotonic(), self._hurried)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# -- metrics.jsonl ---------------------------------------------------------------------------------


class JsonLines:
    """A JSON object a line, whole lines only; NaN and infinities are `null`, which JSON has."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        if path.exists():
            cut_metrics(path, -1 if resume_step is None else resume_step)
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = os.fstat(self._file).st_size

    def log(self, row: Row) -> None:
        if self._file is None:
            raise ValueError("the logger is closed")
        try:
            text = json.dumps(row, allow_nan=False)
        except ValueError:
            text = json.dumps({k: v if math.isfinite(v) else None for k, v in row.items()})
        line = text.encode() + b"\n"
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)  # no half line for the next to follow
            raise
        self._size += len(line)

    def artifact(self, path: Path, name: str, kind: str) -> None:
        pass  # it already is in the run directory

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


def read_metrics(path: Path) -> list[Row]:
    """Rows of a `metrics.jsonl`; `null` comes back as NaN, a torn last line is left out.

    Any other line that is not a row raises ValueError naming the file and the line.
    """
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            row = parse_row(line)
            if row is not None:
                rows.append({k: math.nan if v is None else v for k, v in row.items()})
            elif line.endswith(b"\n"):
                raise ValueError(f"{path}, line {number}: not a row of metrics")
    return rows


def cut_metrics(path: Path, step: int) -> None:
    """Keep the rows up to `step`; the file is whole, old or new, whenever the process dies."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(path, "rb") as old, open(temporary, "wb") as new:
            for line in old:
                row = parse_row(line)
                if row is not None and row["step"] <= step:
                    new.write(line.rstrip(b"\n") + b"\n")
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def last_value(path: Path, tag: str) -> float:
    """The last value logged under a tag, or 0."""
    with open(path, "rb") as file:
        rows = [row for line in file if tag.encode() in line and (row := parse_row(line))]
    return next((row[tag] for row in reversed(rows) if row.get(tag) is not None), 0.0)


def parse_row(line: bytes) -> Row | None:
    """A line as a row, or None where it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return row if all(v is None or is_number(v) for v in row.values()) else None


def is_number(value: Any) -> bool:
    """A number that a float holds."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


# -- services --------------------------------------------------------------------------------------


class Background:
    """A sink on a thread of its own: made, fed and closed there; no call of ours waits for it.

    The first thing that goes wrong is reported and ends the service. `release` is called after a
    failure to free what the service holds, with True where its thread is stuck in it.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        *,
        release: Callable[[bool], None] = lambda stuck: None,
        capacity: int = QUEUED_ROWS,
    ) -> None:
        self._name, self._make, self._release, self._capacity = name, make, release, capacity
        self._jobs: queue.SimpleQueue[Callable[[Sink], None] | None] = queue.SimpleQueue()
        self._started = threading.Event()
        self._lock = threading.Lock()
        self.failed = False
        self._thread = threading.Thread(target=self._run, name=f"sansac {name}", daemon=True)
        self._thread.start()

    def wait_started(self, timeout: float, hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait until the sink is made, or has failed; a slow one goes on starting behind."""
        wait(self._started.wait, self._started.is_set, timeout, hurried)

    def log(self, row: Row) -> None:
        self._put(lambda sink: sink.log(row))

    def artifact(self, path: Path, name: str, kind: str) -> None:
        self._put(lambda sink: sink.artifact(path, name, kind))

    def close(self, timeout: float, hurried: Callable[[], bool] = lambda: False) -> None:
        began = monotonic()
        timeout = min(timeout, FAILED_SECONDS) if self.failed else timeout
        self._jobs.put(None)
        wait(self._thread.join, lambda: not self._thread.is_alive(), timeout, hurried)
        if self._thread.is_alive():
            self._fail(f"did not end within {monotonic() - began:.0f} s")
            self._release(True)
            self._thread.join(FAILED_SECONDS)

    def _put(self, job: Callable[[Sink], None]) -> None:
        if self.failed:
            return
        if self._jobs.qsize() < self._capacity:
            self._jobs.put(job)
        else:
            self._fail(f"it lags {self._capacity} rows behind")

    def _fail(self, reason: object) -> None:
        with self._lock:
            first, self.failed = not self.failed, True
        if first:
            _log.warning("%s is dropped, training goes on: %s", self._name, reason)

    def _run(self) -> None:
        # BaseException, because a service may call sys.exit in its thread.
        sink: Sink | None = None
        try:
            sink = self._make()
            self._started.set()
            while (job := self._jobs.get()) is not None and not self.failed:
                job(sink)
        except BaseException as error:
            self._fail(reason_of(error))
        try:
            if sink is not None:
                sink.close()  # after a failure too: what it had taken may be kept
        except BaseException as error:
            self._fail(reason_of(error))
        self._started.set()
        if self.failed:
            self._release(False)


def wait(
    pause: Callable[[float], object],
    over: Callable[[], bool],
    timeout: float,
    hurried: Callable[[], bool],
) -> None:
    """Wait until `over()`, for `timeout` seconds at most, HURRIED_SECONDS once `hurried()`.

    In slices: one long wait would go on, whatever a signal says.
    """
    deadline, in_time = monotonic() + timeout, False
    while not over() and (left := deadline - monotonic()) > 0:
        if hurried() and not in_time:
            deadline, in_time = min(deadline, monotonic() + HURRIED_SECONDS), True
        pause(min(left, 0.1))


class TensorBoardSink:
    """TensorBoard events; a resumed run tells TensorBoard to forget the steps beyond its start."""

    def __init__(self, directory: Path, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge, flush_secs=10)

    def log(self, row: Row) -> None:
        for tag, value in row.items():
            if "/" in tag:
                self._writer.add_scalar(tag, value, row["step"])

    def artifact(self, path: Path, name: str, kind: str) -> None:
        pass  # TensorBoard keeps no files

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A wandb run: grouped by environment and actor, `step` as its axis, nothing of the machine.

    Online, the run's id is kept in the run directory and a resume goes on with it; steps that the
    server already has are not sent twice, so that the axis only grows. Offline, each start of the
    run is a directory of its own under `wandb/`, uploaded later by `wandb sync`.
    """

    def __init__(
        self, config: Config, run_dir: Path, mode: str, hurried: Callable[[], bool]
    ) -> None:
        # wandb sends its own crash reports unless told not to; offline must mean offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if mode == "online" and not has_wandb_key():
            # Asked now, wandb would prompt at a terminal.
            _log.warning("wandb records offline: there is no API key (`wandb login` stores one)")
            mode = "offline"
        self._remote: RemoteId | None = None
        timeout = CLOSE_SECONDS - 5.0
        try:
            self._remote = RemoteId(run_dir) if mode == "online" else None
            self._run = start_wandb(config, run_dir, mode, self._remote, finish_timeout=timeout)
        except Exception as error:
            if mode == "offline" or hurried():  # an end is not held up by a second start
                raise
            _log.warning("wandb records offline, its server was not reached: %s", reason_of(error))
            self._release()
            self._run = start_wandb(config, run_dir, "offline", finish_timeout=timeout)
        # The rows between a checkpoint and a crash are the same when they are run again.
        self._reached = reached(self._run)

    def _release(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._remote = None

    def log(self, row: Row) -> None:
        if row["step"] > self._reached:
            self._run.log(row)

    def artifact(self, path: Path, name: str, kind: str) -> None:
        if self._remote is not None:
            log_artifact(self._run, path, name, kind)

    def close(self) -> None:
        self._run.finish()
        self._release()


class RemoteId:
    """The id that a run has on wandb's server: made once, kept in the run directory, and held by
    one process at a time. Raises RuntimeError where another process holds it."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / "wandb" / "run-id"
        path.parent.mkdir(exist_ok=True)
        self._file = open(path, "a+", encoding="ascii", errors="replace")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RuntimeError("another process is sending this run to wandb") from None
        self._file.seek(0)
        self.id = self._file.read().strip()
        if not re.fullmatch(r"[0-9a-f]{12}", self.id):
            self.id = secrets.token_hex(6)
            self._file.truncate(0)
            self._file.write(self.id + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def start_wandb(
    config: Config, run_dir: Path, mode: str, remote: RemoteId | None = None, **settings: Any
) -> Any:
    """The wandb run of a run directory, which goes on under `remote` where there is one."""
    import wandb

    run = wandb.init(
        mode=mode,  # type: ignore[arg-type]
        dir=str(run_dir),
        project=config.wandb_project,
        name=run_dir.name,
        group=f"{config.env}/{config.agent_name}",
        tags=[config.env, config.actor_name, config.algorithm],
        job_type="train",
        config=config.model_dump(mode="json"),
        reinit="create_new",
        id=remote.id if remote else None,
        resume="allow" if remote and mode == "online" else None,
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            # The run directory holds what is needed to repeat the run; of the machine, its user,
            # environment variables, command line and code wandb gets nothing.
            host="",
            disable_git=True,
            disable_code=True,
            save_code=False,
            label_disable=True,
            symlink=False,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
            **settings,
        ),
    )
    run.define_metric("*", step_metric="step")
    return run


def reached(run: Any) -> int:
    """The last step that wandb's server has of a run, -1 where it has none."""
    step = run.summary.get("step") if run.resumed else None
    return -1 if step is None else int(step)


def log_artifact(run: Any, path: Path, name: str, kind: str) -> None:
    """Upload a file or directory under a name that other runs do not share."""
    import wandb

    artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", f"{run.id}-{name}"), type=kind)
    artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
    run.log_artifact(artifact)


def wandb_mode(choice: str) -> str:
    """`online`, `offline` or `disabled`. "auto" honours wandb's own setting of the mode
    (WANDB_MODE), else is online with an API key and offline without. Imports no wandb."""
    if choice != "auto":
        return choice
    return own_wandb_mode() or ("online" if has_wandb_key() else "offline")


def own_wandb_mode() -> str | None:
    """The mode that wandb's own setting asks for, if it does."""
    own = (_wandb_setting("mode") or "").lower()
    own = {"run": "online", "shared": "online", "dryrun": "offline"}.get(own, own)
    return own if own in ("online", "offline", "disabled") else None


def has_wandb_key() -> bool:
    """Whether wandb would find credentials: in its settings or environment, or in netrc."""
    if _wandb_setting("api_key") or _wandb_setting("identity_token_file"):
        return True
    host = urlsplit(_wandb_setting("base_url") or "").netloc
    hosts = [host] if host else ["api.wandb.ai", "api.forge.coreweave.com"]
    with suppress(OSError, RuntimeError, UnicodeDecodeError, netrc.NetrcParseError):
        path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
        logins = netrc.netrc(str(path))
        return any((login := logins.authenticators(name)) and login[2] for name in hosts)
    return False


def _wandb_setting(name: str) -> str | None:
    """A setting of wandb's, from WANDB_<NAME> or its settings file."""
    if value := os.environ.get(f"WANDB_{name.upper()}"):
        return value
    parser = configparser.ConfigParser(interpolation=None)
    with suppress(OSError, RuntimeError, UnicodeDecodeError, configparser.Error):
        directory = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
        parser.read(directory / "settings")
        return parser.get("default", name, fallback=None)
    return None


def release_wandb_service(stuck: bool) -> None:
    """Forget this process's wandb service if it is dead, end it first if it is `stuck`.

    Left alone, such a service would block the interpreter's exit, in wandb's own exit hook, and
    every later run of this process.
    """
    # No import: that would wait for a thread that is stuck importing.
    setup = sys.modules.get("wandb.sdk.wandb_setup")
    with suppress(Exception):  # the handle of the service is private to wandb
        service = setup._singleton._connection._proc._process  # type: ignore[union-attr]
        if stuck:
            service.kill()
        service.wait(1.0)  # raises where it lives: wandb ends it at the interpreter's exit
        setup.teardown()  # type: ignore[union-attr]


# -- GPU -------------------------------------------------------------------------------------------


class GpuMonitor:
    """Samples the GPU of a torch device by NVML, on a thread of its own.

    What NVML cannot tell is left out of `read()`; the first failure is noted, once. `nvml` (a
    module like pynvml) and `uuid` are found when not given.
    """

    def __init__(
        self,
        device: str = "cuda",
        *,
        energy_joules: float = 0.0,
        interval: float = 1.0,
        nvml: Any = None,
        uuid: str | None = None,
    ) -> None:
        self._nvml, self._interval = nvml, interval
        self._joules = energy_joules
        self._latest: tuple[float, dict[str, float]] = (-math.inf, {})
        self._noted = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sansac NVML", daemon=True)
        try:
            self._uuid = uuid or torch_uuid(device)
        except Exception as error:
            self._note(error)
            return
        self._thread.start()

    def read(self) -> dict[str, float]:
        """Latest value by tag; empty where a driver that hangs would make it an old one."""
        sampled, values = self._latest
        return dict(values) if monotonic() - sampled < STALE_SECONDS else {}

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)  # a driver that hangs does not hold up the end

    def _note(self, error: Exception) -> None:
        if not self._noted:
            self._noted = True
            _log.warning("GPU metrics are incomplete: %s", reason_of(error))

    def _run(self) -> None:
        try:
            nvml = self._nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception as error:
            self._note(error)
            return
        try:
            self._sample(nvml, nvml.nvmlDeviceGetHandleByUUID(self._uuid))
        except Exception as error:
            self._note(error)
        with suppress(Exception):
            nvml.nvmlShutdown()

    def _sample(self, nvml: Any, gpu: Any) -> None:
        """Sample until closed. Counters are asked for anew each time: some failures pass."""
        queries: dict[str, Callable[[], float]] = {
            "gpu/utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "gpu/memory_mb": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e6,
            "gpu/power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "gpu/temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(
                gpu, nvml.NVML_TEMPERATURE_GPU
            ),
        }
        try:
            start = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
            before = self._joules
            queries["gpu/energy_joules"] = lambda: (
                before + nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3 - start
            )
        except Exception:  # older GPUs have no such counter: power is integrated instead
            pass
        last: tuple[float, float] | None = None
        while True:
            values: dict[str, float] = {}
            for tag, query in queries.items():
                try:
                    values[tag] = float(query())
                except Exception as error:
                    self._note(error)
            now = monotonic()
            power = values.get("gpu/power_watts")
            if "gpu/energy_joules" not in queries and power is not None:
                if last is not None:
                    self._joules += (now - last[0]) * (power + last[1]) / 2
                last = now, power
                values["gpu/energy_joules"] = self._joules
            self._latest = now, values
            if self._stop.wait(self._interval):
                return


def torch_uuid(device: str) -> str:
    """NVML's name of a torch device: the order of devices differs between the two."""
    import torch

    index = torch.device(device).index
    if index is None:
        index = torch.cuda.current_device()
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
