"""The progress display: right numbers, on stderr alone, and never the end of a run."""

from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sansac import progress as module
from sansac.progress import Progress, SafeStream, clock

ROOT = Path(__file__).parent.parent


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(module, "monotonic", fake)
    return fake


RUN = """
import logging, sys, time
from sansac.progress import Progress
with Progress(1000, 0, "Pendulum-v1 spiking") as progress:
    progress.note("a [note] about " + "x" * 9)
    for step in range(0, 1000, 10):
        progress.update(step, step // 2, episode_return=-200.0)
        if step == 500:
            progress.update(step, step // 2, evaluation=-150.25)
            logging.getLogger("sansac").warning("a warning")
        time.sleep(0.013)
    print("a result")
    progress.update(1000, 500)
print("runs/here")
"""
OUT = "a result\nruns/here\n"


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **changes}


def at_a_terminal(
    text: str, during: Callable[[int], None] = lambda terminal: None, **changes: str
) -> tuple[int, str, str]:
    """Run Python with a terminal for its stderr: exit code, stdout, what the terminal got."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment(**changes),
    )
    os.close(theirs)
    shown = b""
    began = time.monotonic()
    while time.monotonic() - began < 30.0:
        if shown:
            during(ours)
        if not select.select([ours], [], [], 0.1)[0]:
            continue
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other side is gone
            break
    out, _ = process.communicate(timeout=10)
    os.close(ours)
    return process.returncode, out.decode(), shown.decode()


# -- numbers ---------------------------------------------------------------------------------------


def test_rates_and_eta_of_a_resumed_run_start_where_it_resumes(seconds: Clock) -> None:
    progress = Progress(150_000, 100_000, "walker")
    progress.update(100_000, 95_000)
    assert progress.rates() is None and progress.eta() is None
    for i in range(1, 11):
        seconds.now += 1.0
        progress.update(100_000 + 500 * i, 95_000 + 250 * i)
    assert progress.rates() == (500.0, 250.0)
    assert progress.eta() == (150_000 - 105_000) / 500
    assert progress.text() == (
        "walker: 70.0%, step 105,000 of 150,000, elapsed 0:00:10, ETA 0:01:30, "
        "500 steps/s, 250 updates/s"
    )


def test_rates_follow_the_last_half_minute(seconds: Clock) -> None:
    """An ETA from the whole run would be far off where it slows down."""
    progress = Progress(100_000)
    step = 0
    for rate in [5000] * 10 + [100] * 40:
        seconds.now += 1.0
        step += rate
        progress.update(step, step)
    assert progress.rates() == (100.0, 100.0)
    assert progress.eta() == (100_000 - step) / 100


def test_warming_up_promises_no_end(seconds: Clock) -> None:
    """Its random steps without updates are many times faster than learning."""
    progress = Progress(100_000)
    for i in range(1, 6):
        seconds.now += 1.0
        progress.update(5000 * i, 0)
    assert progress.rates() == (5000.0, 0.0) and progress.eta() is None
    for i in range(1, 6):
        seconds.now += 1.0
        progress.update(25_000 + 100 * i, 25 * i)
    assert progress.rates() == (100.0, 25.0)
    assert progress.eta() == (100_000 - 25_500) / 100


def test_a_long_pause_lowers_the_rate_and_does_not_stop_it(seconds: Clock) -> None:
    progress = Progress(1000)
    progress.update(0, 0)
    seconds.now += 1.0
    progress.update(100, 0)
    seconds.now += 19.0  # an evaluation
    assert progress.rates() == (5.0, 0.0)


def test_the_return_is_the_mean_of_the_last_ten_episodes(seconds: Clock) -> None:
    progress = Progress(100)
    progress.update(1, 0, episode_return=0.0)
    assert progress.status() == "return 0.0"
    for value in range(1, 31):
        progress.update(1, 0, episode_return=float(value))
    progress.update(1, 0, evaluation=-7.25)
    assert progress.status() == "return 25.5, evaluation -7.2"


def test_a_clock_set_back_an_hour_changes_nothing() -> None:
    program = """
import time
wall, back = time.time, 0.0
time.time = lambda: wall() - back
from sansac.progress import Progress
progress = Progress(10_000)
progress.update(0, 1)
back = 3600.0
time.sleep(1.1)
progress.update(100, 51)
print(*progress.rates(), progress.eta(), progress.elapsed())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    steps, updates, eta, elapsed = map(float, done.stdout.split())
    assert 20.0 < steps < 100.0 and updates == steps / 2
    assert 90.0 < eta < 500.0
    assert 1.0 < elapsed < 5.0


@pytest.mark.parametrize(
    ("total", "step", "percent"), [(0, 0, "100.0%"), (10, 20, "100.0%"), (3, 1, "33.3%")]
)
def test_percent_has_an_end(total: int, step: int, percent: str) -> None:
    progress = Progress(total)
    progress.update(step, 0)
    assert progress.text().startswith(f"{percent}, step {step} of {total}, elapsed 0:00:0")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (360_000, "100:00:00"), (-1, "0:00:00")],
)
def test_durations_are_hours_minutes_seconds(value: float, shown: str) -> None:
    assert clock(value) == shown


def test_an_update_costs_microseconds() -> None:
    progress = Progress(10**9)
    best = math.inf
    for _ in range(30):
        began = time.perf_counter()
        for step in range(1000):
            progress.update(step, step)
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 5e-6


# -- where stderr is no terminal -------------------------------------------------------------------


def test_plain_lines_come_at_the_start_the_end_evaluations_and_every_ten_seconds(
    seconds: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(1000, 0, "walker") as progress:
        for step in range(1, 301):
            seconds.now += 0.125
            progress.update(step, 0)
        progress.update(300, 0, evaluation=0.0)
        progress.note("a note")
        seconds.now += 3.0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    percents = [re.match(r"walker: ([\d.]+)%|a note", line) for line in lines]
    assert [match and match[1] for match in percents] == [
        "0.0", "8.0", "16.0", "24.0", "30.0", None, "30.0"
    ]  # fmt: skip
    assert lines[5] == "a note"
    assert "evaluation" not in lines[3] and "evaluation 0.0" in lines[4]
    assert "ETA" not in lines[-1] and "elapsed 0:00:40" in lines[-1]


def fail_at(progress: Progress, step: int) -> None:
    progress.update(step, 0)
    raise RuntimeError


def test_a_run_that_fails_still_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(10)
    with pytest.raises(RuntimeError), progress:
        fail_at(progress, 5)
    assert capsys.readouterr().err.splitlines()[-1].startswith("50.0%, step 5 of 10")


class Unwritable(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("stream", ["none", "closed", "broken pipe", "full disk"])
def test_a_stderr_that_is_gone_is_not_missed(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: dict[str, Any] = {
        "none": None,
        "closed": io.StringIO(),
        "broken pipe": Unwritable(BrokenPipeError()),
        "full disk": Unwritable(OSError(28, "No space left on device")),
    }
    streams["closed"].close()
    monkeypatch.setattr(sys, "stderr", streams[stream])
    with Progress(10, 0, "walker") as progress:
        progress.update(5, 0, evaluation=1.0)
        progress.note("a note")
    assert progress.fraction() == 0.5


@pytest.mark.parametrize("redirection", ["2>&-", "2> >(exec <&-; sleep 1)"])
def test_a_process_without_stderr_ends_well(redirection: str) -> None:
    program = RUN.replace("0.013", "0.0")
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, program],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, OUT)


def test_names_that_a_locale_cannot_write_are_escaped() -> None:
    raw = io.BytesIO()
    stream = SafeStream(io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    stream.line("Läufer")
    stream.line("goes on")
    assert raw.getvalue() == b"L\\xe4ufer\ngoes on\n"


# -- at a terminal ---------------------------------------------------------------------------------


def test_a_terminal_gets_a_live_display_and_stdout_stays_the_users() -> None:
    code, out, shown = at_a_terminal(RUN)
    assert (code, out) == (0, OUT)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "\x1b[2K" in shown and "━" in shown
    assert len(set(re.findall(r"[\d.]+%", plain))) > 3  # it moves
    assert re.search(r"Pendulum-v1 spiking [\d.]+% .*ETA 0:00:0\d", plain)
    assert re.search(r"\d+ steps/s, \d+ updates/s, return -200.0, evaluation -150.2", plain)
    assert "a [note] about xxxxxxxxx\r\n" in plain
    assert plain.count("a warning") == 1
    final = plain.rsplit("Pendulum-v1 spiking ", 1)[1]
    assert final.startswith("100.0%")


def test_a_terminal_may_be_resized_to_almost_nothing() -> None:
    widths = iter([40, 12, 3, 1, 200] * 1000)

    def resize(terminal: int) -> None:
        size = struct.pack("HHHH", 24, next(widths), 0, 0)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)

    code, out, shown = at_a_terminal(RUN, resize)
    assert (code, out) == (0, OUT)
    assert "Traceback" not in shown


def test_a_terminal_without_a_locale_gets_ascii() -> None:
    code, out, shown = at_a_terminal(
        RUN.replace("Pendulum", "L\\u00e4ufer"),
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONIOENCODING="ascii",
    )
    assert (code, out) == (0, OUT)
    assert shown.isascii() and "Traceback" not in shown
    assert "steps/s" in shown


def test_a_dumb_terminal_gets_plain_lines() -> None:
    code, out, shown = at_a_terminal(RUN.replace("0.013", "0.0"), TERM="dumb")
    assert (code, out) == (0, OUT)
    assert "\x1b" not in shown
    assert shown.splitlines()[0].startswith("Pendulum-v1 spiking: 0.0%, step 0 of 1,000")


def test_a_terminal_that_hangs_up_does_not_end_the_run(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    program = RUN.replace('print("runs/here")', f"open({str(tmp_path / 'end')!r}, 'w').close()")
    process = subprocess.Popen(
        [sys.executable, "-c", program], stderr=theirs, stdout=subprocess.DEVNULL, env=environment()
    )
    os.close(theirs)
    os.read(ours, 100)
    os.close(ours)
    process.wait(timeout=30)
    assert (tmp_path / "end").exists()
