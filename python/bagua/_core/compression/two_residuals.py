"""Residuals of a mean that is compressed twice: by every rank, and by the owner of each part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua import _C

__all__ = ["Slice", "TwoResiduals", "Views", "add_slices", "saved_slices", "without_slices"]

_KEY = re.compile(r"rank(\d+)/server/(\d+)/(.*)", re.DOTALL)
Views = Iterable[tuple[str, torch.Tensor]]
#: The first element of a parameter, and the server residual from there on.
Slice = tuple[int, torch.Tensor]


def saved_slices(state: Mapping[str, Any], rank: int | None = None) -> dict[str, list[Slice]]:
    """Server residuals in a state, by parameter: of one rank, or of all that have saved it."""
    slices: dict[str, list[Slice]] = {}
    for key, value in state.items():
        match = _KEY.fullmatch(key)
        if match and isinstance(value, torch.Tensor) and rank in (None, int(match[1])):
            slices.setdefault(match[3], []).append((int(match[2]), value.reshape(-1)))
    return slices


def without_slices(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A state without the server residuals of the parameters ``names``."""
    gone = set(names)
    matches = {key: _KEY.fullmatch(key) for key in state}
    return {key: state[key] for key, match in matches.items() if not match or match[3] not in gone}


def add_slices(name: str, error: torch.Tensor, slices: Iterable[Slice], factor: float) -> None:
    """Add server residuals of the parameter ``name`` to its residual, a dense tensor.

    Raises:
        ValueError: a slice has elements that the parameter does not have.
    """
    flat = error.as_strided((error.numel(),), (1,), error.storage_offset())
    with torch.no_grad():
        for start, piece in slices:
            if start + piece.numel() > flat.numel():
                raise ValueError(
                    f"the state has a server residual of '{name}' from element {start} on with "
                    f"{piece.numel()} elements, and it has {flat.numel()}: load it with the same "
                    "model"
                )
            flat[start : start + piece.numel()].add_(piece.to(flat), alpha=factor)


@dataclass(frozen=True, eq=False)
class TwoResiduals:
    """Memory of a ``CompressedAllReduce`` with error feedback; residuals are f32 (f64 of f64).

    Attributes:
        memory: what this rank's values lose, as long as the bucket; the number of communications;
            and what the mean of this rank's part loses, in units of the mean, which is empty on a
            rank that takes no part.
        first: the element at which that part begins.
        padding: elements at the end of the bucket without meaning.
    """

    memory: _C.RoundMemory
    first: int
    padding: int

    @classmethod
    def zero(
        cls,
        flat: torch.Tensor,
        padding: int,
        outcome: _C.RoundOutcome,
        members: Sequence[int],
        rank: int,
    ) -> TwoResiduals:
        """Residuals of nothing.

        Args:
            flat: of the bucket.
            padding: elements at its end.
            outcome: one for all buckets whose memory changes together.
            members: the ranks that sum it.
            rank: this one, perhaps none of them.
        """
        numel = flat.numel()
        stride = _C.part_stride(numel, len(members))
        first = min(numel, stride * members.index(rank)) if rank in members else numel
        count = torch.zeros(1, dtype=torch.int64, device="cpu")
        wide = torch.promote_types(flat.dtype, torch.float32)
        error = flat.new_zeros(numel, dtype=wide)
        server = flat.new_zeros(min(stride, numel - first), dtype=wide)
        return cls(_C.RoundMemory([error, count, server], outcome), first, padding)

    def server_views(self, rank: int, views: Views) -> Iterator[tuple[str, torch.Tensor]]:
        """(key for a checkpoint, server residual) of the parameters in this rank's part.

        ``views``: (name, place in the bucket) of each parameter. The key has the rank, the first
        element and the name; elements count in the order in which they lie in memory.
        """
        for name, start, residual in self._in_part(views):
            yield f"rank{rank}/server/{start}/{name}", residual

    def saved_server(
        self, state: Mapping[str, Any], views: Views
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(server residual, saved value) of the parameters in this rank's part.

        The values are put together from what any ranks have saved, by position in the parameter.

        Raises:
            ValueError: an element is missing; names the parameter.
        """
        slices = saved_slices(state)
        for name, start, residual in self._in_part(views):
            yield residual, _joined(slices.get(name, []), name, start, residual)

    def take_server(self, slices: Mapping[str, Sequence[Slice]], views: Views) -> bool:
        """Copy server residuals, if they are exactly those of this rank's part.

        Args:
            slices: by parameter, as of :func:`saved_slices`; of others too.
            views: (name, place in the bucket) of each parameter of this bucket.

        Returns:
            False if they are not: nothing has changed.
        """
        views = list(views)
        own = {(name, start): residual for name, start, residual in self._in_part(views)}
        found = {(name, start): piece for name, _ in views for start, piece in slices.get(name, [])}
        sizes = {place: residual.numel() for place, residual in own.items()}
        if sizes != {place: piece.numel() for place, piece in found.items()}:
            return False
        with torch.no_grad():
            for place, residual in own.items():
                residual.copy_(found[place])
        return True

    def move_server(self, errors: Mapping[str, torch.Tensor], views: Views, ranks: int) -> None:
        """Add this rank's server residual to its own residuals, where parts are cut anew.

        A residual counts in the mean over ``ranks``, a server residual is in units of that mean:
        what all ranks owe together stays the same, without an exchange.

        Args:
            errors: residuals by name of the parameter, which change; others are left out.
            views: (name, place in the bucket) of each parameter of this bucket.
            ranks: those that remember from now on.
        """
        for name, start, residual in self._in_part(views):
            if (error := errors.get(name)) is not None:
                add_slices(name, error, [(start, residual)], ranks)

    def _in_part(self, views: Views) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, first element of the parameter, server residual) of what lies in the part."""
        server = self.memory.value(2)
        end = self.first + server.numel()
        for name, view in views:
            begin = int(view.storage_offset())
            low, high = max(begin, self.first), min(begin + view.numel(), end)
            if low < high:
                yield name, low - begin, server[low - self.first : high - self.first]


def _joined(slices: list[Slice], name: str, start: int, like: torch.Tensor) -> torch.Tensor:
    value = torch.zeros(like.numel(), dtype=like.dtype, device="cpu")
    known = torch.zeros(like.numel(), dtype=torch.bool, device="cpu")
    end = start + like.numel()
    for begin, piece in slices:
        low, high = max(begin, start), min(begin + piece.numel(), end)
        if low < high:
            value[low - start : high - start] = piece[low - begin : high - begin]
            known[low - start : high - start] = True
    if not bool(known.all()):
        raise ValueError(
            f"the state has no server residual of '{name}' from element "
            f"{start + int((~known).nonzero()[0])} on: merge what all ranks saved into one dict "
            "(a | b | ...), or load it with the ranks and buckets that saved it"
        )
    return value
