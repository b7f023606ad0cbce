"""Start of a distributed optimizer: checks the number of ranks and broadcasts the weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from bagua._core.state.initial_state import broadcast_tensors

from mlbench_core.aggregation.pytorch.aggregation import Aggregation

__all__ = ["begin_together"]


@torch.no_grad()
def begin_together(
    aggregation: Aggregation,
    world_size: int | None,
    named: Mapping[str, torch.Tensor],
    owner: str,
) -> None:
    """Overwrite the tensors with those of rank 0. All ranks call it.

    Args:
        world_size: the user's number of ranks, or None.
        owner: the optimizer's name, for messages.

    Raises:
        ValueError: ``world_size`` is not the number of ranks.
        BaguaMismatchError: on every rank, if their tensors differ in names, shapes or dtypes.
        RuntimeError: there are other ranks but no process group.
    """
    connections = aggregation._connections()
    if world_size is not None and connections.size != world_size:
        raise ValueError(
            f"{owner} was made with world_size={world_size}, but there are {connections.size} "
            "rank(s); pass torch.distributed.get_world_size()"
        )
    lines = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in named.items()]
    connections.agree(f"the parameters and buffers of {owner}", lines)
    tensors = [tensor.detach() for tensor in named.values()]
    sent = [tensor.to(aggregation._device_for(tensor)) for tensor in tensors]
    broadcast_tensors(sent, connections)
    for tensor, got in zip(tensors, sent, strict=True):
        if got is not tensor:
            tensor.copy_(got)
