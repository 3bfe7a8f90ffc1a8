"""Two short tests on one replay buffer: the learning-rate range test (Smith 2017, arXiv:1506.01186)
and a comparison of optimisers.

Rollouts fill the buffer once. Every probe starts from the same agent and draws the same minibatches
from it, so that only what is tested differs; no new transitions are collected meanwhile.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d

from sansac import kernels
from sansac.checkpoint import write_atomically
from sansac.config import Config, ConfigError
from sansac.logger import Logger
from sansac.manager import Manager
from sansac.off_policy import set_learning_rate
from sansac.page import check_directory
from sansac.progress import Progress
from sansac.tune_plots import plot_lr_range, plot_optimizers

Array = NDArray[np.float64]

RATES = {  # what a range test sweeps: optimisers, options
    "all": ("actor", "critic", "temperature"),
    "actor": ("actor",),
    "critic": ("critic",),
}
OPTIONS = {
    "actor": "actor.learning-rate", "critic": "critic.learning-rate",
    "temperature": "sac.learning-rate",
}  # fmt: skip
DIVERGED = 4.0  # times its start that the critics' loss may reach before a range test ends
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "RMSprop": torch.optim.RMSprop,
    "SGD": torch.optim.SGD,
}


class Bench:
    """An agent and a full buffer, which `reset` brings back to how they were."""

    def __init__(self, manager: Manager) -> None:
        self.manager, self.algorithm = manager, manager.algorithm
        self.optimizers = manager.algorithm.optimizers
        self._state = copy.deepcopy(manager.algorithm.state_dict())
        streams = [s for s in vars(manager.replay).values() if isinstance(s, torch.Generator)]
        self._streams = [(stream, stream.get_state()) for stream in streams]

    def reset(self) -> None:
        self.algorithm.optimizers = self.optimizers
        self.algorithm.load_state_dict(copy.deepcopy(self._state))
        for stream, state in self._streams:
            stream.set_state(state)

    def update(self) -> dict[str, float]:
        """One update on a fresh minibatch, or as many as a delayed policy waits for: the losses."""
        learning = self.manager.config.learning
        metrics: dict[str, torch.Tensor] = {}
        with kernels.products(learning.precision):
            for _ in range(learning.policy_delay):
                batch = self.manager.replay.sample(learning.batch_size)
                metrics |= self.algorithm.update(batch)
        return {tag: float(value) for tag, value in metrics.items() if tag.startswith("loss/")}

    def evaluate(self, episodes: int) -> float:
        """Mean return of the deterministic policy, always on the same episodes; NaN where its
        weights have blown up."""
        weights = self.algorithm.policy_actor.parameters()
        if not all(bool(weight.isfinite().all()) for weight in weights):
            return math.nan
        return float(self.manager.evaluate(episodes)["return_mean"])


@contextmanager
def bench(config: Config, out: Path, warm_up: int | None, updates: int) -> Iterator[Bench]:
    """Fill a buffer by `warm_up` environment steps (none: learning.learning_starts): random ones up
    to learning.learning_starts, training after. Raises ConfigError where they are fewer."""
    starts = config.learning.learning_starts
    steps = starts if warm_up is None else warm_up
    if steps < starts:
        raise ConfigError(f"--warm-up ({steps}) is below learning.learning_starts ({starts})")
    manager = Manager(config)
    out.mkdir(parents=True, exist_ok=True)
    manager.run_dir = out
    title = f"{config.env} {config.actor_name}"
    with (
        Logger(config, out, device=manager.device) as manager.logger,
        Progress(steps + updates, 0, title) as manager.progress,
        manager.opened(manager.progress),
    ):
        while manager.step < steps:
            manager.collect()
            manager.learn()
        yield Bench(manager)


# -- the learning-rate range test ------------------------------------------------------------------


@dataclass
class LrRange:
    """Per update, [N]: the rate, both losses, the smoothed judged loss and its slope over log10 of
    the rate; returns at some of them, NaN elsewhere. The critics' loss, which falls over decades,
    is smoothed as its log10, and the slope is that one's."""

    title: str
    of: str
    rate: Array
    critic: Array
    actor: Array
    returns: Array
    smooth: Array
    slope: Array
    diverged: bool

    @property
    def loss(self) -> str:
        """The loss that is judged by."""
        return "actor" if self.of == "actor" else "critic"

    @property
    def whose(self) -> str:
        return "actor, critics and temperature" if self.of == "all" else self.of

    @property
    def suggestion(self) -> float | None:
        """The rate where the loss falls fastest before its minimum; None where it never falls."""
        before = self.slope[: int(self.smooth.argmin()) + 1]
        at = int(before.argmin())
        return float(self.rate[at]) if before[at] < 0 else None

    @property
    def best_return(self) -> tuple[float, float]:
        """The highest mean return on the way, and the rate there."""
        at = int(np.nanargmax(self.returns))
        return float(self.returns[at]), float(self.rate[at])

    @property
    def options(self) -> str:
        """The suggestion as options of `train`."""
        return " ".join(f"--{OPTIONS[name]} {self.suggestion:.2g}" for name in RATES[self.of])

    def summary(self) -> dict[str, Any]:
        best, rate = self.best_return
        return {
            "title": self.title,
            "of": self.of,
            "suggestion": self.suggestion,
            "lowest_loss_at": float(self.rate[self.smooth.argmin()]),
            "best_return": best,
            "best_return_at": rate,
            "updates": len(self.rate),
            "diverged": self.diverged,
        }


def lr_range(
    config: Config,
    out: Path,
    *,
    of: str = "all",
    low: float = 1e-6,
    high: float = 1.0,
    updates: int = 1000,
    warm_up: int | None = None,
    points: int = 10,
    episodes: int = 3,
    overwrite: bool = False,
) -> LrRange:
    """Multiply the rate by the same factor at every update and see where the loss falls and where
    it blows up, which ends the test. Writes lr_range.csv, .json and .png into `out`.

    Raises ConfigError for what cannot be.
    """
    check_directory(out, overwrite)
    if not 0 < low < high or not math.isfinite(high):
        raise ConfigError(f"--low ({low}) must be above 0 and below --high ({high})")
    check_counts(updates, points, episodes, least=20)
    rates = np.geomspace(low, high, updates)
    rows: list[tuple[float, float, float, float]] = []
    with bench(config, out, warm_up, updates) as at:
        window, diverged = max(5, updates // 20), False
        for i, rate in enumerate(rates):
            set_rate(at, RATES[of], rate)
            losses = at.update()
            due = evaluated(i, updates, points)
            mean_return = at.evaluate(episodes) if due else math.nan
            rows.append((rate, losses["loss/critic"], losses["loss/actor"], mean_return))
            tell(at.manager, i + 1, f"rate {rate:.1e}", rows[-1][1], mean_return if due else None)
            critic = [row[1] for row in rows]
            begun, now = np.mean(critic[:window]), np.mean(critic[-window:])
            if not np.isfinite(rows[-1][1:3]).all() or now > DIVERGED * begun:
                diverged = True
                at.manager.progress.note(f"the loss has blown up at rate {rate:.1e}: the test ends")
                break
    found = judge(title_of(config), of, rows, diverged)
    header = ["rate", "loss/critic", "loss/actor", "return", "smooth", "slope"]
    columns = found.rate, found.critic, found.actor, found.returns, found.smooth, found.slope
    write_csv(out / "lr_range.csv", header, zip(*columns, strict=True))
    write_json(out / "lr_range.json", found.summary())
    plot_lr_range(found, out / "lr_range.png")
    return found


def set_rate(at: Bench, names: Sequence[str], rate: float) -> None:
    for name in names:
        if name in at.algorithm.optimizers:  # the temperature may be fixed
            for group in at.algorithm.optimizers[name].param_groups:
                set_learning_rate(group, float(rate))


def judge(
    title: str, of: str, rows: Sequence[tuple[float, float, float, float]], diverged: bool
) -> LrRange:
    """Smooth the loss over a twenty-fifth of the test, without lag, and take its slope."""
    finite = [row for row in rows if np.isfinite(row[1:3]).all()]
    if len(finite) < 3:
        raise ConfigError("the loss is not finite at the lowest rate: give a lower --low")
    rate, critic, actor, returns = np.array(finite).T
    loss = actor if of == "actor" else np.log10(critic)
    sigma = max(2.0, len(loss) / 25)
    smooth = gaussian_filter1d(loss, sigma, mode="nearest")
    slope = gaussian_filter1d(loss, sigma, order=1, mode="nearest") / np.log10(rate[1] / rate[0])
    if of != "actor":
        smooth = 10**smooth
    return LrRange(title, of, rate, critic, actor, returns, smooth, slope, diverged)


# -- the comparison of optimisers ------------------------------------------------------------------


@dataclass
class Probe:
    """An optimiser at a rate: the critics' loss of every update, [N]; returns at some updates."""

    optimizer: str
    rate: float | None  # None: the configuration's own
    losses: Array
    updates: list[int]
    returns: list[float]

    @property
    def mean_loss(self) -> float:
        return float(self.losses.mean())

    @property
    def mean_return(self) -> float:
        """NaN where the weights blew up on the way."""
        return float(np.mean(self.returns))

    @property
    def name(self) -> str:
        return self.optimizer if self.rate is None else f"{self.optimizer}, {self.rate:.1e}"

    def summary(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer,
            "rate": self.rate,
            "mean_return": none_if_nan(self.mean_return),
            "last_return": none_if_nan(self.returns[-1]),
            "mean_loss": none_if_nan(self.mean_loss),
        }


def compare_optimizers(
    config: Config,
    out: Path,
    *,
    by: str = "return",
    rates: Sequence[float] = (),
    updates: int = 1000,
    warm_up: int | None = None,
    points: int = 5,
    episodes: int = 3,
    overwrite: bool = False,
) -> list[Probe]:
    """Every optimiser of torch's defaults at every rate (none: the configuration's own), best
    first: by mean return over the evaluations, or by the critics' mean loss. Writes optimizers.csv,
    .json and .png into `out`.

    Raises ConfigError for what cannot be.
    """
    check_directory(out, overwrite)
    check_counts(updates, points, episodes, least=1)
    if any(not 0 < rate < math.inf for rate in rates):
        raise ConfigError(f"--rates must be above 0, found {' '.join(map(str, rates))}")
    each: Sequence[float | None] = rates or [None]
    wanted = [(name, rate) for name in OPTIMIZERS for rate in each]
    probes = []
    with bench(config, out, warm_up, updates * len(wanted)) as at:
        for number, (name, rate) in enumerate(wanted):
            probes.append(probe(at, name, rate, number, updates, points, episodes))
    probes = ranked(probes, by)
    curves = (
        (p.optimizer, p.rate, i + 1, loss, dict(zip(p.updates, p.returns, strict=True)).get(i + 1))
        for p in probes
        for i, loss in enumerate(p.losses)
    )
    header = ["optimizer", "rate", "update", "loss/critic", "return"]
    write_csv(out / "optimizers.csv", header, curves)
    found = {"title": title_of(config), "by": by, "probes": [p.summary() for p in probes]}
    write_json(out / "optimizers.json", found)
    plot_optimizers(probes, title_of(config), out / "optimizers.png")
    return probes


def probe(
    at: Bench, name: str, rate: float | None, number: int, updates: int, points: int, episodes: int
) -> Probe:
    at.reset()
    at.algorithm.optimizers = {
        part: OPTIMIZERS[name](rated(old.param_groups, rate)) for part, old in at.optimizers.items()
    }
    found = Probe(name, rate, np.full(updates, math.nan), [], [])
    for i in range(updates):
        found.losses[i] = at.update()["loss/critic"]
        mean_return = None
        if evaluated(i, updates, points):
            mean_return = at.evaluate(episodes)
            found.updates.append(i + 1)
            found.returns.append(mean_return)
        tell(at.manager, number * updates + i + 1, found.name, found.losses[i], mean_return)
    return found


def rated(groups: Sequence[dict[str, Any]], rate: float | None) -> list[dict[str, Any]]:
    """Parameter groups with a rate of their own, or with the one that training began with."""
    return [{"params": group["params"], "lr": rate or group["initial_lr"]} for group in groups]


def ranked(probes: Sequence[Probe], by: str) -> list[Probe]:
    """Best first; what blew up comes last."""
    score = {"return": lambda p: -p.mean_return, "loss": lambda p: p.mean_loss}[by]
    return sorted(probes, key=lambda p: (not math.isfinite(score(p)), score(p)))


# -- what both share -------------------------------------------------------------------------------


def check_counts(updates: int, points: int, episodes: int, least: int) -> None:
    if updates < least or not 1 <= points <= updates or episodes < 1:
        raise ConfigError(
            f"expected --updates of at least {least}, --points between 1 and --updates, and "
            f"--episodes of at least 1; found {updates}, {points} and {episodes}"
        )


def evaluated(i: int, updates: int, points: int) -> bool:
    """Whether update i, from 0, is one of the `points` that are evaluated: evenly, the last too."""
    return (i + 1) * points // updates > i * points // updates


def tell(manager: Manager, done: int, what: str, loss: float, mean_return: float | None) -> None:
    manager.progress.update(manager.step + done, manager.updates + done)
    if mean_return is not None:
        manager.progress.note(f"{what}: critic loss {loss:.3g}, return {mean_return:.1f}")


def title_of(config: Config) -> str:
    return f"{config.env}, {config.actor_name} actor"


def none_if_nan(number: float) -> float | None:
    return number if math.isfinite(number) else None


def write_csv(path: Path, header: Sequence[str], rows: Iterator[Sequence[Any]]) -> None:
    """NaN and None are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow("" if cell is None or cell != cell else cell for cell in row)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
