"""Runs sent to wandb afterwards: read back by wandb's own reader, or kept by a fake server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import KEY, ROOT, Call, FakeWandb, tiny, wandb_records, wandb_rows

from sansac.checkpoint import write_config, write_record
from sansac.config import Config
from sansac.logger import Logger, RemoteId

pytestmark = pytest.mark.usefixtures("no_account")

COMMAND = ("sync",)  # that `call` runs
Rows = list[dict[str, Any]]


@pytest.fixture
def offline(no_account: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def rows_to(last: int, first: int = 100) -> Rows:
    """Two rows a hundred steps: an episode, and what is logged after it."""
    steps = range(first, last + 1, 100)
    pairs = [({"train/episode_return": -s / 4}, {"sac/alpha": 1 / s}) for s in steps]
    counters = [{"step": s, "updates": s // 2, "time": s / 8} for s in steps]
    return [c | tags for c, pair in zip(counters, pairs, strict=True) for tags in pair]


def a_run(path: Path, rows: Rows, status: str = "finished", **changes: Any) -> Path:
    """A run directory, its metrics as they stand on disk."""
    path.mkdir(parents=True, exist_ok=True)
    write_config(tiny(**changes), path)
    whole = {"returns": [1.0], "step": 160, "seed": 0, "episodes": 1}
    final = {"final": whole} if status == "finished" else {}
    write_record(path, {"status": status, **final})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def video(run: Path, name: str = "step-160.mp4", content: bytes = b"frames") -> None:
    (run / "videos").mkdir(exist_ok=True)
    (run / "videos" / name).write_bytes(content)


def offline_runs(run: Path) -> list[Path]:
    return sorted(run.glob("wandb/offline-run-*"))


@pytest.mark.usefixtures("offline")
def test_a_run_is_replayed_as_it_would_have_been_recorded(call: Call, tmp_path: Path) -> None:
    """Resumed halfway, killed at the end in the middle of a row."""
    rows = rows_to(300)
    run = a_run(tmp_path / "runs" / "spiking-s3", rows, "running", san=True, seed=3)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 400, "updates": null, "time": 50.0}\n{"step": 400, "upda')
    video(run)
    code, out, err = call(run)
    assert code == 0, err
    assert out.startswith(f"{run}: 7 rows, videos/step-160.mp4 sent to {run / 'wandb'} ")
    records = wandb_records(run)
    assert wandb_rows(records) == [*rows, {"step": 400, "updates": "NaN", "time": 50}]

    live = tmp_path / "live" / "spiking-s3"
    live.mkdir(parents=True)
    with Logger(tiny(san=True, seed=3, wandb="offline"), live) as logger:
        logger.log(step=1, updates=0, time=0.0, values={})
    both = (records, wandb_records(live))
    ours, theirs = ([r["run"] for r in found if r["type"] == "run"] for found in both)
    for name in ("run_group", "tags", "project", "display_name", "job_type"):
        assert ours[0][name] == theirs[0][name], name
    config, other = ours[0]["config"]["update"], theirs[0]["config"]["update"]
    assert config.pop("wandb") == "disabled" and other.pop("wandb") == "offline"
    config.pop("_wandb", None), other.pop("_wandb", None)
    assert config == other and config["seed"] == 3
    kinds = [[r["type"] for r in found] for found in both]
    assert [kind.count("metric") for kind in kinds] == [1, 1]


@pytest.mark.usefixtures("offline")
def test_a_second_sync_sends_what_is_new_and_a_third_nothing(call: Call, tmp_path: Path) -> None:
    """Under one id; the last step may have got more rows meanwhile."""
    rows = rows_to(500)
    run = a_run(tmp_path / "dense-s0", rows[:5], "running")
    assert call(run)[1].startswith(f"{run}: 5 rows sent")
    first = offline_runs(run)
    a_run(run, rows)
    video(run)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "best.pt").write_bytes(b"weights")
    code, out, _ = call(run)
    assert out.startswith(f"{run}: 5 rows, videos/step-160.mp4, checkpoints/best.pt sent")
    (new,) = set(offline_runs(run)) - set(first)
    remote = (run / "wandb" / "run-id").read_text().strip()
    assert all(f"-{remote}" in path.name for path in (*first, new))
    before = sorted(run.rglob("*"))
    for path in first:  # what is left is the second part
        path.rename(tmp_path / path.name)
    records = wandb_records(run)
    assert wandb_rows(records) == rows[5:]
    names = [str(record) for record in records if "artifact" in record["type"]]
    assert any("dense-s0-video" in name for name in names)
    assert any("dense-s0-best" in name for name in names)
    for path in first:
        (tmp_path / path.name).rename(path)
    code, out, _ = call(run)
    assert (code, out) == (0, f"{run}: nothing new\n")
    assert sorted(run.rglob("*")) == before


@pytest.mark.usefixtures("offline")
def test_directories_and_globs_hold_runs(call: Call, tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "runs" / name, []) for name in ("dense-s0", "dense-s1", "spiking-s0")]
    for words in ([tmp_path], [tmp_path / "runs" / "*"], runs):
        code, out, _ = call(*words)
        assert (code, out) == (0, "".join(f"{run}: nothing new\n" for run in runs))
    _, out, _ = call(tmp_path / "runs" / "dense-*")
    assert out.count("nothing new") == 2


# -- a server --------------------------------------------------------------------------------------


def served(fake: FakeWandb) -> list[int]:
    (rows,) = fake.server.values()
    return [row["step"] for row in rows]


def test_a_run_that_was_recorded_online_lacks_nothing_twice(
    call: Call, tmp_path: Path, fake_wandb: FakeWandb
) -> None:
    """It went on offline and ends so; its parts are one run on the server."""
    run = a_run(tmp_path / "dense-s0", rows_to(800))
    config = Config(env="Pendulum-v1", wandb="online")
    (run / "metrics.jsonl").unlink()
    with Logger(config, run) as logger:
        for step in (100, 200, 300):
            logger.log(step=step, updates=0, time=0.0, values={"sac/alpha": 1.0})
    a_run(run, rows_to(800))
    video(run)
    code, out, _ = call(run)
    (name,) = fake_wandb.server
    url = f"https://wandb.example.org/{name}"
    assert (code, out) == (0, f"{run}: 10 rows, videos/step-160.mp4 sent to {url}\n")
    assert served(fake_wandb) == [100, 200, 300, *(s for s in range(400, 801, 100) for _ in "ab")]
    assert [artifact.name for artifact in fake_wandb.artifacts] == [f"{name}-dense-s0-video"]
    assert {options["mode"] for options in fake_wandb.init_calls} == {"online"}
    assert fake_wandb.init_calls[-1]["group"] == "Pendulum-v1/dense"


def test_rows_that_a_resume_runs_again_are_sent_once(
    call: Call, tmp_path: Path, fake_wandb: FakeWandb
) -> None:
    run = a_run(tmp_path / "dense-s0", rows_to(500), "running")
    call(run)
    a_run(run, rows_to(300), "running")  # resumed from its checkpoint
    assert call(run)[1] == f"{run}: nothing new\n"
    a_run(run, rows_to(600))
    assert call(run)[1].startswith(f"{run}: 2 rows sent to")
    assert served(fake_wandb) == [row["step"] for row in rows_to(600)]


def test_what_the_server_lost_is_sent_again(
    call: Call, tmp_path: Path, fake_wandb: FakeWandb
) -> None:
    run = a_run(tmp_path / "dense-s0", rows_to(500), "running")
    call(run)
    fake_wandb.server.clear()
    a_run(run, rows_to(600))
    call(run)
    assert served(fake_wandb) == [row["step"] for row in rows_to(600)]


def test_offline_parts_do_not_count_as_sent_online(
    call: Call, tmp_path: Path, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "dense-s0", rows_to(500))
    monkeypatch.setenv("WANDB_MODE", "offline")
    call(run)
    fake_wandb.server.clear()
    monkeypatch.delenv("WANDB_MODE")
    call(run)
    assert served(fake_wandb) == [row["step"] for row in rows_to(500)]


def test_one_process_at_a_time_sends_a_run(
    call: Call, tmp_path: Path, fake_wandb: FakeWandb
) -> None:
    run = a_run(tmp_path / "dense-s0", rows_to(500))
    with Logger(Config(env="Pendulum-v1", wandb="online"), run, resume_step=500):
        code, out, _ = call(run)
        assert code == 0
        assert out == f"{run}: left alone: another process is sending this run to wandb\n"
    assert call(run)[1].startswith(f"{run}: 10 rows sent")
    remote = RemoteId(run)
    with pytest.raises(RuntimeError, match="another process"):
        RemoteId(run)
    remote.close()
    RemoteId(run).close()


# -- errors ----------------------------------------------------------------------------------------


def test_without_an_account_the_error_says_how(call: Call, tmp_path: Path) -> None:
    run = a_run(tmp_path / "dense-s0", rows_to(100))
    code, out, err = call(run)
    assert (code, out) == (2, "")
    assert err.startswith("error: sync needs a wandb account: `wandb login` stores its key, or set")
    assert not (run / "wandb").exists()


@pytest.mark.parametrize(
    ("words", "mode", "named"),
    [
        (["."], "disabled", "WANDB_MODE is disabled"),
        (["nowhere"], "offline", "nowhere: there is no run directory"),
        ([], "offline", "sync needs run directories"),
    ],
)
def test_what_cannot_be_sent_is_named(
    words: list[str], mode: str, named: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    code, out, err = call(*words)
    assert (code, out) == (2, "") and named in err


@pytest.mark.slow
def test_a_server_that_is_not_reached_is_one_message(tmp_path: Path) -> None:
    run = a_run(tmp_path / "dense-s0", rows_to(100))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code = "import sys, runner, sansac.logger; sansac.logger.INIT_SECONDS = 1.0\n"
    code += f"sys.exit(runner.main(['sync', {str(run)!r}]))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {run}: wandb was not reached (") and "sync again" in line
    assert "Traceback" not in done.stderr
    assert not (run / "wandb" / "sent.json").exists()
