"""Sweeps: what is asked for, what is on disk, real workers that are stopped, killed and fail."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Callable
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
    tiny,
    wait_for,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sansac import sweep, sweep_display
from sansac.checkpoint import locked, read_config
from sansac.config import Config, ConfigError
from sansac.manager import Manager
from sansac.sweep_display import Display, Seen, tail

COMMAND = ("sweep",)  # that `call` runs


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps that are planned and written but start nothing."""
    monkeypatch.setattr(sweep.Workers, "work", lambda self: 0)


def statuses(out: Path) -> list[str]:
    return [run["status"] for run in entries(out).values()]


# -- axes ------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 30)), max_size=6))
def test_ranges_of_seeds_hold_both_ends_and_each_seed_once(ranges: list[tuple[int, int]]) -> None:
    words = [f"{a}..{a + n}" if n else str(a) for a, n in ranges]
    seeds = sweep.parse_seeds(words)
    assert len(seeds) == len(set(seeds))
    assert set(seeds) == {seed for a, n in ranges for seed in range(a, a + n + 1)}
    assert sweep.parse_seeds(map(str, seeds)) == seeds


@given(st.text(alphabet="0123456789.-, x²", max_size=6))
def test_seeds_are_ranges_or_refused(word: str) -> None:
    if re.fullmatch(r"\d+|\d+\.\.\d+", word, re.ASCII):
        return
    with pytest.raises(ConfigError, match="--seeds"):
        sweep.parse_seeds([word])


@given(
    st.lists(
        st.none() | st.booleans() | st.integers() | st.lists(st.integers(), max_size=3),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=50)
def test_values_of_an_axis_are_yaml(values: list[Any]) -> None:
    word = "actor.layer-norm=" + ",".join(json.dumps(value) for value in values)
    (axis,) = sweep.parse_grid([word]).items()
    assert axis[0] == "actor.layer_norm"
    assert [json.dumps(v) for v in axis[1]] == list(dict.fromkeys(json.dumps(v) for v in values))


WRONG = {
    "an empty range": (["--seeds", "5..3"], "the range 5..3 is empty"),
    "endless seeds": (["--seeds", "0..99999999999"], "more than 10,000 seeds"),
    "no seeds": (["--seeds", "few"], "found 'few'"),
    "an actor that is none": (["--actors", "sparse"], "--actors"),
    "no value": (["--grid", "spiking.tau"], "expected KEY=VALUE"),
    "an empty axis": (["--grid", "spiking.tau="], "spiking.tau has no values"),
    "no YAML": (["--grid", "spiking.tau=[2"], "not valid YAML"),
    "an unknown axis": (["--grid", "spiking.time-step=2"], "did you mean `spiking.time_steps`"),
    "an axis twice": (["--grid", "seed=1", "--grid", "seed=2"], "seed is given twice"),
    "seeds twice": (["--seeds", "1", "--grid", "seed=2"], "the axis of --seeds"),
    "actors twice": (["--actors", "dense", "--grid", "san=true"], "the axis of --actors"),
    "a product too large": (
        ["--seeds", "0..999", "--grid", "spiking.time-steps=1,2,3", "total_steps=1,2,3,4,5"],
        "15,000 runs",
    ),
    "a value out of range": (
        ["--seeds", "0", "1", "--grid", "spiking.time-steps=2,99"],
        "found 99",
    ),
    "two wrong values": (["--grid", "learning.gamma=0.9,5,6"], "learning.gamma=6: learning.gamma"),
    "a contradiction": (["--grid", "learning.batch-size=16,99"], "learning.learning_starts (40)"),
    "no such preset": (["--grid", "config=none.yaml"], "none.yaml"),
    "a preset that is a number": (["--grid", "config=3"], "config takes files"),
    "a wrong preset": (["--grid", "config=typo.yaml"], "did you mean `learning.gamma`"),
    "a name": (["--seeds", "1", "--name", "walker"], "--name: a sweep names its runs"),
    "a directory of runs": (["--seeds", "1", "--runs-dir", "r"], "--runs-dir: a sweep"),
    "no workers": (["--seeds", "1", "--workers", "0"], "--workers must be at least 1"),
    "no axes": ([], "nothing to sweep over"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_named_and_leaves_nothing(
    case: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, named = WRONG[case]
    monkeypatch.chdir(tmp_path)
    Path("typo.yaml").write_text("learning: {gama: 0.9}\n")
    code, out, err = call("--out", "sweep", *options(), *words)
    assert (code, out) == (2, "")
    assert named in " ".join(err.split())
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["typo.yaml"]


def test_all_wrong_values_are_named(call: Call, tmp_path: Path) -> None:
    words = ["--seeds", "0..4", "--grid", "learning.gamma=0.9,5,6"]
    _, _, err = call("--out", tmp_path / "sweep", *words)
    assert "found 5" in err and "found 6" in err and err.count("\n") == 2


def test_a_directory_of_something_else_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    code, _, err = call("--out", tmp_path, "--seeds", "1")
    assert code == 2 and "holds no sweep" in err
    (tmp_path / "queue.json").write_text('{"format_version": 99}')
    code, _, err = call("--out", tmp_path)
    assert code == 2 and "format version 99" in err


# -- the queue -------------------------------------------------------------------------------------


def configs(out: Path) -> dict[str, Config]:
    queue = sweep.Queue.load(out / "queue.json")
    return {run.id: sweep.read_run(out, run) for run in queue.runs}


@pytest.mark.usefixtures("idle")
def test_runs_are_the_product_seed_by_seed(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    axes = ["--actors", "dense", "spiking", "--seeds", "3..4", "--grid"]
    axes += ["learning.tau=0.1,1e-2", "--grid", "actor.hidden=[8],[9,9]"]
    assert call("--out", out, *options(), *axes)[:2][0] == 0
    found = configs(out)
    assert len(found) == 16
    assert list(found)[:2] == ["dense-s3-tau0.1-hidden8", "dense-s3-tau0.1-hidden9x9"]
    assert [config.seed for config in found.values()] == [3] * 8 + [4] * 8
    config = found["spiking-s4-tau1e-2-hidden9x9"]
    expected = tiny(san=True, seed=4, learning={"tau": 0.01}, actor={"hidden": [9, 9]}, threads=1)
    assert config == expected.model_copy(
        update={"name": "spiking-s4-tau1e-2-hidden9x9", "runs_dir": Path("runs"), "threads": 1}
    )


@pytest.mark.usefixtures("idle")
def test_a_dense_actor_is_not_run_again_for_every_spiking_setting(
    call: Call, tmp_path: Path
) -> None:
    axes = ["--actors", "dense", "spiking", "--grid", "spiking.time-steps=1,2,4"]
    call("--out", tmp_path / "sweep", *options(), *axes)
    names = ["dense-s0", *(f"spiking-s0-time_steps{t}" for t in (1, 2, 4))]
    assert sorted(entries(tmp_path / "sweep")) == names


@pytest.mark.usefixtures("idle")
def test_presets_and_environments_are_axes(call: Call, tmp_path: Path) -> None:
    """Options go over a preset that is an axis; each environment brings its own preset."""
    out, presets = tmp_path / "sweep", sweep.RUNNER.parent / "configs"
    axes = [
        "--grid", f"config={presets / 'popsan.yaml'},{presets / 'plain_lif.yaml'}",
        "env=BipedalWalker-v3,Pendulum-v1", "--actor.hidden", "32",
    ]  # fmt: skip
    assert call("--out", out, "--spiking.time-steps", "3", *axes)[0] == 0
    found = configs(out)
    assert len(found) == 4 and all(config.san for config in found.values())
    assert {config.actor.hidden for config in found.values()} == {(32,)}
    popsan = found["spiking-s0-popsan-Pendulum-v1"]
    assert (popsan.spiking.neuron, popsan.spiking.time_steps) == ("cuba", 3)
    for config in found.values():
        assert config.learning == Config.for_env(config.env).learning


@pytest.mark.usefixtures("idle")
def test_an_axis_may_put_a_contradiction_right(call: Call, tmp_path: Path) -> None:
    words = ["--learning.learning-starts", "100", "--grid", "learning.batch-size=16,32"]
    assert call("--out", tmp_path / "sweep", "--env", "Pendulum-v1", *words)[0] == 0


@pytest.mark.usefixtures("idle")
def test_more_values_extend_a_sweep(call: Call, tmp_path: Path) -> None:
    out, base = tmp_path / "sweep", options()
    call("--out", out, *base, "--actors", "dense", "--seeds", "0..1")
    first = entries(out)
    for words in (base, []):  # the same command, and --out alone
        assert call("--out", out, *words)[0] == 0
        assert entries(out) == first
    call("--out", out, *base, "--actors", "dense", "--seeds", "1..2")
    assert list(entries(out)) == ["dense-s0", "dense-s1", "dense-s2"]
    call("--out", out, "--actors", "dense", "spiking")
    assert list(entries(out))[3:] == ["spiking-s0", "spiking-s1", "spiking-s2"]
    call("--out", out, "--grid", "learning.tau=0.005,0.5")  # 0.005 is what there is
    assert len(entries(out)) == 12
    assert list(entries(out).values())[:2] == list(first.values())


@pytest.mark.usefixtures("idle")
def test_a_sweep_killed_while_it_is_written_goes_on(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = tmp_path / "sweep", sweep.write_config

    def killed(config: Config, *where: Any) -> None:
        if config.seed == 2:
            raise KeyboardInterrupt
        write(config, *where)

    monkeypatch.setattr(sweep, "write_config", killed)
    assert call("--out", out, *options(), "--seeds", "0..3")[0] == 130
    monkeypatch.setattr(sweep, "write_config", write)
    assert call("--out", out)[0] == 0
    assert list(configs(out)) == [f"dense-s{seed}" for seed in range(4)]


@pytest.mark.usefixtures("idle")
def test_threads_are_fixed_with_the_sweep(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "cores", lambda: 8)
    call("--out", tmp_path / "a", *options(), "--seeds", "0..9", "--workers", "3")
    monkeypatch.setattr(sweep, "cores", lambda: 1)
    call("--out", tmp_path / "a", *options(), "--seeds", "0..10")
    call("--out", tmp_path / "b", *options(), "--seeds", "0..9")
    call("--out", tmp_path / "c", *options(), "--seeds", "0", "--threads", "3")
    threads = [{c.threads for c in configs(tmp_path / name).values()} for name in "abc"]
    assert threads == [{2}, {1}, {3}]


@pytest.mark.usefixtures("idle")
def test_another_configuration_is_refused_by_name(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    call("--out", out, *options(), "--seeds", "0")
    before = (out / "queue.json").read_bytes()
    words = ["--learning.gamma", "0.5", "--seeds", "0..1", "--total-steps", "7"]
    code, _, err = call("--out", out, *words)
    assert code == 2
    assert "total_steps (160 there, 7 now), learning.gamma (0.99 there, 0.5 now)" in err
    assert (out / "queue.json").read_bytes() == before
    assert call("--out", out, "--total-steps", "160", "--seeds", "0")[0] == 0


@pytest.mark.usefixtures("idle")
def test_a_sweep_is_one_process_s(call: Call, tmp_path: Path) -> None:
    call("--out", tmp_path / "sweep", *options(), "--seeds", "0")
    with locked(tmp_path / "sweep"):
        code, _, err = call("--out", tmp_path / "sweep")
    assert code == 2 and "in use by another process" in err


# -- the display -----------------------------------------------------------------------------------


def a_run(name: str, **more: Any) -> sweep.Run:
    return sweep.Run(
        **{
            "id": name, "overrides": {"seed": 0, "spiking.tau": 2.0}, "actor": "spiking", "seed": 0,
            "total_steps": 1000, "config": "", "directory": name, "log": "", **more,
        }
    )  # fmt: skip


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = {"step": 0, "updates": 0, "time": 0.0, "loss/critic": 1 / 3}
    lines = [json.dumps(row | {"step": i, "time": i / 50}) for i in range(20_000)]
    path.write_text("\n".join(lines) + '\n{"step": 20000, "ti')
    rows = tail(path, 1000)
    assert 5 < len(rows) < 20 and rows[-1]["step"] == 19_999
    seen = Seen()
    seen.look(path)
    assert seen.step == 19_999 and seen.seconds_a_step == pytest.approx(0.02)
    assert tail(tmp_path / "none") == []


def test_the_table_tells_where_runs_stand(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    runs = [
        a_run("done", status="finished", final_return=5.25),
        a_run("half", status="running"),
        a_run("new"),
        a_run("dense", actor="dense", status="failed", exit_code=1),
    ]
    for name, steps in (("half", 500), ("done", 1000)):
        (tmp_path / name).mkdir()
        rows = [{"step": s, "time": s / 10, "eval/return_mean": s / 4} for s in (100, steps)]
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / name / "metrics.jsonl").write_text(text)
    with Display(tmp_path, runs) as display:
        display.refresh()
        assert display.row(runs[0], ["spiking.tau"])[2:] == [
            "2.0", "1,000", "100%", "5.2", "", "finished",
        ]  # fmt: skip
        assert display.row(runs[1], [])[2:] == ["500", "50%", "125.0", "0:00:50", "running"]
        assert display.row(runs[3], ["spiking.tau"])[2] == "-"
        assert display.eta() == pytest.approx(150)
        assert [len(display.table(n).rows) for n in (None, 2, 0)] == [4, 2, 1]
        runs[1].status = "finished"
    err = capsys.readouterr().err
    assert "62% of 4 runs, 1 finished, 1 running, 1 queued, 1 failed, ETA 0:02:30\n" in err
    assert "half: finished\n" in err


def test_a_sweep_without_rows_has_no_eta(tmp_path: Path) -> None:
    display = Display(tmp_path, [a_run("new")])
    assert display.eta() is None and display.text() == "0% of 1 runs, 0 finished, 1 queued"
    assert math.isclose(sweep_display.LOOK_SECONDS, 1)


# -- real workers ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_stopped_halfway_goes_on(call: Call, tmp_path: Path) -> None:
    """Its runs end like runs that were left alone, and what had finished is not touched."""
    out = tmp_path / "sweep"
    words = ["--out", str(out), *options(total_steps=240), "--workers", "2"]
    words += ["--actors", "dense", "spiking", "--seeds", "0..1"]
    process = start("runner.py", "sweep", *words)
    runs = out / "runs" / "Pendulum-v1"
    wait_for(lambda: any(runs.glob("*/checkpoints/last.pt")), process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert stdout.splitlines()[-1] == str(out)
    assert f"go on with: python runner.py sweep --out {out}\n" in stderr
    assert "Traceback" not in stderr
    assert statuses(out) == ["interrupted", "interrupted", "queued", "queued"]
    reached = [load_state(path.parents[1])["counters"]["step"] for path in runs.glob("*/*/last.pt")]
    assert reached and max(reached) < 240

    code, stdout, stderr = call(*words)
    assert code == 0, stderr
    assert stdout.splitlines()[-1] == str(out)
    assert re.search(r"spiking +│ 1 +│ +240 │ 100% │ +-\d+\.\d │ +│ finished", stdout)
    assert "100% of 4 runs, 4 finished" in stderr
    assert [run["attempts"] for run in entries(out).values()] == [2, 2, 1, 1]
    for name in ("dense-s0", "spiking-s0"):
        config = read_config(runs / name)
        assert config == configs(out)[name]
        alone = config.model_copy(update={"runs_dir": tmp_path / "alone"})
        Manager(alone).train()
        left = comparable(tmp_path / "alone" / "Pendulum-v1" / name)
        assert differences(comparable(runs / name), left) == []

    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert call("--out", out)[0] == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files


def test_a_failed_run_is_reported_and_retried_on_demand(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    code, stdout, err = call("--out", out, *options(), "--grid", "env=NoSuch-v0", "--workers", "1")
    assert (code, stdout.splitlines()[-1]) == (1, str(out))
    (name,) = entries(out)
    assert f"{name}: failed, exit code 2" in err
    assert "NoSuch" in err.partition(f"{out}/logs/{name}.log ends:")[2]
    assert f"sweep --out {out} --retry" in err
    for words, attempts in (([], 1), (["--retry"], 2)):
        assert call("--out", out, *words)[0] == 1
        assert entries(out)[name]["attempts"] == attempts


def meddle(monkeypatch: pytest.MonkeyPatch, act: Callable[[sweep.Workers], None]) -> None:
    """Have something happen between the ticks of a sweep."""
    tick = sweep.Workers._tick

    def meddled(self: sweep.Workers) -> bool:
        act(self)
        return tick(self)

    monkeypatch.setattr(sweep.Workers, "_tick", meddled)


@pytest.mark.slow
def test_a_killed_worker_is_resumed(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, steps = tmp_path / "sweep", []
    run = out / "runs" / "Pendulum-v1" / "dense-s7"

    def kill(workers: sweep.Workers) -> None:
        if not steps and (run / "checkpoints" / "last.pt").exists():
            steps.append(load_state(run)["counters"]["step"])
            workers.processes["dense-s7"].kill()

    meddle(monkeypatch, kill)
    assert call("--out", out, *options(total_steps=240), "--seeds", "7")[0] == 0
    assert steps[0] < 240
    assert entries(out)["dense-s7"]["attempts"] == 2
    log = (out / "logs" / "dense-s7.log").read_text()
    assert re.findall(r"^\$ .*", log, re.MULTILINE) == [
        "$ python runner.py train --config configs/dense-s7.yaml",
        "$ python runner.py train --resume runs/Pendulum-v1/dense-s7",
    ]


def test_a_second_signal_kills(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is sent to a worker that cannot answer it."""
    out, sent = tmp_path / "sweep", []
    last = out / "runs" / "Pendulum-v1" / "dense-s1" / "checkpoints" / "last.pt"

    def interrupt(workers: sweep.Workers) -> None:
        if last.exists() and len(sent) < 2:
            (process,) = workers.processes.values()
            process.send_signal(signal.SIGSTOP)
            sent.append(process)
            signal.raise_signal(signal.SIGINT)

    meddle(monkeypatch, interrupt)
    assert call("--out", out, *options(total_steps=240), "--seeds", "1")[0] == 130
    assert sent[0].returncode == -signal.SIGKILL
    assert statuses(out) == ["interrupted"]


@pytest.mark.slow
def test_workers_that_outlive_their_sweep_are_waited_for(call: Call, tmp_path: Path) -> None:
    """Nothing is run twice: the run that a killed sweep left behind ends by itself."""
    out = tmp_path / "sweep"
    process = start("runner.py", "sweep", "--out", str(out), *options(total_steps=240), "--seeds=5")
    run = out / "runs" / "Pendulum-v1" / "dense-s5"
    wait_for(lambda: (run / "checkpoints" / "last.pt").exists(), process)
    process.kill()
    process.communicate()
    assert statuses(out) == ["running"]
    assert sweep.held(out, sweep.Queue.load(out / "queue.json").runs[0])
    assert call("--out", out)[0] == 0
    entry = entries(out)["dense-s5"]
    assert (entry["status"], entry["attempts"]) == ("finished", 1)
    assert entry["final_return"] < 0
