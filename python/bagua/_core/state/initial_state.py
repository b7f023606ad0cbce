"""Broadcasts one rank's parameters, buffers and optimizer state.

Optimizer state travels as tensors and JSON (docs/wire-format.md, "Optimizer state"): which entries
there are, plain values, and of tensors dtype, shape and device. Nothing that comes from the network
is unpickled. A receiver takes nothing for granted: before it allocates or changes anything it
compares all of the text with what it knows of its own optimizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.state.shards import local, whole

#: Broadcast by the first rank at the wrap: parameters, buffers and optimizer state; the same
#: without buffers; or nothing, when the caller has seen to it that ranks are equal.
InitialState = Literal["all", "without buffers", "nothing"]

#: Tensors are joined into messages of at most this many bytes.
_MESSAGE_BYTES = 32 * 1024**2


_SHARDED = "ZeroRedundancyOptimizer"

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}
_KINDS = ({"tensor", "shape", "device"}, {"value"}, {"list"}, {"tuple"})

# Beyond the state of any optimizer: LBFGS, which has most, keeps 203 times its parameters.
_MOST_STATE_PER_PARAMETER_BYTE = 256
_MOST_STATE_BESIDES = 16 * 1024**2
_MOST_TEXT_PER_PARAMETER = 64 * 1024
_MOST_TEXT_BESIDES = 1024**2
_MOST_DEPTH = 16
_MOST_DIMENSIONS = 64


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


def _messages(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    if not filled:
        return []
    limits = [_MESSAGE_BYTES]
    groups, _ = dist._compute_bucket_assignment_by_size(filled, limits)  # type: ignore[attr-defined]
    return [[filled[number] for number in group] for group in groups]


def broadcast_optimizer(
    optimizer: torch.optim.Optimizer, connections: Connections, source: int = 0
) -> None:
    """Overwrite the optimizer's state and hyper-parameters with those of rank ``source``.

    State that a rank does not have yet is created; CPU tensors such as ``step`` stay on CPU.
    TypeError on every rank where ``source`` has neither tensors nor plain data; BaguaMismatchError,
    with nothing changed, where the message describes no optimizer of these parameters.
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
    states, groups = read_description(received, optimizer)
    # 2. A place for every tensor.
    tensors: list[torch.Tensor] = []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, entries in zip(parameters, states, strict=True):
        if entries:
            _fill(optimizer.state[parameter], entries, parameter, tensors)
    for group, entries in zip(optimizer.param_groups, groups, strict=True):
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


# The text, and its checks.


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [
        {str(key): _encode(value, str(key)) for key, value in optimizer.state.get(p, {}).items()}
        for p in parameters
    ]
    groups = [
        {key: _encode(value, key) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return json.dumps({"state": states, "groups": groups})


def _encode(value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, torch.Tensor) and str(value.dtype).removeprefix("torch.") in _DTYPES:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": dtype, "shape": list(local(value).shape), "device": value.device.type}
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


def most_text_bytes(optimizer: torch.optim.Optimizer) -> int:
    described = sum(1 + len(group["params"]) for group in optimizer.param_groups)
    return _MOST_TEXT_BESIDES + _MOST_TEXT_PER_PARAMETER * described


def read_description(
    text: bytes, optimizer: torch.optim.Optimizer
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What :func:`describe_optimizer` wrote for an optimizer of the same parameters.

    The entries of each parameter, in the order of the groups, and those of each group.
    """
    try:
        read = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        _refuse(f"it is no JSON text ({error})")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not isinstance(read, dict) or read.keys() != {"state", "groups"}:
        _refuse("it does not consist of 'state' and 'groups'")
    reader = _Reader(parameters)
    states = reader.rows(read["state"], "state", len(parameters))
    groups = reader.rows(read["groups"], "groups", len(optimizer.param_groups))
    if any("params" in group for group in groups):
        _refuse("a group has the entry 'params', which is never sent")
    return states, groups


class _Reader:
    """Checks entries, and counts the bytes of the tensors that they announce."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._devices = {"cpu", *(p.device.type for p in parameters)}
        own = sum(_bytes_of(p) for p in parameters)
        self._most = _MOST_STATE_BESIDES + _MOST_STATE_PER_PARAMETER_BYTE * own
        self._announced = 0

    def rows(self, value: Any, what: str, count: int) -> list[dict[str, Any]]:
        if not isinstance(value, list) or len(value) != count:
            there = f"{len(value)} rows" if isinstance(value, list) else "no list"
            _refuse(f"'{what}' has {there}, this rank's optimizer has {count}")
        for number, row in enumerate(value):
            if not isinstance(row, dict):
                _refuse(f"row {number} of '{what}' is no object")
            for key, entry in row.items():
                self._check(entry, f"{what}[{number}]['{key[:80]}']", 0)
        return value

    def _check(self, entry: Any, where: str, depth: int) -> None:
        if not isinstance(entry, dict) or entry.keys() not in _KINDS:
            _refuse(f"{where} is no tensor, value, list or tuple")
        if depth > _MOST_DEPTH:
            _refuse(f"{where} is nested deeper than {_MOST_DEPTH} levels")
        if "tensor" in entry:
            self._check_tensor(entry, where)
        elif "value" in entry:
            if entry["value"] is not None and not isinstance(entry["value"], (int, float, str)):
                _refuse(f"{where} is no plain value")
        else:
            items = next(iter(entry.values()))
            if not isinstance(items, list):
                _refuse(f"{where} is no list of entries")
            for item in items:
                self._check(item, where, depth + 1)

    def _check_tensor(self, entry: dict[str, Any], where: str) -> None:
        dtype, shape, device = entry["tensor"], entry["shape"], entry["device"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            _refuse(f"{where} has the dtype {str(dtype)[:80]!r}, which is not sent")
        if not isinstance(device, str) or device not in self._devices:
            _refuse(f"{where} is on {str(device)[:80]!r}; here are {sorted(self._devices)}")
        sizes: list[Any] = shape if isinstance(shape, list) else [None]
        if len(sizes) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in sizes):
            _refuse(f"{where} has no shape, but {str(shape)[:80]}")
        # One more for each: the tensor itself takes memory too.
        self._announced += (math.prod(sizes) + 1) * _DTYPES[dtype].itemsize
        # Views of zero elements cost nothing, but their other sizes must fit an int64 as well.
        if self._announced > self._most or math.prod(max(size, 1) for size in sizes) >= 2**62:
            _refuse(
                f"{where} of shape {str(shape)[:80]} would bring the state to "
                f"{self._announced} bytes, more than {self._most}, which is beyond any "
                "state of these parameters"
            )


def tensor_like(entry: dict[str, Any], old: Any, device: torch.device) -> torch.Tensor:
    """A tensor as ``entry`` (a checked one) says: ``old`` where it fits, a new one elsewhere."""
    dtype = _DTYPES[entry["tensor"]]
    wanted = device if entry["device"] != "cpu" else torch.device("cpu")
    if isinstance(old, torch.Tensor) and (old.dtype, list(old.shape), old.device.type) == (
        dtype,
        entry["shape"],
        wanted.type,
    ):
        return old
    return torch.zeros(entry["shape"], dtype=dtype, device=wanted)


def _refuse(why: str) -> NoReturn:
    raise _C.BaguaMismatchError(
        f"the description of an optimizer's state that came from another rank was refused: {why}. "
        "Give with_bagua the same optimizers of the same parameters on every rank; where they are, "
        "the message was corrupted on the wire."
    )


def _bytes_of(parameter: torch.Tensor) -> int:
    """Bytes of a parameter; 0 of one that is lazy and has no shape yet."""
    if torch.nn.parameter.is_lazy(parameter):
        return 0
    return parameter.numel() * parameter.element_size()
