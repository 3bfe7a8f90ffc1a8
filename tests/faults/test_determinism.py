"""Same seed, machine and thread count: bit-equal weights, whatever else the run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import differences, load_state, tiny

from sansac.manager import Manager

VARIANTS: dict[str, dict[str, Any]] = {
    "again": {},
    "async": {"async_envs": True},
    "quiet": {"log_every": 10**9},
    "logged": {"log_every": 8, "tensorboard": True, "wandb": "offline"},
    "unevaluated": {"eval_every": 0},
    "evaluated": {"eval_every": 200, "eval_episodes": 3, "final_episodes": 5},
    "saved": {"checkpoint_every": 40},
    "filmed": {"video": True},
}


def weights(runs: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Networks, optimisers, streams, buffer and episodes at the end of a run."""
    manager = Manager(tiny(runs, name=name, **changes))
    manager.train()
    state = load_state(manager.directory)
    return {part: state[part] for part in ("algorithm", "replay", "rollout")}


@pytest.mark.parametrize(
    ("steps", "variants"),
    [
        (240, ["quiet", "evaluated", "saved"]),
        pytest.param(5000, list(VARIANTS), marks=pytest.mark.slow),
    ],
    ids=["few steps", "5,000 steps"],
)
@pytest.mark.parametrize("san", [False, True], ids=["dense", "spiking"])
def test_weights_are_bit_equal(
    san: bool, steps: int, variants: list[str], no_account: None, tmp_path: Path
) -> None:
    base = {"san": san, "total_steps": steps, "eval_every": 1000, "seed": 5}
    expected = weights(tmp_path, "alone", **base)
    assert expected["algorithm"]["optimizers"]["actor"]["state"]
    for name in variants:
        found = weights(tmp_path, name, **base | VARIANTS[name])
        assert differences(found, expected) == [], name
    assert differences(weights(tmp_path, "other", **base | {"seed": 6}), expected) != []
