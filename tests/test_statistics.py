"""Statistics over seeds: rliable's definitions, and how far their intervals are to be trusted."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import bootstrap, trim_mean

from sansac import statistics
from sansac.statistics import (
    band,
    coverage,
    improvement_interval,
    interval,
    iqm,
    performance_profile,
    probability_of_improvement,
    profile_band,
    ratio_interval,
    resample,
)

# Scores [seeds, tasks], and what rliable 1.2.0 says of them (50,000 repetitions for the IQM's
# intervals, 5,000 for the improvement's, 2,000 for the profile's).
X = np.array(
    [
        [306.9, 316.4, 306.6], [273.9, 318.1, 308.9], [289.3, 311.6, 307.3], [305.9, 300.6, 310.9],
        [285.3, 296.7, 290.4], [312.0, 300.8, 294.2], [284.4, 294.9, 300.2],
    ]
)  # fmt: skip
Y = np.array(
    [
        [306.9, 316.4, 306.6], [208.7, 233.3, 284.8], [277.3, 296.4, 296.5], [353.5, 256.6, 278.7],
        [351.3, 309.4, 309.9],
    ]
)  # fmt: skip
THRESHOLDS = [280.0, 290.0, 300.6, 310.0, 320.0]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [(X, 302.0909090909), (Y, 296.2777777778), (X[:3], 308.26), (X[:, 0], 294.36)],
)
def test_the_interquartile_mean_is_rliables(scores: np.ndarray, expected: float) -> None:
    assert iqm(scores) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("n", range(1, 14))
def test_the_interquartile_mean_is_a_trimmed_mean(n: int) -> None:
    scores = np.random.default_rng(n).normal(size=(n, 5)) ** 3
    assert iqm(scores, 0) == pytest.approx(trim_mean(scores, 0.25, axis=0))
    assert iqm(scores.T, 1) == pytest.approx(trim_mean(scores, 0.25, axis=0))
    assert iqm(scores) == pytest.approx(trim_mean(scores, 0.25, axis=None))


@pytest.mark.parametrize(
    ("scores", "low", "high"),
    [(X, 296.5, 307.109), (X[:, 0], 282.48, 306.3), (Y, 276.022, 310.256)],
)
def test_intervals_are_rliables(scores: np.ndarray, low: float, high: float) -> None:
    assert interval(scores) == pytest.approx((low, high), abs=0.02 * (high - low))


def test_the_probability_of_improvement_is_rliables() -> None:
    assert probability_of_improvement(X, Y) == pytest.approx(0.5952380952)
    assert probability_of_improvement(X[:, 0], Y[:, 0]) == pytest.approx(0.4142857143)
    assert improvement_interval(X, Y) == pytest.approx((0.38095, 0.79524), abs=0.02)


def test_the_performance_profile_is_rliables() -> None:
    expected = [0.95238095, 0.80952381, 0.52380952, 0.23809524, 0.0]
    assert performance_profile(X, THRESHOLDS) == pytest.approx(expected)
    low, high = profile_band(X, THRESHOLDS)
    assert low == pytest.approx([0.857, 0.714, 0.333, 0.095, 0.0], abs=0.03)
    assert high == pytest.approx([1.0, 0.952, 0.715, 0.429, 0.0], abs=0.03)


def test_a_tie_counts_half_and_the_two_directions_add_to_one() -> None:
    assert probability_of_improvement([1, 2], [1, 2]) == 0.5
    assert probability_of_improvement([1, 2, 3], [1]) == pytest.approx((0.5 + 1 + 1) / 3)
    there, back = probability_of_improvement(X, Y), probability_of_improvement(Y, X)
    assert there + back == pytest.approx(1)
    assert improvement_interval([5, 6, 7], [1, 2, 3]) == (1, 1)


def test_seeds_are_resampled_within_their_task() -> None:
    """Seeds that agree on every task leave nothing uncertain, however much tasks differ."""
    agreed = np.tile([0.0, 10.0, 1000.0], (5, 1))
    assert (resample(agreed, 50, np.random.default_rng(0)) == agreed).all()
    assert interval(agreed) == (iqm(agreed), iqm(agreed))
    sample = resample(X, 400, np.random.default_rng(0))
    assert sample.shape == (400, *X.shape)
    own = np.searchsorted(np.sort(X[:, 0]), sample[..., 0])
    other = np.searchsorted(np.sort(X[:, 1]), sample[..., 1])
    assert abs(np.corrcoef(own.ravel(), other.ravel())[0, 1]) < 0.1


def test_intervals_repeat_and_are_of_any_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interval(X) == interval(X) != interval(X, seed=1)
    whole = interval(X, lambda samples: samples.max((1, 2)))
    assert X.mean() < whole[0] <= whole[1] == X.max()
    monkeypatch.setattr(statistics, "CHUNK", 21 * 1000)
    assert interval(X, seed=1) == pytest.approx(interval(X), abs=0.3)


def test_the_interval_of_a_ratio_is_scipys() -> None:
    x, y, origin = X[:, 0], Y[:, 0], -100.0

    def ratio(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return (trim_mean(x, 0.25, axis) - origin) / (trim_mean(y, 0.25, axis) - origin)

    known = bootstrap((x, y), ratio, n_resamples=50_000, method="percentile", rng=0)
    expected = tuple(known.confidence_interval)
    assert ratio_interval(x, y, origin) == pytest.approx(expected, abs=0.003)


def test_a_ratio_to_what_may_be_nothing_has_no_interval() -> None:
    """One seed of the reference below the origin turns the sign of many a resample."""
    assert np.isnan(ratio_interval([90.0, 91, 92, 93, 94], [100.0, 100, 100, 100, -300], 0.0)).all()
    assert np.isnan(ratio_interval([90.0, 91], [100.0, 0.0], 0.0)).all()
    low, high = ratio_interval([-90.0, 91], [100.0, 100.0], 0.0)
    assert (low, high) == (-0.9, 0.91)


def test_one_seed_has_no_interval() -> None:
    assert np.isnan(ratio_interval([3.0], [1.0, 2.0], 0.0)).all()
    assert np.isnan(interval([3.0])).all()
    assert np.isnan(improvement_interval([3.0], [1.0, 2.0])).all()
    assert np.isnan(band([[3.0, 4.0]])).all()
    assert np.isnan(coverage(1))


def test_a_band_is_an_interval_at_each_point() -> None:
    low, high = band(X, repetitions=20_000)
    expected = np.array([interval(column) for column in X.T])
    assert np.stack([low, high], 1) == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize(("seeds", "expected"), [(3, 0.76), (5, 0.91), (10, 0.93)])
def test_coverage_falls_short_of_what_an_interval_promises(seeds: int, expected: float) -> None:
    """Known figures, to two percentage points."""
    assert coverage(seeds) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("seeds", [2, 3])
def test_coverage_of_very_few_seeds_is_exact(seeds: int) -> None:
    """The interval then reaches from the lowest score to the highest: it misses where all lie on
    one side of the truth."""
    assert coverage(seeds) == pytest.approx(1 - 2 * 0.5**seeds, abs=0.015)


def test_coverage_is_that_of_the_interval_itself() -> None:
    """Over 500 data sets: a standard error of 1.3 percentage points."""
    held = 0
    for i, scores in enumerate(np.random.default_rng(0).normal(7.0, 2.0, (500, 5))):
        low, high = interval(scores, repetitions=5_000, seed=i)
        held += low <= 7.0 <= high
    assert held / 500 == pytest.approx(coverage(5), abs=0.04)
