"""`kill -9` at any moment: every resume goes on, and ends like the run that was left alone."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import comparable, differences, tiny
from injection import WALKER, last_step, resume, train

from sansac import checkpoint
from sansac.config import Config
from sansac.manager import Manager

OFTEN: dict[str, Any] = {"log_every": 2, "checkpoint_every": 20, "eval_every": 200}
PENDULUM: dict[str, Any] = {**OFTEN, "total_steps": 10**8}
SPIKING_WALKER: dict[str, Any] = {**PENDULUM, **WALKER, "san": True, "learning": {"n_step": 2}}


def kill_again_and_again(config: Config, kills: int, seed: int) -> tuple[int, int]:
    """Kill a run and resume it, so many times, then let it end and compare it with one that was
    left alone. Returns how many kills fell into a save, and the most steps that one cost."""
    assert config.name is not None
    run = config.runs_dir / config.env / config.name
    part = run / "checkpoints" / ".last.pt.tmp"
    moments, in_saves, lost = random.Random(seed), 0, 0
    for kill in range(kills):
        began = time.time()
        harmed = train(config) if kill == 0 else resume(run)
        harmed.wait_for((run / "checkpoints" / "last.pt").exists)
        if kill % 5 == 4:  # a save is too short for chance
            harmed.halt_when(lambda: changed(part) > began)  # noqa: B023
        else:
            if kill == 0 or moments.random() > 0.2:  # the others while it starts
                harmed.wait_for(
                    lambda: changed(run / "metrics.jsonl") > max(began, time.time() - 0.1)  # noqa: B023
                )
            time.sleep(moments.uniform(0, 0.4))
        harmed.process.send_signal(signal.SIGKILL)
        assert harmed.end()[0] == -signal.SIGKILL
        assert harmed.left() == []
        in_saves += changed(part) > began  # not one that an earlier kill left
        state = checkpoint.load(run / "checkpoints" / "last.pt")
        lost = max(lost, last_step(run) - state["counters"]["step"])

    total = checkpoint.load(run / "checkpoints" / "last.pt")["counters"]["step"] + 200
    code, out, err = resume(run, "--total-steps", str(total)).end()
    assert (code, out.splitlines()[-1]) == (0, str(run)), err
    assert not part.exists()
    Manager(config.model_copy(update={"name": "alone", "total_steps": total})).train()
    assert differences(comparable(run), comparable(run.with_name("alone"))) == []
    return in_saves, lost


def changed(path: Path) -> float:
    """When a file was last written; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def test_a_run_that_is_killed_ends_like_one_left_alone(tmp_path: Path) -> None:
    config = tiny(tmp_path, name="run", **PENDULUM)
    _, lost = kill_again_and_again(config, 1, seed=3)
    assert lost <= config.checkpoint_every + config.num_envs


@pytest.mark.slow
@pytest.mark.parametrize("stack", [PENDULUM, SPIKING_WALKER], ids=["pendulum", "walker"])
def test_twenty_five_kills_of_a_run(stack: dict[str, Any], tmp_path: Path) -> None:
    config = tiny(tmp_path, name="run", **stack)
    in_saves, lost = kill_again_and_again(config, 25, seed=len(config.env))
    print(f"\n{config.env}: 25 kills, {in_saves} of them in a save, at most {lost} steps lost")
    assert in_saves >= 5
    assert lost <= config.checkpoint_every + config.num_envs


@pytest.mark.slow
def test_a_kill_of_asynchronous_environments_leaves_no_process(tmp_path: Path) -> None:
    config = tiny(tmp_path, name="run", async_envs=True, **PENDULUM)
    run = tmp_path / config.env / "run"
    harmed = train(config)
    harmed.wait_for(lambda: last_step(run) > 100)
    harmed.process.send_signal(signal.SIGKILL)
    harmed.end()
    assert harmed.left() == []
