"""Stable-Baselines3's SAC with RL Zoo's settings, scored as our agents are: a budget's reference.

    python -m benchmarks.reference ENV --total-steps N [--seeds 0 1 2 3 4] [--out FILE]

A seed's score is the mean return of 100 deterministic episodes of the final policy, those of
`evaluate --seed 0`. Seeds that FILE holds already are not run again, so several calls may share the
work, each with a file of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import stable_baselines3
import torch
from rich.console import Console
from rich.table import Table
from stable_baselines3 import SAC

from benchmarks.contenders import Setup
from benchmarks.train import machine
from sansac.checkpoint import write_atomically
from sansac.config import Config
from sansac.environments import EVALUATION, Episodic, episode_seed
from sansac.statistics import iqm

WIDE = [400, 300]
# Of hyperparams/sac.yml of RL Zoo (github.com/DLR-RM/rl-baselines3-zoo); "lin" falls to 0.
SETTINGS: dict[str, dict[str, Any]] = {
    "Pendulum-v1": {"learning_rate": 1e-3},
    "LunarLander-v3": {
        "learning_rate": "lin_7.3e-4", "tau": 0.01, "learning_starts": 10_000,
        "policy_kwargs": {"net_arch": WIDE},
    },
    "BipedalWalker-v3": {
        "learning_rate": 7.3e-4, "buffer_size": 300_000, "gamma": 0.98, "tau": 0.02,
        "train_freq": 64, "gradient_steps": 64, "learning_starts": 10_000, "use_sde": True,
        "policy_kwargs": {"log_std_init": -3, "net_arch": WIDE},
    },
}  # fmt: skip


def settings(env: str, total_steps: int) -> dict[str, Any]:
    found = dict(SETTINGS[env])
    rate = found["learning_rate"]
    if isinstance(rate, str):
        start = float(rate.removeprefix("lin_"))
        found["learning_rate"] = lambda left: left * start  # SB3 gives the share that is left
    return found | {"buffer_size": min(found.get("buffer_size", 1_000_000), total_steps)}


def score(model: SAC, make_env: Any, episodes: int) -> list[float]:
    """Returns of the deterministic policy in the episodes of `evaluate --seed 0`."""
    env, returns = Episodic(make_env()), []
    for i in range(episodes):
        observation, _ = env.reset(seed=episode_seed(EVALUATION, 0, i))
        total, over = 0.0, False
        while not over:
            action, _ = model.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


def run(env: str, seed: int, total_steps: int, episodes: int) -> dict[str, Any]:
    kwargs = Config.for_env(env).env_kwargs

    def make_env() -> gym.Env:
        return gym.make(env, **kwargs)

    model = SAC("MlpPolicy", make_env(), seed=seed, device="cpu", **settings(env, total_steps))
    started = time.perf_counter()
    model.learn(total_steps)
    minutes = (time.perf_counter() - started) / 60
    returns = score(model, make_env, episodes)
    parameters = sum(p.numel() for p in model.actor.parameters())
    return {"seed": seed, "minutes": minutes, "parameters": parameters, "returns": returns}


def show(report: dict[str, Any]) -> None:
    about = f"{report['env']}, {report['total_steps']:,} steps, {report['peer']}"
    table = Table("seed", "return, mean ± std", "lowest", "minutes", title=about)
    for found in report["runs"]:
        returns = np.array(found["returns"])
        cells = f"{returns.mean():.1f} ± {returns.std():.1f}", f"{returns.min():.1f}"
        table.add_row(str(found["seed"]), *cells, f"{found['minutes']:.1f}")
    console = Console()
    console.print(table)
    scores = np.array([np.mean(found["returns"]) for found in report["runs"]])
    console.print(f"IQM over seeds: {iqm(scores):.1f}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reference", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("env", choices=SETTINGS)
    parser.add_argument("--total-steps", type=int, required=True, metavar="N")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--episodes", type=int, default=100, help="that score a seed (100)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all returns as JSON")
    asked = parser.parse_args(arguments)
    if min(asked.total_steps, asked.episodes, asked.threads) < 1:
        parser.error("--total-steps, --episodes and --threads must be at least 1")
    torch.set_num_threads(asked.threads)
    report: dict[str, Any] = {
        "env": asked.env,
        "total_steps": asked.total_steps,
        "peer": f"Stable-Baselines3 {stable_baselines3.__version__} SAC, RL Zoo's settings",
        "machine": machine(Setup(threads=asked.threads)),
        "runs": [],
    }
    if asked.out and asked.out.is_file():
        before = json.loads(asked.out.read_text())
        if any(before.get(key) != report[key] for key in ("env", "total_steps", "peer")):
            parser.error(f"{asked.out} holds {before.get('env')} at {before.get('total_steps')} "
                         "steps: choose another file")  # fmt: skip
        report["runs"] = before["runs"]
    for seed in sorted(set(asked.seeds) - {found["seed"] for found in report["runs"]}):
        report["runs"].append(run(asked.env, seed, asked.total_steps, asked.episodes))
        if asked.out:
            text = json.dumps(report, indent=1) + "\n"
            write_atomically(asked.out, lambda file, text=text: file.write(text.encode()))
    show(report)


if __name__ == "__main__":
    main()
