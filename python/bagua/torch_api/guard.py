"""Guard: measures what compressed and decentralized training loses, and warns once."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C
from bagua._core.group.connections import Connections, MainThreadTraffic
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.group.warn import warn_here
from bagua._core.state.bagua_tensor import record_of
from bagua._ops.operations import Operation
from bagua._sync.synchronizer import Synchronizer

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["Guard", "GuardAtWork"]

_log = logging.getLogger("bagua")
#: In the order in which they are sent.
_FIGURES = ("relative_error", "residual", "consensus")
_UNKNOWN = -1.0  # on the wire; figures are not negative
#: Elements of a run: neighbours, mostly of one row of a weight, whose gradients have one scale.
_RUN = 16
_MOST_LISTED = 20  # breaches in the statistics
_WHAT = {
    "relative_error": "the relative error of the communicated mean",
    "residual": "the residual of error feedback over the gradient",
    "consensus": "the ranks' distance from the mean of their weights, over its norm,",
}
_REMEDY = {
    "relative_error": "take a codec with more bits or with a range per block "
    '(codec="block_uint8"), error feedback, or gradient_allreduce',
    "residual": "send more (a larger ratio=, rank= or codec=), compress momentum instead of "
    "gradients (QAdamAlgorithm), or take bytegrad",
    "consensus": 'average more often (communication_interval=1) or with all (peers "all"), lower '
    "the learning rate, or take an algorithm that averages gradients",
}


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Measures what a lossy algorithm loses during training, and warns once of each figure.

    In the first round, every ``every`` rounds, and ten times as often in the first half of them,
    some elements of some buckets are averaged exactly as well: one all-reduce of
    ``buckets * (elements + 2)`` float64, and one of three numbers per bucket. A figure above its
    threshold is measured again in the next round, on other elements. If it is above it again, rank
    0 warns, with the bucket, the figure, the threshold and a remedy. Communication is unchanged;
    ``auto`` returns to exact gradients. Figures that are not finite, as those of a round with an
    overflow, count as not measured.

    Args:
        every: rounds from one check to the next.
        buckets: that one check looks at; all have their turn.
        elements: that are compared in each of them, drawn anew each time.
        relative_error: threshold of the error of the communicated mean over the exact mean, for
            operations without error feedback: norms over 16 neighbouring elements, and the median
            over such runs, so that large gradients of one layer do not hide small ones of another.
            An adaptive optimizer makes steps of one size of both. Measured on real gradients, block
            codecs of 8 bits have 0.01 to 0.05 and those of 4 bits 0.1 to 0.2, which train as exact
            gradients do; those of 2 bits have 0.35 to 0.55, which do not.
        residual: threshold of the norm of the residuals over that of the gradients, for operations
            with error feedback. A ratio of r says that an element waits for some r rounds until it
            is sent. Adam divides what comes late and at once by the magnitude of what came before;
            beyond 3 rounds that is another direction. Measured, but not judged, where no optimizer
            scales elements (none has ``betas`` or ``eps``): with SGD error feedback converges as
            exact gradients do (Karimireddy et al., ICML 2019), and where a model has fitted its
            data residuals are large beside gradients that vanish.
        consensus: threshold of the ranks' distance from the mean of their weights (root of the mean
            square) over the norm of that mean, for algorithms whose ranks have weights of their
            own. From a tenth on gradients are of different points.
        nonfinite: threshold of the share of rounds whose result held NaN or infinity, since the
            last check. A ``GradScaler`` that looks for its scale has some; above a half training
            stands still. Not counted on CUDA.

    A threshold of ``math.inf`` switches its figure off.

    Raises:
        ValueError: a number below 1, or a threshold that is not positive.

    Example::

        model = bagua.wrap(model, [optimizer], ByteGradAlgorithm(), guard=Guard(every=100))
        model.bagua_stats()["guard"]["breaches"]
    """

    every: int = 50
    buckets: int = 4
    elements: int = 512
    relative_error: float = 0.3
    residual: float = 3.0
    consensus: float = 0.1
    nonfinite: float = 0.5

    def __post_init__(self) -> None:
        for name in ("every", "buckets", "elements"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"Guard: {name}={number!r} must be a whole number from 1 on")
        for name in ("relative_error", "residual", "consensus", "nonfinite"):
            threshold = getattr(self, name)
            if math.isnan(threshold) or threshold <= 0:
                raise ValueError(
                    f"Guard: {name}={threshold!r} must be above 0; math.inf switches it off"
                )


@dataclass(eq=False)
class _Watched:
    """A bucket whose last operation approximates something."""

    bucket: BaguaBucket
    operation: Operation
    places: torch.Tensor | None = None  # of the sample that was asked for
    suspected: frozenset[str] = frozenset()  # figures above their thresholds in the last sample
    figures: Mapping[str, float] = field(default_factory=dict)  # the last ones
    breached: frozenset[str] = frozenset()  # those above their thresholds twice in a row

    @property
    def tensors(self) -> str:
        first, last = (record_of(self.bucket.tensors[i]).name for i in (0, -1))
        return first if first == last else f"{first} to {last}"

    def ask(self, elements: int, seed: int) -> None:
        flat, padding = self.bucket.backend_tensor, self.bucket.padding_tensor
        numel = flat.numel() - (0 if padding is None else padding.numel())
        if numel == 0:
            return
        self.places = _places_of(numel, elements, seed)
        if self.operation.approximates == "mean" and self.bucket.sampled is not None:
            self.bucket.sampled.request(self.places.reshape(-1).to(flat.device))

    def take_sample(self) -> _Sample:
        """The sample that was asked for; its figures are unknown if no round has run since."""
        places, self.places = self.places, None
        assert places is not None
        bucket = self.bucket
        if self.operation.approximates == "weights":
            flat = bucket.backend_tensor if bucket.flatten else bucket.flattened_tensor()
            return _Sample(_doubles(flat.detach()[places.to(flat.device)]), None, None)
        taken = None if bucket.sampled is None else bucket.sampled.take()
        if taken is None:
            nan = torch.full(places.shape, math.nan, dtype=torch.float64, device="cpu")
            return _Sample(nan, nan, None)
        before, after, scale = taken
        own, result = (_doubles(values).view(places.shape) / scale for values in (before, after))
        residual = self.operation.residual()
        if residual is not None:
            residual = _doubles(residual[places.to(residual.device)])
        return _Sample(own, result, residual, self.operation.averages)


class GuardAtWork:
    """One per wrapped module. All ranks make the same calls.

    Note [When a guard compares]
    A sample is asked for as a round begins, taken by the lane, and compared as the next round
    begins: optimizers have stepped by then, on which residuals may wait. Nothing of that round has
    been sent. Figures are reduced over the ranks, so all ranks find the same.

    ``adaptive``: whether an optimizer divides by the magnitude of past gradients.
    """

    def __init__(
        self,
        guard: Guard,
        module_name: str,
        process_group: BaguaProcessGroup,
        *,
        ranks_agree: bool,
        adaptive: bool,
    ) -> None:
        self.guard = guard
        self._module_name = module_name
        self._group = process_group
        self._adaptive = adaptive
        self._speaks = process_group.connections.rank == 0
        self._watched: list[_Watched] = []
        self._rounds = self._since = self._checks = 0
        self._warned: set[str] = set()
        self._breaches: list[dict[str, Any]] = []
        # Each rank counts non-finite rounds for itself, and nothing that is sent depends on it.
        self._speaks_of_non_finite = self._speaks or not ranks_agree
        self._counted: dict[str, int] = {}
        self._counted_at = 0
        self._non_finite_share: float | None = None

    def attach(self, buckets: Sequence[BaguaBucket]) -> None:
        """Watch new buckets. Called when they have their operations, before the engine is built."""
        self._watched, self._since, self._counted = [], self._rounds, {}
        for bucket in buckets:
            operation = bucket.ops[-1] if bucket.ops else None
            if operation is not None and operation.approximates is not None:
                bucket.watched = True
                self._watched.append(_Watched(bucket, operation))

    def begin_round(self, rounds: Synchronizer, traffic: MainThreadTraffic) -> None:
        """Compare what was sampled, warn, and ask for new samples.

        All ranks call it once as each round begins, before anything of it is sent.
        """
        asked = [entry for entry in self._watched if entry.places is not None]
        if asked:
            with traffic.counted("guard"), rounds.part_of_the_round():
                self._compare(asked)
            self._checks += 1
        self._ask()
        if self._rounds - self._counted_at >= self.guard.every:
            self._count_non_finite(rounds.stats())
        self._rounds += 1

    @property
    def breached(self) -> bool:
        """Whether a bucket has had a figure above its threshold; equal on all ranks."""
        return any(entry.breached for entry in self._watched)

    def loss(self) -> float | None:
        """The largest of the buckets' last figures, equal on all ranks; None: not measured yet.

        With error feedback the residual over the gradient, which a round's error becomes; else the
        relative error. 0.0: nothing is lost.
        """
        if not self._watched:
            return 0.0
        figures = [entry.figures for entry in self._watched]
        losses = [each.get("residual", each.get("relative_error")) for each in figures]
        return max((loss for loss in losses if loss is not None), default=None)

    def stats(self) -> dict[str, Any]:
        return {
            "rounds": self._rounds,
            "checks": self._checks,
            "buckets": {entry.bucket.name: dict(entry.figures) for entry in self._watched},
            "nonfinite_share": self._non_finite_share,
            "breaches": [dict(breach) for breach in self._breaches],
        }

    def _ask(self) -> None:
        """Ask for samples in the round that begins: of suspected buckets, and of those due.

        The first rounds are sampled more often.
        """
        every, age = self.guard.every, self._rounds + 1 - self._since
        starts = age <= every // 2 and age % max(1, every // 10) == 0
        due: list[_Watched] = []
        if self._watched and (age == 1 or starts or age % every == 0):
            first = self._checks * self.guard.buckets % len(self._watched)
            due = (self._watched[first:] + self._watched[:first])[: self.guard.buckets]
        for i, entry in enumerate(self._watched):
            if entry.suspected or entry in due:
                entry.ask(self.guard.elements, self._rounds * len(self._watched) + i)

    def _compare(self, asked: Sequence[_Watched]) -> None:
        samples = [entry.take_sample() for entry in asked]
        found = _figures_of(samples, self._group.connections)
        for entry, figures in zip(asked, found, strict=True):
            above = frozenset(f for f in figures if figures[f] > self._threshold(f, entry))
            confirmed = (above & entry.suspected) - entry.breached
            entry.figures, entry.suspected = figures, above - entry.breached - confirmed
            entry.breached |= confirmed
            for figure in sorted(confirmed):
                self._breach(entry, figure)

    def _threshold(self, name: str, entry: _Watched) -> float:
        if name == "relative_error" and entry.operation.residual() is not None:
            return math.inf  # a round's error is sent later: the residual counts
        if name == "residual" and not self._adaptive:
            return math.inf
        return float(getattr(self.guard, name))

    def _breach(self, entry: _Watched, figure: str) -> None:
        value, threshold = entry.figures[figure], self._threshold(figure, entry)
        breach = {"round": self._rounds, "bucket": entry.bucket.name, "figure": figure}
        breach |= {"value": value, "threshold": threshold}
        self._breaches = [*self._breaches, breach][-_MOST_LISTED:]
        text = (
            f"module '{self._module_name}', bucket '{entry.bucket.name}' ({entry.tensors}): "
            f"{_WHAT[figure]} is {value:.3g} in round {self._rounds}, above the threshold of "
            f"{figure}={threshold:g}. What helps: {_REMEDY[figure]}."
        )
        _log.info("%s", text)
        if self._speaks and figure not in self._warned:
            warn_here(text)
        self._warned.add(figure)

    def _count_non_finite(self, stats: Mapping[str, Any]) -> None:
        counts = {bucket["name"]: bucket["nonfinite_rounds"] for bucket in stats["buckets"]}
        share = None
        if counts and None not in counts.values():
            added = max(count - self._counted.get(name, 0) for name, count in counts.items())
            share = added / (self._rounds - self._counted_at)
            self._counted = counts
        self._counted_at, self._non_finite_share = self._rounds, share
        if share is None or share <= self.guard.nonfinite or "nonfinite" in self._warned:
            return
        self._warned.add("nonfinite")
        if self._speaks_of_non_finite:
            warn_here(
                f"module '{self._module_name}': {share:.0%} of the last rounds held NaN or "
                f"infinity, more than nonfinite={self.guard.nonfinite:g}. Exact averages would not "
                "be finite either: lower the learning rate, clip gradients, or check the loss and "
                "the scale of a GradScaler."
            )


@dataclass(frozen=True)
class _Sample:
    """One bucket's elements on this rank, in runs of neighbours; f64, on the CPU, unscaled."""

    own: torch.Tensor  # what this rank has put in, or its weights; (runs, elements of a run)
    result: torch.Tensor | None  # what the ranks have made of it; None: of weights, which differ
    residual: torch.Tensor | None  # of error feedback at these elements, if there is any
    averages: bool = True  # the result is a mean, not a sum


def _places_of(numel: int, elements: int, seed: int) -> torch.Tensor:
    """About ``elements`` places in a bucket of ``numel``, (runs, elements of a run)."""
    width = min(_RUN, numel)
    runs = (max(1, elements // width), 1)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    first = torch.randint(numel - width + 1, runs, generator=generator, device="cpu")
    return first + torch.arange(width, device="cpu")


def _figures_of(samples: Sequence[_Sample], connections: Connections) -> list[dict[str, float]]:
    """Figures by name of each sample, as far as they are known. All ranks call it alike.

    Figures are reduced too, so that ranks that round differently find the same.
    """
    sums = torch.cat([_row(sample) for sample in samples])
    _reduce(sums, _C.ReduceOp.SUM, connections)
    figures = torch.full((len(samples), len(_FIGURES)), _UNKNOWN, dtype=torch.float64, device="cpu")
    rows = sums.split([sample.own.numel() + 2 for sample in samples])
    for i, (sample, row) in enumerate(zip(samples, rows, strict=True)):
        for name, value in _figures(sample, row, connections.size).items():
            if math.isfinite(value):
                figures[i, _FIGURES.index(name)] = value
    _reduce(figures, _C.ReduceOp.MAX, connections)
    return [
        {name: value for name, value in zip(_FIGURES, row, strict=True) if value != _UNKNOWN}
        for row in figures.tolist()
    ]


def _row(sample: _Sample) -> torch.Tensor:
    residuals = 0.0 if sample.residual is None else _squares(sample.residual)
    numbers = sample.own.new_tensor([_squares(sample.own), residuals])
    return torch.cat([sample.own.reshape(-1), numbers])


def _figures(sample: _Sample, sums: torch.Tensor, ranks: int) -> dict[str, float]:
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
