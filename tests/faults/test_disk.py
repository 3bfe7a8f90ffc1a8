"""A disk that is full while a run saves, and is freed again."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import comparable, differences, load_state, tiny
from injection import Harmed, last_step, resume, train

from sansac import checkpoint
from sansac.checkpoint import read_record
from sansac.logger import read_metrics
from sansac.manager import Manager

CANNOT = (
    r"warning: \S+/(?:last|best)\.pt cannot be written: .+; it needs (\S+) MB, "
    r"free: (\S+) MB; training"
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def told(harmed: Harmed, word: str) -> str:
    """The next line on stderr that holds a word."""
    assert harmed.process.stderr
    for line in harmed.process.stderr:
        if word in line:
            return line
    raise AssertionError(f"{word!r} was not told: {harmed.end()}")


def rows(run: Path) -> set[str]:
    """Metrics but for what is measured in seconds."""
    kept = [
        {tag: v for tag, v in row.items() if tag != "time" and not tag.startswith("perf/")}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    return {repr(sorted(row.items())) for row in kept}


def assert_like_one_left_alone(run: Path, runs: Path, total: int) -> None:
    config = checkpoint.read_config(run)
    changes = {"name": "alone", "total_steps": total, "runs_dir": runs}
    alone = Manager(config.model_copy(update=changes))
    alone.train()
    ours, theirs = comparable(run), comparable(alone.directory)
    for either in (ours, theirs):
        del either["best"]  # the best of them may have met the full disk
    assert differences(ours, theirs) == []


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(5))
def test_a_full_disk_that_is_freed(attempt: int, small_disk: Path, tmp_path: Path) -> None:
    """Filled at another moment each time. The run warns and goes on; what was saved loads; once
    there is room it saves again, and ends like a run that never met a full disk."""
    config = tiny(
        small_disk, name="run", total_steps=10**8, eval_every=400, seed=attempt,
        log_every=40, checkpoint_every=40,
    )  # fmt: skip
    run, fill = small_disk / config.env / "run", small_disk / "fill"
    harmed = train(config)
    harmed.wait_for(lambda: last_step(run) > 100 + 60 * attempt)
    try:
        with open(fill, "wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass
    except OSError:
        pass
    warning = told(harmed, "cannot be written")
    match = re.search(CANNOT, warning)
    assert match and "No space left on device" in warning
    assert float(match[1]) > float(match[2])
    before = load_state(run)["counters"]["step"]
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] >= before
    told(harmed, "cannot be written")  # the next one is tried too
    fill.unlink()
    harmed.wait_for(lambda: load_state(run)["counters"]["step"] > before)
    harmed.process.terminate()
    assert harmed.end()[0] == 143

    step = load_state(run)["counters"]["step"]
    home = shutil.copytree(run, tmp_path / "run")
    assert resume(home, "--total-steps", str(step + 40)).end()[0] == 0
    alone = Manager(config.model_copy(update={"runs_dir": tmp_path, "total_steps": step + 40}))
    alone.train()
    assert rows(home) <= rows(alone.directory)  # while the disk was full, some may be lost
    state, expected = load_state(home), load_state(alone.directory)
    assert differences(state["algorithm"], expected["algorithm"]) == []
    assert differences(state["replay"], expected["replay"]) == []


def test_a_quota_that_is_lifted(tmp_path: Path) -> None:
    """The same by a limit on the size of files, which needs no right to mount anything."""
    config = tiny(
        tmp_path,
        name="run",
        total_steps=2000,
        eval_every=0,
        checkpoint_every=40,
        learning={"update_to_data": 0.1},
    )
    run = tmp_path / config.env / "run"
    harmed = train(config)
    harmed.wait_for((run / "checkpoints" / "last.pt").exists)
    resource.prlimit(harmed.process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    warning = told(harmed, "cannot be written")
    assert re.search(CANNOT, warning) and "File too large" in warning
    before = load_state(run)["counters"]["step"]
    assert not list((run / "checkpoints").glob(".*"))
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(harmed.process.pid, resource.RLIMIT_FSIZE, unlimited)
    code, out, err = harmed.end()
    assert (code, out.splitlines()[-1]) == (0, str(run)), err
    assert "Traceback" not in err
    assert load_state(run)["counters"]["step"] == 2000 > before
    assert read_record(run)["status"] == "finished"


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_with_an_error_and_the_run_can_go_on(tmp_path: Path) -> None:
    config = tiny(tmp_path, name="run", total_steps=1000, checkpoint_every=40)
    run = tmp_path / config.env / "run"
    harmed = train(config)
    harmed.wait_for((run / "checkpoints" / "last.pt").exists)
    resource.prlimit(harmed.process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    code, out, err = harmed.end()
    assert (code, out) == (1, "")
    assert re.search(r"\nerror: \S+/last\.pt cannot be written: .+; it needs \S+ MB", err)
    assert "Traceback" not in err
    assert load_state(run)["counters"]["step"] < 1000
    assert resume(run).end()[0] == 0
    assert_like_one_left_alone(run, tmp_path, 1000)
