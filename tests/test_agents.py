"""The agents that ship: small, and as good as their cards say."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from conftest import ROOT

from sansac.manager import Manager

AGENTS = sorted(path for path in (ROOT / "agents").iterdir() if path.is_dir())


def test_a_spiking_and_a_dense_agent_ship() -> None:
    assert {"bipedalwalker-dense", "bipedalwalker-spiking"} <= {path.name for path in AGENTS}


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.name)
def test_an_agent_walks_as_its_card_says(path: Path) -> None:
    assert sum(file.stat().st_size for file in path.rglob("*")) < 2e6
    told = json.loads((path / "evaluation.json").read_text())
    card = (path / "README.md").read_text()
    assert f"{told['return_mean']:.1f} ± {told['return_std']:.1f}" in card
    assert len(told["returns"]) == told["episodes"] == 100

    manager = Manager.load(path)
    assert (manager.config.san, manager.step) == ("spiking" in path.name, told["step"])
    # Another processor sums in another order and episodes part ways: medians do not.
    found = statistics.median(manager.evaluate(5)["returns"])
    assert found == pytest.approx(statistics.median(told["returns"]), abs=15)
