"""Combinations of the spiking actor's parts: each pair of choices trains somewhere."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from conftest import load_state, tiny

from sansac import kernels
from sansac.config import NEURON_NAMES, Config, Spiking
from sansac.manager import Manager
from sansac.spiking import FUSED

NORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "layer": {"layer_norm": True},
    "batch": {"batch_norm": True},
    "kalman": {"batch_norm": True, "batch_norm_momentum": "kalman", "reestimate_every": 20},
}
BACKENDS = ["auto", "torch", "spikingjelly"]
if kernels.backend_for("auto", torch.device("cpu")) == "native":
    BACKENDS.append("native")


def choices(field: str) -> list[str]:
    return list(get_args(Spiking.model_fields[field].annotation))


PARTS: dict[str, list[str]] = {
    "encoder": choices("encoder"),
    "neuron": list(NEURON_NAMES),
    "decoder": choices("decoder"),
    "norm": list(NORMS),
    "surrogate": choices("surrogate"),
    "backend": BACKENDS,
}
Stack = dict[str, str]


def allowed(stack: Stack) -> bool:
    """Compiled kernels have three of the neurons."""
    return stack.get("backend") != "native" or stack.get("neuron", "lif") in FUSED


def pairs(stack: Stack) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(stack.items(), 2)}


def all_stacks() -> list[Stack]:
    combinations = itertools.product(*PARTS.values())
    return [s for values in combinations if allowed(s := dict(zip(PARTS, values, strict=True)))]


def covering() -> list[Stack]:
    """A small set in which every allowed pair of choices occurs: greedily, the stack that brings
    the most new pairs, the first of them in order."""
    stacks = [(stack, pairs(stack)) for stack in all_stacks()]
    missing = set().union(*(found for _, found in stacks))
    chosen = []
    while missing:
        best, found = max(stacks, key=lambda entry: len(entry[1] & missing))
        chosen.append(best)
        missing -= found
    return chosen


COVERING = covering()


def name_of(stack: Stack) -> str:
    return "-".join(stack.values())


def config_of(stack: Stack, runs_dir: Path) -> Config:
    spiking = {name: stack[name] for name in stack if name != "norm"}
    return tiny(
        runs_dir,
        san=True,
        total_steps=140,
        learning={"batch_size": 32, "learning_starts": 40},
        actor={"hidden": [8, 8], **NORMS[stack["norm"]]},
        critic={"hidden": [8]},
        spiking=spiking,
        log_every=50,
        eval_every=0,
        final_episodes=1,
        checkpoint_every=1000,
    )


def train(stack: Stack, runs_dir: Path) -> None:
    """50 updates through the whole program; all that was learned is finite, and can be copied."""
    manager = Manager(config_of(stack, runs_dir))
    result = manager.train()
    assert manager.updates == 50
    assert math.isfinite(result["return_mean"])
    agent = load_state(manager.directory)["algorithm"]
    learned = [*agent["training_actor"].values(), *agent["critic"].values()]
    assert all(value.isfinite().all() for value in learned)
    assert all(torch.as_tensor(value).isfinite() for value in manager.metrics.values())
    copy.deepcopy(manager.algorithm)


def test_the_covering_set_covers_every_pair() -> None:
    wanted = set()
    for one, other in itertools.combinations(PARTS, 2):
        for pair in itertools.product(PARTS[one], PARTS[other]):
            if allowed(dict(zip((one, other), pair, strict=True))):
                wanted.add(frozenset(zip((one, other), pair, strict=True)))
    assert set().union(*map(pairs, COVERING)) == wanted
    assert 25 <= len(COVERING) <= 40


@pytest.mark.parametrize("stack", COVERING, ids=name_of)
def test_every_pair_of_parts_trains(stack: Stack, tmp_path: Path) -> None:
    train(stack, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", PARTS["encoder"])
@pytest.mark.parametrize("neuron", PARTS["neuron"])
@pytest.mark.parametrize("decoder", PARTS["decoder"])
def test_every_stack_trains(encoder: str, neuron: str, decoder: str, tmp_path: Path) -> None:
    fixed = {"encoder": encoder, "neuron": neuron, "decoder": decoder}
    for stack in all_stacks():
        if fixed.items() <= stack.items():
            train(stack, tmp_path / name_of(stack))
