"""The command line of sansac: `python runner.py [COMMAND] [OPTIONS]`."""

from __future__ import annotations

import argparse
import errno
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import tyro

from sansac import signals
from sansac.config import (
    QUIET,
    Config,
    ConfigError,
    incomplete,
    load_space,
    load_yaml,
    merge,
    partial,
    presets_for,
    slug,
)

if TYPE_CHECKING:
    from sansac.compare import Comparison, Run

GROUPS = 3  # groups of a comparison that fit side by side in a terminal
# What a system says of a path that no file of it can have: the fault is in what was asked for.
NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)


@dataclass
class Command:
    """What every command that makes environments takes."""

    trust_env: bool = field(default=False, kw_only=True)
    """Let an environment id such as my_module:Task-v0 import that module, and so run its code."""


@dataclass
class Train(Command):
    """Train an agent (the default command).

    Commands, each with its own --help:

      train           train, or go on with a run (--resume)
      evaluate RUN    mean return of a trained agent over seeded episodes
      play RUN        a trained agent in a window
      watch RUN       a run that is being trained, in the terminal or as a page (--serve)
      inspect RUN     what its neurons do over an episode: pictures and a page
      compare RUN...  groups of runs: statistics, figures, tables and a page
      export RUN      the agent out of Python: NIR, ONNX, torch.export, C
      energy RUN      operations and joules of an action, beside a dense actor's
      latency RUN     milliseconds of an action: Python, ONNX, C
      sweep           many runs: actors x seeds x any option, side by side, resumable
      tune            search for better options; tune lr-range, tune optimizers: short tests
      sync RUN...     runs that are on disk, sent to wandb

    Precedence: defaults < preset of the environment in configs/ < that of the algorithm < --config
    FILE < options.
    """

    config: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE...")] = ()
    """Presets laid over the environment's own, later over earlier."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Run directory to go on with; its own configuration is taken whole, and only lengths,
    intervals, device and sinks may be changed."""
    checkpoint: Literal["last", "previous", "best"] = "last"
    """Which checkpoint a resumed run starts from."""
    options: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass
class Evaluate(Command):
    """Evaluate a trained agent: episode i runs on a seed derived from (--seed, i)."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory or an agent directory."""
    checkpoint: str = "last"
    """best, last, previous, or a checkpoint file."""
    episodes: int = 100
    """Episodes, each run to its end."""
    seed: int = 0
    """Seed that the episodes' seeds are derived from."""
    stochastic: bool = False
    """Sample actions from the policy instead of taking the tanh of its mean."""
    noise: float = 0.0
    """Gaussian noise on what the policy observes, in standard deviations of training's
    observations."""
    dropout: float = 0.0
    """Probability, an entry of an observation and step, that the policy reads 0 instead."""
    video: bool = False
    """Film the first episode, undisturbed, into RUN/videos/."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass
class Play(Command):
    """Watch a trained agent play in a window: the first episodes that evaluate runs with this seed.
    Without a display, `evaluate RUN --video` films one instead."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory or an agent directory."""
    checkpoint: str = "last"
    """best, last, previous, or a checkpoint file."""
    episodes: int = 5
    """Episodes, each shown to its end; closing the window or Ctrl-C ends sooner."""
    seed: int = 0
    """Seed that the episodes' seeds are derived from."""


def _port(words: list[str]) -> int:
    """`--serve` is any free port, `--serve 8000` that one."""
    if not words:
        return 0
    if len(words) > 1 or not words[0].isdecimal() or int(words[0]) > 65535:
        raise ValueError(f"expected a port, 1 to 65535, found {' '.join(words)!r}")
    return int(words[0])


Port = Annotated[
    int | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[PORT]",
        instance_from_str=_port,
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    ),
]


@dataclass
class Watch:
    """Follow a run that is being trained: step, ETA, returns, losses, temperature, firing rates,
    throughput and GPU, in the terminal until the run ends, or as a page. The run is only read."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory."""
    serve: Port = None
    """Serve a read-only page on this machine alone (127.0.0.1), until Ctrl-C, at this port or at
    any free one."""


@dataclass
class Inspect(Command):
    """Look inside a trained agent: a spike raster over an episode with frames and actions, membrane
    traces, firing rates and tuning curves, as PNG files and a self-contained page."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory or an agent directory."""
    checkpoint: str = "last"
    """best, last, previous, or a checkpoint file."""
    seed: int = 0
    """The episode is the first that evaluate runs with this seed."""
    neurons: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LAYER:NEURON...")] = ()
    """Neurons whose membranes are shown, such as 0:12 1:3; none: three a layer."""
    at: int | None = None
    """Control step where the close-ups begin; none: the middle of the episode."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where the pictures and index.html go; none: RUN/inspection/."""
    overwrite: bool = False
    """Write into a directory that is not empty."""


@dataclass
class Compare(Command):
    """Compare groups of runs over their seeds: learning curves, final performance, probability of
    improvement and performance profile, as figures, tables and a self-contained page."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run directories, directories that hold some anywhere below, or globs."""
    by: Annotated[str, tyro.conf.arg(metavar="actor|name|KEY")] = "actor"
    """What groups the runs: the actor; the name that a sweep gave, less its seed; or any option
    such as spiking.time_steps. Several are separated by commas."""
    threshold: float | None = None
    """Return whose first reaching is told in steps; none: the environment's own, if it has one."""
    parity: Annotated[str, tyro.conf.arg(metavar="GROUP")] = ""
    """The group, such as dense, that others are held against: the ratio of returns above those of
    random actions, which are played in the same episodes."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where everything goes; none: a new directory under runs/comparisons/."""
    overwrite: bool = False
    """Write into a directory that is not empty."""


@dataclass
class Export(Command):
    """Take a trained agent out of Python: its deterministic policy, raw observations to actions of
    the environment's scale. What is written is played beside the policy."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory or an agent directory."""
    format: Literal["nir", "onnx", "torch", "c"]
    """nir: a graph for spiking simulators and chips, beside it pre- and post-processing as ONNX;
    onnx: one program for onnxruntime; torch: a torch.export program; c: one C99 file."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Where the files and their README.md go."""
    checkpoint: str = "last"
    """best, last, previous, or a checkpoint file."""
    int8: bool = False
    """int8 weights in the C file, calibrated on the run's replay buffer, without it on episodes."""
    episodes: int = 10
    """Episodes that the exported policy and the policy play side by side; 0: none."""
    overwrite: bool = False
    """Write into a directory that is not empty."""
    json: bool = False
    """Print one JSON object instead of lines."""


@dataclass
class Energy(Command):
    """Count what an action of a trained agent costs over episodes, and put joules to it under named
    models of hardware, beside the dense actor of the task. Nothing is measured: these are models.
    A run keeps the result as energy.json, which compare reads."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory or an agent directory."""
    checkpoint: str = "last"
    """best, last, previous, or a checkpoint file."""
    dense: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """A dense agent of the same task, whose ReLU zeros are counted over its own episodes; none: the
    dense actor of the same hidden layers, all its products counted."""
    episodes: int = 10
    """Episodes that operations are counted over."""
    seed: int = 0
    """Seed that the episodes' seeds are derived from."""
    model: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=MAC,AC[,BYTES]...")] = ()
    """More models: pJ a multiply-accumulate and an accumulate, bytes a value (4)."""
    json: bool = False
    """Print one JSON object instead of tables."""


@dataclass
class Latency(Command):
    """Time one action, batch 1, one thread: in this process, in onnxruntime, in compiled C; and
    count the deadlines that control loops of 50, 100 and 500 Hz miss on this machine as it is now.
    A run keeps the result as latency.json, which compare reads."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory or an agent directory."""
    checkpoint: str = "last"
    """best, last, previous, or a checkpoint file."""
    actions: int = 10_000
    """Actions timed of each."""
    seconds: float = 2.0
    """How long each control loop runs."""
    json: bool = False
    """Print one JSON object instead of a table."""


def _address(words: list[str]) -> str:
    """`[]` -> `"local"`: the cluster that --ray without a word means."""
    if len(words) > 1:
        raise ValueError(f"expected one address at most, found {' '.join(words)}")
    return words[0] if words else "local"


Address = Annotated[
    str | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[ADDRESS]",
        instance_from_str=_address,
        is_instance=lambda value: value is None or isinstance(value, str),
        str_from_instance=lambda value: [str(value)],
    ),
]


@dataclass
class Sweep(Command):
    """Train many agents side by side: every combination of the axes is a run of its own,
    a process of its own. Called again, a sweep goes on: finished runs are kept, interrupted ones
    resumed, more seeds or values appended. Options that train has hold for all runs."""

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The sweep's directory, new or to go on with (then it needs nothing else)."""
    actors: tuple[Literal["dense", "spiking"], ...] = ()
    """Axis: actors; none: the one of --san."""
    seeds: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SEED|A..B...")] = ()
    """Axis: seeds, such as 0..9 or 0 3 5; none: the one of --seed."""
    grid: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]],
        tyro.conf.arg(metavar="KEY=VALUE,..."),
    ] = ()
    """More axes: an option and its values (YAML), such as spiking.time-steps=1,2,4, or presets,
    such as config=configs/popsan.yaml,configs/plain_lif.yaml. Several make a product."""
    workers: int | None = None
    """Runs at a time; none: one a core, on a cluster all. Cores are shared out among them as
    --threads."""
    retry: bool = False
    """Run failed runs again."""
    ray: Address = None
    """Run on a Ray cluster, the one at ADDRESS (host:port, or auto for the one that this machine is
    part of); without ADDRESS, on a Ray of this machine's own that listens on 127.0.0.1 alone."""
    slurm: bool = False
    """Run nothing; print the script of a Slurm array job that runs what is left, for sbatch."""
    task: int | None = None
    """Run this one of the sweep's runs, counted from 0, as the tasks of that array job do."""
    config: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE...")] = ()
    """Presets laid over the environment's own, later over earlier."""
    options: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass
class Tune(Command):
    """Search for options that train better agents, with Optuna: a trial is a training run for each
    seed, its score their mean return over the final evaluation; a trial whose evaluations fall
    behind the median of the others is pruned. Called again, a search goes on: trials that were
    stopped or killed are resumed from their checkpoints. Any number of processes, on machines that
    share the directory, may work on one search. Options that train has hold for all trials.

    What is searched is the section `tune` of a preset of --config, else configs/tune_dense.yaml or
    configs/tune_spiking.yaml. Two short tests, each with its own --help:

      tune lr-range    learning-rate range test: loss and return against the rate
      tune optimizers  Adam, AdamW, Adamax, RMSprop and SGD on the same data
    """

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The search's directory, new or to go on with (then it needs nothing else); none:
    runs/tune/<env>-<actor>."""
    trials: int | None = None
    """Trials in all, over all calls; none: those of the call before, at first 50."""
    seeds: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SEED|A..B...")] = ()
    """Seeds of every trial, such as 0..2; none: the one of --seed."""
    prune: bool = True
    """Stop trials that fall behind, after a third of their training (fixed with the search)."""
    workers: int | None = None
    """Trials at a time; none: one a core. Cores are shared out among them as --threads."""
    config: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE...")] = ()
    """Presets laid over the environment's own, later over earlier; their sections `tune` are the
    space."""
    options: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass
class ShortTest(Command):
    """What the short tests of `tune` have in common."""

    updates: int = 1000
    """Updates of a test: from the first rate to the last, or of each optimiser."""
    points: int = 10
    """Times at which the return is measured on the way."""
    episodes: int = 3
    """Episodes of such a measurement, the same at each."""
    warm_up: int | None = None
    """Environment steps that fill the buffer: random up to learning.learning-starts, training
    after, so that the test then starts from a trained agent; none: learning.learning-starts."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where the numbers (CSV, JSON) and the picture go; none: a new directory under runs/tune/."""
    overwrite: bool = False
    """Write into a directory that is not empty."""
    config: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE...")] = ()
    """Presets laid over the environment's own, later over earlier."""
    options: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass
class LrRange(ShortTest):
    """Learning-rate range test: on a buffer filled by rollouts, the rate grows by the same factor
    at every update. Where the loss falls fastest is a good rate, where it blows up one that is too
    large. Draws loss, its slope and the return against the rate. Options that train has hold."""

    of: Literal["all", "actor", "critic"] = "all"
    """Whose rate is swept; `all` is one rate for actor, critics and temperature, judged by the
    critics' loss."""
    low: float = 1e-6
    """First rate."""
    high: float = 1.0
    """Last rate; the test ends earlier where the loss blows up."""


@dataclass
class Optimizers(ShortTest):
    """Compare Adam, AdamW, Adamax, RMSprop and SGD, each with torch's defaults: same seed, same
    start, same minibatches of a buffer filled by rollouts. Options that train has hold."""

    points: int = 5
    """Times at which the return is measured on the way, the last at the end."""
    by: Literal["return", "loss"] = "return"
    """What the winner is chosen by: the mean return over the evaluations on the way, or the
    critics' mean loss over all updates."""
    rates: Annotated[tuple[float, ...], tyro.conf.arg(metavar="RATE...")] = ()
    """Learning rates that each is tried at; none: the configuration's own."""


@dataclass
class Sync:
    """Send runs to wandb, one wandb run each, however often they were resumed: their metrics, their
    videos and the best agent. Called again, it sends what is new. With WANDB_MODE=offline it writes
    what `wandb sync` uploads from elsewhere."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run directories, directories that hold some anywhere below, or globs."""


def look_ahead(arguments: Sequence[str]) -> argparse.Namespace:
    """The options that decide on the defaults of all others."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    scan.add_argument("--env")
    scan.add_argument("--algorithm")
    scan.add_argument("--config", nargs="+", action="extend", type=Path, default=[])
    scan.add_argument("--resume", type=Path)
    words = [word for word in arguments if word not in ("-h", "--help")]
    try:
        early, _ = scan.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    return early


def defaults(early: argparse.Namespace) -> dict[str, Any]:
    """What options are laid over: the environment's preset and the files of --config."""
    files = merge(*(load_yaml(path) for path in early.config))
    named = {"env": early.env, "algorithm": early.algorithm}
    layer = merge(files, {key: name for key, name in named.items() if name})
    return merge(presets_for(layer), layer)


def train(arguments: Sequence[str]) -> int:
    early = look_ahead(arguments)
    if early.resume:
        from sansac.checkpoint import read_config

        base = read_config(early.resume).dump()
        if early.config or early.env or early.algorithm:
            raise ConfigError(
                "--resume takes the run's own configuration: no --config, no --env, no --algorithm"
            )
    else:
        base = defaults(early)
    asked = parse(Train, "train", arguments, default=Train(options=partial(base)))
    config = asked.options

    from sansac.manager import Manager, refuse_other_changes

    if asked.resume:
        refuse_other_changes(partial(base), config)
        changes = {k: v for k, v in config.dump().items() if base.get(k) != v}
        manager = Manager.resume(asked.resume, which=asked.checkpoint, **changes)
        if manager.finished:
            more = "a larger --total-steps, or another --stop-at-return, goes on"
            print(f"{asked.resume} is finished: nothing to do ({more})", file=sys.stderr)
            print(asked.resume)
            return 0
    else:
        manager = Manager(config)
    result = manager.train()
    if result:
        show(result)
    print(manager.run_dir)
    return 128 + manager.interrupted if manager.interrupted else 0


def evaluate(arguments: Sequence[str]) -> int:
    asked = parse(Evaluate, "evaluate", arguments)
    check_run(asked.run)
    check_episodes(asked)

    from sansac.manager import Manager
    from sansac.progress import Activity

    manager = Manager.load(asked.run, asked.checkpoint)
    returns: list[float] = []
    with Activity("evaluating") as activity:

        def tell(episode_return: float) -> None:
            returns.append(episode_return)
            mean = sum(returns) / len(returns)
            activity.tell(f"{len(returns)} of {asked.episodes} episodes, mean return {mean:.1f}")

        result = manager.evaluate(
            asked.episodes, asked.seed, asked.stochastic, tell, asked.noise, asked.dropout
        )
    if asked.video:
        path = asked.run / "videos" / f"evaluation-seed{asked.seed}.mp4"
        manager.record_video(path, asked.seed)
        print(f"video: {path}", file=sys.stderr)
    if asked.json:
        print(json.dumps(result))
    else:
        show(result, "stochastic" if asked.stochastic else "deterministic")
    return 0


def play(arguments: Sequence[str]) -> int:
    asked = parse(Play, "play", arguments)
    check_run(asked.run)
    check_episodes(asked)

    from sansac.environments import has_display

    instead = f"`python runner.py evaluate {asked.run} --video` films an episode instead"
    if not has_display():
        raise ConfigError(f"there is no display to open a window on; {instead}")

    from sansac.manager import Manager

    manager = Manager.load(asked.run, asked.checkpoint)
    episodes = itertools.count()
    try:
        manager.play(
            asked.episodes,
            asked.seed,
            lambda total: print(f"episode {next(episodes)}: return {total:.1f}", flush=True),
        )
    except ConfigError as error:
        raise ConfigError(f"{error}; {instead}") from None
    return 0


def watch(arguments: Sequence[str]) -> int:
    asked = parse(Watch, "watch", arguments)
    check_run(asked.run)
    try:
        if asked.serve is None:
            from sansac.watch import watch

            watch(asked.run)
        else:
            from sansac.watch_page import serve

            serve(asked.run, asked.serve, lambda url: print(url, flush=True))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the lines has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def inspect(arguments: Sequence[str]) -> int:
    asked = parse(Inspect, "inspect", arguments)
    check_run(asked.run)
    if asked.seed < 0:
        raise ConfigError("--seed must be at least 0")

    from sansac import inspection
    from sansac.manager import Manager
    from sansac.page import check_directory
    from sansac.progress import Activity

    out = asked.out or asked.run / "inspection"
    check_directory(out, asked.overwrite)
    manager = Manager.load(asked.run, asked.checkpoint)
    with Activity("inspecting") as activity:
        page, episode = inspection.inspect(
            manager,
            out,
            name=asked.run.resolve().name,
            seed=asked.seed,
            at=asked.at,
            neurons=asked.neurons,
            overwrite=asked.overwrite,
            on_step=activity.tell,
        )
    if episode.no_frames:
        print(f"no frames: {episode.no_frames}", file=sys.stderr)
    print(page)
    return 0


def compare(arguments: Sequence[str]) -> int:
    asked = parse(Compare, "compare", arguments)
    if not asked.runs:
        raise ConfigError("compare needs run directories, such as: compare runs/BipedalWalker-v3")

    from sansac import compare as comparing
    from sansac.progress import Activity

    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    out = asked.out or Path("runs", "comparisons", stamp)
    with Activity("comparing") as activity:
        comparison = comparing.compare(
            asked.runs,
            out,
            by=asked.by,
            threshold=asked.threshold,
            parity=asked.parity,
            overwrite=asked.overwrite,
            on_step=activity.tell,
        )
    show_comparison(comparison)
    print(out)
    return 0


def export(arguments: Sequence[str]) -> int:
    asked = parse(Export, "export", arguments)
    check_run(asked.run)
    if asked.episodes < 0:
        raise ConfigError("--episodes must be at least 0")

    from sansac import export, export_c
    from sansac.manager import Manager
    from sansac.progress import Activity

    manager = Manager.load(asked.run, asked.checkpoint)
    with Activity("exporting") as activity:
        result = export.export(
            manager, asked.format, asked.out, int8=asked.int8, episodes=asked.episodes,
            overwrite=asked.overwrite, on_step=activity.tell,
        )  # fmt: skip
    if asked.json:
        print(json.dumps(result))
        return 0
    if "flash_bytes" in result:
        print("\n".join(export_c.told(result)))
    if "largest_difference" in result:
        print(export.told(result))
    else:
        print("not played beside the policy" + ("" if asked.episodes == 0 else ": no C compiler"))
    print(asked.out)
    return 0


def energy(arguments: Sequence[str]) -> int:
    asked = parse(Energy, "energy", arguments)
    for run in (asked.run, asked.dense):
        if run is not None:
            check_run(run)
    check_episodes(asked)

    from sansac import energy
    from sansac.manager import Manager
    from sansac.progress import Activity

    models = energy.MODELS | energy.parse_models(asked.model)
    manager = Manager.load(asked.run, asked.checkpoint)
    dense = Manager.load(asked.dense) if asked.dense else None
    with Activity("counting") as activity:
        result = energy.account(
            manager, dense, episodes=asked.episodes, seed=asked.seed, models=models,
            on_step=activity.tell,
        )  # fmt: skip
    if asked.json:
        print(json.dumps(result))
    else:
        show_tables(energy.tables(result))
    energy.keep(result, asked.run, energy.FILE)
    return 0


def latency(arguments: Sequence[str]) -> int:
    asked = parse(Latency, "latency", arguments)
    check_run(asked.run)
    if asked.actions < 1 or not 0 < asked.seconds < math.inf:
        raise ConfigError("--actions must be at least 1 and --seconds above 0")

    from sansac import energy, latency
    from sansac.manager import Manager
    from sansac.progress import Activity

    manager = Manager.load(asked.run, asked.checkpoint)
    with Activity("timing") as activity:
        result = latency.measure(
            manager, actions=asked.actions, seconds=asked.seconds, on_step=activity.tell
        )
    if asked.json:
        print(json.dumps(result))
    else:
        show_tables(latency.tables(result))
    energy.keep(result, asked.run, latency.FILE)
    return 0


def sweep(arguments: Sequence[str]) -> int:
    base = defaults(look_ahead(arguments))
    with incomplete():  # an axis may put a contradiction right
        command = parse(Sweep, "sweep", arguments, default=Sweep(
            out=tyro.MISSING, options=partial(base)
        ))  # fmt: skip
    if command.workers is not None and command.workers < 1:
        raise ConfigError("--workers must be at least 1")
    if (command.ray is not None) + command.slurm + (command.task is not None) > 1:
        raise ConfigError("--ray, --slurm and --task exclude each other: choose one")

    from sansac import cluster, sweep

    files = merge(*(load_yaml(path) for path in command.config))
    grid = [word for words in command.grid for word in words]
    axes = sweep.parse_axes(command.actors, command.seeds, grid)
    asked = sweep.Asked(files, sweep.given(arguments, command.options), axes)
    out, workers, retry = command.out, command.workers, command.retry
    if command.task is not None:
        if asked or workers or retry:
            raise ConfigError("--task takes --out and nothing else: the sweep has all that it runs")
        cluster.become(out, command.task)
    if command.slurm:
        script, runs = cluster.array_job(out, asked, workers, retry)
        print(sweep.Display(out, runs).text() + ("" if script else ": nothing is left to run"),
              file=sys.stderr)  # fmt: skip
        print(script, end="")
        return 0
    engine = cluster.connected(command.ray) if command.ray else None
    code, runs = sweep.sweep(out, asked, workers, retry, engine)
    sweep.report(out, runs)
    print(out)
    return code


def tune(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in PROBES:
        return PROBES[arguments[0]](arguments[1:])
    early = look_ahead(arguments)
    base = merge(QUIET, defaults(early))
    with incomplete():  # the space may put a contradiction right
        asked = parse(Tune, "tune", arguments, default=Tune(options=partial(base)))
    if asked.workers is not None and asked.workers < 1:
        raise ConfigError("--workers must be at least 1")
    if asked.trials is not None and asked.trials < 1:
        raise ConfigError("--trials must be at least 1")

    from sansac import sweep, tune

    actor = asked.options.actor_name
    out = asked.out or Path("runs", "tune", f"{slug(asked.options.env)}-{actor}")
    wanted = tune.Asked(
        merge(*(load_yaml(path) for path in asked.config)),
        sweep.given(arguments, asked.options, "search"),
        merge(*(load_space(path) for path in asked.config)),
        sweep.parse_seeds(asked.seeds),
    )
    return tune.tune(out, wanted, trials=asked.trials, prune=asked.prune, workers=asked.workers)


def lr_range(arguments: Sequence[str]) -> int:
    asked, out = parse_probe(LrRange, "lr-range", arguments)

    from sansac import probes

    found = probes.lr_range(
        asked.options, out, of=asked.of, low=asked.low, high=asked.high, updates=asked.updates,
        warm_up=asked.warm_up, points=asked.points, episodes=asked.episodes,
        overwrite=asked.overwrite,
    )  # fmt: skip
    best, rate = found.best_return
    if found.suggestion is None:
        print(f"no suggestion: the {found.loss} loss never falls")
    else:
        print(f"the {found.loss} loss falls fastest at {found.suggestion:.1e}: {found.options}")
    print(f"best return on the way: {best:.1f} at {rate:.1e}")
    print(out)
    return 0


def optimizers(arguments: Sequence[str]) -> int:
    asked, out = parse_probe(Optimizers, "optimizers", arguments)

    from rich.console import Console
    from rich.table import Table

    from sansac import probes

    found = probes.compare_optimizers(
        asked.options, out, by=asked.by, rates=asked.rates, updates=asked.updates,
        warm_up=asked.warm_up, points=asked.points, episodes=asked.episodes,
        overwrite=asked.overwrite,
    )  # fmt: skip
    table = Table(title=f"{asked.options.env}, {asked.options.actor_name} actor, by {asked.by}")
    for i, heading in enumerate(("optimizer", "mean return", "last return", "mean loss")):
        table.add_column(heading, justify="right" if i else "left")
    for probe in found:
        numbers = f"{probe.mean_return:.1f}", f"{probe.returns[-1]:.1f}", f"{probe.mean_loss:.4g}"
        table.add_row(probe.name, *numbers)
    Console().print(table)
    print(f"winner by {asked.by}: {found[0].name}")
    print(out)
    return 0


def parse_probe(kind: type, name: str, arguments: Sequence[str]) -> tuple[Any, Path]:
    """What a short test was asked for, and its directory."""
    base = merge(QUIET, defaults(look_ahead(arguments)))
    asked = parse(kind, f"tune {name}", arguments, default=kind(options=partial(base)))
    options = asked.options
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    usual = f"{slug(options.env)}-{options.actor_name}-{name}-{stamp}"
    return asked, asked.out or Path("runs", "tune", usual)


PROBES: dict[str, Callable[[Sequence[str]], int]] = {"lr-range": lr_range, "optimizers": optimizers}


def sync(arguments: Sequence[str]) -> int:
    asked = parse(Sync, "sync", arguments)
    if not asked.runs:
        raise ConfigError("sync needs run directories, such as: sync runs/BipedalWalker-v3")

    from sansac import sync

    mode = sync.wandb_mode()

    from sansac.compare import read_runs

    for run in read_runs(asked.runs):
        print(f"{run.path}: {send(run, mode)}", flush=True)
    return 0


def send(run: Run, mode: str) -> str:
    """Send one run to wandb, telling how far it is; what was sent."""
    from sansac import sync
    from sansac.progress import Activity

    rows = itertools.count(1)
    with Activity(f"sending {run.path.name}") as activity:
        return sync.sync(run, mode, lambda: activity.tell(f"row {next(rows)} of {len(run.rows)}"))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "evaluate": evaluate,
    "play": play,
    "watch": watch,
    "inspect": inspect,
    "compare": compare,
    "export": export,
    "energy": energy,
    "latency": latency,
    "sweep": sweep,
    "tune": tune,
    "sync": sync,
}


def parse(kind: type, command: str, arguments: Sequence[str], **default: Any) -> Any:
    """tyro's reading of the arguments; its own errors end the process with code 2."""
    asked = tyro.cli(kind, prog=f"runner.py {command}", args=list(arguments), **default)
    if getattr(asked, "trust_env", False):
        os.environ["SANSAC_TRUST_ENV"] = "1"  # environments.TRUST, which processes inherit
    return asked


def check_run(path: Path) -> None:
    """Raises ConfigError, before anything heavy is imported, where there is no such directory."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory: give a run or an agent directory")


def check_episodes(asked: Evaluate | Play | Energy) -> None:
    if asked.episodes < 1 or asked.seed < 0:
        raise ConfigError("--episodes must be at least 1 and --seed at least 0")


def show(result: dict[str, Any], kind: str = "deterministic") -> None:
    """An evaluation as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    from sansac.evaluation import summary

    table = Table(title=f"{result['env']}, {result['actor']} actor, step {result['step']:,}")
    table.add_column(f"{kind} evaluation")
    table.add_column("", justify="right")
    table.add_row("episodes", str(result["episodes"]))
    if result["noise"] or result["dropout"]:
        table.add_row("noise, dropout", f"{result['noise']:g}, {result['dropout']:g}")
    for name, value in summary(result).items():
        table.add_row(name, value)
    Console().print(table)


def show_comparison(comparison: Comparison) -> None:
    """The tables of a comparison and what makes its runs unlike, on stdout."""
    from rich.console import Console
    from rich.text import Text

    (head, *rows), differences = comparison.table, comparison.differences
    tables = [(comparison.title if i == 0 else "", transposed([head, *rows[i : i + GROUPS]]))
              for i in range(0, len(rows), GROUPS)]  # fmt: skip
    tables += [("", comparison.improvement_table), ("", comparison.parity_table)]
    tables += [("", comparison.cost_table), ("", comparison.deployment_table)]
    title = f"configuration differences, by {comparison.by}"
    tables += [(title if i == 1 else "", [[row[0], *row[i : i + GROUPS]] for row in differences])
               for i in range(1, len(differences[0]) if differences else 0, GROUPS)]  # fmt: skip
    show_tables(tables)
    for flag in comparison.flags:
        Console().print(Text(f"note: {flag}"))


def show_tables(tables: Sequence[tuple[str, Sequence[Sequence[str]]]]) -> None:
    """Titles and cells, a table's head first, on stdout; what has no cells is left out."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, cells in tables:
        if cells:
            table = Table(title=Text(title) if title else None)
            for i, name in enumerate(cells[0]):
                table.add_column(Text(name), justify="right" if i else "left")
            for row in cells[1:]:
                table.add_row(*map(Text, row))
            console.print(table)


def transposed(rows: list[list[str]]) -> list[list[str]]:
    return [list(column) for column in zip(*rows, strict=True)]


def fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def main(arguments: Sequence[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # no result is lost for want of a ±
    command, rest = "train", list(arguments)
    if rest and not rest[0].startswith("-"):
        command, *rest = rest
    if command not in COMMANDS:
        fail(f"unknown command {command!r}: choose from {', '.join(COMMANDS)}", 2)
    try:
        with signals.exiting():
            return COMMANDS[command](rest)
    except ConfigError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except OSError as error:  # a disk that is full, a directory that may not be written
        if error.errno in NO_PATH:
            fail(f"{error.filename} cannot be a path ({error.strerror}): give another one", 2)
        fail(f"{error.filename or 'a file'}: {error.strerror or error}", 1)
    except MemoryError as error:
        fail(f"out of memory: {error or 'lower replay.capacity, or the widths of the networks'}", 1)
    except (RuntimeError, FloatingPointError) as error:
        from sansac.checkpoint import CheckpointError
        from sansac.environments import EnvironmentFault, NonFiniteError
        from sansac.sync import SyncError

        if isinstance(error, (CheckpointError, NonFiniteError, SyncError, EnvironmentFault)):
            fail(str(error), 1)
        if "out of memory" in str(error) or "can't allocate memory" in str(error):  # torch's
            fail(f"out of memory: {error}", 1)
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
