"""Watching a run: what its files say, however they grow, in the terminal and as plain lines."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import FINAL, INTERRUPTIBLE, ROOT, start, tiny
from rich.console import Console

import runner
from sansac import watch as module
from sansac.checkpoint import write_config, write_record
from sansac.config import ConfigError
from sansac.logger import TAGS, JsonLines
from sansac.manager import Manager
from sansac.watch import PANELS, Watched, name_of, sparkline, table, thinned, watch

ROW: dict[str, Any] = {"step": 10, "updates": 5, "time": 1.0}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 160 steps that has just begun."""
    path = tmp_path / "run"
    path.mkdir()
    write_config(tiny(san=True), path)
    write_record(path, {"status": "running", "step": 0})
    return path


def log(run_dir: Path, *rows: dict[str, Any], resume_step: int | None = 10**9) -> None:
    metrics = JsonLines(run_dir / "metrics.jsonl", resume_step)
    for row in rows:
        metrics.log(ROW | row)
    metrics.close()


def end(run_dir: Path, status: str = "finished", **more: Any) -> None:
    write_record(run_dir, {"status": status, **more})


# -- following the file ----------------------------------------------------------------------------


def test_every_tag_of_a_panel_is_one_that_is_logged() -> None:
    families = {tag.removesuffix("<layer>") for tag in TAGS}
    assert {tag for panel in PANELS for tag in panel.tags} <= families


def test_rows_are_taken_in_as_they_come_and_a_torn_one_when_it_is_whole(run_dir: Path) -> None:
    watched = Watched(run_dir)
    assert (watched.step, watched.fraction, watched.series) == (0, 0.0, {})
    log(run_dir, {"sac/alpha": 0.5})
    path = run_dir / "metrics.jsonl"
    line = json.dumps(ROW | {"step": 40, "sac/alpha": 0.25, "loss/critic": None}).encode() + b"\n"
    for i in (0, 1, len(line) // 2, len(line) - 1):
        with open(path, "ab") as file:
            file.write(line[:i])
        watched.look()
        assert watched.series == {"sac/alpha": [(10, 0.5)]}
        os.truncate(path, path.stat().st_size - i)
    with open(path, "ab") as file:
        file.write(line[:9])
    watched.look()
    with open(path, "ab") as file:
        file.write(line[9:] + b"not a row\n" + line.replace(b"40", b"80"))
    watched.look()
    assert watched.series == {"sac/alpha": [(10, 0.5), (40, 0.25), (80, 0.25)]}
    assert (watched.step, watched.fraction) == (80, 0.5)


def test_a_resume_that_cuts_the_file_begins_anew(run_dir: Path) -> None:
    log(run_dir, {"step": 20, "sac/alpha": 1.0}, {"step": 60, "sac/alpha": 2.0})
    watched = Watched(run_dir)
    write_config(tiny(san=True, total_steps=320), run_dir)
    log(run_dir, {"step": 50, "sac/alpha": 9.0}, {"step": 60, "sac/alpha": 8.0}, resume_step=20)
    watched.look()
    assert watched.series["sac/alpha"] == [(20, 1.0), (50, 9.0), (60, 8.0)]
    assert watched.config.total_steps == 320 and len(watched.recent) == 3


def test_the_eta_is_that_of_the_recent_pace(run_dir: Path) -> None:
    """A fast warm-up is forgotten: 40 rows, of which the last 30 take 2 s for 2 steps."""
    rows = [{"step": 3 * k, "time": 0.01 * k} for k in range(1, 11)]
    rows += [{"step": 30 + 2 * k, "time": 0.1 + 2 * k} for k in range(1, 31)]
    log(run_dir, *rows)
    watched = Watched(run_dir)
    assert watched.step == 90 and watched.eta() == pytest.approx(70)
    assert "ETA 0:01:10" in watched.standing()
    end(run_dir)
    watched.look()
    assert watched.eta() is None


def test_a_run_that_says_nothing_may_be_dead(run_dir: Path) -> None:
    log(run_dir, {})
    watched = Watched(run_dir)
    assert "nothing new" not in watched.standing()
    os.utime(run_dir / "metrics.jsonl", (0, time.time() - 3600))
    watched.look()
    assert "nothing new for 1:00:0" in watched.standing()
    end(run_dir, "interrupted")
    watched.look()
    assert "nothing new" not in watched.standing()


def test_what_is_no_run_is_refused(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        Watched(run_dir)
    with pytest.raises(ConfigError, match="is not a directory"):
        Watched(tmp_path / "absent")


# -- what is shown ---------------------------------------------------------------------------------


def test_a_sparkline_is_as_high_as_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, -2.0, 5.0], 20, "_#") == "#_#"
    assert sparkline([3.0, 3.0], 20) == "▁▁" and sparkline([], 20) == ""
    assert sparkline([0, 0, 7, 7], 2) == "▁█"


def test_thinned_values_are_means_of_all_of_them() -> None:
    assert thinned([1.0, 2.0], 5) == [1.0, 2.0]
    assert thinned(range(10), 5) == [0.5, 2.5, 4.5, 6.5, 8.5]
    for count in (7, 100, 101):
        means = thinned(range(count), 7)
        assert len(means) == 7 and means == sorted(means)


def test_the_table_shows_every_panel(run_dir: Path) -> None:
    values = {
        "train/episode_return": -1234.5, "eval/return_mean": -7.25, "loss/critic": 0.5,
        "loss/actor": 1.5, "sac/alpha": 0.125, "spiking/firing_rate/0": 0.25,
        "spiking/firing_rate/1": 0.75, "perf/steps_per_second": 512.5, "gpu/power_watts": 71.5,
        "gpu/energy_joules": 99.5, "perf/memory_mb": 1.0,
    }  # fmt: skip
    log(run_dir, values, {"step": 40, **values})
    console = Console(file=io.StringIO(), width=100)
    console.print(table(Watched(run_dir), 100))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "run: Pendulum-v1, spiking actor" in text and "step 40 of 160 (25.0%)" in text
    for tag, value in values.items():
        if tag != "perf/memory_mb":
            assert re.search(rf"{name_of(tag)} +{value:,.5g} +▁▁", text), tag
    assert "memory" not in text
    assert max(map(len, text.splitlines())) <= 100


# -- until it ends ---------------------------------------------------------------------------------


def test_a_run_that_has_ended_is_shown_once(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log(run_dir, {"step": 160, "eval/return_mean": -5.0})
    end(run_dir, final=FINAL)
    watch(run_dir)
    title, line = capsys.readouterr().out.splitlines()
    assert title == "run: Pendulum-v1, spiking actor"
    assert line.startswith("finished, step 160 of 160 (100.0%)")
    assert "final return -5.0 ± 1.5" in line


def test_lines_come_with_evaluations_and_now_and_then(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    steps: list[Callable[[], None]] = [
        lambda: log(run_dir, {"step": 20}),
        lambda: log(run_dir, {"step": 40, "eval/return_mean": -9.0}),
        *[lambda: None] * 9,
        lambda: end(run_dir, "failed"),
    ]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        steps.pop(0)()

    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    watch(run_dir)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(" of ")[0] for line in lines] == [
        "running, step 0", "running, step 40", "failed, step 40"
    ]  # fmt: skip
    assert not steps and "-9" in lines[1]


def test_a_training_run_is_followed_to_its_end(tmp_path: Path) -> None:
    """In another process, as it is used; what it reads it leaves as it is."""
    config = tiny(tmp_path, name="run")
    run_dir = tmp_path / "Pendulum-v1" / "run"
    run_dir.mkdir(parents=True)
    write_config(config, run_dir)
    write_record(run_dir, {"status": "running"})
    watcher = start("runner.py", "watch", str(run_dir))
    manager = Manager(config)
    manager.run_dir = run_dir
    result = manager.train()
    out, err = watcher.communicate(timeout=120)
    assert (watcher.returncode, err) == (0, "")
    assert f"final return {result['return_mean']:.1f}" in out.splitlines()[-1]
    assert "step 160 of 160" in out.splitlines()[-1]


def test_an_interrupt_ends_with_130_and_a_closed_pipe_quietly(run_dir: Path) -> None:
    log(run_dir, {})
    process = start("-c", INTERRUPTIBLE, "watch", str(run_dir), new_group=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("run: ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")
    end(run_dir)
    command = f"'{sys.executable}' runner.py watch '{run_dir}' | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_watching_loads_nothing_heavy(run_dir: Path) -> None:
    end(run_dir)
    code = f"""
import sys, runner
runner.main(["watch", {str(run_dir)!r}])
print([name for name in ("torch", "gymnasium", "matplotlib", "wandb") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "is not a directory"),
        (["RUN", "--serve", "high"], "expected a port, 1 to 65535"),
        (["RUN", "--serve", "70000"], "expected a port, 1 to 65535"),
        (["RUN", "--serve", "1", "2"], "expected a port, 1 to 65535"),
    ],
)
def test_what_cannot_be_watched_ends_with_code_2(
    words: list[str], message: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        runner.main(["watch", *(word.replace("RUN", str(run_dir)) for word in words)])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_a_terminal_gets_a_live_table(run_dir: Path) -> None:
    from test_progress import at_a_terminal

    log(run_dir, {"step": 160, "train/episode_return": -12.5})
    end(run_dir, final=FINAL)
    program = (
        f"import sys; sys.stdout = sys.stderr; import runner; runner.main(['watch', '{run_dir}'])"
    )
    code, out, shown = at_a_terminal(program)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert (code, out) == (0, "")
    assert re.search(r"training episode return +-12.5 +▁", plain) and "━" in plain
    assert "final return -5.0" in plain
