"""Fused neurons beside SpikingJelly's own, an unrolled torch loop and `torch.compile`.

    python -m benchmarks.kernels [--device cuda] [--compile] [--quick] [--out FILE]

Contenders take turns within one run and medians are compared: what disturbs one disturbs all. Times
are microseconds a call; other numbers are multiples of the fused kernel's time, or of the named
baseline.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium.spaces import Box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from sansac import kernels
from sansac.algorithm import SAC
from sansac.config import Actor, Config, Spiking
from sansac.environments import ActionScale
from sansac.evaluation import Policy

K = TypeVar("K")
T = TypeVar("T")
WIDTH = 256
BATCHES = (1, 16, 256, 2048, 8192)
STEPS = (1, 5, 16)
NEURON: dict[str, Any] = {
    "tau": 2.0,
    "decay_input": True,
    "v_threshold": 1.0,
    "v_reset": 0.0,
    "surrogate": "rectangle",
    "alpha": 1.0,
    "detach_reset": False,
}


def seconds_a_call(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start) / repeats


def take_turns(
    contenders: Mapping[K, Callable[[], T]],
    rounds: int,
    before: Callable[[K], None] = lambda _: None,
) -> dict[K, list[T]]:
    """What each contender measures, a list of rounds; `before` is told whose turn it is."""
    results: dict[K, list[T]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, turn in contenders.items():
            before(name)
            results[name].append(turn())
    return results


def alternate(
    contenders: dict[str, Callable[[], object]], device: torch.device, seconds: float
) -> dict[str, float]:
    """Median microseconds a call of each, taking turns."""
    turns, total = {}, 0.0
    for name, call in contenders.items():
        call()
        once = seconds_a_call(call, 1, device)
        repeats = max(1, int(seconds / 15 / once))
        turns[name] = partial(seconds_a_call, call, repeats, device)
        total += repeats * once
    rounds = min(15, max(3, int(len(contenders) * seconds / total)))
    return {n: statistics.median(v) * 1e6 for n, v in take_turns(turns, rounds).items()}


def neurons(
    batch: int, steps: int, device: torch.device, compile_loop: bool, seconds: float
) -> dict[str, dict[str, float]]:
    """Spikes of `batch` x WIDTH neurons over `steps`: forward, and forward + backward."""
    current = torch.randn(steps, batch, WIDTH, device=device) * 2
    upstream = torch.randn_like(current)
    leaf = current.clone().requires_grad_()
    fused = kernels.backend_for("auto", device)

    def lif(backend: str) -> Callable[[Tensor], Tensor]:
        return lambda x: kernels.lif(x, time_steps=steps, backend=backend, **NEURON)

    functions = {name: lif(name) for name in dict.fromkeys((fused, "spikingjelly", "torch"))}
    if compile_loop:
        torch._dynamo.reset()
        functions["compile"] = torch.compile(lif("torch"))

    def forward(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        def call() -> None:
            with torch.no_grad():
                function(current)

        return call

    def both(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(leaf), leaf, upstream)

    return {
        "forward": alternate({n: forward(f) for n, f in functions.items()}, device, seconds),
        "forward + backward": alternate(
            {n: both(f) for n, f in functions.items()}, device, seconds
        ),
    }


def networks(device: torch.device, seconds: float) -> dict[str, dict[str, float]]:
    """24-256-256-4, T = 5, constant current: an update of 256, and one action of a policy."""
    steps, batch = 5, 256
    first, second, last = nn.Linear(24, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
    parameters = [p for layer in (first.to(device), second.to(device), last.to(device))
                  for p in layer.parameters()]  # fmt: skip
    backend = kernels.backend_for("auto", device)
    shared = {"time_steps": steps, "backend": backend, **NEURON, "v_threshold": 0.3}

    def spiking(observation: Tensor) -> Tensor:
        spikes = kernels.lif(first(observation), constant=True, **shared)
        return last(kernels.lif(second(spikes), output="mean", **shared))

    def dense(observation: Tensor) -> Tensor:
        return last(second(first(observation).relu()).relu())

    observations = torch.randn(batch, 24, device=device)
    with torch.no_grad():
        spikes = kernels.lif(first(observations), constant=True, **shared)
        rates = kernels.lif(second(spikes), output="mean", **shared)
    spikes.requires_grad_()
    rates.requires_grad_()
    inputs = (observations, spikes, rates)
    upstream = [torch.randn(batch, WIDTH, device=device), torch.randn_like(spikes),
                torch.randn(batch, 4, device=device)]  # fmt: skip

    def products() -> object:
        outputs = [layer(x) for layer, x in zip((first, second, last), inputs, strict=True)]
        return torch.autograd.grad(outputs, [*parameters, spikes, rates], upstream)

    def update(network: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(network(observations), parameters, upstream[2])

    return {
        "update of 256": alternate(
            {"own products": products, "spiking": update(spiking), "dense": update(dense)},
            device,
            seconds,
        ),
        "one action": alternate(
            {"dense": act(False, device), "spiking": act(True, device)}, device, seconds
        ),
    }


def act(san: bool, device: torch.device) -> Callable[[], object]:
    """One action, numpy in and numpy out, of a policy whose neurons fire as a trained one's do."""
    actor, spiking = Actor(hidden=(WIDTH, WIDTH), batch_norm=True), Spiking(time_steps=5)
    sac = SAC(Config(san=san, actor=actor, spiking=spiking), 24, 4, device.type)
    observations = torch.randn(1000, 24, device=device)
    sac.reestimate(observations)
    policy = Policy(sac, ActionScale(Box(-1.0, 1.0, (4,), np.float32)))
    inputs = itertools.cycle(observations.cpu().numpy())
    return lambda: policy(next(inputs))


def machine(device: torch.device) -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        models = [s for s in information.read_text().splitlines() if s.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "machine": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "backend": kernels.backend_for("auto", device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch; its default otherwise")
    parser.add_argument("--compile", action="store_true", help="torch.compile too: minutes")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, coarser")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device, seconds = torch.device(arguments.device), 0.05 if arguments.quick else 0.5
    kernels.keep_freed_memory()
    about = machine(device)
    fused = about["backend"]
    others = ["spikingjelly", "torch", *(["compile"] if arguments.compile else [])]

    console = Console()
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    table = Table("batch", "T", "pass", f"{fused} us", *(f"{name} x" for name in others),
                  title=f"LIF, {WIDTH} neurons")  # fmt: skip
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        for steps in STEPS:
            passes = neurons(batch, steps, device, arguments.compile, seconds)
            for name, times in passes.items():
                rows.append({"batch": batch, "time_steps": steps, "pass": name, "us": times})
                ratios = [f"{times[other] / times[fused]:.1f}" for other in others]
                table.add_row(str(batch), str(steps), name, f"{times[fused]:.1f}", *ratios)
    console.print(table)

    results = networks(device, 4 * seconds)
    table = Table("24-256-256-4, T = 5", "baseline", "us", "spiking us", "ratio")
    for name, times in results.items():
        baseline = next(iter(times))
        ratio = times["spiking"] / times[baseline]
        cells = [f"{times[baseline]:.1f}", f"{times['spiking']:.1f}", f"{ratio:.2f}"]
        table.add_row(name, baseline, *cells)
    console.print(table)
    if arguments.out:
        report = {**about, "neurons": rows, "networks": results}
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
