"""What a training run calls on its way: `Manager(config, callbacks=[...])`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sansac.config import Config

if TYPE_CHECKING:
    from sansac.manager import Manager


class Callback:
    """Override what is needed; everything does nothing by itself. Runs resume to the bit as long as
    what a callback remembers is in its state and it leaves the manager's streams alone."""

    def start(self, manager: Manager) -> None:
        """Training begins, or goes on."""

    def step(self, manager: Manager) -> None:
        """Every environment was stepped once, and the updates due for it were made."""

    def episode(self, manager: Manager, episode_return: float, length: int) -> None:
        """A training episode has ended."""

    def evaluation(self, manager: Manager, result: dict[str, Any]) -> None:
        """The policy was evaluated on the way; `result` as `Manager.evaluate` returns it."""

    def checkpoint(self, manager: Manager, path: Path) -> None:
        """A checkpoint was written, or given to the thread that writes it."""

    def done(self, manager: Manager) -> bool:
        """Whether training is to end here. It goes on to the final evaluation. Asked before `start`
        too: a run that is resumed may have ended."""
        return False

    def stop(self, manager: Manager, result: dict[str, Any]) -> None:
        """Training has ended; the final evaluation, {} where a signal ended it."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, numbers, strings, lists and mappings."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""


class StopAtReturn(Callback):
    """Ends training once an evaluation's mean return reaches a threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def done(self, manager: Manager) -> bool:
        return manager.last_return >= self.threshold


class Patience(Callback):
    """Ends training after this many evaluations without a new best mean return."""

    def __init__(self, evaluations: int) -> None:
        self.evaluations = evaluations
        self.best: float | None = None
        self.without = 0

    def evaluation(self, manager: Manager, result: dict[str, Any]) -> None:
        if manager.updates == 0:  # nothing was learned yet
            return
        better = self.best is None or result["return_mean"] > self.best
        self.best = result["return_mean"] if better else self.best
        self.without = 0 if better else self.without + 1

    def done(self, manager: Manager) -> bool:
        return self.without >= self.evaluations

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "without": self.without}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.without = state["best"], state["without"]


class KeepBest(Callback):
    """Keeps the policies of the `count` best evaluations as checkpoints/best-<step>.pt."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.kept: list[tuple[float, int]] = []  # mean return and step

    def evaluation(self, manager: Manager, result: dict[str, Any]) -> None:
        if manager.updates == 0:
            return
        self.kept = sorted([*self.kept, (result["return_mean"], manager.step)], reverse=True)
        for _, step in self.kept[self.count :]:
            self._path(manager, step).unlink(missing_ok=True)
        self.kept = self.kept[: self.count]
        if manager.step in (step for _, step in self.kept):
            manager.save_policy(self._path(manager, manager.step))

    def _path(self, manager: Manager, step: int) -> Path:
        return manager.directory / "checkpoints" / f"best-{step}.pt"

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(pair) for pair in self.kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = [(score, step) for score, step in state["kept"]]


class KeepEvery(Callback):
    """Keeps the policy every `steps` environment steps as checkpoints/step-<step>.pt."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.last = 0

    def step(self, manager: Manager) -> None:
        if manager.step // self.steps > self.last // self.steps:
            self.last = manager.step
            manager.save_policy(manager.directory / "checkpoints" / f"step-{manager.step}.pt")

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]


def configured(config: Config, stop_at: float | None) -> list[Callback]:
    """Those that the configuration asks for."""
    callbacks: list[Callback] = []
    if stop_at is not None:
        callbacks.append(StopAtReturn(stop_at))
    if config.patience is not None:
        callbacks.append(Patience(config.patience))
    if config.keep_best > 1:
        callbacks.append(KeepBest(config.keep_best))
    if config.keep_every:
        callbacks.append(KeepEvery(config.keep_every))
    return callbacks
