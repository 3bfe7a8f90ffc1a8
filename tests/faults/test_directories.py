"""Run directories that are read-only, gone, moved, oddly named, wanted twice or held."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import comparable, differences, load_state, options, tiny
from injection import Harmed, last_step, resume, train

from sansac.checkpoint import read_record
from sansac.manager import Manager


def unprivileged() -> None:
    """Drop every capability, so that permissions hold for root too."""
    libc = ctypes.CDLL(None)
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was stopped on its way."""
    manager = Manager(tiny(tmp_path, name="run"))
    collect = manager.collect

    def collect_or_stop() -> None:
        manager.interrupted = 15 * (manager.step >= 90)
        collect()

    manager.collect = collect_or_stop  # type: ignore[method-assign]
    manager.train()
    return manager.directory


def finished(run: Path) -> dict[str, Any]:
    assert read_record(run)["status"] == "finished"
    return comparable(run)


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, Any]:
    manager = Manager(tiny(tmp_path / "expected", name="run"))
    manager.train()
    return finished(manager.directory)


def test_a_runs_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        harmed = train(tiny(tmp_path / "runs"), preexec_fn=unprivileged)
        code, out, err = harmed.end()
    finally:
        tmp_path.chmod(0o755)
    assert (code, out) == (2, "")
    assert err.startswith("error: runs_dir: cannot write") and "Permission denied" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_may_not_be_written_is_not_resumed(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for path in (run, run / ".lock"):
        path.chmod(0o555)
    code, out, err = resume(run, preexec_fn=unprivileged).end()
    assert (code, out) == (2, "") and f"error: cannot write {run}: Permission denied" in err
    run.chmod(0o755)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["read-only", "vanished"])
def test_a_directory_that_is_taken_away_costs_saves_and_not_the_training(
    how: str, tmp_path: Path
) -> None:
    """The run warns at each save; its end says that the last one failed."""
    config = tiny(tmp_path, name="run", total_steps=2000, checkpoint_every=40)
    run = tmp_path / config.env / "run"
    harmed = train(config, preexec_fn=unprivileged)
    harmed.wait_for((run / "checkpoints" / "last.pt").exists)
    if how == "vanished":
        shutil.rmtree(run)
    else:
        for directory in (run, run / "checkpoints"):
            directory.chmod(0o555)
    code, out, err = harmed.end()
    for directory in (run, run / "checkpoints") if run.exists() else ():
        directory.chmod(0o755)
    assert (code, out) == (1, "")
    assert f"warning: {run / 'checkpoints' / 'last.pt'} cannot be written" in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith(f"error: {run / 'checkpoints' / 'last.pt'} cannot be")
    if how == "read-only":
        assert resume(run).end()[0] == 0
        finished(run)
    else:
        assert not run.exists()


@pytest.mark.slow
def test_a_path_with_spaces_and_letters_of_any_language(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    runs = tmp_path / "meine Läufe 走る" / "a  b"
    config = tiny(runs, name="größer")
    code, out, err = train(config).end()
    run = runs / config.env / "größer"
    assert (code, out.splitlines()[-1]) == (0, str(run)), err
    assert differences(finished(run), expected) == []
    assert resume(run, "--total-steps", "200").end()[0] == 0
    for command in ("evaluate", "inspect"):
        assert Harmed("runner.py", command, run).end()[0] == 0


@pytest.mark.slow
def test_runs_that_start_in_the_same_second_have_directories_of_their_own(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    words = [*options(), "--seed", "0", "--threads", "1", "--runs-dir", tmp_path]
    together = [Harmed("runner.py", *words) for _ in range(3)]
    runs = {Path(harmed.end()[1].splitlines()[-1]) for harmed in together}
    assert len(runs) == 3
    for run in runs:
        assert differences(finished(run), expected) == []


@pytest.mark.slow
def test_two_processes_never_run_one_run(run: Path, expected: dict[str, Any]) -> None:
    """Four resume it at the same time: one trains; the others are refused, or find it done."""
    together = [resume(run) for _ in range(4)]
    ends = [harmed.end() for harmed in together]
    assert 0 in {code for code, _, _ in ends}
    for code, _, err in ends:
        done = "is finished: nothing to do" in err
        refused = "is in use by another process" in err or "was written since it was read" in err
        assert (code == 0 and not refused) or (code == 2 and refused) or done, err
    assert differences(finished(run), expected) == []


@pytest.mark.slow
def test_a_run_moves_to_another_folder(run: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    """Resumed from there, it leaves nothing in the place where it began."""
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    run.rename(moved)
    assert resume(moved).end()[1].splitlines()[-1] == str(moved)
    assert differences(finished(moved), expected) == []
    assert not run.exists()


@pytest.mark.slow
def test_a_run_that_moves_while_it_trains(tmp_path: Path) -> None:
    """It cannot know its new place: as if it had vanished; what was saved goes on from there."""
    config = tiny(tmp_path, name="run", total_steps=2000, checkpoint_every=40)
    run = tmp_path / config.env / "run"
    harmed = train(config)
    harmed.wait_for((run / "checkpoints" / "last.pt").exists)
    run.rename(tmp_path / "moved")
    assert harmed.end()[0] == 1
    assert resume(tmp_path / "moved").end()[0] == 0
    finished(tmp_path / "moved")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../away", "/abs", "..", "a/../../b", ".hidden", "x\ny"])
def test_a_name_cannot_leave_the_runs_directory(name: str, tmp_path: Path) -> None:
    runs = tmp_path / "deep" / "runs"
    runs.mkdir(parents=True)
    words = options(total_steps=20, learning={"learning_starts": 40, "batch_size": 16})
    code, out, err = Harmed("runner.py", *words, "--runs-dir", runs, f"--name={name}").end()
    assert code in (0, 2), err
    made = [
        path for path in tmp_path.rglob("*") if path.is_dir() and path.name not in ("deep", "runs")
    ]
    assert all(path.is_relative_to(runs) for path in made)
    if code == 0:
        assert Path(out.splitlines()[-1]).resolve().is_relative_to(runs)
    else:
        assert "has no letter or digit" in err and not made


@pytest.mark.slow
def test_a_killed_writer_never_leaves_two_holders(run: Path) -> None:
    """The lock dies with its process, however it ends."""
    holder = resume(run, "--total-steps", str(10**8))
    holder.wait_for(lambda: last_step(run) > 100)
    assert resume(run).end()[0] == 2
    holder.process.kill()
    holder.end()
    time.sleep(0.1)
    step = load_state(run)["counters"]["step"]
    assert resume(run, "--total-steps", str(step + 20)).end()[0] == 0
    assert os.path.exists(run / ".lock")
