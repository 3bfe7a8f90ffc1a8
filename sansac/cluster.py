"""The runs of a sweep on many machines: on a Ray cluster, or as an array job of Slurm.

Both start the very processes that a sweep starts on its own machine, from the same directory, which
all machines must see under the same path.
"""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from sansac import sweep
from sansac.config import ConfigError, slug
from sansac.sweep import Asked, Launch, Process, Queue, Run

WAIT_SECONDS = 1.0  # between tries to take over a run that another process still holds
OBJECT_STORE_BYTES = 80 * 2**20  # the least that Ray takes: nothing goes through it
STOP_SECONDS = 120  # before a time limit, when Slurm asks for a checkpoint


# -- Ray -------------------------------------------------------------------------------------------


@contextmanager
def connected(address: str) -> Iterator[Launch]:
    """Launches runs on the Ray cluster at `address`; "local" is one made for the occasion.

    Ray asks nobody who they are, so that one listens on 127.0.0.1 and has no dashboard. Raises
    ConfigError where Ray is not installed or the cluster is not reached.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it reports home unless told not to
    local = address == "local"
    if local:
        # Ray puts a reachable address in place of 127.0.0.1 unless it believes, when imported, that
        # its platform has no clusters.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    else:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # of 40 s each; else 20 of them
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: `pip install -e .[ray]`") from None
    alone: dict[str, Any] = {
        "num_cpus": sweep.cores(),
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    print(f"connecting to Ray ({address})", file=sys.stderr)
    try:
        ray.init(address=address, logging_level=logging.ERROR, **(alone if local else {}))
    except Exception as error:  # of many kinds: a start that takes too long is a bare one
        reason = str(error).partition("\n")[0]
        what = "Ray did not start" if local else f"no cluster was reached at {address}"
        raise ConfigError(f"--ray: {what}: {reason}") from None
    try:
        yield Remote
    finally:
        ray.shutdown()


class Host:
    """The actor that Ray places on a machine for one run: starts its process, waits for it."""

    def __init__(self, out: Path, run: Run) -> None:
        self._out, self._run = out, run
        self._process: Process | None = None
        self._stopped = False

    def train(self) -> int:
        """The run's exit code."""
        while not self._stopped:
            # A process that outlived its host, or its machine's Ray, holds the run until it ends.
            if (process := sweep.start(self._out, self._run)) is not None:
                self._process = process
                if self._stopped:
                    process.terminate()
                return process.wait()
            time.sleep(WAIT_SECONDS)
        return 128 + signal.SIGTERM

    def stop(self, kill: bool) -> None:
        self._stopped = True
        if self._process is not None:
            self._process.kill() if kill else self._process.terminate()


class Remote:
    """A run on a Ray cluster, which starts it once there is room."""

    def __init__(self, out: Path, run: Run) -> None:
        import ray

        config = sweep.read_run(out, run)
        actor: Any = ray.remote(Host)
        self._log = out / run.log
        self._host = actor.options(
            num_cpus=config.threads,
            num_gpus=int(config.device == "cuda"),
            max_concurrency=2,  # to be stopped while it waits
        ).remote(out.resolve(), run)
        self._placed = self._host.__ray_ready__.remote()
        self._code = self._host.train.remote()
        self._started = False

    @property
    def started(self) -> bool:
        import ray

        if not self._started and ray.wait([self._placed], timeout=0)[0]:
            with suppress(ray.exceptions.RayError):
                self._started = bool(ray.get(self._placed))
        return self._started

    def poll(self) -> int | None:
        """The exit code once there is one; of a run that went down with its machine, a kill's."""
        import ray

        if not ray.wait([self._code], timeout=0)[0]:
            return None
        try:
            return ray.get(self._code)
        except ray.exceptions.RayActorError:
            return -signal.SIGKILL
        except ray.exceptions.RayError as error:
            with open(self._log, "a") as log:
                log.write(f"{error}\n")
            return 1

    def terminate(self) -> None:
        self._stop(kill=False)

    def kill(self) -> None:
        self._stop(kill=True)

    def _stop(self, kill: bool) -> None:
        import ray

        if self.started:
            self._host.stop.remote(kill)
        else:
            ray.kill(self._host)


# -- Slurm -----------------------------------------------------------------------------------------


def array_job(out: Path, asked: Asked, workers: int | None, retry: bool) -> tuple[str, list[Run]]:
    """Make or go on with the sweep in `out` and run nothing: the script of an array job with a task
    for every run that is left, `workers` of them at a time, and how the runs stand.

    The script is empty where no run is left. Raises ConfigError before anything is written.
    """
    with sweep.opened(out, asked, workers, retry, nullcontext()) as (queue, _):
        left = {
            number: sweep.read_run(out, run)
            for number, run in enumerate(queue.runs)
            if run.status in ("queued", "interrupted", "running") and not sweep.held(out, run)
        }
        if not left:
            return "", queue.runs
        directory = out.resolve()
        throttle = f"%{workers}" if workers else ""
        options = [
            f"job-name=sansac-{slug(directory.name)}",
            f"array={ranges(list(left))}{throttle}",
            f"cpus-per-task={max(int(config.threads) for config in left.values())}",
            f"output={shlex.quote(str(directory / 'logs' / 'slurm-%A_%a.log'))}",
            "requeue",
            f"signal=B:TERM@{STOP_SECONDS}",
        ]
        if any(config.device == "cuda" for config in left.values()):
            options.append("gres=gpu:1")
        words = [sys.executable, str(sweep.RUNNER), "sweep", "--out", str(directory), "--task"]
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH --{option}" for option in options),
            "# What else your cluster asks for (time, partition, account) goes here or to sbatch.",
            f'exec {shlex.join(words)} "$SLURM_ARRAY_TASK_ID"',
        ]
        return "\n".join(lines) + "\n", queue.runs


def ranges(numbers: list[int]) -> str:
    """`[0, 2, 3, 4]` -> `"0,2-4"`."""
    words: list[str] = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        words.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(words)


def become(out: Path, number: int) -> NoReturn:
    """Turn this process into a run of the sweep in `out`, begun or gone on with: Slurm's signals
    reach it as they are sent. The queue is left as it is: the sweep reads the run's own record.

    Raises ConfigError where there is no such run or another process holds it.
    """
    runs = Queue.load(out / "queue.json").runs
    if not 0 <= number < len(runs):
        raise ConfigError(f"--task: {number} is none of the {len(runs)} runs of {out}, from 0 on")
    run = runs[number]
    log = sweep.claim(out, run)
    if log is None:
        raise ConfigError(f"--task: {run.id} is run by another process")
    words, environment = sweep.command(out, run, log)
    print(f"{run.id}: {out / run.log} tells how it goes", flush=True)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    os.chdir(out)
    os.execve(words[0], words, environment)
