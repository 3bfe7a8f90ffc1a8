"""Recorded updates: what a recording needs of an update, which recording is replayed when, and on
a GPU that nothing but the number of launches differs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import differences, tiny
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import runner
from sansac.capture import WARM_UP, Captured, updater
from sansac.checkpoint import write_config
from sansac.config import ConfigError, presets_for, resolve
from sansac.family import make_algorithm
from sansac.manager import Manager
from sansac.off_policy import OffPolicy, load_optimizer, set_learning_rate
from sansac.replay import Batch

ALGORITHMS = ["sac", "sac-v", "td3", "tqc", "crossq", "droq", "redq"]
GRAPH = {"learning": {"cuda_graph": True}}
ACTORS: dict[str, dict[str, Any]] = {
    "dense": {"san": False},
    "spiking": {"san": True},
    "poisson": {"san": True, "spiking": {"encoder": "poisson"}},
}
SMALL = {"actor": {"hidden": [16, 16]}, "critic": {"hidden": [16, 16]}}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def make_batch(seed: int, device: str = "cpu") -> Batch:
    stream = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=stream)
    columns = Batch(normal(32, 5), normal(32, 2).tanh(), normal(32), normal(32, 5),
                    torch.full((32,), 0.9), torch.ones(32))  # fmt: skip
    return Batch(*(column.to(device) for column in columns))


def parameters(algorithm: OffPolicy) -> dict[str, Any]:
    state = algorithm.state_dict()
    return {k: state[k] for k in ("training_actor", "critic", "target_critic", "updates")}


# -- what a recording needs --------------------------------------------------------------------


class OnDevice(TorchFunctionMode):
    """Refuses what a recording cannot hold: a copy from the processor's memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor)
        result = func(*args, **(kwargs or {}))
        made = {t.device.type for t in tree_leaves(result) if isinstance(t, Tensor)}
        assert made <= {"meta"}, (str(func), made)
        return result


class AnywhereGenerator(torch.Generator):
    """A stream that passes for one of any device."""

    def __new__(cls, device: Any = None) -> AnywhereGenerator:
        return super().__new__(cls)


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_neither_waits_for_its_device_nor_copies_to_it(name: str, actor: str) -> None:
    """On torch's device without memory no number can be asked for and no stream made. Adam's own
    step is torch's."""
    own = {"algorithm": name, "spiking": {"backend": "torch"}}
    layers = presets_for({"env": "BipedalWalker-v3", "algorithm": name}), SMALL, own
    config = resolve(*layers, ACTORS[actor], {"learning": {"policy_delay": 2}})

    def gradients(algorithm: OffPolicy, loss: Tensor, *names: str) -> None:
        groups = [g for name in names for g in algorithm.optimizers[name].param_groups]
        parameters = [p for group in groups for p in group["params"]]
        torch.autograd.grad(loss, parameters, allow_unused=True)

    plain = partial(torch.optim.Adam, foreach=False)
    with (
        patch("torch.Generator", AnywhereGenerator),
        patch("torch.optim.Adam", lambda groups, betas, fused: plain(groups, betas=betas)),
        patch.object(OffPolicy, "optimize", gradients),
    ):
        algorithm = make_algorithm(config, 5, 2, "meta")
        batch = make_batch(0, "meta")
        with OnDevice():
            metrics = algorithm.update(batch) | algorithm.update(batch)
        assert "loss/actor" in metrics
        with pytest.raises(RuntimeError, match="meta"):
            float(metrics["loss/critic"])


def test_a_recording_is_refused_where_it_cannot_be_or_would_keep_what_changes() -> None:
    with pytest.raises(ConfigError, match=r"expected device cuda, found cpu; give --device cuda"):
        Manager(tiny(**GRAPH))
    width = {"spiking": {"surrogate_width": "linear:2:0.5"}}
    with pytest.raises(ConfigError, match=r"cuda_graph records one spiking.surrogate_width"):
        resolve(GRAPH, width, {"san": True})
    resolve(GRAPH, width, {"san": False})
    moves = {"adaptive": {"moves": "batch_size", "low": 64, "high": 512}}
    with pytest.raises(ConfigError, match=r"cuda_graph records batches of one size"):
        resolve(GRAPH, moves)


def test_a_run_with_recorded_updates_is_loaded_and_resumed_without_a_gpu(tmp_path: Path) -> None:
    manager = Manager(tiny(tmp_path))
    manager.train()
    write_config(resolve(manager.config.dump(), GRAPH), manager.directory)
    assert Manager.load(manager.directory).evaluate(1)["step"] == 160
    with pytest.raises(ConfigError, match=r"or --learning\.no-cuda-graph"):
        Manager.resume(manager.directory, total_steps=200)
    words = ["train", "--resume", str(manager.directory), "--total-steps", "200"]
    assert runner.main([*words, "--learning.no-cuda-graph"]) == 0
    assert Manager.load(manager.directory).step == 200


def test_a_rate_stays_in_the_memory_that_a_recording_reads() -> None:
    weight, rate = torch.nn.Parameter(torch.ones(3)), torch.tensor(0.1)
    optimizer = torch.optim.Adam([{"params": [weight], "lr": rate}], fused=True)
    (group,) = optimizer.param_groups
    set_learning_rate(group, 0.2)
    assert group["lr"] is rate and rate == torch.tensor(0.2)
    other = torch.optim.Adam([weight], lr=0.5, fused=True)
    load_optimizer(optimizer, other.state_dict() | {})
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0.5
    load_optimizer(other, optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5 and not isinstance(
        other.param_groups[0]["lr"], Tensor
    )


# -- which recording is replayed -----------------------------------------------------------------


class StandIn:
    """For `torch.cuda` without a GPU: recording an update leaves what it learns as it was, and a
    replay makes that update, with the memory that was recorded."""

    def __init__(self, algorithm: OffPolicy) -> None:
        self.algorithm, self.captured = algorithm, Captured(algorithm)
        self.replays: list[Any] = []

    def CUDAGraph(self) -> Any:
        graph = SimpleNamespace(register_generator_state=lambda stream: None)
        graph.replay = partial(self.replay, graph)
        return graph

    @contextmanager
    def graph(self, graph: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        state = copy.deepcopy(self.algorithm.state_dict())
        yield
        self.algorithm.load_state_dict(state | {"updates": self.algorithm.updates})

    def replay(self, graph: Any) -> None:
        (kind,) = [k for k, found in self.captured.recorded.items() if found.graph is graph]
        recorded = self.captured.recorded[kind]
        self.replays.append(kind)
        self.algorithm.updates -= 1
        kept = self.algorithm.prediction, self.algorithm.target
        for name, value in self.algorithm.update(recorded.batch).items():
            recorded.metrics[name].copy_(value)
        recorded.prediction.copy_(self.algorithm.prediction)
        recorded.target.copy_(self.algorithm.target)
        self.algorithm.prediction, self.algorithm.target = kept


def test_recordings_are_replayed_by_kind_with_the_batch_at_hand() -> None:
    """A delayed policy and two sizes of batches: parameters, metrics and errors as without."""
    config = resolve(SMALL, {"learning": {"policy_delay": 2, "rate_factor": "linear:1:0.1"}})
    plain, recorded = (make_algorithm(config, 5, 2, "cpu") for _ in range(2))
    stream = SimpleNamespace(wait_stream=lambda stream: None)
    with patch("torch.cuda.Stream", lambda: stream):
        cuda = StandIn(recorded)
    cuda_module = SimpleNamespace(
        CUDAGraph=cuda.CUDAGraph, graph=cuda.graph, current_stream=lambda: stream,
        stream=lambda stream: nullcontext(),
    )  # fmt: skip
    with patch("sansac.capture.torch.cuda", cuda_module):
        for i in range(40):
            batch = make_batch(i)
            if i % 3 == 0:
                batch = Batch(*(column[:20] for column in batch))
            for algorithm in (plain, recorded):
                algorithm.set_progress(i / 40)
            expected, found = plain.update(batch), cuda.captured(batch)
            assert differences(found, expected) == []
            assert torch.equal(recorded.td_error, plain.td_error)
            assert differences(parameters(recorded), parameters(plain)) == []
    assert set(cuda.captured.recorded) == {(n, acting) for n in (20, 32) for acting in (0, 1)}
    assert len(cuda.replays) == 40 - 4 * WARM_UP


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_recorded_and_plain_updates_give_equal_parameters(name: str, actor: str) -> None:
    own = {"algorithm": name, "learning": {"policy_delay": 2}}
    layers = presets_for({"env": "BipedalWalker-v3", "algorithm": name}), SMALL, own, ACTORS[actor]
    plain = make_algorithm(resolve(*layers), 5, 2, "cuda")
    recorded = make_algorithm(resolve(*layers, GRAPH), 5, 2, "cuda")
    update = updater(recorded)
    assert isinstance(update, Captured)
    for i in range(100):
        batch = make_batch(i, "cuda")
        for algorithm in (plain, recorded):
            algorithm.set_progress(i / 100)
        expected, found = plain.update(batch), update(batch)
        assert float(found["loss/critic"]) == pytest.approx(float(expected["loss/critic"]), 1e-4)
    assert len(update.recorded) == 2
    for (key, a), (_, b) in zip(
        recorded.critic.state_dict().items(), plain.critic.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.gpu
@GPU
def test_a_run_with_recorded_updates_is_resumed(tmp_path: Path) -> None:
    config = tiny(tmp_path, device="cuda", total_steps=160, san=True, **GRAPH)
    manager = Manager(config)
    manager.train()
    again = Manager.resume(manager.directory, total_steps=320)
    assert again.train()["step"] == 320
    assert again.updates == again.algorithm.updates
