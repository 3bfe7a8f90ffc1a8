"""What a run calls on its way, early stopping, kept checkpoints, saving in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Line, comparable, differences, load_state, tiny

from sansac import checkpoint
from sansac.callbacks import Callback, Patience
from sansac.manager import Manager


class Diary(Callback):
    """Everything that was called, with what was given."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def start(self, manager: Manager) -> None:
        self.lines.append(("start", manager.step))

    def step(self, manager: Manager) -> None:
        self.lines.append(("step", manager.step, manager.updates))

    def episode(self, manager: Manager, episode_return: float, length: int) -> None:
        self.lines.append(("episode", manager.step, episode_return, length))

    def evaluation(self, manager: Manager, result: dict[str, Any]) -> None:
        self.lines.append(("evaluation", manager.step, len(result["returns"])))

    def checkpoint(self, manager: Manager, path: Path) -> None:
        self.lines.append(("checkpoint", manager.step, path.is_file()))

    def stop(self, manager: Manager, result: dict[str, Any]) -> None:
        self.lines.append(("stop", manager.step, len(result.get("returns", ()))))

    def state_dict(self) -> dict[str, Any]:
        return {"count": len(self.lines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lines = [("loaded", state["count"])]


def test_a_callback_is_told_of_everything(tmp_path: Path) -> None:
    diary = Diary()
    Manager(tiny(tmp_path, seed=1), callbacks=[diary]).train()
    lines = diary.lines
    assert lines[0] == ("start", 0) and lines[-1] == ("stop", 160, 2)
    assert [line[1:] for line in lines if line[0] == "step"] == [
        (step, max(0, (step - 40) // 2)) for step in range(2, 161, 2)
    ]
    assert [line[1] for line in lines if line[0] == "episode"] == [80, 80, 160, 160]
    assert {line[3] for line in lines if line[0] == "episode"} == {40}
    assert [line[1:] for line in lines if line[0] == "evaluation"] == [(80, 2)]
    saved = [line[1:] for line in lines if line[0] == "checkpoint"]
    assert (80, True) in saved and saved[-1] == (160, True)


def test_a_callback_can_end_the_run(tmp_path: Path) -> None:
    class Enough(Callback):
        def done(self, manager: Manager) -> bool:
            return manager.step >= 60

    manager = Manager(tiny(tmp_path), callbacks=[Enough()])
    assert manager.train()["episodes"] == 2, "the final evaluation is made"
    assert manager.step == 60 and manager.finished


def test_what_a_callback_remembers_survives_a_resume(tmp_path: Path) -> None:
    manager = Manager(tiny(tmp_path, total_steps=80), callbacks=[Diary()])
    manager.train()
    diary = Diary()
    resumed = Manager.resume(manager.directory, callbacks=[diary], total_steps=100)
    assert diary.lines[0][0] == "loaded" and diary.lines[0][1] > 40
    resumed.train()
    assert ("start", 80) in diary.lines


def test_a_callback_may_remember_numpys_numbers(tmp_path: Path) -> None:
    class Mean(Callback):
        seen: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"mean": np.mean([1.0, 2.0]), "all": [np.int64(3)], "pair": (1, np.True_)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state

    manager = Manager(tiny(tmp_path, total_steps=80), callbacks=[Mean()])
    manager.train()
    again = Mean()
    Manager.resume(manager.directory, callbacks=[again], total_steps=100)
    assert again.seen == {"mean": 1.5, "all": [3], "pair": (1, True)}


def test_a_run_resumes_without_the_callbacks_it_had(tmp_path: Path) -> None:
    manager = Manager(tiny(tmp_path, total_steps=80), callbacks=[Diary()])
    manager.train()
    assert Manager.resume(manager.directory, total_steps=100).train()


# -- early stopping --------------------------------------------------------------------------------


def scored(scores: list[float], patience: int) -> int:
    """Evaluations until it stops, 0 where it never does."""
    stopping = Patience(patience)
    manager = Manager(tiny())
    manager.updates = 1
    for i, score in enumerate(scores):
        stopping.evaluation(manager, {"return_mean": score})
        if stopping.done(manager):
            return i + 1
    return 0


@pytest.mark.parametrize(
    ("scores", "patience", "expected"),
    [
        ([1, 2, 3, 4], 1, 0),
        ([1, 1], 1, 2),
        ([5, 4, 3, 6, 5, 5, 5], 3, 7),
        ([5, 4, 6, 4, 7], 2, 0),
    ],
)
def test_patience_counts_evaluations_without_a_new_best(
    scores: list[float], patience: int, expected: int
) -> None:
    assert scored(scores, patience) == expected


def test_patience_ends_a_run_whose_returns_do_not_rise(tmp_path: Path) -> None:
    """Every evaluation of this environment returns the same; the first is before learning."""
    config = tiny(tmp_path, env="Line", env_kwargs={}, total_steps=2000, eval_every=40, patience=2)
    manager = Manager(config, make_env=FreshLine)
    assert manager.train()
    evaluations = [40, 80, 120, 160]  # nothing is learned at 40; best at 80; twice without
    assert manager.step == evaluations[-1]
    again = Manager.resume(manager.directory, make_env=FreshLine)
    assert again.finished
    longer = Manager.resume(manager.directory, make_env=FreshLine, patience=4)
    assert not longer.finished
    longer.train()
    assert longer.step == 240


class FreshLine(Line):
    """Every episode pays the same."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode = 0
        return super().reset(seed=seed, options=options)


# -- kept checkpoints ------------------------------------------------------------------------------


def test_the_best_policies_are_kept_and_no_others(tmp_path: Path) -> None:
    manager = Manager(tiny(tmp_path, keep_best=2, eval_every=20, total_steps=200))
    scores: dict[int, float] = {}

    class Scores(Callback):
        def evaluation(self, manager: Manager, result: dict[str, Any]) -> None:
            if manager.updates:
                scores[manager.step] = result["return_mean"]

    manager.callbacks.append(Scores())
    manager.train()
    best = sorted(scores, key=lambda step: scores[step])[-2:]
    kept = {path.name for path in (manager.directory / "checkpoints").glob("best-*.pt")}
    assert kept == {f"best-{step}.pt" for step in best}
    for step in best:
        path = str(manager.directory / "checkpoints" / f"best-{step}.pt")
        assert Manager.load(manager.directory, path).step == step


def test_policies_are_kept_every_so_many_steps(tmp_path: Path) -> None:
    manager = Manager(tiny(tmp_path, keep_every=50))
    manager.train()
    kept = {path.name for path in (manager.directory / "checkpoints").glob("step-*.pt")}
    assert kept == {"step-50.pt", "step-100.pt", "step-150.pt"}
    state = load_state(manager.directory, "step-100")
    assert "replay" not in state and state["counters"]["updates"] == 30


# -- saving in the background ----------------------------------------------------------------------


def test_a_checkpoint_of_the_background_is_the_one_of_its_step(tmp_path: Path) -> None:
    """Training that goes on meanwhile does not reach into it."""
    plain = Manager(tiny(tmp_path / "a"))
    plain.train()
    behind = Manager(tiny(tmp_path / "b", save_in_background=True))
    behind.train()
    assert not differences(comparable(plain.directory), comparable(behind.directory))
    left, right = (load_state(m.directory, "previous") for m in (plain, behind))
    for state in (left, right):
        del state["config"], state["counters"]
    assert not differences(left, right)


def test_training_does_not_wait_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file appears after the call; a second save waits for it; an error is not lost."""
    import threading

    gate, saver = threading.Event(), checkpoint.Saver()
    write = checkpoint.save

    def slow(*arguments: Any) -> None:
        assert gate.wait(20)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "save", slow)
    saver.save(tmp_path / "c" / "a.pt", {"x": torch.ones(2)})
    assert not (tmp_path / "c" / "a.pt").exists()
    gate.set()
    saver.wait()
    assert checkpoint.load(tmp_path / "c" / "a.pt")["x"].sum() == 2

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save", full)
    saver.save(tmp_path / "c" / "b.pt", {})
    with pytest.raises(OSError, match="no space left"):
        saver.wait()


def test_one_file_that_cannot_be_written_in_the_background_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.save

    def full(path: Path, *rest: Any) -> None:
        if path.name == lost:
            raise checkpoint.CheckpointError(f"{path} cannot be written")
        write(path, *rest)

    lost = "best.pt"
    monkeypatch.setattr(checkpoint, "save", full)
    manager = Manager(tiny(tmp_path, save_in_background=True, eval_every=0))
    assert manager.train()  # its final policy is its best
    assert Manager.load(manager.directory).step == 160
    assert not (manager.directory / "checkpoints" / "best.pt").exists()
    lost = "last.pt"
    with pytest.raises(checkpoint.CheckpointError, match="cannot be written"):
        Manager(tiny(tmp_path, save_in_background=True)).train()  # the last one is not lost quietly
