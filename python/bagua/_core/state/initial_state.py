"""Broadcasts one rank's parameters, buffers and optimizer state.

Optimizer state travels as tensors and JSON: nothing that comes from the network is unpickled.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.state.optimizer_format import (
    describe_optimizer,
    most_text_bytes,
    read_description,
    tensor_like,
)
from bagua._core.state.shards import local, whole

__all__ = ["InitialState", "broadcast_state", "broadcast_tensors", "communicating_optimizer"]

#: Broadcast by the first rank at the wrap: parameters, buffers and optimizer state; the same
#: without buffers; or nothing, when the caller has seen to it that ranks are equal.
InitialState = Literal["all", "without buffers", "nothing"]

#: Tensors are joined into messages of at most this many bytes.
_MESSAGE_BYTES = 32 * 1024**2


#: Names of collectives of torch and of functions around them, and of optimizers that call some
#: through another object.
_COLLECTIVES = {
    *(
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "allreduce_async_",
        "all_to_all_single",
    ),
    *("broadcast", "reduce_scatter", "reduce_scatter_tensor", "average_parameters"),
}
_SHARDED = "ZeroRedundancyOptimizer"


def _own_classes(optimizer: torch.optim.Optimizer) -> list[type]:
    return [c for c in type(optimizer).__mro__ if not issubclass(torch.optim.Optimizer, c)]


def communicating_optimizer(
    optimizers: Sequence[torch.optim.Optimizer],
) -> torch.optim.Optimizer | None:
    """The first optimizer whose class calls a collective: one that communicates by itself."""
    for optimizer in optimizers:
        for owner in _own_classes(optimizer):
            for method in vars(owner).values():
                code = (
                    getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
                )
                if code is not None and _COLLECTIVES & {*code.co_names}:
                    return optimizer
    return None


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], connections: Connections, source: int = 0
) -> None:
    """Overwrite ``tensors`` with those of rank ``source``, joined by dtype and device."""
    if connections.size == 1:
        return
    with torch.no_grad():
        for group in _messages(tensors):
            communicator = connections.main_communicator(group[0].device)
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            # Transports know no complex numbers, only the pairs of reals that they are.
            communicator.broadcast(torch.view_as_real(flat) if flat.is_complex() else flat, source)
            if communicator.rank == source:
                continue
            parts = torch.split(flat, [tensor.numel() for tensor in group])
            of_tensors = [p.view(t.shape) for t, p in zip(group, parts, strict=True)]
            if flat.is_complex():  # a list cannot be copied into conjugated views
                for tensor, part in zip(group, of_tensors, strict=True):
                    tensor.copy_(part)
            else:
                torch._foreach_copy_(group, of_tensors)


def broadcast_state(
    tensors: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    connections: Connections,
    source: int = 0,
) -> None:
    """Overwrite ``tensors`` and the optimizers' state with those of rank ``source``.

    A ``ZeroRedundancyOptimizer`` keeps its own state: each rank has that of other parameters.
    """
    with connections.collective_phase(f"giving rank {source}'s state to all ranks"):
        broadcast_tensors(tensors, connections, source)
        for optimizer in optimizers:
            if all(owner.__name__ != _SHARDED for owner in type(optimizer).__mro__):
                broadcast_optimizer(optimizer, connections, source)


def _messages(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in kinds.values():
        message: list[torch.Tensor] = []
        size = 0
        for tensor in members:
            message.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= _MESSAGE_BYTES:
                yield message
                message, size = [], 0
        if message:
            yield message


def broadcast_optimizer(
    optimizer: torch.optim.Optimizer, connections: Connections, source: int = 0
) -> None:
    """Overwrite the optimizer's state and hyper-parameters with those of rank ``source``.

    State that a rank does not have yet is created; CPU tensors such as ``step`` stay on CPU.

    Raises:
        TypeError: on every rank, if a state or hyper-parameter of ``source`` is neither a tensor
            nor plain data.
        BaguaMismatchError: the message does not describe an optimizer of these parameters; nothing
            was changed.
    """
    if connections.size == 1:
        return
    # 1. The description, as text.
    problem: TypeError | None = None
    text = ""
    try:
        text = describe_optimizer(optimizer)
    except TypeError as error:
        problem = error
    received = _broadcast_text(text, problem, most_text_bytes(optimizer), connections, source)
    described = read_description(received, optimizer)
    # 2. A place for every tensor.
    tensors: list[torch.Tensor] = []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, entries in zip(parameters, described.states, strict=True):
        if entries:
            _fill(optimizer.state[parameter], entries, parameter, tensors)
    for group, entries in zip(optimizer.param_groups, described.groups, strict=True):
        _fill(group, entries, torch.empty(0, device="cpu"), tensors)
    # 3. Their values.
    broadcast_tensors(tensors, connections, source)


def _fill(
    owner: dict[str, Any],
    entries: dict[str, Any],
    parameter: torch.Tensor,
    tensors: list[torch.Tensor],
) -> None:
    for key, entry in entries.items():
        owner[key] = _value_of(entry, owner.get(key), parameter, tensors)


def _value_of(
    entry: dict[str, Any], old: Any, parameter: torch.Tensor, tensors: list[torch.Tensor]
) -> Any:
    if "tensor" in entry:
        mine = local(old) if isinstance(old, torch.Tensor) else None
        tensors.append(tensor_like(entry, mine, parameter.device))
        return old if tensors[-1] is mine else whole(tensors[-1], parameter)
    if "value" in entry:
        return entry["value"]
    if "list" in entry:
        return [_value_of(item, None, parameter, tensors) for item in entry["list"]]
    return tuple(_value_of(item, None, parameter, tensors) for item in entry["tuple"])


def _broadcast_text(
    text: str, problem: TypeError | None, most: int, connections: Connections, source: int
) -> bytes:
    """The text of ``source``, whose ``problem`` is that there is none; at most ``most`` bytes."""
    communicator = connections.main_communicator("cpu")
    # Memory of torch's own: gloo's thread may be the last to let go of it, which would need the GIL
    # while destroying the group waits for that thread with it.
    data = torch.tensor([-1], device="cpu")
    if problem is None:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()
    length = torch.tensor([-1 if problem else data.numel()], device="cpu")
    communicator.broadcast(length, source)
    count = int(length)
    if count == -1:
        raise problem or TypeError(
            f"an optimizer of rank {source} has an entry that cannot be sent, and rank {source} "
            "says which"
        )
    if not 0 < count <= most:
        raise _C.BaguaMismatchError(
            f"rank {source} describes an optimizer's state in {count} bytes, where at most {most} "
            "are possible for the parameters of this rank's optimizer. Give with_bagua the same "
            "optimizers of the same parameters on every rank."
        )
    if communicator.rank != source:
        data = torch.zeros(count, dtype=torch.uint8, device="cpu")
    communicator.broadcast(data, source)
    received = bytearray(count)
    torch.frombuffer(received, dtype=torch.uint8).copy_(data)
    return bytes(received)
