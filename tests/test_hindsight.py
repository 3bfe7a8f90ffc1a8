"""Hindsight replay: relabelled goals against episodes that the test keeps itself, and a goal task
that is learned with it and not without."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, differences, tiny
from gymnasium.spaces import Box, Dict
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sansac.config import ConfigError
from sansac.environments import flat_goals, goals_of
from sansac.hindsight import Goals, HindsightReplay
from sansac.manager import Manager


def reward(achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
    return -(np.abs(achieved - desired).max(-1) > 0.1).astype(np.float32)


GOALS = Goals(slice(0, 1), slice(1, 2), reward)  # the last entry names the step


def buffer(strategy: str, original: float = 0.2, num_envs: int = 2, **more: Any) -> HindsightReplay:
    options: dict[str, Any] = {"num_envs": num_envs, "n_step": 1, "gamma": 0.9, "seed": 0} | more
    capacity = options.pop("capacity", 400)
    goals = options.pop("goals", GOALS)
    return HindsightReplay(
        capacity, 3, 1, goals=goals, strategy=strategy, original=original, **options
    )


class Life:
    """Episodes of several environments as told to a buffer. The state of step k of episode e of
    environment i is 100000 i + 100 e + k, so a goal tells where it was achieved."""

    def __init__(self, replay: HindsightReplay, ends: list[list[int]]) -> None:
        """`ends[t][i]`: 0 goes on, 1 terminated, 2 truncated."""
        self.last: dict[tuple[int, int], int] = {}
        episode, k = np.zeros(len(ends[0]), int), np.zeros(len(ends[0]), int)
        for row in ends:
            before = [self.observation(i, episode[i], k[i]) for i in range(len(row))]
            k += 1
            after = [self.observation(i, episode[i], k[i]) for i in range(len(row))]
            for i in range(len(row)):
                self.last[i, episode[i]] = k[i]
            over = np.array(row)
            replay.add(
                np.array(before, np.float32), np.zeros((len(row), 1), np.float32),
                np.full(len(row), -1.0), np.array(after, np.float32), over == 1, over == 2,
            )  # fmt: skip
            episode, k = episode + (over > 0), np.where(over > 0, 0, k)

    @staticmethod
    def observation(i: int, episode: int, k: int) -> list[float]:
        state = 100_000 * i + 100 * episode + k
        return [state, -7.0, state]


@settings(max_examples=50)
@example(ends=[[0, 0]] * 4 + [[1, 0]], strategy="final", capacity=5)  # longer than its share
@given(
    ends=st.integers(1, 3).flatmap(lambda envs: st.lists(
        st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=envs, max_size=envs),
        min_size=2, max_size=40,
    )),
    strategy=st.sampled_from(["future", "final", "episode"]),
    capacity=st.sampled_from([5, 6, 7, 30, 400]),
)  # fmt: skip
def test_a_goal_is_one_of_its_own_episode(
    ends: list[list[int]], strategy: str, capacity: int
) -> None:
    """Achieved by a step from the transition's on, by the last, or by any that is still kept; also
    in a ring that has gone round and in episodes that are under way."""
    replay = buffer(strategy, original=0.0, num_envs=len(ends[0]), capacity=capacity)
    life = Life(replay, ends)
    kept = set(replay.rows["next_observation"][: replay.size, 2].tolist())
    batch = replay.sample(60)
    before, after = batch.observation.numpy(), batch.next_observation.numpy()
    goals, states, reached = after[:, 1], before[:, 2], after[:, 2]
    assert (before[:, 1] == goals).all()
    assert (states // 100 == (goals - 1) // 100).all(), "the same environment and episode"
    last = np.array([
        state // 100 * 100 + life.last[int(state // 100_000), int(state % 100_000 // 100)]
        for state in states
    ])  # fmt: skip
    assert (goals <= last).all()
    assert strategy != "future" or (goals >= reached).all()
    assert strategy != "final" or (goals == last).all()
    assert kept.issuperset(goals.tolist()), "of transitions that are still there"
    assert np.array_equal(batch.reward.numpy(), np.where(goals == reached, 0.0, -1.0))


def test_every_later_step_is_chosen_alike() -> None:
    replay = buffer("future", original=0.0, num_envs=1)
    Life(replay, [[0]] * 9 + [[2]])
    replay.drawn = torch.zeros(4000, dtype=torch.int64) + 3  # the transition to state 4
    goals = replay._gather(replay.drawn).next_observation[:, 1]
    values, counts = np.unique(goals.numpy(), return_counts=True)
    assert values.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert counts.min() > 4000 / 7 * 0.8 and counts.max() < 4000 / 7 * 1.2


@pytest.mark.parametrize("original", [0.0, 0.2, 1.0])
def test_the_stated_share_keeps_its_goal(original: float) -> None:
    replay = buffer("future", original=original)
    Life(replay, [[0, 0]] * 20)
    batch = replay.sample(5000)
    own = batch.observation[:, 1] == -7
    assert float(own.float().mean()) == pytest.approx(original, abs=0.02)
    assert (batch.reward[own] == -1).all(), "with the reward that it was paid"


@pytest.mark.parametrize("ends_there", [False, True])
def test_a_goal_reached_ends_the_episode_where_the_environment_says_so(ends_there: bool) -> None:
    goals = GOALS._replace(terminated=lambda a, d, info: reward(a, d, info) == 0)
    replay = buffer("future", original=0.0, goals=goals if ends_there else GOALS)
    Life(replay, [[0, 0]] * 10 + [[1, 2]])
    batch = replay.sample(500)
    reached = batch.reward == 0
    assert reached.any() and not reached.all()
    if ends_there:
        assert (batch.discount[reached] == 0).all() and (batch.discount[~reached] > 0).all()
    else:
        terminal = (batch.discount == 0) & reached
        assert terminal.sum() < reached.sum()


def test_a_reward_that_is_not_one_a_row_is_refused() -> None:
    """Such as that of `np.linalg.norm` without an axis, which would be everyone's."""
    goals = GOALS._replace(reward=lambda achieved, desired, info: -1.0)
    with pytest.raises(ConfigError, match=r"compute_reward .* expected one value for each"):
        buffer("future", goals=goals)


def test_a_loaded_buffer_gives_what_the_saved_one_would() -> None:
    left = buffer("episode", capacity=30)
    Life(left, [[0, 0]] * 11 + [[1, 0]] + [[0, 0]] * 9)
    file = io.BytesIO()
    torch.save(left.state_dict(), file)
    file.seek(0)
    right = buffer("episode", capacity=30, seed=5)
    right.load_state_dict(torch.load(file, weights_only=True))
    for each in (left, right):
        Life(each, [[0, 2]] * 3)
    for _ in range(5):
        pair = left.sample(32), right.sample(32)
        assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


# -- a goal task -----------------------------------------------------------------------------------


class Reach(gym.Env):
    """A point in a square goes to a small goal in 40 steps; -1 a step until it is there."""

    action_space = Box(-1, 1, (2,), np.float32)
    observation_space = Dict(
        {
            "observation": Box(-1, 1, (2,), np.float32),
            "achieved_goal": Box(-1, 1, (2,), np.float32),
            "desired_goal": Box(-1, 1, (2,), np.float32),
        }
    )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place = np.zeros(2, np.float32)
        self.goal = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.k = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> Any:
        self.place = np.clip(self.place + 0.1 * action, -1, 1).astype(np.float32)
        self.k += 1
        paid = float(self.compute_reward(self.place, self.goal, {}))
        return self._observe(), paid, False, self.k >= 40, {}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        return -(np.linalg.norm(achieved - desired, axis=-1) > 0.05).astype(np.float32)

    def _observe(self) -> dict[str, np.ndarray]:
        return {
            "observation": self.place, "achieved_goal": self.place, "desired_goal": self.goal
        }  # fmt: skip


def test_goals_are_found_in_the_flat_observation() -> None:
    env = flat_goals(Reach)
    goals = goals_of(env)
    assert goals is not None and env.observation_space.shape == (6,)
    observation, _ = env.reset(seed=3)
    inner: Any = env.unwrapped
    inner.place = np.array([0.25, 0.5], np.float32)
    observation = env.step(np.zeros(2, np.float32))[0]
    assert observation[goals.achieved] == pytest.approx([0.25, 0.5])
    assert observation[goals.desired] == pytest.approx(inner.goal)
    paid = goals.reward(np.array([[0.0, 0.0], [0.5, 0.5]]), np.array([[0.02, 0.0], [0.0, 0.0]]), {})
    assert paid.tolist() == [0, -1]


def reaching(tmp_path: Path, hindsight: str, **changes: Any) -> Manager:
    base: dict[str, Any] = {
        "env": "Reach", "env_kwargs": {}, "replay": {"hindsight": hindsight, "capacity": 10_000},
        "num_envs": 4, "log_every": 500, "eval_every": 0, "final_episodes": 30,
    }  # fmt: skip
    return Manager(tiny(tmp_path, **(base | changes)), make_env=Reach)


def test_hindsight_needs_goals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not goal-conditioned"):
        Manager(tiny(tmp_path, replay={"hindsight": "future"}))


def test_a_goal_run_resumes_to_the_bit(tmp_path: Path) -> None:
    short = {"total_steps": 200, "checkpoint_every": 60}
    whole = reaching(tmp_path / "a", "future", **short)
    whole.train()
    split = reaching(tmp_path / "b", "future", **(short | {"total_steps": 120}))
    split.train()
    resumed = Manager.resume(split.directory, make_env=Reach, total_steps=200)
    resumed.train()
    left, right = comparable(whole.directory), comparable(resumed.directory)
    assert not differences(left["state"]["replay"], right["state"]["replay"])
    assert not differences(left["state"]["algorithm"], right["state"]["algorithm"])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_hindsight_reaches_goals_that_plain_replay_does_not(algorithm: str, tmp_path: Path) -> None:
    learning = {
        "learning_starts": 400, "batch_size": 128, "update_to_data": 0.5, "gamma": 0.95,
        "tau": 0.02,
    }  # fmt: skip
    returns = {}
    for hindsight in ("future", "none"):
        manager = reaching(
            tmp_path / hindsight, hindsight, total_steps=5000, algorithm=algorithm,
            learning=learning, actor={"hidden": [64, 64], "learning_rate": 1e-3},
            critic={"hidden": [64, 64], "learning_rate": 1e-3},
            exploration={"noise": 0.2}, sac={"learning_rate": 1e-3},
        )  # fmt: skip
        returns[hindsight] = manager.train()["return_mean"]
    assert returns["future"] > -25
    assert returns["future"] > returns["none"] + 8
