"""SIGTERM and SIGINT, whatever the run is at: an end within ten seconds that can be gone on from,
the right exit code, and no process left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import KEY, load_state, tiny
from injection import PATIENCE, Harmed, last_step, marked_pids, resume, train

from sansac.checkpoint import read_record
from sansac.config import Config

SECONDS = 10.0  # those in which others had the processor do not count
LONG: dict[str, Any] = {"total_steps": 10**8, "log_every": 2}


def stop(harmed: Harmed, *signals: signal.Signals, pause: float = 0.3) -> tuple[int, str, str]:
    """Send signals; checks the time and what is left."""
    pid, began = harmed.process.pid, time.monotonic()
    kept_waiting = waited(pid)
    for number in signals:
        harmed.process.send_signal(number)
        time.sleep(pause if len(signals) > 1 else 0)
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):  # not forgotten yet
        assert time.monotonic() - began < PATIENCE, "it does not end"
        time.sleep(0.01)
    seconds, kept_waiting = time.monotonic() - began, waited(pid) - kept_waiting
    print(f"\nended after {seconds:.1f} s, in {kept_waiting:.1f} of which others had the processor")
    assert seconds - kept_waiting < SECONDS
    ended = harmed.end()
    assert harmed.left() == []
    assert "Traceback" not in ended[2]
    return ended


def waited(pid: int) -> float:
    """Seconds in which a process's main thread could have run, and another had the processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def goes_on(run: Path) -> None:
    step = load_state(run)["counters"]["step"]
    code, _, err = resume(run, "--total-steps", str(step + 40)).end()
    assert code == 0, err
    assert read_record(run)["status"] == "finished"
    assert last_step(run) == step + 40


def run_of(config: Config) -> Path:
    assert config.name is not None
    return config.runs_dir / config.env / config.name


@pytest.mark.slow
@pytest.mark.parametrize("async_envs", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_one_signal(number: signal.Signals, async_envs: bool, tmp_path: Path) -> None:
    config = tiny(tmp_path, name="run", async_envs=async_envs, **LONG)
    harmed = train(config)
    harmed.wait_for(lambda: last_step(run_of(config)) > 100)
    code, out, _ = stop(harmed, number)
    assert (code, out) == (128 + number, f"{run_of(config)}\n")
    assert read_record(run_of(config))["status"] == "interrupted"
    goes_on(run_of(config))


@pytest.mark.slow
@pytest.mark.parametrize("async_envs", [False, True], ids=["sync", "async"])
def test_two_interrupts(async_envs: bool, tmp_path: Path) -> None:
    """The second one ends the process where it stands, here at once after the first."""
    config = tiny(tmp_path, name="run", async_envs=async_envs, **LONG)
    harmed = train(config)
    harmed.wait_for(lambda: last_step(run_of(config)) > 100)
    code, _, _ = stop(harmed, signal.SIGINT, signal.SIGINT, pause=0.001)
    assert code == 130
    goes_on(run_of(config))


def test_while_kernels_are_compiled(tmp_path: Path) -> None:
    """Before there is a run: nothing of it, of the compiler or of its files is left."""
    config = tiny(tmp_path, name="run", san=True, **LONG)
    cache = tmp_path / "cache"
    harmed = train(config, env={"XDG_CACHE_HOME": str(cache), "TMPDIR": str(tmp_path)})
    harmed.wait_for(lambda: marked_pids(harmed.mark, "cc1"))
    assert list(cache.glob("sansac/*.part"))
    code, out, _ = stop(harmed, signal.SIGTERM)
    assert (code, out) == (143, "")
    assert list(cache.glob("sansac/*.part")) == list(tmp_path.glob("sansac-*")) == []
    assert not run_of(config).exists()


@pytest.mark.slow
def test_while_it_evaluates(tmp_path: Path) -> None:
    config = tiny(tmp_path, name="run", eval_episodes=10**6, **LONG)
    harmed = train(config)
    harmed.wait_for(lambda: last_step(run_of(config)) == 80)
    time.sleep(0.5)
    assert last_step(run_of(config)) == 80
    assert stop(harmed, signal.SIGTERM)[0] == 143
    code, _, err = resume(run_of(config), "--total-steps", "120", "--eval-episodes", "1").end()
    assert code == 0, err


@pytest.mark.slow
def test_while_it_saves(tmp_path: Path) -> None:
    config = tiny(tmp_path, name="run", checkpoint_every=2, **LONG)
    part = run_of(config) / "checkpoints" / ".last.pt.tmp"
    harmed = train(config)
    harmed.halt_when(lambda: last_step(run_of(config)) > 100 and part.exists())
    assert stop(harmed, signal.SIGTERM, signal.SIGCONT, pause=0)[0] == 143
    assert not part.exists()
    goes_on(run_of(config))


@pytest.mark.slow
def test_while_wandb_starts(no_account: None, silent: str, tmp_path: Path) -> None:
    """Its server takes the connection and never answers."""
    config = tiny(tmp_path, name="run", **{**LONG, "wandb": "online"})
    harmed = train(config, env={"WANDB_API_KEY": KEY, "WANDB_BASE_URL": silent})
    harmed.wait_for(lambda: marked_pids(harmed.mark, "wandb-core"))
    time.sleep(0.5)
    assert last_step(run_of(config)) == -1
    assert stop(harmed, signal.SIGTERM)[0] == 143
    goes_on(run_of(config))


@pytest.mark.slow
def test_while_wandb_closes(no_account: None, tmp_path: Path) -> None:
    """Its service is halted, so that it answers no more: the end waits for it, but not for long."""
    config = tiny(tmp_path, name="run", total_steps=400, log_every=2, wandb="offline")
    harmed = train(config)
    harmed.wait_for(lambda: last_step(run_of(config)) > 40)
    (service,) = marked_pids(harmed.mark, "wandb-core")
    os.kill(service, signal.SIGSTOP)
    harmed.wait_for(lambda: read_record(run_of(config)).get("status") == "finished")
    time.sleep(0.3)
    assert stop(harmed, signal.SIGTERM)[0] == 143
