"""The mean of weights that differ between ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch

from bagua import _C
from bagua._core.state.shards import is_sharded
from bagua.torch_api.distributed import BaguaModule

__all__ = ["average_weights"]


def average_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a wrapped module with the mean of all ranks' weights: the one to evaluate or save.

    Every rank of the module's group calls it, between two steps. Parameters and floating buffers
    are averaged (in float32, or float64 where they are float64), and have the same bits on every
    rank; everything else is this rank's own. The module itself is left alone, and training can go
    on.

    Args:
        model: a module after ``with_bagua``, or one that holds such a module as ``module``.

    Returns:
        A module of the class that the module had before it was wrapped.

    Raises:
        TypeError: the module is not wrapped, or a parameter is a DTensor.
        BaguaError: another rank failed or does not answer.

    Example::

        model = model.with_bagua([optimizer], DecentralizedAlgorithm())
        ...  # the training loop
        torch.save(bagua.average_weights(model).state_dict(), f"{folder}/{bagua.get_rank()}.pt")
    """
    wrapped = model if isinstance(model, BaguaModule) else getattr(model, "module", None)
    if not isinstance(wrapped, BaguaModule):
        raise TypeError("average_weights takes a module after with_bagua")
    ddp = wrapped.bagua_ddp
    for name, parameter in wrapped.named_parameters():
        if is_sharded(parameter):
            raise TypeError(
                f"average_weights copies a module, which torch cannot where parameters are "
                f"DTensors, such as '{name}'. Average the shards of a state instead, on all ranks: "
                "torch.distributed.all_reduce(value.to_local(), ReduceOp.AVG, group=...) with the "
                "group of the islands, for each value of model.state_dict()"
            )
    with ddp.exclusive():
        copied: Any = copy.deepcopy(wrapped)
    within = ddp.module is getattr(wrapped, "module", None)  # a DistributedDataParallel
    result: torch.nn.Module = copied.module if within else copied
    connections = ddp.process_group.connections
    if connections.size == 1:
        return result
    with torch.no_grad():
        for tensor in [*result.parameters(), *result.buffers()]:
            values = tensor.detach().resolve_conj()
            values = torch.view_as_real(values) if values.is_complex() else values
            if not values.is_floating_point():
                continue
            wide = torch.float64 if values.dtype == torch.float64 else torch.float32
            mean = values.to(wide, copy=True).contiguous()
            connections.main_communicator(tensor.device).all_reduce(mean, _C.ReduceOp.AVG)
            tensor.copy_(torch.view_as_complex(mean) if tensor.is_complex() else mean)
    return result
