"""Training beside its peers and its limits: every number a ratio from one alternating run.

    python -m benchmarks.train [--threads 2] [--rows NAME ...] [--out FILE] [--markdown FILE]
                               [--curves DIR] [--device cuda] [--quick]

Contenders of one family take turns and the medians of their rounds are compared: what disturbs one
disturbs all. Peers (requirements-bench.txt) that are not installed are named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from benchmarks import costs
from benchmarks import kernels as kernel_benchmark
from benchmarks.contenders import FAMILIES, QUICK, STACKS, Absent, Setup, Turn
from benchmarks.kernels import take_turns
from sansac import kernels
from sansac.checkpoint import write_atomically
from sansac.manager import provenance

ROUNDS = {"updates": 9, "training": 5, "collecting": 9, "acting": 9, "memory": 1}
PEERS = ("stable-baselines3", "sbx-rl", "jax")

Quantity = tuple[str, str]  # a contender and which of its numbers
Rounds = dict[str, list[dict[str, float]]]  # of each contender


@dataclass(frozen=True)
class Row:
    """`of`, or what multiple of `to` it is, beside its target (none: for information)."""

    name: str
    what: str
    of: Quantity
    to: Quantity | None = None
    target: float | None = None
    at_most: bool = False
    unit: str = "x"

    def contenders(self) -> set[str]:
        return {self.of[0], *([self.to[0]] if self.to else [])}

    def value(self, rounds: Rounds) -> float:
        value = median(rounds, self.of) / (median(rounds, self.to) if self.to else 1.0)
        return 100 * value if self.unit == "%" else value

    def met(self, value: float) -> bool | None:
        if self.target is None:
            return None
        return value <= self.target if self.at_most else value >= self.target


def median(rounds: Rounds, quantity: Quantity) -> float:
    name, number = quantity
    return statistics.median(turn[number] for turn in rounds[name])


def ratio(name: str, what: str, of: str, to: str, **more: Any) -> Row:
    """Of the times of two contenders."""
    return Row(name, what, (of, "us"), (to, "us"), **more)


def spiking_row(steps: int, log_std: str, target: float) -> Row:
    what = f"time of a spiking update, T = {steps}, log-std {log_std}, in dense updates"
    name = f"spiking-t{steps}-{log_std}"
    return ratio(name, what, f"spiking T={steps} {log_std}", "dense", target=target, at_most=True)


def speed(name: str, of: str, to: str, **more: Any) -> Row:
    """Of the steps a second of two contenders."""
    return Row(name, f"steps/s of {of}, in those of {to}", (of, "steps/s"), (to, "steps/s"), **more)


def ablation(name: str, plain: str, of: str, to: str = "preset") -> Row:
    what = (
        f"time of the preset's {'spiking ' if 'spiking' in to else ''}update with {plain}, in ours"
    )
    return ratio(f"without-{name}", what, of, to)


BOTH = (  # on a CPU and on a GPU
    ratio("update", "speed of a dense update, in SB3's train(1)", "SB3 train(1)", "dense",
          target=3.0),
    Row("updates-dense", "dense updates a second", ("dense", "calls/s"), unit="1/s"),
    Row("updates-spiking", "spiking updates a second, T = 2", ("spiking T=2 shared", "calls/s"),
        unit="1/s"),
    *(spiking_row(2, head, 1.5) for head in ("shared", "linear")),
    *(spiking_row(5, head, 2.0) for head in ("shared", "linear")),
)  # fmt: skip

CPU = (
    *BOTH,
    speed("train-sb3", "dense run", "SB3 learn", target=2.5),
    speed("train-sbx", "dense run", "SBX learn", target=1.4),
    speed("train-one", "dense run, one environment", "SB3 learn"),
    Row("train", "steps/s of the dense run", ("dense run", "steps/s"), unit="1/s"),
    Row("cores", "cores that the dense run keeps busy", ("dense run", "cores"), unit=""),
    Row("cores-sbx", "cores that SBX learn keeps busy", ("SBX learn", "cores"), unit=""),
    ratio("limit", "share of the float32 product limit that a dense update reaches",
          "dense products", "dense", target=60.0, unit="%"),
    ratio("bfloat16", "speed of a dense update in bfloat16, in float32 ones",
          "dense", "dense bfloat16", target=1.4),
    ratio("limit-bfloat16", "share of the bfloat16 product limit that such an update reaches",
          "dense bfloat16 products", "dense bfloat16", unit="%"),
    *(ratio(name, f"time of an update with the stack {name}, in its own matrix products",
            name, f"{name} products", target=1.15, at_most=True) for name in STACKS),
    ratio("quantiles", "time of an update with 2 x 25 quantiles, in ones with plain critics",
          "dense quantiles", "dense", target=1.25, at_most=True),
    speed("collect", "collecting", "bare environments", target=85.0, unit="%"),
    Row("action", "one action, dense, median", ("dense action", "p50"), target=40.0, at_most=True,
        unit="us"),
    Row("action-slow", "one action, dense, p99 in medians",
        ("dense action", "p99"), ("dense action", "p50"), target=3.0, at_most=True),
    Row("action-spiking", "one action, spiking, T = 5, in dense ones",
        ("spiking action", "p50"), ("dense action", "p50"), target=1.8, at_most=True),
    ratio("sampling", "sampling a minibatch of a full buffer, in updates", "sampling", "dense",
          target=3.0, at_most=True, unit="%"),
    Row("buffer", "memory of that buffer, in its payload", ("sampling", "memory"), target=1.1,
        at_most=True),
    Row("logging", "logging, bookkeeping and progress, share of training time",
        ("dense run", "other"), target=3.0, at_most=True, unit="%"),
    speed("silent", "dense run", "dense run, silent"),
    Row("memory", "peak resident memory of a run with a full buffer", ("memory", "MB"),
        target=700.0, at_most=True, unit="MB"),
    Row("growth", "what it grew by once the buffer was full", ("memory", "growth"), target=10.0,
        at_most=True, unit="MB"),
    ratio("preset-spiking", "time of the preset's spiking update, in its dense ones",
          "preset, spiking", "preset"),
    ablation("averaging", "averages tensor by tensor", "preset, averaging"),
    ablation("critics", "critics by autograd, their LayerNorm in torch", "preset, critics"),
    ablation("drop", "the largest quantiles found by a sort", "preset, drop"),
    ablation("quantile-loss", "the quantile loss in torch", "preset, quantiles"),
    ablation("neurons", "neurons in torch", "preset, neurons", "preset, spiking"),
    *(Row(f"without-{actor}-action", f"time of one action, {actor}, with torch, in ours",
          (f"{actor} action, torch", "p50"), (f"{actor} action", "p50"))
      for actor in ("dense", "spiking")),
)  # fmt: skip

CUDA = (
    *BOTH,
    Row("launches-dense", "launches of a dense update", ("dense launches", "launches"), unit=""),
    Row("launches-spiking", "launches of a spiking update, T = 2",
        ("spiking launches", "launches"), unit=""),
    Row("launches-captured", "launches of a dense update as a CUDA graph",
        ("captured launches", "launches"), unit=""),
    Row("updates-captured", "dense updates a second as a CUDA graph",
        ("dense captured", "calls/s"), unit="1/s"),
    ratio("captured-dense", "speed of a dense update as a CUDA graph, in one without",
          "dense", "dense captured"),
    ratio("captured-spiking", "speed of a spiking update, T = 2, as a CUDA graph, in one without",
          "spiking T=2 shared", "spiking captured"),
)  # fmt: skip

ROWS = {"cpu": CPU, "cuda": CUDA}


# -- measuring ---------------------------------------------------------------------------------


def measure(rows: Iterable[Row], setup: Setup, quick: bool) -> tuple[Rounds, dict[str, str]]:
    """The rounds of every contender that the rows need, and why others were skipped."""
    needed = {name for row in rows for name in row.contenders()}
    rounds: Rounds = {}
    skipped: dict[str, str] = {}
    # Drawn between turns alone: a display that is drawn by itself would disturb them.
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        for family, makers in FAMILIES.items():
            names = [name for name in makers if name in needed]
            count = min(2, ROUNDS[family]) if quick else ROUNDS[family]
            task = progress.add_task(family, total=len(names) * (count + 1), visible=bool(names))

            def announce(name: str, task: TaskID = task, family: str = family) -> None:
                progress.update(task, advance=1, description=f"{family}: {name}", refresh=True)

            turns: dict[str, Turn] = {}
            for name in names:
                announce(name)
                try:
                    turns[name] = makers[name](setup)
                except Absent as reason:
                    skipped[name] = str(reason)
            rounds |= take_turns(turns, count, announce)
            progress.update(task, completed=len(names) * (count + 1), description=family)
    return rounds, skipped


def assess(rows: Iterable[Row], rounds: Rounds) -> list[dict[str, Any]]:
    """Each row with its value and whether that meets the target; both None where it was skipped."""
    results = []
    for row in rows:
        value = row.value(rounds) if row.contenders() <= rounds.keys() else None
        met = None if value is None else row.met(value)
        results.append({**asdict(row), "value": value, "met": met})
    return results


def machine(setup: Setup) -> dict[str, Any]:
    """What all of it was measured on."""
    about = kernel_benchmark.machine(torch.device(setup.device))
    source = provenance()
    for package in PEERS:
        try:
            source["versions"][package] = version(package)
        except PackageNotFoundError:
            source["versions"][package] = "absent"
    return {
        "machine": about["machine"],
        "cores": os.cpu_count(),
        "threads": setup.threads,
        "neurons": about["backend"],
        "load": round(os.getloadavg()[0], 2),
        **{key: source[key] for key in ("commit", "dirty", "versions")},
    }


# -- reporting ---------------------------------------------------------------------------------


def cells(result: dict[str, Any]) -> list[str]:
    """Name, what, value, target, verdict."""
    unit = f" {result['unit']}".rstrip()
    value, target = result["value"], result["target"]
    bound = "at most" if result["at_most"] else "at least"
    return [
        result["name"],
        result["what"],
        "skipped" if value is None else three_digits(value) + unit,
        "" if target is None else f"{bound} {target:g}{unit}",
        {True: "met", False: "missed", None: ""}[result["met"]],
    ]


def three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def about_text(report: dict[str, Any]) -> str:
    about = report["machine"]
    threads = "1 thread" if about["threads"] == 1 else f"{about['threads']} threads"
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    commit = (about["commit"] or "unknown")[:8] + (", changed since" if about["dirty"] else "")
    return (
        f"{about['machine']}, {about['cores']} cores, {threads}, load {about['load']} before; "
        f"{versions}; commit {commit}"
    )


def show(report: dict[str, Any]) -> None:
    console = Console()
    table = Table("row", "what", "measured", "target", "", title="sansac, training")
    for result in report["rows"]:
        style = {True: "green", False: "red", None: None}[result["met"]]
        table.add_row(*cells(result), style=style)
    console.print(about_text(report))
    console.print(table)
    for name, reason in report["skipped"].items():
        console.print(f"skipped: {name}: {reason}", markup=False)


def markdown(report: dict[str, Any]) -> str:
    """The table, the rounds that it comes from, and the profile where there is one."""
    lines = [f"{about_text(report)}.", "", "| row | what | measured | target | |"]
    lines += ["|---|---|---|---|---|"]
    lines += ["| " + " | ".join(cells(result)) + " |" for result in report["rows"]]
    lines += ["", "| contender | median | lowest to highest round | rounds |", "|---|---|---|---|"]
    for name, turns in report["rounds"].items():
        for number in turns[0]:
            values = [turn[number] for turn in turns]
            middle, low, high = statistics.median(values), min(values), max(values)
            lines.append(
                f"| {name}, {number} | {middle:.4g} | {low:.4g} to {high:.4g} | {len(values)} |"
            )
    lines += [f"\nSkipped: {name}: {reason}." for name, reason in report["skipped"].items()]
    if profile := report.get("profile"):
        lines += ["", f"| share of an update | {' | '.join(profile)} |"]
        lines += ["|---" * (1 + len(profile)) + "|"]
        for part in profile["dense"]:
            shares = [f"{100 * profile[actor][part]:.0f} %" for actor in profile]
            lines.append(f"| {part} | {' | '.join(shares)} |")
    return "\n".join(lines)


def write_block(path: Path, key: str, text: str) -> None:
    """Put the text between the page's comments of that key; they are added where it has none."""
    begin, end = f"<!-- measured: {key} -->", f"<!-- end: {key} -->"
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    if begin not in page or end not in page:
        page = f"{page}\n{begin}\n{end}\n".lstrip()
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    page = f"{before}{begin}\n{text}\n{end}{after}"
    write_atomically(path, lambda file: file.write(page.encode()))


# -- the command line --------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train",
        description=(__doc__ or "").partition("\n")[0],
        epilog="rows: " + "; ".join(f"{row.name}: {row.what}" for row in CPU),
    )
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="these alone, named below")
    parser.add_argument("--threads", type=int, default=1, help="of everyone (1)")
    parser.add_argument("--device", choices=ROWS, default="cpu", help="cuda: the rows of a GPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all numbers as JSON")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table into a page's own comments"
    )
    parser.add_argument(
        "--curves", type=Path, metavar="DIR", help="profile an update, draw how cost grows: minutes"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing"
    )
    asked = parser.parse_args(arguments)
    if asked.threads < 1:
        parser.error(f"--threads must be at least 1, found {asked.threads}")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; leave it out to measure the CPU")
    known = [row.name for row in ROWS[asked.device]]
    if unknown := sorted(set(asked.rows or ()) - set(known)):
        parser.error(f"--rows: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
    for path in (asked.out, asked.markdown):
        if path and not path.parent.is_dir():
            parser.error(f"{path}: there is no directory {path.parent}")
    return asked


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    asked = parse(arguments)
    sizes: dict[str, Any] = QUICK if asked.quick else {}
    setup = Setup(device=asked.device, threads=asked.threads, **sizes)
    torch.set_num_threads(setup.threads)
    kernels.keep_freed_memory()
    rows = [row for row in ROWS[setup.device] if not asked.rows or row.name in asked.rows]
    about = machine(setup)
    rounds, skipped = measure(rows, setup, asked.quick)
    report: dict[str, Any] = {
        "machine": about,
        "setup": asdict(setup),
        "rows": assess(rows, rounds),
        "rounds": rounds,
        "skipped": skipped,
    }
    show(report)
    if asked.curves:
        report["profile"] = costs.profile(setup)
        report["curves"] = costs.measure(setup, asked.quick)
        print(costs.draw(report["curves"], asked.curves))
    if asked.out:
        text = json.dumps(report, indent=1) + "\n"
        write_atomically(asked.out, lambda file: file.write(text.encode()))
    if asked.markdown:
        key = f"{setup.device}, {setup.threads} thread{'s' * (setup.threads > 1)}"
        write_block(asked.markdown, key, markdown(report))
    return report


if __name__ == "__main__":
    main()
