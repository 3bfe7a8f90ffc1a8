"""What the injected faults share: processes under a mark, by which whatever they leave is found."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conftest import INTERRUPTIBLE, ROOT, flags, start

from sansac.config import Config
from sansac.logger import parse_row

MARK = "SANSAC_FAULT"
PATIENCE = 600.0  # seconds after which a process hangs: on a busy machine all takes its time
WALKER: dict[str, Any] = {"env": "BipedalWalker-v3", "env_kwargs": {"max_episode_steps": 40}}

# An environment of one's own in front of the command line: `python -c SCRIPT CLASS OPTIONS...`.
SCRIPT = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "tests" / "faults")!r}]
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import gymnasium, runner
gymnasium.register("Harmed-v0", entry_point=sys.argv[1])
sys.exit(runner.main(sys.argv[2:]))
"""


class Harmed:
    """A command line in a process and session of its own, which a test harms."""

    def __init__(
        self, *words: str | Path, env: Mapping[str, str] = MappingProxyType({}), **options: Any
    ) -> None:
        self.mark = secrets.token_hex(8)
        self.process = start(*words, new_group=True, env={**env, MARK: self.mark}, **options)

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, "ended early: " + self.process.communicate()[1]
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(0.002)

    def halt_when(self, condition: Callable[[], object]) -> None:
        """Halt the process at a moment when the condition holds, and keep it there."""
        while True:
            self.wait_for(condition)
            self.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if condition():  # it may have gone on until the signal was there
                return
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        try:
            out, err = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, out, err

    def left(self) -> list[str]:
        """Command lines of processes that live on though this one has ended."""
        deadline = time.monotonic() + 30
        while (found := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return list(found.values())


def marked(mark: str) -> dict[int, str]:
    """Command lines of the living processes that were started under a mark, by their id."""
    found = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal() or int(directory.name) == os.getpid():
            continue
        try:
            ours = f"{MARK}={mark}".encode() in (directory / "environ").read_bytes()
            words = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended, or is another user's
            continue
        if ours and words:  # a zombie has none
            found[int(directory.name)] = words
    return found


def marked_pids(mark: str, word: str) -> list[int]:
    return [pid for pid, words in marked(mark).items() if word in words]


def train(config: Config, *more: str, **how: Any) -> Harmed:
    return Harmed("-c", INTERRUPTIBLE, *flags(config), *more, **how)


def resume(run: Path, *more: str, **how: Any) -> Harmed:
    return Harmed("-c", INTERRUPTIBLE, "--resume", str(run), *more, **how)


def last_step(run: Path) -> int:
    """The step of the last whole row of metrics; -1 before there is one."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines()[-2:]
    except OSError:
        return -1
    rows = [row for line in lines if (row := parse_row(line))]
    return rows[-1]["step"] if rows else -1
