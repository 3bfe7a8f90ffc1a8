"""A search for better options: Optuna proposes, `runner.py train` tries, medians prune.

A search directory holds `search.json` (what is searched), `optuna.journal` (Optuna's storage: every
trial and its score), `trials/<number>/` (a trial's configurations, logs and runs), and what is made
of them: `trials.csv`, `best.yaml`, `history.png`, `importances.png`. Any number of processes, on
machines that share the directory, may work on one search.
"""

from __future__ import annotations

import csv
import io
import json
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from sansac import signals
from sansac.checkpoint import FORMAT_VERSION, locked, write_atomically, write_config
from sansac.config import (
    QUIET,
    SPACE,
    Config,
    ConfigError,
    fields,
    load_space,
    merge,
    nearest,
    partial,
    presets_for,
    resolve,
    slug,
)
from sansac.logger import read_metrics
from sansac.sweep import (
    OWN,
    TRIES,
    Process,
    Run,
    base_of,
    cores,
    differing,
    held,
    in_use,
    last_lines,
    nest,
    settle,
    start,
    threads_each,
    value,
)
from sansac.tune_display import Display, Row, Standing, table
from sansac.tune_plots import plot_history, plot_importances

DEFAULT_TRIALS = 50
REHEARSALS = 200  # random points that are checked before the first trial
TICK_SECONDS = 0.1  # between looks at the processes
SHOWN = 20  # trials in the table
WIDTH = 200  # of a table that goes into a file: what it needs
LOOK_SECONDS = 1.0  # between looks at a run's evaluations

# Options that say what a score is; a search over them would compare unlike things.
MEASURE = (
    "env", "env_kwargs", "seed", "total_steps", "eval_every", "eval_episodes", "final_episodes",
    "stop_at_return",
)  # fmt: skip
# Options of a trial's run that are not what was searched for, left out of best.yaml.
INCIDENTAL = ("env", "san", "seed", "name", "runs_dir", "threads", "video", "wandb")

optuna.logging.set_verbosity(optuna.logging.ERROR)
STATES = {
    TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed",
    TrialState.RUNNING: "unfinished", TrialState.WAITING: "waiting",
}  # fmt: skip


# -- the space -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Whole numbers where `low` is one, both ends included."""

    low: float
    high: float
    log: bool

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        kind = trial.suggest_int if isinstance(self.low, int) else trial.suggest_float
        return kind(name, self.low, self.high, log=self.log)  # type: ignore[arg-type]

    def __contains__(self, setting: Any) -> bool:
        return isinstance(setting, (int, float)) and self.low <= setting <= self.high


@dataclass(frozen=True)
class Choices:
    values: list[Any]

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        return json.loads(trial.suggest_categorical(name, [json.dumps(v) for v in self.values]))

    def __contains__(self, setting: Any) -> bool:
        return setting in self.values


Space = dict[str, Range | Choices]


def parse_space(raw: dict[str, Any]) -> Space:
    """Ranges and choices by option, checked against the configuration's fields.

    Raises ConfigError naming every option at fault.
    """
    space, errors = {}, []
    for key, content in raw.items():
        try:
            name = searchable(str(key))
            space[name] = parse_domain(name, content)
        except ConfigError as error:
            errors.append(f"{SPACE}: {error}")
    if errors:
        raise ConfigError("\n".join(errors))
    return space


def searchable(key: str) -> str:
    """The field that an option of a space names. Raises ConfigError where there is none."""
    known = [name for name in fields() if name not in (*OWN, *MEASURE)]
    name = key.replace("-", "_")
    if name in MEASURE:
        raise ConfigError(f"`{key}` is what trials are measured by: it is the same for all")
    if name not in known:
        raise ConfigError(f"unknown option `{key}`{nearest(name, known)}")
    return name


def parse_domain(name: str, content: Any) -> Range | Choices:
    keys = set(content) if isinstance(content, dict) else set()
    if keys == {"choices"} and isinstance(content["choices"], list) and content["choices"]:
        return Choices([checked(name, choice) for choice in content["choices"]])
    if not {"low", "high"} <= keys <= {"low", "high", "log"}:
        raise ConfigError(
            f"{name}: expected {{low: ..., high: ...}}, with log: true if wanted, or "
            f"{{choices: [...]}}, found {content!r}"
        )
    low, high = (checked(name, content[key]) for key in ("low", "high"))
    log = content.get("log", False)
    if any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in (low, high)):
        raise ConfigError(f"{name} is no number that has a range: give choices")
    if not low < high:
        raise ConfigError(f"{name}: low ({low}) must be below high ({high})")
    if not isinstance(log, bool) or (log and low <= 0):
        raise ConfigError(f"{name}: log is true or false, and needs low above 0, found {content!r}")
    return Range(low, high, log)


def checked(name: str, setting: Any) -> Any:
    """A setting as the configuration takes it. Raises ConfigError."""
    return value(partial(nest(name, setting)).dump(), name)


def propose(space: Space, trial: optuna.Trial) -> dict[str, Any]:
    """A setting of every option; those that the trial has already stay."""
    return {name: domain.suggest(trial, name) for name, domain in space.items()}


# -- what is searched ------------------------------------------------------------------------------


@dataclass
class Asked:
    """What a command line asks for: layers of the configuration, a space, seeds."""

    files: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    space: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)


@dataclass
class Search:
    """`search.json`. `base` is the configuration that the space is laid over."""

    files: dict[str, Any]
    options: dict[str, Any]
    base: dict[str, Any]
    space: dict[str, Any]
    seeds: list[int]
    trials: int
    prune: bool

    @classmethod
    def load(cls, out: Path) -> Search:
        path = out / "search.json"
        try:
            content = json.loads(path.read_text())
            version = content.pop("format_version")
            if version != FORMAT_VERSION:
                raise ValueError(f"format version {version}, expected {FORMAT_VERSION}")
            return cls(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged or no search: {error!r}") from None

    def save(self, out: Path) -> None:
        text = json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1)
        write_atomically(out / "search.json", lambda file: file.write(text.encode()))

    def config(self, settings: dict[str, Any], **own: Any) -> Config:
        """The configuration of a point of the space. Raises ConfigError."""
        return resolve(self.base, *(nest(*pair) for pair in settings.items()), own)

    @property
    def title(self) -> str:
        return f"{self.base['env']}, {'spiking' if self.base['san'] else 'dense'} actor"


def begin(asked: Asked, trials: int, prune: bool, workers: int) -> Search:
    """A new search, checked as far as can be before anything runs. Writes nothing.

    Raises ConfigError for a space that cannot be and for what cannot be trained.
    """
    base = base_of(merge(QUIET, asked.files), asked.options)
    default = Path("tune_spiking" if base["san"] else "tune_dense")
    space = asked.space or load_space(default)
    if base["threads"] == "auto":
        base["threads"] = threads_each(min(workers, trials))
    seeds = asked.seeds or [base["seed"]]
    search = Search(asked.files, asked.options, base, space, seeds, trials, prune)
    config = rehearse(search)

    from sansac.manager import Manager

    Manager(config)  # an environment, a device or a backend that is not there
    return search


def rehearse(search: Search) -> Config:
    """A configuration of the space; raises ConfigError where some points of it contradict
    themselves."""
    space = parse_space(search.space)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(REHEARSALS):
        settings = propose(space, study.ask())
        try:
            config = search.config(settings)
        except ConfigError as error:
            raise ConfigError(f"the space holds {described(settings)}:\n{error}") from None
    return config


def refuse_contradiction(search: Search, asked: Asked) -> None:
    """Raises ConfigError where what is asked for is not the search that there is."""
    files = merge(QUIET, search.files, asked.files)
    wanted = base_of(files, merge(search.options, asked.options))
    if wanted["threads"] == "auto":
        wanted["threads"] = search.base["threads"]
    other = differing(search.base, wanted, ())
    if asked.seeds and asked.seeds != search.seeds:
        other.append(f"seeds ({search.seeds} there, {asked.seeds} now)")
    if asked.space and asked.space != search.space:
        other.append("the space")
    if other:
        raise ConfigError(
            f"{', '.join(other)}: the search was begun with another configuration; choose another "
            "--out, or go on with --out alone"
        )


def described(settings: dict[str, Any]) -> str:
    return " ".join(f"{name}={short(setting)}" for name, setting in settings.items())


def short(setting: Any) -> str:
    """A setting in few letters."""
    if isinstance(setting, float):
        return f"{setting:.2g}"
    return "x".join(map(str, setting)) if isinstance(setting, list) else str(setting)


# -- the study -------------------------------------------------------------------------------------


def open_study(out: Path, search: Search) -> optuna.Study:
    """The search's trials, in Optuna's storage. The first is the configuration as it stands, as far
    as the space holds it."""
    pruner = optuna.pruners.MedianPruner(n_warmup_steps=search.base["total_steps"] // 3)
    study = optuna.create_study(
        study_name=SPACE,
        storage=JournalStorage(JournalFileBackend(str(out / "optuna.journal"))),
        direction="maximize",
        pruner=pruner if search.prune else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )
    if not study.get_trials(deepcopy=False):
        space = parse_space(search.space)
        here = {name: value(search.base, name) for name in space}
        study.enqueue_trial({
            name: json.dumps(here[name]) if isinstance(domain, Choices) else here[name]
            for name, domain in space.items()
            if here[name] in domain
        })  # fmt: skip
    return study


def settings_of(trial: FrozenTrial, space: Space) -> dict[str, Any]:
    """What a trial tries, by option."""
    return {
        name: json.loads(setting) if isinstance(space[name], Choices) else setting
        for name, setting in trial.params.items()
    }


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Trials with a score, best first; of equal ones the earlier."""
    trials = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    return sorted(trials, key=lambda trial: (-(trial.value or 0.0), trial.number))


# -- running ---------------------------------------------------------------------------------------


def tune(
    out: Path,
    asked: Asked,
    *,
    trials: int | None = None,
    prune: bool = True,
    workers: int | None = None,
) -> int:
    """Make or go on with the search in `out`; returns the exit code.

    Raises ConfigError before anything is written.
    """
    workers = workers or cores()
    if not (out / "search.json").exists():
        if out.exists() and (not out.is_dir() or any(p.name != ".lock" for p in out.iterdir())):
            raise ConfigError(f"{out} is there and holds no search: choose another --out")
        search = begin(asked, trials or DEFAULT_TRIALS, prune, workers)
        try:
            out.mkdir(parents=True, exist_ok=True)
            with locked(out, wait=True):
                if not (out / "search.json").exists():
                    search.save(out)
        except OSError as error:
            raise ConfigError(f"--out: cannot write {out}: {error.strerror}") from None
    with locked(out, wait=True):
        search = Search.load(out)
        refuse_contradiction(search, asked)
        search = replace(search, trials=trials or search.trials)
        search.save(out)
        study = open_study(out, search)
    code = Tuner(out, search, study, workers).work()
    report(out, search, study)
    return code


@dataclass
class Job:
    """A trial that is under way in this process: a run for each seed, one after another."""

    trial: optuna.Trial
    settings: dict[str, Any]
    runs: list[Run]
    lock: ExitStack  # the trial's directory is ours
    evaluations: list[dict[int, float]]  # of each run, by step
    process: Process | None = None
    tries: int = 0  # starts of the present run
    told: int = 0  # signals that its process was handed on
    pruned: bool = False
    reported: set[int] = field(default_factory=set)
    next_look: float = 0.0

    @property
    def index(self) -> int:
        """Of the first run that is not finished."""
        states = [run.status for run in self.runs]
        return next(i for i, state in enumerate(states) if state != "finished")


class Tuner:
    """The trials that this process works on."""

    def __init__(self, out: Path, search: Search, study: optuna.Study, limit: int) -> None:
        self.out, self.search, self.study, self.limit = out, search, study, limit
        self.space = parse_space(search.space)
        self.jobs: dict[int, Job] = {}
        self.let_go: set[int] = set()  # trials that were stopped by hand in this call
        self.signals: list[int] = []
        self.display = Display(search.title, search.trials, self.standing)

    def work(self) -> int:
        """Go on until the search has its trials, or a signal asks for an end."""
        with signals.handled(self.signals.append), self.display:
            if not 0 < self.search.base["eval_every"] < self.search.base["total_steps"]:
                self.display.note("no trial can be pruned: --eval-every is not below --total-steps")
            try:
                while self._tick():
                    self.display.refresh()
                    time.sleep(TICK_SECONDS)
            finally:
                for job in self.jobs.values():  # none is left unless something here went wrong
                    if job.process is not None:
                        job.process.kill()
                        job.process.wait()
        if self.signals:
            return 128 + self.signals[0]
        return int(bool(self.let_go) or not finished(self.study))

    def _tick(self) -> bool:
        """Take note of what happened, begin what can begin; whether there is more to wait for."""
        for job in list(self.jobs.values()):
            self._advance(job)
        while not self.signals and len(self.jobs) < self.limit and self._take():
            pass
        return bool(self.jobs)

    # -- taking and leaving trials ---------------------------------------------------------------

    def _take(self) -> bool:
        """Take a trial that nobody works on any more, or a new one; False where there is none."""
        with locked(self.out, wait=True):
            trials = self.study.get_trials(deepcopy=False)
            left = [trial for trial in trials if self._left(trial)]
            begun = sum(trial.state != TrialState.WAITING for trial in trials)
            if left:
                trial = optuna.Trial(self.study, left[0]._trial_id)
            elif begun < self.search.trials:
                # A stream for each trial: a search that was stopped proposes what it would have.
                seed = (self.search.base["seed"] * 1_000_003 + begun) % 2**32
                self.study.sampler = optuna.samplers.TPESampler(seed=seed)
                trial = self.study.ask()
            else:
                return False
            lock, directory = ExitStack(), self.out / "trials" / str(trial.number)
            directory.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked(directory))
        settings = propose(self.space, trial)
        try:
            runs = [self._prepare(trial.number, seed, settings) for seed in self.search.seeds]
        except ConfigError as error:  # a contradiction so rare that no rehearsal met it
            self._end(Job(trial, settings, [], lock, []), TrialState.FAIL, str(error))
            return True
        reported = set(self.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        job = Job(trial, settings, runs, lock, [{} for _ in runs], reported=reported)
        self.jobs[trial.number] = job
        verb = "goes on" if left else "begins"
        self.display.note(f"trial {trial.number} {verb}: {described(settings)}")
        return True

    def _left(self, trial: FrozenTrial) -> bool:
        """Whether a trial was under way in a process that is gone."""
        ours = trial.number in self.jobs or trial.number in self.let_go
        running = trial.state == TrialState.RUNNING
        return (
            running and not ours and not in_use(self.out / "trials" / str(trial.number) / ".lock")
        )

    def _prepare(self, number: int, seed: int, settings: dict[str, Any]) -> Run:
        """A trial's run with one seed, its configuration written. Raises ConfigError."""
        parent, name = f"trials/{number}", f"trial{number}-s{seed}"
        config = self.search.config(settings, seed=seed, runs_dir=parent, name=name)
        if not (self.out / parent / f"s{seed}.yaml").exists():
            write_config(config, self.out / parent, f"s{seed}.yaml")
        return Run(
            id=name, overrides=settings, actor=config.actor_name, seed=seed,
            total_steps=config.total_steps, config=f"{parent}/s{seed}.yaml",
            directory=f"{parent}/{slug(config.env)}/{name}", log=f"{parent}/s{seed}.log",
        )  # fmt: skip

    def _end(self, job: Job, state: TrialState, why: str = "") -> None:
        """Tell the study how a trial ended, and write what can be read of it."""
        scores = [run.final_return for run in job.runs if run.final_return is not None]
        with locked(self.out, wait=True):
            job.trial.set_user_attr("returns", scores)
            job.trial.set_user_attr("failure", why)
            score = float(np.mean(scores)) if state == TrialState.COMPLETE else None
            self.study.tell(job.trial, score, state)
            write_results(self.out, self.search, self.study)
        if state != TrialState.FAIL:
            for run in job.runs:
                drop_buffers(self.out / run.directory)
        self.jobs.pop(job.trial.number, None)
        job.lock.close()
        text = f"trial {job.trial.number} {STATES[state]}"
        text += f": {score:.1f}" if score is not None else ""
        best = finished(self.study)
        text += ", the best" if best and best[0].number == job.trial.number else ""
        self.display.note(text + (f": {why}" if why else ""))

    def _let_go(self, job: Job) -> None:
        """Leave a trial for a later call, which goes on from its checkpoint."""
        del self.jobs[job.trial.number]
        self.let_go.add(job.trial.number)
        job.lock.close()
        self.display.note(f"trial {job.trial.number} stopped")

    # -- one trial -------------------------------------------------------------------------------

    def _advance(self, job: Job) -> None:
        run, code = job.runs[job.index], None
        if job.process is not None:
            self._forward(job)
            self._look(job, run)
            code = job.process.poll()
            if code is None:
                return
            job.process = None
        elif held(self.out, run):  # by a run that outlived its search: wait for it
            self._look(job, run)
            if self.signals:
                self._let_go(job)
            return
        job.next_look = 0.0
        self._look(job, run)
        settle(self.out, run, code)
        if run.status == "finished":
            self._next_run(job)
        elif run.status == "failed":
            self._end(job, TrialState.FAIL, f"exit code {code}, log {self.out / run.log}")
        elif job.pruned:
            self._end(job, TrialState.PRUNED)
        elif self.signals or (code or 0) > 0:
            self._let_go(job)
        elif job.tries >= TRIES:
            self._end(job, TrialState.FAIL, f"killed {TRIES} times, log {self.out / run.log}")
        else:
            job.process, job.told = start(self.out, run), 0
            job.tries += job.process is not None

    def _next_run(self, job: Job) -> None:
        """After a run that is finished: the next seed's, or the end."""
        job.tries = 0
        if all(run.status == "finished" for run in job.runs):
            self._end(job, TrialState.COMPLETE)
        elif job.pruned:
            self._end(job, TrialState.PRUNED)

    def _look(self, job: Job, run: Run) -> None:
        """Report new evaluations to the study, and stop a trial that falls behind its median.

        A report is the mean over the seeds so far, at the same step of each.
        """
        if time.monotonic() < job.next_look:
            return
        job.next_look = time.monotonic() + LOOK_SECONDS
        path, every = self.out / run.directory / "metrics.jsonl", self.search.base["eval_every"]
        if not every or not path.exists():
            return
        index = job.index
        found = job.evaluations[index]
        for row in read_metrics(path):
            if "eval/return_mean" in row and row["step"] < run.total_steps:
                found.setdefault(int(row["step"]) // every * every, row["eval/return_mean"])
        for step in sorted(found):
            report_step = index * run.total_steps + step
            before = [evaluations.get(step) for evaluations in job.evaluations[:index]]
            if report_step in job.reported or None in before:
                continue
            job.reported.add(report_step)
            job.trial.report(float(np.mean([*before, found[step]])), report_step)
            if not job.pruned and job.trial.should_prune():
                job.pruned = True
                if job.process is not None:
                    job.process.send_signal(signal.SIGTERM)

    def _forward(self, job: Job) -> None:
        """Hand signals on: a process is asked once, then killed."""
        told, job.told = job.told, min(2, len(self.signals))
        if job.process is not None and job.told > told:
            if job.told == 1:
                job.process.send_signal(signal.SIGTERM)
            else:
                job.process.kill()

    # -- what is shown ---------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """A row for each trial under way."""
        rows = []
        for number, job in sorted(self.jobs.items()):
            index, last = job.index, [*job.evaluations[job.index].items()][-1:]
            done = index + (last[0][0] / job.runs[0].total_steps if last else 0.0)
            evaluation = f"{last[0][1]:.1f}" if last else ""
            share = f"{done / len(job.runs):.0%}"
            state = "pruning" if job.pruned else f"seed {job.runs[index].seed}, {share}"
            rows.append(Row(str(number), evaluation, state, texts(job.settings)))
        return rows

    def standing(self) -> Standing:
        best = finished(self.study)
        return Standing(
            counts(self.study),
            f"best {best[0].value:.1f} (trial {best[0].number})" if best else "",
            self.rows(),
        )


def counts(study: optuna.Study) -> dict[str, int]:
    """Trials by how they stand."""
    states = [STATES[trial.state] for trial in study.get_trials(deepcopy=False)]
    return {state: states.count(state) for state in dict.fromkeys(STATES.values())}


def texts(settings: dict[str, Any]) -> dict[str, str]:
    return {name: short(setting) for name, setting in settings.items()}


def drop_buffers(run_dir: Path) -> None:
    """Of a trial that is done, best.pt stays: replay buffers of all trials would fill a disk."""
    for name in ("last", "previous"):
        (run_dir / "checkpoints" / f"{name}.pt").unlink(missing_ok=True)


# -- results ---------------------------------------------------------------------------------------


def write_results(out: Path, search: Search, study: optuna.Study) -> None:
    """trials.csv and best.yaml, of all trials so far."""
    space = parse_space(search.space)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    scores = [f"return_s{seed}" for seed in search.seeds]
    writer.writerow(["trial", "state", "score", *scores, *space, "failure"])
    for trial in study.get_trials(deepcopy=False, states=[
        TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL
    ]):  # fmt: skip
        returns = list(trial.user_attrs.get("returns", []))
        returns += [""] * (len(scores) - len(returns))
        settings = settings_of(trial, space)
        writer.writerow([
            trial.number, STATES[trial.state], "" if trial.value is None else trial.value,
            *returns, *(settings.get(name, "") for name in space),
            trial.user_attrs.get("failure", ""),
        ])  # fmt: skip
    write_text(out / "trials.csv", text.getvalue())
    if best := finished(study):
        write_text(out / "best.yaml", preset_text(search, best[0], space))


def preset_text(search: Search, trial: FrozenTrial, space: Space) -> str:
    """A trial as a preset: what differs from what `train` takes for the environment by itself."""
    config = search.config(settings_of(trial, space))
    layer = {"env": config.env, "algorithm": config.algorithm, "san": config.san}
    usual, mine = resolve(presets_for(layer), layer).dump(), config.dump()
    read = [name for name in fields() if config.san or not name.startswith("spiking.")]
    for name in read:
        if name not in INCIDENTAL and value(mine, name) != value(usual, name):
            layer = merge(layer, nest(name, value(mine, name)))
    seeds = "1 seed" if len(search.seeds) == 1 else f"{len(search.seeds)} seeds"
    return (
        f"# {search.title}: trial {trial.number} of a search, mean return {trial.value:.1f} over "
        f"{config.final_episodes} episodes of {seeds}.\n"
    ) + yaml.safe_dump(layer, sort_keys=False)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def importances(study: optuna.Study) -> dict[str, float]:
    """Share of each option in what sets good trials apart (PED-ANOVA, Watanabe et al. 2023); {}
    where too few trials are finished to tell."""
    if len({trial.value for trial in finished(study)}) < 2:
        return {}
    return optuna.importance.get_param_importances(study)


def report(out: Path, search: Search, study: optuna.Study) -> None:
    """Pictures into the directory, the table on stdout; what failed and how to go on on stderr."""
    from rich.console import Console

    trials, space = study.get_trials(deepcopy=False), parse_space(search.space)
    best = finished(study)
    with locked(out, wait=True):
        write_results(out, search, study)
    if best:
        history = [(t.number, t.value, STATES[t.state]) for t in trials if t.value is not None]
        plot_history(history, search.title, out / "history.png")
        if shares := importances(study):
            plot_importances(shares, search.title, out / "importances.png")
    order = [
        *best,
        *(t for t in trials if t.state not in (TrialState.COMPLETE, TrialState.WAITING)),
    ]
    rows = [row_of(trial, space) for trial in order]
    width = None if sys.stdout.isatty() else WIDTH
    Console(width=width).print(table(rows[:SHOWN], search.title))
    if len(rows) > SHOWN:
        print(f"and {len(rows) - SHOWN} more in {out / 'trials.csv'}")
    for trial in trials:
        if trial.state == TrialState.FAIL:
            tell_failure(out, search, trial)
    over = sum(STATES[trial.state] in ("finished", "pruned", "failed") for trial in trials)
    if over < search.trials:
        print(f"go on with: python runner.py tune --out {out}", file=sys.stderr)
    if best:
        print(f"best: python runner.py train --config {out / 'best.yaml'}", file=sys.stderr)
    elif over == search.trials:
        print("no trial finished: there is no best", file=sys.stderr)
    print(out)


def tell_failure(out: Path, search: Search, trial: FrozenTrial) -> None:
    """On stderr: what a trial died of, and the end of the log of the run that it died in."""
    why = trial.user_attrs.get("failure", "")
    print(f"trial {trial.number} failed: {why}", file=sys.stderr)
    logs = [out / "trials" / str(trial.number) / f"s{seed}.log" for seed in search.seeds]
    if there := [log for log in logs if log.exists()]:
        print("\n".join(f"  {line}" for line in last_lines(there[-1])), file=sys.stderr)


def row_of(trial: FrozenTrial, space: Space) -> Row:
    score = "" if trial.value is None else f"{trial.value:.1f}"
    settings = texts(settings_of(trial, space))
    return Row(str(trial.number), score, STATES[trial.state], settings)
