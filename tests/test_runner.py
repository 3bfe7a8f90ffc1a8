"""The command line, from words to exit code; signals go to real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
from conftest import ROOT, Call, comparable, differences, flags, load_state, start, tiny, wait_for

import runner
from sansac import config as config_module
from sansac.checkpoint import read_config, read_record
from sansac.environments import EVALUATION, Episodic, episode_seed
from sansac.evaluation import run_episode
from sansac.manager import Manager

KEYS = [
    "env", "actor", "algorithm", "checkpoint", "step", "episodes", "seed", "noise", "dropout",
    "returns", "return_mean", "return_std", "return_iqm", "return_min", "return_max", "length_mean",
]  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "spiking"])
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, its agent directory beside it."""
    config = tiny(tmp_path_factory.mktemp("runs"), san=request.param, name="run")
    manager = Manager(config)
    manager.train()
    manager.save(manager.directory.parent / "agent")
    return manager.directory


# -- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["-h"], *([c, "--help"] for c in runner.COMMANDS)])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    code = f"""
import sys, runner
try:
    runner.main({words})
except SystemExit as ending:
    heavy = ("torch", "gymnasium", "wandb", "spikingjelly", "matplotlib", "scipy", "cupy")
    print("code", ending.code, [name for name in heavy if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "code 0 []", run.stderr
    assert run.stdout.startswith(f"usage: runner.py {words[0] if len(words) > 1 else 'train'}")


def test_help_explains_every_option_and_command(call: Call) -> None:
    code, out, _ = call("--help")
    assert code == 0
    flat = " ".join(re.sub("[│╭╮╰╯─]", " ", out).split())
    for name, section in config_module.fields().items():
        field = section.model_fields[name.rpartition(".")[2]]
        assert re.search(rf"--{re.escape(name.replace('_', '-'))}\b", flat), name
        assert field.description and " ".join(field.description.split())[:25] in flat, name
    assert all(re.search(rf"\b{command}\b", flat) for command in runner.COMMANDS)


def test_help_shows_the_environments_preset(call: Call) -> None:
    """The defaults that help prints are those that a run would take."""
    tau = config_module.preset_for("BipedalWalker-v3")["learning"]["tau"]
    for words, value in (([], tau), (["--env", "NoPreset-v0"], config_module.Learning().tau)):
        _, out, _ = call(*words, "--help")
        flat = " ".join(re.sub("[│╭╮╰╯─]", " ", out).split())
        assert f"target <- (1 - tau) target + tau online. (default: {value})" in flat


# -- errors ----------------------------------------------------------------------------------------

WRONG = {
    "a boolean as a word": (["--san", "False"], "False"),
    "a boolean after =": (["--san=False"], "False"),
    "a boolean in a section": (["--actor.layer-norm", "true"], "true"),
    "a stray word": (["train", "walker"], "walker"),
    "an unknown command": (["tain"], "unknown command 'tain': choose from train, evaluate"),
    "an unknown option": (["--learning.gama", "0.9"], "--learning.gamma"),
    "a word for a number": (["--learning.gamma", "high"], "--learning.gamma"),
    "a fraction for an integer": (["--num-envs", "1.5"], "--num-envs"),
    "out of range": (["--learning.gamma", "2"], "learning.gamma: "),
    "not a number": (["--learning.tau", "nan"], "learning.tau: "),
    "no choice": (["--spiking.encoder", "poison"], "--spiking.encoder"),
    "no such neuron": (["--spiking.neuron", "izhikevich"], "spiking.neuron: expected one of lif,"),
    "nothing for an option": (["--env"], "--env: expected one argument"),
    "nothing for widths": (["--actor.hidden"], "actor.hidden"),
    "a pair without a value": (["--env-kwargs", "continuous"], "KEY=VALUE"),
    "a value that is no YAML": (["--env-kwargs", "sizes=[1"], "not valid YAML"),
    "batch above capacity": (["--learning.batch-size", "400000"], "above replay.capacity (300000)"),
    "starts below batch": (["--learning.learning-starts", "9"], "learning.learning_starts (9)"),
    "capacity above memory": (["--replay.capacity", "9" * 15], "GiB"),
    "no such file": (["--config", "none.yaml"], "none.yaml"),
    "a preset with a wrong key": (["--config", "typo.yaml"], "did you mean `learning.gamma`"),
    "a preset that is no YAML": (["--config", "odd.yaml"], "odd.yaml is not valid YAML"),
    "a preset of a numbered task": (
        ["--config", "number.yaml"],
        "env: input should be a valid str",
    ),
    "no such environment": (["--env", "NoSuch-v0"], "NoSuch"),
    "a module to import": (["--env", "os:Walker-v0"], "make_env"),
    "a discrete action": (["--env", "CartPole-v1"], "Discrete(2)"),
    "an argument it lacks": (["--env", "Pendulum-v1", "--env-kwargs", "wind=3"], "wind"),
    "no threshold": (["--env", "Pendulum-v1", "--stop-at-return", "threshold"], "threshold"),
    "a name of dots": (["--name", "../.."], "name ('../..')"),
    "no run to resume": (["--resume", "nowhere"], "nowhere is not a directory"),
    "no run to evaluate": (["evaluate", "nowhere"], "nowhere is not a directory"),
    "what is no run": (["evaluate", "."], "no config.yaml"),
    "no episodes": (["evaluate", ".", "--episodes", "0"], "--episodes"),
    "nothing to evaluate": (["evaluate"], "run"),
    "too long a preset": (["--config", "9" * 400], "999 cannot be a path (File name too long)"),
    "too long a run": (["latency", "9" * 400], "999 cannot be a path (File name too long)"),
    "too long a run to resume": (["--resume", "a/" * 3000], "cannot be a path (File name too"),
    "too long a directory": (["compare", ".", "--out", "9" * 400], "999 cannot be a path"),
    "too long an environment": (["--env", "9" * 400], "999` doesn't exist"),
    "too long an algorithm": (["--algorithm", "9" * 400], "algorithm: expected one of"),
    "a zero in a path": (["--config", "zero.yaml", "--env", "Pendulum-v1"], "null byte"),
    "a path that is no text": (
        ["--config", "surrogate.yaml", "--env", "Pendulum-v1"],
        "surrogates not allowed",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_is_one_message_and_leaves_nothing(
    case: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases 6, 26 and 35 among them"""
    words, named = WRONG[case]
    monkeypatch.chdir(tmp_path)
    Path("typo.yaml").write_text("learning: {gama: 0.9}\n")
    Path("odd.yaml").write_text("a: [1\n")
    Path("number.yaml").write_text("env: 5\n")
    Path("zero.yaml").write_text('runs_dir: "a\\0b"\n')
    Path("surrogate.yaml").write_text('runs_dir: "\\ud800"\n')
    names = sorted(path.name for path in tmp_path.iterdir())
    code, out, err = call(*words)
    assert code == 2
    assert out == ""
    assert named in " ".join(err.split())
    assert "Traceback" not in err
    assert err.startswith("error: ") or err.count("full helptext") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_damaged_checkpoint_is_one_message(run_dir: Path, call: Call, tmp_path: Path) -> None:
    """case 28"""
    broken = tmp_path / "broken.pt"
    broken.write_bytes((run_dir / "checkpoints" / "last.pt").read_bytes()[:3000])
    code, out, err = call("evaluate", run_dir, "--checkpoint", broken)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {broken} is damaged") and err.count("\n") == 1


# -- train -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [[], ["train"]], ids=["implied", "named"])
def test_train_prints_its_directory_last(first: list[str], call: Call, tmp_path: Path) -> None:
    config = tiny(tmp_path, san=True)
    code, out, err = call(*first, *flags(config))
    assert code == 0
    *table, last = out.splitlines()
    assert Path(last).parent == tmp_path / "Pendulum-v1"
    assert read_config(Path(last)) == config
    assert read_record(Path(last))["status"] == "finished"
    assert "deterministic evaluation" in "\n".join(table)
    assert re.search(r"firing rate, layer 1 .* 0\.\d{3}", "\n".join(table))
    assert "100.0%, step 160 of 160" in err and "evaluation -" in err
    assert "%" not in out
    assert (Path(last) / "plots" / "learning_curve.png").stat().st_size > 5000


def test_train_ends_with_a_video(call: Call, tmp_path: Path) -> None:
    _, out, _ = call(*flags(tiny(tmp_path, video=True, total_steps=40)))
    (video,) = (Path(out.splitlines()[-1]) / "videos").iterdir()
    assert video.name == "step-40.mp4"
    length, height, *rest = iio.imread(video).shape
    assert (length, rest) == (40, [500, 3])
    assert height > 500  # a caption under the frame


def test_two_runs_of_a_name_are_refused(run_dir: Path, call: Call) -> None:
    runs = run_dir.parent.parent
    code, out, err = call(*flags(tiny(runs, name="run")))
    assert (code, out) == (2, "")
    assert f"{run_dir} exists" in err


# -- resume ----------------------------------------------------------------------------------------


def test_a_finished_run_says_so_and_does_nothing(run_dir: Path, call: Call) -> None:
    files = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    code, out, err = call("--resume", run_dir)
    assert (code, out) == (0, f"{run_dir}\n")
    assert "is finished: nothing to do" in err
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == files


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--seed", "5"], "seed"),
        (["--learning.gamma", "0.5"], "learning.gamma"),
        (["--actor.hidden", "8", "8"], "actor.hidden"),
        (["--learning.tau", "0.5", "--num-envs", "1"], "num_envs, learning.tau"),
        (["--env", "BipedalWalker-v3"], "no --config, no --env"),
        (["--config", "some.yaml"], "no --config, no --env"),
        (["--checkpoint", "first"], "--checkpoint"),
    ],
)
def test_a_resume_refuses_other_changes_by_name(
    words: list[str], named: str, run_dir: Path, call: Call
) -> None:
    code, out, err = call("--resume", run_dir, *words)
    assert (code, out) == (2, "")
    assert named in err


def test_a_resume_takes_what_may_change(call: Call, tmp_path: Path) -> None:
    config = tiny(tmp_path, name="run")
    Manager(config).train()
    run = tmp_path / "Pendulum-v1" / "run"
    code, out, _ = call("train", "--resume", run, "--total-steps", "200", "--log-every", "10")
    assert (code, out.splitlines()[-1]) == (0, str(run))
    assert load_state(run)["counters"]["step"] == 200
    changed = {"total_steps": 200, "log_every": 10}
    assert read_config(run) == config.model_copy(update=changed)


def test_a_resume_from_the_best_says_that_it_refills(call: Call, tmp_path: Path) -> None:
    """case 27"""
    Manager(tiny(tmp_path, name="run")).train()
    run = tmp_path / "Pendulum-v1" / "run"
    words = ["--resume", run, "--checkpoint", "best", "--total-steps", "300"]
    code, _, err = call(*words)
    assert code == 0
    assert "best.pt has no buffer: refilling to" in err


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_run_that_can_go_on(
    kind: signal.Signals, call: Call, tmp_path: Path
) -> None:
    """case 29: exit 130 or 143 with a checkpoint; the resumed run ends with the weights and the
    metrics of a run that was left alone. Meanwhile no other process may touch it."""
    san = kind is signal.SIGTERM
    run = tmp_path / "Pendulum-v1" / "run"
    forever = tiny(tmp_path, san=san, name="run", total_steps=10**8, eval_every=40)
    process = start("runner.py", *flags(forever))
    wait_for(lambda: (run / "checkpoints" / "last.pt").exists(), process)
    code, out, err = call("--resume", run)
    assert (code, out) == (2, "") and "in use by another process" in err
    process.send_signal(kind)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + kind
    assert out == f"{run}\n"
    assert f"go on with: python runner.py train --resume {run}" in err
    assert "Traceback" not in err
    assert read_record(run)["status"] == "interrupted"

    step = load_state(run)["counters"]["step"]
    code, out, _ = call("--resume", run, "--total-steps", str(step + 60))
    assert (code, out.splitlines()[-1]) == (0, str(run))
    alone = forever.model_copy(update={"total_steps": step + 60, "name": "alone"})
    Manager(alone).train()
    assert differences(comparable(run), comparable(run.with_name("alone"))) == []


def test_a_signal_to_the_whole_process_group_ends_a_run_cleanly(tmp_path: Path) -> None:
    """case 29: a cluster signals the environments' processes too; they are the run's to end."""
    run = tmp_path / "Pendulum-v1" / "run"
    forever = tiny(tmp_path, name="run", total_steps=10**8, async_envs=True)
    process = start("runner.py", *flags(forever), new_group=True)
    wait_for(lambda: (run / "checkpoints" / "last.pt").exists(), process)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (143, f"{run}\n")
    assert "Traceback" not in err
    assert read_record(run)["status"] == "interrupted"


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_like_one_left_alone(call: Call, tmp_path: Path) -> None:
    """case 28: SIGKILL at any moment, while a checkpoint is written among them."""
    run = tmp_path / "Pendulum-v1" / "run"
    config = tiny(tmp_path, san=True, name="run", total_steps=3000, checkpoint_every=2)
    words = flags(config)
    for kill in range(6):
        reached = load_state(run)["counters"]["step"] if kill else 0
        process = start("runner.py", *words)
        words = ["--resume", str(run)]

        def further(reached: int = reached) -> bool:
            last = run / "checkpoints" / "last.pt"
            return last.exists() and load_state(run)["counters"]["step"] > reached + 60

        wait_for(further, process)
        time.sleep(0.01 * kill)
        process.kill()
        process.communicate()
    assert load_state(run)["counters"]["step"] < 3000
    assert call("--resume", run)[0] == 0
    Manager(config.model_copy(update={"name": "alone"})).train()
    assert differences(comparable(run), comparable(run.with_name("alone"))) == []


STUCK = """
import json, sys, time
from conftest import Line
from sansac import Config, Manager

class Stuck(Line):
    def step(self, action):
        if self.life == 70:
            print("stuck", flush=True)
            time.sleep(300)
        return super().step(action)

Manager(Config(**json.loads(sys.argv[1])), make_env=Stuck).train()
"""


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """case 29: even amid a step that does not end; what was saved before is there."""
    config = tiny(tmp_path, env="Line", name="run", num_envs=1, checkpoint_every=50)
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n{STUCK}"
    process = start("-c", code, json.dumps(config.dump()))
    assert process.stdout and process.stdout.readline() == "stuck\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)  # the first waits for the step
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert load_state(tmp_path / "Line" / "run")["counters"]["step"] == 50
    process.communicate()


# -- evaluate --------------------------------------------------------------------------------------


def evaluated(call: Call, *words: str | Path) -> dict[str, Any]:
    code, out, err = call("evaluate", *words, "--json")
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


def test_evaluate_prints_one_json_object(run_dir: Path, call: Call) -> None:
    result = evaluated(call, run_dir, "--episodes", "4", "--seed", "3")
    spiking = read_config(run_dir).san
    assert list(result) == KEYS + ["firing_rate"] * spiking
    expected = {"env": "Pendulum-v1", "checkpoint": "last", "step": 160, "episodes": 4, "seed": 3}
    assert expected.items() <= result.items()
    assert result["actor"] == ("spiking" if spiking else "dense")
    returns = result["returns"]
    assert len(returns) == 4 and len(set(returns)) == 4
    assert result["return_mean"] == pytest.approx(sum(returns) / 4)
    assert result["return_iqm"] == pytest.approx(sum(sorted(returns)[1:3]) / 2)
    assert (result["return_min"], result["return_max"]) == (min(returns), max(returns))
    assert result["length_mean"] == 40
    if spiking:
        assert len(result["firing_rate"]) == 2


def test_evaluate_repeats_itself(run_dir: Path, call: Call) -> None:
    words = (run_dir, "--episodes", "3", "--seed", "8")
    first = evaluated(call, *words)
    assert evaluated(call, *words) == first
    assert evaluated(call, run_dir, "--episodes", "3", "--seed", "9")["returns"] != first["returns"]
    sampled = evaluated(call, *words, "--stochastic")
    assert sampled["returns"] != first["returns"]
    assert evaluated(call, *words, "--stochastic") == sampled


def test_evaluate_repeats_the_runs_own_final_evaluation(run_dir: Path, call: Call) -> None:
    final = read_record(run_dir)["final"]
    result = evaluated(call, run_dir, "--episodes", "2")
    assert result == {**final, "checkpoint": "last"}


def test_evaluate_disturbs_what_the_policy_observes(run_dir: Path, call: Call) -> None:
    words = (run_dir, "--episodes", "2")
    noisy = evaluated(call, *words, "--noise", "0.5")
    assert noisy["noise"] == 0.5 and noisy["returns"] != evaluated(call, *words)["returns"]
    assert evaluated(call, *words, "--noise", "0.5") == noisy

    blind = evaluated(call, *words, "--dropout", "1")  # nothing but zeros: one action for ever
    manager = Manager.load(run_dir)
    action = manager.policy(np.zeros(3, np.float32))
    env = Episodic(manager.evaluation_env())
    seeds = [episode_seed(EVALUATION, 0, i) for i in range(2)]
    assert blind["returns"] == [run_episode(lambda _: action, env, seed)[0] for seed in seeds]

    code, out, _ = call("evaluate", *words, "--dropout", "0.25")
    assert code == 0 and "0, 0.25" in out
    code, _, err = call("evaluate", *words, "--dropout", "1.5")
    assert code == 2 and "dropout from 0 to 1, found 0.0 and 1.5" in err


def test_evaluate_takes_any_checkpoint(run_dir: Path, call: Call, tmp_path: Path) -> None:
    def steps(*words: str | Path) -> tuple[Any, Any]:
        result = evaluated(call, run_dir, "--episodes", "1", *words)
        return result["step"], result["checkpoint"]

    checkpoints = run_dir / "checkpoints"
    moved = tmp_path / "moved.pt"
    moved.write_bytes((checkpoints / "previous.pt").read_bytes())
    best = load_state(run_dir, "best")["counters"]["step"]
    assert steps() == steps("--checkpoint", "last") == (160, "last")
    assert steps("--checkpoint", "best") == (best, "best")
    assert steps("--checkpoint", "previous") == (80, "previous")
    assert steps("--checkpoint", moved) == (80, str(moved))
    code, _, err = call("evaluate", run_dir, "--checkpoint", "worst")
    assert code == 1 and err == "error: worst does not exist\n"


def test_evaluate_takes_an_agent_directory(run_dir: Path, call: Call) -> None:
    agent = run_dir.parent / "agent"
    result = evaluated(call, agent, "--episodes", "2")
    assert result["checkpoint"] == str(agent / "agent.pt")
    run = evaluated(call, run_dir, "--episodes", "2")
    assert {**result, "checkpoint": "last"} == run


def test_evaluate_prints_a_table(run_dir: Path, call: Call) -> None:
    numbers = evaluated(call, run_dir, "--episodes", "2")
    for words, kind in (([], "deterministic"), (["--stochastic"], "stochastic")):
        code, out, _ = call("evaluate", run_dir, "--episodes", "2", *words)
        assert code == 0
        assert f"{kind} evaluation" in out
        shown = f"{numbers['return_mean']:.1f} ± {numbers['return_std']:.1f}" in out
        assert shown == (kind == "deterministic")
        assert ("firing rate, layer 0" in out) == read_config(run_dir).san


def test_evaluate_films_the_first_episode(run_dir: Path, call: Call) -> None:
    code, _, err = call("evaluate", run_dir, "--episodes", "1", "--seed", "2", "--video")
    assert code == 0
    video = run_dir / "videos" / "evaluation-seed2.mp4"
    assert f"video: {video}" in err
    frames = iio.imread(video)
    assert frames.shape[::2] == (40, 500) and frames.shape[1] > 500
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 50, "the pendulum moves"


def test_an_interrupted_evaluation_is_no_traceback(
    run_dir: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt  # what Python's own handler of SIGINT does

    monkeypatch.setattr(Manager, "evaluate", interrupt)
    code, out, err = call("evaluate", run_dir)
    assert (code, out, err.strip()) == (130, "", "error: interrupted")


# -- play ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("display", [None, ":97"])
def test_play_without_a_display_says_how_to_get_a_video(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, display: str | None
) -> None:
    """In a process of its own: a display that answered once is remembered."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    process = start("runner.py", "play", str(run_dir))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert "display" in err and f"`python runner.py evaluate {run_dir} --video` films" in err


def test_play_shows_the_episodes_of_the_evaluation(
    run_dir: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    words = [run_dir, "--checkpoint", "best", "--episodes", "2", "--seed", "3"]
    _, out, _ = call("evaluate", *words, "--json")
    returns = json.loads(out)["returns"]
    code, out, _ = call("play", *words)
    assert code == 0
    assert out.splitlines() == [f"episode {i}: return {r:.1f}" for i, r in enumerate(returns)]


def test_closing_the_window_ends_play(
    run_dir: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gymnasium.envs.classic_control import PendulumEnv

    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    step, steps = PendulumEnv.step, []

    def close_at_the_tenth(self: PendulumEnv, action: Any) -> Any:
        import pygame

        steps.append(action)
        if len(steps) == 10:
            pygame.event.post(pygame.event.Event(pygame.QUIT))
        return step(self, action)

    monkeypatch.setattr(PendulumEnv, "step", close_at_the_tenth)
    assert call("play", run_dir, "--episodes", "50")[:2] == (0, "")
    assert len(steps) == 10


# -- progress --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["evaluate", "inspect"])
def test_commands_tell_their_progress_without_a_terminal(
    run_dir: Path, call: Call, command: str, tmp_path: Path
) -> None:
    words = {"evaluate": ["--episodes", "3"], "inspect": ["--out", tmp_path / "out"]}[command]
    code, _, err = call(command, run_dir, *words)
    assert code == 0
    expected = {"evaluate": "evaluating: 1 of 3 episodes", "inspect": "inspecting: an episode"}
    assert err.startswith(expected[command])
