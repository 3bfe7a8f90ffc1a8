"""Statistics over seeds, as Agarwal et al. 2021 (arXiv:2108.13264) and their rliable define them.

Scores are arrays [seeds] of one task, or [seeds, tasks]; a seed's score is the mean of its final
episodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Interval = tuple[float, float]

CHUNK = 2_000_000  # numbers that a step of a bootstrap holds at once


def iqm(scores: ArrayLike, axis: int | None = None) -> Array:
    """Interquartile mean: of what is left when the lowest and highest quarter, rounded down to
    whole scores, are cut. With fewer than four scores it is the mean.

    Over all seeds and tasks together, or along `axis`.
    """
    array = np.asarray(scores, float)
    if axis is None:
        array, axis = array.ravel(), 0
    ordered = np.sort(array, axis)
    n = ordered.shape[axis]
    cut = n // 4
    return ordered.take(range(cut, n - cut), axis).mean(axis)


def resample(scores: ArrayLike, count: int, rng: np.random.Generator) -> Array:
    """`count` bootstrap samples, [count, seeds, tasks]: seeds are drawn with replacement, for each
    task (stratum) on their own."""
    array = by_task(scores)
    seeds, tasks = array.shape
    return array[rng.integers(seeds, size=(count, seeds, tasks)), np.arange(tasks)]


def interval(
    scores: ArrayLike,
    statistic: Callable[[Array], Array] = lambda samples: iqm(samples.reshape(len(samples), -1), 1),
    *,
    repetitions: int = 20_000,
    seed: int = 0,
) -> Interval:
    """95 % percentile bootstrap interval of a statistic of [samples, seeds, tasks], the IQM unless
    given. NaN for one seed, which tells nothing of others."""
    array = by_task(scores)
    if len(array) < 2:
        return np.nan, np.nan
    rng = np.random.default_rng(seed)
    step = max(1, CHUNK // array.size)
    counts = [min(step, repetitions - done) for done in range(0, repetitions, step)]
    values = np.concatenate([statistic(resample(array, count, rng)) for count in counts])
    low, high = percentiles(values)
    return float(low), float(high)


def band(curves: ArrayLike, *, repetitions: int = 2_000, seed: int = 0) -> tuple[Array, Array]:
    """95 % percentile bootstrap intervals of the IQM over seeds at each point of [seeds, points];
    a seed's curve is drawn whole."""
    array = np.asarray(curves, float)
    if len(array) < 2:
        return np.full(array.shape[1], np.nan), np.full(array.shape[1], np.nan)
    rng = np.random.default_rng(seed)
    draws = rng.integers(len(array), size=(repetitions, len(array)))
    values = np.stack([iqm(column[draws], 1) for column in array.T], 1)
    return percentiles(values)


def probability_of_improvement(x: ArrayLike, y: ArrayLike) -> float:
    """Probability that a seed of `x` beats one of `y` on the same task, a tie counting half (the
    Mann-Whitney statistic over the number of pairs), averaged over tasks."""
    return float(_improvement(by_task(x)[None], by_task(y)[None])[0])


def improvement_interval(
    x: ArrayLike, y: ArrayLike, *, repetitions: int = 2_000, seed: int = 0
) -> Interval:
    """95 % percentile bootstrap interval of it; `x` and `y` are resampled on their own."""
    x, y = by_task(x), by_task(y)
    if min(len(x), len(y)) < 2:
        return np.nan, np.nan
    rng = np.random.default_rng(seed)
    samples = range(repetitions)
    values = [_improvement(resample(x, 1, rng), resample(y, 1, rng))[0] for _ in samples]
    low, high = percentiles(np.array(values))
    return float(low), float(high)


def ratio_interval(
    x: ArrayLike, y: ArrayLike, origin: float, *, repetitions: int = 20_000, seed: int = 0
) -> Interval:
    """95 % percentile bootstrap interval of (IQM of x - origin) / (IQM of y - origin), scores of
    one task [seeds]; `x` and `y` are resampled on their own. NaN for one seed, and where a resample
    of `y` is not above the origin: past 0 a ratio changes its sign, and its order tells nothing."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    if min(len(x), len(y)) < 2:
        return np.nan, np.nan
    rng = np.random.default_rng(seed)
    above = [iqm(resample(s, repetitions, rng)[..., 0], 1) - origin for s in (x, y)]
    if above[1].min() <= 0:
        return np.nan, np.nan
    low, high = percentiles(above[0] / above[1])
    return float(low), float(high)


def _improvement(x: Array, y: Array) -> Array:
    """Of samples [samples, seeds, tasks]."""
    difference = x[:, :, None] - y[:, None]
    return ((difference > 0) + 0.5 * (difference == 0)).mean((1, 2, 3))


def performance_profile(scores: ArrayLike, thresholds: ArrayLike) -> Array:
    """Share of seeds (and tasks) that score above each threshold."""
    return (np.asarray(scores, float).ravel()[:, None] > np.asarray(thresholds)).mean(0)


def profile_band(
    scores: ArrayLike, thresholds: ArrayLike, *, repetitions: int = 2_000, seed: int = 0
) -> tuple[Array, Array]:
    """95 % percentile bootstrap intervals of the profile at each threshold."""
    samples = resample(scores, repetitions, np.random.default_rng(seed))
    profiles = np.stack([performance_profile(sample, thresholds) for sample in samples])
    return percentiles(profiles)


@functools.cache
def coverage(seeds: int, *, simulations: int = 4_000, repetitions: int = 8_000) -> float:
    """How often the nominal 95 % percentile bootstrap interval of the IQM holds the true one, when
    `seeds` scores are normal: simulated, to about half a percentage point.

    It is less than it says: a bootstrap of few seeds knows too little of their spread.
    """
    if seeds < 2:
        return np.nan
    rng = np.random.default_rng(0)
    # The IQM of a sample of sorted scores is a weighted sum of them, whatever their values.
    kept = np.sort(rng.integers(seeds, size=(repetitions, seeds)), 1)
    kept = kept[:, seeds // 4 : seeds - seeds // 4]
    weights = np.zeros((repetitions, seeds))
    np.add.at(weights, (np.arange(repetitions)[:, None], kept), 1 / kept.shape[1])
    held, step = 0, max(1, CHUNK // repetitions)
    for done in range(0, simulations, step):
        scores = np.sort(rng.standard_normal((min(step, simulations - done), seeds)), 1)
        low, high = percentiles(scores @ weights.T, axis=1)
        held += int(((low <= 0) & (high >= 0)).sum())
    return held / simulations


def percentiles(values: Array, axis: int = 0) -> tuple[Array, Array]:
    """Where the middle 95 % of values begin and end."""
    low, high = np.percentile(values, [2.5, 97.5], axis=axis)
    return low, high


def by_task(scores: ArrayLike) -> Array:
    """Scores as [seeds, tasks]."""
    array = np.asarray(scores, float)
    return array[:, None] if array.ndim == 1 else array
