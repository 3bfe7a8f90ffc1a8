"""Prioritised replay against exact probabilities and a slow, obvious sum."""

from __future__ import annotations

import copy
import io
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sansac.prioritized import FLOOR, PrioritizedReplay, SumTree

# -- the tree --------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(data=st.data(), capacity=st.sampled_from([1, 2, 15, 16, 17, 100, 256, 257, 4097]))
def test_sums_and_finds_agree_with_a_running_sum(data: st.DataObject, capacity: int) -> None:
    """Powers of two or not, whatever was set before, leaves of 0 among them."""
    tree, leaves = SumTree(capacity), np.zeros(capacity)
    for _ in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(1, 40))
        stream = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        index = stream.integers(capacity, size=count)
        values = stream.choice([0.0, 1e-6, 0.3, 5.0, 1e6], count)
        tree[index] = values
        leaves[index] = values
    assert np.array_equal(tree[np.arange(capacity)], leaves)
    assert tree.total == pytest.approx(leaves.sum(), rel=1e-12)
    if leaves.sum() == 0:
        return
    share = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20))
    found = tree.find(np.array(share) * tree.total)
    assert (leaves[found] > 0).all()
    running = np.concatenate([[0.0], leaves.cumsum()])
    slack = 1e-9 * leaves.sum()
    mass = np.array(share) * leaves.sum()
    assert (running[found] <= mass + slack).all() and (mass - slack <= running[found + 1]).all()


def test_filling_is_setting_every_leaf() -> None:
    values = np.random.default_rng(0).random(1000)
    filled, one_by_one = SumTree(1500), SumTree(1500)
    filled.fill(values)
    one_by_one[np.arange(1000)] = values
    for left, right in zip(filled.levels, one_by_one.levels, strict=True):
        assert np.array_equal(left, right)


def test_rounding_does_not_pile_up() -> None:
    """After a million changes over 12 decades a sum is what its leaves add up to."""
    tree, stream = SumTree(300), np.random.default_rng(0)
    for _ in range(4000):
        tree[stream.integers(300, size=256)] = 10.0 ** stream.uniform(-6, 6, 256)
    assert tree.total == pytest.approx(tree[np.arange(300)].sum(), rel=1e-14)


# -- the buffer ------------------------------------------------------------------------------------


def filled(count: int, capacity: int = 0, **options: Any) -> PrioritizedReplay:
    """`count` one-step transitions, whose observation and reward are their number."""
    shared = {"num_envs": 1, "n_step": 1, "gamma": 0.9, "seed": 0}
    buffer = PrioritizedReplay(capacity or count, 1, 1, **(shared | options))
    for i in range(count):
        add(buffer, i)
    return buffer


def add(buffer: PrioritizedReplay, number: float) -> None:
    one, no = np.array([[number]], np.float32), np.array([False])
    buffer.add(one, one * 0, one[0], one, no, no)


def prioritise(buffer: PrioritizedReplay, errors: np.ndarray) -> None:
    buffer.drawn = torch.arange(len(errors))
    buffer.reprioritise(torch.from_numpy(errors))


def draws(buffer: PrioritizedReplay, times: int = 400) -> np.ndarray:
    """How often each row was drawn."""
    counts = np.zeros(buffer.size)
    for _ in range(times):
        buffer.sample(256)
        counts += np.bincount(buffer.drawn.numpy(), minlength=buffer.size)
    return counts


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("size", [64, 100])
def test_draws_are_proportional_to_the_error(size: int, exponent: float) -> None:
    """Schaul et al. 2016, eq. 1, by chi-squared against exact probabilities."""
    errors = np.random.default_rng(1).exponential(size=size) * 3
    buffer = filled(size, exponent=exponent)
    prioritise(buffer, errors)
    exact = (errors + FLOOR) ** exponent
    exact /= exact.sum()
    assert buffer.probabilities(np.arange(size)) == pytest.approx(exact, rel=1e-12)
    counts = draws(buffer)
    assert chisquare(counts, exact * counts.sum()).pvalue > 1e-3


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_draws_by_rank_follow_one_over_the_rank(exponent: float) -> None:
    errors = np.random.default_rng(2).exponential(size=90)
    buffer = filled(90, exponent=exponent, rank=True)
    prioritise(buffer, errors)
    buffer.sort()
    rank = 1 + (-errors).argsort().argsort()
    exact = (1.0 / rank) ** exponent
    exact /= exact.sum()
    assert buffer.probabilities(np.arange(90)) == pytest.approx(exact, rel=1e-12)
    counts = draws(buffer)
    assert chisquare(counts, exact * counts.sum()).pvalue > 1e-3


def test_between_sorts_an_error_has_the_rank_it_would_take() -> None:
    buffer = filled(100, exponent=1.0, rank=True)
    prioritise(buffer, np.arange(100.0))
    buffer.sort()
    buffer.drawn = torch.tensor([3])
    buffer.reprioritise(torch.tensor([89.5]))  # above it are 90 to 99
    assert buffer.tree[np.array([3])] == pytest.approx(1 / 11)
    before = buffer.ladder.copy()
    buffer.sample(8)
    assert np.array_equal(buffer.ladder, before), "a few changes cause no sort"
    for _ in range(60):
        buffer.drawn = torch.tensor([0])
        buffer.reprioritise(torch.tensor([0.5]))
    buffer.sample(8)
    assert not np.array_equal(buffer.ladder, before), "after many it is repeated"


@pytest.mark.parametrize("rank", [False, True])
def test_new_transitions_have_the_largest_priority(rank: bool) -> None:
    """So that each is seen soon; also where the ring overwrites what was unlikely."""
    buffer = filled(50, capacity=50, rank=rank)
    prioritise(buffer, np.linspace(0, 7, 50))
    buffer.sort() if rank else None
    add(buffer, 1000)
    leaves = buffer.tree[np.arange(50)]
    assert leaves[0] == leaves.max()
    if not rank:
        assert leaves[0] == pytest.approx((7 + FLOOR) ** 0.6)


@pytest.mark.parametrize("correction", [0.0, 0.4, 1.0])
def test_weights_are_those_of_the_paper(correction: float) -> None:
    """(N P)^-beta over the largest of the batch, for rows of known probability."""
    errors = np.array([1.0, 2.0, 4.0, 8.0]) - FLOOR
    buffer = filled(4, exponent=1.0)
    prioritise(buffer, errors)
    buffer.correction = correction
    batch = buffer.sample(500)
    probability = np.array([1, 2, 4, 8]) / 15
    weight = (4 * probability) ** -correction
    expected = (weight / weight.max())[buffer.drawn.numpy()]
    assert batch.weight.numpy() == pytest.approx(expected, rel=1e-6)
    assert (batch.reward.numpy() == buffer.drawn.numpy()).all()


def test_full_correction_undoes_the_bias() -> None:
    """A weighted mean over prioritised draws is the plain mean over the buffer."""
    rewards = np.arange(60.0)
    buffer = filled(60, exponent=1.0)
    prioritise(buffer, 10 + rewards)
    buffer.correction = 1.0
    batches = [buffer.sample(256) for _ in range(300)]
    plain = np.mean([float(batch.reward.mean()) for batch in batches])
    weighted = np.mean([np.average(batch.reward, weights=batch.weight) for batch in batches])
    assert plain > 36
    assert weighted == pytest.approx(rewards.mean(), abs=0.5)


def test_a_ratio_mixed_into_the_priority() -> None:
    """|error|^(1 - share) min(1, ratio)^share: what the policy would no longer do loses."""
    buffer = filled(3, exponent=1.0)
    buffer.drawn = torch.arange(3)
    log_ratio = torch.tensor([0.0, -2.0, 5.0])
    buffer.reprioritise(torch.tensor([4.0, 4.0, 4.0]), log_ratio, 0.25)
    expected = (4 + FLOOR) ** 0.75 * np.exp([0.0, -0.5, 0.0])
    assert buffer.tree[np.arange(3)] == pytest.approx(expected)


@pytest.mark.parametrize("rank", [False, True])
def test_a_loaded_buffer_draws_on_as_the_saved_one_would(rank: bool) -> None:
    """Without pickle, in a ring that has gone round."""
    buffer = filled(70, capacity=50, rank=rank)
    prioritise(buffer, np.random.default_rng(0).random(50))
    file = io.BytesIO()
    torch.save(copy.deepcopy(buffer.state_dict()), file)
    file.seek(0)
    loaded = filled(1, capacity=50, rank=rank, seed=9)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for i in range(20):
        for each in (buffer, loaded):
            add(each, i)
        left, right = buffer.sample(16), loaded.sample(16)
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
        for each in (buffer, loaded):
            each.reprioritise(torch.linspace(0, 2, 16))


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [2**20, 1_000_000])
def test_a_draw_and_an_update_of_256_are_a_tenth_of_an_update(capacity: int) -> None:
    """Of SAC's update at 256 units: medians of many, taken in turns."""
    from sansac.algorithm import SAC
    from sansac.config import Config
    from sansac.replay import Batch

    tree, stream = SumTree(capacity), np.random.default_rng(0)
    tree.fill(stream.random(capacity))
    sac = SAC(Config(), 24, 4, "cpu")
    batch = Batch(
        torch.randn(256, 24), torch.rand(256, 4), torch.randn(256), torch.randn(256, 24),
        torch.ones(256), torch.ones(256),
    )  # fmt: skip
    ours, whole = [], []
    for _ in range(200):
        share, values = stream.random(256), stream.random(256)
        started = time.perf_counter()
        index = tree.find(share * tree.total)
        tree[index] = values
        ours.append(time.perf_counter() - started)
        started = time.perf_counter()
        sac.update(batch)
        whole.append(time.perf_counter() - started)
    assert np.median(ours) < 0.1 * np.median(whole)
