"""Entries of a state dict: copied, compared, and checked, since its file may be of another
program.

What is missing or something else raises ValueError, which names the entry.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

_MOST = 2**63 - 1
_SHOWN = 3  # names of entries in a message
_LONGEST = 500  # letters of another rank's or file's text in one
#: Elements that are hashed at once: bounds the memory to a few times eight bytes of it.
_CHUNK = 2**18
#: Odd numbers: multiplying by them modulo 2**64 loses nothing.
_MULTIPLIER = -7046029254386353131
_CHUNK_MULTIPLIER = 6364136223846793005
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def copied(value: Any, device: str | None = None) -> Any:
    """``value`` with its tensors and arrays copied, tensors to another device if one is named."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: copied(item, device) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copied(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for name in [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]:
            object.__setattr__(twin, name, copied(getattr(value, name), device))
        return twin
    # An array of numpy, which torch does not need.
    return copy.copy(value) if hasattr(value, "__array__") else value


def short_text(error: BaseException) -> str:
    """An exception in one line for messages: cut, and printable."""
    text = f"{type(error).__name__}: {str(error)[:_LONGEST]}"
    return "".join(letter if letter.isprintable() else " " for letter in text)


def check_state(state: Any, owner: str) -> None:
    """Raise ValueError unless ``state`` is a dict whose keys are texts; ``owner`` is named."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ValueError(
            f"{owner}: a state is a dict with names as keys, not {str(state)[:80]}; load what "
            "state_dict() returned"
        )


def check_no_state(state: Any, owner: str, but: Iterable[str] = ()) -> None:
    """Raise ValueError unless ``state`` is a dict with the keys ``but`` at most."""
    check_state(state, owner)
    expected = sorted(but)
    names = sorted(set(state) - set(expected))
    if names:
        others = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
        raise ValueError(
            f"{owner} remembers {expected or 'nothing'}, but its state has {names[:_SHOWN]}"
            f"{others}; the checkpoint is of another algorithm: load it with that one, or leave "
            "the algorithm's state out and begin with the weights"
        )


def saved_count(state: Mapping[str, Any], key: str, owner: str) -> int:
    """The count under ``key``: a whole number."""
    if key not in state:
        raise ValueError(f"{owner}: the state has no '{key}': it is of another algorithm")
    value = state[key]
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()  # as torch.distributed.checkpoint may have it
    whole = isinstance(value, (int, float)) and value == value // 1
    if not whole or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise ValueError(
            f"{owner}: '{key}' is {str(value)[:80]} in the state; it must be a non-negative "
            "integer: the checkpoint is damaged or of another algorithm"
        )
    return int(value)


def saved_tensor(
    state: Mapping[str, Any], key: str, view: torch.Tensor, remedy: str
) -> torch.Tensor:
    """The tensor under ``key``, which is to be copied into ``view``: of its shape, of real numbers.

    Where ``view`` holds whole numbers, none may be negative.
    """
    if key not in state:
        raise ValueError(f"the state has no '{key}': {remedy}")
    value = state[key]
    if isinstance(value, (int, float)):
        value = torch.tensor(value, device="cpu")
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise ValueError(f"'{key}' is a {type(value).__name__} in the state, no tensor: {remedy}")
    if value.is_complex() != view.is_complex():
        raise ValueError(f"'{key}' is {value.dtype} in the state, {view.dtype} here: {remedy}")
    if value.shape != view.shape:
        raise ValueError(
            f"'{key}' is {tuple(value.shape)} in the state, {tuple(view.shape)} here: {remedy}"
        )
    counts = not view.is_floating_point() and not view.is_complex()
    if counts and (value.is_floating_point() or bool((value < 0).any())):
        raise ValueError(
            f"'{key}' is {str(value)[:80]} in the state; it must be a non-negative integer: "
            f"{remedy}"
        )
    return value


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers, flat."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits of the exact bits of ``tensor`` and their order, on its device (int64, no dims).

    The sum of all elements' bits, each times an odd number that depends on its place, modulo 2**64:
    a change of one element always changes it.
    """
    bits = bits_of(tensor)
    result = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factors = _factors(tensor.device)
    for part in bits.split(_CHUNK):
        products = part.to(torch.int64) * factors[: part.numel()]
        result = result * _CHUNK_MULTIPLIER + products.sum()
    return result


@lru_cache(maxsize=4)
def _factors(device: torch.device) -> torch.Tensor:
    return (torch.arange(_CHUNK, device=device) * _MULTIPLIER).bitwise_or(1)
