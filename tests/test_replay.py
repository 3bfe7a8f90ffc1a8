"""The replay buffer against a slow, obvious reference built one environment at a time."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sansac.replay import Batch, ReplayBuffer

# What happens at the end of a step.
GOES_ON, TERMINATED, TRUNCATED, BOTH = range(4)


class Window(NamedTuple):
    """What one stored row must hold, and the step at which it was known."""

    closed: int
    observation: list[float]
    action: list[float]
    reward: float
    next_observation: list[float]
    discount: float


class Streams(NamedTuple):
    """Hand-made experience of several environments: `ends[t][i]`, `rewards[t][i]`."""

    ends: list[list[int]]
    rewards: list[list[float]]


@st.composite
def streams(draw: st.DrawFn) -> Streams:
    envs, steps = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    end = st.sampled_from([GOES_ON, GOES_ON, GOES_ON, TERMINATED, TRUNCATED, BOTH])
    reward = st.floats(-10, 10, width=32)
    grid = [st.lists(kind, min_size=envs, max_size=envs) for kind in (end, reward)]
    ends, rewards = (draw(st.lists(row, min_size=steps, max_size=steps)) for row in grid)
    return Streams(ends, rewards)


def observation_at(env: int, t: int) -> list[float]:
    return [100.0 * env + t, -1.0]


def observation_after(env: int, t: int) -> list[float]:
    """Never equal to the next step's observation, so that a mix-up shows."""
    return [100.0 * env + t + 0.5, 1.0]


def action_at(env: int, t: int) -> list[float]:
    return [env / 4, t / 16, -1.0]


def reference(experience: Streams, n_step: int, gamma: float) -> dict[float, Window]:
    """Every window that is complete, by its first observation."""
    windows = {}
    steps, envs = len(experience.ends), len(experience.ends[0])
    for env in range(envs):
        episodes: list[list[int]] = [[]]
        for t in range(steps):
            episodes[-1].append(t)
            if experience.ends[t][env] != GOES_ON:
                episodes.append([])
        for episode in episodes:
            for first in episode:
                window = [t for t in episode if first <= t < first + n_step]
                last = window[-1]
                end = experience.ends[last][env]
                if len(window) < n_step and end == GOES_ON:
                    continue  # still open
                total, factor = 0.0, 1.0
                for t in window:
                    total += factor * experience.rewards[t][env]
                    factor *= gamma
                windows[observation_at(env, first)[0]] = Window(
                    last,
                    observation_at(env, first),
                    action_at(env, first),
                    total,
                    observation_after(env, last),
                    0.0 if end in (TERMINATED, BOTH) else factor,
                )
    return windows


def feed(buffer: ReplayBuffer, experience: Streams, first: int = 0, last: int = 10**9) -> None:
    for t, (ends, rewards) in enumerate(zip(experience.ends, experience.rewards, strict=True)):
        if not first <= t < last:
            continue
        envs = range(len(ends))
        buffer.add(
            np.array([observation_at(i, t) for i in envs]),
            np.array([action_at(i, t) for i in envs]),
            np.array(rewards),
            np.array([observation_after(i, t) for i in envs]),
            np.array([end in (TERMINATED, BOTH) for end in ends]),
            np.array([end in (TRUNCATED, BOTH) for end in ends]),
        )


def make(experience: Streams, capacity: int, n_step: int, gamma: float) -> ReplayBuffer:
    envs = len(experience.ends[0])
    return ReplayBuffer(capacity, 2, 3, num_envs=envs, n_step=n_step, gamma=gamma, seed=5)


def check_rows(buffer: ReplayBuffer, windows: dict[float, Window]) -> set[float]:
    """Every stored row equals its reference; returns the rows' keys."""
    rows = {key: column[: buffer.size].numpy() for key, column in buffer.rows.items()}
    keys = [float(observation[0]) for observation in rows["observation"]]
    assert len(set(keys)) == len(keys), "a window was stored twice"
    for i, key in enumerate(keys):
        expected = windows[key]
        np.testing.assert_array_equal(rows["observation"][i], expected.observation)
        np.testing.assert_array_equal(rows["action"][i], expected.action)
        np.testing.assert_array_equal(rows["next_observation"][i], expected.next_observation)
        np.testing.assert_allclose(rows["reward"][i], expected.reward, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(rows["discount"][i], expected.discount, rtol=1e-6)
    return set(keys)


any_case = given(streams(), st.integers(1, 6), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
property_test = settings(max_examples=150, derandomize=True)


@property_test
@any_case
def test_every_complete_window_is_stored_and_nothing_else(
    experience: Streams, n_step: int, gamma: float
) -> None:
    """case 1: only a terminated step stops bootstrapping. Windows never cross an episode or an
    environment, and an open one is not stored."""
    buffer = make(experience, 1000, n_step, gamma)
    feed(buffer, experience)
    windows = reference(experience, n_step, gamma)
    assert check_rows(buffer, windows) == set(windows)


@property_test
@given(streams(), st.integers(1, 4), st.integers(1, 9))
def test_a_full_buffer_keeps_the_newest_windows(
    experience: Streams, n_step: int, spare: int
) -> None:
    """The write head overwrites the oldest rows alone, and no window crosses it."""
    capacity = n_step * len(experience.ends[0]) + spare
    buffer = make(experience, capacity, n_step, 0.9)
    feed(buffer, experience)
    windows = reference(experience, n_step, 0.9)
    kept = check_rows(buffer, windows)
    assert len(kept) == buffer.size == min(capacity, len(windows))
    dropped = [window.closed for key, window in windows.items() if key not in kept]
    assert not dropped or max(dropped) <= min(windows[key].closed for key in kept)


@property_test
@given(streams(), st.integers(1, 5), st.integers(0, 14), st.integers(0, 8))
def test_a_restored_buffer_goes_on_as_if_never_stopped(
    experience: Streams, n_step: int, split: int, spare: int
) -> None:
    """case 27: rows, open windows, write head and the sampler's stream survive a checkpoint."""
    capacity = n_step * len(experience.ends[0]) + spare
    whole = make(experience, capacity, n_step, 0.9)
    feed(whole, experience, last=split)
    if whole.size:
        whole.sample(3)  # moves the stream

    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    restored = make(experience, capacity, n_step, 0.9)
    restored.load_state_dict(torch.load(file, weights_only=True))

    feed(whole, experience, first=split)
    feed(restored, experience, first=split)
    assert restored.size == whole.size
    for key, rows in whole.rows.items():
        torch.testing.assert_close(restored.rows[key], rows, rtol=0, atol=0)
    if whole.size:
        for _ in range(2):
            assert_same_batch(restored.sample(16), whole.sample(16))


def assert_same_batch(left: Batch, right: Batch) -> None:
    for name in Batch._fields:
        assert torch.equal(getattr(left, name), getattr(right, name)), name


def test_a_state_is_a_snapshot() -> None:
    """Steps added after it was taken do not change it."""
    experience = Streams([[GOES_ON]] * 8, [[1.0]] * 8)
    buffer = make(experience, 5, 2, 0.9)
    feed(buffer, experience, last=4)
    state = buffer.state_dict()
    before = {key: rows.clone() for key, rows in state["rows"].items()}
    pending = {key: value.clone() for key, value in state["pending"].items()}
    feed(buffer, experience, first=4)
    assert all(torch.equal(state["rows"][key], before[key]) for key in before)
    assert all(torch.equal(state["pending"][key], pending[key]) for key in pending)


THREE_STEPS = [1.0, 2.0, 4.0, 8.0]  # rewards of one episode of four steps


@pytest.mark.parametrize(
    ("end", "discounts"),
    [(TERMINATED, [0.125, 0.0, 0.0, 0.0]), (TRUNCATED, [0.125, 0.125, 0.25, 0.5])],
)
def test_three_step_returns_by_hand(end: int, discounts: list[float]) -> None:
    """case 1: gamma = 1/2, rewards 1, 2, 4, 8; the last three windows end with the episode.

    1 + 2/2 + 4/4 = 3, 2 + 4/2 + 8/4 = 6, 4 + 8/2 = 8, 8; a cut by the time limit bootstraps from
    the true last observation with gamma^m, m the steps taken; a terminal state does not.
    """
    experience = Streams([[GOES_ON]] * 3 + [[end]], [[reward] for reward in THREE_STEPS])
    buffer = make(experience, 10, 3, 0.5)
    feed(buffer, experience)
    assert buffer.size == 4
    assert buffer.rows["reward"][:4].tolist() == [3.0, 6.0, 8.0, 8.0]
    assert buffer.rows["discount"][:4].tolist() == discounts
    assert buffer.rows["observation"][:4, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert buffer.rows["next_observation"][:4, 0].tolist() == [2.5, 3.5, 3.5, 3.5]


def one_env(capacity: int, dtype: Any = np.float32, seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(
        capacity, 3, 1, num_envs=1, n_step=1, gamma=0.9, seed=seed, observation_dtype=dtype
    )


def add_row(buffer: ReplayBuffer, observation: np.ndarray, action: np.ndarray) -> None:
    no = np.array([False])
    buffer.add(observation[None], action[None], np.zeros(1), observation[None], no, no)


def test_bytes_stay_bytes() -> None:
    """case 5: uint8 observations are stored as they are and sampled as floats of the same value."""
    buffer = one_env(4, np.uint8)
    add_row(buffer, np.array([0, 128, 255], np.uint8), np.zeros(1, np.float32))
    assert buffer.rows["observation"].dtype == buffer.rows["next_observation"].dtype == torch.uint8
    batch = buffer.sample(2)
    assert batch.observation.dtype == batch.next_observation.dtype == torch.float32
    assert batch.observation[0].tolist() == [0.0, 128.0, 255.0]


def test_doubles_are_stored_as_floats() -> None:
    """case 5: a float64 space does not double the buffer."""
    buffer = one_env(4, np.float64)
    observation, action = np.array([0.1, 1e-30, 3.0]), np.array([0.7])
    add_row(buffer, observation, action)
    assert all(rows.dtype == torch.float32 for rows in buffer.rows.values())
    batch = buffer.sample(1)
    np.testing.assert_array_equal(batch.observation[0].numpy(), observation.astype(np.float32))
    np.testing.assert_array_equal(batch.action[0].numpy(), action.astype(np.float32))
    assert all(column.dtype == torch.float32 for column in batch)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_the_size_announced_is_the_size_taken(dtype: type[np.generic]) -> None:
    buffer = one_env(37, dtype)
    itemsize = 1 if dtype is np.uint8 else 4
    taken = sum(rows.element_size() * rows.nelement() for rows in buffer.rows.values())
    assert ReplayBuffer.bytes_needed(37, 3, 1, itemsize) == taken


def filled(capacity: int, rows: int, seed: int = 0) -> ReplayBuffer:
    """Row number i holds the observation i."""
    buffer = one_env(capacity, seed=seed)
    for i in range(rows):
        add_row(buffer, np.full(3, i, np.float32), np.zeros(1, np.float32))
    return buffer


@pytest.mark.parametrize(("capacity", "rows"), [(50, 50), (80, 50), (50, 120)])
def test_rows_are_drawn_uniformly(capacity: int, rows: int) -> None:
    """Filled rows alone, each as likely as another, in a partly filled and in a wrapped buffer."""
    buffer = filled(capacity, rows)
    drawn = torch.cat([buffer.sample(500).observation[:, 0] for _ in range(40)])
    values, counts = drawn.unique(return_counts=True)
    assert values.tolist() == [float(i) for i in range(rows - 50, rows)]
    assert chisquare(counts.numpy()).pvalue > 0.001


def test_each_minibatch_is_a_fresh_draw() -> None:
    """case 18: with replacement, and no minibatch tells anything of the next."""
    buffer = filled(1000, 1000)
    first, second = (buffer.sample(4000).observation[:, 0] for _ in range(2))
    assert len(first.unique()) < 4000
    assert (first == second).float().mean() < 0.01
    correlation = np.corrcoef(first.numpy(), second.numpy())[0, 1]
    assert abs(correlation) < 4 / np.sqrt(4000)


def test_the_draw_is_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(1)
    left = filled(20, 20, seed=3).sample(30)
    torch.manual_seed(2)
    assert_same_batch(left, filled(20, 20, seed=3).sample(30))
    other = filled(20, 20, seed=4).sample(30)
    assert not torch.equal(left.observation, other.observation)


def test_weights_are_one_and_shapes_are_flat() -> None:
    """case 17: rewards, discounts and weights are [B], never [B, 1]."""
    batch = filled(20, 20).sample(7)
    assert batch.weight.tolist() == [1.0] * 7
    assert batch.reward.shape == batch.discount.shape == (7,)
    assert batch.observation.shape == batch.next_observation.shape == (7, 3)
    assert batch.action.shape == (7, 1)


def test_an_empty_buffer_says_so() -> None:
    with pytest.raises(ValueError, match="empty replay buffer"):
        one_env(5).sample(1)
