"""A part of the weights of local training: its anchor, outer momentum and pseudo-gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bagua import _C
from bagua._core.state.bagua_tensor import record_of
from bagua._sync.outer.outer_sgd import GrowingMomentum, OuterSGD
from bagua._sync.wrapper import Bucket

__all__ = ["Fragment", "OuterNumbers"]


@dataclass(frozen=True)
class OuterNumbers:
    """Figures of an outer step.

    Attributes:
        correlation: cosine of the mean pseudo-gradient and the momentum before; None: one is zero.
        gain: progress along the mean pseudo-gradient, in units of it; None: it is zero.
        agreement: norm of the mean over that of this rank's pseudo-gradient; None: that is zero.
        lr: of the step.
        momentum: of the step.
    """

    correlation: float | None
    gain: float | None
    agreement: float | None
    lr: float | None
    momentum: float | None


class Fragment:
    """The outer state of the weights whose pseudo-gradients are in ``buckets``.

    Buckets are of float32 (float64 for float64 weights), and the weights are no views of them. The
    weights are handed to each method, by name, as they are at that time.

    Args:
        part: its number in the plan.
        buckets: of that part.
        keeps: the weights at a launch are kept, for :meth:`merge`.

    Attributes:
        part: its number in the plan.
        names: of its weights.
        own_norm: of this rank's pseudo-gradients at the last launch.
    """

    def __init__(self, part: int, buckets: Sequence[Bucket], keeps: bool) -> None:
        self.part = part
        self.names = [record_of(t).name for bucket in buckets for t in bucket.tensors]
        self._means = [bucket.backend_tensor for bucket in buckets]
        self._anchors = [torch.zeros_like(flat) for flat in self._means]
        self._momenta = [torch.zeros_like(flat) for flat in self._means]
        views = [bucket.named_views() for bucket in buckets]
        self._mean_views = [view for of_bucket in views for _, view in of_bucket]
        self._anchor_views = _like(views, self._anchors)
        self._momentum_views = _like(views, self._momenta)
        self._rate = torch.zeros(1, dtype=torch.float64, device=self._anchors[0].device)
        self._keeps = keeps
        self._launched: list[torch.Tensor] = []
        self.own_norm = 0.0

    # A round, in the order of its steps.

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """The weights, equal on all ranks, are the anchor; there is no momentum."""
        for name, anchor in zip(self.names, self._anchor_views, strict=True):
            anchor.copy_(weights[name].detach())
        if self._keeps:
            self._launched = [weight.clone() for weight in self._of(weights)]

    def launch(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Fill the buckets with this rank's pseudo-gradients, for a round that averages them."""
        _C.take_deltas(self._of(weights), self._anchor_views, self._mean_views, self._launched)
        self.own_norm = math.sqrt(self._sum(self._means, self._means))

    def scale(self, factor: float) -> None:
        """Multiply the launched pseudo-gradients; by 0 they become zero whatever they are."""
        for mean in self._means if factor != 1 else ():
            mean.zero_() if factor == 0 else mean.mul_(factor)

    def arrive(self, rule: OuterSGD | GrowingMomentum) -> OuterNumbers | None:
        """Make the outer step with the averaged pseudo-gradients.

        Args:
            rule: gives the rates of the step.

        Returns:
            None if the mean is not finite: nothing has changed.
        """
        squared = self._sum(self._means, self._means)
        if not math.isfinite(squared):
            for mean in self._means:
                mean.zero_()  # the padding of a bucket too, which no launch writes
            return None
        agreement = math.sqrt(squared) / self.own_norm if self.own_norm > 0 else None
        along = self._sum(self._momenta, self._means)
        lengths = math.sqrt(squared * self._sum(self._momenta, self._momenta))
        correlation = along / lengths if 0 < lengths < math.inf else None
        step = rule.step_after(self._rate.item(), correlation)
        self._rate.fill_(step.momentum)
        for anchor, momentum, mean in zip(self._anchors, self._momenta, self._means, strict=True):
            _C.outer_step(
                anchor, momentum, mean, lr=step.lr, mu=step.momentum, nesterov=step.nesterov
            )
        return OuterNumbers(
            correlation=correlation,
            gain=step.gain(squared, along) if squared > 0 else None,
            agreement=agreement,
            lr=step.lr,
            momentum=step.momentum,
        )

    def take_anchor(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the weights the values of the anchor, rounded to their dtype."""
        _C.take_anchors(self._of(weights), self._anchor_views)

    def merge(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the weights the anchor's values plus what they have learnt since the launch."""
        _C.merge_anchors(self._of(weights), self._anchor_views, self._launched)

    # State.

    def take_over(self, before: Fragment) -> None:
        """Take the state of the same weights from another fragment, whose buckets may differ."""
        theirs = dict([*before.named_state(), *before.named_launched()])
        for key, mine in [*self.named_state(), *self.named_launched()]:
            mine.copy_(theirs[key])

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of what is equal on all ranks; writes into the tensors take effect."""
        for name, anchor in self.named_anchors():
            yield f"anchor/{name}", anchor
        for name, momentum in zip(self.names, self._momentum_views, strict=True):
            yield f"momentum/{name}", momentum
        for name in self.names:  # by name, for plans whose fragments are others
            yield f"rate/{name}", self._rate

    def named_means(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of the last round's result, equal on all ranks."""
        for name, mean in zip(self.names, self._mean_views, strict=True):
            yield f"mean/{name}", mean

    def named_launched(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of this rank's weights at the last launch, where they are kept."""
        for name, kept in zip(self.names, self._launched, strict=False):
            yield f"launched/{name}", kept

    def named_anchors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name of the weight, its anchor)."""
        yield from zip(self.names, self._anchor_views, strict=True)

    def _of(self, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [weights[name].detach() for name in self.names]

    def _sum(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
        return sum(_C.inner_product(a, b) for a, b in zip(first, second, strict=True))


def _like(
    views: Sequence[Sequence[tuple[str, torch.Tensor]]], flats: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Views of ``flats`` at the places of ``views``."""
    return [
        flat.as_strided(view.size(), view.stride(), view.storage_offset())
        for of_bucket, flat in zip(views, flats, strict=True)
        for _, view in of_bucket
    ]
