"""The training loop: collect, learn, evaluate, checkpoint; and what evaluates a trained agent."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from sansac import callbacks as calling
from sansac import checkpoint, kernels, signals
from sansac.adaptive import Controller, effective_sample_size
from sansac.algorithm import SAC
from sansac.capture import updater
from sansac.config import Config, ConfigError, fields, resolve
from sansac.environments import (
    ActionScale,
    Disturbed,
    EnvironmentFault,
    MakeEnv,
    NonFiniteError,
    Rollout,
    check_spaces,
    env_factory,
    goals_of,
    unvectorized,
    window_closed,
    window_unseen,
)
from sansac.evaluation import Policy, evaluate, summary
from sansac.family import make_algorithm
from sansac.hindsight import HindsightReplay
from sansac.logger import Logger
from sansac.off_policy import OffPolicy
from sansac.plots import plot_learning_curve
from sansac.prioritized import PrioritizedReplay
from sansac.progress import Progress
from sansac.replay import Batch, ReplayBuffer
from sansac.schedules import at, initial
from sansac.spiking import SpikingActor, backend_for
from sansac.video import record_video

# What a resumed run may change: how long, how often, where; never what is learned.
CHANGEABLE = (
    "total_steps", "log_every", "eval_every", "eval_episodes", "final_episodes",
    "checkpoint_every", "stop_at_return", "patience", "keep_best", "keep_every",
    "save_in_background", "device", "learning.cuda_graph", "video", "wandb", "wandb_project",
    "tensorboard", "runs_dir",
)  # fmt: skip

# Where a process finds the control groups that limit its memory, and their limits.
CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CGROUP_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}

REESTIMATION_BATCHES = 20  # minibatches that BatchNorm's statistics are re-estimated from

# The share of each statistic that is too much, and what to say of it.
WARNINGS = {
    "silent": (
        0.9,
        "warning: {share:.0%} of the neurons of spiking layer {layer} never fire; try a lower "
        "spiking.v_threshold, a wider spiking.surrogate_width or actor.batch_norm",
    ),
    "saturated": (
        0.9,
        "warning: {share:.0%} of the neurons of spiking layer {layer} fire at every step; try a "
        "higher spiking.v_threshold, actor.batch_norm or a spiking.firing_penalty",
    ),
    "outside_range": (
        0.05,
        "warning: {share:.0%} of observation entries lie outside the encoder's fields; try a "
        "larger spiking.input_range with more spiking.input_population, or a lower "
        "observation_clip",
    ),
}

# What a checkpoint holds beside networks, environments and buffer: attributes of Manager.
COUNTERS = (
    "step", "updates", "episodes", "collect_seconds", "learn_seconds", "logged_step",
    "evaluated_step", "saved_step", "final_step", "best_return", "last_return", "learning_from",
    "update_to_data",
)  # fmt: skip


class Manager:
    """Trains and evaluates one agent. Touches no wandb, NVML or disk before `train()`, but for the
    cache of compiled neurons of a spiking actor.

    `make_env` returns a new `gymnasium.Env`; without it the environment is made from
    `config.env`. `callbacks` are called on the way, after those that the configuration asks for.
    Raises ConfigError for what cannot be trained.
    """

    def __init__(
        self,
        config: Config,
        make_env: MakeEnv | None = None,
        callbacks: Sequence[calling.Callback] = (),
    ) -> None:
        self._custom_env = make_env
        self._factories = unvectorized(make_env or env_factory(config))
        probe = self._factories[0]()
        check_spaces(probe, config.env)
        self.scale = ActionScale(probe.action_space)  # type: ignore[arg-type]
        self.observation_dtype = np.dtype(probe.observation_space.dtype)
        (self.observation_size,) = probe.observation_space.shape or ()
        (self.action_size,) = probe.action_space.shape or ()
        self.goals = goals_of(probe)
        if config.replay.hindsight != "none" and self.goals is None:
            raise ConfigError(
                f"replay.hindsight: {config.env!r} is not goal-conditioned: its observations must "
                "be a Dict of observation, achieved_goal and desired_goal, and it needs "
                "compute_reward"
            )
        stop_at = stopping_return(config, probe)
        self.callbacks = [*calling.configured(config, stop_at), *callbacks]
        probe.close()
        check_memory(config, self.observation_size, self.action_size, self.observation_dtype)

        if config.device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        else:
            device = config.device
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device: torch sees no GPU for 'cuda'; use --device cpu")
        self.device = device
        self.threads = auto_threads() if config.threads == "auto" else config.threads
        torch.set_num_threads(self.threads)
        self.backend: str | None = None
        if config.san:
            try:
                self.backend = backend_for(config.spiking, torch.device(device))
            except ValueError as error:
                raise ConfigError(f"spiking.backend: {error}") from None
        self.config = config
        sizes = self.observation_size, self.action_size
        self.algorithm: OffPolicy = make_algorithm(config, *sizes, device)
        if config.keeps_likelihood() and not isinstance(self.algorithm, SAC):
            raise ConfigError(
                f"replay.ratio, replay.retention ess and adaptive.moves need a policy with a "
                f"likelihood, which {config.algorithm!r} has not"
            )
        self.update = updater(self.algorithm)
        self.controllers = controllers(config)
        self.policy = Policy(self.algorithm, self.scale)

        self.run_dir: Path | None = None
        self.rollout: Rollout
        self.replay: ReplayBuffer
        self.logger: Logger
        self.progress: Progress
        self.batch: Batch | None = None  # the last one, for the spiking statistics
        self.metrics: dict[str, Tensor] = {}  # the last update's
        self.warned: set[str] = set()  # tags that a warning was given of
        self.interrupted = 0  # number of the signal that asked for an end
        self.loaded_from: str | None = None
        self._resumed: dict[str, Any] = {}
        self._source: tuple[Path | None, int] = (None, 0)  # the checkpoint resumed, when written
        self._saver = checkpoint.Saver() if config.save_in_background else None
        self._ended = False  # train() is over, or the agent was loaded without its training state

        self.step = self.updates = self.episodes = 0
        self.collect_seconds = self.learn_seconds = 0.0
        self.logged_step = self.evaluated_step = self.saved_step = self.final_step = 0
        self.best_return: float | None = None
        self.last_return = -math.inf
        # Updates are counted from here, so that refilling a lost buffer causes no burst of them.
        self.learning_from: tuple[int, float] = (config.learning.learning_starts, 0)
        self.update_to_data = initial(config.learning.update_to_data)
        self.checkpoint_seconds = 0.0  # of one that no row has told of yet
        self.measured = (0, 0, 0.0, 0.0)  # steps, updates, seconds at the last training row

    # -- training ----------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train to `total_steps` in a run directory; returns the final evaluation.

        SIGINT or SIGTERM end it after the current step, with a checkpoint: the result is then {}
        and `interrupted` holds the signal's number.
        """
        if self.finished:
            return checkpoint.read_record(self.directory).get("final", {})
        if self._ended:
            raise RuntimeError(
                f"this manager cannot train (on): Manager.resume({str(self.run_dir)!r}) goes on "
                "with a run from its checkpoint"
            )
        kernels.keep_freed_memory()
        if self.run_dir is None:
            self.run_dir = checkpoint.make_run_dir(self.config)
        with checkpoint.locked(self.run_dir), signals.handled(self._ask_to_end):
            self._refuse_stale()
            checkpoint.write_config(self.config, self.run_dir)
            self._record("running")
            try:
                return self._train()
            except BaseException:
                with suppress(OSError):  # a disk that is full: what it was is told all the same
                    self._record("failed")
                raise
            finally:
                self._ended = True

    def _refuse_stale(self) -> None:
        """Raises ConfigError where another process went on with the run since it was read."""
        path, read = self._source
        if path is not None and path.stat().st_mtime_ns != read:
            raise ConfigError(f"{path} was written since it was read: resume the run again")

    def _train(self) -> dict[str, Any]:
        config, run_dir = self.config, self.directory
        description = f"{config.env} {config.agent_name}"
        with (
            Logger(
                config,
                run_dir,
                device=self.device,
                resume_step=self.step or None,
                hurried=lambda: bool(self.interrupted),
            ) as logger,
            Progress(config.total_steps, self.step, description) as progress,
            self.opened(progress),
        ):
            self.logger, self.progress = logger, progress
            progress.note(f"{run_dir}: {self._engine()}")
            if config.total_steps <= config.learning.learning_starts:
                progress.note(
                    "warning: total_steps ends before learning_starts; nothing is learned"
                )
            if self.loaded_from in ("previous", "best"):
                # Metrics are cut to it, so it is what a next resume needs; what it replaces may be
                # damaged and does not become previous.pt.
                self.save_checkpoint(keep=False)
            for callback in self.callbacks:
                callback.start(self)
            while not self._done():
                # First, so that an evaluation which a signal cut short is made up for on resume.
                due = crossed(self.step, self.saved_step, config.checkpoint_every)
                if crossed(self.step, self.evaluated_step, config.eval_every):
                    due |= bool(self._evaluate_and_keep_best())
                if due:
                    self._save_or_warn(self.save_checkpoint)
                if self._done():
                    break
                self.collect()
                self.learn()
                for callback in self.callbacks:
                    callback.step(self)
                if crossed(self.step, self.logged_step, config.log_every):
                    self._log_training()
            result: dict[str, Any] = {}
            if not self.interrupted:
                progress.note(f"final evaluation over {config.final_episodes} episodes")
                result = self._evaluate_and_keep_best(config.final_episodes)
            self.save_checkpoint()
            if self._saver:
                self._saver.wait()  # raises what the last one met
            for callback in self.callbacks:
                callback.stop(self, result)
            if result:
                self._record("finished", final=result)
                self._illustrate()
            else:
                self._record("interrupted")
                progress.note(f"stopped; go on with: python runner.py train --resume {run_dir}")
            return result

    def collect(self) -> None:
        """Step every environment once and store the transitions."""
        started = time.perf_counter()
        # A new best return moves schedules at once, for a run that is resumed here too.
        self.algorithm.set_progress(*self.schedule_point)
        observation = torch.from_numpy(self.rollout.observation).float().to(self.device)
        warming_up = self.step < self.config.learning.learning_starts
        explore = self.algorithm.explore_uniformly if warming_up else self.algorithm.explore
        chosen = explore(observation)
        action = chosen.cpu().numpy()
        try:
            step = self.rollout.step(self.scale(action))
        except NonFiniteError:
            self._check_finite()  # where learning has blown up, that is the source
            raise
        likelihood = {}
        if self.config.keeps_likelihood():
            likelihood["log_prob"] = self._log_prob(observation, chosen, warming_up)
        self.replay.add(
            step.observation,
            action,
            step.reward,
            step.next_observation,
            step.terminated,
            step.truncated,
            **likelihood,
        )
        if step.episodes:
            ended = torch.from_numpy(step.terminated | step.truncated)
            self.algorithm.episodes_ended(ended.to(self.device))
        self.algorithm.norm.update(observation)
        self.step += self.config.num_envs
        self.collect_seconds += time.perf_counter() - started
        for episode_return, length in step.episodes:
            self.episodes += 1
            episode = {"episode_return": episode_return, "episode_length": length}
            self._log({f"train/{k}": v for k, v in (episode | {"episodes": self.episodes}).items()})
            self.progress.update(self.step, self.updates, episode_return=episode_return)
            for callback in self.callbacks:
                callback.episode(self, episode_return, length)

    def learn(self) -> None:
        """Update until `update_to_data` updates were made for each step since learning began."""
        started = time.perf_counter()
        learning, every = self.config.learning, self.config.actor.reestimate_every
        self.algorithm.set_progress(*self.schedule_point)
        if isinstance(self.replay, PrioritizedReplay):
            self.replay.correction = at(self.config.replay.correction, *self.schedule_point)
        if "update_to_data" not in self.controllers:
            self._set_update_to_data(at(learning.update_to_data, *self.schedule_point))
        from_step, from_updates = self.learning_from
        due = math.floor(from_updates + (self.step - from_step) * self.update_to_data + 1e-9)
        with kernels.products(learning.precision):
            while self.updates < due:
                self.batch = self.replay.sample(self.batch_size)
                # A delayed policy gives no numbers at most updates: its last ones stay.
                self.metrics = self.metrics | self.update(self.batch)
                self.updates += 1
                self._reprioritise()
                self._control()
                if every and self.updates % every == 0:
                    drawn = self.replay.sample(self.batch_size * REESTIMATION_BATCHES)
                    self.algorithm.reestimate(drawn.observation)
        self.learn_seconds += time.perf_counter() - started
        self.progress.update(self.step, self.updates)

    @property
    def schedule_point(self) -> tuple[float, float | None]:
        """What schedules go by: the share of training done, and the best return so far."""
        return self.step / self.config.total_steps, self.best_return

    @property
    def batch_size(self) -> int:
        controller = self.controllers.get("batch_size")
        return round(controller.value) if controller else self.config.learning.batch_size

    def _set_update_to_data(self, value: float) -> None:
        """From this step on; what was due before stays due."""
        if value != self.update_to_data:
            from_step, from_updates = self.learning_from
            if self.step > from_step:
                due = from_updates + (self.step - from_step) * self.update_to_data
                self.learning_from = (self.step, due)
            self.update_to_data = value

    def _log_prob(self, observation: Tensor, action: Tensor, uniform: bool) -> np.ndarray:
        """log mu(a|s) of actions just chosen, [num_envs]."""
        if uniform:
            return np.full(len(action), -self.action_size * math.log(2), np.float32)
        assert isinstance(self.algorithm, SAC)
        return self.algorithm.log_prob(observation, action).cpu().numpy()

    def _log_ratio(self) -> Tensor:
        """log pi - log mu of the last minibatch, [B]."""
        assert isinstance(self.algorithm, SAC) and self.batch is not None
        now = self.algorithm.log_prob(self.batch.observation, self.batch.action)
        return now - self.replay.drawn_log_prob

    def _reprioritise(self) -> None:
        if isinstance(self.replay, PrioritizedReplay):
            share = self.config.replay.ratio
            log_ratio = self._log_ratio() if share else None
            self.replay.reprioritise(self.algorithm.td_error, log_ratio, share)

    def _control(self) -> None:
        """Let controllers move, each by one minibatch's effective sample size."""
        if not self.controllers or self.updates % self.config.adaptive.every:
            return
        share = effective_sample_size(self._log_ratio())
        values: dict[str, float] = {"adaptive/effective_sample_size": share}
        for name, controller in self.controllers.items():
            if not controller.move(share):
                continue
            if name == "window":
                controller.value = min(controller.value, float(self.replay.size))
                self.replay.window = round(controller.value)
                values["replay/window"] = self.replay.window
            else:
                values[f"adaptive/{name}"] = controller.value
            if name == "update_to_data":
                self._set_update_to_data(controller.value)
        self._log(values)

    def _done(self) -> bool:
        stopped = any(callback.done(self) for callback in self.callbacks)
        return bool(self.interrupted) or stopped or self.step >= self.config.total_steps

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end and was evaluated there."""
        return self.step > 0 and self._done() and self.final_step == self.step

    def _illustrate(self) -> None:
        """The picture and the video of a finished run, and what online services keep of it."""
        config, run_dir = self.config, self.directory
        try:
            plot_learning_curve(run_dir)
        except OSError as error:
            self.progress.note(f"no learning curve: {error}")
        if config.video:
            path = run_dir / "videos" / f"step-{self.step}.mp4"
            try:
                self.record_video(path)
                self.logger.save_artifact(path, f"{run_dir.name}-video", "video")
            except Exception as error:  # a renderer or an encoder at fault costs no training
                self.progress.note(f"no video: {error or type(error).__name__}")
        agent = run_dir / "checkpoints" / "best.pt"
        self.logger.save_artifact(agent, f"{run_dir.name}-best", "model")

    # -- evaluation --------------------------------------------------------------------------

    def evaluate(
        self,
        episodes: int = 100,
        seed: int = 0,
        stochastic: bool = False,
        on_episode: Callable[[float], None] = lambda _: None,
        noise: float = 0.0,
        dropout: float = 0.0,
    ) -> dict[str, Any]:
        """Returns and their statistics over `episodes`, each on a seed derived from (seed, i).

        `noise` and `dropout` disturb what the policy sees: Gaussian noise in standard deviations
        of the observations seen in training, and the probability that an entry reads 0.

        The numbers depend on the policy and these arguments alone; training streams do not move.
        Keys as `evaluate --json` prints them; {} where a signal cut it short. Raises ConfigError
        for less than one episode, negative noise or a dropout that is no probability.
        """
        if episodes < 1:
            raise ConfigError(f"episodes: expected 1 or more, found {episodes}")
        if not (0 <= noise < math.inf and 0 <= dropout <= 1):
            raise ConfigError(
                f"noise must be at least 0 and dropout from 0 to 1, found {noise} and {dropout}"
            )
        spread = self.algorithm.norm.var.sqrt().cpu().numpy()

        def make_env() -> gym.Env:
            env = self.evaluation_env()
            return Disturbed(env, noise * spread, dropout) if noise or dropout else env

        result = evaluate(
            self.policy,
            make_env,
            episodes=episodes,
            seed=seed,
            stochastic=stochastic,
            on_episode=on_episode,
            should_stop=lambda: bool(self.interrupted) and not self._ended,
        )
        if result is None:
            return {}
        return {
            "env": self.config.env,
            "actor": self.config.actor_name,
            "algorithm": self.config.algorithm,
            "checkpoint": self.loaded_from,
            "step": self.step,
            "episodes": episodes,
            "seed": seed,
            "noise": noise,
            "dropout": dropout,
            **result,
        }

    def record_video(self, path: Path, seed: int = 0) -> None:
        """Film the first evaluation episode of `seed` to an MP4 file.

        Raises ConfigError where the environment gives no frames.
        """
        env = self.rendering_env()
        if env.render_mode != "rgb_array":
            env.close()
            raise ConfigError('make_env: the environment\'s render_mode is not "rgb_array"')
        record_video(self.policy, env, seed, path)

    def play(
        self,
        episodes: int = 5,
        seed: int = 0,
        on_episode: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Show the first evaluation episodes of `seed` in a window, until it is closed.

        Raises ConfigError where no window opens.
        """
        env = env_factory(self.config, "human")()
        try:
            env.reset()  # opens the window
            if window_unseen():
                raise RuntimeError("the display does not answer")
        except Exception as error:  # whatever the environment draws with
            env.close()
            raise ConfigError(f"no window opens: {error or type(error).__name__}") from None
        evaluate(
            self.policy,
            lambda: env,
            episodes=episodes,
            seed=seed,
            on_episode=on_episode,
            should_stop=window_closed,
        )

    def evaluation_env(self) -> gym.Env:
        """A new environment like those that the agent is evaluated in."""
        return self._factories[0]()

    def rendering_env(self) -> gym.Env:
        """A new environment that renders frames; a user's own is as `make_env` returns it.

        Raises ConfigError where it cannot be made so.
        """
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # frames need no window
        custom = self._custom_env is not None
        return (self._factories[0] if custom else env_factory(self.config, "rgb_array"))()

    def _evaluate_and_keep_best(self, episodes: int | None = None) -> dict[str, Any]:
        """Evaluate on episodes that no other evaluation of the run uses; keep the best policy.

        The last evaluation runs on seed 0, the same unseen episodes for every run.
        """
        started = time.perf_counter()
        self._check_finite()
        seed = self.step if episodes is None else 0
        result = self.evaluate(episodes or self.config.eval_episodes, seed)
        if not result:
            return {}
        self.evaluated_step = self.step
        if episodes is None:  # the final one does not undo an early stop
            self.last_return = result["return_mean"]
        else:
            self.final_step = self.step
        names = ("mean", "std", "iqm", "min", "max")
        values = {f"eval/return_{name}": result[f"return_{name}"] for name in names}
        values["eval/length_mean"] = result["length_mean"]
        for layer, rate in enumerate(result.get("firing_rate", ())):
            values[f"eval/firing_rate/{layer}"] = rate
        self._log(values | {"perf/eval_seconds": time.perf_counter() - started})
        mean = result["return_mean"]
        self.progress.update(self.step, self.updates, evaluation=mean)
        learned = self.updates > 0 or episodes is not None  # untrained, none is worth keeping
        if learned and (self.best_return is None or mean > self.best_return):
            self.best_return = mean
            self.save_policy(self.directory / "checkpoints" / "best.pt")
        if episodes is None:
            for callback in self.callbacks:
                callback.evaluation(self, result)
        return result

    # -- logging -----------------------------------------------------------------------------

    def _log(self, values: Mapping[str, SupportsFloat]) -> None:
        seconds = self.collect_seconds + self.learn_seconds
        self.logger.log(step=self.step, updates=self.updates, time=seconds, values=values)

    def _log_training(self) -> None:
        """A row of the last update's numbers. Raises NonFiniteError where learning has blown up."""
        self._check_finite()
        values: dict[str, Any] = {"train/buffer_size": self.replay.size, **self.metrics}
        actor = self.algorithm.actor
        if self.batch and isinstance(actor, SpikingActor):
            values |= actor.statistics(self.algorithm.normalize(self.batch.observation))
            self._warn(values)
        now = (self.step, self.updates, self.collect_seconds, self.learn_seconds)
        old = self.measured
        steps, updates, collecting, learning = (b - a for a, b in zip(old, now, strict=True))
        self.measured, self.logged_step = now, self.step
        if isinstance(self.replay, PrioritizedReplay):
            values["replay/correction"] = self.replay.correction
        values["sac/learning_rate"] = self.algorithm.learning_rate
        values["perf/steps_per_second"] = steps / (collecting + learning)
        values["perf/updates_per_second"] = updates / (collecting + learning)
        values["perf/collect_seconds"], values["perf/learn_seconds"] = collecting, learning
        values["perf/memory_mb"] = peak_megabytes()
        if self.checkpoint_seconds:
            values["perf/checkpoint_seconds"], self.checkpoint_seconds = self.checkpoint_seconds, 0
        self._log(values | self.logger.gpu_metrics())

    def _check_finite(self) -> None:
        """Raises NonFiniteError for a loss or a weight that is none, before it is kept as good."""
        when = f"at step {self.step}, update {self.updates}"
        advice = "lower the learning rates or scale the reward down"
        for tag in ("loss/critic", "loss/actor"):
            if not math.isfinite(float(self.metrics.get(tag, 0.0))):
                raise NonFiniteError(f"{tag} is {float(self.metrics[tag])} {when}: {advice}")
        for part in ("actor", "critic"):
            for name, weight in getattr(self.algorithm, part).named_parameters():
                if not weight.isfinite().all():
                    raise NonFiniteError(f"{part}: {name} is not finite {when}: {advice}")

    def _warn(self, values: Mapping[str, SupportsFloat]) -> None:
        """Say once what to try where a layer or the encoder is at fault."""
        for tag, value in values.items():
            name, _, layer = tag.removeprefix("spiking/").partition("/")
            limit, advice = WARNINGS.get(name, (math.inf, ""))
            if float(value) > limit and tag not in self.warned:
                self.warned.add(tag)
                self.progress.note(advice.format(share=float(value), layer=layer))

    def _engine(self) -> str:
        """What computes: actor, device, threads and, for a spiking actor, the neurons' backend."""
        neurons = f", {self.backend} neurons" if self.backend else ""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.config.actor_name} actor on {self.device}, {threads}{neurons}"

    def _record(self, status: str, **more: Any) -> None:
        record = checkpoint.read_record(self.directory) | {
            "status": status,
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": self.step,
            "command": sys.argv,
            **provenance(),
            "device": self.device,
            "backend": self.backend,
            "threads": self.threads,
            **more,
        }
        checkpoint.write_record(self.directory, record)

    # -- state -------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        if self.run_dir is None:
            raise RuntimeError("there is no run directory before train()")
        return self.run_dir

    def _state(self) -> dict[str, Any]:
        """The algorithm, counters and the configuration: a checkpoint without the buffer."""
        return {
            "config": self.config.dump(),
            "sizes": [self.observation_size, self.action_size],
            "algorithm": self.algorithm.state_dict(),
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "controllers": {name: c.state_dict() for name, c in self.controllers.items()},
            "callbacks": {name: plain(c.state_dict()) for name, c in self._named_callbacks()},
            "rollout": self.rollout.state_dict(),
        }

    def _named_callbacks(self) -> list[tuple[str, calling.Callback]]:
        """Callbacks by their class, numbered where there are several of one."""
        names = [type(callback).__name__ for callback in self.callbacks]
        numbered = [f"{name}-{names[:i].count(name)}" for i, name in enumerate(names)]
        return list(zip(numbered, self.callbacks, strict=True))

    def save_policy(self, path: Path) -> None:
        """Write a checkpoint without the buffer: to evaluate, or to resume after a refill. A
        warning where it cannot be written."""
        self._save_or_warn(lambda: self._write(path, self._state()))

    def _write(self, path: Path, state: dict[str, Any], keep: Path | None = None) -> None:
        if self._saver is None:
            checkpoint.save(path, state, keep)
        else:
            self._save_or_warn(self._saver.wait)  # what an earlier file met costs this one nothing
            # The buffer's state is a copy already; the rest is what training goes on with.
            rest = {key: value for key, value in state.items() if key != "replay"}
            self._saver.save(path, state | copy.deepcopy(rest), keep)

    def save_checkpoint(self, keep: bool = True) -> None:
        """Write last.pt, everything a resume needs; the old one becomes previous.pt if `keep`.

        Raises NonFiniteError, and CheckpointError where it cannot be written.
        """
        started = time.perf_counter()
        self.saved_step = self.step
        self._check_finite()
        directory = self.directory / "checkpoints"
        state = self._state() | {
            "replay": self.replay.state_dict(),
            "metrics": self.metrics,
            "batch": self.batch and self.batch._asdict(),
        }
        self._write(directory / "last.pt", state, directory / "previous.pt" if keep else None)
        self.checkpoint_seconds = time.perf_counter() - started
        for callback in self.callbacks:
            callback.checkpoint(self, directory / "last.pt")

    def _save_or_warn(self, save: Callable[[], None]) -> None:
        """A full disk may be freed: training goes on, and the next interval tries again."""
        try:
            save()
        except checkpoint.CheckpointError as error:
            self.progress.note(f"warning: {error}; training goes on, what was saved before stands")

    @classmethod
    def resume(
        cls,
        run_dir: str | Path,
        make_env: MakeEnv | None = None,
        which: str = "last",
        callbacks: Sequence[calling.Callback] = (),
        **changes: Any,
    ) -> Manager:
        """A manager whose `train()` goes on with a run where its checkpoint stands.

        The run's own configuration is taken whole; `changes` may name fields of CHANGEABLE alone.
        Raises ConfigError for another change, CheckpointError for a checkpoint that cannot be
        loaded.
        """
        run_dir = Path(run_dir)
        config = checkpoint.read_config(run_dir)
        if (run_dir / "agent.pt").is_file():
            raise ConfigError(f"{run_dir} is an agent directory: only a run can be resumed")
        changed = resolve(config.dump(), changes)
        refuse_other_changes(config, changed)
        if changed.threads == "auto":  # sums differ between thread counts: keep the run's own
            threads = checkpoint.read_record(run_dir).get("threads", "auto")
            changed = resolve(changed.dump(), {"threads": threads})
        manager = cls(changed, make_env, callbacks)
        manager.run_dir = run_dir
        path = run_dir / "checkpoints" / f"{which}.pt"
        if which != "last" or path.exists() or path.with_name("previous.pt").exists():
            manager._load_state(path)
        return manager

    @classmethod
    def load(
        cls, path: str | Path, which: str = "last", make_env: MakeEnv | None = None
    ) -> Manager:
        """A trained agent from a run or an agent directory, to evaluate or call as `policy`.

        `which` is last, previous, best or a checkpoint file. Loads on any device.
        """
        path = Path(path)
        anywhere = {"device": "auto", "spiking": {"backend": "auto"},
                    "learning": {"cuda_graph": False}}  # fmt: skip
        manager = cls(resolve(checkpoint.read_config(path).dump(), anywhere), make_env)
        if which not in ("last", "previous", "best"):
            file = Path(which)
        elif (path / "agent.pt").is_file():
            file = path / "agent.pt"
        else:
            file = path / "checkpoints" / f"{which}.pt"
        state = manager._read(file)
        with fitting(file):
            manager.algorithm.load_weights(state["algorithm"])
            manager.step, manager.updates = (
                number_like(0, state["counters"][name]) for name in ("step", "updates")
            )
            manager.best_return = number_like(None, state["counters"].get("best_return"))
        manager.algorithm.set_progress(*manager.schedule_point)
        manager.run_dir, manager._ended = path, True
        manager.loaded_from = file.stem if file.parent.name == "checkpoints" else str(file)
        return manager

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write an agent directory: config.yaml, agent.pt (weights and normaliser), README.md and,
        for a run that has ended with it, its final evaluation as evaluation.json.

        Raises ConfigError where it exists and is not empty, unless `overwrite`.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; an agent is a directory: choose another name")
        if path.exists() and any(path.iterdir()) and not overwrite:
            raise ConfigError(f"{path} is not empty; choose another directory or pass overwrite")
        path.mkdir(parents=True, exist_ok=True)
        checkpoint.write_config(self.config, path)
        state = {
            "config": self.config.dump(),
            "sizes": [self.observation_size, self.action_size],
            "algorithm": self.algorithm.weights(),
            "counters": {
                "step": self.step,
                "updates": self.updates,
                "best_return": self.best_return,
            },
        }
        checkpoint.save(path / "agent.pt", state)
        final = self._final()
        if final:
            text = json.dumps(final, indent=1) + "\n"
            checkpoint.write_atomically(
                path / "evaluation.json", lambda file: file.write(text.encode())
            )
        else:  # that of an agent which was here before is not this one's
            (path / "evaluation.json").unlink(missing_ok=True)
        parameters = sum(p.numel() for p in self.algorithm.policy_actor.parameters())
        card = agent_card(self.config, self.step, self.updates, parameters, final)
        checkpoint.write_atomically(path / "README.md", lambda file: file.write(card.encode()))

    def _final(self) -> dict[str, Any]:
        """The evaluation that ended the run at this very step, and what it ran on, from the run's
        directory or the agent's; {} where there is none, or where its file, which anybody may
        write, holds something else."""
        if self.run_dir is None:
            return {}
        record = checkpoint.read_record(self.run_dir)
        about = {key: record.get(key) for key in ("commit", "versions", "machine")}
        final = record.get("final", {}) | {"checkpoint": "agent.pt"} | about
        final = checkpoint.read_record(self.run_dir, "evaluation.json") or final
        try:
            summary(final)
        except (KeyError, TypeError, ValueError):
            return {}
        return final if final.get("step") == self.step else {}

    def _read(self, path: Path) -> dict[str, Any]:
        """A checkpoint that fits this manager. Raises CheckpointError naming what does not."""
        state = checkpoint.load(path, self.device)
        for part in ("config", "sizes", "algorithm", "counters"):
            if part not in state:
                raise checkpoint.CheckpointError(f"{path} holds no {part}: it is no agent of ours")
        expected = {
            "env": self.config.env,
            "algorithm": self.config.algorithm,
            "actor": self.config.actor_name,
            "sizes": [self.observation_size, self.action_size],
        }
        with fitting(path):
            theirs = resolve(state["config"])
            sizes = [number_like(0, size) for size in state["sizes"]]
        found = {"env": theirs.env, "algorithm": theirs.algorithm, "actor": theirs.actor_name,
                 "sizes": sizes}  # fmt: skip
        for key, value in expected.items():
            if found[key] != value:
                raise checkpoint.CheckpointError(
                    f"{path} was saved with {key} {found[key]}; expected {value}"
                )
        return state

    def _load_state(self, path: Path) -> None:
        self._source = (path, path.stat().st_mtime_ns if path.exists() else 0)
        state = self._read(path)
        with fitting(path):
            self.algorithm.load_state_dict(state["algorithm"])
            for name in COUNTERS:
                setattr(self, name, number_like(getattr(self, name), state["counters"][name]))
            for name, controller in self.controllers.items():
                controller.load_state_dict(state["controllers"][name])
            for name, callback in self._named_callbacks():
                if name in state["callbacks"]:
                    callback.load_state_dict(state["callbacks"][name])
        self.measured = (self.step, self.updates, self.collect_seconds, self.learn_seconds)
        self._resumed = state
        self.loaded_from = path.stem

    @contextmanager
    def opened(self, progress: Progress) -> Iterator[None]:
        """Environments and replay buffer: new, or as the checkpoint left them."""
        config = self.config
        self.rollout = Rollout(self._factories, config)
        try:
            self.replay = self._make_replay()
            if self._resumed:
                path, _ = self._source
                with fitting(path or Path()):
                    self._restore(progress)
            yield
        finally:
            self.rollout.close()

    def _make_replay(self) -> ReplayBuffer:
        config = self.config
        sizes = config.replay.capacity, self.observation_size, self.action_size
        options: dict[str, Any] = {
            "num_envs": config.num_envs,
            "n_step": config.learning.n_step,
            "gamma": config.learning.gamma,
            "seed": config.seed,
            "observation_dtype": self.observation_dtype,
            "device": self.device,
            "likelihood": config.keeps_likelihood(),
        }
        if config.replay.storage == "disk":
            # last.pt and previous.pt must find their rows.
            every = min(config.checkpoint_every, config.total_steps)
            slack = 2 * every + config.num_envs * (config.learning.n_step + 1)
            options |= {"directory": self.directory / "replay", "slack": slack}
        replay: ReplayBuffer
        if config.replay.sampler != "uniform":
            rank = config.replay.sampler == "rank"
            replay = PrioritizedReplay(
                *sizes, exponent=config.replay.exponent, rank=rank, **options
            )
        elif config.replay.hindsight != "none":
            assert self.goals is not None
            strategy, original = config.replay.hindsight, config.replay.original
            replay = HindsightReplay(
                *sizes, goals=self.goals, strategy=strategy, original=original, **options
            )
        else:
            replay = ReplayBuffer(*sizes, **options)
        if config.replay.retention == "window":
            replay.window = min(config.replay.window, replay.capacity)
        return replay

    def _restore(self, progress: Progress) -> None:
        """Environments and buffer as the checkpoint left them; it is not held any longer."""
        state, self._resumed = self._resumed, {}
        fresh = self.rollout.load_state_dict(state["rollout"])
        if fresh:
            progress.note(f"environments {fresh} did not replay; they start a new episode")
            ended = torch.zeros(self.config.num_envs, dtype=torch.bool, device=self.device)
            ended[fresh] = True
            self.algorithm.episodes_ended(ended)
        if "replay" in state and self.replay.holds(state["replay"]):
            self.replay.load_state_dict(state["replay"])
            self.replay.cut(fresh)
            self.metrics = {tag: value.reshape(()) for tag, value in state["metrics"].items()}
            self.batch = state["batch"] and Batch(**state["batch"])
        else:
            start = self.step + self.config.learning.learning_starts
            self.learning_from = (start, self.updates)
            lost = f"{self.loaded_from}.pt has no buffer"
            if "replay" in state:
                lost = f"{self.replay.directory} no longer has the rows of {self.loaded_from}.pt"
            progress.note(f"{lost}: refilling to {start}")

    # -- signals -----------------------------------------------------------------------------

    def _ask_to_end(self, number: int) -> None:
        """A signal asks for a clean end; a second one ends the process at once."""
        if self.interrupted:
            for process in multiprocessing.active_children():  # environments, which would complain
                process.kill()
            os._exit(128 + number)
        self.interrupted = number


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Raises CheckpointError where a checkpoint's parts do not fit what the configuration makes."""
    try:
        yield
    except (checkpoint.CheckpointError, EnvironmentFault, NonFiniteError):
        raise
    except Exception as error:  # a file made by hand may hold anything in any place
        reason = f"{type(error).__name__}: {error}"
        raise checkpoint.CheckpointError(f"{path} does not fit its config: {reason}") from None


def plain(value: Any) -> Any:
    """What a callback keeps, with NumPy's numbers as Python's: a checkpoint holds no other."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def number_like(example: Any, value: Any) -> Any:
    """A counter of a checkpoint. Raises TypeError where it is of another kind than `example`."""
    if isinstance(example, tuple) and isinstance(value, tuple) and len(value) == len(example):
        return tuple(map(number_like, example, value))
    numbers = (int, float)
    if type(value) in numbers and type(example) in (*numbers, type(None)):
        return value
    if type(value) is type(example):
        return value
    raise TypeError(f"a counter is {value!r:.40}")


def crossed(step: int, last: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (last, step]; never for 0."""
    return every > 0 and step // every > last // every


def stopping_return(config: Config, env: gym.Env) -> float | None:
    if config.stop_at_return != "threshold":
        return config.stop_at_return
    threshold = env.spec.reward_threshold if env.spec else None
    if threshold is None:
        raise ConfigError(f"stop_at_return: {config.env!r} names no threshold; give a number")
    return threshold


def controllers(config: Config) -> dict[str, Controller]:
    """What moves with the effective sample size: batch_size or update_to_data, window."""
    learning, adaptive, replay = config.learning, config.adaptive, config.replay
    found = {}
    bounds: dict[str, Any] = {
        "low": adaptive.low, "high": adaptive.high, "target": adaptive.target
    }  # fmt: skip
    if adaptive.moves == "batch_size":
        found["batch_size"] = Controller(learning.batch_size, **bounds, power=-1)
    if adaptive.moves == "update_to_data":
        start = initial(learning.update_to_data)
        found["update_to_data"] = Controller(start, **bounds, power=1)
    if replay.retention == "ess":
        found["window"] = Controller(
            replay.capacity, low=learning.batch_size, high=replay.capacity,
            target=replay.least_ess, power=1,
        )  # fmt: skip
    return found


def check_memory(config: Config, observation_size: int, action_size: int, dtype: Any) -> None:
    """Raises ConfigError where the full replay buffer, and its copy while a checkpoint is written,
    would not fit the memory that this process may use; one on disk need not."""
    if config.replay.storage == "disk":
        return
    need = 2 * ReplayBuffer.bytes_needed(
        config.replay.capacity, observation_size, action_size, 1 if dtype == np.uint8 else 4
    )
    have = 0.9 * memory_limit()
    if need > have:
        fits = int(config.replay.capacity * have / need)
        raise ConfigError(
            f"replay.capacity: {config.replay.capacity} transitions take {need / 2**30:.1f} GiB, "
            f"the copy of a checkpoint included, and {have / 2**30:.1f} GiB can be used here; at "
            f"most {fits} fit, or use --replay.storage disk"
        )


def memory_limit() -> int:
    """Bytes that this process may use: the machine's, what its control groups allow, and what is
    left of its own address space."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):
        own, root = CGROUPS
        for line in own.read_text().splitlines():
            _, kind, group = line.split(":", 2)
            if kind in ("", "memory"):  # version 2, and 1
                place = Path(f"{root / kind}{group}")
                for file in [
                    directory / CGROUP_FILES[kind] for directory in (place, *place.parents)
                ]:
                    with suppress(OSError, ValueError):  # none there, or "max"
                        limits.append(int(file.read_text()))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        with suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limits.append(max(0, address_space - pages * os.sysconf("SC_PAGE_SIZE")))
    return min(limits)


def refuse_other_changes(old: Config, new: Config) -> None:
    """Raises ConfigError where a resumed run differs in more than CHANGEABLE."""
    both = [(name, attrgetter(name)) for name in fields() if name not in CHANGEABLE]
    other = [name for name, value in both if value(old) != value(new)]
    if other:
        raise ConfigError(
            f"{', '.join(other)}: cannot change when a run is resumed; start a new run instead "
            f"(a resumed run may change {', '.join(CHANGEABLE)})"
        )


def auto_threads() -> int:
    """One: at these sizes a second brings little, and on a machine with other work the two wait for
    each other at every product."""
    return 1


def peak_megabytes(process: int | str = "self") -> float:
    """Peak resident memory of a process. On Linux `getrusage` counts that of the parent too, from
    which a process is forked."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return usage / (2**20 if sys.platform == "darwin" else 2**10)
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(peak[1]) / 2**10 if peak else 0.0  # one that has ended has no memory


def provenance() -> dict[str, Any]:
    """The commit of this code, whether it was changed since, and versions of what computes."""
    root = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str | None:
        try:
            run = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    changes = git("status", "--porcelain", "--untracked-files=no")
    packages = ("torch", "gymnasium", "spikingjelly", "numpy")
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def agent_card(
    config: Config, step: int, updates: int, parameters: int, final: dict[str, Any]
) -> str:
    """README.md of an agent directory: what it is, how it was made and, where known, what it
    scores."""
    lines = [
        f"# {config.env}, {config.actor_name} actor",
        "",
        f"An agent of the algorithm {config.algorithm}, trained by sansac: seed {config.seed},",
        f"{step:,} environment steps, {updates:,} updates; {parameters:,} parameters.",
        "`agent.pt` holds them and the observation normaliser, `config.yaml` everything else:",
        "`train --config` on it trains another.",
        "",
        '    python runner.py evaluate "<this directory>"',
    ]
    if final:
        about = {key: final.get(key) for key in ("episodes", "seed", "commit", "machine")}
        lines += ["", "| final evaluation, deterministic | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in (summary(final) | about).items()]
        lines += ["", "Every return, and the versions, are in `evaluation.json`."]
    return "\n".join(lines) + "\n"
