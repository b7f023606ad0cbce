"""Compares an aggregation and its tensors between ranks before it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from bagua import _C
from bagua._core.group.connections import Connections, fingerprint

from mlbench_core.aggregation.pytorch._tensors import Candidate

__all__ = ["agree"]

# States of one tensor on one rank. The highest of all ranks' states counts.
_ABSENT, _PRESENT, _REFUSED = 0, 1, 2

_FINGERPRINT_BYTES = 8
# The first message has one size whatever the model, or ranks with different models would hang.
_FIRST_MESSAGE_STATES = 1008


def agree(
    connections: Connections,
    communicator: _C.Communicator,
    what: str,
    arguments: list[str],
    candidates: Sequence[Candidate],
) -> list[Candidate]:
    """The candidates that some rank has. All ranks call it.

    Args:
        what: the call, for messages.
        arguments: lines that describe it; equal on all ranks, as names, shapes and dtypes are.

    Raises:
        BaguaMismatchError: on every rank, with the first difference between two of them.
        ValueError: on every rank, if one of them has a tensor that cannot be aggregated.
    """
    states = [
        _REFUSED if candidate.refusal else _ABSENT if candidate.tensor is None else _PRESENT
        for candidate in candidates
    ]
    if connections.size > 1:
        lines = [what, *arguments, *(candidate.describe() for candidate in candidates)]
        states = _highest_states(connections, communicator, what, lines, states)
    for candidate, state in zip(candidates, states, strict=True):
        if state == _REFUSED:
            why = candidate.refusal or "another rank cannot aggregate it, and says why"
            raise ValueError(f"{what}: '{candidate.name}': {why}")
    return [c for c, state in zip(candidates, states, strict=True) if state == _PRESENT]


def _highest_states(
    connections: Connections,
    communicator: _C.Communicator,
    what: str,
    lines: list[str],
    states: Sequence[int],
) -> list[int]:
    """The highest state over ranks of each tensor.

    1. Every rank sends the fingerprint of ``lines``, its complement and the first 1008 states, in
       one MAX all_reduce of 1 KiB.
    2. The highest byte and the complement of the lowest add up to 255 only where all are equal.
    3. If they do not, the ranks compare the lines and raise. If there are more states, a second
       all_reduce brings them.
    """
    # 1.
    own = fingerprint(lines).to_bytes(_FINGERPRINT_BYTES, "little")
    first = bytes(states[:_FIRST_MESSAGE_STATES]).ljust(_FIRST_MESSAGE_STATES, b"\0")
    highest = _maximum(communicator, own + bytes(255 - byte for byte in own) + first)
    # 2.
    head = highest[: 2 * _FINGERPRINT_BYTES]
    pairs = zip(head[:_FINGERPRINT_BYTES], head[_FINGERPRINT_BYTES:], strict=True)
    # 3.
    if any(high + complement_of_low != 255 for high, complement_of_low in pairs):
        connections.agree(what, lines)
    agreed = highest[len(head) :][: len(states)]
    if len(states) > _FIRST_MESSAGE_STATES:
        agreed += _maximum(communicator, bytes(states[_FIRST_MESSAGE_STATES:]))
    return agreed


def _maximum(communicator: _C.Communicator, values: bytes) -> list[int]:
    message = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    communicator.all_reduce(message, _C.ReduceOp.MAX)
    result: list[int] = message.tolist()
    return result
