"""One rank's parameters, buffers and optimizer state, given to every rank.

Optimizer state travels as tensors and JSON: nothing that comes from the network is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from bagua.torch_api._transport import Transport

__all__ = ["InitialState", "broadcast_state", "broadcast_tensors"]

#: What the first rank gives to all at the wrap: parameters, buffers and optimizer state; the same
#: without buffers; or nothing, when the caller has seen to it that ranks are equal.
InitialState = Literal["all", "without buffers", "nothing"]

#: Tensors are joined into messages of at most this many bytes.
_MESSAGE_BYTES = 32 * 1024**2


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], transport: Transport, source: int = 0
) -> None:
    """Overwrite ``tensors`` with those of rank ``source``, joined by dtype and device."""
    if transport.size == 1:
        return
    with torch.no_grad():
        for group in _messages(tensors):
            communicator = transport.main_communicator(group[0].device.type)
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            communicator.broadcast(flat, source)
            if communicator.rank == source:
                continue
            parts = torch.split(flat, [tensor.numel() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def broadcast_state(
    tensors: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    transport: Transport,
    source: int = 0,
) -> None:
    """Overwrite ``tensors`` and the optimizers' state with those of rank ``source``."""
    broadcast_tensors(tensors, transport, source)
    for optimizer in optimizers:
        broadcast_optimizer(optimizer, transport, source)


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
    optimizer: torch.optim.Optimizer, transport: Transport, source: int = 0
) -> None:
    """Overwrite the optimizer's state and hyper-parameters with those of rank ``source``.

    State that a rank does not have yet is created; CPU tensors such as ``step`` stay on CPU.

    Raises:
        TypeError: a state or hyper-parameter is neither a tensor nor plain data.
    """
    if transport.size == 1:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Every rank encodes, so that what cannot be encoded raises everywhere and nobody waits.
    mine = {
        "state": [
            {
                str(key): _encode(value, str(key))
                for key, value in optimizer.state.get(p, {}).items()
            }
            for p in parameters
        ],
        "groups": [
            {key: _encode(value, key) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    }
    described = json.loads(_broadcast_text(json.dumps(mine), transport, source))
    tensors: list[torch.Tensor] = []
    for parameter, entries in zip(parameters, described["state"], strict=True):
        if entries:
            _fill(optimizer.state[parameter], entries, parameter.device, tensors)
    for group, entries in zip(optimizer.param_groups, described["groups"], strict=True):
        _fill(group, entries, torch.device("cpu"), tensors)
    broadcast_tensors(tensors, transport, source)


def _fill(
    owner: dict[str, Any],
    entries: dict[str, Any],
    device: torch.device,
    tensors: list[torch.Tensor],
) -> None:
    for key, entry in entries.items():
        if "tensor" not in entry:
            owner[key] = _decode(entry)
            continue
        dtype = getattr(torch, entry["tensor"])
        wanted = device if entry["device"] != "cpu" else torch.device("cpu")
        old = owner.get(key)
        fits = isinstance(old, torch.Tensor) and (old.dtype, list(old.shape), old.device.type) == (
            dtype,
            entry["shape"],
            wanted.type,
        )
        if not fits:
            owner[key] = torch.zeros(entry["shape"], dtype=dtype, device=wanted)
        tensors.append(owner[key])


def _encode(value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": dtype, "shape": list(value.shape), "device": value.device.type}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, key) for item in value]}
    raise TypeError(
        f"optimizer entry '{key}' is a {type(value).__name__}; only tensors, numbers, strings, "
        "None and lists or tuples of them can be sent to the other ranks. Wrap before the "
        "optimizer has state, or leave this optimizer out of with_bagua([...])."
    )


def _decode(entry: dict[str, Any]) -> Any:
    if "value" in entry:
        return entry["value"]
    if "list" in entry:
        return [_decode(item) for item in entry["list"]]
    return tuple(_decode(item) for item in entry["tuple"])


def _broadcast_text(text: str, transport: Transport, source: int) -> str:
    communicator = transport.main_communicator("cpu")
    # Memory of torch's own: gloo's thread may be the last to let go of it, which would need the GIL
    # while destroying the group waits for that thread with it.
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()
    length = torch.tensor([data.numel()], device="cpu")
    communicator.broadcast(length, source)
    if communicator.rank != source:
        data = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    communicator.broadcast(data, source)
    return bytes(data.tolist()).decode()
