"""Environments: checked at start, seeded an episode, and stored as if stepped one at a time."""

from __future__ import annotations

import io
import itertools
import math
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sansac.config import Config, ConfigError
from sansac.environments import (
    EVALUATION,
    TRAINING,
    ActionScale,
    Disturbed,
    EnvironmentFault,
    Episodic,
    MakeEnv,
    NonFiniteError,
    Rollout,
    Step,
    check_spaces,
    env_factory,
    episode_seed,
    unvectorized,
)
from sansac.networks import RunningNorm
from sansac.replay import ReplayBuffer

property_test = settings(max_examples=100, derandomize=True)


class Walk(gym.Env):
    """A noisy walk in the plane that terminates outside a circle; float64, asymmetric bounds."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Box(np.array([-1.0, -0.5]), np.array([2.0, 0.25]), dtype=np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.steps = self.np_random.uniform(-1, 1, 2), 0
        return self.look(), {}

    def look(self) -> np.ndarray:
        return np.array([*self.at, self.steps])  # float64, where the space says float32

    def step(self, action: np.ndarray) -> Any:
        assert action.dtype == np.float64 and self.action_space.contains(action)
        self.at, self.steps = self.at + action + self.np_random.normal(0, 0.3, 2), self.steps + 1
        distance = float(np.linalg.norm(self.at))
        return self.look(), -distance, distance > 3, False, {}


def walk() -> gym.Env:
    return TimeLimit(Walk(), 7)


def rollout_of(*factories: MakeEnv, num_envs: int = 2, **config: Any) -> Rollout:
    return Rollout(list(factories), Config(num_envs=num_envs, **config))


def random_actions(rollout: Rollout, steps: int, seed: int = 0) -> np.ndarray:
    """[steps, num_envs, act], of the environment's own scale and type."""
    space = rollout.envs.single_action_space
    assert isinstance(space, Box)
    stream = np.random.default_rng(seed)
    size = (steps, rollout.num_envs, *space.shape)
    return stream.uniform(space.low, space.high, size).astype(space.dtype)


# ---- case 1 and 2: the transitions ---------------------------------------------------------------


def stepped_by_hand(make_env: MakeEnv, seed: int, actions: np.ndarray) -> list[tuple[Any, ...]]:
    """(observation, action, reward, next observation, terminated) of every step of every
    environment, each stepped alone."""
    rows = []
    for i in range(actions.shape[1]):
        env, episode = make_env(), 0
        observation, _ = env.reset(seed=episode_seed(TRAINING, seed, i, episode))
        for action in actions[:, i]:
            after, reward, terminated, truncated, _ = env.step(action)
            rows.append((observation, action, reward, after, terminated))
            observation = after
            if terminated or truncated:
                episode += 1
                env.close()
                env = make_env()  # nothing can be left over from the last episode
                observation, _ = env.reset(seed=episode_seed(TRAINING, seed, i, episode))
        env.close()
    return rows


def stored(rollout: Rollout, actions: np.ndarray) -> tuple[ReplayBuffer, list[tuple[float, int]]]:
    """The buffer after a rollout, and the episodes that ended."""
    steps, num_envs, size = actions.shape
    buffer = ReplayBuffer(
        steps * num_envs, rollout.observation.shape[1], size,
        num_envs=num_envs, n_step=1, gamma=0.9, seed=0,
    )  # fmt: skip
    episodes = []
    for action in actions:
        step = rollout.step(action)
        buffer.add(
            step.observation, action, step.reward, step.next_observation,
            step.terminated, step.truncated,
        )  # fmt: skip
        episodes += step.episodes
    return buffer, episodes


def table(*columns: np.ndarray) -> np.ndarray:
    """Rows of all columns side by side, in an order of their own."""
    rows = np.concatenate([np.asarray(c, np.float32).reshape(len(c), -1) for c in columns], 1)
    return rows[np.lexsort(rows.T)]


def assert_stores_the_transitions_of_single_environments(
    rollout: Rollout, make_env: MakeEnv, steps: int
) -> None:
    actions = random_actions(rollout, steps)
    buffer, episodes = stored(rollout, actions)
    expected = stepped_by_hand(make_env, rollout.seed, actions)
    observation, action, reward, after, terminated = map(np.array, zip(*expected, strict=True))
    rows = {key: column.numpy() for key, column in buffer.rows.items()}
    assert buffer.size == len(expected)
    np.testing.assert_array_equal(
        table(*(rows[key] for key in rows)),
        table(observation, action, reward, after, np.where(terminated, 0.0, 0.9)),
    )
    assert len(episodes) > rollout.num_envs, "the case is to cross several episodes"
    assert sum(length for _, length in episodes) <= len(expected)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_rollout_stores_the_transitions_of_single_environments(num_envs: int) -> None:
    """case 1 and 2: the true last observation of every episode is stored, no reset step is, and
    a step cut by the time limit goes on bootstrapping."""
    rollout = rollout_of(walk, num_envs=num_envs, seed=3)
    assert_stores_the_transitions_of_single_environments(rollout, walk, 60)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_users_vector_environment_is_stored_alike_in_every_autoreset_mode(
    mode: AutoresetMode,
) -> None:
    """case 2: NEXT_STEP would ignore an action, SAME_STEP would lose the last observation."""
    factories = unvectorized(lambda: SyncVectorEnv([walk, walk], autoreset_mode=mode))
    assert_stores_the_transitions_of_single_environments(rollout_of(*factories), walk, 40)


short_walker = partial(gym.make, "BipedalWalker-v3", max_episode_steps=60)


def test_box2d_environments_are_stored_as_if_stepped_alone() -> None:
    """case 2: although a Box2D world outlives a reset."""
    rollout = rollout_of(short_walker, seed=1)
    assert_stores_the_transitions_of_single_environments(rollout, short_walker, 150)
    rollout.close()


def test_a_users_asynchronous_vector_environment_is_taken_apart() -> None:
    pendulum = partial(gym.make, "Pendulum-v1", max_episode_steps=5)
    factories = unvectorized(lambda: AsyncVectorEnv([pendulum, pendulum], context="spawn"))
    assert_stores_the_transitions_of_single_environments(rollout_of(*factories), pendulum, 16)


def test_another_vector_environment_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"CartPoleVectorEnv.*num_envs"):
        unvectorized(lambda: gym.make_vec("CartPole-v1", 2, "vector_entry_point"))  # type: ignore[arg-type,return-value]


def test_returns_and_lengths_of_every_episode_are_reported() -> None:
    """case 3: of each environment, truncated or terminated, the first and the last step counted."""
    rollout = rollout_of(walk, num_envs=3, seed=3)
    actions = random_actions(rollout, 60)
    _, episodes = stored(rollout, actions)
    rollout.close()
    expected, lengths = [], set()
    for i in range(3):
        env = walk()
        env.reset(seed=episode_seed(TRAINING, 3, i, 0))
        total, length, episode = 0.0, 0, 0
        for action in actions[:, i]:
            _, reward, terminated, truncated, _ = env.step(action)
            total, length = total + float(reward), length + 1
            if terminated or truncated:
                expected.append((total, length))
                lengths.add(length)
                total, length, episode = 0.0, 0, episode + 1
                env.reset(seed=episode_seed(TRAINING, 3, i, episode))
    assert len(lengths) > 2 and 7 in lengths
    np.testing.assert_allclose(sorted(episodes), sorted(expected))


# ---- seeds ---------------------------------------------------------------------------------------


class Recorded(gym.Wrapper):
    """Keeps the seeds that it was reset with."""

    seeds: list[int | None]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds = [*getattr(self, "seeds", []), seed]
        return self.env.reset(seed=seed, options=options)


def test_each_training_episode_has_a_seed_of_its_own() -> None:
    made: list[Recorded] = []

    def make_env() -> gym.Env:
        made.append(Recorded(walk()))
        return made[-1]

    rollout = rollout_of(make_env, num_envs=3, seed=9)
    stored(rollout, random_actions(rollout, 50))
    rollout.close()
    made = [env for env in made if hasattr(env, "seeds")]
    assert all(
        env.seeds == [episode_seed(TRAINING, 9, i, k) for k in range(len(env.seeds))]
        for i, env in enumerate(made)
    )
    seeds = [seed for env in made for seed in env.seeds]
    assert len(set(seeds)) == len(seeds) > 15


run_seed, number = st.integers(0, 2**31 - 1), st.integers(0, 10**6)


@property_test
@given(run_seed, number, number, run_seed, number)
def test_no_evaluation_episode_runs_on_a_training_seed(
    seed: int, env: int, episode: int, evaluation: int, index: int
) -> None:
    """case 8: whatever the seeds of the run and of the evaluation."""
    training = episode_seed(TRAINING, seed, env, episode)
    assert training % 2 != episode_seed(EVALUATION, evaluation, index) % 2  # so never equal
    assert training == episode_seed(TRAINING, seed, env, episode)
    assert 0 <= training < 2**31  # what Gymnasium's environments take


def test_seeds_of_runs_environments_and_episodes_differ() -> None:
    seeds = {
        episode_seed(TRAINING, *index) for index in itertools.product(range(5), range(8), range(20))
    }
    assert len(seeds) == 5 * 8 * 20


# ---- episodes that depend on their seed and actions alone ----------------------------------------


lander = partial(gym.make, "LunarLander-v3", continuous=True)


@pytest.mark.parametrize("make_env", [partial(gym.make, "BipedalWalker-v3"), lander])
def test_an_episode_replays_identically_whatever_was_played_before(make_env: MakeEnv) -> None:
    """case 8: a Box2D world survives Gymnasium's reset and carries contacts into the next one."""
    stream = np.random.default_rng(0)

    def play(env: gym.Env, seed: int, actions: np.ndarray) -> list[Any]:
        seen: list[Any] = [env.reset(seed=seed)[0]]
        for action in actions:
            observation, reward, terminated, truncated, _ = env.step(action)
            seen += [observation, reward]
            if terminated or truncated:
                break
        return seen

    used = Episodic(make_env())
    size = used.action_space.shape
    for seed in range(8):
        actions = stream.uniform(-1, 1, (120, *(size or ()))).astype(np.float32)
        fresh = Episodic(make_env())
        alone, after_others = play(fresh, seed, actions), play(used, seed, actions)
        fresh.close()
        assert len(alone) == len(after_others)
        assert all(np.array_equal(a, b) for a, b in zip(alone, after_others, strict=True))
    used.close()


# ---- state ---------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_steps(left: list[Step], right: list[Step]) -> None:
    for a, b in zip(left, right, strict=True):
        for name in Step._fields:
            assert np.array_equal(getattr(a, name), getattr(b, name)), name


pendulum = partial(gym.make, "Pendulum-v1", max_episode_steps=50)


def assert_goes_on_identically(whole: Rollout, restored: Rollout, actions: np.ndarray) -> None:
    """`restored` from a state of `whole` in mid-episode, through the ends of episodes to come."""
    for action in actions[:75]:
        whole.step(action)
    state = through_a_file(whole.state_dict())
    assert any(len(history) for history in state["actions"])
    expected = [whole.step(action) for action in actions[75:]]
    assert any(step.episodes for step in expected)
    for action in actions[:10]:
        restored.step(action)
    assert restored.load_state_dict(state) == []
    assert_same_steps([restored.step(action) for action in actions[75:]], expected)


@pytest.mark.parametrize("make_env", [pendulum, partial(gym.make, "BipedalWalker-v3"), walk])
def test_a_restored_rollout_goes_on_identically_in_mid_episode(make_env: MakeEnv) -> None:
    """case 27: whatever the new environments played before, and also where an environment returns
    float64 although its space says float32."""
    whole, restored = (rollout_of(make_env, seed=2) for _ in range(2))
    assert_goes_on_identically(whole, restored, random_actions(whole, 220))


def test_environments_in_processes_of_their_own_behave_alike() -> None:
    """case 2 and 27: the transitions of single environments, and the same after a restore."""
    rollout = rollout_of(short_walker, async_envs=True, seed=1)
    assert_stores_the_transitions_of_single_environments(rollout, short_walker, 150)
    assert_goes_on_identically(rollout, rollout, random_actions(rollout, 220))
    rollout.close()


def test_a_process_of_an_environment_that_dies_is_one_clear_error() -> None:
    rollout = rollout_of(walk, async_envs=True)
    actions = random_actions(rollout, 2)
    rollout.step(actions[0])
    assert isinstance(rollout.envs, AsyncVectorEnv)
    rollout.envs.processes[1].kill()
    rollout.envs.processes[1].join()
    with pytest.raises(EnvironmentFault, match=r"environment 1, step 2 .* has died"):
        rollout.step(actions[1])
    rollout.close()
    assert not any(process.is_alive() for process in rollout.envs.processes[1:])


class Forgetful(Walk):
    """Does not replay: no two of its episodes start alike."""

    resets = itertools.count()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=10**6 + next(self.resets))


def forgetful() -> gym.Env:
    return TimeLimit(Forgetful(), 7)


def test_an_environment_that_does_not_replay_starts_a_fresh_episode() -> None:
    """case 27: it is reported, its cut episode is forgotten, and its neighbour goes on."""
    both = walk, forgetful
    whole = rollout_of(*both, num_envs=2, seed=4)
    actions = random_actions(whole, 40)
    for action in actions[:2]:
        step = whole.step(action)
        assert not (step.terminated | step.truncated).any()
    state = through_a_file(whole.state_dict())
    expected = [whole.step(action) for action in actions[2:]]
    whole.close()

    restored = rollout_of(*both, num_envs=2, seed=4)
    assert restored.load_state_dict(state) == [1]
    np.testing.assert_array_equal(restored.observation[0], state["observation"][0].numpy())
    assert restored.observation[1, 2] == 0  # Walk counts its steps there
    steps = [restored.step(action) for action in actions[2:]]
    for name in ("observation", "reward", "next_observation", "terminated", "truncated"):
        assert all(
            np.array_equal(getattr(a, name)[0], getattr(b, name)[0])
            for a, b in zip(steps, expected, strict=True)
        ), name
    of_forgetful = [s for s in steps if s.terminated[1] or s.truncated[1]]
    first = of_forgetful[0]
    length = int(first.next_observation[1, 2])
    total = sum(float(s.reward[1]) for s in steps[:length])
    assert (pytest.approx(total), length) in first.episodes
    restored.close()


# ---- case 4, 5, 6: spaces ------------------------------------------------------------------------


bound = st.floats(-1e6, 1e6)


@property_test
@given(st.lists(st.tuples(bound, bound), min_size=1, max_size=4), st.booleans())
def test_each_dimension_is_scaled_to_its_own_bounds(
    bounds: list[tuple[float, float]], double: bool
) -> None:
    """case 4: the ends of [-1, 1] map to low and high exactly, the rest linearly in between."""
    dtype = np.float64 if double else np.float32
    low, high = np.sort(np.array(bounds, dtype), axis=1).T
    assume((low < high).all())
    scale = ActionScale(Box(low, high, dtype=dtype))
    ones = np.ones((1, len(low)), np.float32)
    np.testing.assert_array_equal(scale(-ones)[0], low)
    np.testing.assert_array_equal(scale(ones)[0], high)
    for a in (-0.5, 0.0, 0.25):
        between = scale(a * ones)[0]
        expected = low + (high.astype(np.float64) - low) * (a + 1) / 2
        np.testing.assert_allclose(between, expected, rtol=1e-6, atol=1e-9 + 1e-6 * abs(low).max())
        assert between.dtype == dtype
        assert (low <= between).all() and (between <= high).all()


def test_actions_are_scaled_a_dimension_at_a_time() -> None:
    """case 4: by hand; a single scalar bound would give the same number twice."""
    scale = ActionScale(Box(np.array([-1.0, 0.0]), np.array([3.0, 10.0]), dtype=np.float64))
    actions = np.array([[0.5, 0.5], [-1.0, 1.0]], np.float32)
    assert scale(actions).tolist() == [[2.0, 7.5], [-1.0, 10.0]]
    assert scale(actions).dtype == np.float64


flat, action = Box(-1, 1, (3,)), Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("observation_space", "action_space", "named"),
    [
        (Dict({"a": flat}), action, "Dict"),
        (Tuple([flat, flat]), action, "Tuple"),
        (Discrete(7), action, "Discrete(7)"),
        (MultiBinary(4), action, "MultiBinary(4)"),
        (Box(0, 255, (8, 8, 3), np.uint8), action, "(8, 8, 3)"),
        (Box(-1, 1, ()), action, "Box"),
        (Box(-1, 1, (0,)), action, "(0,)"),
        (flat, Discrete(3), "Discrete(3)"),
        (flat, MultiDiscrete([2, 3]), "MultiDiscrete([2 3])"),
        (flat, Dict({"a": action}), "Dict"),
        (flat, Box(-1, 1, (2, 2)), "(2, 2)"),
        (flat, Box(-1, 1, (0,)), "(0,)"),
        (flat, Box(-4, 4, (2,), np.int32), "int32"),
        (flat, Box(-np.inf, np.inf, (2,)), "infinite"),
        (flat, Box(np.array([0, -np.inf]), np.ones(2), dtype=np.float64), "infinite"),
        (flat, Box(np.zeros(2), np.array([1.0, 0.0]), dtype=np.float64), "empty range"),
    ],
)
def test_an_unsupported_space_is_refused_by_name(
    observation_space: Space, action_space: Space, named: str
) -> None:
    """case 6: at start, with the space and what is supported instead."""
    env = Walk()
    env.observation_space, env.action_space = observation_space, action_space  # type: ignore[assignment]
    with pytest.raises(ConfigError) as caught:
        check_spaces(env, "Mine-v0")
    message = str(caught.value)
    assert "'Mine-v0'" in message and named in message
    assert "flat Box observation" in message and "flat Box action" in message


@pytest.mark.parametrize(
    ("observation_space", "action_space"),
    [
        (Box(0, 255, (4,), np.uint8), action),  # case 5
        (Box(-np.inf, np.inf, (4,), np.float64), Box(-1, 1, (2,), np.float64)),  # case 5 and 10
        (flat, Box(np.array([-1, 0]), np.array([3, 10]), dtype=np.float32)),  # case 4
    ],
)
def test_a_flat_box_is_accepted(observation_space: Box, action_space: Box) -> None:
    """case 4, 5 and 10: of any number type, with infinite observation bounds and own action
    bounds."""
    env = Walk()
    env.observation_space, env.action_space = observation_space, action_space
    check_spaces(env, "Mine-v0")


def test_lunar_lander_is_told_how_to_be_continuous() -> None:
    """case 6: its default actions are discrete."""
    make_env = env_factory(Config(env="LunarLander-v3"))
    with pytest.raises(ConfigError, match="continuous=True"):
        check_spaces(make_env(), "LunarLander-v3")
    make_env = env_factory(Config(env="LunarLander-v3", env_kwargs={"continuous": True}))
    check_spaces(make_env(), "LunarLander-v3")


@pytest.mark.parametrize(
    ("env", "env_kwargs", "named"),
    [
        ("NoSuchThing-v0", {}, "NoSuchThing"),
        ("Pendulum-v1", {"colour": "red"}, "colour"),
        ("os:Pendulum-v1", {}, "make_env"),
    ],
)
def test_an_environment_that_cannot_be_made_is_a_configuration_error(
    env: str, env_kwargs: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        env_factory(Config(env=env, env_kwargs=env_kwargs))()


def test_infinite_observation_bounds_are_normalised_by_what_is_seen() -> None:
    """case 10: a normaliser built from the space's bounds would divide infinity by infinity."""
    rollout = rollout_of(walk)
    assert not np.isfinite(rollout.envs.single_observation_space.high).any()  # type: ignore[attr-defined]
    norm, seen = RunningNorm(3, clip=10.0), []
    for step_action in random_actions(rollout, 50):
        seen.append(rollout.observation)
        norm.update(torch.from_numpy(rollout.observation))
        rollout.step(step_action)
    rollout.close()
    everything = np.concatenate(seen)
    normalised = norm(torch.from_numpy(everything)).numpy()
    assert np.isfinite(normalised).all()
    np.testing.assert_allclose(normalised.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(normalised.std(0), 1, atol=1e-5)


# ---- case 7: what is not finite ------------------------------------------------------------------


class Broken(Walk):
    """Answers with something that is not finite in the third step of its second episode."""

    def __init__(self, what: str, value: float) -> None:
        self.what, self.value, self.episode = what, value, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        observation, info = super().reset(seed=seed)
        self.at *= 0
        if self.what == "reset" and self.episode == 1:
            observation[1] = self.value
        return observation, info

    def step(self, action: np.ndarray) -> Any:
        observation, reward, *_, info = super().step(action * 0)
        if self.episode == 1 and self.steps == 3:
            if self.what == "observation":
                observation[2] = self.value
            if self.what == "reward":
                reward = self.value
        return observation, reward, self.steps == 4, False, info


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "observation",
            "environment 1: entry 2 of the observation is {} at step 3 of its episode 1",
        ),
        ("reward", "environment 1: the reward is {} at step 3 of its episode 1"),
        ("reset", "environment 1: entry 1 of the observation is {} at reset 0 of its episode 1"),
    ],
)
def test_what_is_not_finite_stops_at_once_and_is_named(
    what: str, message: str, value: float
) -> None:
    """case 7: the environment, the step of its episode and the entry; what float32 cannot hold is
    infinite where it is stored."""
    rollout = rollout_of(walk, partial(Broken, what, value), walk, num_envs=3)
    shown = math.inf if value == 1e39 else value
    with pytest.raises(NonFiniteError, match=message.format(shown)):
        stored(rollout, random_actions(rollout, 20))
    assert rollout.actions[1] == [] if what == "reset" else len(rollout.actions[1]) == 3
    rollout.close()


def test_an_action_that_is_not_finite_reaches_no_environment() -> None:
    """case 7: a policy that has blown up is named as such."""
    rollout = rollout_of(walk, num_envs=2)
    step_action = random_actions(rollout, 1)[0]
    step_action[1, 0] = np.nan
    with pytest.raises(NonFiniteError, match="environment 1: entry 0 of the action is nan"):
        rollout.step(step_action)
    assert [len(history) for history in rollout.actions] == [0, 0]
    rollout.close()


def test_disturbed_sensors_have_noise_of_the_size_asked_and_drop_as_often() -> None:
    env = Disturbed(gym.make("Pendulum-v1"), noise=np.array([0.0, 0.5, 2.0]), dropout=0.25)
    env.reset(seed=3)
    seen = np.array([env.observation(np.full(3, 5.0, np.float32)) for _ in range(20_000)])
    dropped = seen == 0
    assert seen.dtype == np.float32
    assert np.allclose(dropped.mean(0), 0.25, atol=0.01)
    for column, gone, noise in zip(seen.T, dropped.T, (0.0, 0.5, 2.0), strict=True):
        assert column[~gone].mean() == pytest.approx(5, abs=0.05)
        assert column[~gone].std() == pytest.approx(noise, rel=0.03)
