"""Compressors of adamw_compressors.py: what ranks send of flat vectors, emulated in one process.

A compressor takes the vectors that the ranks bring, each with its residual added, and returns the
mean that all ranks decode and what each rank has sent of its own: the difference is its residual.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from bagua import _C

RANKS = 2
Decoded = tuple[torch.Tensor, list[torch.Tensor]]


@dataclass(frozen=True)
class Part:
    """A parameter's place in the flat vector."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.numel)


class Compressor(Protocol):
    """Bytes per step: of the last call, one rank's message to one other rank."""

    bytes: float

    def __call__(self, brought: Sequence[torch.Tensor]) -> Decoded: ...


class Exact:
    """The mean, as two ranks exchange it in f32."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.bytes = 4.0 * sum(part.numel for part in parts)

    def __call__(self, brought: Sequence[torch.Tensor]) -> Decoded:
        return torch.stack(list(brought)).mean(0), list(brought)


def through(codec: str | None, values: torch.Tensor) -> torch.Tensor:
    """The values of each row after encoding and decoding."""
    if codec is None:
        return values
    coder, (rows, columns) = _C.make_codec(codec), values.shape
    payload = coder.encode(values.flatten(), rows)
    return coder.decode(payload, rows, values.dtype, columns).view_as(values)


@dataclass
class Largest:
    """The largest elements; parameters of `exact` as they are.

    ratio: the part of the elements that is sent. scope: they are the largest of the "model", of
    each "parameter", or of each "chunk" of 4096. codec: of values. falls: calls in which the ratio
    falls from 25 %.
    """

    parts: Sequence[Part]
    ratio: float
    scope: str = "model"
    exact: frozenset[str] = frozenset()
    codec: str | None = None
    falls: int = 0
    bytes: float = 0.0
    calls: int = field(default=0, init=False)

    def __call__(self, brought: Sequence[torch.Tensor]) -> Decoded:
        ratio = self.ratio
        if self.calls < self.falls:
            ratio = 0.25 * (ratio / 0.25) ** (self.calls / self.falls)
        self.calls += 1
        self.bytes = 0.0
        places: list[slice] = []
        sent = [torch.zeros_like(vector) for vector in brought]
        for part in self.parts:
            if part.name in self.exact:
                self.bytes += 4.0 * part.numel
                for vector, out in zip(brought, sent, strict=True):
                    out[part.place] = vector[part.place]
            elif self.scope != "parameter" and places and places[-1].stop == part.start:
                places[-1] = slice(places[-1].start, part.place.stop)
            else:
                places.append(part.place)
        if self.scope != "parameter":  # one selection, of elements that lie apart
            index = torch.cat([torch.arange(place.start, place.stop) for place in places])
            for vector, out in zip(brought, sent, strict=True):
                out[index] = self._select(vector[index], ratio)
        else:
            for place in places:
                for vector, out in zip(brought, sent, strict=True):
                    out[place] = self._select(vector[place], ratio)
        return torch.stack(sent).mean(0), sent

    def _select(self, own: torch.Tensor, ratio: float) -> torch.Tensor:
        """The elements that are sent, zeros elsewhere; counts one rank's bytes."""
        width = 4096 if self.scope == "chunk" else own.numel()
        rows = torch.nn.functional.pad(own, (0, -own.numel() % width)).view(-1, width)
        k = max(1, round(ratio * width))
        if len(rows) == 1:
            chosen = _C.top_k(rows[0], k)[None].long()
        else:
            chosen = rows.abs().topk(k, sorted=False).indices.sort(1).values
        values = through(self.codec, rows.gather(1, chosen))
        indices = min(k * (width - 1).bit_length(), width) / 8
        coded = 4 * k
        if self.codec is not None:
            coded = _C.make_codec(self.codec).payload_bytes(values.dtype, k)
        self.bytes += len(rows) * (coded + indices) / RANKS
        return torch.zeros_like(rows).scatter_(1, chosen, values).flatten()[: own.numel()]


@dataclass
class LowRank:
    """Matrices as products of two thin ones (PowerSGD); vectors and `exact` as they are.

    codec: of `exact`, in two phases and without residuals. wide: names with `wide_rank`.
    by: "": `rank` for all. Else ranks by matrix with the bytes of `rank` for all, chosen anew every
    20 calls from the singular values of the mean matrix, residual included: those with the largest
    squares per byte ("error"), or as a part of the matrix's own sum of squares ("relative error").
    """

    parts: Sequence[Part]
    rank: int
    exact: frozenset[str] = frozenset()
    codec: str | None = None
    wide: frozenset[str] = frozenset()
    wide_rank: int = 16
    iterations: int = 1
    by: str = ""
    bytes: float = 0.0
    queries: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    ranks: dict[str, int] = field(default_factory=dict, init=False)
    calls: int = field(default=0, init=False)

    def __call__(self, brought: Sequence[torch.Tensor]) -> Decoded:
        mean = torch.stack(list(brought)).mean(0)
        sent = [vector.clone() for vector in brought]
        self.bytes = 0.0
        if self.by and self.calls % 20 == 0:
            self._choose_ranks(mean)
        self.calls += 1
        for part in self.parts:
            if part.name in self.exact and self.codec is not None:
                means = [through(self.codec, v[part.place][None]) for v in brought]
                mean[part.place] = through(self.codec, torch.stack(means).mean(0))[0]
                coder = _C.make_codec(self.codec)
                self.bytes += coder.payload_bytes(torch.float32, part.numel)
                continue
            if len(part.shape) < 2 or part.name in self.exact:
                self.bytes += 4.0 * part.numel
                continue
            rows, columns = part.shape
            rank = self.wide_rank if part.name in self.wide else self.rank
            rank = self.ranks.get(part.name, rank)
            if part.name not in self.queries:
                generator = torch.Generator().manual_seed(len(self.queries))
                self.queries[part.name] = torch.randn(columns, rank, generator=generator)
            self._resize(part.name, rank)
            self.bytes += 4.0 * rank * (rows + columns) * self.iterations
            # Sums over ranks are linear: the mean matrix gives what the messages add up to.
            matrix, query = mean[part.place].view(rows, columns), self.queries[part.name]
            for _ in range(self.iterations):
                factor = torch.linalg.qr(matrix @ query).Q
                query = matrix.T @ factor
            self.queries[part.name] = query
            result = (factor @ query.T).flatten()
            mean[part.place] = result
            for out in sent:
                out[part.place] = result
        return mean, sent

    def _choose_ranks(self, mean: torch.Tensor) -> None:
        """From 1 upwards, always the singular value that is worth most per byte."""
        matrices = [p for p in self.parts if len(p.shape) == 2 and p.name not in self.exact]
        left = (self.rank - 1) * sum(sum(part.shape) for part in matrices)
        worth = []
        for part in matrices:
            squares = torch.linalg.svdvals(mean[part.place].view(part.shape)).square()
            if self.by == "relative error":
                squares = squares / squares.sum().clamp_min(1e-30)
            worth += [(float(s) / sum(part.shape), part) for s in squares[1:]]
            self.ranks[part.name] = 1
        for _, part in sorted(worth, key=lambda pair: -pair[0]):
            if sum(part.shape) <= left:  # squares of one matrix fall, so that none is left out
                left -= sum(part.shape)
                self.ranks[part.name] += 1

    def _resize(self, name: str, rank: int) -> None:
        query = self.queries[name]
        if rank > query.shape[1]:
            generator = torch.Generator().manual_seed(self.calls)
            more = torch.randn(len(query), rank - query.shape[1], generator=generator)
            query = torch.cat([query, more * query.norm() / max(1, query.numel()) ** 0.5], 1)
        self.queries[name] = query[:, :rank]
