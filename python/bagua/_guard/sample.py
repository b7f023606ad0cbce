"""Samples of a bucket's elements, and the figures that all ranks' samples give together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bagua import _C
from bagua._core.group.connections import Connections

__all__ = [
    "FIGURES",
    "Sample",
    "figures_of",
    "places_of",
    "sample_of_mean",
    "sample_of_weights",
    "samples_with",
]

#: In the order in which they are sent.
FIGURES = ("relative_error", "residual", "consensus")
_UNKNOWN = -1.0  # on the wire; figures are not negative
#: Elements of a run: neighbours, mostly of one row of a weight, whose gradients have one scale.
_RUN = 16


@dataclass(frozen=True)
class Sample:
    """One bucket's elements on this rank, in runs of neighbours; f64, on the CPU.

    All are in unscaled units.

    Attributes:
        own: what this rank has put in, or its weights; (runs, elements of a run).
        result: what the ranks have made of it; None: of weights, whose ranks differ.
        residual: of error feedback at these elements; None: there is none.
        averages: whether the result is a mean, not a sum.
    """

    own: torch.Tensor
    result: torch.Tensor | None
    residual: torch.Tensor | None
    averages: bool = True

    @classmethod
    def nothing(cls, places: torch.Tensor) -> Sample:
        """The sample of a round that has not run: its figures are unknown."""
        nan = torch.full(places.shape, math.nan, dtype=torch.float64, device="cpu")
        return cls(nan, nan, None)


def places_of(numel: int, elements: int, seed: int) -> torch.Tensor:
    """About ``elements`` places in a bucket of ``numel``, in runs; equal on ranks of one ``seed``.

    Returns:
        int64, of shape (runs, elements of a run).
    """
    width = min(_RUN, numel)
    runs = (max(1, elements // width), 1)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    first = torch.randint(numel - width + 1, runs, generator=generator, device="cpu")
    return first + torch.arange(width, device="cpu")


def sample_of_mean(
    taken: tuple[torch.Tensor, torch.Tensor, float],
    memory: _C.RoundMemory | None,
    places: torch.Tensor,
    averages: bool,
) -> Sample:
    """The sample of an operation: ``taken`` by ``_C.Sampled`` at ``places``.

    ``memory``: of error feedback, whose first tensor is the residual, or empty.
    """
    before, after, scale = taken
    own, result = (_doubles(values).view(places.shape) / scale for values in (before, after))
    residual = None
    if memory is not None and (error := memory.value(0)).numel():
        residual = _doubles(error[places.to(error.device)])
    return Sample(own, result, residual, averages)


def sample_of_weights(flat: torch.Tensor, places: torch.Tensor) -> Sample:
    """The sample of weights, ``flat`` in a bucket."""
    return Sample(_doubles(flat.detach()[places.to(flat.device)]), None, None)


def samples_with(
    codec: _C.Codec, samples: Sequence[Sample], connections: Connections
) -> list[Sample]:
    """The samples of means as they would be with ``codec``. All ranks call it alike.

    An estimate from below: every run of neighbours has a range of its own, where blocks of a codec
    are longer, and the result is not encoded again. Where there are residuals, they are sent too.
    """
    values = [s.own if s.residual is None else s.own + s.residual for s in samples]
    decoded = [_through(codec, value) for value in values]
    sums = torch.cat([value.reshape(-1) for value in decoded])
    _reduce(sums, _C.ReduceOp.SUM, connections)
    expected = []
    for sample, value, sent, total in zip(
        samples, values, decoded, sums.split([v.numel() for v in values]), strict=True
    ):
        result = total.view(value.shape) / (connections.size if sample.averages else 1)
        residual = None if sample.residual is None else value - sent
        expected.append(replace(sample, result=result, residual=residual))
    return expected


def _through(codec: _C.Codec, values: torch.Tensor) -> torch.Tensor:
    """``values`` as ``codec`` encodes and decodes them; each row is one chunk."""
    payload = codec.encode(values.float().reshape(-1), len(values))
    return _doubles(codec.decode(payload, len(values), torch.float32, values.shape[1])).view(
        values.shape
    )


def figures_of(samples: Sequence[Sample], connections: Connections) -> list[dict[str, float]]:
    """Figures by name of each sample, as far as they are known. All ranks call it alike.

    Two all-reduces: one of the samples, and one of the figures, so that ranks that round
    differently decide alike.
    """
    sums = torch.cat([_row(sample) for sample in samples])
    _reduce(sums, _C.ReduceOp.SUM, connections)
    figures = torch.full((len(samples), len(FIGURES)), _UNKNOWN, dtype=torch.float64, device="cpu")
    rows = sums.split([sample.own.numel() + 2 for sample in samples])
    for i, (sample, row) in enumerate(zip(samples, rows, strict=True)):
        for name, value in _figures(sample, row, connections.size).items():
            if math.isfinite(value):
                figures[i, FIGURES.index(name)] = value
    _reduce(figures, _C.ReduceOp.MAX, connections)
    return [
        {name: value for name, value in zip(FIGURES, row, strict=True) if value != _UNKNOWN}
        for row in figures.tolist()
    ]


def _row(sample: Sample) -> torch.Tensor:
    residuals = 0.0 if sample.residual is None else _squares(sample.residual)
    numbers = sample.own.new_tensor([_squares(sample.own), residuals])
    return torch.cat([sample.own.reshape(-1), numbers])


def _figures(sample: Sample, sums: torch.Tensor, ranks: int) -> dict[str, float]:
    """Figures of a sample, from the sums over the ranks; NaN or infinite where there are none."""
    total = sums[:-2].view(sample.own.shape)
    squares, residuals = float(sums[-2]), float(sums[-1])
    mean = total / ranks
    if sample.result is None:
        distance = math.sqrt(max(0.0, squares / ranks - _squares(mean)))
        return {"consensus": _ratio(distance, math.sqrt(_squares(mean)))}
    exact = mean if sample.averages else total
    # Runs of zeros have no relative error; a NaN anywhere makes the median NaN.
    errors, norms = (sample.result - exact).norm(dim=1), exact.norm(dim=1)
    found = {"relative_error": float((errors / norms)[norms != 0].median())}
    if sample.residual is not None:
        found["residual"] = _ratio(math.sqrt(residuals), math.sqrt(squares))
    return found


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _squares(values: torch.Tensor) -> float:
    return float(values.square().sum())


def _doubles(values: torch.Tensor) -> torch.Tensor:
    return values.to("cpu", torch.float64)


def _reduce(values: torch.Tensor, op: _C.ReduceOp, connections: Connections) -> None:
    if connections.size > 1:
        connections.main_communicator("cpu").all_reduce(values, op)
