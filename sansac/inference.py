"""The deterministic policy of one observation without torch: what a control loop calls.

A product of one row takes torch longer to dispatch than to compute. Where an actor is products with
ReLU, or with neurons that `kernels` fuses, C computes the whole of it in one call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from sansac import kernels
from sansac.networks import DenseActor, fold_batch_norm
from sansac.off_policy import OffPolicy
from sansac.spiking import FUSED, SpikingActor, SpikingLayer, readout_linear


def action_mean(algorithm: OffPolicy) -> kernels.ActionMean | None:
    """The policy as it is now; None where C does not compute it.

    It does on a CPU with a compiler, without LayerNorm: for a dense actor with ReLU, for a spiking
    one of the encoder `current`, a decoder that reads mean spikes, without connections among its
    neurons, the neurons `lif`, `plif` or `cuba` and of the backend `native`.
    """
    actor, on_cpu = algorithm.policy_actor, algorithm.device.type == "cpu"
    if not on_cpu or any(isinstance(module, nn.LayerNorm) for module in actor.modules()):
        return None
    if algorithm.config.actor.levels:
        return None
    backend = "auto"
    neurons: list[kernels.Neuron] = []
    if isinstance(actor, SpikingActor):
        config = actor.config
        unlike = config.encoder != "current" or config.decoder == "membrane"
        if unlike or config.output_connections or config.neuron not in FUSED:
            return None
        backend = config.backend
        neurons = [neuron(actor, i) for i in range(len(actor.layers))]
    if kernels.backend_for(backend, algorithm.device) != "native":
        return None
    folded = fold_batch_norm(actor)
    linears: list[Any] = [getattr(layer, "linear", layer) for layer in folded.layers]
    linears.append(folded.mean if isinstance(folded, DenseActor) else readout_linear(folded))
    norm = algorithm.norm
    if algorithm.config.normalize_observations:
        return kernels.ActionMean(linears, neurons, norm.centre, norm.scale, norm.clip)
    as_it_is = torch.zeros_like(norm.centre), torch.ones_like(norm.scale), math.inf
    return kernels.ActionMean(linears, neurons, *as_it_is)


def neuron(actor: SpikingActor, index: int) -> kernels.Neuron:
    """The constants of a layer, learned ones as they are now."""
    layer, config = actor.layers[index], actor.config
    assert isinstance(layer, SpikingLayer)
    current_based = config.neuron == "cuba"
    decay = config.voltage_decay if current_based else config.tau
    if config.neuron == "plif":
        decay = 1 / layer.node.get_parameter("w").detach().sigmoid().item()
    return kernels.Neuron(
        time_steps=config.time_steps,
        constant=index == 0,
        output="mean" if index == len(actor.layers) - 1 else "spikes",
        current_based=current_based,
        decay_input=config.decay_input and not current_based,
        detach_reset=True,
        decay=decay,
        current_decay=config.current_decay,
        v_threshold=float(torch.as_tensor(layer.v_threshold).detach()),
        v_reset=0.0,
        surrogate="rectangle",
        alpha=1.0,
    )
