"""Gymnasium environments as sansac steps them: checked, seeded an episode, side by side."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from sansac.config import Config, ConfigError
from sansac.hindsight import Goals

MakeEnv = Callable[[], gym.Env]

TRAINING, EVALUATION = 0, 1
MAX_EPISODE_STEPS = 100_000  # for environments without a time limit of their own
HANG_SECONDS = 300.0  # that a process of an environment may take over a step, a reset or a replay
TRUST = "SANSAC_TRUST_ENV"  # set to 1 by --trust-env; processes that are started inherit it


class NonFiniteError(FloatingPointError):
    """An environment gave, or an update produced, a NaN or an infinity."""


class EnvironmentFault(RuntimeError):
    """An environment raised, hangs, has died or returned what its spaces do not allow: which one,
    where in which of its episodes, and what."""


def episode_seed(purpose: int, seed: int, *index: int) -> int:
    """A 31-bit seed that is a function of (purpose, seed, index).

    The last bit is the purpose, so no evaluation episode ever runs on a training episode's seed.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, *index))
    return int(sequence.generate_state(1)[0] >> 2) * 2 + purpose


def env_factory(config: Config, render_mode: str | None = None) -> MakeEnv:
    """A factory of the configured environment. Raises ConfigError where it cannot be made."""
    if ":" in config.env and os.environ.get(TRUST) != "1":
        raise ConfigError(
            f"env: {config.env!r} would import the module before the colon: give --trust-env if "
            "you trust its code, or pass `Manager(config, make_env=...)` from your own script"
        )
    return partial(flat_goals, partial(_make, config.env, config.env_kwargs, render_mode))


def _make(env: str, kwargs: dict[str, Any], render_mode: str | None) -> gym.Env:
    try:
        return gym.make(env, render_mode=render_mode, disable_env_checker=True, **kwargs)
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"env: {env!r} needs a package that is not installed ({error}); the MuJoCo tasks come "
            "with `pip install -e .[mujoco]`"
        ) from None
    except ImportError as error:
        raise ConfigError(f"env: cannot import the module of {env!r}: {error}") from None
    except (gym.error.Error, TypeError, ValueError) as error:
        given = f" with env_kwargs {kwargs}" if kwargs else ""
        raise ConfigError(f"env: cannot make {env!r}{given}: {error}") from None


GOAL_KEYS = {"observation", "achieved_goal", "desired_goal"}


def flat_goals(make_env: MakeEnv) -> gym.Env:
    """A new environment, a goal-conditioned one with its dict of observations as one vector."""
    env = make_env()
    space = env.observation_space
    if isinstance(space, gym.spaces.Dict) and set(space.spaces) == GOAL_KEYS:
        return gym.wrappers.FlattenObservation(env)
    return env


def goals_of(env: gym.Env) -> Goals | None:
    """Where goals lie in the observations of a `flat_goals` environment, and what they pay; None
    where it is not goal-conditioned."""
    inner: Any = env.unwrapped
    space = inner.observation_space
    if not (isinstance(space, gym.spaces.Dict) and set(space.spaces) == GOAL_KEYS):
        return None
    if not hasattr(inner, "compute_reward"):
        return None
    ends = np.cumsum([gym.spaces.flatdim(part) for part in space.spaces.values()])
    starts = [0, *ends[:-1]]
    where = {
        key: slice(int(start), int(end))
        for key, start, end in zip(space.spaces, starts, ends, strict=True)
    }
    return Goals(
        where["achieved_goal"],
        where["desired_goal"],
        inner.compute_reward,
        getattr(inner, "compute_terminated", None),
    )


def check_spaces(env: gym.Env, name: str) -> None:
    """Raises ConfigError unless observations are a flat Box and actions a finite, flat Box."""
    supported = "sansac supports a flat Box observation, shape (n,), and a flat Box action, shape "
    supported += "(m,), with finite bounds and low < high"
    observation, action = env.observation_space, env.action_space
    if not isinstance(observation, Box) or len(observation.shape) != 1 or not observation.shape[0]:
        raise ConfigError(
            f"env: {name!r} has the observation space {observation}; {supported} "
            "(gymnasium.wrappers.FlattenObservation makes one of most spaces)"
        )
    if not isinstance(action, Box) or len(action.shape) != 1 or not action.shape[0]:
        hint = " (try --env-kwargs continuous=True)" if name.startswith("LunarLander") else ""
        raise ConfigError(f"env: {name!r} has the action space {action}; {supported}{hint}")
    if not np.issubdtype(action.dtype, np.floating):
        raise ConfigError(f"env: {name!r} has integer actions {action}; {supported}")
    if not (np.isfinite(action.low).all() and np.isfinite(action.high).all()):
        raise ConfigError(
            f"env: {name!r} has infinite action bounds {action}; {supported} "
            "(gymnasium.wrappers.RescaleAction or ClipAction sets them)"
        )
    if not (action.low < action.high).all():
        raise ConfigError(f"env: {name!r} has an empty range in its action space; {supported}")


def has_display() -> bool:
    """Whether a window could open here."""
    if sys.platform == "darwin":
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))


def window_unseen() -> bool:
    """Whether pygame, which most environments draw with, fell back to a window in memory: it does
    where the display does not answer."""
    pygame: Any = sys.modules.get("pygame")
    if pygame is None or not pygame.display.get_init() or os.environ.get("SDL_VIDEODRIVER"):
        return False
    return pygame.display.get_driver() in ("offscreen", "dummy")


def window_closed() -> bool:
    """Whether the window that pygame has opened was closed."""
    pygame: Any = sys.modules.get("pygame")
    return bool(pygame and pygame.display.get_init() and pygame.event.peek(pygame.QUIT))


class ActionScale:
    """Maps the tanh's action in [-1, 1] to each dimension's own [low, high]."""

    def __init__(self, space: Box) -> None:
        self.low, self.high = space.low.astype(np.float64), space.high.astype(np.float64)
        self.dtype = space.dtype

    def __call__(self, action: np.ndarray) -> np.ndarray:
        share = (action.astype(np.float64) + 1) * 0.5
        scaled = (1 - share) * self.low + share * self.high  # exact at both ends
        return np.clip(scaled, self.low, self.high).astype(self.dtype)


class Episodic(gym.Wrapper):
    """One of several environments, whose episode is a function of its seed and its actions.

    What it returns is checked against its spaces and copied; raises EnvironmentFault.
    """

    def __init__(self, env: gym.Env, index: int = 0, role: str = "environment") -> None:
        super().__init__(env)
        self.index, self.name = index, f"{role} {index}"
        self.k = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        # A Box2D world keeps contact caches across resets, and episodes then differ by their
        # predecessors; a new one takes about a millisecond.
        inner: Any = self.env.unwrapped
        if type(getattr(inner, "world", None)).__name__ == "b2World":
            inner._destroy()
            inner.world = type(inner.world)(gravity=inner.world.gravity)
        self.k = 0
        with self._faults():
            observation, _ = self.env.reset(seed=seed, options=options)
            return self._checked(observation), {}

    def step(self, action: np.ndarray) -> Any:
        self.k += 1
        with self._faults():
            observation, reward, terminated, truncated, _ = self.env.step(action)
            number = np.asarray(reward, np.float64).item()
            return self._checked(observation), number, bool(terminated), bool(truncated), {}

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [f" ({f.filename}:{f.lineno})" for f in frames if f.filename != __file__]
            what = f"{type(error).__name__}: {error}{lines[-1] if lines else ''}"
            raise EnvironmentFault(f"{self.name}, step {self.k} of its episode: {what}") from error

    def _checked(self, observation: Any) -> np.ndarray:
        """A copy, in the space's type: an environment may hand out the same buffer each time."""
        space: Any = self.observation_space
        array = np.asarray(observation)
        if array.shape != space.shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise TypeError(
                f"an observation of shape {array.shape}, {array.dtype}; its space says "
                f"{space.shape}, {space.dtype}"
            )
        with np.errstate(over="ignore"):  # what becomes infinite is found by the rollout
            return array.astype(space.dtype)

    def replay(self, seeds: list[int], actions: list[np.ndarray]) -> np.ndarray:
        """The observation after this environment's own actions, [steps, act], from its own seed."""
        observation, _ = self.reset(seed=seeds[self.index])
        for action in actions[self.index]:
            observation = self.step(action)[0]
        return observation


class Disturbed(gym.ObservationWrapper):
    """Sensors at fault: every entry of an observation, [obs], gets Gaussian noise of the standard
    deviation `noise`, [obs], and reads 0 with the probability `dropout`, anew at each step."""

    def __init__(self, env: gym.Env, noise: np.ndarray, dropout: float) -> None:
        super().__init__(env)
        self.noise, self.dropout = noise, dropout

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.stream = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        noisy = observation + self.noise * self.stream.standard_normal(observation.shape)
        kept = self.stream.random(observation.shape) >= self.dropout
        return (noisy * kept).astype(observation.dtype)


def _worker(make_env: MakeEnv, index: int) -> gym.Env:
    if multiprocessing.parent_process() is not None:
        for number in (signal.SIGINT, signal.SIGTERM):  # both are the manager's to handle
            signal.signal(number, signal.SIG_IGN)
        if sys.platform == "linux":  # a manager that is killed leaves no process, even a stuck one
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    return Episodic(make_env(), index)


def unvectorized(make_env: MakeEnv) -> list[MakeEnv]:
    """Factories of single environments. A user's own Gymnasium vector environment is taken apart,
    so that its autoreset mode does not matter. Raises ConfigError where that cannot be done."""
    env: Any = make_env()
    try:
        if not isinstance(env, VectorEnv):
            return [partial(flat_goals, make_env)]
        if isinstance(env, (SyncVectorEnv, AsyncVectorEnv)):
            return [partial(flat_goals, make) for make in env.env_fns]
        raise ConfigError(
            f"make_env returned the vector environment {type(env).__name__}: return one "
            "gymnasium.Env; sansac steps several side by side itself (num_envs)"
        )
    finally:
        env.close()


class Step(NamedTuple):
    """A step of every environment; arrays [num_envs, ...]."""

    observation: np.ndarray  # before the step
    reward: np.ndarray
    next_observation: np.ndarray  # the true last one where the episode ended
    terminated: np.ndarray
    truncated: np.ndarray
    episodes: list[tuple[float, int]]  # return and length of those that ended


class Rollout:
    """`num_envs` environments stepped side by side, each episode from a seed of its own.

    Raises EnvironmentFault for one that raises, returns what its spaces do not allow or, in a
    process of its own, dies or does not answer for HANG_SECONDS. An episode is cut, as truncated,
    at MAX_EPISODE_STEPS.

    Autoreset is off: a finished environment is reset here, after its last observation was handed
    out, so no reset step can be mistaken for a transition.
    """

    def __init__(self, factories: list[MakeEnv], config: Config) -> None:
        self.seed, self.num_envs = config.seed, config.num_envs
        makers: list[MakeEnv] = [
            partial(_worker, factories[i % len(factories)], i) for i in range(self.num_envs)
        ]
        self.envs: SyncVectorEnv | AsyncVectorEnv = (
            in_processes(makers)
            if config.async_envs
            else SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
        )
        self._broken = False
        if isinstance(self.envs, SyncVectorEnv):
            inner = {id(env.unwrapped) for env in self.envs.envs}
            if len(inner) < self.num_envs:
                raise ConfigError("make_env gave the same environment twice: make a new one a call")
        self.episode = [0] * self.num_envs
        self.actions: list[list[np.ndarray]] = [[] for _ in range(self.num_envs)]
        self.returns = np.zeros(self.num_envs)
        self.observation = self._reset(np.ones(self.num_envs, bool))

    def _seeds(self) -> list[int]:
        return [episode_seed(TRAINING, self.seed, i, k) for i, k in enumerate(self.episode)]

    def _reset(self, mask: np.ndarray) -> np.ndarray:
        seeds: Any = self._seeds()
        observation, _ = self._ask("reset", seed=seeds, options={"reset_mask": mask.copy()})
        self._check_finite("observation", observation, "reset")
        return observation

    def step(self, action: np.ndarray) -> Step:
        """Step with actions [num_envs, act] of the environment's own scale.

        Raises NonFiniteError naming the environment, the step of its episode and the entry.
        """
        self._check_finite("action", action, "step")
        before = self.observation
        for i, history in enumerate(self.actions):
            history.append(action[i].copy())
        observation, reward, terminated, truncated, _ = self._ask("step", action)
        endless = [len(history) >= MAX_EPISODE_STEPS for history in self.actions]
        truncated = truncated | (np.array(endless) & ~terminated)
        self._check_finite("observation", observation, "step")
        self._check_finite("reward", reward, "step")
        self.returns += reward
        self.observation = observation

        episodes = []
        done = terminated | truncated
        if done.any():
            for i in map(int, np.flatnonzero(done)):
                episodes.append((float(self.returns[i]), len(self.actions[i])))
                self.episode[i] += 1
                self.actions[i] = []
            self.returns[done] = 0.0
            self.observation = self._reset(done)
        return Step(before, reward, observation, terminated, truncated, episodes)

    def _ask(self, what: str, *arguments: Any, **options: Any) -> Any:
        """What all environments answer to `reset`, `step` or `call`."""
        envs = self.envs
        if isinstance(envs, SyncVectorEnv):
            return getattr(envs, what)(*arguments, **options)
        try:
            getattr(envs, f"{what}_async")(*arguments, **options)
            return getattr(envs, f"{what}_wait")(timeout=HANG_SECONDS)
        except multiprocessing.TimeoutError:
            at_fault = [i for i, pipe in enumerate(envs.parent_pipes) if not (pipe and pipe.poll())]
            fault = f"no answer to {what} for {HANG_SECONDS:.0f} s"
        except (BrokenPipeError, ConnectionResetError, EOFError):
            at_fault = [i for i, process in enumerate(envs.processes) if process_died(process)]
            fault = "its process has died (async_envs)"
        self._broken = True
        i = at_fault[0] if at_fault else 0
        raise EnvironmentFault(
            f"environment {i}, step {len(self.actions[i])} of episode {self.episode[i]}: {fault}"
        )

    def _check_finite(self, what: str, values: np.ndarray, when: str) -> None:
        with np.errstate(over="ignore"):  # it is stored as float32: beyond its range is infinite
            values = np.asarray(values).astype(np.float32)
        if np.isfinite(values).all():
            return
        index = np.argwhere(~np.isfinite(values))[0]
        i, entry = int(index[0]), [int(k) for k in index[1:]]
        place = f"entry {entry[0]} of the {what}" if entry else f"the {what}"
        raise NonFiniteError(
            f"environment {i}: {place} is {values[tuple(index)]} at {when} "
            f"{len(self.actions[i])} of its episode {self.episode[i]}"
        )

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to bring every environment back to this very step."""
        return {
            "episode": list(self.episode),
            "actions": [torch.from_numpy(np.array(history)) for history in self.actions],
            "returns": torch.from_numpy(self.returns.copy()),
            "observation": torch.from_numpy(self.observation.copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Replay each current episode from its seed; returns the environments that did not come
        back to the same observation and start a fresh episode instead."""
        self.episode = list(state["episode"])
        actions = [history.cpu().numpy() for history in state["actions"]]
        self.actions = [list(history) for history in actions]
        self.returns[...] = state["returns"].cpu().numpy()
        self._reset(np.ones(self.num_envs, bool))
        replayed = np.stack(self._ask("call", "replay", self._seeds(), actions))
        self.observation = replayed.astype(self.observation.dtype)
        same = (self.observation == state["observation"].cpu().numpy()).all(-1)
        if not same.all():
            for i in np.flatnonzero(~same):
                self.episode[i] += 1
                self.actions[i] = []
            self.returns[~same] = 0.0
            self.observation[~same] = self._reset(~same)[~same]
        return [int(i) for i in np.flatnonzero(~same)]

    def close(self) -> None:
        with suppress(OSError, EOFError):  # of a process that has died
            if not self._broken:
                return self.envs.close()
        for process in getattr(self.envs, "processes", ()):
            process.kill()
            process.join()
        self.envs.closed = True


def in_processes(makers: list[MakeEnv]) -> AsyncVectorEnv:
    """Each environment in a process of its own; none is left where one of them cannot be made.

    Raises EnvironmentFault where a process ends before it has made its environment.
    """
    others = multiprocessing.active_children()
    try:
        return AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED, context="spawn")
    except BaseException as error:
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        if isinstance(error, (OSError, EOFError)):
            raise EnvironmentFault(
                "a process could not make its environment (async_envs)"
            ) from None
        raise


def process_died(process: Any) -> bool:
    """Whether a process whose pipe is broken is the one that died: it may take a moment to go."""
    process.join(0.1)
    return not process.is_alive()
