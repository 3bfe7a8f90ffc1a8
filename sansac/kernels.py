"""Fused multi-step spiking neurons: stateless functions with their backward through time.

A current x of shape [T, ..., N], or [..., N] where it is constant over the T simulation steps, goes
in; spikes [T, ..., N], their mean over time [..., N] or the voltages H [T, ..., N] come out. Every
call starts at rest: V = v_reset, I = 0. One step is

    LIF                  H = V + (x - (V - v_reset)) / tau       with decay_input
                         H = V - (V - v_reset) / tau + x         without
    parametric LIF       the same, with a learned 1 / tau = sigmoid(w) as a factor
    current-based LIF    I = c_decay I + x,  H = v_decay V + I
    then, for all        spike = 1 where H >= v_threshold, else 0 (and 0 where H is NaN)
                         V = v_reset spike + (1 - spike) H       hard reset

in the order of operations of SpikingJelly's reference (Fang et al. 2023, Science Advances 9), so
that spikes equal its spikes to the bit. Parametric LIF is from Fang et al. 2021 (arXiv:2007.05785),
current-based LIF is PopSAN's neuron (Tang et al. 2020, arXiv:2010.09635). A surrogate stands in for
the derivative of a spike; with `detach_reset` no gradient takes the way through the reset.

Backends, all with the same results:

    native          kernels.c, built once by the system's C compiler: on a CPU
    cupy            kernels.c, built by NVRTC through CuPy: on CUDA, captured by CUDA graphs too
                    if `backend_for` and one call came before the capture
    torch           a plain loop over time
    spikingjelly    SpikingJelly's own functions

State is float32 for a current of float32 or lower precision, else float64; the fused kernels take
float32 and bfloat16 and leave other types to the loop. Under `torch.compile` pass a backend that
`backend_for` gave, not "auto".
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Backend = Literal["auto", "cupy", "native", "torch", "spikingjelly"]
Output = Literal["spikes", "mean", "voltages"]
Precision = Literal["float32", "bfloat16"]

SOURCE = Path(__file__).with_name("kernels.c")
OUTPUTS: tuple[Output, ...] = ("spikes", "mean", "voltages")  # in the order of kernels.c
# Neuron steps that one thread does alone: waking a second one costs microseconds.
SERIAL_LIMIT = 32768


class Surrogate(NamedTuple):
    """The derivative that stands in for a spike's, at u = H - v_threshold.

    A larger alpha is narrower and taller; the area is about 1.
    """

    spikingjelly: str  # its name there, with the same alpha
    scale: Callable[[float], float]  # the constant that kernels.c needs beside alpha
    derivative: Callable[[Tensor, float], Tensor]


def _sigmoid_derivative(u: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(alpha * u)
    return (1 - s) * s * alpha


# In the order of kernels.c.
SURROGATES = {
    "rectangle": Surrogate(
        "Rect", lambda alpha: 0.5 / alpha, lambda u, alpha: alpha * (u.abs() < 0.5 / alpha).to(u)
    ),
    "triangle": Surrogate(
        "PiecewiseQuadratic",
        lambda alpha: alpha * alpha,
        lambda u, alpha: (alpha - alpha * alpha * u.abs()).clamp_min(0),
    ),
    "atan": Surrogate(
        "ATan",
        lambda alpha: math.pi / 2 * alpha,
        lambda u, alpha: (alpha / 2) / (1 + (u * (math.pi / 2 * alpha)).square()),
    ),
    "sigmoid": Surrogate("Sigmoid", lambda alpha: alpha, _sigmoid_derivative),
    "fast_sigmoid": Surrogate(
        "SuperSpike", lambda alpha: alpha, lambda u, alpha: alpha / (1 + u.abs()).square()
    ),
}


class Neuron(NamedTuple):
    """All that a call computes with, but for its tensors."""

    time_steps: int
    constant: bool  # the current does not depend on time
    output: str
    current_based: bool
    decay_input: bool
    detach_reset: bool
    decay: float  # tau, or v_decay where current-based
    current_decay: float
    v_threshold: float
    v_reset: float
    surrogate: str
    alpha: float


# ---- the neurons ---------------------------------------------------------------------------------


def lif(
    current: Tensor,
    *,
    time_steps: int,
    tau: float,
    decay_input: bool,
    v_threshold: float | Tensor,
    v_reset: float,
    surrogate: str,
    alpha: float,
    detach_reset: bool,
    backend: str,
    constant: bool = False,
    output: Output = "spikes",
) -> Tensor:
    """Leaky integrate-and-fire, SpikingJelly's `LIFNode`.

    `current` is [T, ..., N], or [..., N] if `constant`; the result is [T, ..., N], or [..., N] for
    the mean. `v_threshold` may be a tensor of one element, which then receives a gradient.
    """
    neuron = Neuron(
        *(time_steps, constant, output, False, decay_input, detach_reset),
        *(tau, 0.0, _fixed(v_threshold), v_reset, surrogate, alpha),
    )
    return _run(current, None, v_threshold, neuron, backend)


def parametric_lif(
    current: Tensor,
    *,
    time_steps: int,
    w: Tensor,
    decay_input: bool,
    v_threshold: float | Tensor,
    v_reset: float,
    surrogate: str,
    alpha: float,
    detach_reset: bool,
    backend: str,
    constant: bool = False,
    output: Output = "spikes",
) -> Tensor:
    """LIF with a learned time constant, SpikingJelly's `ParametricLIFNode`.

    `w` has one element, 1 / tau = sigmoid(w), and receives a gradient. Shapes as for `lif`.
    """
    neuron = Neuron(
        *(time_steps, constant, output, False, decay_input, detach_reset),
        *(1.0, 0.0, _fixed(v_threshold), v_reset, surrogate, alpha),
    )
    return _run(current, w, v_threshold, neuron, backend)


def cuba_lif(
    current: Tensor,
    *,
    time_steps: int,
    c_decay: float,
    v_decay: float,
    v_threshold: float | Tensor,
    v_reset: float,
    surrogate: str,
    alpha: float,
    detach_reset: bool,
    backend: str,
    constant: bool = False,
    output: Output = "spikes",
) -> Tensor:
    """Current-based LIF, SpikingJelly's `CUBALIFNode`. Shapes as for `lif`."""
    neuron = Neuron(
        *(time_steps, constant, output, True, False, detach_reset),
        *(v_decay, c_decay, _fixed(v_threshold), v_reset, surrogate, alpha),
    )
    return _run(current, None, v_threshold, neuron, backend)


def _fixed(v_threshold: float | Tensor) -> float:
    return 0.0 if isinstance(v_threshold, Tensor) else v_threshold


def _run(
    current: Tensor, w: Tensor | None, v_threshold: float | Tensor, neuron: Neuron, backend: str
) -> Tensor:
    if neuron.time_steps < 1 or not (neuron.constant or current.shape[0] == neuron.time_steps):
        raise ValueError(
            f"a current over time has shape [time_steps, ..., N] with time_steps >= 1, "
            f"got {tuple(current.shape)} and time_steps={neuron.time_steps}"
        )
    threshold = v_threshold if isinstance(v_threshold, Tensor) else None
    if backend == "auto":
        backend = backend_for("auto", current.device)
    if backend == "spikingjelly":
        return _spikingjelly(current, w, threshold, neuron)
    state = torch.float64 if current.dtype is torch.float64 else torch.float32
    decay = None
    if w is not None:
        w = w.reshape(()).to(current.device)
        decay = (w.float() if state is torch.float32 else w).sigmoid()
    if threshold is not None:
        threshold = threshold.reshape(()).to(current.device, state)
    if backend == "torch" or current.dtype not in (torch.float32, torch.bfloat16):
        return _torch(current.to(state), decay, threshold, neuron).to(current.dtype)
    if not (current.is_cpu if backend == "native" else backend == "cupy" and current.is_cuda):
        raise ValueError(f"backend {backend!r} cannot run on {current.device}")
    if torch.compiler.is_compiling() or type(current) not in (Tensor, torch.nn.Parameter):
        return _neuron_op(current, decay, threshold, *neuron)
    # Eager calls skip the operator, whose dispatch costs several times a small forward pass.
    if torch.is_grad_enabled():
        return _Fused.apply(current, decay, threshold, neuron)
    return _forward(current, decay, threshold, neuron)


# ---- the fused kernels, differentiable -----------------------------------------------------------


def _forward(
    current: Tensor, decay: Tensor | None, threshold: Tensor | None, neuron: Neuron
) -> Tensor:
    current = current.contiguous()
    output = current.new_empty(_output_shape(current, neuron))
    _launch("neuron_forward", neuron, current, decay, threshold, output)
    return output


def _backward(
    gradient: Tensor,
    current: Tensor,
    decay: Tensor | None,
    threshold: Tensor | None,
    neuron: Neuron,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the current, decay and threshold; of no elements where not learned."""
    current = current.contiguous()
    current_gradient = torch.empty_like(current)
    neurons = current.shape if neuron.constant else current.shape[1:]
    learned = [
        None if value is None else current.new_empty(neurons, dtype=torch.float32)
        for value in (decay, threshold)
    ]
    _launch(
        *("neuron_backward", neuron, current, decay, threshold),
        *(gradient.contiguous(), current_gradient, *learned),
    )
    sums = [gradient.new_empty(0) if values is None else values.sum() for values in learned]
    return current_gradient, sums[0], sums[1]


def _output_shape(current: Tensor, neuron: Neuron) -> tuple[int, ...]:
    if neuron.output == "mean":
        return current.shape if neuron.constant else current.shape[1:]
    return (neuron.time_steps, *current.shape) if neuron.constant else current.shape


def _gradients(ctx: Any, gradients: tuple[Tensor, ...]) -> list[Tensor | None]:
    """What autograd expects of a backward: None for what is not learned."""
    return [
        None if value is None else gradient
        for value, gradient in zip(ctx.saved_tensors, gradients, strict=True)
    ]


class _Fused(torch.autograd.Function):
    """The operators below without their dispatch."""

    @staticmethod
    def forward(
        ctx: Any,
        current: Tensor,
        decay: Tensor | None,
        threshold: Tensor | None,
        neuron: Neuron,
    ) -> Tensor:
        ctx.save_for_backward(current, decay, threshold)
        ctx.neuron = neuron
        return _forward(current, decay, threshold, neuron)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        current, decay, threshold = ctx.saved_tensors
        gradients = _backward(gradient, current, decay, threshold, ctx.neuron)
        return *_gradients(ctx, gradients), None


_TENSORS = "Tensor current, Tensor? decay, Tensor? threshold"
_CONSTANTS = (
    "int time_steps, bool constant, str output, bool current_based, bool decay_input, "
    "bool detach_reset, float decay_constant, float current_decay, float v_threshold, "
    "float v_reset, str surrogate, float alpha"
)
_neuron_op = torch.library.custom_op(
    "sansac::neuron",
    lambda current, decay, threshold, *constants: _forward(
        current, decay, threshold, Neuron(*constants)
    ),
    mutates_args=(),
    schema=f"({_TENSORS}, {_CONSTANTS}) -> Tensor",
)
_neuron_backward_op = torch.library.custom_op(
    "sansac::neuron_backward",
    lambda gradient, current, decay, threshold, *constants: _backward(
        gradient, current, decay, threshold, Neuron(*constants)
    ),
    mutates_args=(),
    schema=f"(Tensor gradient, {_TENSORS}, {_CONSTANTS}) -> (Tensor, Tensor, Tensor)",
)


@_neuron_op.register_fake
def _(current: Tensor, decay: Tensor | None, threshold: Tensor | None, *constants: Any) -> Tensor:
    return current.new_empty(_output_shape(current, Neuron(*constants)))


@_neuron_backward_op.register_fake
def _(
    gradient: Tensor,
    current: Tensor,
    decay: Tensor | None,
    threshold: Tensor | None,
    *constants: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = [
        gradient.new_empty(0) if value is None else torch.empty_like(value)
        for value in (decay, threshold)
    ]
    return torch.empty_like(current, memory_format=torch.contiguous_format), sums[0], sums[1]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.neuron = inputs[3:]


def _op_backward(ctx: Any, gradient: Tensor) -> Any:
    gradients = _neuron_backward_op(gradient, *ctx.saved_tensors, *ctx.neuron)
    return *_gradients(ctx, gradients), *(None for _ in ctx.neuron)


_neuron_op.register_autograd(_op_backward, setup_context=_save)


# ---- launching -----------------------------------------------------------------------------------


class _Parameters(ctypes.Structure):
    """`struct neuron` of kernels.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int) for name in ("time_steps", "constant", "output", "bfloat16")),
        *((name, ctypes.c_int) for name in ("current_based", "decay_input", "decay_multiplies")),
        *((name, ctypes.c_int) for name in ("detach_reset", "surrogate")),
        *((name, ctypes.c_float) for name in ("decay", "current_decay", "threshold", "reset")),
        *((name, ctypes.c_float) for name in ("alpha", "scale")),
    ]


@functools.lru_cache(maxsize=1024)
def _parameters(neuron: Neuron, dtype: torch.dtype, cuda: bool) -> Any:
    """The constants as kernels take them, by value: a structure, for CuPy as an array of one."""
    # By a power of two, division and multiplication with the reciprocal give the same bits.
    multiplies = not neuron.current_based and math.frexp(neuron.decay)[0] == 0.5
    parameters = _Parameters(
        neuron.time_steps,
        neuron.constant,
        OUTPUTS.index(neuron.output),
        dtype is torch.bfloat16,
        neuron.current_based,
        neuron.decay_input,
        multiplies,
        neuron.detach_reset,
        list(SURROGATES).index(neuron.surrogate),
        1 / neuron.decay if multiplies else neuron.decay,
        neuron.current_decay,
        neuron.v_threshold,
        neuron.v_reset,
        neuron.alpha,
        SURROGATES[neuron.surrogate].scale(neuron.alpha),
    )
    if not cuda:
        return parameters
    return np.frombuffer(bytes(parameters), dtype=np.dtype(_Parameters))


def _launch(kernel: str, neuron: Neuron, *tensors: Tensor | None) -> None:
    """Runs a kernel on contiguous tensors, the current first; None becomes a null pointer."""
    current = tensors[0]
    assert current is not None
    size = current.numel() if neuron.constant else current.numel() // neuron.time_steps
    if size == 0:
        return
    parameters = _parameters(neuron, current.dtype, current.is_cuda)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    if not current.is_cuda:
        threads = torch.get_num_threads() if size * neuron.time_steps > SERIAL_LIMIT else 1
        getattr(_found(_native()), kernel)(parameters, *pointers, size, threads)
        return
    # The backward keeps its voltages in shared memory: 48 KiB a block at most.
    block = min(128, 49152 // (4 * neuron.time_steps) // 32 * 32)
    if block == 0:
        raise ValueError(f"time_steps={neuron.time_steps}: at most 384 fit a GPU's shared memory")
    cupy, module = _found(_cupy())
    stream = torch.cuda.current_stream(current.device).cuda_stream
    with torch.cuda.device(current.device), cupy.cuda.ExternalStream(stream):
        module.get_function(kernel)(
            (-(-size // block),),
            (block,),
            (parameters, *pointers, size, 1),
            shared_mem=4 * neuron.time_steps * block if kernel == "neuron_backward" else 0,
        )


# ---- truncated quantile critics ------------------------------------------------------------------


def quantile_huber(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Quantile Huber loss a sample, [B], and its derivative by the predictions, [C, B, Q].

    prediction [C, B, Q], target [B, K], both float32; averaged over critics, quantiles and atoms.
    None where no kernel runs: there is no compiler or no CuPy, or another dtype.
    """
    if prediction.dtype is not torch.float32 or backend_for("auto", prediction.device) == "torch":
        return None
    prediction, target = prediction.contiguous(), target.contiguous()
    loss, slope = torch.empty_like(prediction), torch.empty_like(prediction)
    arguments = [
        *(tensor.data_ptr() for tensor in (prediction, target, loss, slope)),
        *prediction.shape, target.shape[1], torch.get_num_threads(),
    ]  # fmt: skip
    if prediction.numel() and not prediction.is_cuda:
        _found(_native()).quantile_huber(*arguments)
    elif prediction.numel():
        cupy, module = _found(_cupy())
        stream = torch.cuda.current_stream(prediction.device).cuda_stream
        with torch.cuda.device(prediction.device), cupy.cuda.ExternalStream(stream):
            grid = (-(-prediction.numel() // 128),)
            module.get_function("quantile_huber")(grid, (128,), (*arguments,))
    pairs = prediction.shape[0] * prediction.shape[2] * target.shape[1]
    return loss.sum((0, 2)).div_(pairs), slope.div_(-pairs)


def _plain(x: Tensor) -> bool:
    """Whether there is no kernel for what runs on a CPU alone."""
    other = x.dtype is not torch.float32 or x.device.type != "cpu"
    return other or backend_for("auto", x.device) == "torch"


def lowest(values: Tensor, kept: int) -> Tensor:
    """The `kept` smallest of a sample's values over all critics, [C, B, Q] -> [B, kept].

    In no particular order. No gradient goes through.
    """
    if _plain(values):
        return values.transpose(0, 1).flatten(1).sort(-1).values[:, :kept]
    out = values.new_empty(values.shape[1], kept)
    values = values.contiguous()
    _found(_native()).lowest(values.data_ptr(), out.data_ptr(), *values.shape, kept)
    return out


# ---- LayerNorm and ReLU --------------------------------------------------------------------------


def norm_relu(
    x: Tensor, gain: Tensor, bias: Tensor, epsilon: float = 1e-5, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """ReLU of the LayerNorm of x, [C, B, N], and what its backward needs, [C, B, 2].

    Gain and bias, [C, 1, N], are each copy's own. On a CPU one pass over memory where torch makes
    three, and six back; into `out`, which may be x where no backward follows.
    """
    if _plain(x):
        normed, mean, factor = torch.native_layer_norm(x, x.shape[-1:], None, None, epsilon)
        return torch.addcmul(bias, normed, gain).relu_(), torch.cat([mean, factor], -1)
    y = torch.empty_like(x) if out is None else out
    statistics = x.new_empty(*x.shape[:2], 2)
    pointers = [t.data_ptr() for t in (x, gain, bias, y, statistics)]
    _found(_native()).norm_relu_forward(*pointers, epsilon, *x.shape, torch.get_num_threads())
    return y, statistics


def norm_relu_backward(
    gradient: Tensor, x: Tensor, gain: Tensor, y: Tensor, statistics: Tensor, learned: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, and where gain and bias are `learned`, theirs; y and statistics as returned
    by `norm_relu`. All tensors are contiguous; that of x may overwrite `gradient`."""
    if _plain(x):
        mean, factor = (part.contiguous() for part in statistics.split(1, -1))
        passed = gradient * (y > 0)
        to_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            passed * gain, x, x.shape[-1:], mean, factor, None, None, [True, False, False]
        )
        if not learned:
            return to_x, None, None
        to_gain = (passed * (x - mean) * factor).sum(1, keepdim=True)
        return to_x, to_gain, passed.sum(1, keepdim=True)
    to_gain, to_bias = (torch.zeros_like(gain) if learned else None for _ in range(2))
    tensors = (x, gain, y, statistics, gradient, gradient, to_gain, to_bias)
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    _found(_native()).norm_relu_backward(*pointers, *x.shape, torch.get_num_threads())
    return gradient, to_gain, to_bias


# ---- one action ----------------------------------------------------------------------------------


class ActionMean:
    """The mean before the tanh, [act], of one raw observation, [obs], in one call of C.

    `linears` are the products, the last one the read-out; the others end in `neurons`, of which the
    first is constant over time and the last gives the mean, or in ReLU where there are none.
    Parameters are copied. Raises BackendUnavailable without a compiler.
    """

    def __init__(
        self,
        linears: Sequence[torch.nn.Linear],
        neurons: Sequence[Neuron],
        centre: Tensor,
        scale: Tensor,
        clip: float,
    ) -> None:
        self.function = _found(_native()).action_mean
        steps = neurons[0].time_steps if neurons else 1
        widths = [linears[0].in_features, *(linear.out_features for linear in linears)]
        copies = [linear.weight.detach().T.contiguous() for linear in linears]
        copies += [linear.bias.detach().clone() for linear in linears]
        fixed = [centre.clone(), scale.clone()]
        self.observation = torch.zeros(widths[0])
        self.mean = torch.zeros(widths[-1])
        x, currents = (torch.zeros(steps * max(widths)) for _ in range(2))
        pointers, count = [copy.data_ptr() for copy in copies], len(linears)
        table = ctypes.c_void_p * count
        structures = [_parameters(neuron, torch.float32, False) for neuron in neurons]
        self.arguments = (
            self.observation.data_ptr(), *(tensor.data_ptr() for tensor in fixed), clip,
            (_Parameters * len(neurons))(*structures) if neurons else None,
            table(*pointers[:count]), table(*pointers[count:]),
            (ctypes.c_longlong * len(widths))(*widths), count,
            x.data_ptr(), currents.data_ptr(), self.mean.data_ptr(),
        )  # fmt: skip
        self.kept = copies, fixed, x, currents  # what the pointers point to
        self.inputs, self.outputs = self.observation.numpy(), self.mean.numpy()

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        self.inputs[:] = observation
        self.function(*self.arguments)
        return self.outputs.copy()


# ---- building ------------------------------------------------------------------------------------

FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
# The later ones serve compilers that have no OpenMP or do not know this processor.
OPTIONAL_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ())
NVRTC_FLAGS = ("--fmad=false", "-ftz=false")


class BackendUnavailable(ValueError):
    """A backend that was asked for cannot run here; the message says what to install."""


def backend_for(requested: str, device: torch.device) -> str:
    """The backend for tensors on `device`: `requested`, or for "auto" the fastest one present."""
    if requested == "auto":
        fused = {"cpu": "native", "cuda": "cupy"}.get(device.type)
        try:
            return backend_for(fused, device) if fused else "torch"
        except BackendUnavailable as missing:
            _note(f"{missing}; the torch backend runs instead: same results, slower")
            return "torch"
    if requested == "native":
        if device.type != "cpu":
            raise BackendUnavailable(f"backend 'native' runs on a CPU, not on {device}")
        _found(_native())
    elif requested == "cupy":
        if device.type != "cuda":
            raise BackendUnavailable(f"backend 'cupy' runs on CUDA, not on {device}")
        _found(_cupy())
    elif requested == "spikingjelly":
        try:
            import spikingjelly.activation_based.functional  # noqa: F401
        except ImportError as error:
            raise BackendUnavailable("backend 'spikingjelly': pip install spikingjelly") from error
    elif requested != "torch":
        raise ValueError(f"unknown backend {requested!r}: auto, cupy, native, torch, spikingjelly")
    return requested


def _found(result: Any) -> Any:
    """What one of the searches below found; they remember a failure as well as a success."""
    if isinstance(result, BackendUnavailable):
        raise result
    return result


@functools.cache
def _note(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


@functools.cache
def _cupy() -> tuple[Any, Any] | BackendUnavailable:
    """CuPy and its module of kernels.c."""
    try:
        import cupy

        if not cupy.cuda.is_available():
            return BackendUnavailable("backend 'cupy': CuPy finds no CUDA device")
        module = cupy.RawModule(code=SOURCE.read_text(), options=NVRTC_FLAGS, backend="nvrtc")
        module.compile()
    except Exception as error:  # a driver, a library or a header that is missing: each its own type
        return BackendUnavailable(
            f"backend 'cupy': {error}; pip install cupy-cuda13x nvidia-cuda-nvrtc, "
            "or those of the CUDA version at hand"
        )
    return cupy, module


@functools.cache
def _native() -> ctypes.CDLL | BackendUnavailable:
    """kernels.c as a shared library, from the cache or built now."""
    compiler = shlex.split(os.environ.get("CC", ""))
    if not compiler:
        compiler = [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))][:1]
    if not compiler or os.name != "posix":
        return BackendUnavailable("backend 'native': no C compiler; install gcc or clang")
    try:
        library = _build(compiler)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        return BackendUnavailable(
            f"backend 'native': {compiler[0]} failed, install gcc or clang: {reason}"
        )
    pointer, integer = ctypes.c_void_p, ctypes.c_longlong
    library.neuron_forward.argtypes = [_Parameters, *[pointer] * 4, integer, integer]
    library.neuron_backward.argtypes = [_Parameters, *[pointer] * 7, integer, integer]
    library.quantile_huber.argtypes = [*[pointer] * 4, *[integer] * 5]
    library.lowest.argtypes = [*[pointer] * 2, *[integer] * 4]
    library.action_mean.argtypes = [
        *[pointer] * 3, ctypes.c_float, *[pointer] * 4, integer, *[pointer] * 3,
    ]  # fmt: skip
    library.action_mean.restype = None
    library.norm_relu_forward.argtypes = [*[pointer] * 5, ctypes.c_float, *[integer] * 4]
    library.norm_relu_backward.argtypes = [*[pointer] * 8, *[integer] * 4]
    library.norm_relu_forward.restype = library.norm_relu_backward.restype = None
    library.quantile_huber.restype = library.lowest.restype = None
    library.neuron_forward.restype = library.neuron_backward.restype = None
    return library


def _build(compiler: list[str]) -> ctypes.CDLL:
    version = _command([*compiler, "--version"])
    identity = [*compiler, str(shutil.which(compiler[0])), version, _processor()]
    with tempfile.TemporaryDirectory(prefix="sansac-") as temporary:
        directory = _cache_directory() or Path(temporary)
        for optional in OPTIONAL_FLAGS:
            flags = [*FLAGS, *optional]
            key = "\0".join([SOURCE.read_text(), *flags, *identity])
            path = directory / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
            try:
                if not path.exists():
                    _compile([*compiler, *flags], path)
                return ctypes.CDLL(str(path))
            except (OSError, subprocess.CalledProcessError) as error:
                failure = error
    raise failure


def _compile(command: list[str], path: Path) -> None:
    """Builds beside `path` and renames, so that whoever builds at the same time finds it whole."""
    handle, part = tempfile.mkstemp(suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        _command([*command, "-o", part, str(SOURCE)])
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)


def _command(words: list[str]) -> str:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        words, text=True, errors="replace", start_new_session=True, **pipes
    ) as process:
        try:
            out, told = process.communicate()
        except BaseException:  # a signal ends what the compiler has started too, before it writes
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, out, told)
    return out


def _processor() -> str:
    """What -march=native depends on: unlike machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(features)])


def _cache_directory() -> Path | None:
    """The user's cache, or None where someone else could have put a library into it."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        directory = (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "sansac"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except (OSError, RuntimeError):  # read-only, or no home at all
        return None
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    mine = status.st_uid == os.getuid() and os.access(directory, os.W_OK)
    return directory if private and mine else None


# ---- plain torch, and the reference --------------------------------------------------------------


class _Spike(torch.autograd.Function):
    """u = H - v_threshold to spikes, elementwise, with a surrogate's derivative."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, surrogate: str, alpha: float) -> Tensor:
        ctx.save_for_backward(u)
        ctx.surrogate, ctx.alpha = surrogate, alpha
        return (u >= 0).to(u)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (u,) = ctx.saved_tensors
        return gradient * SURROGATES[ctx.surrogate].derivative(u, ctx.alpha), None, None


def _torch(
    current: Tensor, decay: Tensor | None, threshold: Tensor | None, neuron: Neuron
) -> Tensor:
    """The loop over time, in the type of `current`."""
    # On CUDA, division by a Python number multiplies by its reciprocal: divide by tensors.
    tau, steps = (current.new_full((), value) for value in (neuron.decay, neuron.time_steps))
    bound = neuron.v_threshold if threshold is None else threshold
    reset = neuron.v_reset
    v = torch.full_like(current if neuron.constant else current[0], reset)
    synaptic = torch.zeros_like(v)
    outputs = []
    for t in range(neuron.time_steps):
        x = current if neuron.constant else current[t]
        if neuron.current_based:
            synaptic = synaptic * neuron.current_decay + x
            h = v * neuron.decay + synaptic
        else:
            leaked = x - (v - reset) if neuron.decay_input else v - reset
            leaked = leaked / tau if decay is None else leaked * decay
            h = v + leaked if neuron.decay_input else v - leaked + x
        spike = _Spike.apply(h - bound, neuron.surrogate, neuron.alpha)
        fired = spike.detach() if neuron.detach_reset else spike
        v = fired * reset + (1 - fired) * h
        outputs.append(h if neuron.output == "voltages" else spike)
    if neuron.output == "mean":
        return torch.stack(outputs).sum(0) / steps
    return torch.stack(outputs)


def _spikingjelly(
    current: Tensor, w: Tensor | None, threshold: Tensor | None, neuron: Neuron
) -> Tensor:
    """SpikingJelly's functions, which take a float threshold and give no voltage before reset."""
    if threshold is not None or neuron.output == "voltages":
        raise ValueError(
            "backend 'spikingjelly' has neither learned thresholds nor voltages; 'torch' has both"
        )
    from spikingjelly.activation_based import functional
    from spikingjelly.activation_based import surrogate as surrogates

    spike = getattr(surrogates, SURROGATES[neuron.surrogate].spikingjelly)(alpha=neuron.alpha)
    if neuron.constant:
        current = current.expand(neuron.time_steps, *current.shape)
    state = torch.float64 if current.dtype is torch.float64 else torch.float32
    v = torch.full_like(current[0], neuron.v_reset, dtype=state)
    rest = (neuron.v_threshold, neuron.v_reset, spike, neuron.detach_reset)
    if neuron.current_based:
        synaptic, steps = torch.zeros_like(v), []
        for x in current:
            fired, synaptic, v = functional.cuba_lif_step(
                x, synaptic, v, neuron.current_decay, neuron.decay, *rest
            )
            steps.append(fired)
        spikes = torch.stack(steps)
    elif w is not None:
        spikes = functional.plif_multi_step(current, v, w.reshape(()), neuron.decay_input, *rest)[0]
    else:
        spikes = functional.lif_multi_step(current, v, neuron.decay, neuron.decay_input, *rest)[0]
    spikes = spikes.to(current.dtype)
    return spikes.mean(0) if neuron.output == "mean" else spikes


@contextmanager
def products(precision: Precision) -> Iterator[None]:
    """Matrix products of float32 tensors as they are, or of factors rounded to bfloat16 (TF32 on a
    GPU) and summed in float32. A processor without such instructions multiplies as it is."""
    if precision == "float32":
        yield
        return
    mkldnn: Any = torch.backends.mkldnn
    backends = {mkldnn.matmul: "bf16", torch.backends.cuda.matmul: "tf32"}
    before = {backend: backend.fp32_precision for backend in backends}
    try:
        for backend, rounded in backends.items():
            backend.fp32_precision = rounded
        yield
    finally:
        for backend, was in before.items():
            backend.fp32_precision = was


def keep_freed_memory() -> None:
    """Tell glibc not to return freed memory to the system and fault it in again at every update:
    page faults cost up to a tenth of a spiking update. Does nothing under another allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)
