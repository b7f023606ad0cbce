"""The text in which one rank describes its optimizer's state to the others, and its checks.

It is JSON: which entries there are, plain values, and of tensors dtype, shape and device. The
tensors' bytes follow apart (docs/wire-format.md, "Optimizer state"). A receiver takes nothing for
granted: before it allocates or changes anything it compares all of the text with what it knows of
its own optimizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from bagua import _C
from bagua._core.state.shards import local

__all__ = [
    "OptimizerState",
    "describe_optimizer",
    "most_text_bytes",
    "read_description",
    "tensor_like",
]

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


@dataclass(frozen=True)
class OptimizerState:
    """Parse and check a description.

    Attributes:
        states: by parameter, in the order of the groups: its entries.
        groups: by group: its entries without the parameters.
    """

    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """The description of all state and hyper-parameters.

    Raises:
        TypeError: one of them is neither a tensor nor plain data.
    """
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
    """Bytes that the description of such an optimizer cannot exceed."""
    described = sum(1 + len(group["params"]) for group in optimizer.param_groups)
    return _MOST_TEXT_BESIDES + _MOST_TEXT_PER_PARAMETER * described


def read_description(text: bytes, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Read what :func:`describe_optimizer` wrote for an optimizer of the same parameters.

    Raises:
        BaguaMismatchError: the text is no such description, or asks for more memory than any state
            of these parameters takes. Nothing has been allocated or changed.
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
    return OptimizerState(states, groups)


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
