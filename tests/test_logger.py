"""The logger: what is written can be read back, and no service can hurt a run."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pynvml
import pytest
import torch
from conftest import KEY, FakeWandb, wandb_records, wandb_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from sansac import logger as module
from sansac.config import Config
from sansac.logger import (
    TAGS,
    Background,
    GpuMonitor,
    JsonLines,
    Logger,
    cut_metrics,
    read_metrics,
    wandb_mode,
)

ROOT = Path(__file__).parent.parent
CANARY = "canary-5f1d9a"

pytestmark = pytest.mark.usefixtures("no_account")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "spiking-s0"
    path.mkdir(parents=True)
    return path


def quiet(**fields: Any) -> Config:
    return Config(**{"env": "Pendulum-v1", "wandb": "disabled", **fields})


def write(log: Logger, step: int, **values: Any) -> None:
    tags = {name.replace("__", "/"): value for name, value in values.items()}
    log.log(step=step, updates=step // 2, time=step / 100, values=tags or {"sac/alpha": 0.5})


def script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: wandb reads its environment once a process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", text],
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


# -- the catalogue ---------------------------------------------------------------------------------


def test_the_documented_metrics_are_the_catalogue() -> None:
    table = re.findall(
        r"^\| `([^`]+/[^`]+)` \| (.+) \|$", (ROOT / "docs/metrics.md").read_text(), re.M
    )
    assert table == list(TAGS.items())


def test_every_tag_named_in_the_package_is_in_the_catalogue() -> None:
    """Formatted ones, like f"spiking/firing_rate/{i}", count by what they may become; so do
    beginnings, which end with a slash."""
    pattern = re.compile(r'"((?:train|eval|loss|sac|spiking|perf|gpu)/[^"]+)"')
    sources = [path.read_text() for path in (ROOT / "sansac").glob("*.py")]
    named = {tag for source in sources for tag in pattern.findall(source)}
    assert {"loss/critic", "spiking/firing_rate/{i}"} <= named
    for tag in named:
        shape = ".+".join(re.escape(part) for part in re.split(r"{.*?}", tag))
        end = ".+" if tag.endswith("/") else ""
        assert any(re.fullmatch(shape + end, known) for known in TAGS), tag


@pytest.mark.parametrize(
    "tag",
    ["loss/critics", "alpha", "spiking/firing_rate/", "spiking/firing_rate/<layer>", "", "step"],
)
def test_an_unknown_tag_is_an_error(tag: str, run_dir: Path) -> None:
    with Logger(quiet(), run_dir) as log, pytest.raises(ValueError, match="unknown tag"):
        log.log(step=0, updates=0, time=0.0, values={tag: 1.0})
    assert (run_dir / "metrics.jsonl").read_bytes() == b""


# -- metrics.jsonl ---------------------------------------------------------------------------------


def test_rows_hold_counters_and_plain_numbers(run_dir: Path) -> None:
    third = torch.tensor(1 / 3)
    with Logger(quiet(), run_dir) as log:
        log.log(
            step=np.int64(500),  # type: ignore[arg-type]
            updates=250,
            time=12.5,
            values={
                "loss/critic": third,
                "sac/alpha": np.float32(0.1),
                "train/episodes": 3,
                "spiking/firing_rate/0": torch.tensor(0.25, dtype=torch.bfloat16),
            },
        )
        text = (run_dir / "metrics.jsonl").read_text()  # flushed at once
    assert text.endswith("}\n") and text.count("\n") == 1
    assert json.loads(text) == {
        "step": 500,
        "updates": 250,
        "time": 12.5,
        "loss/critic": third.item(),
        "sac/alpha": float(np.float32(0.1)),
        "train/episodes": 3.0,
        "spiking/firing_rate/0": 0.25,
    }


def test_what_is_not_finite_is_null_in_the_file_and_nan_when_read(run_dir: Path) -> None:
    with Logger(quiet(), run_dir) as log:
        write(log, 1, loss__critic=math.nan, loss__actor=math.inf, sac__alpha=0.5)
    line = (run_dir / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(line, parse_constant=refuse)["loss/actor"] is None
    (row,) = read_metrics(run_dir / "metrics.jsonl")
    assert math.isnan(row["loss/critic"]) and math.isnan(row["loss/actor"])
    assert row["sac/alpha"] == 0.5


def test_every_finished_episode_is_a_row(run_dir: Path) -> None:
    """Case 3: several episodes that end at the same step all stay."""
    with Logger(quiet(), run_dir) as log:
        for episode in range(3):
            write(log, 800, train__episode_return=-100.0 - episode, train__episode_length=200)
    returns = [row["train/episode_return"] for row in read_metrics(run_dir / "metrics.jsonl")]
    assert returns == [-100.0, -101.0, -102.0]


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.lists(
    st.tuples(st.integers(0, 9), st.dictionaries(st.sampled_from(sorted(TAGS)[:9]), NUMBERS)),
    max_size=6,
)


@settings(max_examples=60)
@given(rows=ROWS, torn=st.integers(0, 10_000), step=st.integers(-1, 10))
def test_a_file_torn_anywhere_is_read_and_cut(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, dict[str, float]]],
    torn: int,
    step: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "torn.jsonl"
    path.unlink(missing_ok=True)
    written = [
        {"step": s, "updates": 0, "time": 0.0, **values} for s, values in sorted(rows, key=str)
    ]
    whole = JsonLines(path)
    for row in written:
        whole.log(row)
    whole.close()
    content = path.read_bytes()[:torn]
    path.write_bytes(content)

    intact = read_metrics(path)
    assert intact == written[: len(intact)]
    # Nothing is lost but the torn line; one that lacks only its newline is whole.
    assert len(intact) in (content.count(b"\n"), content.count(b"\n") + 1)

    resumed = JsonLines(path, resume_step=step)
    resumed.log({"step": 11, "updates": 1, "time": 1.0})
    resumed.close()
    kept = [row for row in intact if row["step"] <= step]
    assert read_metrics(path) == [*kept, {"step": 11, "updates": 1, "time": 1.0}]
    assert not path.with_name("torn.jsonl.tmp").exists()


@settings(max_examples=60)
@given(st.binary(max_size=80) | st.from_regex(rb'\A\{"step": ?[-\d.e]+(, "a": .{0,9})?\}\n\Z'))
def test_reading_foreign_bytes_gives_rows_or_an_error_that_names_the_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "foreign.jsonl"
    path.write_bytes(content)
    try:
        rows = read_metrics(path)
    except ValueError as error:
        assert re.search(r"foreign.jsonl, line \d+: not a row", str(error))
    else:
        assert all(isinstance(value, (int, float)) for row in rows for value in row.values())
    cut_metrics(path, 5)
    assert all(row["step"] <= 5 for row in read_metrics(path))


def test_a_damaged_line_is_named_and_a_resume_leaves_it_out(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    with Logger(quiet(), run_dir) as log:
        for step in range(3):
            write(log, step)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0\0\0\n" + lines[2])
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        read_metrics(path)
    Logger(quiet(), run_dir, resume_step=2).close()
    assert [row["step"] for row in read_metrics(path)] == [0, 2]


def test_a_fresh_start_drops_the_rows_of_an_earlier_attempt(run_dir: Path) -> None:
    with Logger(quiet(), run_dir) as log:
        write(log, 0)
    with Logger(quiet(), run_dir) as log:
        write(log, 7)
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == [7]


def test_a_kill_while_cutting_leaves_the_old_file(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_dir / "metrics.jsonl"
    with Logger(quiet(), run_dir) as log:
        for step in range(9):
            write(log, step)
    before = path.read_bytes()

    def killed(*paths: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        Logger(quiet(), run_dir, resume_step=4)
    assert path.read_bytes() == before


def test_a_full_disk_costs_rows_and_one_warning_but_no_torn_line(run_dir: Path) -> None:
    """The file system refuses to grow the file within a row, and later takes it again."""
    done = script(f"""
import resource
from pathlib import Path
from sansac.config import Config
from sansac.logger import Logger, read_metrics
path = Path({str(run_dir / "metrics.jsonl")!r})
with Logger(Config(wandb="disabled"), path.parent) as log:
    def row(step):
        log.log(step=step, updates=0, time=0.0, values={{"sac/alpha": 0.5}})
    row(0)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))
    row(1); row(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    row(3)
print([row["step"] for row in read_metrics(path)])
""")
    assert done.stdout == "[0, 3]\n", done.stderr
    assert done.stderr.count("metrics row of step 1 not written") == 1
    assert len(done.stderr.splitlines()) == 1


def test_a_row_costs_less_than_20_microseconds(run_dir: Path) -> None:
    values = {"train/episode_return": -103.5, "train/episode_length": 1600.0}
    best = math.inf
    with Logger(quiet(), run_dir) as log:
        for _ in range(30):
            began = time.perf_counter()
            for step in range(100):
                log.log(step=step, updates=step, time=1.0, values=values)
            best = min(best, (time.perf_counter() - began) / 100)
    assert best < 20e-6


def test_logging_after_the_end_is_an_error(run_dir: Path) -> None:
    log = Logger(quiet(), run_dir)
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        write(log, 0)


# -- services, whatever they are -------------------------------------------------------------------


class FakeSink:
    """Records what it is given; `fail` names the method that raises or hangs."""

    def __init__(self, fail: str = "", how: Any = None) -> None:
        self.rows: list[Any] = []
        self._fail, self._how = fail, how
        self._may("make")

    def _may(self, method: str) -> None:
        if method == self._fail:
            self._how()

    def log(self, row: Any) -> None:
        self._may("log")
        self.rows.append(row)

    def artifact(self, path: Path, name: str, kind: str) -> None:
        self._may("artifact")

    def close(self) -> None:
        self._may("close")


def failure() -> None:
    raise RuntimeError("the service\nis unwell")


@pytest.mark.parametrize("how", [failure, lambda: sys.exit(3)], ids=["raises", "exits"])
@pytest.mark.parametrize("method", ["make", "log", "artifact", "close"])
def test_a_failing_service_is_reported_once_and_dropped(
    method: str, how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    released: list[bool] = []
    service = Background("it", lambda: FakeSink(method, how), release=released.append)
    service.wait_started(5.0)
    for step in range(5):
        service.log({"step": step})
        service.artifact(Path("x"), "x", "agent")
    service.close(5.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "\n" not in record.getMessage()
    assert record.getMessage().startswith("it is dropped, training goes on: ")
    assert service.failed and released == [False]


@pytest.mark.parametrize("method", ["make", "log", "artifact", "close"])
def test_a_hanging_service_delays_nothing_but_the_end_and_that_only_so_long(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = threading.Event()

    def release(is_stuck: bool) -> None:
        stuck.set()

    service = Background("it", lambda: FakeSink(method, stuck.wait), release=release, capacity=50)
    began = time.perf_counter()
    service.wait_started(0.05)
    for step in range(5):
        service.log({"step": step})
        service.artifact(Path("x"), "x", "agent")
    assert time.perf_counter() - began < 0.5
    service.close(0.1)
    assert time.perf_counter() - began < 1.5
    assert [record.getMessage() for record in caplog.records] == [
        "it is dropped, training goes on: did not end within 0 s"
    ]
    assert not service._thread.is_alive()


def test_a_service_that_lags_far_behind_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    sink = FakeSink("log", gate.wait)
    service = Background("it", lambda: sink, capacity=50)
    for step in range(1000):
        service.log({"step": step})
    assert service.failed and service._jobs.qsize() <= 50
    gate.set()
    service.close(5.0)
    assert [record.getMessage() for record in caplog.records] == [
        "it is dropped, training goes on: it lags 50 rows behind"
    ]


def test_a_healthy_service_gets_every_row_in_order() -> None:
    sink = FakeSink()
    service = Background("it", lambda: sink)
    for step in range(1000):
        service.log({"step": step})
    service.close(10.0)
    assert [row["step"] for row in sink.rows] == list(range(1000))
    assert not service.failed and not service._thread.is_alive()


# -- wandb -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "environment", "files", "mode"),
    [
        ("disabled", {"WANDB_MODE": "online"}, {}, "disabled"),
        ("online", {"WANDB_MODE": "offline"}, {}, "online"),
        ("auto", {}, {}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY}, {}, "online"),
        ("auto", {"WANDB_API_KEY": ""}, {}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, {}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "dryrun"}, {}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, {}, "disabled"),
        ("auto", {"WANDB_MODE": "nonsense"}, {}, "offline"),
        ("auto", {}, {".netrc": f"machine api.wandb.ai login user password {KEY}"}, "online"),
        ("auto", {}, {".netrc": f"machine example.org login user password {KEY}"}, "offline"),
        ("auto", {}, {".netrc": "machine api.wandb.ai login"}, "offline"),
        ("auto", {}, {".netrc": "\udcff\udcfe"}, "offline"),
        (
            "auto",
            {"WANDB_BASE_URL": "https://wandb.example.org"},
            {".netrc": f"machine wandb.example.org login user password {KEY}"},
            "online",
        ),
        ("auto", {}, {".config/wandb/settings": f"[default]\napi_key = {KEY}\n"}, "online"),
        (
            "auto",
            {"WANDB_API_KEY": KEY},
            {".config/wandb/settings": "[default]\nmode = disabled\n"},
            "disabled",
        ),
        ("auto", {}, {".config/wandb/settings": "]broken"}, "offline"),
    ],
)
def test_the_mode_of_wandb_is_chosen_up_front(
    choice: str,
    environment: dict[str, str],
    files: dict[str, str],
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 32: online with a key, offline without."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, text in files.items():
        path = tmp_path / "home" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        path.chmod(0o600)
    assert wandb_mode(choice) == mode


def test_the_module_and_the_choice_of_mode_import_nothing_heavy() -> None:
    done = script("""
import sys
from sansac import logger, progress
logger.wandb_mode("auto")
print([name for name in ("torch", "wandb", "tensorboard", "pynvml", "rich") if name in sys.modules])
""")
    assert done.stdout == "[]\n", done.stderr


def test_wandb_offline_holds_the_run(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Read back by wandb's own reader: rows, group, tags, configuration, axis."""
    config = quiet(wandb="offline", san=True, seed=7, wandb_project="project")
    with Logger(config, run_dir) as log:
        write(log, 0, eval__return_mean=torch.tensor(-1200.5), eval__return_std=math.inf)
        write(log, 500, loss__critic=math.nan)
        log.save_artifact(run_dir / "not-there", "best", "agent")  # online only
    assert capfd.readouterr() == ("", "")
    records = wandb_records(run_dir)
    assert wandb_rows(records) == [
        {
            "step": 0,
            "updates": 0,
            "time": 0,
            "eval/return_mean": -1200.5,
            "eval/return_std": "Infinity",
        },
        {"step": 500, "updates": 250, "time": 5, "loss/critic": "NaN"},
    ]
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert run["run_group"] == "Pendulum-v1/spiking"
    assert run["tags"] == ["Pendulum-v1", "spiking", "sac"]
    assert (run["project"], run["display_name"], run["job_type"]) == (
        "project",
        "spiking-s0",
        "train",
    )
    assert "host" not in run
    assert run["config"]["update"]["seed"] == 7
    assert run["config"]["update"]["learning"] == config.model_dump(mode="json")["learning"]
    (metric,) = [record["metric"] for record in records if record["type"] == "metric"]
    assert (metric["glob_name"], metric["step_metric"]) == ("*", "step")


def test_two_runs_of_one_process_are_two_wandb_runs(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    first = Logger(quiet(wandb="offline"), directories[0])
    with Logger(quiet(wandb="offline", san=True), directories[1]) as second:
        write(first, 1)
        write(second, 2)
    write(first, 3)
    first.close()
    assert [row["step"] for row in wandb_rows(wandb_records(directories[0]))] == [1, 3]
    assert [row["step"] for row in wandb_rows(wandb_records(directories[1]))] == [2]


@pytest.mark.parametrize("server", ["none asked", "refuses", "never answers"])
def test_wandb_without_its_server_records_offline_and_leaks_nothing(
    server: str, run_dir: Path
) -> None:
    """Case 32: logged in, but the server is not reached; no secret reaches the run directory."""
    done = script(
        f"""
import socket, os, time
from pathlib import Path
from sansac import logger
from sansac.config import Config
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
if {server!r} == "refuses":
    listener.close()
if {server!r} == "none asked":
    os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{{port}}"
logger.INIT_SECONDS = 0.5
began = time.monotonic()
with logger.Logger(Config(env="Pendulum-v1"), Path({str(run_dir)!r})) as log:
    for step in range(3):
        log.log(step=step, updates=0, time=0.0, values={{"sac/alpha": 0.5}})
assert time.monotonic() - began < 20
print("done")
""",
        WANDB_API_KEY=KEY,
        SOME_TOKEN=CANARY,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr.count("its server was not reached") == (server != "none asked")
    assert "Traceback" not in done.stderr
    assert [row["step"] for row in wandb_rows(wandb_records(run_dir))] == [0, 1, 2]
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) >= 4
    for path in files:
        content = path.read_bytes()
        assert KEY.encode() not in content and CANARY.encode() not in content, path


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_training_outlives_wandbs_service(signal: str, run_dir: Path) -> None:
    """Case 32: killed or hanging in mid-run, it delays neither rows nor the end nor the exit."""
    done = script(f"""
import json, os, signal, time
from pathlib import Path
from sansac import logger
from sansac.config import Config
from wandb.sdk import wandb_setup
directory = Path({str(run_dir)!r})
config = Config(env="Pendulum-v1", wandb="offline")
log = logger.Logger(config, directory)
def row(step):
    began = time.perf_counter()
    log.log(step=step, updates=0, time=0.0, values={{"sac/alpha": 0.5}})
    return time.perf_counter() - began
row(0)
time.sleep(0.2)
service = wandb_setup.singleton()._connection._proc._process
assert Path(f"/proc/{{service.pid}}/stat").read_text().split()[3] == str(os.getpid())
os.kill(service.pid, signal.{signal})
time.sleep(0.2)
slowest = max(row(step) for step in range(1, 5000))
began = time.perf_counter()
log.close(1.0)
closing = time.perf_counter() - began
with logger.Logger(config, directory, resume_step=4998) as log:  # with a service of its own
    row(4999)
print(json.dumps([slowest, closing, service.poll(), time.time()]))
""")
    ended = time.time()
    assert done.returncode == 0, done.stderr
    slowest, closing, exit_code, before_exit = json.loads(done.stdout)
    assert slowest < 0.5
    assert closing < 5.0
    assert exit_code == -9
    assert ended - before_exit < 5.0
    warnings = [line for line in done.stderr.splitlines() if "wandb is dropped" in line]
    assert len(warnings) == 1 and "Traceback" not in done.stderr, done.stderr
    assert len(read_metrics(run_dir / "metrics.jsonl")) == 5000


def test_a_machine_without_wandb_trains(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 32: not installed, or broken at import."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with Logger(quiet(wandb="offline"), run_dir) as log:
        write(log, 1)
    assert len(read_metrics(run_dir / "metrics.jsonl")) == 1
    (record,) = caplog.records
    assert "wandb is dropped" in record.getMessage()


def test_the_axis_of_an_online_run_only_grows_through_a_resume(
    run_dir: Path, fake_wandb: FakeWandb
) -> None:
    with Logger(quiet(wandb="auto"), run_dir) as log:
        for step in (500, 1000, 1500):
            write(log, step)
    # Killed at 1,500 and resumed from a checkpoint at 1,000.
    with Logger(quiet(wandb="auto"), run_dir, resume_step=1000) as log:
        for step in (1500, 2000):
            write(log, step)
    assert [options["mode"] for options in fake_wandb.init_calls] == ["online", "online"]
    (rows,) = fake_wandb.server.values()
    assert [row["step"] for row in rows] == [500, 1000, 1500, 2000]
    steps = [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]
    assert steps == [500, 1000, 1500, 2000]


def test_a_damaged_run_id_gives_a_new_run(run_dir: Path, fake_wandb: FakeWandb) -> None:
    (run_dir / "wandb").mkdir()
    (run_dir / "wandb" / "run-id").write_text("../../else")
    Logger(quiet(wandb="online"), run_dir).close()
    (name,) = fake_wandb.server
    assert re.fullmatch("[0-9a-f]{12}", name)


def test_best_agent_and_video_are_uploaded_when_online(
    run_dir: Path, fake_wandb: FakeWandb
) -> None:
    (run_dir / "video.mp4").touch()
    with Logger(quiet(wandb="online"), run_dir) as log:
        log.save_artifact(run_dir / "video.mp4", "a video", "video")
        log.save_artifact(run_dir, "best", "agent")
    video, agent = fake_wandb.artifacts
    (name,) = fake_wandb.server
    assert (video.name, video.type) == (f"{name}-a-video", "video")
    assert video.files == [str(run_dir / "video.mp4")]
    assert (agent.name, agent.files) == (f"{name}-best", [str(run_dir)])


def test_online_without_a_key_asks_nobody(
    run_dir: Path,
    fake_wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Case 32: wandb would prompt at a terminal."""
    monkeypatch.delenv("WANDB_API_KEY")
    Logger(quiet(wandb="online"), run_dir).close()
    assert [options["mode"] for options in fake_wandb.init_calls] == ["offline"]
    assert "no API key" in caplog.text


@pytest.mark.parametrize(("hurried", "modes"), [(False, ["online", "offline"]), (True, ["online"])])
def test_a_server_that_is_not_reached_is_made_up_for_unless_the_run_is_to_end(
    hurried: bool, modes: list[str], run_dir: Path, fake_wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked = []

    def init(mode: str, **options: Any) -> Any:
        asked.append(mode)
        if mode == "online":
            raise RuntimeError("no server")
        return fake(mode=mode, **options)

    fake = fake_wandb.init
    monkeypatch.setattr(fake_wandb, "init", init)
    Logger(quiet(wandb="online"), run_dir, hurried=lambda: hurried).close()
    assert asked == modes


def test_what_is_off_leaves_no_trace(run_dir: Path) -> None:
    before = set(threading.enumerate())
    with Logger(quiet(), run_dir) as log:
        write(log, 1)
        assert set(threading.enumerate()) == before
        assert log.gpu_metrics() == {}
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]


# -- TensorBoard -----------------------------------------------------------------------------------


def events(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    reader = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def test_tensorboard_reads_the_events_back_and_a_resume_replaces_steps(run_dir: Path) -> None:
    with Logger(quiet(tensorboard=True), run_dir) as log:
        for step in (500, 1000, 1500):
            write(log, step, loss__critic=torch.tensor(step / 1024), eval__return_mean=-step)
    with Logger(quiet(tensorboard=True), run_dir, resume_step=1000) as log:
        write(log, 1500, loss__critic=2.0)
    assert events(run_dir) == {
        "loss/critic": [(500, 500 / 1024), (1000, 1000 / 1024), (1500, 2.0)],
        "eval/return_mean": [(500, -500.0), (1000, -1000.0)],
    }


def test_a_tensorboard_directory_that_cannot_be_made_costs_one_warning(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / "tensorboard").write_text("a file is in the way")
    with Logger(quiet(tensorboard=True), run_dir) as log:
        for step in range(3):
            write(log, step)
    assert len(read_metrics(run_dir / "metrics.jsonl")) == 3
    (record,) = caplog.records
    assert "TensorBoard is dropped" in record.getMessage()


# -- GPU -------------------------------------------------------------------------------------------


class FakeNvml:
    """The functions of pynvml that are called, for one GPU; `errors` maps a function to what it
    raises, whenever it is asked."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.uuid = ""
        self.millijoules = 9_000_000
        self.power = 250_000

    def _call(self, name: str, value: Any) -> Any:
        self.calls.append(name)
        if name in self.errors:
            raise self.errors[name]
        return value

    def nvmlInit(self) -> None:
        self._call("init", None)

    def nvmlShutdown(self) -> None:
        self._call("shutdown", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuid = uuid
        return self._call("handle", "gpu")

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:
        return self._call("gpu/utilization", SimpleNamespace(gpu=37))

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> Any:
        return self._call("gpu/memory_mb", SimpleNamespace(used=1_500_000_000))

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        return self._call("gpu/power_watts", self.power)

    def nvmlDeviceGetTemperature(self, gpu: str, sensor: int) -> int:
        return self._call("gpu/temperature_celsius", 61)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        self.millijoules += 2_000
        return self._call("gpu/energy_joules", self.millijoules)


GPU_TAGS = {tag for tag in TAGS if tag.startswith("gpu/")}
NVML_ERRORS = pynvml.NVMLError.__subclasses__()


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


def monitor(nvml: Any, **options: Any) -> GpuMonitor:
    return GpuMonitor(nvml=nvml, uuid="GPU-1", interval=0.001, **options)


def samples(nvml: FakeNvml, monitored: GpuMonitor) -> dict[str, float]:
    """Values of a sample that began after the call; at least one whole sample has, by the third."""
    target = nvml.calls.count("gpu/temperature_celsius") + 3
    end = time.monotonic() + 10.0
    while nvml.calls.count("gpu/temperature_celsius") < target and time.monotonic() < end:
        time.sleep(0.0005)
    return monitored.read()


@pytest.fixture
def monitored(nvml: FakeNvml) -> Iterator[GpuMonitor]:
    sampler = monitor(nvml, energy_joules=100.0)
    yield sampler
    sampler.close()


def test_gpu_values_come_in_their_units(nvml: FakeNvml, monitored: GpuMonitor) -> None:
    values = samples(nvml, monitored)
    monitored.close()
    assert set(values) == GPU_TAGS
    energy = values.pop("gpu/energy_joules")
    asked = nvml.calls.count("gpu/energy_joules") - 1  # the first one is where it starts
    assert 100.0 < energy <= 100.0 + 2.0 * asked  # the counter rises by 2 J each time
    assert values == {
        "gpu/utilization": 37.0,
        "gpu/memory_mb": 1500.0,
        "gpu/power_watts": 250.0,
        "gpu/temperature_celsius": 61.0,
    }
    assert nvml.calls[-1] == "shutdown" and not monitored._thread.is_alive()


def test_power_is_integrated_where_the_gpu_has_no_energy_counter(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds and 1 kW more from one sample to the next: the k-th ends at k^2 - 1 kJ."""
    nvml.errors["gpu/energy_joules"] = pynvml.NVMLError_NotSupported()
    asked = 0

    def power(gpu: str) -> int:
        nonlocal asked
        asked += 1
        return 1_000_000 * asked

    nvml.nvmlDeviceGetPowerUsage = power  # type: ignore[method-assign]
    monkeypatch.setattr(module, "monotonic", lambda: 2.0 * asked)
    sampler = monitor(nvml)
    values = samples(nvml, sampler)
    sampler.close()
    k = values["gpu/power_watts"] / 1000.0
    assert k >= 2 and values["gpu/energy_joules"] == 1000.0 * (k * k - 1)


@pytest.mark.parametrize("where", ["init", "handle"])
def test_every_nvml_error_at_the_start_is_one_quiet_note(
    where: str, nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 33: no driver, no library, no permission, ...: training goes on."""
    assert len(NVML_ERRORS) > 20
    for kind in NVML_ERRORS:
        caplog.clear()
        nvml.errors = {where: kind()}
        sampler = monitor(nvml)
        sampler._thread.join(5.0)
        assert not sampler._thread.is_alive()
        assert sampler.read() == {}
        sampler.close()
        assert len(caplog.records) == 1, kind


@pytest.mark.parametrize("tag", sorted(GPU_TAGS))
def test_every_nvml_error_in_mid_run_leaves_its_value_out(
    tag: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 33: one note, the other values stay, and a value that is back is back."""
    for kind in NVML_ERRORS:
        caplog.clear()
        nvml = FakeNvml()
        sampler = monitor(nvml)
        assert set(samples(nvml, sampler)) == GPU_TAGS
        nvml.errors = {tag: kind()}
        assert set(samples(nvml, sampler)) == GPU_TAGS - {tag}, kind
        nvml.errors = {}
        assert set(samples(nvml, sampler)) == GPU_TAGS
        sampler.close()
        assert len(caplog.records) == 1, kind


def test_a_gpu_that_disappears_gives_no_values(
    nvml: FakeNvml, monitored: GpuMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(samples(nvml, monitored)) == GPU_TAGS
    nvml.errors = dict.fromkeys(GPU_TAGS, pynvml.NVMLError_GpuIsLost())
    assert samples(nvml, monitored) == {}
    assert len(caplog.records) == 1


def test_a_driver_that_hangs_gives_no_stale_values_and_holds_up_no_end(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    sampler = monitor(nvml)
    assert samples(nvml, sampler)
    nvml.nvmlDeviceGetMemoryInfo = lambda gpu: gate.wait()  # type: ignore[method-assign]
    time.sleep(0.05)
    assert sampler.read()
    monkeypatch.setattr(module, "STALE_SECONDS", 0.05)
    assert sampler.read() == {}
    began = time.monotonic()
    sampler.close()
    assert time.monotonic() - began < 3.0
    gate.set()
    sampler._thread.join(5.0)  # what it still has to say belongs to this test


def test_a_library_that_lacks_functions_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Case 33: another package that calls itself pynvml, or an old one."""
    sampler = monitor(ModuleType("pynvml"))
    sampler._thread.join(5.0)
    assert sampler.read() == {} and len(caplog.records) == 1


def test_a_machine_without_the_library_trains(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 33."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(module, "torch_uuid", lambda device: "GPU-1")
    with Logger(quiet(), run_dir, device="cuda") as log:
        write(log, 1)
        time.sleep(0.05)
        assert log.gpu_metrics() == {}
    assert len(caplog.records) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_cuda_device_that_is_absent_costs_a_note(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Logger(quiet(), run_dir, device="cuda") as log:
        assert log.gpu_metrics() == {}
    assert len(caplog.records) == 1


def test_the_gpu_is_found_by_torchs_uuid(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = {0: "aaaa-0", 1: "bbbb-1"}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index])
    )
    for device, uuid in {
        "cuda:0": "GPU-aaaa-0",
        "cuda:1": "GPU-bbbb-1",
        "cuda": "GPU-bbbb-1",
    }.items():
        sampler = GpuMonitor(device, nvml=nvml, interval=0.005)
        samples(nvml, sampler)
        sampler.close()
        assert nvml.uuid == uuid


def test_energy_goes_on_across_a_resume(
    run_dir: Path, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(module, "torch_uuid", lambda device: "GPU-1")

    def run(step: int, resume_step: int | None) -> float:
        with Logger(quiet(), run_dir, device="cuda:0", resume_step=resume_step) as log:
            end = time.monotonic() + 5.0
            while not (values := log.gpu_metrics()) and time.monotonic() < end:
                time.sleep(0.001)
            log.log(step=step, updates=0, time=0.0, values=values)
            write(log, step)
            return values["gpu/energy_joules"]

    first = run(100, None)
    assert first > 0.0
    assert run(200, 100) == pytest.approx(2 * first)  # what was, and as much again
    assert run(200, 100) == pytest.approx(2 * first)  # the row that was cut does not count
