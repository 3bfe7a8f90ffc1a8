"""The training loop: schedules, evaluation, early stop, and resumes that are exact to the bit."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Line, comparable, differences, load_state, start, tiny, wait_for
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from hypothesis import given, settings
from hypothesis import strategies as st

from sansac.callbacks import StopAtReturn
from sansac.checkpoint import CheckpointError, locked, read_config, read_record
from sansac.config import Config, ConfigError
from sansac.environments import NonFiniteError
from sansac.manager import CHANGEABLE, Manager, crossed
from sansac.replay import Batch

WALKER: dict[str, Any] = {"env": "BipedalWalker-v3", "env_kwargs": {"max_episode_steps": 60}}


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def series(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), row[tag]) for row in rows(run_dir) if tag in row]


def trained(config: Config, **arguments: Any) -> Manager:
    manager = Manager(config, **arguments)
    manager.train()
    return manager


def before(manager: Manager, method: str, action: Callable[[], None]) -> None:
    """Call `action` before each call of a method."""
    original = getattr(manager, method)

    def wrapped(*arguments: Any) -> Any:
        action()
        return original(*arguments)

    setattr(manager, method, wrapped)


def terminate_at(manager: Manager, step: int, method: str = "learn") -> None:
    """Let a real SIGTERM arrive at a step of training, while `method` is about to run."""

    def action() -> None:
        if manager.step >= step and not manager.interrupted:
            signal.raise_signal(signal.SIGTERM)

    before(manager, method, action)


# -- resumes ---------------------------------------------------------------------------------------

STACKS: dict[str, dict[str, Any]] = {
    "pendulum-dense": {
        "learning": {"n_step": 3, "rate_factor": "linear:1:0.1:0.5..1"},
        "actor": {"batch_norm": True, "average": 0.1},
    },
    "pendulum-spiking": {
        "san": True,
        "num_envs": 1,
        "learning": {"update_to_data": 0.2},
        "actor": {"average": 0.5},
        "spiking": {
            "encoder": "population", "decoder": "population", "neuron": "cuba", "log_std": "mlp",
            "log_std_learning_rate": 1e-4,
        },
    },
    "pendulum-every-part": {
        "san": True,
        "num_envs": 1,
        "learning": {"update_to_data": 0.3},
        "actor": {"batch_norm": True, "batch_norm_momentum": "kalman", "reestimate_every": 7},
        "spiking": {
            "encoder": "poisson", "decoder": "population", "neuron": "plif", "time_steps": 3,
            "learn_threshold": True, "output_connections": True, "charge_noise": 0.1,
            "transmission_noise": 0.1, "firing_penalty": 1.0, "surrogate_width": "linear:3:1",
        },
    },
    "pendulum-by-return": {
        "san": True,
        "learning": {"update_to_data": 0.1},
        "spiking": {
            "encoder": "population-current", "decoder": "membrane", "neuron": "alif",
            "surrogate_width": "return:3:1:-600..0",
        },
    },
    "walker-dense": {
        **WALKER,
        "num_envs": 3,
        "learning": {"n_step": 2},
        "critic": {"layer_norm": True, "quantiles": 5, "drop": 2},
        "replay": {"capacity": 100},
    },
    "walker-spiking": {
        **WALKER,
        "san": True,
        "learning": {"n_step": 3, "rate_factor": "linear:1:0.1:0.6..1"},
        "actor": {"batch_norm": True, "average": 0.2},
        "critic": {"quantiles": 5, "drop": 2},
    },
}  # fmt: skip


@pytest.mark.parametrize("stack", STACKS)
def test_a_run_that_was_split_equals_the_run_that_was_not(stack: str, tmp_path: Path) -> None:
    """case 27: weights, optimisers, buffer, streams, environments and metrics, to the bit.

    The run is split by SIGTERM where an evaluation is due, and by copies of its directory as a
    kill would leave it: some steps, and rows of metrics, beyond its checkpoint.
    """
    config = tiny(tmp_path, **STACKS[stack])
    whole = Manager(config)
    killed: list[Path] = []

    def copy_run() -> None:
        if whole.step >= [90, 130, 10_000][len(killed)] and whole.saved_step:
            killed.append(shutil.copytree(whole.directory, tmp_path / f"killed-{len(killed)}"))

    before(whole, "collect", copy_run)
    whole.train()
    expected = comparable(whole.directory)
    assert expected["state"]["counters"]["updates"] > 10
    assert len(killed) == 2

    split = Manager(config)
    terminate_at(split, 80)
    assert split.train() == {}
    assert split.interrupted == signal.SIGTERM
    assert read_record(split.directory)["status"] == "interrupted"
    for run_dir in [split.directory, *killed]:
        resumed = Manager.resume(run_dir)
        assert 0 < resumed.step < whole.step
        resumed.train()
        assert differences(comparable(run_dir), expected) == []
        assert read_record(run_dir)["status"] == "finished"


@pytest.mark.slow
def test_environments_in_processes_of_their_own_make_no_difference(tmp_path: Path) -> None:
    """A split run with asynchronous environments equals a whole one with synchronous ones."""
    config = tiny(tmp_path, normalize_observations=False)
    expected = comparable(trained(config).directory)
    split = Manager(config.model_copy(update={"async_envs": True}))
    terminate_at(split, 90)
    split.train()
    assert split.interrupted
    Manager.resume(split.directory).train()
    assert differences(comparable(split.directory), expected) == []


def test_a_run_can_be_split_at_any_step(tmp_path: Path) -> None:
    """case 27: where updates, log rows, evaluations or checkpoints are due, and where none is."""
    learning = {"update_to_data": 0.15, "n_step": 2}
    config = tiny(tmp_path, learning=learning, log_every=4)
    expected = comparable(trained(config).directory)
    for at in (80, 82, 84, 86, 118, 158):
        split = Manager(config)
        terminate_at(split, at)
        split.train()
        assert split.step == at
        Manager.resume(split.directory).train()
        assert differences(comparable(split.directory), expected) == [], at


def test_a_signal_ends_an_evaluation_which_the_resume_makes_up_for(tmp_path: Path) -> None:
    """case 29: evaluations are the longest part of the loop; both kinds are cut short."""
    config = tiny(tmp_path)
    expected = comparable(trained(config).directory)
    for at in (80, 160):
        split = Manager(config)
        terminate_at(split, at, "evaluate")
        assert split.train() == {}
        assert split.step == at and split.evaluated_step < at
        resumed = Manager.resume(split.directory)
        assert not resumed.finished
        assert resumed.train()["episodes"] == 2
        assert differences(comparable(split.directory), expected) == []


def test_seconds_go_on_through_a_resume(tmp_path: Path) -> None:
    manager = Manager(tiny(tmp_path))
    terminate_at(manager, 100)
    manager.train()
    Manager.resume(manager.directory).train()
    times = [row["time"] for row in rows(manager.directory)]
    assert times == sorted(times) and times[0] > 0


def test_a_run_killed_before_its_first_checkpoint_restarts_at_0(tmp_path: Path) -> None:
    """A real SIGKILL: what the process had buffered is lost, the run directory stays."""
    config = tiny(tmp_path, checkpoint_every=10**9, eval_every=0, log_every=2)
    long = config.model_copy(update={"total_steps": 10**8, "name": "killed"})
    code = "import sys, json; from sansac import Config, Manager; "
    code += "Manager(Config(**json.loads(sys.argv[1]))).train()"
    process = start("-c", code, json.dumps(long.dump()))
    run_dir = tmp_path / "Pendulum-v1" / "killed"
    metrics = run_dir / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 30, process)
        with pytest.raises(ConfigError, match="is in use by another process"):
            Manager.resume(run_dir, total_steps=160).train()
    finally:
        process.kill()
        process.communicate()
    assert not (run_dir / "checkpoints").exists()
    assert read_record(run_dir)["status"] == "running"
    resumed = Manager.resume(run_dir, total_steps=160)
    assert resumed.step == 0
    resumed.train()
    assert differences(comparable(run_dir), comparable(trained(config).directory)) == []


def test_a_resume_without_a_buffer_refills_it_before_it_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """case 27: best.pt holds no buffer. It is said, the policy collects, and afterwards updates
    come at their ratio: none is made up for."""
    config = tiny(tmp_path)
    first = trained(config)
    at, done = (load_state(first.directory, "best")["counters"][k] for k in ("step", "updates"))
    manager = Manager.resume(first.directory, which="best", total_steps=at + 100)
    assert (manager.step, manager.updates) == (at, done)
    capsys.readouterr()
    history: list[tuple[int, int, int]] = []
    before(
        manager,
        "learn",
        lambda: history.append((manager.step, manager.updates, manager.replay.size)),
    )
    manager.train()
    assert f"best.pt has no buffer: refilling to {at + 40}" in capsys.readouterr().err
    for step, updates, size in history:
        assert size == step - at
        assert updates == done + max(0, (step - 2 - at - 40) // 2)
    assert manager.updates == done + 30
    again = Manager.resume(first.directory, total_steps=at + 120)
    again.train()
    assert again.updates == done + 40


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    manager = trained(tiny(tmp_path))
    metrics = (manager.directory / "metrics.jsonl").read_bytes()
    resumed = Manager.resume(manager.directory)
    assert resumed.finished
    assert resumed.train() == read_record(manager.directory)["final"]
    assert (manager.directory / "metrics.jsonl").read_bytes() == metrics


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    manager = trained(tiny(tmp_path))
    resumed = Manager.resume(manager.directory, total_steps=200)
    assert not resumed.finished
    resumed.train()
    assert resumed.step == 200
    assert read_config(manager.directory).total_steps == 200
    assert Manager.resume(manager.directory).finished


def test_a_resume_changes_no_more_than_it_may(tmp_path: Path) -> None:
    manager = Manager(tiny(tmp_path))
    terminate_at(manager, 80)
    manager.train()
    for changes, name in (
        ({"seed": 1}, "seed"),
        ({"learning": {"gamma": 0.5}}, "learning.gamma"),
        ({"actor": {"hidden": [8]}}, "actor.hidden"),
        ({"num_envs": 1}, "num_envs"),
    ):
        with pytest.raises(ConfigError, match=rf"^{name}: cannot change when a run is resumed"):
            Manager.resume(manager.directory, **changes)
    with pytest.raises(ConfigError, match=r"^learning\.tau, learning\.n_step: cannot"):
        Manager.resume(manager.directory, learning={"tau": 0.1, "n_step": 2})
    allowed = {"total_steps": 100, "log_every": 7, "eval_episodes": 1, "video": False}
    assert set(allowed) <= set(CHANGEABLE)
    assert Manager.resume(manager.directory, **allowed).config.log_every == 7


def test_the_number_of_threads_is_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum differs between one thread and two, so a resume elsewhere keeps what the run had."""
    monkeypatch.setattr("sansac.manager.auto_threads", lambda: 1)
    manager = Manager(tiny(tmp_path, threads="auto"))
    terminate_at(manager, 80)
    manager.train()
    assert read_record(manager.directory)["threads"] == 1
    monkeypatch.setattr("sansac.manager.auto_threads", lambda: 2)
    assert Manager.resume(manager.directory).threads == 1


def test_temperature_and_its_optimiser_move_after_a_resume(tmp_path: Path) -> None:
    """case 14"""
    manager = Manager(tiny(tmp_path, sac={"target_entropy": -0.7}))
    terminate_at(manager, 120)
    manager.train()
    saved = load_state(manager.directory)["algorithm"]
    resumed = Manager.resume(manager.directory)
    algorithm = resumed.algorithm
    assert algorithm.log_alpha.item() == saved["log_alpha"].item() != 0
    assert algorithm.target_entropy == -0.7
    state = algorithm.optimizers["temperature"].state_dict()["state"]
    assert differences(state, saved["optimizers"]["temperature"]["state"]) == []
    assert float(state[0]["step"]) == manager.updates > 0
    resumed.train()
    assert algorithm.log_alpha.item() != saved["log_alpha"].item()


def test_a_manager_trains_once(tmp_path: Path) -> None:
    """A second train() would start from empty environments and an empty buffer."""
    manager = Manager(tiny(tmp_path))
    terminate_at(manager, 90)
    manager.train()
    state = (manager.directory / "checkpoints" / "last.pt").read_bytes()
    with pytest.raises(RuntimeError, match=r"Manager\.resume"):
        manager.train()
    assert (manager.directory / "checkpoints" / "last.pt").read_bytes() == state
    assert len(manager.evaluate(episodes=2)["returns"]) == 2, "the signal is over"


def test_an_agent_is_not_resumed(tmp_path: Path) -> None:
    manager = trained(tiny(tmp_path / "runs"))
    manager.save(tmp_path / "agent")
    with pytest.raises(ConfigError, match="agent directory: only a run can be resumed"):
        Manager.resume(tmp_path / "agent")
    with pytest.raises(RuntimeError, match=r"Manager\.resume"):
        Manager.load(manager.directory).train()


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])
def test_a_seed_decides_every_number(san: bool, tmp_path: Path) -> None:
    a, b, c = (trained(tiny(tmp_path, san=san, seed=seed)) for seed in (3, 3, 4))
    assert differences(comparable(a.directory), comparable(b.directory)) == []
    for x, y in zip(a.algorithm.actor.parameters(), c.algorithm.actor.parameters(), strict=True):
        assert not torch.equal(x, y)


def test_evaluating_leaves_training_untouched(tmp_path: Path) -> None:
    """case 8: with evaluations, more of them, of other kinds, or none, the same agent."""
    config = tiny(tmp_path, **WALKER)

    def final(manager: Manager) -> dict[str, Any]:
        manager.train()
        state = load_state(manager.directory)
        return {key: state[key] for key in ("algorithm", "rollout", "replay")}

    expected = final(Manager(config))
    never = Manager(config.model_copy(update={"eval_every": 0, "eval_episodes": 1}))
    assert differences(final(never), expected) == []
    often = Manager(config)

    def evaluate() -> None:
        if often.step % 40 == 0:
            often.evaluate(1, often.step, stochastic=True)

    before(often, "learn", evaluate)
    assert differences(final(often), expected) == []


def test_an_evaluation_does_not_depend_on_what_ran_before(tmp_path: Path) -> None:
    """case 8: BipedalWalker's world survives a reset; an evaluation must not see that."""
    manager = Manager(tiny(tmp_path, env="BipedalWalker-v3", san=True))
    alone = manager.evaluate(episodes=3, seed=5)
    manager.evaluate(episodes=2, seed=77, stochastic=True)
    assert manager.evaluate(episodes=3, seed=5) == alone
    longer = manager.evaluate(episodes=5, seed=5)
    assert longer["returns"][:3] == alone["returns"]
    assert manager.evaluate(episodes=3, seed=6)["returns"] != alone["returns"]


def test_every_evaluation_of_a_run_has_episodes_of_its_own(tmp_path: Path) -> None:
    """The policy that is kept as the best was not chosen on the episodes that judge it."""
    manager = Manager(tiny(tmp_path, total_steps=240))
    seeds: list[int] = []
    original = manager.evaluate
    manager.evaluate = lambda n, seed: seeds.append(seed) or original(n, seed)  # type: ignore
    manager.train()
    assert seeds == [80, 160, 0]


# -- schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [1, 3, 8])
@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.5])
def test_updates_keep_their_ratio_to_steps(num_envs: int, ratio: float, tmp_path: Path) -> None:
    """case 19: at every step, for any number of environments, fractions included."""
    learning = {"update_to_data": ratio, "batch_size": 4, "learning_starts": 31}
    manager = Manager(
        tiny(tmp_path, num_envs=num_envs, learning=learning, total_steps=80, eval_every=0)
    )
    seen: list[tuple[int, int]] = []
    before(manager, "collect", lambda: seen.append((manager.step, manager.updates)))
    manager.train()
    assert manager.step == -(-80 // num_envs) * num_envs
    for step, updates in [*seen, (manager.step, manager.updates)]:
        tenths = round(ratio * 10) * max(0, step - 31)
        assert updates == tenths // 10


@given(
    ratio=st.fractions("1/100", 20, max_denominator=100),
    num_envs=st.integers(1, 64),
    starts=st.integers(0, 5000),
    rounds=st.integers(1, 400),
)
@settings(max_examples=60)
def test_the_arithmetic_of_the_ratio(ratio: Any, num_envs: int, starts: int, rounds: int) -> None:
    """case 19: to within rounding to a whole update, however steps are cut into rounds."""
    manager = object.__new__(Manager)
    manager.config = tiny(
        num_envs=num_envs, learning={"update_to_data": float(ratio), "batch_size": 1,
                                     "learning_starts": starts + 1}
    )  # fmt: skip
    manager.learning_from = (starts, 0)
    manager.step = manager.updates = 0
    manager.learn_seconds = 0.0
    manager.best_return = None
    manager.update_to_data, manager.controllers, manager.metrics = float(ratio), {}, {}

    class Nothing:
        def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
            return lambda *arguments: {}

    manager.algorithm = manager.replay = manager.progress = Nothing()  # type: ignore[assignment]
    manager.update = lambda batch: {}
    for _ in range(rounds):
        manager.step += num_envs
        manager.learn()
        assert manager.updates == max(0, (manager.step - starts) * ratio // 1)


@given(st.integers(0, 10**6), st.integers(0, 2000), st.integers(0, 500))
def test_a_multiple_is_crossed_once(last: int, ahead: int, every: int) -> None:
    step = last + ahead
    inside = every > 0 and any(n % every == 0 for n in range(last + 1, step + 1))
    assert crossed(step, last, every) == inside


def test_rows_come_at_their_steps(tmp_path: Path) -> None:
    manager = trained(tiny(tmp_path, num_envs=3, total_steps=170))
    run = manager.directory
    training = [step for step, _ in series(run, "train/buffer_size")]
    assert training == [21, 42, 60, 81, 102, 120, 141, 162]
    assert [step for step, _ in series(run, "eval/return_mean")] == [81, 162, 171]
    assert load_state(run, "previous")["counters"]["step"] == 162
    assert load_state(run)["counters"]["step"] == 171
    assert all("loss/critic" in row for row in rows(run) if row.get("train/buffer_size", 0) > 42)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_every_finished_episode_is_logged(num_envs: int, tmp_path: Path) -> None:
    """case 3: with its undiscounted return and its length, one environment or many."""
    config = tiny(tmp_path, env="Line", num_envs=num_envs, total_steps=60 * num_envs)
    run = trained(config, make_env=Line).directory
    returns = [value for _, value in series(run, "train/episode_return")]
    lengths = [value for _, value in series(run, "train/episode_length")]
    # the n-th episode of an environment returns 5 * 10 n + (1 + 2 + 3 + 4 + 5)
    expected = [50.0 * n + 15 for n in range(1, 13) for _ in range(num_envs)]
    assert returns == expected
    assert lengths == [5.0] * 12 * num_envs
    assert series(run, "train/episodes")[-1] == (60 * num_envs, 12 * num_envs)


def test_the_learning_rate_anneals_over_its_share(tmp_path: Path) -> None:
    rate = 3e-4
    run = trained(tiny(tmp_path, learning={"rate_factor": "linear:1:0.1:0.5..1"})).directory
    for step, value in series(run, "sac/learning_rate"):
        left = 1 - step / 160
        factor = 1.0 if left >= 0.5 else 0.1 + 0.9 * left / 0.5
        assert value == pytest.approx(rate * factor)
    assert series(run, "sac/learning_rate")[-1][1] == pytest.approx(0.1 * rate)


def test_a_resumed_run_has_the_surrogate_width_of_its_step(tmp_path: Path) -> None:
    """The first update after a resume uses it, and so does every one of an unbroken run."""
    spiking = {"surrogate_width": "linear:3:1"}
    manager = Manager(tiny(tmp_path, san=True, spiking=spiking))
    terminate_at(manager, 100)
    manager.train()
    resumed = Manager.resume(manager.directory)
    update, seen = resumed.algorithm.update, []

    def spy(batch: Any) -> Any:
        seen.append((resumed.step, resumed.algorithm.actor.layers[0].surrogate_width))
        return update(batch)

    resumed.algorithm.update = spy  # type: ignore[method-assign]
    resumed.train()
    assert seen[0][0] == 102
    assert [width for _, width in seen] == pytest.approx([3 - 2 * step / 160 for step, _ in seen])


@pytest.mark.parametrize(
    ("spiking", "backend"),
    [({"neuron": "alif"}, "spikingjelly"), ({"neuron": "clif", "backend": "torch"}, "spikingjelly"),
     ({"backend": "torch"}, "torch")],
)  # fmt: skip
def test_the_backend_shown_is_the_one_in_use(spiking: dict[str, str], backend: str) -> None:
    """case 24: neurons without a kernel are SpikingJelly's, whatever was asked for."""
    assert Manager(tiny(san=True, spiking=spiking)).backend == backend


# -- warnings --------------------------------------------------------------------------------------


def warnings_of(manager: Manager, capsys: pytest.CaptureFixture[str]) -> list[str]:
    manager.train()
    return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]


def test_a_silent_layer_is_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to try; a layer behind it is silent too."""
    found = warnings_of(Manager(tiny(tmp_path, san=True, spiking={"v_threshold": 50.0})), capsys)
    assert [line.partition("layer ")[2][:1] for line in found] == ["0", "1"]
    assert all("100% of the neurons" in line and "v_threshold" in line for line in found)


def test_a_saturated_layer_is_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = Manager(tiny(tmp_path, san=True))
    torch.nn.init.constant_(manager.algorithm.actor.layers[1].linear.bias, 20.0)
    (found,) = warnings_of(manager, capsys)
    assert "100% of the neurons of spiking layer 1 fire at every step" in found
    assert "firing_penalty" in found


def test_observations_outside_the_encoders_fields_are_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spiking = {"encoder": "population", "input_range": 0.3, "v_threshold": 0.1}
    (found,) = warnings_of(Manager(tiny(tmp_path, san=True, spiking=spiking)), capsys)
    assert "of observation entries lie outside" in found and "spiking.input_range" in found


@pytest.mark.parametrize("san", [False, True])
def test_a_healthy_run_warns_of_nothing(
    san: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spiking = {"encoder": "population-current", "v_threshold": 0.1}
    assert warnings_of(Manager(tiny(tmp_path, san=san, spiking=spiking)), capsys) == []


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nan_at", "nan_reward_at"])
def test_a_value_that_is_not_finite_stops_training_at_once(kind: str, tmp_path: Path) -> None:
    """case 7: named, with the last good checkpoint intact."""
    config = tiny(tmp_path, env="Line", num_envs=1, eval_every=0, checkpoint_every=50)
    manager = Manager(config, make_env=lambda: Line(**{kind: 123}))
    entry = r"entry 1 of the observation" if kind == "nan_at" else "the reward"
    with pytest.raises(NonFiniteError, match=rf"environment 0: {entry} is nan at step 3 of its"):
        manager.train()
    assert manager.step == 122
    assert read_record(manager.directory)["status"] == "failed"
    state = load_state(manager.directory)
    assert state["counters"]["step"] == 100
    flat = [x for x in state["algorithm"]["critic"].values() if x.is_floating_point()]
    assert all(x.isfinite().all() for x in flat)
    resumed = Manager.resume(manager.directory, make_env=Line)
    assert resumed.train()["step"] == 160


def test_a_value_that_is_not_finite_stops_an_evaluation_too(tmp_path: Path) -> None:
    """case 7"""
    for kind, named in (("nan_at", "observation"), ("nan_reward_at", "reward is nan")):
        manager = Manager(tiny(env="Line"), make_env=lambda kind=kind: Line(**{kind: 8}))
        with pytest.raises(NonFiniteError, match=rf"step 3.*{named}"):
            manager.evaluate(episodes=3)


def test_a_loss_that_is_not_finite_stops_training(tmp_path: Path) -> None:
    """case 7: what blows up inside is found at the next row of metrics."""
    manager = Manager(tiny(tmp_path))

    def spoil() -> None:
        if manager.step == 60:
            with torch.no_grad():
                next(manager.algorithm.critic.parameters()).fill_(torch.inf)

    before(manager, "learn", spoil)
    with pytest.raises(NonFiniteError, match=r"loss/critic is (nan|inf) at step 60"):
        manager.train()


class Spaces(gym.Env):
    def __init__(self, observation: gym.Space, action: gym.Space) -> None:
        self.observation_space, self.action_space = observation, action


FLAT, UNIT = Box(-1, 1, (3,)), Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("observation", "action", "named"),
    [
        (FLAT, Discrete(4), r"Discrete\(4\)"),
        (Discrete(7), UNIT, r"Discrete\(7\)"),
        (Dict({"a": FLAT}), UNIT, "Dict"),
        (Box(0, 255, (8, 8, 3), np.uint8), UNIT, r"\(8, 8, 3\)"),
        (Box(-1, 1, ()), UNIT, "Box"),
        (FLAT, MultiBinary(3), "MultiBinary"),
        (FLAT, Box(-1, 1, (2, 2)), r"\(2, 2\)"),
        (FLAT, Box(0, 5, (2,), np.int64), "integer"),
        (FLAT, Box(-np.inf, np.inf, (2,)), "infinite action bounds"),
        (FLAT, Box(np.float32([0, 1]), np.float32([1, 1])), "empty range"),
    ],
)  # fmt: skip
def test_an_unsupported_space_is_refused_at_start(
    observation: gym.Space, action: gym.Space, named: str, tmp_path: Path
) -> None:
    """case 6: named, with what is supported."""
    with pytest.raises(ConfigError, match=named) as caught:
        Manager(tiny(tmp_path, env="Odd"), make_env=lambda: Spaces(observation, action))
    assert "'Odd'" in str(caught.value) and "flat Box observation" in str(caught.value)


def test_a_buffer_above_memory_is_refused_with_its_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"9{9} transitions take [\d.]+ GiB,.* at most") as caught:
        Manager(tiny(tmp_path, env="Line", replay={"capacity": 10**9 - 1}), make_env=Wide)
    fits = int(str(caught.value).split("at most ")[1].split()[0])
    Manager(tiny(tmp_path, env="Line", replay={"capacity": fits}), make_env=Wide)
    assert list(tmp_path.iterdir()) == []


class Wide(Line):
    observation_space = Box(-1, 1, (400,))


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"'cuda'; use --device cpu"):
        Manager(tiny(device="cuda"))
    assert Manager(tiny(device="auto")).device == "cpu"


def test_a_backend_that_is_absent_is_refused() -> None:
    """case 24"""
    with pytest.raises(ConfigError, match=r"^spiking\.backend: .*cupy"):
        Manager(tiny(san=True, spiking={"backend": "cupy"}))


# -- early stop ------------------------------------------------------------------------------------


def test_training_stops_at_a_return(tmp_path: Path) -> None:
    """Evaluations of Line return 50 n + 15 for the n-th episode of one environment: the first
    reaches a mean of 90, the last one over one episode does not, and the run stays finished."""
    config = tiny(tmp_path, env="Line", stop_at_return=90.0, final_episodes=1, total_steps=10**6)
    manager = Manager(config, make_env=Line)
    result = manager.train()
    assert manager.step == 80
    assert result["return_mean"] == 65.0
    resumed = Manager.resume(manager.directory, make_env=Line)
    assert resumed.finished and resumed.train() == result
    further = Manager.resume(manager.directory, make_env=Line, stop_at_return=95, total_steps=100)
    assert not further.finished
    further.train()
    assert further.step == 100


def test_the_threshold_is_the_environments_own(tmp_path: Path) -> None:
    manager = Manager(tiny(env="BipedalWalker-v3", env_kwargs={}, stop_at_return="threshold"))
    (stopping,) = manager.callbacks
    assert isinstance(stopping, StopAtReturn) and stopping.threshold == 300
    with pytest.raises(ConfigError, match="stop_at_return: 'Pendulum-v1' names no threshold"):
        Manager(tiny(stop_at_return="threshold"))
    with pytest.raises(ConfigError, match="give a number"):
        Manager(tiny(env="Line", stop_at_return="threshold"), make_env=Line)


# -- from Python -----------------------------------------------------------------------------------


def test_nothing_is_written_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = Manager(tiny(wandb="offline", tensorboard=True, san=True))
    manager.policy(np.zeros(3))
    manager.evaluate(episodes=1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="no run directory before train"):
        manager.directory  # noqa: B018


def test_an_environment_of_ones_own_needs_no_registration(tmp_path: Path) -> None:
    """case 4: actions arrive within each dimension's own bounds and use all of them."""
    made: list[Line] = []

    def make() -> Line:
        made.append(Line(length=7, terminates=False))
        return made[-1]

    config = tiny(tmp_path, env="Line", learning={"learning_starts": 60})
    manager = trained(config, make_env=make)
    assert manager.directory.parent.name == "Line"
    actions = np.array([action for env in made for action in env.actions])
    assert actions.dtype == np.float32 and actions.shape[1:] == (2,)
    assert (actions >= [-1, 2]).all() and (actions <= [3, 6]).all()
    assert (actions.min(0) < [-0.5, 2.5]).all() and (actions.max(0) > [2.5, 5.5]).all()
    loaded = Manager.load(manager.directory, make_env=Line)
    assert loaded.policy(np.zeros(2)).shape == (2,)


def test_a_vector_environment_of_ones_own_is_taken_apart(tmp_path: Path) -> None:
    def make() -> gym.vector.SyncVectorEnv:
        one = lambda: Line(render_mode="rgb_array")  # noqa: E731
        return gym.vector.SyncVectorEnv([one, one])

    manager = trained(tiny(tmp_path, env="Line", video=True), make_env=make)
    assert [value for _, value in series(manager.directory, "train/episode_length")] == [5] * 32
    assert len(list((manager.directory / "videos").glob("*.mp4"))) == 1


def test_a_video_that_fails_costs_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Line):
        def render(self) -> Any:
            raise OSError("no display")

    def broken() -> Line:
        return Broken(render_mode="rgb_array")

    for make, reason in ((Line, 'render_mode is not "rgb_array"'), (broken, "no display")):
        manager = trained(tiny(tmp_path, env="Line", video=True), make_env=make)
        notes = [line for line in capsys.readouterr().err.splitlines() if "no video" in line]
        assert len(notes) == 1 and reason in notes[0]
        assert load_state(manager.directory)["counters"]["step"] == 160
        assert read_record(manager.directory)["status"] == "finished"


def test_the_end_of_training_is_saved_before_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """case 28: neither a signal nor an error while they are drawn costs the final evaluation."""
    manager = Manager(tiny(tmp_path, video=True))
    terminate_at(manager, 160, "record_video")
    result = manager.train()
    assert result and manager.interrupted == signal.SIGTERM
    assert read_record(manager.directory)["status"] == "finished"
    assert Manager.resume(manager.directory).finished

    manager = Manager(tiny(tmp_path))
    monkeypatch.setattr("sansac.manager.plot_learning_curve", fail)
    assert manager.train()["return_mean"] == result["return_mean"]
    assert "no learning curve: disk full" in capsys.readouterr().err
    resumed = Manager.resume(manager.directory)
    assert resumed.finished
    assert resumed.train()["return_mean"] == result["return_mean"]


def fail(*arguments: Any) -> None:
    raise OSError("disk full")


@pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])
def test_the_policy_is_the_tanh_of_the_mean(san: bool) -> None:
    """case 9: deterministic, and scaled to the action's bounds (Pendulum's torque is 2)."""
    manager = Manager(tiny(san=san))
    algorithm = manager.algorithm
    algorithm.norm.update(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * 3 + 1)
    observation = np.float32([0.5, -0.2, 1.5])
    with torch.no_grad():
        normalised = algorithm.norm(torch.from_numpy(observation)[None])
        mean, _ = algorithm.policy_actor(normalised)
    action = manager.policy(observation)
    assert action.dtype == np.float32
    np.testing.assert_allclose(action, 2 * np.tanh(mean[0].numpy()), rtol=1e-6)
    assert (manager.policy(observation) == action).all()
    np.testing.assert_allclose(manager.policy(np.stack([observation] * 4)), [action] * 4, rtol=1e-5)


def test_the_policy_refuses_what_is_no_observation() -> None:
    policy = Manager(tiny()).policy
    for wrong in (np.zeros(4), np.zeros((2, 4)), np.zeros((1, 1, 3)), np.float32(1.0)):
        with pytest.raises(ValueError, match=r"expected an observation of shape \(3,\)"):
            policy(wrong)
    for spoiled in ([0, np.nan, 0], [0, 0, np.inf]):
        with pytest.raises(ValueError, match="not finite"):
            policy(np.array(spoiled))


@pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])
def test_an_agent_is_saved_and_loaded_with_its_normaliser(san: bool, tmp_path: Path) -> None:
    """cases 31 and 34: run directory, best, last and agent directory act as the agent in memory;
    an agent of another device's backend loads here."""
    config = tiny(tmp_path / "runs", san=san, actor={"average": 0.3})
    manager = trained(config)
    observation = np.float32([0.3, 0.9, -2.0])
    manager.save(tmp_path / "agent")
    assert sorted(p.name for p in (tmp_path / "agent").iterdir()) == [
        "README.md", "agent.pt", "config.yaml", "evaluation.json",
    ]  # fmt: skip
    told = json.loads((tmp_path / "agent" / "evaluation.json").read_text())
    assert told["returns"] == manager.evaluate(config.final_episodes)["returns"]
    card = (tmp_path / "agent" / "README.md").read_text()
    assert f"{told['return_mean']:.1f} ± {told['return_std']:.1f}" in card
    assert str(told["commit"]) in card and str(tmp_path) not in card
    Manager.load(tmp_path / "agent").save(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "evaluation.json").read_text()) == told
    assert (tmp_path / "copy" / "README.md").read_text() == card
    for damaged in ({"final": {"step": 160}}, {"final": {**told, "step": 80}}, {}):
        (manager.directory / "run.json").write_text(json.dumps(damaged))
        manager.save(tmp_path / "agent", overwrite=True)
        assert not (tmp_path / "agent" / "evaluation.json").exists()
    for path in (manager.directory, tmp_path / "agent"):
        loaded = Manager.load(path)
        assert loaded.step == 160
        assert differences(
            loaded.algorithm.norm.state_dict(), manager.algorithm.norm.state_dict()
        ) == []  # fmt: skip
        assert (loaded.policy(observation) == manager.policy(observation)).all()
    best = Manager.load(manager.directory, "best")
    saved = load_state(manager.directory, "best")
    assert differences(best.algorithm.norm.state_dict(), dict(saved["algorithm"]["norm"])) == []
    assert float(best.algorithm.norm.count) == saved["counters"]["step"]
    named = Manager.load(tmp_path / "agent", str(manager.directory / "checkpoints" / "best.pt"))
    assert (named.policy(observation) == best.policy(observation)).all()

    text = (tmp_path / "agent" / "config.yaml").read_text()
    for here, there in (("device: cpu", "device: cuda"), ("backend: auto", "backend: cupy")):
        assert here in text
        text = text.replace(here, there)
    (tmp_path / "agent" / "config.yaml").write_text(text)
    elsewhere = Manager.load(tmp_path / "agent")
    assert (elsewhere.policy(observation) == manager.policy(observation)).all()


def test_an_agent_directory_is_not_overwritten_unasked(tmp_path: Path) -> None:
    manager = Manager(tiny())
    manager.save(tmp_path / "new")
    with pytest.raises(ConfigError, match="is not empty"):
        manager.save(tmp_path / "new")
    manager.step = 5
    manager.save(tmp_path / "new", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        manager.save(tmp_path / "file", overwrite=True)
    with pytest.raises(ConfigError, match="expected 1 or more, found 0"):
        manager.evaluate(episodes=0)
    assert Manager.load(tmp_path / "new").step == 5


@pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])
def test_an_agent_can_be_copied_at_any_time(san: bool, tmp_path: Path) -> None:
    """case 23: new, amid updates, and after them; the copy stands on its own."""
    manager = Manager(tiny(tmp_path, san=san))
    copies = [copy.deepcopy(manager.policy)]

    def duplicate() -> None:
        if manager.step == 100:
            copies.append(copy.deepcopy(manager.policy))

    before(manager, "collect", duplicate)
    manager.train()
    copies.append(copy.deepcopy(manager.policy))
    observation = np.float32([0.1, 0.2, 0.3])
    new, middle, last = (c(observation) for c in copies)
    assert (last == manager.policy(observation)).all()
    assert (new == Manager(tiny(san=san)).policy(observation)).all()
    assert (new != middle).any() and (middle != last).any()
    with torch.no_grad():
        for parameter in manager.algorithm.actor.parameters():
            parameter.zero_()
    assert (copies[-1](observation) == last).all()


def test_an_evaluation_lists_what_it_did(tmp_path: Path) -> None:
    manager = Manager(tiny(san=True))
    seen: list[float] = []
    result = manager.evaluate(episodes=3, seed=2, on_episode=seen.append)
    assert list(result) == [
        "env", "actor", "algorithm", "checkpoint", "step", "episodes", "seed", "noise", "dropout",
        "returns", "return_mean", "return_std", "return_iqm", "return_min", "return_max",
        "length_mean", "firing_rate",
    ]  # fmt: skip
    assert result["returns"] == seen and result["actor"] == "spiking"
    assert result["checkpoint"] is None and result["length_mean"] == 40
    assert len(result["firing_rate"]) == 2 and all(0 <= rate <= 1 for rate in result["firing_rate"])
    assert "firing_rate" not in Manager(tiny()).evaluate(episodes=1)


# -- the run directory -----------------------------------------------------------------------------


def test_a_run_leaves_what_rebuilds_it(tmp_path: Path) -> None:
    config = tiny(tmp_path, san=True)
    manager = trained(config)
    run = manager.directory
    assert sorted(p.name for p in run.iterdir() if not p.name.startswith(".")) == [
        "checkpoints", "config.yaml", "metrics.jsonl", "plots", "run.json",
    ]  # fmt: skip
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "best.pt", "last.pt", "previous.pt",
    ]  # fmt: skip
    assert read_config(run) == config
    record = read_record(run)
    assert record["status"] == "finished" and record["step"] == 160
    assert (record["device"], record["threads"]) == ("cpu", 1)
    assert record["backend"] == manager.backend in ("native", "torch")
    assert record["versions"]["torch"] == torch.__version__
    assert record["final"]["returns"]


def test_the_best_agent_is_the_one_that_evaluated_best(tmp_path: Path) -> None:
    manager = trained(tiny(tmp_path, total_steps=400, eval_episodes=1, final_episodes=1))
    evaluations = series(manager.directory, "eval/return_mean")
    assert len(evaluations) == 5
    best = max(value for _, value in evaluations)
    counters = load_state(manager.directory, "best")["counters"]
    assert counters["best_return"] == best
    assert counters["step"] == next(step for step, value in evaluations if value == best)


def test_a_held_run_is_neither_trained_nor_changed(tmp_path: Path) -> None:
    manager = Manager(tiny(tmp_path))
    terminate_at(manager, 90)
    manager.train()
    files = {p: p.read_bytes() for p in manager.directory.rglob("*") if p.is_file()}
    with locked(manager.directory), pytest.raises(ConfigError, match="in use by another process"):
        Manager.resume(manager.directory).train()
    assert {p: p.read_bytes() for p in manager.directory.rglob("*") if p.is_file()} == files


def test_a_run_without_a_checkpoint_cannot_be_loaded(tmp_path: Path) -> None:
    manager = Manager(tiny(tmp_path))
    before(manager, "collect", fail)
    with pytest.raises(OSError, match="disk full"):
        manager.train()
    with pytest.raises(CheckpointError, match=r"last\.pt does not exist$"):
        Manager.load(manager.directory)


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    """Handlers can be set in the main thread alone; elsewhere training goes without them."""
    from threading import Thread

    manager = Manager(tiny(tmp_path))
    thread = Thread(target=manager.train)
    thread.start()
    thread.join()
    assert manager.finished


def test_handlers_are_put_back(tmp_path: Path) -> None:
    old = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    trained(tiny(tmp_path, total_steps=40))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == old


def test_every_update_of_a_round_draws_its_own_minibatch(tmp_path: Path) -> None:
    """case 18: the updates of one round share no draw."""
    config = tiny(tmp_path, num_envs=4, total_steps=60, learning={"update_to_data": 1})
    manager = Manager(config)
    drawn: list[torch.Tensor] = []
    update = manager.algorithm.update

    def watch(batch: Batch) -> dict[str, torch.Tensor]:
        drawn.append(batch.observation)
        return update(batch)

    manager.algorithm.update = watch  # type: ignore[method-assign]
    manager.train()
    assert len(drawn) == 20
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_a_checkpoint_that_another_process_wrote_since_is_not_gone_on_with(tmp_path: Path) -> None:
    """Two processes that resume one run: the second must not go on from a stale state."""
    first = trained(tiny(tmp_path))
    stale = Manager.resume(first.directory, total_steps=240)
    Manager.resume(first.directory, total_steps=200).train()
    with pytest.raises(ConfigError, match=r"last\.pt was written since it was read"):
        stale.train()


def test_an_early_stop_that_is_cut_in_its_final_evaluation_ends_on_resume(tmp_path: Path) -> None:
    """The evaluation that stopped the run is not taken for the one that ends it."""
    manager = Manager(tiny(tmp_path, stop_at_return=-1e6))
    evaluate = manager.evaluate

    def cut(episodes: int = 100, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if args and args[0] == 0:  # the final one's seed
            manager.interrupted = 15
        return evaluate(episodes, *args, **kwargs)

    manager.evaluate = cut  # type: ignore[method-assign]
    assert manager.train() == {}
    again = Manager.resume(manager.directory)
    assert not again.finished
    assert again.train()["episodes"] == 2
    assert Manager.resume(manager.directory).finished


def test_windows_of_an_environment_that_does_not_replay_are_closed(tmp_path: Path) -> None:
    """case 27: a fresh episode after a resume does not end the windows of the one that is lost."""
    config = tiny(tmp_path, learning={"n_step": 5}, total_steps=100, checkpoint_every=20)
    manager = Manager(config)
    manager.train()
    again = Manager.resume(manager.directory, total_steps=140)
    again._resumed["rollout"]["observation"][1] += 1  # environment 1 will not come back to this
    seen: list[np.ndarray] = []
    before(again, "collect", lambda: seen.append(again.replay.pending["open"].copy()))
    again.train()
    assert seen[0][:, 0].sum() == 4
    assert seen[0][:, 1].sum() == 0


def test_one_environment_handed_out_twice_is_refused(tmp_path: Path) -> None:
    env = gym.make("Pendulum-v1")
    manager = Manager(tiny(tmp_path), make_env=lambda: env)
    with pytest.raises(ConfigError, match="make a new one a call"):
        manager.train()
