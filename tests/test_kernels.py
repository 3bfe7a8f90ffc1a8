"""Fused neurons against SpikingJelly's reference."""

from __future__ import annotations

import copy
import ctypes
import functools
import math
import shutil
import stat
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sansac import kernels

CPU = torch.device("cpu")
NEURONS = ("lif", "lif_undecayed", "parametric", "parametric_undecayed", "current_based")


@functools.cache
def fused() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kernels.backend_for("auto", CPU)


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def options(**changes: Any) -> dict[str, Any]:
    values = {
        "time_steps": 5,
        "v_threshold": 1.0,
        "v_reset": 0.0,
        "surrogate": "rectangle",
        "alpha": 1.0,
        "detach_reset": False,
        "backend": fused(),
    }
    return values | changes


def call(neuron: str, current: Tensor, decay: float, w: Tensor, **values: Any) -> Tensor:
    """One of NEURONS with a decay in (0, 1)."""
    if neuron == "current_based":
        return kernels.cuba_lif(current, c_decay=decay, v_decay=1 - decay / 2, **values)
    decay_input = not neuron.endswith("undecayed")
    if neuron.startswith("parametric"):
        return kernels.parametric_lif(current, w=w, decay_input=decay_input, **values)
    return kernels.lif(current, tau=1 / decay, decay_input=decay_input, **values)


def differentiate(
    neuron: str, current: Tensor, decay: float, w: float, seed: int, **values: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, and the gradients of current and w for a random gradient of the output."""
    current = current.detach().requires_grad_()
    weight = torch.tensor(w, requires_grad=True)
    output = call(neuron, current, decay, weight, **values)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(output.shape, generator=generator).to(output)
    output.backward(upstream)
    assert current.grad is not None
    return output.detach(), current.grad, weight.grad


def assert_close(actual: Tensor, expected: Tensor, scale: Tensor | None = None) -> None:
    """Equal to 1e-6 of the largest."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if expected.numel():
        largest = expected.abs().max() if scale is None else scale
        error = (actual - expected).abs().max()
        assert error <= 1e-6 * largest, f"{error:.3g} of {largest:.3g}"


def make_current(shape: tuple[int, ...], kind: str, layout: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    double = tuple(2 * n for n in shape)
    x = torch.randn(double if layout == "sliced" else shape, generator=generator)
    x = {
        "ordinary": x * 1.5 + 0.5,
        "strong": x * 8,
        "coarse": (x * 4).round() / 4,  # voltages that meet the threshold exactly
        "denormal": x * 1e-39,
        "huge": x * 1e30,
    }[kind]
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        return x[tuple(slice(0, 2 * n, 2) for n in shape)]
    if layout == "expanded":
        return x[..., :1].expand(shape)
    return x


cases = st.fixed_dictionaries(
    {
        "neuron": st.sampled_from(NEURONS),
        "time_steps": st.one_of(st.integers(1, 8), st.integers(9, 64)),
        "shape": st.sampled_from(
            [(1,), (0, 3), (1, 1), (1, 256), (3, 5), (2, 3, 7), (7, 31), (16, 16), (33, 17)]
        ),
        "constant": st.booleans(),
        "output": st.sampled_from(["spikes", "mean"]),
        "kind": st.sampled_from(["ordinary", "strong", "coarse", "denormal", "huge"]),
        "layout": st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]),
        "decay": st.one_of(st.sampled_from([0.5, 0.25]), st.floats(0.01, 0.99)),
        "w": st.floats(-3, 3),
        "v_threshold": st.sampled_from([1.0, 0.5, 0.1, 1e-39, 3.7]),
        "v_reset": st.sampled_from([0.0, 0.1, -0.25]),
        "surrogate": st.sampled_from(list(kernels.SURROGATES)),
        "alpha": st.one_of(st.sampled_from([1.0, 2.0, 4.0]), st.floats(0.3, 8)),
        "detach_reset": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)


def compare_with_reference(case: dict[str, Any], backends: tuple[str, ...]) -> None:
    case = dict(case)
    shape, constant, steps = case.pop("shape"), case["constant"], case["time_steps"]
    kind, layout = case.pop("kind"), case.pop("layout")
    current = make_current(shape if constant else (steps, *shape), kind, layout, case["seed"])
    if current.numel() == 0:
        for backend in backends:
            spikes, gradient, _ = differentiate(current=current, backend=backend, **case)
            expected = shape if case["output"] == "mean" else (steps, *shape)
            assert spikes.shape == expected and gradient.shape == current.shape
        return
    reference = {**case, "backend": "spikingjelly"}
    spikes, gradient, w_gradient = differentiate(current=current, **reference)
    largest = gradient.abs().max()
    if constant:  # a sum over time, which may cancel: compared with what it adds up
        over_time = current.expand(steps, *shape)
        _, each, _ = differentiate(current=over_time, **reference | {"constant": False})
        largest = each.abs().sum(0).max()
    largest *= max(1, steps / 16)  # one rounding a step that a gradient passes through
    for backend in backends:
        actual = differentiate(current=current, backend=backend, **case)
        assert torch.equal(actual[0], spikes), backend
        assert_close(actual[1], gradient, largest)
        if w_gradient is not None and actual[2] is not None:
            # a sum over all neurons and steps, bounded by this
            total = largest * gradient.numel() * steps
            assert_close(actual[2], w_gradient, 2 * total * current.abs().max().clamp(min=1))


# gradients that overflow have no largest one to compare with
finite = cases.filter(lambda case: not (case["kind"] == "huge" and not case["detach_reset"]))


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(finite)
def test_spikes_and_gradients_equal_spikingjelly(case: dict[str, Any]) -> None:
    compare_with_reference(case, (fused(), "torch"))


@pytest.mark.slow
@settings(max_examples=4000, suppress_health_check=list(HealthCheck))
@given(finite)
def test_spikes_and_gradients_equal_spikingjelly_at_length(case: dict[str, Any]) -> None:
    compare_with_reference(case, (fused(),))


@pytest.mark.parametrize("neuron", NEURONS)
def test_nodes_of_spikingjelly_agree(neuron: str) -> None:
    """The modules themselves, not only the functions beneath them."""
    from spikingjelly.activation_based import neuron as nodes
    from spikingjelly.activation_based import surrogate

    current = make_current((6, 9, 20), "ordinary", "contiguous", 3)
    shared = {"v_threshold": 0.8, "v_reset": 0.0, "surrogate_function": surrogate.ATan(2.0)}
    decay_input = not neuron.endswith("undecayed")
    w = torch.tensor(0.4)
    if neuron == "current_based":
        node = nodes.CUBALIFNode(0.4, 0.8, **shared)
    elif neuron.startswith("parametric"):
        node = nodes.ParametricLIFNode(2.0, decay_input, **shared)
        w = node.w.detach()
    else:
        node = nodes.LIFNode(2.5, decay_input, **shared)
    node.step_mode = "m"
    ours = call(
        neuron, current, 0.4, w, **options(time_steps=6, v_threshold=0.8, surrogate="atan", alpha=2)
    )
    assert torch.equal(ours, node(current))


@pytest.mark.parametrize("neuron", NEURONS)
@pytest.mark.parametrize("backend", ["fused", "torch"])
def test_infinite_and_nan_voltages(neuron: str, backend: str) -> None:
    """A NaN does not fire; an infinite voltage fires once and leaves a NaN, as in the reference."""
    values = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0, 1.0, 2.0])
    current = torch.cartesian_prod(values, values, values).T.reshape(3, 8, 64)
    shared = options(time_steps=3, v_reset=0.1)
    expected = call(neuron, current, 0.4, torch.tensor(0.1), **shared | {"backend": "spikingjelly"})
    backend = fused() if backend == "fused" else backend
    actual = call(neuron, current, 0.4, torch.tensor(0.1), **shared | {"backend": backend})
    assert torch.equal(actual, expected)
    assert not actual[:, 0, :8].any()  # NaN first: silent for good


@pytest.mark.parametrize("surrogate", list(kernels.SURROGATES))
def test_surrogates_at_their_edges(surrogate: str) -> None:
    """One step from rest: the gradient is the surrogate's derivative, edges of its window too."""
    alpha = 2.0
    u = torch.tensor([-1e30, -60, -0.5, -0.25, -1e-45, 0, 1e-45, 0.2499, 0.25, 0.5, 0.6, 60, 1e30])
    gradients = []
    for backend in (fused(), "torch", "spikingjelly"):
        x = (u * 1.0).requires_grad_()
        kernels.lif(
            x[None],
            tau=1.0,
            decay_input=True,
            **options(
                time_steps=1, v_threshold=0.0, surrogate=surrogate, alpha=alpha, backend=backend
            ),
        ).sum().backward()
        gradients.append(x.grad)
    assert_close(gradients[0], gradients[2])
    assert_close(gradients[1], gradients[2])
    peak = {"rectangle": 2.0, "triangle": 2.0, "atan": 1.0, "sigmoid": 0.5, "fast_sigmoid": 2.0}
    assert gradients[0][5] == peak[surrogate]


@pytest.mark.parametrize("neuron", NEURONS)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("output", kernels.OUTPUTS)
@pytest.mark.parametrize("detach_reset", [False, True])
def test_learned_thresholds_and_voltages(
    neuron: str, constant: bool, output: str, detach_reset: bool
) -> None:
    """What SpikingJelly has not: against autograd through the plain loop."""
    current = make_current((13, 21) if constant else (7, 13, 21), "ordinary", "contiguous", 5)
    results = []
    for backend in (fused(), "torch"):
        x = current.clone().requires_grad_()
        w, threshold = (torch.tensor(value, requires_grad=True) for value in (0.3, 0.7))
        shared = options(time_steps=7, v_threshold=threshold, v_reset=0.1, surrogate="atan")
        shared |= {"constant": constant, "output": output, "detach_reset": detach_reset}
        result = call(neuron, x, 0.3, w, **shared | {"backend": backend})
        weights = torch.linspace(-1, 1, result.numel()).reshape(result.shape)
        (result * weights).sum().backward()
        results.append((result, x.grad, w.grad, threshold.grad))
    (ours, x_grad, w_grad, t_grad), (loop, x_loop, w_loop, t_loop) = results
    assert torch.equal(ours, loop)
    assert_close(x_grad, x_loop)
    total = x_loop.abs().sum() * 4 * current.abs().max()
    if w_loop is not None:
        assert_close(w_grad, w_loop, total)
    if t_loop is not None:  # with detach_reset voltages do not depend on the threshold
        assert_close(t_grad, t_loop, total)
    elif fused() != "torch":
        assert t_grad == 0


def test_infinite_threshold_is_a_leaky_integrator() -> None:
    current = torch.randn(6, 3, 8, requires_grad=True)
    voltages = kernels.lif(
        current,
        tau=3.0,
        decay_input=True,
        output="voltages",
        **options(time_steps=6, v_threshold=math.inf, surrogate="sigmoid"),
    )
    v, steps = torch.zeros(3, 8), []
    for x in current:
        v = v + (x - v) / 3.0
        steps.append(v)
    assert torch.equal(voltages, torch.stack(steps))
    (expected,) = torch.autograd.grad(torch.stack(steps).square().sum(), current)
    (actual,) = torch.autograd.grad(voltages.square().sum(), current)
    assert_close(actual, expected)


@pytest.mark.parametrize("neuron", NEURONS)
@pytest.mark.parametrize("output", ["spikes", "mean"])
def test_bfloat16_is_storage_only(neuron: str, output: str) -> None:
    """Spikes of a float32 state; gradients are the float32 ones, rounded."""
    current = make_current((5, 11, 19), "ordinary", "contiguous", 7).bfloat16()
    shared = options(output=output)
    ours, gradient, _ = differentiate(neuron, current, 0.3, 0.2, 1, **shared)
    assert ours.dtype == gradient.dtype == torch.bfloat16
    expected, *_ = differentiate(
        neuron, current, 0.3, 0.2, 1, **shared | {"backend": "spikingjelly"}
    )
    assert torch.equal(ours, expected)
    loop = differentiate(neuron, current, 0.3, 0.2, 1, **shared | {"backend": "torch"})
    assert torch.equal(ours, loop[0])
    torch.testing.assert_close(gradient, loop[1], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("neuron", NEURONS)
def test_float64_takes_the_loop(neuron: str) -> None:
    current = make_current((5, 6, 7), "ordinary", "contiguous", 9).double()
    ours = differentiate(neuron, current, 0.3, 0.2, 1, **options())
    reference = differentiate(neuron, current, 0.3, 0.2, 1, **options(backend="spikingjelly"))
    assert ours[0].dtype == torch.float64 and torch.equal(ours[0], reference[0])
    torch.testing.assert_close(ours[1], reference[1], rtol=1e-12, atol=1e-14)


def test_threads_do_not_change_a_bit() -> None:
    before = torch.get_num_threads()
    current = make_current((5, 257, 301), "ordinary", "contiguous", 11)
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(differentiate("parametric", current, 0.3, 0.2, 1, **options())[:2])
    finally:
        torch.set_num_threads(before)
    for spikes, gradient in results[1:]:
        assert torch.equal(spikes, results[0][0]) and torch.equal(gradient, results[0][1])


def test_calls_are_stateless_and_leave_their_inputs() -> None:
    current = make_current((5, 4, 33), "ordinary", "transposed", 13)
    before = current.clone()
    shared = {"tau": 2.0, "decay_input": True, **options()}
    first, second = kernels.lif(current, **shared), kernels.lif(current, **shared)
    assert torch.equal(first, second) and torch.equal(current, before)
    with torch.no_grad():
        assert torch.equal(kernels.lif(current, **shared), first)
    with torch.inference_mode():
        assert torch.equal(kernels.lif(current, **shared), first)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 10)
        self.w = nn.Parameter(torch.tensor(0.2))
        self.v_threshold = nn.Parameter(torch.tensor(0.3))
        self.options = options(surrogate="triangle")

    def forward(self, x: Tensor) -> Tensor:
        shared = self.options | {"v_threshold": self.v_threshold}
        spikes = kernels.parametric_lif(
            self.linear(x), w=self.w, decay_input=True, constant=True, **shared
        )
        return kernels.cuba_lif(spikes, c_decay=0.5, v_decay=0.7, output="mean", **shared)


def test_modules_that_use_them_copy_and_call_functionally() -> None:
    layer, x = Layer(), torch.randn(4, 6)
    output = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), output)
    parameters = {name: value.clone() for name, value in layer.named_parameters()}
    assert torch.equal(torch.func.functional_call(layer, parameters, (x,)), output)


def compiled(backend: str) -> None:
    torch._dynamo.reset()
    layer, x = Layer(), torch.randn(4, 6)
    expected = layer(x)
    expected.sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    actual = torch.compile(layer, fullgraph=True, backend=backend)(x)
    actual.sum().backward()
    torch.testing.assert_close(actual, expected)
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.skipif(fused() == "torch", reason="no C compiler")
def test_a_full_graph_is_captured() -> None:
    compiled("aot_eager")


@pytest.mark.slow
@pytest.mark.skipif(fused() == "torch", reason="no C compiler")
def test_torch_compile() -> None:
    compiled("inductor")


@pytest.mark.skipif(fused() == "torch", reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("constant", "output", "learned"),
    [(False, "spikes", False), (True, "spikes", True), (False, "mean", True), (True, "mean", False),
     (False, "voltages", True)],
)  # fmt: skip
def test_operators_are_well_formed(
    dtype: torch.dtype, constant: bool, output: str, learned: bool
) -> None:
    current = torch.randn(*(() if constant else (3,)), 2, 5).to(dtype).requires_grad_()
    decay, threshold = (torch.tensor(0.4, requires_grad=True) if learned else None for _ in "xx")
    neuron = kernels.Neuron(
        3, constant, output, False, True, False, 2.0, 0.0, 0.5, 0.0, "atan", 2.0
    )
    torch.library.opcheck(torch.ops.sansac.neuron.default, (current, decay, threshold, *neuron))


# ---- building ------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Searches made anew, with a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    searches = (kernels._native, kernels._note)
    for search in searches:
        search.cache_clear()
    yield tmp_path / "sansac"
    for search in searches:
        search.cache_clear()


@needs_compiler
def test_the_cache_is_private_and_reused(fresh: Path) -> None:
    assert kernels.backend_for("native", CPU) == "native"
    (library,) = fresh.iterdir()
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    built = library.stat().st_mtime_ns
    kernels._native.cache_clear()
    kernels.backend_for("native", CPU)
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [built]


@needs_compiler
def test_a_cache_that_others_can_write_is_not_used(fresh: Path) -> None:
    fresh.mkdir(mode=0o700)
    fresh.chmod(0o777)
    assert kernels.backend_for("native", CPU) == "native"
    assert not list(fresh.iterdir())


@needs_compiler
def test_builders_at_the_same_time(fresh: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(kernels._build, [["cc"]] * 4))
    assert all(library.neuron_forward for library in libraries)
    assert [path.suffix for path in fresh.iterdir()] == [".so"]


@needs_compiler
def test_the_key_covers_compiler_flags_source_and_processor(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build() -> int:
        kernels._build(["cc"])
        return len(list(fresh.iterdir()))

    assert build() == 1
    monkeypatch.setattr(kernels, "_processor", lambda: "another")
    assert build() == 2
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-g0"))
    assert build() == 3
    source = tmp_path / "other.c"
    source.write_text(kernels.SOURCE.read_text() + "/* changed */\n")
    monkeypatch.setattr(kernels, "SOURCE", source)
    assert build() == 4


@needs_compiler
def test_a_plain_compiler_gives_the_same_bits(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without OpenMP and without this processor's instructions: vectors of another width."""
    current = make_current((5, 9, 37), "ordinary", "contiguous", 15)
    values = ("current_based", current, 0.3, 0.2, 1)
    shared = options(surrogate="sigmoid", backend="native")
    kernels.backend_for("native", CPU)
    best = differentiate(*values, **shared)
    plain = tmp_path / "plain-cc"
    plain.write_text('#!/bin/sh\ncase " $* " in *" -march=native "*) exit 1;; esac\nexec cc "$@"\n')
    plain.chmod(0o755)
    monkeypatch.setenv("CC", str(plain))
    kernels._native.cache_clear()
    assert kernels.backend_for("native", CPU) == "native"
    ours = differentiate(*values, **shared)
    assert torch.equal(ours[0], best[0]) and torch.equal(ours[1], best[1])


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ValueError, match="install gcc or clang"):
        kernels.backend_for("native", CPU)
    with pytest.warns(RuntimeWarning, match="same results"):
        assert kernels.backend_for("auto", CPU) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert kernels.backend_for("auto", CPU) == "torch"


def test_backends_that_do_not_fit() -> None:
    assert kernels.backend_for("torch", CPU) == "torch"
    assert kernels.backend_for("spikingjelly", CPU) == "spikingjelly"
    assert kernels.backend_for("auto", torch.device("meta")) == "torch"
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        kernels.backend_for("fast", CPU)
    with pytest.raises(ValueError, match="runs on CUDA"):
        kernels.backend_for("cupy", CPU)
    with pytest.raises(ValueError, match="runs on a CPU"):
        kernels.backend_for("native", torch.device("cuda"))
    current, shared = torch.randn(4, 2, 3), {"tau": 2.0, "decay_input": True}
    with pytest.raises(ValueError, match=r"time_steps, \.\.\., N"):
        kernels.lif(current, **shared, **options())
    with pytest.raises(ValueError, match="cannot run on cpu"):
        kernels.lif(current, **shared, **options(time_steps=4, backend="cupy"))
    with pytest.raises(ValueError, match="'torch' has both"):
        kernels.lif(
            current,
            **shared,
            **options(time_steps=4, backend="spikingjelly", v_threshold=torch.tensor(1.0)),
        )


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    kernels._cupy.cache_clear()
    try:
        with pytest.raises(ValueError, match="pip install cupy"):
            kernels.backend_for("cupy", torch.device("cuda"))
    finally:
        kernels._cupy.cache_clear()


# ---- the CUDA side of the source, without a GPU --------------------------------------------------


@pytest.mark.parametrize("architecture", ["75", "80", "90"])
def test_the_source_compiles_to_ptx(architecture: str) -> None:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    try:
        program = nvrtc.createProgram(kernels.SOURCE.read_text(), "kernels.cu", (), ())
    except Exception as error:
        pytest.skip(f"no NVRTC: {error}")
    flags = (f"--gpu-architecture=compute_{architecture}", *kernels.NVRTC_FLAGS)
    try:
        nvrtc.compileProgram(program, flags)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    ptx = nvrtc.getPTX(program).decode()
    assert ".entry neuron_forward" in ptx and ".entry neuron_backward" in ptx
    # The arithmetic of the reference: no contraction, no flush to zero, exact division.
    assert "fma" not in ptx and "ftz" not in ptx and "div.approx" not in ptx
    assert "div.rn.f32" in ptx


EMULATED_BLOCK = 4
EMULATOR = """
#include <string.h>
#define __CUDACC__
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;
static inline unsigned __float_as_uint(float x) { unsigned b; memcpy(&b, &x, 4); return b; }
static inline float __uint_as_float(unsigned b) { float x; memcpy(&x, &b, 4); return x; }
#include "kernels.c"
float shared[64 * BLOCK];
#define LAUNCH for (blockDim.x = BLOCK, gridDim.x = 2, blockIdx.x = 0; blockIdx.x < gridDim.x; \\
                    ++blockIdx.x) for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
typedef const void *in; typedef void *out; typedef long long n;
extern "C" void emulated_forward(neuron p, in x, in d, in t, out o, n size, n threads) {
    LAUNCH neuron_forward(p, x, (const float *)d, (const float *)t, o, size, threads);
}
extern "C" void emulated_backward(neuron p, in x, in d, in t, in g, out gx, out gd, out gt, n size,
                                  n threads) {
    LAUNCH neuron_backward(p, x, (const float *)d, (const float *)t, g, gx, (float *)gd,
                           (float *)gt, size, threads);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_cuda_side_emulated_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks of a few threads each, one after the other, through the same launching code."""
    source, library = tmp_path / "emulator.cpp", tmp_path / "emulator.so"
    source.write_text(EMULATOR.replace("BLOCK", str(EMULATED_BLOCK)))
    subprocess.run(
        [
            *("g++", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-I"),
            *(str(kernels.SOURCE.parent), "-o", str(library), str(source)),
        ],
        check=True,
    )
    kernels.backend_for("native", CPU)
    native, emulated = kernels._native(), ctypes.CDLL(str(library))
    for name in ("forward", "backward"):
        function = getattr(emulated, f"emulated_{name}")
        function.argtypes = getattr(native, f"neuron_{name}").argtypes
        setattr(emulated, f"neuron_{name}", function)
    for neuron in NEURONS:
        for surrogate in kernels.SURROGATES:
            for dtype in (torch.float32, torch.bfloat16):
                for constant, output in ((False, "spikes"), (True, "mean"), (False, "voltages")):
                    shape = (3, 7) if constant else (6, 3, 7)
                    current = make_current(shape, "ordinary", "contiguous", 17).to(dtype)
                    shared = options(time_steps=6, surrogate=surrogate, backend="native")
                    shared |= {"constant": constant, "output": output, "v_reset": 0.1}
                    results = []
                    for found in (native, emulated):
                        monkeypatch.setattr(kernels, "_native", lambda found=found: found)
                        results.append(differentiate(neuron, current, 0.3, 0.2, 1, **shared))
                    for ours, theirs in zip(*results, strict=True):
                        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> torch.device:
    device = torch.device("cuda")
    try:
        kernels.backend_for("cupy", device)
    except ValueError as missing:
        pytest.skip(str(missing))
    return device


@pytest.mark.gpu
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(case=finite)
def test_a_gpu_equals_the_cpu(cuda: torch.device, case: dict[str, Any]) -> None:
    case = dict(case)
    shape, constant, steps = case.pop("shape"), case["constant"], case["time_steps"]
    kind, layout = case.pop("kind"), case.pop("layout")
    current = make_current(shape if constant else (steps, *shape), kind, layout, case["seed"])
    expected = differentiate(current=current, backend=fused(), **case)
    x = current.to(cuda).requires_grad_()
    w = torch.tensor(case["w"], device=cuda, requires_grad=True)
    values = {k: v for k, v in case.items() if k not in ("neuron", "decay", "w", "seed")}
    output = call(case["neuron"], x, case["decay"], w, backend="cupy", **values)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(case["seed"]))
    output.backward(upstream.to(cuda))
    assert torch.equal(output.cpu(), expected[0])
    assert x.grad is not None
    assert_close(x.grad.cpu(), expected[1])


@pytest.mark.gpu
def test_a_cuda_graph_replays_it(cuda: torch.device) -> None:
    x = torch.randn(5, 64, 256, device=cuda)
    shared = {"tau": 2.0, "decay_input": True, **options(backend="cupy")}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        kernels.lif(x, **shared)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        spikes = kernels.lif(x, **shared)
    x.copy_(torch.randn_like(x) * 2)
    graph.replay()
    assert torch.equal(spikes, kernels.lif(x, **shared))


@pytest.mark.gpu
@pytest.mark.parametrize("neuron", NEURONS)
def test_bfloat16_on_a_gpu(cuda: torch.device, neuron: str) -> None:
    current = make_current((5, 11, 19), "ordinary", "contiguous", 7).bfloat16()
    expected = call(neuron, current, 0.3, torch.tensor(0.2), **options(backend="torch"))
    w = torch.tensor(0.2, device=cuda)
    actual = call(neuron, current.to(cuda), 0.3, w, **options(backend="cupy"))
    assert torch.equal(actual.cpu(), expected)


# ---- quantile Huber loss -------------------------------------------------------------------------


@given(
    copies=st.integers(1, 3),
    batch=st.integers(1, 130),
    quantiles=st.integers(1, 26),
    atoms=st.integers(1, 50),
    seed=st.integers(0, 2**31 - 1),
)
@settings(max_examples=40)
def test_quantile_huber_is_the_formula(
    copies: int, batch: int, quantiles: int, atoms: int, seed: int
) -> None:
    """Against TQC's loss (Kuznetsov et al. 2020, eq. 8) and autograd, both in float64."""
    stream = torch.Generator().manual_seed(seed)
    prediction = 2 * torch.randn(copies, batch, quantiles, generator=stream)
    target = 2 * torch.randn(batch, atoms, generator=stream)
    fused = kernels.quantile_huber(prediction, target)
    if fused is None:
        pytest.skip("no C compiler")
    exact = prediction.double().requires_grad_()
    delta = target.double()[None, :, None, :] - exact[..., None]
    level = ((torch.arange(quantiles, dtype=torch.float64) + 0.5) / quantiles)[:, None]
    huber = torch.nn.functional.huber_loss(delta, torch.zeros_like(delta), reduction="none")
    loss = ((level - (delta.detach() < 0).double()).abs() * huber).mean((0, 2, 3))
    (slope,) = torch.autograd.grad(loss.sum(), exact)
    torch.testing.assert_close(fused[0].double(), loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused[1].double(), slope, rtol=1e-5, atol=1e-7)


def test_quantile_huber_of_a_nan_is_a_nan() -> None:
    """A blown-up critic must show in the loss of its sample, and there alone."""
    prediction, target = torch.zeros(2, 3, 4), torch.zeros(3, 5)
    target[1, 2] = math.nan
    fused = kernels.quantile_huber(prediction, target)
    if fused is None:
        pytest.skip("no C compiler")
    assert fused[0].isnan().tolist() == [False, True, False]


@given(
    copies=st.integers(1, 3),
    batch=st.integers(0, 40),
    quantiles=st.integers(1, 26),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31 - 1),
)
def test_lowest_keeps_what_a_sort_would(
    copies: int, batch: int, quantiles: int, share: float, seed: int
) -> None:
    stream = torch.Generator().manual_seed(seed)
    values = torch.randint(-9, 9, (copies, batch, quantiles), generator=stream).float()
    kept = max(1, round(share * copies * quantiles))
    pooled = values.transpose(0, 1).flatten(1)
    found = kernels.lowest(values, kept).sort(-1).values
    assert torch.equal(found, pooled.sort(-1).values[:, :kept])


# ---- LayerNorm and ReLU --------------------------------------------------------------------------


def torchs_norm_relu(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.nn.functional.layer_norm(x, x.shape[-1:]) * gain + bias)


@given(
    copies=st.integers(1, 3),
    rows=st.integers(0, 9),
    width=st.integers(4, 200),
    offset=st.sampled_from([0.0, 30.0]),
    learned=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**16),
)
def test_norm_relu_is_torchs_layer_norm_and_relu(
    copies: int,
    rows: int,
    width: int,
    offset: float,
    learned: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Values and gradients, against float64, for widths that are no multiple of a vector."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(copies, rows, width, generator=generator) + offset
    gain, bias, gradient = (
        torch.randn(*shape, generator=generator)
        for shape in ((copies, 1, width), (copies, 1, width), (copies, rows, width))
    )
    exact = [t.double().requires_grad_() for t in (x, gain, bias)]
    reference = torchs_norm_relu(*exact)
    x, gain, bias = (t.to(dtype) for t in (x, gain, bias))
    y, statistics = kernels.norm_relu(x, gain, bias)
    torch.testing.assert_close(y.double(), reference, rtol=1e-4, atol=2e-4)
    in_place = x.clone()
    assert torch.equal(kernels.norm_relu(in_place, gain, bias, out=in_place)[0], y)
    # Where a value is within rounding of 0 the two may differ in which side they see.
    gradient = gradient * (reference.abs() > 1e-3)
    expected = torch.autograd.grad((reference * gradient).sum(), exact)
    found = kernels.norm_relu_backward(gradient.to(dtype), x, gain, y, statistics, learned)
    assert (found[1] is not None) == (found[2] is not None) == learned
    for mine, other in zip(found, expected, strict=True):
        if mine is not None:
            largest = other.abs().max() if other.numel() else torch.ones(())
            assert not (((mine - other) / largest.clamp_min(1)).abs() > 1e-3).any()


def test_norm_relu_does_not_depend_on_threads_and_passes_a_nan() -> None:
    x, gain, bias = torch.randn(2, 64, 100), torch.randn(2, 1, 100), torch.zeros(2, 1, 100)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        y, statistics = kernels.norm_relu(x, gain, bias)
        back = kernels.norm_relu_backward(2 * y, x, gain, y, statistics, True)
        results.append([t for t in (y, statistics, *back) if t is not None])
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    x[1, 3, 50] = math.nan
    y, _ = kernels.norm_relu(x, gain, bias)
    assert y[1, 3].isnan().all() and not y[1, 2].isnan().any()


def test_bfloat16_products_round_and_leave_the_setting_as_it_was() -> None:
    """On a processor without such instructions the two products are equal."""
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    exact = x @ w
    with kernels.products("bfloat16"):
        rounded = x @ w
    assert torch.equal(x @ w, exact)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.3)
    with kernels.products("float32"):
        assert torch.equal(x @ w, exact)
