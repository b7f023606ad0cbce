"""The mean of weights that differ between ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from bagua._core.state.initial_state import broadcast_tensors
from bagua._core.state.shards import is_sharded
from bagua._core.state.untrained import mean_of
from bagua.torch_api.distributed import BaguaModule

__all__ = ["average_weights"]


def average_weights(
    model: torch.nn.Module, *, mean_buffers: Sequence[str] | None = None
) -> torch.nn.Module:
    """A copy of a wrapped module with the mean of all ranks' weights: the one to evaluate or save.

    Every rank of the module's group calls it, between two steps. Parameters, frozen ones too, and
    the statistics of batch and instance norms are averaged (in float32, or float64 where they are
    float64); other buffers have the first rank's values. All have the same bits on every rank. The
    module itself is left alone, and training can go on.

    Args:
        model: a module after ``bagua.wrap``, or one that holds such a module as ``module``.
        mean_buffers: names of the floating-point buffers that are averaged; ``*`` stands for any
            text. None: as the algorithm has it, else ``running_mean`` and ``running_var`` of
            torch's batch and instance norms.

    Returns:
        A module of the class that the module had before it was wrapped.

    Raises:
        TypeError: the module is not wrapped, or a parameter is a DTensor.
        ValueError: the module has no such buffer.
        BaguaError: another rank failed or does not answer.

    Example::

        model = bagua.wrap(model, [optimizer], DecentralizedAlgorithm())
        ...  # the training loop
        torch.save(bagua.average_weights(model).state_dict(), f"{folder}/{bagua.get_rank()}.pt")
    """
    wrapped = model if isinstance(model, BaguaModule) else getattr(model, "module", None)
    if not isinstance(wrapped, BaguaModule):
        raise TypeError("average_weights takes a module after bagua.wrap")
    ddp = wrapped.bagua_ddp
    for name, parameter in wrapped.named_parameters():
        if is_sharded(parameter):
            raise TypeError(
                f"average_weights copies a module, which torch cannot where parameters are "
                f"DTensors, such as '{name}'. Average the shards of a state instead, on all ranks: "
                "torch.distributed.all_reduce(value.to_local(), ReduceOp.AVG, group=...) with the "
                "group of the islands, for each value of model.state_dict()"
            )
    averaged = ddp.bagua_mean_buffers(mean_buffers)
    with ddp.exclusive():
        copied: Any = copy.deepcopy(wrapped, _computed(wrapped))
    within = ddp.module is getattr(wrapped, "module", None)  # a DistributedDataParallel
    result: torch.nn.Module = copied.module if within else copied
    connections = ddp.process_group.connections
    if connections.size == 1:
        return result
    buffers = {n: b for n, b in result.named_buffers() if n not in ddp.parameters_to_ignore}
    with torch.no_grad(), connections.collective_phase("average_weights()"):
        others = [b for n, b in buffers.items() if n not in averaged]
        for tensor in [*result.parameters(), *(buffers[name] for name in averaged)]:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.copy_(mean_of(tensor, connections))
            else:
                others.append(tensor)
        broadcast_tensors(others, connections)
    return result


def _computed(module: torch.nn.Module) -> dict[int, Any]:
    """Copies, for ``deepcopy``, of tensors that forwards compute and keep, which it refuses."""
    return {
        id(value): value.detach().clone()
        for child in module.modules()
        for value in [*vars(child).values(), *child._buffers.values()]
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
