"""Minutes to a walking agent: collecting and learning until 100 fresh episodes return 300.

    python -m benchmarks.minutes spiking|dense [--seeds 100 101 ...] [--threads 1] [--total-steps N]
                                               [--out FILE] [--markdown FILE]

One run at a time with the task's preset. An evaluation of ten episodes
whose mean reaches the return makes a candidate; 100 deterministic episodes, which no evaluation
before them used, decide. Time spent evaluating is counted apart.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import ENV, Setup
from benchmarks.train import about_text, machine, write_block
from sansac.callbacks import Callback
from sansac.checkpoint import write_atomically
from sansac.config import Config, resolve
from sansac.manager import Manager

EPISODES, WANTED = 100, 300.0
TARGETS = {"spiking": 6.0, "dense": 4.0}  # minutes, in the median seed


class Reached(Callback):
    """Ends training at the first candidate whose fresh episodes return enough."""

    def __init__(self) -> None:
        self.candidates: list[dict[str, float]] = []
        self.found = False

    def evaluation(self, manager: Manager, result: dict[str, Any]) -> None:
        if manager.updates == 0 or result["return_mean"] < WANTED:
            return
        fresh = manager.evaluate(EPISODES, seed=0)
        kept = ("return_mean", "return_std", "return_min")
        self.candidates.append({"step": manager.step, **{key: fresh[key] for key in kept}})
        self.found = fresh["return_mean"] >= WANTED

    def done(self, manager: Manager) -> bool:
        return self.found


def configuration(seed: int, asked: argparse.Namespace) -> Config:
    return Config.for_env(
        ENV,
        san=asked.actor == "spiking",
        seed=seed,
        threads=asked.threads,
        total_steps=asked.total_steps,
        eval_every=asked.eval_every,
        eval_episodes=10,
        final_episodes=1,
        video=False,
        wandb="disabled",
    )


def run(config: Config) -> dict[str, Any]:
    """One run, until it is found or to its end; minutes are of collecting and learning."""
    started = time.perf_counter()
    reached = Reached()
    with tempfile.TemporaryDirectory() as directory:
        manager = Manager(resolve(config.dump(), {"runs_dir": directory}), callbacks=[reached])
        manager.train()
    if manager.interrupted:  # the manager took the signal for itself
        raise KeyboardInterrupt
    return {
        "actor": config.actor_name,
        "seed": config.seed,
        "found": reached.found,
        "minutes": (manager.collect_seconds + manager.learn_seconds) / 60,
        "minutes_in_all": (time.perf_counter() - started) / 60,
        "step": manager.step,
        "updates": manager.updates,
        "candidates": reached.candidates,
    }


def verdict(runs: list[dict[str, Any]]) -> str:
    """On the minutes of the median seed; endless where that one was not found."""
    actor = runs[0]["actor"]
    median = statistics.median(r["minutes"] if r["found"] else math.inf for r in runs)
    met = "met" if median <= TARGETS[actor] else "missed"
    return f"{actor}: median seed {median:.1f} minutes (target: at most {TARGETS[actor]:g}), {met}"


HEAD = ("actor", "seed", "minutes", "with evaluation", "steps", "updates", "100 episodes", "lowest")


def row(run: dict[str, Any]) -> list[str]:
    last = run["candidates"][-1] if run["candidates"] else None
    return [
        run["actor"],
        str(run["seed"]),
        f"{run['minutes']:.1f}" if run["found"] else f"not in {run['minutes']:.1f}",
        f"{run['minutes_in_all']:.1f}",
        f"{run['step']:,}",
        f"{run['updates']:,}",
        f"{last['return_mean']:.1f} ± {last['return_std']:.1f}" if last else "-",
        f"{last['return_min']:.1f}" if last else "-",
    ]


def markdown(report: dict[str, Any]) -> str:
    lines = [f"{about_text(report)}.", "", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    lines += [f"| {' | '.join(row(run))} |" for run in report["runs"]]
    return "\n".join([*lines, "", f"{verdict(report['runs'])}."])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.minutes", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("actor", choices=TARGETS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(100, 105)))
    parser.add_argument("--threads", type=int, default=1, help="of a run (1)")
    parser.add_argument("--total-steps", type=int, default=100_000, help="of a run (100,000)")
    parser.add_argument("--eval-every", type=int, default=5_000, help="steps (5,000)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all numbers as JSON")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table into a page's own comments"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    asked = parse(arguments)
    report: dict[str, Any] = {"machine": machine(Setup(threads=asked.threads)), "runs": []}
    for seed in asked.seeds:
        report["runs"].append(run(configuration(seed, asked)))
        if asked.out is not None:  # after each run: all of them take half an hour
            text = json.dumps(report, indent=1) + "\n"
            write_atomically(asked.out, lambda file, text=text: file.write(text.encode()))
    table = Table(*HEAD, title=f"{ENV}: minutes to a mean of {WANTED:g}")
    for result in report["runs"]:
        table.add_row(*row(result))
    console = Console()
    console.print(about_text(report))
    console.print(table)
    console.print(verdict(report["runs"]))
    if asked.markdown is not None:
        write_block(asked.markdown, f"minutes, {asked.actor}", markdown(report))
    return report


if __name__ == "__main__":
    main()
