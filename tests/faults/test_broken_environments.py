"""Environments at fault: training stops, or goes on, as documented; the source is named and the
last good checkpoint stays."""

from __future__ import annotations

import math
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

import broken
import numpy as np
import pytest
import torch
from conftest import Line, comparable, differences, load_state, tiny
from injection import SCRIPT, Harmed, flags

from sansac import environments
from sansac.checkpoint import read_record
from sansac.environments import EnvironmentFault, NonFiniteError
from sansac.evaluation import evaluate
from sansac.manager import Manager

SPOILED = [
    (broken.RaisesInStep, "ValueError: no such joint"),
    (broken.RaisesInReset, "KeyError: 'seed'"),
    (broken.RaisesItsOwn, "Unpicklable: licence 7"),
    (broken.NanObservation, "entry 1 of the observation is nan"),
    (broken.InfiniteObservation, "entry 0 of the observation is inf"),
    (broken.NanReward, "the reward is nan"),
    (broken.InfiniteReward, "the reward is -inf"),
    (broken.WrongShape, r"an observation of shape (3,), float32; its space says (2,), float32"),
    (broken.Scalar, "an observation of shape (), float64"),
    (broken.Words, "<U1; its space says (2,), float32"),
    (broken.Complex, "complex64; its space says (2,), float32"),
    (broken.RewardOfTwo, "ValueError: can only convert an array of size 1"),
    (broken.FourResults, "ValueError: not enough values to unpack"),
]


def config_of(tmp_path: Path, **changes: Any) -> Any:
    own = {"env": "Harmed-v0", "env_kwargs": {}, "name": "run", "num_envs": 8, "total_steps": 1600,
           "checkpoint_every": 80, "eval_every": 0,
           "learning": {"update_to_data": 0.1}}  # fmt: skip
    return tiny(tmp_path, **{**own, **changes})


def in_one_of_eight(kind: type[broken.Sound], at: int = 35) -> Any:
    """A factory whose fourth training environment is at fault at a step of its life. The manager
    makes two before: one to look at its spaces, one to see that it is no vector environment."""
    kind.made = 0
    return lambda: kind(at=at, only=2 + 3)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        *SPOILED[:6:2],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SPOILED[1:6:2] + SPOILED[6:]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_of_eight_environments_at_fault(
    kind: type[broken.Sound], told: str, tmp_path: Path
) -> None:
    manager = Manager(config_of(tmp_path), make_env=in_one_of_eight(kind))
    with pytest.raises((EnvironmentFault, NonFiniteError)) as caught:
        manager.train()
    assert str(caught.value).startswith("environment 3") and told in str(caught.value)
    assert read_record(manager.directory)["status"] == "failed"
    state = load_state(manager.directory)
    assert state["counters"]["step"] == 240  # the fault comes at 35 x 8 = 280, before the next save
    assert all(torch.isfinite(w).all() for w in state["algorithm"]["training_actor"].values())

    goes_on = Manager.resume(manager.directory, make_env=broken.Sound, total_steps=320)
    goes_on.train()
    whole = Manager(config_of(tmp_path, name="whole", total_steps=320), make_env=broken.Sound)
    whole.train()
    assert differences(comparable(manager.directory), comparable(whole.directory)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"), SPOILED, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize("async_envs", [False, True], ids=["sync", "async"])
def test_from_the_command_line(
    kind: type[broken.Sound], told: str, async_envs: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path, num_envs=2, async_envs=async_envs)
    name = f"{broken.__name__}:{kind.__name__}"
    words = [*flags(config), "--trust-env"]
    words[words.index("Harmed-v0")] = f"{name.partition(':')[0]}_registered:{kind.__name__}-v0"
    harmed = Harmed("runner.py", *words, env={"PYTHONPATH": ":".join(sys.path)})
    code, out, err = harmed.end()
    assert (code, out) == (1, ""), err
    assert re.search("error: environment [01]", err) and told in err  # both are at fault at once
    assert harmed.left() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (broken.Dies, "environment 0, step 60 of episode 0: its process has died"),
        (broken.Hangs, "environment 0, step 1 of episode 6: no answer to step for 3 s"),
        (broken.HangsInReset, "no answer to reset for 3 s"),
    ],
    ids=["dies", "hangs", "hangs in reset"],
)
def test_a_process_of_an_environment_that_dies_or_hangs(
    kind: type[broken.Sound], told: str, tmp_path: Path
) -> None:
    """Within HANG_SECONDS (shortened here) a named error; no process is left; the run can go on."""
    config = config_of(tmp_path, num_envs=2, async_envs=True)
    words = flags(config)
    words[words.index("Harmed-v0")] = f"broken_registered:{kind.__name__}-v0"
    script = "from sansac import environments; environments.HANG_SECONDS = 3.0\n" + SCRIPT
    harmed = Harmed("-c", script, f"broken:{kind.__name__}", *words, "--trust-env",
                    env={"PYTHONPATH": ":".join(sys.path)})  # fmt: skip
    code, out, err = harmed.end()
    assert (code, out) == (1, ""), err
    assert "error: environment" in err and told.partition(": ")[2] in err
    assert harmed.left() == []
    assert load_state(tmp_path / f"broken_registered-{kind.__name__}-v0" / "run")["counters"][
        "step"
    ]


@pytest.mark.parametrize("kind", [broken.NoInfo], ids=["no info"])
def test_what_is_no_environment_is_named_before_anything_is_learned(
    kind: type[broken.Sound], tmp_path: Path
) -> None:
    manager = Manager(config_of(tmp_path), make_env=kind)
    with pytest.raises(EnvironmentFault, match=r"environment 0, step 0 of its episode: \w+Error"):
        manager.train()


@pytest.mark.parametrize(
    "kind", [broken.Doubles, broken.OneBuffer, broken.OddInfos], ids=lambda kind: kind.__name__
)
def test_what_is_only_odd_changes_nothing(kind: type[broken.Sound], tmp_path: Path) -> None:
    """Doubles, one buffer for all observations, infos that fit no array: as if it were sound."""
    runs = []
    for made, name in ((broken.Sound, "sound"), (kind, "odd")):
        config = config_of(tmp_path, name=name, total_steps=400, num_envs=2, san=True)
        manager = Manager(config, make_env=made)
        manager.train()
        runs.append(comparable(manager.directory))
    assert differences(*runs) == []


def test_the_observations_of_an_evaluation_are_its_own(tmp_path: Path) -> None:
    """Firing rates are taken over them: one buffer would show the last observation ten times."""
    manager = Manager(config_of(tmp_path, san=True), make_env=broken.Sound)
    sound, odd = (
        evaluate(manager.policy, made, episodes=2, seed=1)
        for made in (broken.Sound, broken.OneBuffer)
    )
    assert sound == odd


def test_episodes_of_one_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, total_steps=400, learning={"n_step": 3})
    manager = Manager(config, make_env=broken.EndsAtOnce)
    assert manager.train()["length_mean"] == 1
    assert manager.episodes == 400


def test_an_episode_that_never_ends_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As truncated, in training and evaluation, so that memory and a resume's replay have an end; a
    truncated step still bootstraps."""
    for module in ("environments", "evaluation"):
        monkeypatch.setattr(f"sansac.{module}.MAX_EPISODE_STEPS", 30)
    config = config_of(tmp_path, total_steps=800, num_envs=2)
    manager = Manager(config, make_env=broken.NeverEnds)
    assert manager.train()["length_mean"] == 30
    state = load_state(manager.directory)
    assert manager.episodes == 2 * (400 // 30)
    assert all(len(actions) < 30 for actions in state["rollout"]["actions"])
    assert (state["replay"]["rows"]["discount"] > 0).all()


# -- what learning makes of it ---------------------------------------------------------------------


@pytest.mark.parametrize("part", ["loss", "gradient", "action"])
def test_learning_that_is_not_finite_is_not_saved(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected into one update, between two rows of metrics and just before a checkpoint is due: it
    stops there, says what and when, and what was saved before is finite."""
    config = tiny(tmp_path, env="Line", name="run", total_steps=400, log_every=1000, eval_every=0)
    manager = Manager(config, make_env=Line)
    update = manager.algorithm.update

    def spoiled(batch: Any) -> Any:
        due = manager.updates == 50
        weights = [p for p in manager.algorithm.critic.parameters() if p.requires_grad]
        if due and part == "loss":
            batch = batch._replace(reward=batch.reward * math.inf)
        if due and part == "gradient":
            hooks = [w.register_hook(lambda g: g * math.nan) for w in weights]
        metrics = update(batch)
        if due and part == "gradient":
            for hook in hooks:
                hook.remove()
        if due and part == "action":
            with torch.no_grad():
                next(iter(manager.algorithm.actor.parameters())).fill_(math.nan)
        return metrics

    monkeypatch.setattr(manager.algorithm, "update", spoiled)
    with pytest.raises(NonFiniteError) as caught:
        manager.train()
    expected = {
        "loss": "loss/critic is (nan|inf)|critic: .* is not finite",
        "gradient": "critic: .* is not finite|loss/(critic|actor) is nan",
        "action": "actor: .* is not finite",
    }[part]
    assert re.match(expected, str(caught.value))
    for name in ("last", "previous"):
        path = manager.directory / "checkpoints" / f"{name}.pt"
        if path.exists():
            state = load_state(manager.directory, name)
            for key in ("training_actor", "critic", "target_critic"):
                assert all(torch.isfinite(w).all() for w in state["algorithm"][key].values())
    assert load_state(manager.directory)["counters"]["step"] <= 160


def test_a_reward_whose_square_is_infinite_stops_learning(tmp_path: Path) -> None:
    make_env = in_one_of_eight(broken.HugeReward)
    manager = Manager(config_of(tmp_path), make_env=make_env)
    with pytest.raises(
        NonFiniteError, match=r"is inf at step|is not finite at step|is nan at step"
    ):
        manager.train()
    state = load_state(manager.directory)
    assert all(torch.isfinite(w).all() for w in state["algorithm"]["critic"].values())


@pytest.mark.slow
def test_processes_end_where_one_environment_cannot_be_made() -> None:
    """An error, and the processes that had begun are gone."""
    before = multiprocessing.active_children()
    makers = [broken.Sound, broken.Sound, np.zeros]
    with pytest.raises(EnvironmentFault, match="a process could not make its environment"):
        environments.in_processes(makers)
    assert set(multiprocessing.active_children()) <= set(before)
