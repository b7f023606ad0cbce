"""Numbers that all ranks of a group share after they measured each their own."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from bagua import _C
from bagua._core.group.connections import Connections

__all__ = ["largest", "mean", "smallest"]

_UNITS = 10**12  # means travel as whole numbers: seconds as picoseconds


def largest(connections: Connections, what: str, values: Sequence[float]) -> list[float]:
    """The largest of all ranks for each of ``values``, which are not negative; NaN is infinity.

    Every rank calls it, and gets the same bits.
    """
    return _reduced(connections, what, _C.ReduceOp.MAX, values)


def smallest(connections: Connections, what: str, values: Sequence[float]) -> list[float]:
    """The smallest of all ranks, as :func:`largest`."""
    return _reduced(connections, what, _C.ReduceOp.MIN, values)


def _reduced(
    connections: Connections, what: str, op: _C.ReduceOp, values: Sequence[float]
) -> list[float]:
    # The bits of numbers that are not negative have their order, read as whole numbers.
    finite = [math.inf if math.isnan(value) else max(value, 0.0) for value in values]
    bits = struct.unpack(f"{len(finite)}q", struct.pack(f"{len(finite)}d", *finite))
    reduced = connections.reduce_numbers(what, op, *bits)
    return list(struct.unpack(f"{len(finite)}d", struct.pack(f"{len(finite)}q", *reduced)))


def mean(connections: Connections, what: str, values: Sequence[float]) -> list[float]:
    """The mean over all ranks of each of ``values``, finite and of at most some thousand."""
    scaled = [round(value * _UNITS) for value in values]
    summed = connections.reduce_numbers(what, _C.ReduceOp.SUM, *scaled)
    return [number / _UNITS / connections.size for number in summed]
