"""What `benchmarks.train` measures: sansac and its peers, each on the same task and networks.

A contender is a function of the setup that makes a turn; a turn, called once a round, measures and
returns numbers by name. Contenders of one family take turns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels import act, seconds_a_call
from sansac import capture, kernels
from sansac.algorithm import SAC
from sansac.config import Config, load_yaml, preset_for, resolve
from sansac.logger import read_metrics
from sansac.manager import Manager, peak_megabytes
from sansac.networks import layered
from sansac.replay import ReplayBuffer

ENV, OBSERVATIONS, ACTIONS = "BipedalWalker-v3", 24, 4
STACKS = ("popsan", "mdc_san", "ilc_san", "care_bn")  # presets in configs/
ROOT = Path(__file__).resolve().parent.parent

Turn = Callable[[], dict[str, float]]


class Absent(Exception):
    """What a contender needs is not on this machine; the message says what to do."""


@dataclass(frozen=True)
class Setup:
    """The sizes of what is measured, and for how long."""

    device: str = "cpu"
    threads: int = 1
    batch: int = 256
    hidden: tuple[int, ...] = (256, 256)
    environments: int = 8
    seconds: float = 0.4  # of a turn of timed calls
    calls: int = 2_000  # of a policy a turn
    trained: int = 500  # environment steps of training a turn
    collected: int = 4_000  # environment steps of collecting a turn
    sampled: int = 1_000_000  # transitions in the buffer that is sampled
    capacity: int = 300_000  # of the run whose memory is measured
    wandb: str = "offline"

    def config(self, *layers: dict[str, Any]) -> Config:
        """The bare defaults at these sizes: plain twin critics, one update a step."""
        sizes = {
            "env": ENV,
            "device": self.device,
            "threads": self.threads,
            "learning": {"batch_size": self.batch},
            "actor": {"hidden": self.hidden},
            "critic": {"hidden": self.hidden},
        }
        return resolve(sizes, *layers)


QUICK = {
    "batch": 16, "hidden": (16, 16), "seconds": 0.01, "calls": 50, "trained": 64,
    "collected": 64, "sampled": 5_000, "capacity": 1_000, "wandb": "disabled",
}  # fmt: skip


def timed(call: Callable[[], object], setup: Setup) -> Turn:
    """A turn of as many calls as fill its seconds; their mean."""
    device = torch.device(setup.device)
    for _ in range(capture.WARM_UP + 1):
        call()
    repeats = max(1, round(setup.seconds / seconds_a_call(call, 3, device)))

    def turn() -> dict[str, float]:
        seconds = seconds_a_call(call, repeats, device)
        return {"us": seconds * 1e6, "calls/s": 1 / seconds}

    return turn


# -- updates -----------------------------------------------------------------------------------


def transitions(count: int) -> dict[str, np.ndarray]:
    """`count` transitions of the task's sizes, the same for everyone."""
    rng = np.random.default_rng(0)
    return {
        "observation": rng.standard_normal((count, OBSERVATIONS), np.float32),
        "action": rng.uniform(-1, 1, (count, ACTIONS)).astype(np.float32),
        "reward": rng.standard_normal(count, np.float32),
        "next_observation": rng.standard_normal((count, OBSERVATIONS), np.float32),
        "terminated": rng.random(count) < 0.01,
        "truncated": np.zeros(count, bool),
    }


def filled(capacity: int, device: str = "cpu") -> ReplayBuffer:
    """A buffer of one-step transitions, every row written."""
    count = min(capacity, 1000)
    replay = ReplayBuffer(
        capacity, OBSERVATIONS, ACTIONS, num_envs=count, n_step=1, gamma=0.99, seed=0, device=device
    )
    rows = transitions(count)
    while replay.size < capacity:
        replay.add(**rows)
    return replay


def updater(setup: Setup, *layers: dict[str, Any]) -> Callable[[], object]:
    """Sampling and one update, as `Manager.learn` makes it."""
    config = setup.config(*layers)
    update = capture.updater(SAC(config, OBSERVATIONS, ACTIONS, setup.device))
    replay = filled(4000, setup.device)

    def call() -> None:
        with kernels.products(config.learning.precision):
            update(replay.sample(config.learning.batch_size))

    return call


def update(*layers: dict[str, Any]) -> Callable[[Setup], Turn]:
    return lambda setup: timed(updater(setup, *layers), setup)


class Products(TorchDispatchMode):
    """Notes sizes and strides of the operands of every matrix product."""

    aten = torch.ops.aten
    kinds = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function.overloadpacket in self.kinds:
            self.operands.append([(tuple(x.shape), x.stride()) for x in args[-2:]])
        return function(*args, **(kwargs or {}))


def product_calls(setup: Setup, *layers: dict[str, Any]) -> list[Callable[[], object]]:
    """The matrix products of one update, forward and backward, and nothing else.

    Operands and results of one shape are the same memory, so they are read from the cache where an
    update's own may not be: nothing that multiplies them one by one is faster.
    """
    call = updater(setup, *layers)
    call()
    with Products() as noted:
        call()
    memory: dict[Any, Tensor] = {}

    def operand(role: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        if (role, shape, stride) not in memory:
            size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            base = torch.randn(size, device=setup.device)
            memory[role, shape, stride] = base.as_strided(shape, stride)
        return memory[role, shape, stride]

    calls: list[Callable[[], object]] = []
    for left, right in noted.operands:
        a, b = operand("left", *left), operand("right", *right)
        result = a @ b
        out = operand("result", tuple(result.shape), result.stride())
        multiply: Callable[..., Tensor] = torch.mm if a.dim() == 2 else torch.bmm
        calls.append(partial(multiply, a, b, out=out))
    return calls


def products(*layers: dict[str, Any]) -> Callable[[Setup], Turn]:
    def make(setup: Setup) -> Turn:
        precision = setup.config(*layers).learning.precision
        calls = product_calls(setup, *layers)

        def call() -> None:
            with kernels.products(precision):
                for product in calls:
                    product()

        return timed(call, setup)

    return make


def launches(*layers: dict[str, Any]) -> Callable[[Setup], Turn]:
    """Kernels and graphs that one update hands to the GPU."""

    def make(setup: Setup) -> Turn:
        from torch.profiler import ProfilerActivity, profile

        call = updater(setup, *layers)
        for _ in range(capture.WARM_UP + 1):
            call()

        def turn() -> dict[str, float]:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                call()
                torch.cuda.synchronize()
            words = ("LaunchKernel", "GraphLaunch")  # of CUDA's runtime and of its driver
            found = [e for e in profiled.key_averages() if any(word in e.key for word in words)]
            return {"launches": float(sum(event.count for event in found))}

        return turn

    return make


def sampling(setup: Setup) -> Turn:
    """A minibatch of a full buffer, and the memory that the buffer took beside its payload."""
    before = resident_bytes()
    replay = filled(setup.sampled)
    payload = setup.sampled * 4 * (2 * OBSERVATIONS + ACTIONS + 2)
    share = (resident_bytes() - before) / payload
    turn = timed(lambda: replay.sample(setup.batch), setup)
    return lambda: turn() | {"memory": share}


def resident_bytes() -> int:
    """Of this process, now. Raises Absent where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        raise Absent("resident memory is read from /proc, which this system lacks") from None
    return pages * os.sysconf("SC_PAGE_SIZE")


def without(target: str, plain: Any, make: Callable[[Setup], Turn]) -> Callable[[Setup], Turn]:
    """A contender with `plain` in the place of what makes it faster."""

    def made(setup: Setup) -> Turn:
        with patch(target, plain):
            turn = make(setup)

        def patched() -> dict[str, float]:
            with patch(target, plain):
                return turn()

        return patched

    return made


@torch.no_grad()
def plain_polyak(target: list[Tensor], online: list[Tensor], tau: float) -> None:
    for slow, fast in zip(target, online, strict=True):
        slow.lerp_(fast, tau)


def plain_perceptron(
    observation: Tensor, action: Tensor, normed: bool, *parameters: Tensor
) -> Tensor:
    *hidden, (last_weight, last_bias) = layered(parameters, normed)
    x = torch.cat([observation, action], -1).expand(len(last_weight), -1, -1)
    for weight, bias, *norm in hidden:
        x = torch.baddbmm(bias, x, weight)
        if norm:
            x = torch.addcmul(norm[1], torch.nn.functional.layer_norm(x, x.shape[-1:]), norm[0])
        x = torch.relu(x)
    return torch.baddbmm(last_bias, x, last_weight)


def plain_lowest(values: Tensor, kept: int) -> Tensor:
    return values.transpose(0, 1).flatten(1).sort(-1).values[:, :kept]


# -- peers -------------------------------------------------------------------------------------


def require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Absent(f"{module} is not installed: pip install -r requirements-bench.txt")


def peer(module: str, setup: Setup) -> Any:
    """The SAC of Stable-Baselines3 or of SBX at its defaults, on one environment as is theirs."""
    require(module)
    if module == "sbx":  # XLA reads them when its client starts: as many threads as everyone has
        os.environ.update(PJRT_NPROC=str(setup.threads), JAX_PLATFORMS=setup.device)
    return importlib.import_module(module).SAC(
        "MlpPolicy",
        ENV,
        buffer_size=setup.capacity,
        learning_starts=setup.batch,
        batch_size=setup.batch,
        policy_kwargs={"net_arch": list(setup.hidden)},
        device=setup.device,
        seed=0,
    )


def sb3_update(setup: Setup) -> Turn:
    """`train(1)`, its own sampling included, on the same transitions."""
    model = peer("stable_baselines3", setup)
    from stable_baselines3.common.logger import Logger

    model.set_logger(Logger(folder=None, output_formats=[]))
    rows = transitions(4000)
    for i in range(len(rows["reward"])):
        model.replay_buffer.add(
            rows["observation"][[i]], rows["next_observation"][[i]], rows["action"][[i]],
            rows["reward"][[i]], rows["terminated"][[i]], [{}],
        )  # fmt: skip
    return timed(lambda: model.train(1, batch_size=setup.batch), setup)


def peer_learn(module: str) -> Callable[[Setup], Turn]:
    """`learn`, going on where the last turn ended; what starts and compiles is not measured."""

    def make(setup: Setup) -> Turn:
        model = peer(module, setup)
        model.learn(2 * setup.batch)

        def turn() -> dict[str, float]:
            before, start, cpu = model.num_timesteps, time.perf_counter(), time.process_time()
            model.learn(setup.trained, reset_num_timesteps=False)
            wall = time.perf_counter() - start
            return {
                "steps/s": (model.num_timesteps - before) / wall,
                "cores": (time.process_time() - cpu) / wall,
            }

        return turn

    return make


# -- whole runs --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A terminal that nobody sees, so that the live display is drawn as for a user."""

    def isatty(self) -> bool:
        return True


class Watched(Manager):
    """Notes the clock at the end of every round of the training loop."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.notes: list[tuple[float, float, float, float]] = []

    def learn(self) -> None:
        super().learn()
        working = self.collect_seconds + self.learn_seconds
        self.notes.append((self.step, time.perf_counter(), time.process_time(), working))


def run(config: Config, steps: int) -> dict[str, float]:
    """The last `steps` environment steps of a run: all that its loop does, logging included."""
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(Terminal()):
        manager = Watched(resolve(config.dump(), {"runs_dir": directory}))
        manager.train()
    if manager.interrupted:  # the manager took the signal for itself
        raise KeyboardInterrupt
    last = manager.notes[-1]
    first = next(note for note in manager.notes if note[0] >= last[0] - steps)
    passed, wall, cpu, working = (b - a for a, b in zip(first, last, strict=True))
    return {"steps/s": passed / wall, "cores": cpu / wall, "other": 1 - working / wall}


def running(steps: int, setup: Setup, *layers: dict[str, Any]) -> Turn:
    """A new run each turn, as a user starts it but for its length."""
    start = setup.batch + 8 * setup.environments
    length = {
        "num_envs": setup.environments,
        "total_steps": start + 4 * setup.environments + steps,
        "learning": {"learning_starts": start},
        "eval_every": 0,
        "final_episodes": 1,
        "video": False,
        "wandb": setup.wandb,
    }
    return partial(run, setup.config(length, *layers), steps)


def training(*layers: dict[str, Any]) -> Callable[[Setup], Turn]:
    return lambda setup: running(setup.trained, setup, *layers)


def collecting(setup: Setup) -> Turn:
    """The training loop with the policy in it, and no update."""
    return running(setup.collected, setup, {"learning": {"update_to_data": 1e-9}})


def bare(setup: Setup) -> Turn:
    """The environments alone, stepped one after the other with actions made before."""
    envs = [gym.make(ENV) for _ in range(setup.environments)]
    for i, env in enumerate(envs):
        env.reset(seed=i)
    rounds = setup.collected // setup.environments
    noise = np.random.default_rng(0).standard_normal((rounds, len(envs), ACTIONS))
    actions = np.tanh(noise).astype(np.float32)  # an untrained policy's

    def turn() -> dict[str, float]:
        start = time.perf_counter()
        for row in actions:
            for env, action in zip(envs, row, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        return {"steps/s": rounds * len(envs) / (time.perf_counter() - start)}

    return turn


def acting(san: bool) -> Callable[[Setup], Turn]:
    """One deterministic action at a time; microseconds of the median and of the slow ones."""

    def make(setup: Setup) -> Turn:
        call = act(san, torch.device(setup.device))

        def turn() -> dict[str, float]:
            times = np.empty(setup.calls)
            for i in range(setup.calls):
                start = time.perf_counter()
                call()
                times[i] = time.perf_counter() - start
            p50, p99 = np.percentile(times, [50, 99]) * 1e6
            return {"p50": float(p50), "p99": float(p99)}

        call()
        return turn

    return make


def memory(setup: Setup) -> Turn:
    """Peak resident megabytes of a run in a process of its own, and what they grew by after its
    buffer was full. Few updates are made: they take time, not memory."""
    resident_bytes()  # whether the system tells
    capacity = setup.capacity
    options = {
        "threads": setup.threads, "total-steps": capacity * 4 // 3,
        "replay.capacity": capacity, "learning.update-to-data": 0.01,
        "learning.learning-starts": min(5000, capacity), "log-every": capacity // 100,
        "checkpoint-every": capacity // 10, "eval-every": 0, "final-episodes": 1,
        "wandb": setup.wandb,
    }  # fmt: skip

    def turn() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as directory:
            words = [f"--{name}={value}" for name, value in options.items()]
            command = [sys.executable, "runner.py", "--no-video", f"--runs-dir={directory}", *words]
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet)
            whole = 0.0
            while process.poll() is None:
                whole = max(whole, peak_megabytes(process.pid))
                time.sleep(0.05)
            if process.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
            (path,) = Path(directory).rglob("metrics.jsonl")
            rows = [row for row in read_metrics(path) if "perf/memory_mb" in row]
        peaks = [row["perf/memory_mb"] for row in rows if row["step"] >= capacity * 1.1]
        return {"MB": whole, "growth": peaks[-1] - peaks[0]}

    return turn


# -- families ----------------------------------------------------------------------------------


def spiking(steps: int, log_std: str) -> dict[str, Any]:
    return {"san": True, "spiking": {"time_steps": steps, "log_std": log_std}}


def stack(name: str) -> dict[str, Any]:
    return load_yaml(Path(name))


PRESET = preset_for(ENV)
CAPTURED = {"learning": {"cuda_graph": True}}
BFLOAT16 = {"learning": {"precision": "bfloat16"}}
SILENT = {"wandb": "disabled", "log_every": 10**9}

FAMILIES: dict[str, dict[str, Callable[[Setup], Turn]]] = {
    "updates": {
        "sampling": sampling,
        "dense": update(),
        "dense products": products(),
        "SB3 train(1)": sb3_update,
        "dense bfloat16": update(BFLOAT16),
        "dense bfloat16 products": products(BFLOAT16),
        "dense quantiles": update({"critic": {"quantiles": 25}}),
        **{
            f"spiking T={steps} {log_std}": update(spiking(steps, log_std))
            for steps in (2, 5)
            for log_std in ("shared", "linear")
        },
        **{name: update(stack(name)) for name in STACKS},
        **{f"{name} products": products(stack(name)) for name in STACKS},
        "preset": update(PRESET),
        "preset, spiking": update(PRESET, {"san": True}),
        "preset, averaging": without("sansac.algorithm.polyak", plain_polyak, update(PRESET)),
        "preset, critics": without(
            "sansac.networks.StackedPerceptron.apply", plain_perceptron, update(PRESET)
        ),
        "preset, drop": without("sansac.kernels.lowest", plain_lowest, update(PRESET)),
        "preset, quantiles": without(
            "sansac.kernels.quantile_huber", lambda *_: None, update(PRESET)
        ),
        "preset, neurons": update(PRESET, {"san": True, "spiking": {"backend": "torch"}}),
        "dense captured": update(CAPTURED),
        "spiking captured": update(spiking(2, "shared"), CAPTURED),
        "dense launches": launches(),
        "spiking launches": launches(spiking(2, "shared")),
        "captured launches": launches(CAPTURED),
    },
    "training": {
        "dense run": training(),
        "dense run, one environment": training({"num_envs": 1}),
        "dense run, silent": training(SILENT),
        "SB3 learn": peer_learn("stable_baselines3"),
        "SBX learn": peer_learn("sbx"),
    },
    "collecting": {"collecting": collecting, "bare environments": bare},
    "acting": {
        "dense action": acting(False),
        "spiking action": acting(True),
        "dense action, torch": without(
            "sansac.evaluation.Policy._fused", lambda _: None, acting(False)
        ),
        "spiking action, torch": without(
            "sansac.evaluation.Policy._fused", lambda _: None, acting(True)
        ),
    },
    "memory": {"memory": memory},
}
