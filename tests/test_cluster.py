"""Sweeps on clusters: Ray's own test cluster, a machine of which dies; Slurm's script, by bash."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    Call,
    comparable,
    differences,
    entries,
    load_state,
    options,
    start,
    wait_for,
)
from hypothesis import given
from hypothesis import strategies as st

from sansac import cluster
from sansac.checkpoint import read_config, read_record
from sansac.manager import Manager
from sansac.sweep import Queue

COMMAND = ("sweep",)  # that `call` runs

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
PATIENCE = 900.0  # seconds, on a machine that is busy with other things
CLUSTER = """
import os, signal, subprocess, sys
from ray.cluster_utils import Cluster

def below(pid):
    table = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True).stdout
    pairs = [line.split() for line in table.splitlines()[1:]]
    return [pid, *(p for child, parent in pairs if parent == pid for p in below(child))]

machine = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=machine)
second = cluster.add_node(**machine)
print(cluster.address, flush=True)
if "machine" in sys.stdin.readline():
    for pid in below(str(second.all_processes["raylet"][0].process.pid)):
        os.kill(int(pid), signal.SIGKILL)
else:
    cluster.remove_node(second, allow_graceful=False)
print("killed", flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


# -- Ray -------------------------------------------------------------------------------------------


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A Ray cluster of two nodes with a core each, on 127.0.0.1; a line on stdin kills one."""
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate("the end\n")


def ask(process: subprocess.Popen[str], line: str = "") -> str:
    assert process.stdin and process.stdout
    if line:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["machine", "Ray"])
def test_a_machine_that_dies_loses_nothing_and_nothing_runs_twice(
    what: str, two_machines: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Where Ray alone dies it may take its run along or leave it: both end once, and whole."""
    out = tmp_path / "sweep"
    address = ask(two_machines)
    assert address.startswith("127.0.0.1:")
    steps = 800
    words = ["--out", str(out), *options(total_steps=steps, eval_every=400), "--ray", address]
    words += ["--actors", "dense", "spiking", "--seeds", "0..1"]
    process = start("runner.py", "sweep", *words)
    runs = out / "runs" / "Pendulum-v1"
    wait_for(lambda: len(list(runs.glob("*/checkpoints/last.pt"))) == 2, process, PATIENCE)
    assert [run["status"] for run in entries(out).values()].count("running") == 2
    assert ask(two_machines, what) == "killed"
    killed_at = {path.parents[1].name: load_state(path.parents[1])["counters"]["step"]
                 for path in runs.glob("*/checkpoints/last.pt")}  # fmt: skip
    assert max(killed_at.values()) < steps
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert "100% of 4 runs, 4 finished" in stderr
    assert re.search(r"spiking +│ 1 +│ +800 │ 100% │ +-\d+\.\d │ +│ finished", stdout)

    begun = {}
    for name, run in entries(out).items():
        log = (out / run["log"]).read_text()
        begun[name] = re.findall(r"^\$ python runner.py train (--\w+)", log, re.MULTILINE)
        assert run["status"] == "finished"
        assert run["attempts"] == len(begun[name])
        assert "is in use" not in log
    again = [name for name, words in begun.items() if words != ["--config"]]
    assert len(again) == 1 and begun[again[0]] == ["--config", "--resume"], begun
    alone = read_config(runs / again[0]).model_copy(update={"runs_dir": tmp_path / "alone"})
    Manager(alone).train()
    left = comparable(tmp_path / "alone" / "Pendulum-v1" / again[0])
    assert differences(comparable(runs / again[0]), left) == []


def test_a_run_is_begun_once_whoever_held_it_lets_go(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that outlived the Ray that started it, say; until then, the wait can be stopped."""
    monkeypatch.setattr(cluster, "WAIT_SECONDS", 0.01)
    out = tmp_path / "sweep"
    assert call("--out", out, *options(), "--seeds", "0", "--slurm")[0] == 0
    (run,) = Queue.load(out / "queue.json").runs
    with ThreadPoolExecutor() as pool, open(out / run.log, "ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        stopped = cluster.Host(out, run)
        code = pool.submit(stopped.train)
        assert wait([code], timeout=0.3).not_done
        stopped.stop(kill=False)
        assert code.result(timeout=PATIENCE) == 143
        code = pool.submit(cluster.Host(out, run).train)
        assert wait([code], timeout=0.3).not_done and not (out / run.directory).exists()
        log.close()
        assert code.result(timeout=PATIENCE) == 0
    assert read_record(out / run.directory)["status"] == "finished"


def listening() -> set[str]:
    """Local addresses that processes of this machine listen on, as the kernel prints them."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {words[1] for words in lines if words[3] == "0A"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_a_ray_of_its_own_listens_on_loopback_and_stops_in_order(tmp_path: Path) -> None:
    out, before = tmp_path / "sweep", listening()
    words = [
        "--out",
        str(out),
        *options(total_steps=1500, eval_every=500),
        "--seeds",
        "0..3",
        "--ray",
    ]
    process = start("runner.py", "sweep", *words)
    runs = out / "runs" / "Pendulum-v1"
    wait_for(lambda: any(runs.glob("*/checkpoints/last.pt")), process, PATIENCE)
    opened = {address.partition(":")[0] for address in listening() - before}
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "0" * 24 + "01000000"}
    assert opened and opened <= loopback
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, stderr
    found = {name: run["status"] for name, run in entries(out).items()}
    begun = {path.stem for path in out.glob("logs/*.log")}  # a directory comes a little later
    assert begun < set(found)  # more runs than cores
    assert {name for name, status in found.items() if status == "interrupted"} == begun
    assert {status for name, status in found.items() if name not in begun} == {"queued"}
    saved = [path.parents[1] for path in runs.glob("*/checkpoints/last.pt")]
    assert saved and all(read_record(run)["status"] == "interrupted" for run in saved)


def test_without_ray_the_error_says_what_to_install(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "")
    for words in (["--ray"], ["--ray", "10.0.0.1:6379"]):
        code, out, err = call("--out", tmp_path / "sweep", *options(), "--seeds", "0", *words)
        assert (code, out) == (2, "")
        assert err == "error: --ray needs Ray: `pip install -e .[ray]`\n"
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_is_none_is_named(call: Call, tmp_path: Path) -> None:
    words = ["--out", tmp_path / "sweep", *options(), "--seeds", "0", "--ray"]
    code, _, err = call(*words, "nowhere")
    assert code == 2 and "error: --ray: no cluster was reached at nowhere: " in err
    code, _, err = call(*words, "a:1", "b:2")
    assert code == 2 and "expected one address at most" in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


# -- Slurm -----------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_every_number_once(numbers: set[int]) -> None:
    text = cluster.ranges(sorted(numbers))
    named = [word.partition("-") for word in text.split(",") if word]
    spans = [(int(first), int(last or first)) for first, _, last in named]
    assert [n for first, last in spans for n in range(first, last + 1)] == sorted(numbers)
    assert all(a[1] + 1 < b[0] for a, b in pairwise(spans))


def submit(script: str, number: int, **where: Any) -> subprocess.Popen[str]:
    """A task of an array job: Slurm runs a copy of the script."""
    copy = Path(where["cwd"]) / "slurm_script"
    copy.write_text(script)
    assert os.access(copy, os.R_OK) and script.startswith("#!/bin/bash\n")
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(["bash", str(copy)], env=environment, text=True, **pipes, **where)


@pytest.mark.slow
def test_an_array_job_runs_what_is_left_and_goes_on_after_a_time_limit(
    call: Call, tmp_path: Path
) -> None:
    out = tmp_path / "my sweep"
    words = ["--out", out, *options(total_steps=240), "--actors", "dense", "spiking"]
    code, script, err = call(*words, "--seeds", "0", "--slurm", "--workers", "2")
    assert code == 0 and err == "0% of 2 runs, 0 finished, 2 queued\n"
    directives = re.findall(r"^#SBATCH --(.*)$", script, re.MULTILINE)
    assert directives == [
        "job-name=sansac-my-sweep",
        "array=0-1%2",
        "cpus-per-task=1",
        f"output='{out}/logs/slurm-%A_%a.log'",
        "requeue",
        "signal=B:TERM@120",
    ]
    dense = submit(script, 0, cwd=tmp_path)
    stdout, stderr = dense.communicate(timeout=PATIENCE)
    assert (dense.returncode, stderr) == (0, "")
    assert stdout == f"dense-s0: {out}/logs/dense-s0.log tells how it goes\n"

    last = out / "runs" / "Pendulum-v1" / "spiking-s0" / "checkpoints" / "last.pt"
    spiking = submit(script, 1, cwd=tmp_path)
    wait_for(last.exists, spiking, PATIENCE)
    spiking.send_signal(signal.SIGTERM)  # reaches the run itself: it takes the script's place
    assert spiking.wait(timeout=PATIENCE) == 143
    assert load_state(last.parents[1])["counters"]["step"] < 240

    code, script, err = call("--out", out, "--slurm")  # from where it stands
    assert re.search(r"^#SBATCH --array=1$", script, re.MULTILINE)
    assert ", 1 finished, 1 interrupted" in err
    assert submit(script, 1, cwd=tmp_path).wait(timeout=PATIENCE) == 0
    log = (out / "logs" / "spiking-s0.log").read_text()
    assert re.findall(r"^\$ python runner.py train (--\w+)", log, re.M) == ["--config", "--resume"]

    code, script, err = call("--out", out, "--slurm")
    assert (code, script) == (0, "")
    assert err == "100% of 2 runs, 2 finished: nothing is left to run\n"
    logs = {path: path.read_bytes() for path in out.glob("logs/*")}
    assert call("--out", out)[0] == 0
    assert {path: path.read_bytes() for path in out.glob("logs/*")} == logs
    for name, run in entries(out).items():
        final = read_record(out / run["directory"])["final"]["return_mean"]
        assert (run["status"], run["final_return"]) == ("finished", final), name


def test_a_task_leaves_a_run_to_who_holds_it(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    assert call("--out", out, *options(), "--seeds", "0..1", "--slurm")[0] == 0
    with open(out / "logs" / "dense-s0.log", "w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        code, _, err = call("--out", out, "--task", "0")
        assert (code, err) == (2, "error: --task: dense-s0 is run by another process\n")
        _, script, _ = call("--out", out, "--slurm")
        assert re.search(r"^#SBATCH --array=1$", script, re.MULTILINE)
    assert not (out / "runs" / "Pendulum-v1").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--task", "2"], "2 is none of the 2 runs"),
        (["--task", "-1"], "-1 is none of the 2 runs"),
        (["--task", "0", "--seeds", "7"], "--task takes --out and nothing else"),
        (["--task", "0", "--retry"], "--task takes --out and nothing else"),
        (["--task", "0", "--slurm"], "exclude each other"),
        (["--ray", "--slurm"], "exclude each other"),
    ],
)
def test_what_a_task_cannot_be_is_named(
    words: list[str], named: str, call: Call, tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    assert call("--out", out, *options(), "--seeds", "0..1", "--slurm")[0] == 0
    before = (out / "queue.json").read_bytes()
    code, stdout, err = call("--out", out, *words)
    assert (code, stdout) == (2, "") and named in err
    assert (out / "queue.json").read_bytes() == before


def test_a_script_that_is_refused_leaves_nothing(call: Call, tmp_path: Path) -> None:
    code, script, err = call("--out", tmp_path / "sweep", *options(), "--slurm")
    assert (code, script) == (2, "") and "nothing to sweep over" in err
    assert list(tmp_path.iterdir()) == []
