"""Every knob of sansac: typed, bounded, documented.

Precedence: defaults < preset of the environment < preset of the algorithm < `--config FILE` <
flags.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from sansac.schedules import Schedule, Scheduled, bounded, initial

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DEPTH = 50  # of nested lists and mappings in a file
SPACE = "tune"  # the section of a preset that is a search space and no part of a configuration
QUIET = {"video": False, "wandb": "disabled"}  # what trials of a search are, unless told otherwise
# Set while flags are still to be laid over: fields may contradict each other until then.
_incomplete = ContextVar("incomplete", default=False)

# A number or a word: tyro shows both, pydantic keeps whichever was given.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Above0 = Annotated[Scheduled, bounded(above=0)]  # a number above 0, or a schedule of such
AtLeast0 = Annotated[Scheduled, bounded(least=0)]


def _strict_int(value: Any) -> Any:
    if isinstance(value, (bool, float)):
        raise ValueError(f"expected a whole number, found {value!r}")
    return value


Int = Annotated[int, BeforeValidator(_strict_int)]


def _key_values(words: list[str]) -> dict[str, Any]:
    """`["continuous=True", "gravity=-9"]` -> `{"continuous": True, "gravity": -9}`."""
    pairs = [word.partition("=") for word in words]
    for key, equals, _ in pairs:
        if not (key and equals):
            raise ValueError(f"expected KEY=VALUE, found {key!r}")
    try:
        return {key: plain_yaml(value) for key, _, value in pairs}
    except ValueError as error:
        raise ValueError(f"a value is not valid YAML: {error}") from None


KeyValues = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="KEY=VALUE...",
        instance_from_str=_key_values,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [f"{k}={v}" for k, v in value.items()],
    ),
]


class ConfigError(Exception):
    """A configuration that cannot be: says what was wrong, what was expected and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self))) from None


class Learning(Section):
    """What every off-policy algorithm shares."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount factor a step."""
    tau: Annotated[float, Field(ge=0, le=1)] = 0.005
    """Polyak factor: target <- (1 - tau) target + tau online."""
    batch_size: Annotated[Int, Field(ge=1)] = 256
    """Transitions in a minibatch."""
    learning_starts: Annotated[Int, Field(ge=0)] = 5_000
    """Environment steps of uniformly random actions before the first update."""
    update_to_data: Above0 = 1.0
    """Updates an environment step; holds for any number of environments, fractions included."""
    policy_delay: Annotated[Int, Field(ge=1)] = 1
    """Updates of the critics for one of everything that follows them: actor and temperature (TD3
    its targets too)."""
    n_step: Annotated[Int, Field(ge=1, le=100)] = 1
    """Rewards summed before the target bootstraps."""
    rate_factor: Above0 = 1.0
    """Factor on all learning rates: linear:1:0.1:0.6..1 lets them fall to a tenth over the last
    0.4 of training."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Adam's decays of the gradient and of its square."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of matrix products in updates. bfloat16: their factors are rounded to it and summed in
    float32, where the processor can (AMX, AVX-512 BF16; TF32 on a GPU); acting stays float32."""
    cuda_graph: bool = False
    """Record the update as a CUDA graph, which launches as one. Needs --device cuda."""


class Sac(Section):
    """What SAC and its kin alone have (Haarnoja et al. 2018, arXiv:1812.05905)."""

    temperature: Literal["auto"] | AtLeast0 = "auto"
    """Entropy temperature alpha: learned ("auto"), fixed at a number, or on a schedule."""
    initial_temperature: Positive = 1.0
    """Where a learned temperature starts."""
    target_entropy: Literal["auto"] | Number = "auto"
    """Entropy (nats) that a learned temperature aims at; "auto" is -|A|."""
    learning_rate: Positive = 3e-4
    """Adam's step for the temperature."""


class Td3(Section):
    """What TD3 and DDPG alone have (Fujimoto et al. 2018, arXiv:1802.09477)."""

    smoothing: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.2
    """Standard deviation of the noise on the target's action; 0: none."""
    smoothing_clip: Positive = 0.5
    """Where that noise is clipped."""
    target_actor: Literal["copy", "proxy"] = "copy"
    """copy: a slow copy of the actor; proxy: a dense network fitted to the actor, whose output
    moves smoothly where that of a slow copy of a spiking one jumps (Xu et al. 2025)."""
    proxy_updates: Annotated[Int, Field(ge=1)] = 3
    """Steps that fit the proxy at each update of the actor."""
    proxy_learning_rate: Positive = 1e-3
    """Adam's step for the proxy."""


class Exploration(Section):
    """Noise on actions while training. SAC and its kin draw from their policy."""

    noise: AtLeast0 = 0.1
    """Standard deviation on actions in -1..1 (TD3, DDPG)."""
    kind: Literal["gaussian", "ou"] = "gaussian"
    """gaussian: drawn anew every step; ou: an Ornstein-Uhlenbeck process over an episode."""
    reversion: Annotated[float, Field(gt=0, le=1)] = 0.15
    """Share of its distance from 0 that the process `ou` goes back a step."""
    gsde: bool = False
    """Generalised state-dependent exploration (Raffin et al. 2022, arXiv:2005.05719): noise is
    linear in the actor's features, with one matrix held for several steps (SAC and its kin)."""
    gsde_steps: Annotated[Int, Field(ge=1)] = 8
    """Steps for which that matrix is held."""


Widths = Annotated[tuple[Annotated[Int, Field(ge=1)], ...], Field(min_length=1)]


class Actor(Section):
    """The policy network, dense or spiking."""

    hidden: Widths = (256, 256)
    """Units of each hidden layer."""
    learning_rate: Positive = 3e-4
    """Adam's step for the actor."""
    layer_norm: bool = False
    """LayerNorm before each activation or neuron (does not fold into weights)."""
    batch_norm: bool = False
    """BatchNorm before each activation or neuron: batch statistics in the actor's loss, running
    ones everywhere else; folds into the weights."""
    batch_norm_momentum: Literal["kalman"] | Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of a batch's statistics that enters the running ones; "kalman" weighs it by how far
    the batch can be trusted (CaRe-BN)."""
    reestimate_every: Annotated[Int, Field(ge=0)] = 0
    """Updates between re-estimations of BatchNorm's running statistics from replay (CaRe-BN);
    0: never."""
    levels: Annotated[Int, Field(ge=0)] = 0
    """Values that a dense actor's activations take, evenly from 0 to 1, rounded with a
    straight-through gradient: T + 1 of them are the rates of T time steps; 0: ReLU."""
    average: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the current weights that enters, each update, the average that is evaluated and
    saved as the policy; 1 evaluates the current weights."""


class Critic(Section):
    """The action-value networks, always dense."""

    hidden: Widths = (256, 256)
    """Units of each hidden layer."""
    learning_rate: Positive = 3e-4
    """Adam's step for the critics."""
    copies: Annotated[Int, Field(ge=1, le=64)] = 2
    """Networks, of which the target takes the minimum (DDPG has 1, REDQ 10)."""
    subset: Annotated[Int, Field(ge=0)] = 0
    """Networks drawn anew for every target, which takes their minimum, while the actor follows the
    mean of all (REDQ, Chen et al. 2021); 0: all, and the actor follows the minimum."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of units dropped after each product; the actor follows the mean (DroQ, Hiraoka et al.
    2022)."""
    batch_norm: bool = False
    """Batch renormalisation over current and next pairs together, without a target network
    (CrossQ, Bhatt et al. 2024)."""
    batch_norm_warmup: Annotated[Int, Field(ge=0)] = 100_000
    """Updates that normalise by the batch alone, before running statistics take part."""
    layer_norm: bool = False
    """LayerNorm before each activation, of the value network too where there is one (SAC-V)."""
    quantiles: Annotated[Int, Field(ge=1, le=200)] = 1
    """Quantiles a critic predicts (TQC, Kuznetsov et al. 2020); 1 is plain SAC: the mean."""
    drop: Annotated[Int, Field(ge=0)] = 4
    """Largest of the pooled quantiles of all critics left out of the target (quantiles > 1)."""


ALGORITHM_NAMES = ["sac", "sac-v", "td3", "ddpg", "tqc", "crossq", "droq", "redq"]
DETERMINISTIC = ("td3", "ddpg")  # no policy that has a likelihood


def _known_algorithm(name: str) -> str:
    if name not in ALGORITHM_NAMES:
        raise ValueError(
            f"expected one of {', '.join(ALGORITHM_NAMES)}, or one of your own after "
            f"sansac.family.register_algorithm, found {name!r}"
        )
    return name


NEURON_NAMES = ["lif", "plif", "cuba", "clif", "alif"]  # `spiking.register_neuron` adds to them


def _known_neuron(name: str) -> str:
    if name not in NEURON_NAMES:
        raise ValueError(
            f"expected one of {', '.join(NEURON_NAMES)}, or one of your own after "
            f"sansac.spiking.register_neuron, found {name!r}"
        )
    return name


class Spiking(Section):
    """The spiking actor: encoder -> LIF layers -> decoder."""

    time_steps: Annotated[Int, Field(ge=1, le=64)] = 2
    """Simulation steps T a control step; 1 is a binary-activation network."""
    encoder: Literal["current", "population", "population-current", "poisson"] = "current"
    """current: the observation drives layer 1 as analogue current; population: learned Gaussian
    receptive fields that emit deterministic spikes (PopSAN); population-current: the fields'
    activations as current (MDC-SAN); poisson: the fields' activations as spike probabilities."""
    neuron: Annotated[str, AfterValidator(_known_neuron)] = "lif"
    """lif, plif (learned tau), cuba (current-based), clif (complementary): SpikingJelly's LIFNode,
    ParametricLIFNode, CUBALIFNode and ComplementaryLIFNode; alif: LIF with an adaptive threshold;
    or one of your own (docs/spiking.md)."""
    decoder: Literal["rate", "membrane", "population"] = "rate"
    """rate: linear read-out of mean spikes; membrane: linear into non-spiking integrators;
    population: a spiking output population, read out a group an action (PopSAN)."""
    log_std: Literal["shared", "linear", "mlp"] = "shared"
    """Head of the log standard deviation: linear on the spiking features, one linear layer on the
    observation, or a network of its own."""
    log_std_learning_rate: Positive | None = None
    """Adam's step for a `linear` or `mlp` head; none: the actor's."""
    surrogate: Literal["rectangle", "triangle", "atan", "sigmoid", "fast_sigmoid"] = "rectangle"
    """Shape of the surrogate gradient of the spike."""
    surrogate_width: Above0 = 1.0
    """Width of the surrogate in volts, or its schedule (linear:3:1:0..0.5); its area stays 1
    (`fast_sigmoid`, SpikingJelly's SuperSpike, has a width of its own: here this divides its
    height)."""
    v_threshold: Positive = 0.5
    """Voltage (V) at which a neuron fires."""
    learn_threshold: bool = False
    """Whether each layer learns its own threshold, from `v_threshold` on."""
    tau: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 4.0 / 3.0
    """Membrane time constant, in simulation steps; where `plif` starts. `cuba` has its decays."""
    decay_input: bool = False
    """Whether the membrane's leak divides the input current of `lif` and `plif` too."""
    adaptation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """How far (V) lasting firing raises the threshold of `alif`."""
    adaptation_decay: Annotated[float, Field(ge=0, lt=1)] = 0.8
    """Share of that rise that `alif` keeps a step."""
    current_decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the synaptic current that `cuba` keeps a step."""
    voltage_decay: Annotated[float, Field(ge=0, lt=1)] = 0.75
    """Share of the voltage that `cuba` keeps a step."""
    detach_reset: bool = False
    """Whether the reset is left out of the gradient (`clif` has it always there)."""
    input_population: Annotated[Int, Field(ge=1)] = 10
    """Receptive fields an observation entry (all encoders but `current`)."""
    input_range: Positive = 3.0
    """Fields are centred evenly on [-range, range], in standard deviations of the observation."""
    input_std: Positive = 0.15**0.5
    """Initial width of a field, in the same unit."""
    output_population: Annotated[Int, Field(ge=1)] = 10
    """Spiking output neurons an action entry (decoder `population`)."""
    output_connections: bool = False
    """Connections among an action's output neurons, one step delayed (ILC-SAN)."""
    membrane: Literal["last", "mean", "max"] = "last"
    """Which voltage of its integrators the `membrane` decoder reads."""
    membrane_tau: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """Time constant of those integrators, in simulation steps."""
    charge_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Standard deviation of noise on currents in training and exploration (NoisySAN)."""
    transmission_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Standard deviation of noise on spikes in training and exploration (NoisySAN)."""
    firing_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight, in the actor's loss, of firing above `target_rate`; 0: none."""
    target_rate: Fraction = 0.1
    """Rate (spikes a neuron a step) up to which firing costs nothing."""
    backend: Literal["auto", "cupy", "native", "torch", "spikingjelly"] = "auto"
    """What computes the neurons: fused CuPy or compiled C kernels, plain torch, or SpikingJelly."""


class Replay(Section):
    """The replay buffer."""

    capacity: Annotated[Int, Field(ge=1)] = 300_000
    """Transitions kept; the oldest are overwritten."""
    sampler: Literal["uniform", "proportional", "rank"] = "uniform"
    """uniform, or prioritised by the TD error (Schaul et al. 2016): proportional to it, or to one
    over its rank."""
    exponent: Fraction = 0.6
    """How far priorities matter: 0 is uniform, 1 in full."""
    correction: Annotated[Scheduled, bounded(least=0, most=1)] = Schedule("linear", 0.4, 1.0)
    """Exponent beta of the importance weights that undo the bias of priorities; 1 undoes all."""
    ratio: Fraction = 0.0
    """Share of the likelihood ratio in a priority |TD error|^(1 - ratio) min(1, pi / mu)^ratio,
    where mu is the policy that acted (SAC and its kin)."""
    hindsight: Literal["none", "future", "final", "episode"] = "none"
    """Goals put in hindsight (HER, Andrychowicz et al. 2017), on goal-conditioned environments: one
    reached later in the episode, at its end, or anywhere in it."""
    original: Fraction = 0.2
    """Share of transitions that keep the goal they were collected with."""
    retention: Literal["fifo", "window", "ess"] = "fifo"
    """What is drawn from: all that is kept; the newest `window`; or as many of the newest as keep
    the effective sample size, under the likelihood ratio pi / mu, at `least_ess` (SAC and its
    kin)."""
    window: Annotated[Int, Field(ge=1)] = 100_000
    """Newest transitions drawn from (retention window)."""
    least_ess: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Effective sample size, as a share of the transitions, that retention `ess` keeps to."""
    storage: Literal["memory", "disk"] = "memory"
    """Where transitions lie: in memory, or in files of the run directory mapped into it, for
    buffers that do not fit."""


class Adaptive(Section):
    """A controller that holds the effective sample size of minibatches, under the likelihood ratio
    pi / mu of the policy now and the one that acted, at a target (SAC and its kin)."""

    moves: Literal["nothing", "batch_size", "update_to_data"] = "nothing"
    """What it moves: where the policy has left the data behind, batches grow or updates become
    fewer."""
    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Effective sample size, as a share of the batch, that it holds."""
    low: Positive = 0.25
    """Least that it moves to."""
    high: Positive = 4.0
    """Most that it moves to."""
    every: Annotated[Int, Field(ge=1)] = 100
    """Updates between its moves, by a factor of at most 1.25."""


class Config(Section):
    """Train an off-policy actor-critic agent whose actor is dense or spiking."""

    algorithm: Annotated[str, AfterValidator(_known_algorithm)] = "sac"
    """sac, sac-v (with a value network), td3, ddpg, tqc, crossq, droq or redq, each with its preset
    in configs/; or one of your own (docs/architecture.md)."""

    env: Annotated[str, Field(min_length=1)] = "BipedalWalker-v3"
    """Gymnasium environment id."""
    env_kwargs: KeyValues = Field(default_factory=dict)
    """Arguments of the environment, such as continuous=True."""
    san: bool = False
    """Spiking actor network; off is the dense actor."""
    seed: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    """Seed of every random stream of the run."""
    total_steps: Annotated[Int, Field(ge=1)] = 150_000
    """Environment steps to train for, over all environments together."""
    num_envs: Annotated[Int, Field(ge=1, le=1024)] = 8
    """Environments stepped side by side."""
    async_envs: bool = False
    """Each environment in a process of its own (for environments that are slow to step)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where networks and replay live; auto takes CUDA where there is a GPU."""
    threads: Literal["auto"] | Annotated[Int, Field(ge=1, le=256)] = "auto"
    """CPU threads for torch; stored with the run, since sums differ between thread counts."""
    normalize_observations: bool = True
    """Scale observations by running mean and standard deviation of the training rollouts."""
    observation_clip: Positive = 10.0
    """Normalised observations are clipped to [-clip, clip]."""

    learning: Learning = Field(default_factory=Learning)
    sac: Sac = Field(default_factory=Sac)
    td3: Td3 = Field(default_factory=Td3)
    exploration: Exploration = Field(default_factory=Exploration)
    actor: Actor = Field(default_factory=Actor)
    critic: Critic = Field(default_factory=Critic)
    spiking: Spiking = Field(default_factory=Spiking)
    replay: Replay = Field(default_factory=Replay)
    adaptive: Adaptive = Field(default_factory=Adaptive)

    log_every: Annotated[Int, Field(ge=1)] = 500
    """Environment steps between rows of training metrics."""
    eval_every: Annotated[Int, Field(ge=0)] = 10_000
    """Environment steps between evaluations; 0: only at the end."""
    eval_episodes: Annotated[Int, Field(ge=1)] = 10
    """Episodes an evaluation."""
    final_episodes: Annotated[Int, Field(ge=1)] = 100
    """Episodes of the evaluation that ends the run."""
    checkpoint_every: Annotated[Int, Field(ge=1)] = 10_000
    """Environment steps between checkpoints."""
    stop_at_return: Literal["threshold"] | Number | None = None
    """Stop once an evaluation's mean return reaches this; "threshold" is the environment's own."""
    patience: Annotated[Int, Field(ge=1)] | None = None
    """Stop after this many evaluations without a new best mean return; none: never."""
    keep_best: Annotated[Int, Field(ge=1)] = 1
    """Best policies kept in checkpoints/: best.pt, and best-<step>.pt where more than one."""
    keep_every: Annotated[Int, Field(ge=0)] = 0
    """Environment steps between policies kept as checkpoints/step-<step>.pt; 0: none."""
    save_in_background: bool = False
    """Write checkpoints on a thread while training goes on (holds one copy more in memory)."""
    video: bool = True
    """Record an episode at the end of training."""
    runs_dir: Path = Path("runs")
    """Where run directories are made."""
    name: str | None = None
    """Name of the run directory; none: <actor>-s<seed>-<UTC time>."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto honours WANDB_MODE, else is online with an API key, else offline."""
    wandb_project: Annotated[str, Field(min_length=1)] = "sansac"
    """wandb project."""
    tensorboard: bool = False
    """Write TensorBoard events too."""

    @property
    def actor_name(self) -> str:
        return "spiking" if self.san else "dense"

    @property
    def agent_name(self) -> str:
        """The actor, and the algorithm where it is not SAC."""
        return self.actor_name if self.algorithm == "sac" else f"{self.algorithm}-{self.actor_name}"

    @model_validator(mode="after")
    def _check_contradictions(self) -> Config:
        if _incomplete.get():
            return self
        learning, replay = self.learning, self.replay
        if learning.batch_size > replay.capacity:
            raise ValueError(
                f"learning.batch_size ({learning.batch_size}) is above replay.capacity "
                f"({replay.capacity}): a minibatch could never be filled; lower the first or raise "
                "the second"
            )
        # An n-step window closes n - 1 steps late in every environment.
        least = learning.batch_size + (learning.n_step - 1) * self.num_envs
        if learning.learning_starts < least:
            raise ValueError(
                f"learning.learning_starts ({learning.learning_starts}) is below "
                f"learning.batch_size ({learning.batch_size}) + (learning.n_step - 1) x num_envs = "
                f"{least}: the first update would lack transitions; raise the first or lower the "
                "others"
            )
        if replay.capacity < learning.n_step * self.num_envs:
            raise ValueError(
                f"replay.capacity ({replay.capacity}) is below learning.n_step x num_envs "
                f"({learning.n_step} x {self.num_envs}): raise replay.capacity"
            )
        if self.actor.layer_norm and self.actor.batch_norm:
            raise ValueError("actor.layer_norm and actor.batch_norm exclude each other: choose one")
        if self.actor.levels == 1 or (self.actor.levels and self.san):
            raise ValueError(
                f"actor.levels ({self.actor.levels}) quantises a dense actor's activations: "
                "expected 2 or more without --san (where spiking.time_steps does it), or 0 for ReLU"
            )
        spiking = self.spiking
        if spiking.output_connections and spiking.decoder != "population":
            raise ValueError(
                "spiking.output_connections needs the output population of "
                f"spiking.decoder 'population', found {spiking.decoder!r}"
            )
        if spiking.neuron not in ("lif", "plif", "cuba") and spiking.backend in ("cupy", "native"):
            raise ValueError(
                f"spiking.backend {spiking.backend!r} has no kernel of spiking.neuron "
                f"{spiking.neuron!r}; use auto"
            )
        if learning.cuda_graph and self.adaptive.moves == "batch_size":
            raise ValueError("learning.cuda_graph records batches of one size: adaptive.moves "
                             "batch_size excludes it")  # fmt: skip
        if learning.cuda_graph and self.san and isinstance(spiking.surrogate_width, Schedule):
            raise ValueError("learning.cuda_graph records one spiking.surrogate_width: a schedule "
                             "of it excludes it")  # fmt: skip
        self._check_critic()
        self._check_replay()
        if self.name is not None and not slug(self.name):
            raise ValueError(f"name ({self.name!r}) has no letter or digit to name a directory by")
        return self

    def _check_critic(self) -> None:
        critic, name = self.critic, self.algorithm
        if critic.quantiles > 1 and critic.drop >= critic.copies * critic.quantiles:
            raise ValueError(
                f"critic.drop ({critic.drop}) would leave none of the {critic.copies} x "
                f"{critic.quantiles} quantiles: it must be below "
                f"{critic.copies * critic.quantiles}"
            )
        if critic.subset > critic.copies:
            raise ValueError(f"critic.subset ({critic.subset}) is above critic.copies "
                             f"({critic.copies})")  # fmt: skip
        kinds = {
            "critic.quantiles": critic.quantiles > 1, "critic.subset": critic.subset > 0,
            "critic.dropout": critic.dropout > 0, "critic.batch_norm": critic.batch_norm,
        }  # fmt: skip
        chosen = [option for option, on in kinds.items() if on]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} exclude each other: choose one critic")
        if critic.batch_norm and critic.layer_norm:
            raise ValueError("critic.layer_norm and critic.batch_norm exclude each other")
        if name == "sac-v" and critic.quantiles > 1:
            raise ValueError(f"critic.quantiles ({critic.quantiles}) is above 1, but sac-v has a "
                             "target of one value: choose 1 or another algorithm")  # fmt: skip
        papers = {"tqc": "critic.quantiles", "redq": "critic.subset", "droq": "critic.dropout",
                  "crossq": "critic.batch_norm"}  # fmt: skip
        if (needed := papers.get(name)) and not kinds[needed]:
            raise ValueError(
                f"algorithm {name!r} is SAC with another {needed}, found none: use its preset "
                f"(Config.for_env, or --algorithm {name})"
            )
        if name == "ddpg" and critic.copies != 1:
            raise ValueError(f"algorithm 'ddpg' has one critic, found critic.copies "
                             f"{critic.copies}: use its preset, or td3")  # fmt: skip
        if critic.batch_norm and name in (*DETERMINISTIC, "sac-v"):
            raise ValueError(f"critic.batch_norm does without the target network that {name!r} has")

    def _check_replay(self) -> None:
        replay, adaptive = self.replay, self.adaptive
        needs = {
            "replay.ratio": replay.ratio > 0, "replay.retention ess": replay.retention == "ess",
            "adaptive.moves": adaptive.moves != "nothing",
            "exploration.gsde": self.exploration.gsde,
        }  # fmt: skip
        stochastic = [option for option, on in needs.items() if on]
        if stochastic and self.algorithm in DETERMINISTIC:
            raise ValueError(f"{stochastic[0]} needs a policy with a likelihood, which "
                             f"{self.algorithm!r} has not")  # fmt: skip
        if self.exploration.gsde and self.san and self.spiking.log_std != "shared":
            raise ValueError(
                "exploration.gsde has a log-std head of its own on the features: set "
                f"spiking.log_std to shared, found {self.spiking.log_std!r}"
            )
        if replay.ratio > 0 and replay.sampler == "uniform":
            raise ValueError("replay.ratio is part of a priority: choose replay.sampler "
                             "proportional or rank")  # fmt: skip
        if replay.sampler != "uniform":
            for option, on in (("retention", replay.retention != "fifo"),
                               ("hindsight", replay.hindsight != "none"),
                               ("storage disk", replay.storage == "disk")):  # fmt: skip
                if on:
                    raise ValueError(f"replay.{option} draws uniformly: set replay.sampler uniform")
        if replay.hindsight != "none" and self.learning.n_step > 1:
            raise ValueError(
                f"replay.hindsight relabels single rewards: set learning.n_step to 1, found "
                f"{self.learning.n_step}"
            )
        if replay.hindsight != "none" and self.keeps_likelihood():
            raise ValueError("replay.hindsight changes what was acted on: it excludes "
                             "retention ess and adaptive.moves")  # fmt: skip
        if replay.retention == "window" and replay.window < self.learning.batch_size:
            raise ValueError(f"replay.window ({replay.window}) is below learning.batch_size "
                             f"({self.learning.batch_size})")  # fmt: skip
        if adaptive.moves != "nothing" and adaptive.low >= adaptive.high:
            raise ValueError(f"adaptive.low ({adaptive.low}) must be below adaptive.high "
                             f"({adaptive.high})")  # fmt: skip
        if adaptive.moves == "batch_size" and not (
            1 <= adaptive.low <= self.learning.batch_size <= adaptive.high
        ):
            raise ValueError(
                f"adaptive.low..high ({adaptive.low:g}..{adaptive.high:g}) are bounds of "
                f"learning.batch_size ({self.learning.batch_size}): it must lie between them"
            )
        if adaptive.moves == "update_to_data" and not (
            adaptive.low <= initial(self.learning.update_to_data) <= adaptive.high
        ):
            raise ValueError(
                f"adaptive.low..high ({adaptive.low:g}..{adaptive.high:g}) are bounds of "
                f"learning.update_to_data ({self.learning.update_to_data}): it must lie between "
                "them"
            )
        if adaptive.moves == "update_to_data" and isinstance(
            self.learning.update_to_data, Schedule
        ):
            raise ValueError("learning.update_to_data has a schedule and adaptive.moves would move "
                             "it: choose one")  # fmt: skip

    def keeps_likelihood(self) -> bool:
        """Whether the buffer stores how likely the acting policy found its action."""
        ratio, ess = self.replay.ratio > 0, self.replay.retention == "ess"
        return ratio or ess or self.adaptive.moves != "nothing"

    @classmethod
    def for_env(cls, env: str, **overrides: Any) -> Config:
        """The defaults, and over them the presets of the task and of the algorithm, `overrides`.

        Overrides are fields (`seed=1`) and, for sections, mappings or section objects, of which
        the fields that were set count (`learning={"gamma": 0.98}`).
        """
        layer = merge({"env": env}, overrides)
        return resolve(presets_for(layer), layer)

    def dump(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and mappings: what `config.yaml` holds."""
        return self.model_dump(mode="json")


def slug(text: str) -> str:
    """Letters, digits, `.`, `_` and `-` of a text, safe as one directory name."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


def preset_for(env: str) -> dict[str, Any]:
    """The preset of an environment, `configs/<id without namespace and version>.yaml`, or {}.

    Raises ConfigError where the presets are missing altogether.
    """
    if not CONFIGS.is_dir():
        raise ConfigError(f"no presets in {CONFIGS}: install with `pip install -e .` from a clone")
    task = re.sub(r"-v\d+$", "", env.rsplit("/", 1)[-1]).lower()
    path = CONFIGS / f"{slug(task)}.yaml"
    return load_yaml(path) if os.path.isfile(path) else {}  # no file where an id is no name


def presets_for(layer: dict[str, Any]) -> dict[str, Any]:
    """What a layer is laid over: the preset of its environment and, over that, of its algorithm,
    `configs/<algorithm>.yaml`."""
    preset = preset_for(str(layer.get("env", Config.model_fields["env"].default)))
    algorithm = str(layer.get("algorithm", preset.get("algorithm", "sac"))).replace("-", "_")
    path = CONFIGS / f"{slug(algorithm)}.yaml"
    return merge(preset, load_yaml(path)) if os.path.isfile(path) else preset


def load_yaml(path: Path) -> dict[str, Any]:
    """One preset, by its path or by its name in configs/, or a `config.yaml`, as a mapping; its
    search space, if it has one, is left out.

    Raises ConfigError naming the file.
    """
    content = read_yaml(path)
    content.pop(SPACE, None)
    try:
        partial(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return content


def load_space(path: Path) -> dict[str, Any]:
    """The search space of a preset, its section `tune`, unchecked; {} where it has none."""
    space = read_yaml(path).get(SPACE) or {}
    if not isinstance(space, dict):
        raise ConfigError(f"{path}: {SPACE} must hold `option: range` lines, found {space!r:.60}")
    return space


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file, by its path or by its name in configs/. Raises ConfigError."""
    if not path.exists() and len(path.parts) == 1 and not path.suffix:
        path = CONFIGS / f"{path}.yaml"
    try:
        content = plain_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, found {content!r:.60}")
    return content


class PlainLoader(yaml.SafeLoader):
    """YAML without aliases, of which a short text stands for more than any memory holds, not nested
    beyond what a configuration needs, whose keys are names. Raises ValueError."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*name): write out what it stands for")
        if self.depth >= DEPTH:
            raise ValueError(f"it is nested more than {DEPTH} deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        for key in mapping:
            if not isinstance(key, str):
                raise ValueError(f"expected `key: value` with names as keys, found {key!r}")
        return mapping


def plain_yaml(text: str) -> Any:
    """Numbers, strings, lists and mappings. Raises ValueError for anything else."""
    try:
        return yaml.load(text, PlainLoader)
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Later layers over earlier ones, section by section."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, BaseModel):
                value = value.model_dump(exclude_unset=True)
            old = merged.get(key)
            both = isinstance(old, dict) and isinstance(value, dict) and key != "env_kwargs"
            merged[key] = merge(old or {}, value) if both else value
    return merged


def resolve(*layers: dict[str, Any]) -> Config:
    """A validated Config of the layers, later over earlier. Raises ConfigError."""
    return Config(**merge(*layers))


def partial(layer: dict[str, Any]) -> Config:
    """A Config whose fields may still contradict each other, for flags to be laid over."""
    with incomplete():
        return Config(**layer)


@contextmanager
def incomplete() -> Iterator[None]:
    """Configurations made inside may contradict themselves, each of their fields may not."""
    token = _incomplete.set(True)
    try:
        yield
    finally:
        _incomplete.reset(token)


def fields(section: type[Section] = Config, prefix: str = "") -> dict[str, type[Section]]:
    """Dotted name of every field, with the section that owns it."""
    names: dict[str, type[Section]] = {}
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            names |= fields(annotation, f"{prefix}{name}.")
        else:
            names[prefix + name] = section
    return names


def explain(error: ValidationError, section: type[Section]) -> str:
    """pydantic's findings as one line each, unknown keys with the nearest right one."""
    known = fields()
    prefix = next(name.rpartition(".")[0] for name, owner in known.items() if owner is section)
    lines = []
    for finding in error.errors():
        path = ".".join([prefix, *map(str, finding["loc"])] if prefix else map(str, finding["loc"]))
        # A union reports each of its members under a tag of its own; the field is what users know.
        owners = [name for name in known if path == name or path.startswith(name + ".")]
        name = owners[0] if owners else path
        if finding["type"] == "extra_forbidden":
            sections = {option.rpartition(".")[0] for option in known} - {""}
            lines.append(f"unknown option `{path}`" + nearest(path, [*known, *sections]))
        elif finding["type"] == "value_error":
            lines.append((f"{name}: " if name else "") + str(finding["ctx"]["error"]))
        else:
            lines.append(f"{name}: {finding['msg'].lower()}, found {finding['input']!r}")
    return "\n".join(dict.fromkeys(lines))


def nearest(path: str, known: list[str]) -> str:
    """A hint at the right name of an unknown option, its section included."""
    tails = {name.rpartition(".")[2]: name for name in known}
    tail = path.rpartition(".")[2]
    close = [tails[tail]] if tail in tails else difflib.get_close_matches(path, known, 1)
    close += [tails[t] for t in difflib.get_close_matches(tail, tails, 1)]
    return f"; did you mean `{close[0]}`?" if close else ""
