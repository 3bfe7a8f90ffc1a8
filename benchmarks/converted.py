"""A dense agent turned into spikes without training, by SpikingJelly's ann2snn, beside itself.

    python -m benchmarks.converted RUN [--time-steps 2 4 8] [--episodes 100] [--out FILE]

ReLUs become integrate-and-fire neurons with soft reset, scaled by the activations of the agent's
own episodes: by the largest, or by the 99.9th percentile. The read-out is the mean over time, then
the tanh. A trained spiking actor is worth its training where this falls short at its T.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.ann2snn import Converter
from spikingjelly.activation_based.ann2snn.recipes import RateCodingRecipe
from torch import Tensor, nn

from sansac.checkpoint import CheckpointError, write_atomically
from sansac.config import ConfigError
from sansac.environments import EVALUATION, MAX_EPISODE_STEPS, Episodic, episode_seed
from sansac.evaluation import run_episode
from sansac.manager import Manager
from sansac.networks import DenseActor, fold_batch_norm

CALIBRATION = 1  # seed of the episodes that scale the neurons; `evaluate` reports those of seed 0
MODES = ("Max", "99.9%")

Network = Callable[[Tensor], Tensor]  # normalised observations [B, obs] -> mean [B, act]


def perceptron(manager: Manager) -> nn.Sequential:
    """The dense actor up to its mean, BatchNorm folded in."""
    actor = manager.algorithm.policy_actor
    if not isinstance(actor, DenseActor) or actor.levels:
        raise ConfigError("expected a run of the dense actor with ReLU")
    folded = fold_batch_norm(actor)
    hidden = chain.from_iterable((layer, nn.ReLU()) for layer in folded.layers)
    return nn.Sequential(*hidden, folded.mean)


def convert(network: nn.Sequential, observations: Tensor, mode: str) -> nn.Module:
    """Its spiking counterpart, [B, obs] -> [B, act] a simulation step."""
    return Converter(RateCodingRecipe([observations], mode=mode)).convert(network).eval()


def over_time(spiking: nn.Module, steps: int) -> Network:
    def mean(observation: Tensor) -> Tensor:
        functional.reset_net(spiking)
        return torch.stack([spiking(observation) for _ in range(steps)]).mean(0)

    return mean


@torch.no_grad()
def returns(manager: Manager, network: Network, episodes: int, seed: int = 0) -> np.ndarray:
    """Of the episodes that `evaluate --seed SEED` runs, [episodes]. All are side by side: 64
    simulation steps an action, one episode after the other, would take hours."""
    envs = [Episodic(manager.evaluation_env()) for _ in range(episodes)]
    seeds = [episode_seed(EVALUATION, seed, i) for i in range(episodes)]
    observation = np.stack([env.reset(seed=s)[0] for env, s in zip(envs, seeds, strict=True)])
    total, running = np.zeros(episodes), np.arange(episodes)
    for _ in range(MAX_EPISODE_STEPS):
        if not len(running):
            break
        batch = torch.from_numpy(observation[running].astype(np.float32))
        mean = network(manager.algorithm.normalize(batch))
        actions = manager.policy.scale(torch.tanh(mean).numpy())
        ended = np.zeros(len(running), bool)
        for k, (i, action) in enumerate(zip(running, actions, strict=True)):
            observation[i], reward, terminated, truncated, _ = envs[i].step(action)
            total[i] += reward
            ended[k] = terminated or truncated
        running = running[~ended]
    for env in envs:
        env.close()
    return total


def measure(manager: Manager, time_steps: list[int], episodes: int) -> list[dict[str, Any]]:
    network = perceptron(manager)
    env = Episodic(manager.evaluation_env())
    seeds = [episode_seed(EVALUATION, CALIBRATION, i) for i in range(10)]
    seen = [run_episode(manager.policy, env, seed)[1] for seed in seeds]
    observations = manager.algorithm.normalize(torch.from_numpy(np.concatenate(seen)))
    rows: list[tuple[str, int | None, Network]] = [("dense", None, network)]
    for mode in MODES:
        spiking = convert(network, observations, mode)
        rows += [(f"converted, {mode}", steps, over_time(spiking, steps)) for steps in time_steps]
    return [
        {"actor": name, "time_steps": steps, "returns": returns(manager, act, episodes).tolist()}
        for name, steps, act in track(rows, "evaluating", console=Console(stderr=True))
    ]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("actor", "T", "return, mean ± std", "lowest")
    for row in rows:
        found = np.array(row["returns"])
        steps = "" if row["time_steps"] is None else str(row["time_steps"])
        table.add_row(row["actor"], steps, f"{found.mean():.1f} ± {found.std():.1f}",
                      f"{found.min():.1f}")  # fmt: skip
    Console().print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.converted", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run or agent of the dense actor")
    parser.add_argument("--time-steps", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all returns as JSON")
    asked = parser.parse_args(arguments)
    if min(*asked.time_steps, asked.episodes) < 1:
        parser.error("--time-steps and --episodes must be at least 1")
    if asked.out and not asked.out.parent.is_dir():
        parser.error(f"{asked.out}: there is no directory {asked.out.parent}")
    try:
        rows = measure(Manager.load(asked.run), asked.time_steps, asked.episodes)
    except (ConfigError, CheckpointError) as error:
        parser.error(f"{asked.run}: {error}")
    show(rows)
    if asked.out:
        text = json.dumps({"run": str(asked.run), "rows": rows}, indent=1) + "\n"
        write_atomically(asked.out, lambda file: file.write(text.encode()))


if __name__ == "__main__":
    main()
