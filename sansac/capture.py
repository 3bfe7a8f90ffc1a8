"""An update recorded as CUDA graphs: one launch replaces the hundreds that it is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sansac.config import ConfigError
from sansac.off_policy import OffPolicy
from sansac.replay import Batch

WARM_UP = 3  # updates before one is recorded: libraries and optimisers make their memory in them


class Recorded(NamedTuple):
    """A graph and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    metrics: dict[str, Tensor]
    prediction: Tensor
    target: Tensor


def updater(algorithm: OffPolicy) -> Callable[[Batch], dict[str, Tensor]]:
    """What makes an update: the algorithm, with learning.cuda_graph a recording of it. Raises
    ConfigError for a recording elsewhere than on CUDA."""
    if not algorithm.config.learning.cuda_graph:
        return lambda batch: algorithm.update(batch)  # looked up anew: a user may wrap it
    if algorithm.device.type != "cuda":
        raise ConfigError(
            f"learning.cuda_graph records on a GPU: expected device cuda, found "
            f"{algorithm.device.type}; give --device cuda, or --learning.no-cuda-graph"
        )
    return Captured(algorithm)


class Captured:
    """`update(batch)` of an algorithm on CUDA: run as it is a few times, then recorded, then
    replayed.

    A graph keeps what Python decided while it was recorded: there is one for each size of a batch
    and for updates with and without a delayed policy. What is returned, and what `td_error` tells
    of, is the graph's own memory, which the next update of its kind overwrites.
    """

    def __init__(self, algorithm: OffPolicy) -> None:
        self.algorithm = algorithm
        self.stream = torch.cuda.Stream()
        self.seen: Counter[tuple[int, bool]] = Counter()
        self.recorded: dict[tuple[int, bool], Recorded] = {}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        algorithm = self.algorithm
        delay = algorithm.config.learning.policy_delay
        kind = len(batch.reward), (algorithm.updates + 1) % delay == 0
        self.seen[kind] += 1
        if self.seen[kind] <= WARM_UP:
            return self._beside(batch)
        if kind in self.recorded:
            algorithm.updates += 1
        else:
            self.recorded[kind] = self._record(batch)
        graph, own, metrics, algorithm.prediction, algorithm.target = self.recorded[kind]
        torch._foreach_copy_(list(own), list(batch))
        graph.replay()
        return metrics

    def _beside(self, batch: Batch) -> dict[str, Tensor]:
        """The update on a stream of its own, as a recording is."""
        here, beside = torch.cuda.current_stream(), self.stream
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            metrics = self.algorithm.update(batch)
        here.wait_stream(beside)
        return metrics

    def _record(self, batch: Batch) -> Recorded:
        """Record an update, which does not run before it is replayed but counts."""
        own = Batch(*(column.clone() for column in batch))
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.algorithm.noise)
        # Another thread may be writing a checkpoint, whose copies would end a "global" recording.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            metrics = self.algorithm.update(own)
        return Recorded(graph, own, metrics, self.algorithm.prediction, self.algorithm.target)
