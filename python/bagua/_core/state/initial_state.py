"""Broadcasts one rank's parameters, buffers and optimizer state.

Optimizer state travels as tensors and JSON (:mod:`entries`). Nothing that comes from the network
is unpickled. A receiver takes nothing for granted: before it allocates or changes anything it
compares all of the text with what it knows of its own optimizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.state.entries import (
    DTYPES,
    Entry,
    Reader,
    UnknownNameError,
    Writer,
    held,
)
from bagua._core.state.shards import local, whole

#: Broadcast by the first rank at the wrap: parameters, buffers and optimizer state; the same
#: without buffers; or nothing, when the caller has seen to it that ranks are equal.
InitialState = Literal["all", "without buffers", "nothing"]

#: Of a description, in the message that tells its length.
_BYTES_BESIDE_LENGTH = 4088

#: Tensors are joined into messages that end with the tensor that reaches so many bytes.
_MESSAGE_BYTES = 32 * 1024**2


_SHARDED = "ZeroRedundancyOptimizer"

# Beyond the state of any optimizer: LBFGS, which has most, keeps 203 times its parameters.
_MOST_STATE_PER_PARAMETER_BYTE = 256
_MOST_STATE_BESIDES = 16 * 1024**2
_MOST_TEXT_PER_PARAMETER = 64 * 1024
_MOST_TEXT_BESIDES = 1024**2
_MOST_DIMENSIONS = 64


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], connections: Connections, source: int = 0
) -> None:
    """Overwrite ``tensors`` with those of rank ``source``, joined by device."""
    if connections.size == 1:
        return
    with torch.no_grad():
        for group in _messages(tensors):
            communicator = connections.main_communicator(group[0].device)
            flat = torch.cat([_as_bytes(tensor) for tensor in group])
            communicator.broadcast(flat, source)
            if communicator.rank == source:
                continue
            parts = torch.split(flat, [tensor.nbytes for tensor in group])
            theirs = [p.view(t.dtype).view(t.shape) for t, p in zip(group, parts, strict=True)]
            if any(tensor.is_complex() for tensor in group):  # a list has no conjugated views
                for tensor, part in zip(group, theirs, strict=True):
                    tensor.copy_(part)
            else:
                torch._foreach_copy_(group, theirs)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat.resolve_conj().resolve_neg().view(torch.uint8)


def broadcast_state(
    tensors: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    connections: Connections,
    source: int = 0,
    what: str = "",
) -> None:
    """Overwrite ``tensors``, and the optimizers' state and hyper-parameters, with those of a rank.

    State that a rank does not have yet is created; CPU tensors such as ``step`` stay on CPU.
    A ``ZeroRedundancyOptimizer`` keeps its own state: each rank has that of other parameters.
    TypeError on every rank where ``source`` has neither tensors nor plain data; BaguaMismatchError,
    with nothing changed, where a message describes no optimizer of these parameters.

    what: words for the wait.
    """
    if connections.size == 1:
        return
    own = [o for o in optimizers if all(k.__name__ != _SHARDED for k in type(o).__mro__)]
    with connections.collective_phase(what or f"giving rank {source}'s state to all ranks"):
        # 1. The descriptions, as text, whose beginnings travel with the tensors.
        texts = [_Text(optimizer) for optimizer in own]
        broadcast_tensors([*tensors, *(text.head for text in texts)], connections, source)
        for optimizer, text in zip(own, texts, strict=True):
            received = text.broadcast_rest(most_text_bytes(optimizer), connections, source)
            states, others, groups, reader = read_description(received, optimizer)
            # 2. A place for every tensor.
            held = text.tensors
            if connections.main_communicator("cpu").rank != source:
                _fill(optimizer, states, others, groups, reader)
                held = reader.tensors
            # 3. Their values.
            broadcast_tensors(held, connections, source)


def _messages(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one device each, those of large elements first: views of the bytes are aligned."""
    messages: list[list[torch.Tensor]] = []
    open_ones: dict[torch.device, tuple[list[torch.Tensor], int]] = {}
    for tensor in sorted(tensors, key=lambda tensor: -tensor.element_size()):
        if tensor.numel() == 0:
            continue
        message, size = open_ones.get(tensor.device, ([], 0))
        if not message:
            messages.append(message)
        message.append(tensor)
        size += tensor.nbytes
        open_ones[tensor.device] = (message, size) if size < _MESSAGE_BYTES else ([], 0)
    return messages


def _fill(
    optimizer: torch.optim.Optimizer,
    states: list[Entry | None],
    others: Entry,
    groups: list[Entry],
    reader: _Reader,
) -> None:
    for parameter, entry in zip(_parameters_of(optimizer), states, strict=True):
        reader.parameter = parameter
        if entry is None:
            optimizer.state.pop(parameter, None)
        elif isinstance(old := optimizer.state.get(parameter, {}), dict) and "dict" in entry:
            _fill_all(optimizer.state.setdefault(parameter, old), entry, reader)
        else:
            optimizer.state[parameter] = reader.value(entry, old)
    reader.parameter = None
    _fill_all(optimizer.state, others, reader)
    for group, entry in zip(optimizer.param_groups, groups, strict=True):
        reader.fill(group, entry, group)


def _fill_all(owner: dict[Any, Any], entry: Entry, reader: _Reader) -> None:
    """Have ``owner`` hold the values of a ``dict``, and no other but those of parameters."""
    keys = [reader.value(key) for key, _ in entry["dict"]]
    for key in [key for key in owner if not isinstance(key, torch.Tensor) and key not in keys]:
        del owner[key]
    reader.fill(owner, entry, owner)


class _Text:
    """A description of an optimizer. Its head, which has the length, is broadcast before the rest.

    Most texts are short, and one message is half the time of two.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.problem: TypeError | None = None  # why there is none
        self.tensors = list[torch.Tensor]()
        # Memory of torch's own: gloo's thread may be the last to let go of it, which would need the
        # GIL while destroying the group waits for that thread with it.
        self._data = torch.zeros(1, dtype=torch.uint8, device="cpu")
        try:
            text, self.tensors = describe_optimizer(optimizer)
            self._data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()
        except TypeError as error:
            self.problem = error
        self.head = torch.zeros(8 + _BYTES_BESIDE_LENGTH, dtype=torch.uint8, device="cpu")
        self.head[:8].view(torch.int64)[0] = -1 if self.problem else self._data.numel()
        self.head[8:][: self._data.numel()] = self._data[:_BYTES_BESIDE_LENGTH]

    def broadcast_rest(self, most: int, connections: Connections, source: int) -> bytes:
        """The text of ``source``, at most ``most`` bytes, whose head was broadcast."""
        communicator = connections.main_communicator("cpu")
        count, beside, data = int(self.head[:8].view(torch.int64)), self.head[8:], self._data
        if count == -1:
            raise self.problem or TypeError(
                f"an optimizer of rank {source} has an entry that cannot be sent, and rank "
                f"{source} says which"
            )
        if not 0 < count <= most:
            raise _C.BaguaMismatchError(
                f"rank {source} describes an optimizer's state in {count} bytes, where at most "
                f"{most} are possible for the parameters of this rank's optimizer. Give bagua.wrap "
                "the same optimizers of the same parameters on every rank."
            )
        if communicator.rank != source:
            data = torch.zeros(count, dtype=torch.uint8, device="cpu")
            data[: beside.numel()] = beside[:count]
        if count > beside.numel():
            communicator.broadcast(data[beside.numel() :], source)
        received = bytearray(count)
        torch.frombuffer(received, dtype=torch.uint8).copy_(data)
        return bytes(received)


# The text, and its checks.


def describe_optimizer(optimizer: torch.optim.Optimizer) -> tuple[str, list[torch.Tensor]]:
    """The description, and the tensors that it announces; TypeError names what cannot be sent."""
    writer = Writer()
    rows = [optimizer.state.get(parameter) for parameter in _parameters_of(optimizer)]
    states = [
        None if row is None or (isinstance(row, dict) and not row) else writer.entry(row, where)
        for row, where in ((row, f"state[{number}]") for number, row in enumerate(rows))
    ]
    others = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    description = {"state": states, "others": writer.entry(others, "state")}
    description["groups"] = [
        writer.entry({k: v for k, v in group.items() if k != "params"}, f"param_groups[{number}]")
        for number, group in enumerate(optimizer.param_groups)
    ]
    return json.dumps(description), writer.tensors


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def most_text_bytes(optimizer: torch.optim.Optimizer) -> int:
    described = sum(1 + len(group["params"]) for group in optimizer.param_groups)
    return _MOST_TEXT_BESIDES + _MOST_TEXT_PER_PARAMETER * described


def read_description(
    text: bytes, optimizer: torch.optim.Optimizer
) -> tuple[list[Entry | None], Entry, list[Entry], _Reader]:
    """What :func:`describe_optimizer` wrote for an optimizer of the same parameters.

    The state of each parameter, in the order of the groups; that under other keys; the options of
    each group; and who makes the values.
    """
    try:
        read = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        _refuse(f"it is not a JSON text ({error})")
    if not isinstance(read, dict) or read.keys() != {"state", "others", "groups"}:
        _refuse("it does not consist of 'state', 'others' and 'groups'")
    reader = _Reader(optimizer)
    states = reader.rows(read["state"], "state", len(_parameters_of(optimizer)))
    reader.check_dict(read["others"], "others")
    groups = reader.rows(read["groups"], "groups", len(optimizer.param_groups))
    for number, group in enumerate(groups):
        reader.check_dict(group, f"groups[{number}]")
        if any(key == {"value": "params"} for key, _ in group["dict"]):
            _refuse("a group has the entry 'params', which is never sent")
    return states, read["others"], groups, reader


class _Reader(Reader):
    """Checks entries, counts the bytes of the tensors that they announce, and makes them.

    ``parameter``: the one whose state is read.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = _parameters_of(optimizer)
        held_here = [optimizer.param_groups, getattr(optimizer, "defaults", {}), optimizer.state]
        devices = {"cpu": torch.device("cpu"), **{p.device.type: p.device for p in parameters}}
        super().__init__(lambda: held(held_here), devices)
        self.tensors: list[torch.Tensor] = []
        self.parameter: torch.Tensor | None = None
        own = sum(_bytes_of(p) for p in parameters)
        self._most = _MOST_STATE_BESIDES + _MOST_STATE_PER_PARAMETER_BYTE * own
        self._announced = 0

    def refuse(self, why: str) -> NoReturn:
        _refuse(why)

    def rows(self, value: Any, what: str, count: int) -> list[Any]:
        if not isinstance(value, list) or len(value) != count:
            there = f"{len(value)} rows" if isinstance(value, list) else "no list"
            _refuse(f"'{what}' has {there}, this rank's optimizer has {count}")
        for number, row in enumerate(value):
            if row is not None or what != "state":
                self.check(row, f"{what}[{number}]")
        return value

    def check(self, entry: Any, where: str, depth: int = 0) -> None:
        try:
            super().check(entry, where, depth)
        except UnknownNameError as error:
            _refuse(str(error).rstrip("."))

    def check_dict(self, entry: Any, where: str) -> None:
        if not isinstance(entry, dict) or "dict" not in entry:
            _refuse(f"{where} is not a dict of entries")
        self.check(entry, where)

    def tensor(self, entry: Entry, old: Any) -> torch.Tensor:
        mine = local(old) if isinstance(old, torch.Tensor) else None
        device = self.devices[entry["device"]]
        if self.parameter is not None and self.parameter.device.type == device.type:
            device = self.parameter.device
        self.tensors.append(tensor_like(entry, mine, device))
        if mine is not None and self.tensors[-1] is mine:
            return old  # type: ignore[no-any-return]
        return whole(self.tensors[-1], self.parameter)

    def check_tensor(self, entry: Entry, where: str) -> None:
        dtype, shape, device = entry["tensor"], entry["shape"], entry["device"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            _refuse(f"{where} has the dtype {str(dtype)[:80]!r}, which is not sent")
        if not isinstance(device, str) or device not in self.devices:
            _refuse(f"{where} is on {str(device)[:80]!r}; here are {sorted(self.devices)}")
        sizes: list[Any] = shape if isinstance(shape, list) else [None]
        if len(sizes) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in sizes):
            _refuse(f"{where} has no shape, but {str(shape)[:80]}")
        # One more for each: the tensor itself takes memory too.
        self._announced += (math.prod(sizes) + 1) * DTYPES[dtype].itemsize
        # Views of zero elements cost nothing, but their other sizes must fit an int64 as well.
        if self._announced > self._most or math.prod(max(size, 1) for size in sizes) >= 2**62:
            _refuse(
                f"{where} of shape {str(shape)[:80]} would bring the state to "
                f"{self._announced} bytes, more than {self._most}, which is beyond any "
                "state of these parameters"
            )


def tensor_like(entry: Entry, old: Any, device: torch.device) -> torch.Tensor:
    """A tensor as ``entry`` (a checked one) says: ``old`` where it fits, a new one elsewhere."""
    dtype = DTYPES[entry["tensor"]]
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
        "Give bagua.wrap the same optimizers of the same parameters on every rank; where they are, "
        "the message was corrupted on the wire."
    )


def _bytes_of(parameter: torch.Tensor) -> int:
    """Bytes of a parameter; 0 of one that is lazy and has no shape yet."""
    if torch.nn.parameter.is_lazy(parameter):
        return 0
    return parameter.numel() * parameter.element_size()
