"""Searches: the space, the trials on disk, what is made of them; and the two short tests.

Most searches here try stand-ins for training runs, whose return is a known function of an option.
"""

from __future__ import annotations

import csv
import json
import math
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml
from conftest import Call, options, start, tiny, wait_for
from PIL import Image

from sansac import probes, signals, sweep, tune
from sansac.checkpoint import read_record
from sansac.config import Config, ConfigError, load_space, load_yaml, preset_for, resolve
from sansac.manager import Manager

COMMAND = ("tune",)  # that `call` runs

TAU = {"learning.tau": {"low": 0.001, "high": 0.1, "log": True}}

# A run that lasts as long as it takes to write its files; return -|log(tau / 0.01)|. Like train, it
# evaluates every `eval_every` steps. A tau above 0.05 fails; in mode "slow" the worse half hangs.
STAND_IN = """
import json, math, os, sys, time, yaml
config, directory, mode = yaml.safe_load(open(sys.argv[1])), sys.argv[2], sys.argv[3]
os.makedirs(directory, exist_ok=True)
tau, total, every = config["learning"]["tau"], config["total_steps"], config["eval_every"]
score = -abs(math.log(tau / 0.01)) - config["seed"]
if mode == "fail" and tau > 0.02:
    sys.exit("the tau of this trial is too large")
with open(directory + "/metrics.jsonl", "w") as file:
    for step in range(every, total + 1, every):
        row = {"step": step, "updates": 0, "time": step, "eval/return_mean": score}
        file.write(json.dumps(row) + "\\n")
if mode == "slow" and score < -0.7:
    time.sleep(60)
with open(directory + "/run.json", "w") as file:
    final = {"return_mean": score, "return_std": 0.0, "returns": [score], "step": total,
             "seed": 0, "episodes": 1}
    json.dump({"status": "finished", "final": final}, file)
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Trials run STAND_IN; its mode may be set, and how often a run was started is counted."""
    seen: dict[str, Any] = {"mode": "plain", "starts": []}

    def launch(out: Path, run: sweep.Run) -> subprocess.Popen[bytes]:
        seen["starts"].append(run.id)
        words = [sys.executable, "-c", STAND_IN, run.config, run.directory, seen["mode"]]
        with open(out / run.log, "ab") as log:
            return subprocess.Popen(words, cwd=out, stdout=log, stderr=log, start_new_session=True)

    monkeypatch.setattr(tune, "start", launch)
    monkeypatch.setattr(tune, "TICK_SECONDS", 0.005)
    monkeypatch.setattr(tune, "LOOK_SECONDS", 0.0)
    return seen


def preset(tmp_path: Path, **space: Any) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump({"tune": {k.replace("__", "."): v for k, v in space.items()}}))
    return path


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A search over tau in tmp_path/search, one trial at a time."""
    path = preset(tmp_path, learning__tau=TAU["learning.tau"])
    return ["--out", str(tmp_path / "search"), "--config", str(path), *options(), "--workers=1"]


def trials(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "trials.csv").open()))


# -- the space -------------------------------------------------------------------------------------

WRONG_SPACES = {
    "an unknown option": ({"learning.gama": {"low": 0.1, "high": 1}}, "did you mean `learning.gam"),
    "a section": ({"learning": {"gamma": {"low": 0.1, "high": 1}}}, "unknown option `learning`"),
    "above a bound": ({"learning.gamma": {"low": 0.9, "high": 2}}, "found 2"),
    "a wrong choice": ({"spiking.neuron": {"choices": ["lif", "lift"]}}, "found 'lift'"),
    "no choices": ({"spiking.neuron": {"choices": []}}, "expected {low: ..., high: ...}"),
    "a bare number": ({"learning.gamma": 0.9}, "expected {low: ..., high: ...}"),
    "a key too many": ({"learning.tau": {"low": 0.1, "high": 1, "step": 1}}, "expected {low"),
    "upside down": ({"learning.tau": {"low": 0.2, "high": 0.1}}, "low (0.2) must be below high"),
    "log from 0": ({"learning.tau": {"low": 0, "high": 1, "log": True}}, "needs low above 0"),
    "half a layer": ({"learning.n_step": {"low": 1.5, "high": 3}}, "expected a whole number"),
    "a range of words": ({"env_kwargs": {"low": 1, "high": 2}}, "is what trials are measured by"),
    "a range of booleans": ({"actor.layer_norm": {"low": 0, "high": 1}}, "give choices"),
    "a longer training": ({"total_steps": {"low": 1, "high": 2}}, "what trials are measured by"),
    "a name": ({"name": {"choices": ["a", "b"]}}, "unknown option `name`"),
    "contradictions": (
        {"learning.batch_size": {"choices": [16, 4096]}},
        "learning.batch_size=4096",
    ),
}


@pytest.mark.parametrize("case", WRONG_SPACES)
def test_a_space_that_cannot_be_is_named_and_leaves_nothing(
    case: str, call: Call, tmp_path: Path
) -> None:
    space, named = WRONG_SPACES[case]
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump({"tune": space}))
    code, out, err = call("--out", tmp_path / "search", "--config", path, *options())
    assert (code, out) == (2, "")
    assert named in " ".join(err.split())
    assert [file.name for file in tmp_path.iterdir()] == ["space.yaml"]


WRONG = {
    "no such environment": (["--env", "NoSuch-v0"], "NoSuch"),
    "no trials": (["--trials", "0"], "--trials must be at least 1"),
    "no workers": (["--workers", "0"], "--workers must be at least 1"),
    "no seeds": (["--seeds", "few"], "found 'few'"),
    "a name": (["--name", "walker"], "--name: a search names its runs itself"),
    "an unknown test": (["lr_range"], "lr_range"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_named_and_leaves_nothing(
    case: str, call: Call, tmp_path: Path, words: list[str]
) -> None:
    more, named = WRONG[case]
    code, out, err = call(*words, *more)
    assert (code, out) == (2, "")
    assert named in err and "Traceback" not in err
    assert [file.name for file in tmp_path.iterdir()] == ["space.yaml"]


def test_a_directory_of_something_else_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    code, _, err = call("--out", tmp_path, *options())
    assert code == 2 and "holds no search" in err
    (tmp_path / "search.json").write_text('{"format_version": 99}')
    code, _, err = call("--out", tmp_path)
    assert code == 2 and "format version 99" in err


def test_a_space_is_no_part_of_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "both.yaml"
    path.write_text("learning: {gamma: 0.5}\ntune: {learning.tau: {low: 0.1, high: 1}}\n")
    assert load_yaml(path) == {"learning": {"gamma": 0.5}}
    assert load_space(path) == {"learning.tau": {"low": 0.1, "high": 1}}
    path.write_text("tune: [1]\n")
    with pytest.raises(ConfigError, match="tune must hold"):
        load_space(path)


@pytest.mark.parametrize("env", ["BipedalWalker-v3", "Pendulum-v1", "LunarLander-v3", "Other-v0"])
@pytest.mark.parametrize("actor", ["dense", "spiking"])
def test_the_default_spaces_hold_no_contradiction(actor: str, env: str) -> None:
    base = resolve(preset_for(env), {"env": env, "san": actor == "spiking"}).dump()
    space = load_space(Path(f"tune_{actor}"))
    config = tune.rehearse(tune.Search({}, {}, base, space, [0], 1, True))
    assert config.actor_name == actor and config.env == env
    assert any(name.startswith("spiking.") for name in space) == (actor == "spiking")


def test_whole_numbers_logs_and_choices() -> None:
    space = tune.parse_space({
        "learning.batch-size": {"low": 8, "high": 64, "log": True},
        "learning.gamma": {"low": 0, "high": 1},
        "actor.hidden": {"choices": [[8], [8, 8]]},
        "sac.target_entropy": {"choices": ["auto", -2]},
    })  # fmt: skip
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    points = [tune.propose(space, study.ask()) for _ in range(200)]
    sizes = [point["learning.batch_size"] for point in points]
    assert all(type(size) is int for size in sizes) and min(sizes) >= 8 and max(sizes) <= 64
    assert 17 < np.median(sizes) < 30  # even in the logarithm: 23, not 36
    assert all(type(point["learning.gamma"]) is float for point in points)
    assert {json.dumps(point["actor.hidden"]) for point in points} == {"[8]", "[8, 8]"}
    assert {point["sac.target_entropy"] for point in points} == {"auto", -2}


# -- searches over stand-ins -----------------------------------------------------------------------


def test_the_best_of_a_search_is_a_preset(
    call: Call, tmp_path: Path, words: list[str], stand_in: dict[str, Any]
) -> None:
    code, stdout, err = call(*words, "--trials", "8", "--seeds", "0..1", "--no-prune")
    out = tmp_path / "search"
    assert code == 0, err
    assert stdout.splitlines()[-1] == str(out)
    assert "8 of 8 trials, 8 finished" in err
    rows = trials(out)
    assert [row["trial"] for row in rows] == [str(i) for i in range(8)]
    assert float(rows[0]["learning.tau"]) == Config().learning.tau  # as it stands
    for row in rows:
        distance = abs(math.log(float(row["learning.tau"]) / 0.01))
        assert float(row["return_s1"]) == pytest.approx(-distance - 1)
        assert float(row["score"]) == pytest.approx(-distance - 0.5)
    best = max(rows, key=lambda row: float(row["score"]))
    layer = load_yaml(out / "best.yaml")
    taken = resolve(preset_for("Pendulum-v1"), layer)
    assert taken.learning.tau == float(best["learning.tau"])
    same = {"seed", "name", "runs_dir", "threads", "video", "wandb", "spiking"}
    tried = resolve(load_yaml(out / "trials" / best["trial"] / "s0.yaml"))
    assert taken.model_dump(exclude=same) == tried.model_dump(exclude=same)
    assert "spiking" not in layer and "video" not in layer and "seed" not in layer
    for name in ("history.png", "importances.png"):
        assert Image.open(out / name).size[0] > 500
    assert stand_in["starts"][:3] == ["trial0-s0", "trial0-s1", "trial1-s0"]


@pytest.mark.slow
def test_a_search_that_was_split_proposes_what_it_would_have(
    call: Call, tmp_path: Path, words: list[str], stand_in: dict[str, Any]
) -> None:
    """Past the random beginning of Optuna's sampler. (Whether the end of a run or its pruning comes
    first is a matter of time.)"""
    whole = [*words, "--no-prune", "--trials", "13"]
    whole[1] = str(tmp_path / "whole")
    call(*whole)
    assert call(*words, "--no-prune", "--trials", "5")[0] == 0
    assert call("--out", tmp_path / "search", "--trials", "13", "--workers", "1")[0] == 0
    assert trials(tmp_path / "search") == trials(tmp_path / "whole")
    starts = len(stand_in["starts"])
    assert call("--out", tmp_path / "search")[0] == 0  # nothing is left
    assert len(stand_in["starts"]) == starts == 26


@pytest.mark.usefixtures("stand_in")
def test_another_configuration_is_refused_by_name(
    call: Call, tmp_path: Path, words: list[str]
) -> None:
    assert call(*words, "--trials", "1")[0] == 0
    other = preset(tmp_path, learning__tau={"low": 0.2, "high": 0.3})
    code, _, err = call(
        "--out", tmp_path / "search", "--learning.gamma=0.5", "--seeds=4", "--config", other
    )
    assert code == 2
    assert "learning.gamma (0.99 there, 0.5 now), seeds ([0] there, [4] now), the space" in err


def test_a_trial_behind_its_median_is_pruned(
    call: Call, tmp_path: Path, words: list[str], stand_in: dict[str, Any]
) -> None:
    words += ["--eval-every", "40"]
    assert call(*words, "--trials", "5")[0] == 0  # fewer are no ground to prune on
    stand_in["mode"] = "slow"
    code, _, err = call("--out", tmp_path / "search", "--trials", "12", "--workers", "1")
    assert code == 0, err
    rows = trials(tmp_path / "search")
    pruned = [int(row["trial"]) for row in rows if row["state"] == "pruned"]
    assert pruned and min(pruned) >= 5 and f"{len(pruned)} pruned" in err
    for number in pruned:
        before = [float(row["score"]) for row in rows[:number] if row["state"] == "finished"]
        assert float(rows[number]["score"]) < np.median(before)
        assert rows[number]["return_s0"] == ""


def test_a_failed_trial_is_reported_and_kills_nothing(
    call: Call, tmp_path: Path, words: list[str], stand_in: dict[str, Any]
) -> None:
    stand_in["mode"] = "fail"
    code, stdout, err = call(*words, "--trials", "8")
    rows = trials(tmp_path / "search")
    failed = [row for row in rows if row["state"] == "failed"]
    assert code == 0 and 0 < len(failed) < 8
    assert all(float(row["learning.tau"]) > 0.02 and not row["score"] for row in failed)
    log = tmp_path / "search" / "trials" / failed[0]["trial"] / "s0.log"
    assert f"trial {failed[0]['trial']} failed: exit code 1, log {log}" in err
    assert "  the tau of this trial is too large" in err
    assert f"{len(failed)} failed" in err and "failed" in stdout


def test_a_search_without_a_score_fails(
    call: Call, tmp_path: Path, words: list[str], stand_in: dict[str, Any]
) -> None:
    stand_in["mode"] = "fail"
    words += ["--learning.tau", "0.09", "--trials", "1"]
    assert call(*words)[0] == 1
    assert not (tmp_path / "search" / "best.yaml").exists()


def test_a_killed_run_is_started_again_then_given_up(
    call: Call, tmp_path: Path, words: list[str], stand_in: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    launch, kills = tune.start, []

    def killed(out: Path, run: sweep.Run) -> subprocess.Popen[bytes]:
        if run.id == "trial0-s0" or (run.id == "trial1-s0" and not kills):
            kills.append(run.id)
            seen = subprocess.Popen(["sleep", "60"], start_new_session=True)
            seen.kill()
            return seen
        return launch(out, run)

    monkeypatch.setattr(tune, "start", killed)
    assert call(*words, "--trials", "2")[0] == 0
    first, second = trials(tmp_path / "search")
    assert (first["state"], second["state"]) == ("failed", "finished")
    assert "killed 3 times" in first["failure"] and len(kills) == 3


@pytest.mark.slow
def test_two_processes_share_a_search(tmp_path: Path, words: list[str]) -> None:
    """They take different trials of one search, and no more than there are."""
    code = f"""
import subprocess, sys
import runner
from sansac import tune
tune.TICK_SECONDS = 0.005
tune.start = lambda out, run: subprocess.Popen(
    [sys.executable, "-c", {STAND_IN!r}, run.config, run.directory, "plain"], cwd=out)
sys.exit(runner.main({["tune", *words, "--trials", "12"]!r}))
"""
    processes = [start("-c", code) for _ in range(2)]
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    taken = [re.findall(r"^trial (\d+) begins", err, re.MULTILINE) for _, err in ends]
    assert sorted(map(int, taken[0] + taken[1])) == list(range(12))
    assert [row["state"] for row in trials(tmp_path / "search")] == ["finished"] * 12


# -- a search over real runs -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_interrupted_halfway_goes_on(call: Call, tmp_path: Path, words: list[str]) -> None:
    """The trial that was under way ends as if it had been left alone."""
    out = tmp_path / "search"
    words += ["--trials", "2", "--total-steps", "240", "--actor.hidden", "8", "8"]
    process = start("runner.py", "tune", *words)
    last = out / "trials" / "0" / "Pendulum-v1" / "trial0-s0" / "checkpoints" / "last.pt"
    wait_for(last.exists, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout.splitlines()[-1] == str(out)
    assert f"go on with: python runner.py tune --out {out}\n" in stderr
    assert "trial 0 stopped" in stderr and "Traceback" not in stderr
    assert last.exists()

    code, stdout, stderr = call("--out", out, "--workers", "1")
    assert code == 0, stderr
    assert "trial 0 goes on" in stderr and "trial 1 begins" in stderr
    log = (out / "trials" / "0" / "s0.log").read_text()
    assert [line.split()[4] for line in log.splitlines() if line[0] == "$"] == [
        "--config", "--resume",
    ]  # fmt: skip
    config = resolve(load_yaml(out / "trials" / "0" / "s0.yaml"))
    alone = Manager(config.model_copy(update={"runs_dir": tmp_path / "alone"})).train()
    assert float(trials(out)[0]["score"]) == alone["return_mean"]
    run = last.parents[1]
    assert read_record(run)["status"] == "finished"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["best.pt"]


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on(call: Call, tmp_path: Path, words: list[str]) -> None:
    """The trial is not lost, and its run, which lives on, is not run twice."""
    out = tmp_path / "search"
    process = start("runner.py", "tune", *words, "--trials", "1", "--total-steps", "240")
    run = out / "trials" / "0" / "Pendulum-v1" / "trial0-s0"
    wait_for(lambda: (run / "checkpoints" / "last.pt").exists(), process)
    process.kill()
    process.communicate()
    code, _, err = call("--out", out)
    assert code == 0, err
    assert "trial 0 goes on" in err
    (row,) = trials(out)
    assert float(row["score"]) == read_record(run)["final"]["return_mean"]
    assert (out / "trials" / "0" / "s0.log").read_text().count("$ python") == 1


# -- the short tests -------------------------------------------------------------------------------


def test_the_steepest_fall_is_suggested() -> None:
    """A critics' loss whose log10 falls from 1 to -1 as a logistic around 1e-3, then rises."""
    rate = np.geomspace(1e-6, 1, 601)
    x = np.log10(rate)
    log = 1 - 2 / (1 + np.exp(-2 * (x + 3))) + 2 * np.maximum(0, x + 1) ** 2
    noise = np.random.default_rng(0).normal(0, 0.02, len(x))
    rows = [(r, 10**y, -1.0, math.nan) for r, y in zip(rate, log + noise, strict=True)]
    rows[100] = (*rows[100][:3], -5.0)
    rows.append((1.1, math.nan, math.nan, math.nan))
    found = probes.judge("", "all", rows, True)
    assert found.suggestion == pytest.approx(1e-3, rel=0.3)
    assert np.abs(np.log10(found.smooth) - log)[30:-30].max() < 0.15
    steepest = found.slope[np.abs(x + 3).argmin()]
    assert steepest == pytest.approx(-1, rel=0.15)  # a logistic's: height x 2 / 4
    assert found.best_return == (-5.0, rate[100])
    rates = re.findall(r"--(\w+)\.learning-rate (\S+)", found.options)
    assert [name for name, _ in rates] == ["actor", "critic", "sac"]
    assert {rate for _, rate in rates} == {f"{found.suggestion:.2g}"}
    rising = [(r, 1 + i, -1.0, -1.0) for i, r in enumerate(rate)]
    assert probes.judge("", "critic", rising, False).suggestion is None


def test_a_range_test_writes_its_numbers(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "lr"
    words = ["--out", str(out), "--updates", "60", "--points", "3", "--episodes", "1", *options()]
    code, stdout, err = call("lr-range", *words)
    assert code == 0, err
    assert stdout.splitlines()[-1] == str(out)
    rows = list(csv.DictReader((out / "lr_range.csv").open()))
    rates = [float(row["rate"]) for row in rows]
    assert rates[0] == pytest.approx(1e-6)
    assert np.diff(np.log(rates)) == pytest.approx(np.log(1e6) / 59)
    told = json.loads((out / "lr_range.json").read_text())
    assert told["diverged"] or len(rows) == 60
    assert 1 <= sum(bool(row["return"]) for row in rows) <= 3
    assert Image.open(out / "lr_range.png").size[1] > 500
    code, _, err = call("lr-range", *words)
    assert code == 2 and "is not empty" in err
    assert call("lr-range", *words, "--overwrite", "--of", "actor")[0] == 0


def test_only_the_swept_rate_moves(tmp_path: Path) -> None:
    with probes.bench(tiny(), tmp_path / "bench", None, 1) as at:
        probes.set_rate(at, probes.RATES["actor"], 0.5)
        rates = {k: o.param_groups[0]["lr"] for k, o in at.algorithm.optimizers.items()}
        assert rates == {"actor": 0.5, "critic": 3e-4, "temperature": 3e-4}


def test_optimisers_start_alike_and_see_the_same_data(tmp_path: Path) -> None:
    """torch's Adam goes on as the agent's own optimiser would have, on a trained agent too."""
    with probes.bench(tiny(), tmp_path / "bench", 100, 1) as at:
        assert at.manager.updates == 30
        own = [at.update()["loss/critic"] for _ in range(5)]
        at.reset()
        again = [at.update()["loss/critic"] for _ in range(5)]
        found = {
            name: probes.probe(at, name, 1e-2, 0, 5, 1, 1).losses for name in probes.OPTIMIZERS
        }
        at.reset()
        for optimizer in at.algorithm.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = 1e-2
    assert own == again
    assert len({losses[0] for losses in found.values()}) == 1 and found["SGD"][0] == own[0]
    assert len({losses[4] for losses in found.values()}) == len(found)


def test_a_comparison_of_optimisers_names_a_winner(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "optimizers"
    words = ["--out", out, "--updates", "8", "--points", "2", "--episodes", "1", "--by", "loss"]
    code, stdout, err = call("optimizers", *words, "--rates", "1e-3", "1e-2", *options())
    assert code == 0, err
    told = json.loads((out / "optimizers.json").read_text())
    losses = [probe["mean_loss"] for probe in told["probes"]]
    assert len(losses) == 10 and losses == sorted(losses)
    assert f"winner by loss: {told['probes'][0]['optimizer']}, 1" in stdout
    rows = list(csv.DictReader((out / "optimizers.csv").open()))
    assert len(rows) == 80 and sum(bool(row["return"]) for row in rows) == 20
    mean = np.mean([float(row["loss/critic"]) for row in rows[:8]])
    assert mean == pytest.approx(losses[0])
    assert Image.open(out / "optimizers.png").size[0] > 500


def test_what_blew_up_comes_last() -> None:
    def a(name: str, loss: float, mean: float) -> probes.Probe:
        return probes.Probe(name, None, np.array([loss]), [1], [mean])

    found = [a("SGD", 1.0, math.nan), a("Adam", 3.0, -5.0), a("AdamW", 2.0, -9.0)]
    assert [p.name for p in probes.ranked(found, "return")] == ["Adam", "AdamW", "SGD"]
    assert [p.name for p in probes.ranked(found, "loss")] == ["SGD", "AdamW", "Adam"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["lr-range", "--low", "1", "--high", "0.1"], "--low (1.0)"),
        (["lr-range", "--updates", "3"], "at least 20"),
        (["lr-range", "--warm-up", "3"], "--warm-up (3) is below learning.learning_starts (40)"),
        (["optimizers", "--points", "9", "--updates", "8"], "--points between 1 and --updates"),
        (["optimizers", "--rates", "0"], "--rates must be above 0"),
        (["optimizers", "--by", "luck"], "--by"),
    ],
)
def test_short_tests_that_cannot_be_are_refused(
    words: list[str], named: str, call: Call, tmp_path: Path
) -> None:
    code, out, err = call(*words, "--out", tmp_path / "out", *options())
    assert (code, out) == (2, "")
    assert named in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


# -- signals ---------------------------------------------------------------------------------------


def test_signals_are_handed_over_and_given_back() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []
    with signals.handled(seen.append):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before

    def elsewhere() -> None:
        with signals.handled(seen.append):
            assert signal.getsignal(signal.SIGTERM) is before
        seen.append(0)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen[2:] == [0]
