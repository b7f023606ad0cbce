"""The ledger: state per parameter of an algorithm, saved, loaded, cut anew and carried over.

Note [Ledger]
An operation keeps state in the tensors of a ``RoundMemory``, which change with a whole finite round
(Note [Memory commits with the round] in the C++ core). A :class:`Page` says which part of them is
of which parameter. A :class:`Ledger` holds the pages of an algorithm's buckets, and the state of
parameters that are in no bucket now: their buckets are to come, or have been replaced. Every entry
has a key:

- ``error/<name>``, of this rank: the residual, of the parameter's shape, in f32 (f64). With P ranks
  it counts 1 / P in the mean.
- ``server/<first>/<name>``, of this rank: what the mean of its part of the bucket loses, for the
  elements of the parameter from ``first`` on, in the order in which they lie in memory. It is in
  units of the mean.
- ``query/<name>``, equal on all ranks: a factor of a low-rank matrix.
- ``communications``, equal on all ranks: how many are behind the entries.
- Other keys, of this rank, are of tensors that mean nothing to other ranks.

A state dict has them, those of rank r under ``rank<r>/``, the counters, and under ``ranks`` the
ranks that have residuals. The mean residual, ``sum of error / P + server``, is preserved:

- Ranks that load their own state continue to the bit. Where their parts of buckets are other ones,
  a rank adds P times its server residuals to its residual.
- For another number of ranks, each rank is given the dicts of all old ranks merged into one. It
  gets the mean of their residuals, and the server residuals at the positions of its part.
- Where ranks are lost or join without a load, residuals are multiplied by P' / P, and newcomers
  have zero.
- In new buckets a parameter continues with its entries; one that had none begins at zero.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.state.saved_values import check_no_state, check_state, saved_count, saved_tensor
from bagua._core.state.shards import Shards

_COUNT = "communications"
_ERROR = re.compile(r"rank(\d{1,9})/error/(.*)", re.DOTALL)
_SERVER = re.compile(r"rank(\d{1,9})/server/(\d{1,18})/(.*)", re.DOTALL)
_HERE = "load it with the same model and the same arguments of the algorithm"

#: By name of the tensor: (offset, rows, columns, rank) in the bucket.
Matrices = Mapping[str, tuple[int, int, int, int]]
#: (Tensor that is written, its value).
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]


def _error_key(rank: int, name: str) -> str:
    return f"rank{rank}/error/{name}"


class _Place(NamedTuple):
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    first: int


class Page:
    """The state that an operation keeps of the parameters of one bucket, at first zero.

    Args:
        named: (name, place in ``flat``, the bucket) of each parameter.
        outcome: of all pages that change together.
        matrices: of parameters with a query.
        seed: of queries of parameters that come later than others.
        part: (first element, number of elements) of this rank's part of the bucket, with a server
            residual; None: the operation has none.
        exact: the part's server residual is zero, and not kept. One that is loaded is added to the
            residual, of which an exact operation leaves nothing.

    Attributes:
        memory: the residual, as long as the bucket, or empty; with ``matrices`` their queries; the
            number of communications, one int64 on the CPU; with ``part`` the server residual.
            Residuals and queries are f32 (f64 for f64).
    """

    def __init__(
        self,
        flat: torch.Tensor,
        named: Iterable[tuple[str, torch.Tensor]],
        outcome: _C.RoundOutcome,
        *,
        error_feedback: bool = True,
        matrices: Matrices | None = None,
        seed: int = 0,
        part: tuple[int, int] | None = None,
        exact: bool = False,
    ) -> None:
        wide = torch.promote_types(flat.dtype, torch.float32)
        tensors = [flat.new_zeros(flat.numel() if error_feedback else 0, dtype=wide)]
        if matrices is not None:
            numel = sum(columns * rank for _, _, columns, rank in matrices.values())
            tensors.append(flat.new_zeros(numel, dtype=wide))
        self._counter = len(tensors)
        tensors.append(torch.zeros(1, dtype=torch.int64, device="cpu"))
        self.exact, self._part = exact, part
        if part is not None and not exact:
            tensors.append(flat.new_zeros(part[1], dtype=wide))
        self._tensors = len(tensors)
        self.ranks = 0  # among which its residuals count, of a ledger
        self.memory = _C.RoundMemory(tensors, outcome)
        self.matrices = matrices or {}
        self._seed = seed
        self._places = [
            _Place(name, view.size(), view.stride(), int(view.storage_offset()))
            for name, view in named
        ]

    @classmethod
    def of_parts(
        cls,
        flat: torch.Tensor,
        named: Iterable[tuple[str, torch.Tensor]],
        outcome: _C.RoundOutcome,
        members: Sequence[int],
        rank: int,
        *,
        exact: bool = False,
    ) -> Page:
        """A page of a bucket that is cut into a part per member; ``rank`` may be none of them."""
        numel = flat.numel()
        stride = _C.part_stride(numel, len(members))
        first = min(numel, stride * members.index(rank)) if rank in members else numel
        part = (first, min(stride, numel - first))
        return cls(flat, named, outcome, part=part, exact=exact)

    # Between rounds; writes into the tensors take effect.

    @property
    def names(self) -> list[str]:
        return [place.name for place in self._places]

    @property
    def communications(self) -> torch.Tensor:
        return self.memory.value(self._counter)

    def errors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, residual) of each parameter; none without error feedback."""
        error = self.memory.value(0)
        for name, size, stride, first in self._places if error.numel() else ():
            yield name, error.as_strided(size, stride, first)

    def queries(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, query) of each matrix, of shape (rank, columns)."""
        if not self.matrices:
            return
        shapes = [(rank, columns) for _, _, columns, rank in self.matrices.values()]
        parts = self.memory.value(1).split([rank * columns for rank, columns in shapes])
        for name, part, shape in zip(self.matrices, parts, shapes, strict=True):
            yield name, part.view(shape)

    def servers(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, first element of the parameter, server residual) of what lies in the part."""
        return iter(()) if self.exact else self.saved_servers()

    def saved_servers(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """:meth:`servers`, and the zeros of an exact part."""
        if self._part is None:
            return
        start, numel = self._part
        if self.exact:
            server = self.memory.value(0).new_zeros(numel)
        else:
            server = self.memory.value(self._counter + 1)
        for name, size, _, begin in self._places:
            low, high = max(begin, start), min(begin + size.numel(), start + numel)
            if low < high:
                yield name, low - begin, server[low - start : high - start]

    def drawn(self, name: str, query: torch.Tensor) -> torch.Tensor:
        """A random query, equal on all ranks, for a parameter that has none among others."""
        generator = torch.Generator().manual_seed(self._seed + zlib.crc32(f"query/{name}".encode()))
        return torch.randn(query.shape, generator=generator, device="cpu")

    def clear(self) -> None:
        for number in range(self._tensors):
            self.memory.value(number).zero_()


class Commit:
    """An outcome of rounds that count only with :meth:`commit`, besides their operations.

    A result that nothing has used is lost, and what it has lost must not be kept.
    """

    def __init__(self) -> None:
        self.outcome = _C.RoundOutcome()
        _C.RoundMemory([], self.outcome)  # joins, and is not needed any more
        self._last: int | None = None

    def commit(self) -> None:
        """The result of the last round is used. Idempotent."""
        if self._last != self.outcome.newest:
            self._last = self.outcome.newest
            self.outcome.leave(self.outcome.newest)


@dataclass
class _Entries:
    """State of one parameter, while it is in no page.

    ``servers``: (first element, server residual from there on), of this rank or, if ``whole``, of
    all. ``ranks``: among which ``error`` counts.
    """

    ranks: int
    error: torch.Tensor | None = None
    query: torch.Tensor | None = None
    servers: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    whole: bool = False


class Ledger:
    """State per parameter of an algorithm, whatever buckets its parameters are in: Note [Ledger].

    Used between rounds, by one thread.

    Args:
        owner: the algorithm's name in errors.
        connections: of the ranks at the time of the call.
        counters: names of whole numbers of the state, equal on all ranks.
        hierarchical: only the nodes' leaders have residuals.
        only_same_ranks: why other ranks cannot load a state; None: they can.
        pages: whether there may be any; otherwise a state with entries is refused.
        shards: of parameters at the time of the call, where they may be DTensors; a state that
            other shards have saved is refused.

    Attributes:
        own: further tensors of this rank, by key.
        pages: of the buckets at work.
    """

    def __init__(
        self,
        owner: str,
        connections: Callable[[], Connections],
        *,
        counters: Iterable[str] = (),
        hierarchical: bool = False,
        only_same_ranks: str | None = None,
        pages: bool = True,
        shards: Callable[[], Shards] | None = None,
    ) -> None:
        self.counters = dict.fromkeys(counters, 0)
        self.own: dict[str, torch.Tensor] = {}
        self.pages: list[Page] = []
        self._owner = owner
        self._connections = connections
        self._hierarchical = hierarchical
        self._only_same_ranks = only_same_ranks
        self._takes_pages = pages
        self._shards = shards
        self._aside: dict[str, _Entries] = {}
        self._communications = 0  # behind what is aside

    def members(self) -> list[int]:
        connections = self._connections()
        if not self._hierarchical:
            return list(range(connections.size))
        return connections.leaders()

    # Buckets that come and go.

    def take(self, *pages: Page) -> None:
        """Continue in ``pages``, of new buckets, which get the entries of their parameters.

        All of them change together. Pages at work with the same parameters leave the ledger.
        ValueError names the entry of a loaded state that does not fit.
        """
        names = {name for page in pages for name in page.names}
        self.put_aside(*(page for page in self.pages if not names.isdisjoint(page.names)))
        for page in pages:
            _copy(self._values(page, self._aside, self._communications))
        for name in names:
            self._aside.pop(name, None)
        self.pages += pages
        self._count(pages)

    def _count(self, pages: Iterable[Page]) -> None:
        """From now on residuals of ``pages`` count among the ranks of today."""
        for page in pages:
            page.ranks = len(self.members())

    def put_aside(self, *pages: Page) -> None:
        """Keep the state of ``pages``, whose buckets are at work no more, for later ones."""
        for page in pages:
            if page not in self.pages:
                continue
            self.pages.remove(page)
            count = int(page.communications)
            if count == 0:
                continue  # it holds nothing
            self._communications = max(count, self._communications)
            entries = {name: _Entries(page.ranks) for name in page.names}
            for name, query in page.queries():
                entries[name].query = query
            for name, error in page.errors():
                entries[name].error = error
            for name, first, server in page.servers():
                entries[name].servers.append((first, server))
            self._aside |= entries

    def _values(self, page: Page, aside: Mapping[str, _Entries], communications: int) -> Pairs:
        """Tensors of ``page`` and the values that they get; none after no ``communications``."""
        if communications == 0 and not aside:
            return
        found = {name: aside[name] for name in page.names if name in aside}
        yield page.communications, torch.tensor([communications], device="cpu")
        for name, query in page.queries():
            if name in found:
                yield query, _fitting(f"query/{name}", found[name].query, query)
            else:
                yield query, page.drawn(name, query)
        members = self.members()
        if self._connections().rank not in members:
            return
        ranks = len(members)
        same_parts = _parts_of(page.servers()) == _parts_of(
            (name, first, piece)
            for name, entries in found.items()
            for first, piece in entries.servers
            if not entries.whole
        )
        for name, error in page.errors():
            entries = found.get(name, _Entries(ranks))
            value = torch.zeros_like(error)
            if entries.error is not None:
                value.copy_(_fitting(f"error/{name}", entries.error, error))
                value.mul_(ranks / entries.ranks)
            if page.exact:
                _add(name, value, entries.servers, 1.0 if entries.whole else ranks)
            elif not (entries.whole or same_parts):
                _add(name, value, entries.servers, ranks)
            yield error, value
        for name, first, server in page.servers():
            entries = found.get(name, _Entries(ranks))
            if entries.whole or same_parts:
                yield server, _joined(name, first, server, entries.servers)
            else:
                yield server, torch.zeros_like(server)

    # A state dict.

    def state(self) -> dict[str, Any]:
        """All entries, copied, and the counters."""
        state = self._state()
        return state if self._shards is None else self._shards().saved(state)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(self.counters)
        if not (self.pages or self._aside or self._communications or self.own):
            return state
        rank, members = self._connections().rank, self.members()
        state["ranks"] = _ranks_text(members)
        for key, tensor in self.own.items() if rank in members else ():
            state[f"rank{rank}/{key}"] = tensor.clone()
        if not self._takes_pages:
            return state
        counts = [self._communications]
        for name, entries in self._aside.items():
            if entries.query is not None:
                state[f"query/{name}"] = entries.query.clone()
            if entries.error is not None and rank in members:
                state[_error_key(rank, name)] = entries.error.clone()
            if not entries.whole or rank == members[0]:
                for first, server in entries.servers:
                    state[f"rank{rank}/server/{first}/{name}"] = server.clone()
        for page in self.pages:
            counts.append(int(page.communications))
            state |= {f"query/{name}": query.clone() for name, query in page.queries()}
            for name, error in page.errors() if rank in members else ():
                state[_error_key(rank, name)] = error.clone()
            for name, first, server in page.saved_servers():
                state[f"rank{rank}/server/{first}/{name}"] = server.clone()
        state[_COUNT] = torch.tensor([max(counts)], device="cpu")
        return state

    def restore(self, state: Mapping[str, Any], buckets: Sequence[Page] | None = None) -> None:
        """Restore :meth:`state`, perhaps the merged ones of other ranks; other keys are ignored.

        ``buckets``: pages that the state must fit, while those at work leave the ledger; None: it
        must fit those at work, which get it. ValueError names an entry that is missing or does not
        fit; nothing has changed then.
        """
        check_state(state, self._owner)
        if self._shards is not None:
            state, same_shards = self._shards().loaded(state)
            if not same_shards:
                raise ValueError(f"{self._owner}: saved with other shards: {self._only_same_ranks}")
        if not (self._takes_pages or self.own):
            check_no_state(state, self._owner, but=self.counters)
        pages = self.pages if buckets is None else buckets
        counters = {key: saved_count(state, key, self._owner) for key in self.counters}
        own = self._own_of(state)
        aside, communications = {}, 0
        if self._takes_pages and (_COUNT in state or any("/" in key for key in state)):
            aside, communications = self._entries_of(state, pages), _count_of(state, self._owner)
        pairs = [pair for page in pages for pair in self._values(page, aside, communications)]
        # Nothing is wrong with it.
        self.counters |= counters
        _copy(own)
        if buckets is None:
            for page in pages if not aside else ():
                page.clear()
            _copy(pairs)
            for name in (name for page in pages for name in page.names):
                aside.pop(name, None)
            self._count(pages)
        else:
            self.pages = []
        self._aside, self._communications = aside, communications

    def _own_of(self, state: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors of ``own``, and the values that the same ranks have saved."""
        if not self.own:
            return []
        rank, members = self._connections().rank, self.members()
        if self._saved_ranks(state) != members or rank not in members:
            return []
        return [
            (tensor, saved_tensor(state, f"rank{rank}/{key}", tensor, _HERE))
            for key, tensor in self.own.items()
        ]

    def _saved_ranks(self, state: Mapping[str, Any]) -> list[int]:
        saved, members = _saved_ranks(state), self.members()
        if self._only_same_ranks is not None and saved != members:
            raise ValueError(
                f"{self._owner}: 'ranks' is {_ranks_text(saved)[:80]!r} in the state, "
                f"{_ranks_text(members)!r} here: {self._only_same_ranks}"
            )
        return saved

    def _entries_of(self, state: Mapping[str, Any], pages: Sequence[Page]) -> dict[str, _Entries]:
        """Entries of a state, by parameter: those of ``pages``, and further ones."""
        rank, members, saved = self._connections().rank, self.members(), self._saved_ranks(state)
        found = {name: _Entries(len(members)) for page in pages for name in page.names}
        for key, value in state.items():
            if (name := key.removeprefix("query/")) != key:
                query = saved_tensor(state, key, _like(value), _HERE).detach().clone()
                found.setdefault(name, _Entries(len(members))).query = query
        if rank not in members:
            return found
        likes: dict[str, torch.Tensor | None] = dict(
            pair for page in pages for pair in page.errors()
        )
        sources = [rank] if saved == members else saved
        remedy = _HERE if saved == members else _merge(saved, members)
        for key in state:
            if (match := _ERROR.fullmatch(key)) and int(match[1]) in sources:
                likes.setdefault(match[2])
        servers = _servers_of(state)
        for name, like in likes.items():
            entries = found.setdefault(name, _Entries(len(members)))
            entries.error = _mean_of(state, name, sources, like, remedy)
            entries.whole = all(_error_key(source, name) in state for source in saved)
            for owner, first, piece in servers.get(name, []):
                if entries.whole or owner == rank:
                    _check_piece(name, first, piece, entries.error)
                    entries.servers.append((first, piece))
        return found


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in pairs:
            tensor.copy_(value)


def _parts_of(
    pieces: Iterable[tuple[str, int, torch.Tensor]],
) -> dict[tuple[str, int], int]:
    return {(name, first): piece.numel() for name, first, piece in pieces}


def _ranks_text(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))


def _saved_ranks(state: Mapping[str, Any]) -> list[int]:
    if "ranks" not in state:
        raise ValueError("the state has no 'ranks': it is of another algorithm")
    text = str(state["ranks"])
    saved = [int(number) for number in text.split() if number.isdigit() and len(number) < 10]
    if not saved or _ranks_text(saved) != text:
        raise ValueError(f"'ranks' is {text[:80]!r} in the state, which is not a list of ranks")
    return saved


def _merge(saved: Sequence[int], members: Sequence[int]) -> str:
    return (
        f"it was saved by ranks {_ranks_text(saved)[:80]} and is loaded by {_ranks_text(members)}: "
        "merge what all ranks saved into one dict (a | b | ...), or load it with the ranks that "
        "saved it"
    )


def _count_of(state: Mapping[str, Any], owner: str) -> int:
    if isinstance(state.get(_COUNT), torch.Tensor):
        like = torch.zeros(1, dtype=torch.int64, device="cpu")
        return int(saved_tensor(state, _COUNT, like, _HERE))
    return saved_count(state, _COUNT, owner)


def _mean_of(
    state: Mapping[str, Any],
    name: str,
    sources: Sequence[int],
    like: torch.Tensor | None,
    remedy: str,
) -> torch.Tensor:
    """The mean of the residuals of ``sources``; of one rank its own.

    Training depends on the mean only (Vogels et al., NeurIPS 2019: the aggregation is linear).
    """
    if like is None:
        like = _like(state.get(_error_key(sources[0], name)))
    theirs = [saved_tensor(state, _error_key(source, name), like, remedy) for source in sources]
    if len(theirs) == 1:
        return theirs[0].detach().clone()
    wide = torch.promote_types(theirs[0].dtype, torch.float32)
    return torch.stack([error.to(wide) for error in theirs]).sum(0) / len(theirs)


def _servers_of(state: Mapping[str, Any]) -> dict[str, list[tuple[int, int, torch.Tensor]]]:
    """(rank, first element, server residual from there on), by parameter."""
    found: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    for key, value in state.items():
        if match := _SERVER.fullmatch(key):
            piece = saved_tensor(state, key, _like(value).view(-1), _HERE).detach().clone()
            found.setdefault(match[3], []).append((int(match[1]), int(match[2]), piece))
    return found


def _like(value: Any) -> torch.Tensor:
    size = value.size() if isinstance(value, torch.Tensor) else ()
    return torch.empty(size, device="meta")


def _fitting(key: str, value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return saved_tensor({} if value is None else {key: value}, key, like, _HERE)


def _check_piece(name: str, first: int, piece: torch.Tensor, error: torch.Tensor) -> None:
    if first + piece.numel() > error.numel():
        raise ValueError(
            f"the state has a server residual of '{name}' from element {first} on with "
            f"{piece.numel()} elements, and it has {error.numel()}: load it with the same model"
        )


def _add(
    name: str, error: torch.Tensor, pieces: Iterable[tuple[int, torch.Tensor]], factor: float
) -> None:
    """Add server residuals of the parameter ``name`` to its residual, a dense tensor."""
    flat = error.as_strided((error.numel(),), (1,), error.storage_offset())
    for first, piece in pieces:
        _check_piece(name, first, piece, error)
        flat[first : first + piece.numel()].add_(piece.to(flat), alpha=factor)


def _joined(
    name: str, first: int, like: torch.Tensor, pieces: Iterable[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    """Server residuals from element ``first`` of a parameter on, put together by position."""
    value = torch.zeros(like.numel(), dtype=like.dtype, device="cpu")
    known = torch.zeros(like.numel(), dtype=torch.bool, device="cpu")
    end = first + like.numel()
    for begin, piece in pieces:
        low, high = max(begin, first), min(begin + piece.numel(), end)
        if low < high:
            value[low - first : high - first] = piece[low - begin : high - begin]
            known[low - first : high - first] = True
    if not bool(known.all()):
        raise ValueError(
            f"the state has no server residual of '{name}' from element "
            f"{first + int((~known).nonzero()[0])} on: merge what all ranks saved into one dict "
            "(a | b | ...), or load it with the ranks and buckets that saved it"
        )
    return value
