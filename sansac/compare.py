"""Many runs side by side: groups of seeds, honest statistics, and what makes them unlike.

A group's numbers are over its finished runs, a seed's score being the mean of its final episodes.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from sansac import statistics
from sansac.checkpoint import read_config, read_record, write_atomically
from sansac.compare_plots import (
    AXES,
    curve_lines,
    draw_curves,
    draw_final,
    draw_improvement,
    draw_pareto,
    draw_profile,
    profile_lines,
)
from sansac.config import Config, ConfigError, fields, nearest
from sansac.environments import env_factory
from sansac.evaluation import random_return
from sansac.logger import Row, read_metrics
from sansac.page import (
    HOVER,
    SORT,
    Picture,
    check_directory,
    data_uri,
    page,
    render,
    render_themes,
    section,
    table,
)
from sansac.plots import COLORS
from sansac.statistics import Array, Interval
from sansac.watch import number

REPORT = "report.html"
FEWEST = 5  # seeds below which a group is flagged
MOST_VIDEO = 4_000_000  # bytes of a video in the report
POINTS = 100  # most points of a group's curve
NONE = "–"
PAIRED = 8  # groups of which all pairs are compared
READ = {"returns": list, "step": int, "seed": int, "episodes": int}  # of a final evaluation
RUN_COLUMNS = (  # of a final evaluation, in runs.csv
    "episodes", "return_std", "return_iqm", "return_min", "return_max", "length_mean",
)  # fmt: skip
# Fields that say where and how often things are told, not what is learned; seeds; and what is
# flagged from the record of the run itself.
IGNORED = (
    "seed", "name", "runs_dir", "video", "wandb", "wandb_project", "tensorboard", "log_every",
    "checkpoint_every", "device", "threads",
)  # fmt: skip


# -- runs and groups ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    path: Path
    config: Config
    record: dict[str, Any]
    rows: list[Row]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def final(self) -> dict[str, Any]:
        """The evaluation that ended the run; {} where it has not ended."""
        final = self.record.get("final", {}) if self.record.get("status") == "finished" else {}
        return final if all(type(final.get(key)) is kind for key, kind in READ.items()) else {}

    @property
    def score(self) -> float:
        return float(np.mean(self.final["returns"]))

    @property
    def minutes(self) -> float:
        return self.rows[-1]["time"] / 60 if self.rows else 0.0

    @property
    def updates(self) -> int:
        return self.rows[-1]["updates"] if self.rows else 0

    def a_second(self, counter: str) -> float:
        """Steps or updates a second of collecting and learning, over the whole run."""
        return self.rows[-1][counter] / self.rows[-1]["time"] if self.minutes else math.nan

    @property
    def energy(self) -> float:
        """What the GPU drew during the run (J); NaN where it was not measured."""
        tag = "gpu/energy_joules"
        return next((row[tag] for row in reversed(self.rows) if tag in row), math.nan)

    @cached_property
    def account(self) -> dict[str, Any]:
        """What the command `energy` left in the run; {} where it was not called."""
        return read_json(self.path / "energy.json")

    @cached_property
    def latency(self) -> dict[str, Any]:
        """What the command `latency` left in the run; {} where it was not called."""
        return read_json(self.path / "latency.json")

    @property
    def other_deployment(self) -> bool:
        """Whether they are of another policy than the final evaluation's."""
        found = [result["step"] for result in (self.account, self.latency) if result]
        return any(step != self.final.get("step") for step in found)

    def joules(self, side: str = "agent", kind: str = "arithmetic") -> float:
        """Modelled joules of an action under the first model; NaN where they are not known."""
        for model in self.account.get("models", {}).values():
            return model["joules"].get(side, {}).get(kind, math.nan)
        return math.nan

    @cached_property
    def evaluations(self) -> dict[str, Array]:
        """Evaluations by axis, and their mean `return`s."""
        tag = "eval/return_mean"
        rows = [row for row in self.rows if math.isfinite(row.get(tag, math.nan))]
        return {
            "step": np.array([row["step"] for row in rows], float),
            "updates": np.array([row["updates"] for row in rows], float),
            "minutes": np.array([row["time"] / 60 for row in rows]),
            "return": np.array([row[tag] for row in rows]),
        }

    def setting(self, key: str) -> str:
        """The value of a field as text; NONE for what a dense actor has not."""
        if key == "actor":
            return self.config.actor_name
        if key == "name":  # as a sweep gives them: runs of one setting share it, but for the seed
            return re.sub(rf"-s{self.config.seed}(?=-|$)", "", self.name, count=1)
        if key.startswith("spiking.") and not self.config.san:
            return NONE
        value = attrgetter(key)(self.config)
        return value if isinstance(value, str) else json.dumps(value, default=str)

    def steps_to(self, threshold: float) -> float:
        """Steps at the first evaluation whose mean return reaches it; infinity if none does."""
        reached = self.evaluations["return"] >= threshold
        return float(self.evaluations["step"][reached.argmax()]) if reached.any() else math.inf


@dataclass(frozen=True)
class Group:
    name: str
    runs: list[Run]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.final]

    @property
    def scores(self) -> Array:
        return np.array([run.score for run in self.finished])

    @property
    def seeds(self) -> str:
        count = len(self.finished)
        return "1 seed" if count == 1 else f"{count} seeds"


class Curve(NamedTuple):
    """A statistic over seeds, the IQM of a learning curve, and its bootstrap band."""

    x: Array
    y: Array
    low: Array
    high: Array


class Improvement(NamedTuple):
    """Probability that a seed of `better` beats one of `than`."""

    better: str
    than: str
    probability: float
    interval: Interval


class Ratio(NamedTuple):
    """How a group's IQM is to the reference's, both above the return of random actions."""

    group: str
    ratio: float
    interval: Interval


def read_runs(words: Iterable[str | Path]) -> list[Run]:
    """The runs of directories, of directories that hold run directories anywhere below, and of
    globs; each once. Raises ConfigError."""
    directories: dict[Path, Path] = {}
    for word in map(str, words):
        paths = [Path(word)] if Path(word).exists() else map(Path, glob.glob(word, recursive=True))
        found = [record.parent for path in paths for record in sorted(path.rglob("run.json"))]
        if not found:
            raise ConfigError(f"{word}: there is no run directory (one that holds a run.json)")
        directories |= {path.resolve(): path for path in found}
    return [read_run(path) for path in directories.values()]


def read_run(path: Path) -> Run:
    metrics = path / "metrics.jsonl"
    try:
        rows = read_metrics(metrics) if metrics.exists() else []
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Run(path, read_config(path), read_record(path), rows)


def read_json(path: Path) -> dict[str, Any]:
    """A file that a command left in a run; {} where there is none. Raises ConfigError."""
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): make it again") from None


def group_runs(runs: Sequence[Run], by: str) -> list[Group]:
    """Groups of runs alike in `by`: `actor`, `name` (less its seed), another field, or several,
    separated by commas."""
    keys = keys_of(by)
    for key in keys:
        if key not in fields() and key != "actor":
            raise ConfigError(f"--by: unknown field {key!r}" + nearest(key, ["actor", *fields()]))
    groups: dict[str, list[Run]] = {}
    for run in runs:
        words = {}
        for key in keys:
            value = run.setting(key)
            short = key.rpartition(".")[2]
            alone = key in ("actor", "name")
            words["dense" if value == NONE else value if alone else f"{short} {value}"] = 1
        groups.setdefault(", ".join(words), []).append(run)
    return [Group(name, groups[name]) for name in sorted(groups, key=natural)]


def keys_of(by: str) -> list[str]:
    return [key.strip().replace("-", "_") for key in by.split(",")]


def natural(name: str) -> list[Any]:
    """A key that sorts `2` before `10`."""
    return [
        (0, float(part), "") if i % 2 else (1, 0.0, part)
        for i, part in enumerate(re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", name))
    ]


# -- what makes runs unlike --------------------------------------------------------------------


def check_environments(runs: Sequence[Run]) -> None:
    """Raises ConfigError where returns do not compare at all."""
    kinds = by_value(runs, lambda run: " ".join([run.config.env, run.setting("env_kwargs")]))
    if len(kinds) > 1:
        raise ConfigError("returns of different environments do not compare: " + listed(kinds))


def find_flags(groups: Sequence[Group], by: str) -> list[str]:
    """What a reader must know before believing a comparison."""
    runs = [run for group in groups for run in group.runs]
    finished = [run for run in runs if run.final]
    flags = []
    few = [f"{g.name} has {len(g.finished)}" for g in groups if len(g.finished) < FEWEST]
    if few:
        flags.append(f"fewer than {FEWEST} finished seeds: {', '.join(few)}; see the coverage")
    if left_out := by_value(
        [run for run in runs if not run.final], lambda run: run.record.get("status", "unknown")
    ):
        flags.append("unfinished runs, drawn but in no statistic: " + listed(left_out))
    for group in groups:
        seeds = by_value(group.finished, lambda run: f"seed {run.config.seed}")
        twice = {seed: of for seed, of in seeds.items() if len(of) > 1}
        if twice:
            flags.append(f"{group.name}: runs of one seed are not independent: " + listed(twice))
    checks: list[tuple[str, Sequence[Run], Callable[[Run], str]]] = [
        ("unequal budgets", finished, lambda run: f"{run.final['step']:,} steps"),
        ("unequal budgets", finished, lambda run: f"{run.updates:,} updates"),
        ("different evaluation seeds", finished, lambda run: f"seed {run.final['seed']}"),
        ("different evaluations", finished, lambda run: f"{run.final['episodes']} episodes"),
        ("mixed commits", runs, lambda run: str(run.record.get("commit"))[:10]),
        ("mixed versions", runs, lambda run: versions(run.record)),
        ("minutes do not compare: different machines", runs, lambda run: engine(run.record)),
    ]
    for title, of, value in checks:
        kinds = by_value(of, value)
        if len(kinds) > 1:
            flags.append(f"{title}: {listed(kinds)}")
    if dirty := [run for run in runs if run.record.get("dirty")]:
        flags.append("code changed since its commit: " + names(dirty))
    if other := [run for run in finished if run.other_deployment]:
        flags.append("energy or latency of another checkpoint than the final one: " + names(other))
    return flags + settings_flags(groups, by)


def settings_flags(groups: Sequence[Group], by: str) -> list[str]:
    rows = differences(groups, by)
    between = [key for key, *cells in rows if len({*cells} - {NONE}) > 1]
    within = [key for key, *cells in rows if any(" | " in cell for cell in cells)]
    flags = []
    if between and "name" not in keys_of(by):
        flags.append(f"groups differ in more than {by}: {', '.join(between)}")
    if within:
        flags.append(f"settings vary within a group: {', '.join(within)}")
    return flags


def differences(groups: Sequence[Group], by: str) -> list[list[str]]:
    """Field, then its value in each group, of every field that is not the same in all runs."""
    own = set(keys_of(by))
    own |= {"san"} if "actor" in own else set()
    rows = []
    for key in fields():
        if key in own or key in IGNORED:
            continue
        kinds = [{run.setting(key) for run in group.runs} for group in groups]
        if len(set().union(*kinds) - {NONE}) > 1:
            rows.append([key, *(" | ".join(sorted(values)) for values in kinds)])
    return rows


def by_value(runs: Sequence[Run], value: Callable[[Run], str]) -> dict[str, list[Run]]:
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        kinds.setdefault(value(run), []).append(run)
    return kinds


def listed(kinds: dict[str, list[Run]]) -> str:
    return "; ".join(f"{value} ({names(runs)})" for value, runs in kinds.items())


def names(runs: Sequence[Run]) -> str:
    more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    return ", ".join(run.name for run in runs[:3]) + more


def versions(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())


def engine(record: dict[str, Any]) -> str:
    """What computed: machine, device and threads."""
    parts = [record.get("machine"), record.get("device"), f"{record.get('threads')} threads"]
    return ", ".join(map(str, parts))


# -- numbers -----------------------------------------------------------------------------------


def summary(group: Group, threshold: float | None) -> dict[str, Any]:
    """A group's numbers by column; NaN and infinity where there are none."""
    runs, scores = group.finished, group.scores
    row: dict[str, Any] = {"group": group.name, "seeds": len(runs), "runs": len(group.runs)}
    if not runs:
        return row
    low, high = statistics.interval(scores)
    lowest = min(runs, key=lambda run: run.score)
    row |= {
        "mean": scores.mean(),
        "iqm": float(statistics.iqm(scores)),
        "low": low,
        "high": high,
        "coverage": statistics.coverage(len(runs)),
        "lowest": lowest.score,
        "lowest_seed": lowest.config.seed,
        "minutes": np.mean([run.minutes for run in runs]),
        "steps_per_second": np.mean([run.a_second("step") for run in runs]),
        "updates_per_second": np.mean([run.a_second("updates") for run in runs]),
        "gpu_energy_joules": np.mean([run.energy for run in runs]),
    }
    row |= deployment(runs)
    rates = [run.final.get("firing_rate", []) for run in runs]
    if len({len(rate) for rate in rates}) == 1:
        row |= {f"firing_rate_{i}": rate for i, rate in enumerate(np.mean(rates, 0))}
    if threshold is not None:
        steps = [run.steps_to(threshold) for run in runs]
        row["steps_to_threshold"] = np.median(steps)
        row["reached"] = int(np.isfinite(steps).sum())
    return row


def deployment(runs: Sequence[Run]) -> dict[str, float]:
    """Modelled joules and seconds of an action by column, means over the runs in which `energy` and
    `latency` left them."""
    columns: dict[str, list[float]] = {}
    for run in runs:
        for name, model in run.account.get("models", {}).items():
            for kind, joules in model["joules"]["agent"].items():
                columns.setdefault(f"joules {name} {kind}", []).append(joules)
        for engine, found in run.latency.get("engines", {}).items():
            for percentile in ("p50", "p99"):
                if percentile in found:
                    columns.setdefault(f"seconds {engine} {percentile}", []).append(
                        found[percentile]
                    )
    return {name: float(np.mean(values)) for name, values in columns.items()}


def curve(group: Group, axis: str) -> Curve:
    """The IQM of a group's evaluations where all its finished runs have been (all its runs, while
    none is finished), linear between evaluations."""
    lines = [run.evaluations for run in group.finished or group.runs]
    lines = [line for line in lines if len(line["return"])]
    if not lines:
        return Curve(*np.empty((4, 0)))
    known = [last_of_each(line[axis], line["return"]) for line in lines]
    grid = np.unique(np.concatenate([x for x, _ in known]))
    grid = grid[(grid >= max(x[0] for x, _ in known)) & (grid <= min(x[-1] for x, _ in known))]
    if not len(grid):  # one evaluation each, after different times
        return Curve(*np.empty((4, 0)))
    if len(grid) > POINTS:
        grid = np.linspace(grid[0], grid[-1], POINTS)
    curves = np.stack([np.interp(grid, x, y) for x, y in known])
    return Curve(grid, statistics.iqm(curves, 0), *statistics.band(curves))


def last_of_each(x: Array, y: Array) -> tuple[Array, Array]:
    """The last y at each x, which grows: the final evaluation replaces the one at its step."""
    keep = np.append(np.diff(x) > 0, True)
    return x[keep], y[keep]


def profiles(groups: Sequence[Group]) -> dict[str, Curve]:
    """By group, the share of finished seeds that score above each of 301 returns."""
    scored = [group for group in groups if group.finished]
    if not scored:
        return {}
    scores = np.concatenate([group.scores for group in scored])
    margin = 0.05 * (np.ptp(scores) or 1.0)
    returns = np.linspace(scores.min() - margin, scores.max() + margin, 301)
    return {
        group.name: Curve(
            returns,
            statistics.performance_profile(group.scores, returns),
            *statistics.profile_band(group.scores, returns),
        )
        for group in scored
    }


def improvements(groups: Sequence[Group]) -> list[Improvement]:
    """Of every group over each that comes before it; of more than PAIRED over the first alone."""
    scored = [group for group in groups if group.finished]
    return [
        Improvement(
            better.name,
            than.name,
            statistics.probability_of_improvement(better.scores, than.scores),
            statistics.improvement_interval(better.scores, than.scores),
        )
        for i, better in enumerate(scored)
        for than in (scored[:i] if len(scored) <= PAIRED else scored[: min(i, 1)])
    ]


def ratios(groups: Sequence[Group], reference: str, random: float) -> list[Ratio]:
    """Of every other group to the reference."""
    scored = {group.name: group.scores for group in groups if group.finished}
    than = scored.pop(reference)
    return [
        Ratio(
            name,
            (float(statistics.iqm(scores)) - random) / (float(statistics.iqm(than)) - random),
            statistics.ratio_interval(scores, than, random),
        )
        for name, scores in scored.items()
    ]


def random_score(groups: Sequence[Group], reference: str) -> float:
    """Mean return of random actions in the episodes of the final evaluations. Raises ConfigError
    where no group of that name has one, or it is no better than they are."""
    finished = {group.name: group.finished for group in groups if group.finished}
    if reference not in finished:
        raise ConfigError(
            f"--parity: expected a group with finished runs ({', '.join(finished) or 'none is'}), "
            f"found {reference!r}"
        )
    run = finished[reference][0]
    score = float(statistics.iqm([run.score for run in finished[reference]]))
    random = random_return(
        env_factory(run.config), episodes=run.final["episodes"], seed=run.final["seed"]
    )
    if score <= random:
        raise ConfigError(
            f"--parity: expected a group that is better than random actions ({random:.1f}), found "
            f"{reference!r} with an IQM of {score:.1f}; name another group, or leave it out"
        )
    return random


def own_threshold(env: str) -> float | None:
    """The return at which the environment calls itself solved."""
    with suppress(gym.error.Error, ImportError):
        return gym.spec(env).reward_threshold
    return None


# -- the comparison ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    groups: list[Group]
    by: str
    threshold: float | None
    flags: list[str]
    parity: str = ""
    """The group that others are held against; none: no table of it."""
    random: float = math.nan
    """Return of random actions, where `parity` is asked for."""

    @property
    def title(self) -> str:
        env, names = self.groups[0].runs[0].config.env, [group.name for group in self.groups]
        return f"{env}: {' and '.join(names)}" if len(names) < 3 else f"{env} by {self.by}"

    @cached_property
    def summaries(self) -> list[dict[str, Any]]:
        return [summary(group, self.threshold) for group in self.groups]

    @cached_property
    def curves(self) -> dict[str, dict[str, Curve]]:
        """By axis and group."""
        return {axis: {group.name: curve(group, axis) for group in self.groups} for axis in AXES}

    @cached_property
    def profiles(self) -> dict[str, Curve]:
        return profiles(self.groups)

    @cached_property
    def improvements(self) -> list[Improvement]:
        return improvements(self.groups)

    @cached_property
    def differences(self) -> list[list[str]]:
        """The table of configuration differences, its head first; [] where there are none."""
        rows = differences(self.groups, self.by)
        return [["setting", *(group.name for group in self.groups)], *rows] if rows else []

    @cached_property
    def table(self) -> list[list[str]]:
        """The table of final performance as text, its head first."""
        rows, threshold = self.summaries, self.threshold
        firing = any("firing_rate_0" in row for row in rows)
        head = ["group", "seeds", "mean", "IQM", "95 % interval", "its coverage", "lowest seed"]
        head += ["firing rate a layer"] * firing + ["minutes"]
        head += [] if threshold is None else [f"steps to {threshold:g}"]
        return [head, *(cells(row, firing, threshold is not None) for row in rows)]

    @cached_property
    def cost_table(self) -> list[list[str]]:
        """What training took, its head first; [] while nothing is finished."""
        rows = [row for row in self.summaries if row["seeds"]]
        measured = any(math.isfinite(row["gpu_energy_joules"]) for row in rows)
        head = ["training", "steps a second", "updates a second"] + ["GPU energy"] * measured
        return [head, *(cost_cells(row, measured) for row in rows)] if rows else []

    @cached_property
    def deployment_table(self) -> list[list[str]]:
        """What an action costs, its head first; [] where `energy` and `latency` were not called."""
        found = [{k: v for k, v in row.items() if k.startswith(DEPLOYED)} for row in self.summaries]
        columns = list(dict.fromkeys(key for row in found for key in row))
        head = ["an action", *(deployed_head(column) for column in columns)]
        rows = [[row["group"], *(deployed_cell(column, row) for column in columns)]
                for row in self.summaries if row["seeds"]]  # fmt: skip
        return [list(cells) for cells in zip(head, *rows, strict=True)] if columns else []

    @cached_property
    def improvement_table(self) -> list[list[str]]:
        rows = [
            [f"{i.better} over {i.than}", f"{i.probability:.2f}", span(*i.interval, digits=2)]
            for i in self.improvements
        ]
        return [["probability of improvement", "", "95 % interval"], *rows] if rows else []

    @cached_property
    def parity_table(self) -> list[list[str]]:
        if not self.parity:
            return []
        rows = [
            [f"{found.group} to {self.parity}", f"{found.ratio:.3f}",
             span(*found.interval, digits=3)]
            for found in ratios(self.groups, self.parity, self.random)
        ]  # fmt: skip
        return [["return above random", "ratio", "95 % interval"], *rows] if rows else []

    def pictures(self) -> list[Picture]:
        pictures = [
            Picture("curves", "Learning curves", CURVES, lambda: draw_curves(self),
                    curve_lines(self)),
            Picture("final", "Final performance", FINAL, lambda: draw_final(self)),
            Picture("improvement", "Probability of improvement", IMPROVEMENT,
                    lambda: draw_improvement(self.improvements)),
            Picture("profile", "Performance profile", PROFILE, lambda: draw_profile(self),
                    profile_lines(self)),
            Picture("pareto", "Return against energy", PARETO, lambda: draw_pareto(self.groups)),
        ]  # fmt: skip
        scored = any(group.finished for group in self.groups)
        counted = any(run.account for group in self.groups for run in group.finished)
        has = {"curves": True, "final": scored, "profile": scored, "pareto": counted,
               "improvement": bool(self.improvements)}  # fmt: skip
        return [picture for picture in pictures if has[picture.name]]


CURVES = """Mean return of the evaluations during training. Thick: interquartile mean over seeds
with its 95 % bootstrap band, where all seeds of the group have been; thin: single runs."""
FINAL = """A dot is a seed: the mean return of its final evaluation. Diamond and bar: interquartile
mean over seeds and its 95 % bootstrap interval."""
IMPROVEMENT = """How probable it is that a seed of the first group scores higher than one of the
second, with its 95 % bootstrap interval. At 0.5 neither is better."""
PROFILE = """Share of seeds whose final score lies above each return, with a 95 % bootstrap band. A
curve that lies above another everywhere is the better group."""
PARETO = """A dot is a run: the mean return of its final evaluation against the modelled energy of
an action, arithmetic alone and with memory traffic, under the first model that the command `energy`
used. A dense run is a ring where all its products are counted, a dot where the zeros of its ReLU
are skipped. The line joins the runs that none beats in both."""
PARITY = """Ratio of interquartile means over seeds, both above {random:.1f}, the mean return of
random actions in the same {episodes} episodes, and its bootstrap interval, of which there is none
where a resample of {reference} is no better than they are: parity at 3 % where the interval begins
at 0.97 or higher and {reference} itself does as well as the task allows."""
DEPLOYMENT = """Means over the finished runs in which the commands `energy` and `latency` left their
results. Energies are modelled, not measured, a dense agent's with the zeros of its ReLU skipped;
times were measured on the machine of that command."""
COVERAGE = """The interval is a percentile bootstrap of the interquartile mean (IQM) over seeds, of
nominally 95 %. Its coverage is how often such an interval holds the true value when that many
seeds' scores are normal (simulated): the fewer seeds, the more it promises too much. A seed's score
is the mean return of its final, deterministic episodes; minutes are of collecting and learning."""
COST = """Means over finished seeds. Steps and updates a second are of the time spent collecting and
learning, over the whole run."""
ENERGY = """The energy is what the whole GPU drew while the run was on, other processes included."""
VIDEOS = """The final policy of the seed whose score is the group's median (the lower of the middle
two), over the first episode of its final evaluation, where the run kept a video of at most
{most} MB."""
STEPS = """Steps to {threshold:g}: the median over seeds of the first evaluation that reached it; in
brackets how many seeds did."""


def cells(row: dict[str, Any], firing: bool, threshold: bool) -> list[str]:
    """A group's numbers as text."""
    seeds, runs = row["seeds"], row["runs"]
    text = [row["group"], str(seeds) if seeds == runs else f"{seeds} of {runs}"]
    if not seeds:
        return text + [NONE] * (6 + firing + threshold)
    text += [f"{row['mean']:.1f}", f"{row['iqm']:.1f}", span(row["low"], row["high"])]
    text.append(f"{row['coverage']:.0%}" if seeds > 1 else NONE)
    text.append(f"{row['lowest']:.1f} ({row['lowest_seed']})")
    if firing:
        rates = [f"{value:.2f}" for key, value in row.items() if key.startswith("firing_rate_")]
        text.append(", ".join(rates) or NONE)
    text.append(f"{row['minutes']:.1f}")
    if threshold:
        steps = row["steps_to_threshold"]
        middle = f"{steps:,.0f}" if math.isfinite(steps) else "not reached"
        text.append(f"{middle} ({row['reached']} of {seeds})")
    return text


def cost_cells(row: dict[str, Any], measured: bool) -> list[str]:
    """A group's throughput, and where some group's is known its energy, as text."""
    rates = [row["steps_per_second"], row["updates_per_second"]]
    text = [f"{rate:,.0f}" if math.isfinite(rate) else NONE for rate in rates]
    if measured:
        joules = row["gpu_energy_joules"]
        text.append(f"{joules / 1e3:,.1f} kJ" if math.isfinite(joules) else NONE)
    return [row["group"], *text]


DEPLOYED = ("joules ", "seconds ")
ENGINES = {"python": "Python", "onnx": "ONNX", "c": "C"}


def deployed_head(column: str) -> str:
    unit, name, which = column.split(" ")
    if unit == "joules":
        return f"nJ, {name}" + (", with memory" if which == "with_memory" else "")
    return f"ms in {ENGINES[name]}, {which}"


def deployed_cell(column: str, row: dict[str, Any]) -> str:
    if column not in row:
        return NONE
    joules = column.startswith("joules")
    return number(row[column] * 1e9) if joules else f"{row[column] * 1e3:.3f}"


def span(low: float, high: float, digits: int = 1) -> str:
    return f"{low:.{digits}f} to {high:.{digits}f}" if math.isfinite(low) else NONE


def compare(
    words: Iterable[str | Path],
    out: Path,
    *,
    by: str = "actor",
    threshold: float | None = None,
    parity: str = "",
    overwrite: bool = False,
    on_step: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Compare runs: figures, curves, tables and a report in `out`. Raises ConfigError.

    `threshold` is the return whose first reaching is told; none: the environment's own, if any.
    `parity` is the group that the others are held against; random actions are played for it.
    """
    check_directory(out, overwrite)
    on_step("reading")
    runs = read_runs(words)
    check_environments(runs)
    groups = group_runs(runs, by)
    if threshold is None:
        threshold = own_threshold(runs[0].config.env)
    if parity:
        on_step("random episodes")
    random = random_score(groups, parity) if parity else math.nan
    comparison = Comparison(groups, by, threshold, find_flags(groups, by), parity, random)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot make {out}: {error.strerror}") from None
    write(comparison, out, on_step)
    return comparison


def write(comparison: Comparison, out: Path, on_step: Callable[[str], None]) -> None:
    for name in ("curves", "final", "improvement", "profile", "pareto"):
        for kind in ("png", "svg"):
            (out / f"{name}.{kind}").unlink(missing_ok=True)
    images = []
    for picture in comparison.pictures():
        on_step(picture.title.lower())
        themes = render_themes(picture.draw)
        (out / f"{picture.name}.png").write_bytes(themes["light"])
        (out / f"{picture.name}.svg").write_bytes(render(picture.draw, "light", "svg"))
        images.append((picture, themes))
    write_csv(out / "curves.csv", curve_rows(comparison))
    write_csv(out / "table.csv", comparison.summaries)
    write_csv(out / "runs.csv", run_rows(comparison.groups))
    write_text(out / "table.md", markdown(comparison))
    write_text(out / REPORT, report(comparison, images))


def curve_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Every point of every curve; `run` is empty where it is the group's IQM."""
    rows: list[dict[str, Any]] = []
    for axis in AXES:
        for group in comparison.groups:
            same = {"axis": axis, "group": group.name}
            points = zip(*comparison.curves[axis][group.name], strict=True)
            rows += [
                same | {"run": "", "x": x, "return": y, "low": low, "high": high}
                for x, y, low, high in points
            ]
            for run in group.runs:
                pairs = zip(run.evaluations[axis], run.evaluations["return"], strict=True)
                rows += [same | {"run": run.name, "x": x, "return": y} for x, y in pairs]
    return rows


def run_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row a run: how far it is and, where it has ended, its final evaluation."""
    return [
        {
            "run": run.name,
            "group": group.name,
            "seed": run.config.seed,
            "status": run.record.get("status"),
            "score": run.score if run.final else math.nan,
            "steps": run.record.get("step", 0),
            "updates": run.updates,
            "minutes": run.minutes,
            "commit": run.record.get("commit"),
            **{key: run.final[key] for key in RUN_COLUMNS if key in run.final},
            **{f"firing_rate_{i}": r for i, r in enumerate(run.final.get("firing_rate", ()))},
        }
        for group in groups
        for run in group.runs
    ]


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    head = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, head)
        writer.writeheader()
        writer.writerows(rows)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def markdown(comparison: Comparison) -> str:
    """The tables for a paper or a README, and the notes that belong to them."""
    parts = [f"# {plain(comparison.title)}", markdown_table(comparison.table)]
    parts.append(plain(about(comparison)))
    if comparison.improvement_table:
        parts.append(markdown_table(comparison.improvement_table))
    if comparison.parity_table:
        parts += [markdown_table(comparison.parity_table), plain(about_parity(comparison))]
    if comparison.cost_table:
        parts += [markdown_table(comparison.cost_table), plain(cost(comparison))]
    if comparison.deployment_table:
        parts += [markdown_table(comparison.deployment_table), plain(DEPLOYMENT)]
    if comparison.flags:
        notes = "\n".join(f"- {plain(flag)}" for flag in comparison.flags)
        parts.append(f"Notes:\n\n{notes}")
    if comparison.differences:
        parts.append("Configuration differences:")
        parts.append(markdown_table(comparison.differences))
    return "\n\n".join(parts) + "\n"


def about(comparison: Comparison) -> str:
    """What the table's columns mean."""
    if comparison.threshold is None:
        return COVERAGE
    return f"{COVERAGE} {STEPS.format(threshold=comparison.threshold)}"


def about_parity(comparison: Comparison) -> str:
    """What the ratios are of."""
    (reference,) = [group for group in comparison.groups if group.name == comparison.parity]
    return PARITY.format(
        random=comparison.random,
        episodes=reference.finished[0].final["episodes"],
        reference=reference.name,
    )


def cost(comparison: Comparison) -> str:
    """What the columns of its cost mean."""
    measured = any("GPU energy" in cell for cell in comparison.cost_table[0])
    return f"{COST} {ENERGY}" if measured else COST


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [[plain(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(text: str) -> str:
    """Text on one line that Markdown takes for no HTML."""
    return escape(" ".join(text.split()), quote=False)


def report(comparison: Comparison, images: Sequence[tuple[Picture, dict[str, bytes]]]) -> str:
    notes = "".join(f"<li>{escape(flag)}</li>" for flag in comparison.flags)
    flags = f'<div class="note"><strong>Mind:</strong><ul>{notes}</ul></div>' if notes else ""
    parts = [flags, "<h2>Results</h2>", table(comparison.table, "sortable")]
    parts.append(f"<p>{escape(about(comparison))}</p>")
    if comparison.improvement_table:
        parts.append(table(comparison.improvement_table, "sortable"))
    if comparison.parity_table:
        parts.append(table(comparison.parity_table, "sortable"))
        parts.append(f"<p>{escape(about_parity(comparison))}</p>")
    if comparison.cost_table:
        parts.append(table(comparison.cost_table, "sortable"))
        parts.append(f"<p>{escape(cost(comparison))}</p>")
    if comparison.deployment_table:
        parts.append(table(comparison.deployment_table))
        parts.append(f"<p>{escape(DEPLOYMENT)}</p>")
    parts += [section(picture, themes) for picture, themes in images]
    parts.append(films(comparison.groups))
    parts.append("<h2>Configuration differences</h2>")
    if comparison.differences:
        parts.append(table(comparison.differences, "words alternatives"))
    else:
        parts.append(f"<p>None but {escape(comparison.by)}.</p>")
    parts += ["<h2>Runs</h2>", table(run_table(comparison.groups), "sortable words")]
    sources = "img-src data:; media-src data:"
    return page(comparison.title, "\n".join(parts), COLORS["spiking"], SORT + HOVER, sources)


def films(groups: Sequence[Group]) -> str:
    """A video a group, of its median seed."""
    figures = [film(group) for group in groups if group.finished]
    if not any("<video" in figure for figure in figures):
        return ""
    caption = VIDEOS.format(most=MOST_VIDEO / 1e6)
    return f"<h2>Videos</h2><p>{escape(caption)}</p><div class='films'>{''.join(figures)}</div>"


def film(group: Group) -> str:
    ordered = sorted(group.finished, key=lambda run: run.score)
    run = ordered[(len(ordered) - 1) // 2]
    path = run.path / "videos" / f"step-{run.final['step']}.mp4"
    text = escape(f"{group.name}, seed {run.config.seed}, score {run.score:.1f}")
    if not path.is_file():
        return f"<figure><figcaption>{text}: no video</figcaption></figure>"
    if path.stat().st_size > MOST_VIDEO:
        return f"<figure><figcaption>{text}: its video is too large</figcaption></figure>"
    try:
        poster = data_uri("image/jpeg", still(path))
    except Exception as error:  # a decoder raises almost anything
        reason = escape(str(error).splitlines()[0] if str(error) else type(error).__name__)
        return f"<figure><figcaption>{text}: no video ({reason})</figcaption></figure>"
    source = data_uri("video/mp4", path.read_bytes())
    return (
        f'<figure><video controls muted loop playsinline poster="{poster}" src="{source}"></video>'
        f"<figcaption>{text}</figcaption></figure>"
    )


def still(path: Path) -> bytes:
    """A frame from the first steps of a video, as a JPEG."""
    import imageio.v3 as iio
    from PIL import Image

    for frame in islice(iio.imiter(path), 40):
        image = Image.fromarray(frame)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=70)
    return buffer.getvalue()


def run_table(groups: Sequence[Group]) -> list[list[str]]:
    """The columns of `run_rows` that a page has room for."""
    rows = [["run", "group", "seed", "status", "score", "steps", "updates", "minutes", "commit"]]
    for row in run_rows(groups):
        cells = [str(row[key]) for key in ("run", "group", "seed", "status")]
        cells.append(NONE if math.isnan(row["score"]) else f"{row['score']:.1f}")
        cells += [f"{row['steps']:,}", f"{row['updates']:,}", f"{row['minutes']:.1f}"]
        rows.append([*cells, str(row["commit"])[:10]])
    return rows
