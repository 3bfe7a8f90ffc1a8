"""What the end-to-end tests share: configurations small enough to train in a second, a toy
environment whose returns are known, and the comparison of two runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from hypothesis import settings

import runner
from sansac.config import Config, merge

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("untimed", deadline=None)  # an example may compile a kernel
settings.load_profile("untimed")

TINY: dict[str, Any] = {
    "env": "Pendulum-v1",
    "env_kwargs": {"max_episode_steps": 40},
    "total_steps": 160,
    "num_envs": 2,
    "threads": 1,
    "device": "cpu",
    "learning": {"batch_size": 16, "learning_starts": 40, "update_to_data": 0.5},
    "actor": {"hidden": [16, 16]},
    "critic": {"hidden": [16, 16]},
    "spiking": {"input_population": 3, "output_population": 3},
    "replay": {"capacity": 5000},
    "log_every": 20,
    "eval_every": 80,
    "eval_episodes": 2,
    "final_episodes": 2,
    "checkpoint_every": 80,
    "video": False,
    "wandb": "disabled",
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test that draws from torch's own stream draws the same alone and among others."""
    torch.manual_seed(0)


def tiny(runs_dir: Path | None = None, **changes: Any) -> Config:
    """A configuration that trains in about a second; `changes` as for `Config.for_env`."""
    where = {} if runs_dir is None else {"runs_dir": str(runs_dir)}
    return Config(**merge(TINY, where, changes))


def flags(config: Config) -> list[str]:
    """The options that make the command line read exactly this configuration."""
    return [word for name, value in leaves(config.dump()).items() for word in flag(name, value)]


# A final evaluation as run.json holds it.
FINAL: dict[str, Any] = {
    "return_mean": -5.0, "return_std": 1.5, "returns": [-6.5, -3.5], "step": 160, "seed": 0,
    "episodes": 2,
}  # fmt: skip

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs a command, a module's own COMMAND where it has one, in this process: exit code, stdout,
    stderr."""
    command = getattr(request.module, "COMMAND", ())

    def run(*words: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = runner.main([*command, *map(str, words)])
        except SystemExit as ending:
            assert isinstance(ending.code, int)
            code = ending.code
        return code, *capfd.readouterr()

    return run


def options(**changes: Any) -> list[str]:
    """Words of a training in about a second, but for what a sweep or its test chooses itself."""
    words, kept = flags(tiny(**changes)), []
    for word in words:
        if word.startswith("--"):
            kept.append([])
        kept[-1].append(word)
    ours = ("--name", "--runs-dir", "--seed", "--no-san", "--threads")
    mine = [option for option in kept if option[0] not in ours and option[1:] != ["None"]]
    return [word for option in mine for word in option]


def entries(out: Path) -> dict[str, dict[str, Any]]:
    return {run["id"]: run for run in json.loads((out / "queue.json").read_text())["runs"]}


def flag(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        section, _, last = option.rpartition(".")
        return [f"--{section}{'.' * bool(section)}{'' if value else 'no-'}{last}"]
    if isinstance(value, dict):
        return [f"--{option}", *(f"{key}={json.dumps(v)}" for key, v in value.items())]
    words = value if isinstance(value, list) else [value]
    return [f"--{option}", *map(str, words)]


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name and value of every field of a dumped configuration."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and key != "env_kwargs"
        found |= leaves(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return found


class Line(gym.Env):
    """Episodes of `length` steps; step k of the n-th episode pays 10 n + k, whatever is done.

    `nan_at` makes the observation after that many steps, counted over the environment's life, a
    NaN in its second entry; `nan_reward_at` does the same to the reward.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Box(np.float32([-1.0, 2.0]), np.float32([3.0, 6.0]))

    def __init__(
        self,
        length: int = 5,
        terminates: bool = True,
        nan_at: int = -1,
        nan_reward_at: int = -1,
        render_mode: str | None = None,
    ) -> None:
        self.length, self.terminates, self.render_mode = length, terminates, render_mode
        self.nan_at, self.nan_reward_at = nan_at, nan_reward_at
        self.life = self.episode = self.k = 0
        self.actions: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        self.k = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> Any:
        self.actions.append(np.asarray(action))
        self.life += 1
        self.k += 1
        reward = np.nan if self.life == self.nan_reward_at else 10.0 * self.episode + self.k
        over = self.k >= self.length
        return self._observe(), reward, over and self.terminates, over and not self.terminates, {}

    def render(self) -> Any:
        return np.full((32, 48, 3), 40 * (self.k % 6), np.uint8)

    def _observe(self) -> np.ndarray:
        spoiled = np.nan if self.life == self.nan_at else self.episode
        return np.array([self.k / self.length, spoiled], np.float32)


def load_state(run_dir: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints" / f"{name}.pt", weights_only=True)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested states differ, to the bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [line for key in a for line in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: length {len(a)} and {len(b)}"]
        pairs = enumerate(zip(a, b, strict=True))
        return [line for i, (x, y) in pairs for line in differences(x, y, f"{path}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [path]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} and {b!r}"]


def comparable(run_dir: Path) -> dict[str, Any]:
    """All that a run leaves which a resume must reproduce: its state, but for its seconds and its
    own configuration; its metrics, but for `time` and `perf/`; its best agent."""
    state = load_state(run_dir)
    del state["config"]
    for name in ("collect_seconds", "learn_seconds", "saved_step"):
        del state["counters"][name]
    best = load_state(run_dir, "best")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {tag: v for tag, v in row.items() if tag != "time" and not tag.startswith("perf/")}
        for row in rows
    ]
    return {"state": state, "best": best["algorithm"], "rows": kept}


# runner.py for `python -c`, where this process may have been told to ignore interrupts.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import runner
sys.exit(runner.main(sys.argv[1:]))
"""


def start(
    *words: str | Path, new_group: bool = False, env: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> subprocess.Popen[str]:  # fmt: skip
    """A Python process of its own, if wanted in a process group of its own, with sansac on its
    path; `env` adds to the environment, `options` are Popen's."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # wandb leaves the address of its service here, once it ran: a process starts one of its own.
    ours = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={**ours, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        text=True,
        start_new_session=new_group,
        **{"cwd": ROOT, **pipes, **options},
    )


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            pytest.fail("ended early: " + process.communicate()[1])
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


# -- wandb -----------------------------------------------------------------------------------------

KEY = "c0ffee" * 6 + "beef"  # as long as an API key is


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test starts as on a machine without wandb login, environment or home."""
    for name in os.environ:
        if name.startswith("WANDB_") and name not in ("WANDB_SERVICE", "WANDB_ERROR_REPORTING"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def wandb_records(directory: Path) -> list[dict[str, Any]]:
    """Records of the one offline run in a directory, as wandb's own reader tells them."""
    (file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", str(file), "--json"]
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def wandb_rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]


class FakeWandb(ModuleType):
    """wandb as seen by a logged-in user, with a server that remembers its runs."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.Settings = dict
        self.server: dict[str, list[dict[str, Any]]] = {}
        self.artifacts: list[Any] = []
        self.init_calls: list[dict[str, Any]] = []

    def init(self, **options: Any) -> Any:
        self.init_calls.append(options)
        name = options["id"]
        resumed = name in self.server
        rows = self.server.setdefault(name, [])
        return SimpleNamespace(
            id=name,
            resumed=resumed,
            summary={"step": rows[-1]["step"]} if rows else {},
            log=rows.append,
            log_artifact=self.artifacts.append,
            define_metric=lambda *args, **kwargs: None,
            finish=lambda: None,
            url=f"https://wandb.example.org/{name}",
        )

    def Artifact(self, name: str, type: str) -> Any:
        files: list[str] = []
        return SimpleNamespace(
            name=name, type=type, files=files, add_file=files.append, add_dir=files.append
        )


@pytest.fixture
def fake_wandb(no_account: None, monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    return fake
