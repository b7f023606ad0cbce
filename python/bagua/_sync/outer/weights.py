"""The weights and buffers of a module that trains locally, with their anchors."""

from __future__ import annotations

import hashlib
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.initial_state import broadcast_tensors
from bagua._core.state.weights_check import digest
from bagua._sync.outer.outer_sgd import GrowingMomentum, OuterSGD
from bagua._sync.plan import part_of_the_round

if TYPE_CHECKING:
    from bagua.torch_api._session import Session
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["Fragment", "LocalWeights", "OuterNumbers", "weights_digest"]

_STARTS_AGAIN = (
    "The weights of {} hold NaN or infinity: they become the anchor again, and the non-finite "
    "elements of the optimizers' state zero"
)


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

    def __init__(self, part: int, buckets: Sequence[BaguaBucket], keeps: bool) -> None:
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


class BufferAverage:
    """The mean of floating buffers, in ``buckets`` of float32 (float64), which are no views."""

    def __init__(self, buckets: Sequence[BaguaBucket]) -> None:
        self._flats = [bucket.backend_tensor for bucket in buckets]
        self._names = [record_of(t).name for bucket in buckets for t in bucket.tensors]
        self._views = [view for bucket in buckets for _, view in bucket.named_views()]

    def launch(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Fill the buckets with this rank's buffers."""
        with torch.no_grad():
            for name, view in zip(self._names, self._views, strict=True):
                view.copy_(buffers[name])

    def named_means(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of the last round's result, equal on all ranks."""
        for name, view in zip(self._names, self._views, strict=True):
            yield f"mean/{name}", view

    def arrive(self, buffers: Mapping[str, torch.Tensor]) -> bool:
        """Give the buffers their mean; False, having changed nothing, if that is not finite."""
        if not all(bool(flat.isfinite().all()) for flat in self._flats):
            return False
        with torch.no_grad():
            for name, view in zip(self._names, self._views, strict=True):
                buffers[name].copy_(view)
        return True


class LocalWeights:
    """The state of a module that outer rounds read and write. Holds the module weakly.

    Args:
        ddp: the wrapper.
        fragments: parts 0, 1, ... of the plan. Their anchors become the module's weights.
        buffer_buckets: of the last part, for floating buffers.

    Attributes:
        fragments: as given.
        anchored: whether the weights are swapped for the anchor's.
    """

    def __init__(
        self,
        ddp: Session,
        fragments: Sequence[Fragment],
        buffer_buckets: Sequence[BaguaBucket],
    ) -> None:
        self.fragments = list(fragments)
        self.anchored = False
        self._buffers = BufferAverage(buffer_buckets) if buffer_buckets else None
        self._connections = ddp.process_group.connections
        self._name = ddp.bagua_module_name
        self._owner = weakref.ref(ddp)
        weights = self.named()
        for fragment in self.fragments:
            fragment.begin(weights)

    def _ddp(self) -> Session:
        ddp = self._owner()
        if ddp is None:
            raise RuntimeError(f"module '{self._name}' has been deleted")
        return ddp

    def named(self) -> dict[str, torch.Tensor]:
        """The trained weights, by name."""
        return dict(self._ddp().bagua_build_params())

    def digest(self) -> int:
        """63 bits of the weights' names and exact values."""
        return weights_digest(self.named())

    # A round, in the order of its steps.

    def launch(self, fragment: Fragment) -> None:
        """Fill the buckets of a fragment; with the last one those of the buffers too."""
        fragment.launch(self.named())
        if self._buffers is not None and fragment is self.fragments[-1]:
            self._buffers.launch(dict(self._ddp().bagua_floating_buffers()))

    def restart_non_finite(self, engine: _C.Engine) -> None:
        """After a round that was not finite: find the ranks with NaN, which start anew."""
        weights = self.named()
        own = all(bool(x.detach().isfinite().all()) for x in weights.values())
        with part_of_the_round(engine):
            broken = ranks_with_non_finite(self._connections, not own)
        whose = "No rank's weights hold NaN or infinity: the sum overflowed"
        if broken:
            whose = _STARTS_AGAIN.format(f"rank(s) {', '.join(map(str, broken))}")
        if not own:
            self.take_anchors()
            clear_non_finite(self._ddp().bagua_optimizers)
        warnings.warn(
            f"module '{self._name}': the average of an outer round is not finite, and changes "
            f"nothing. {whose}. Other ranks keep their weights, for the next round.",
            stacklevel=2,
        )

    def share_buffers(self, fragment: Fragment, engine: _C.Engine) -> None:
        """With the last fragment give floating buffers their mean, others the lowest rank's."""
        if self._buffers is None or fragment is not self.fragments[-1]:
            return
        buffers = dict(self._ddp().bagua_floating_buffers())
        with part_of_the_round(engine):
            if not self._buffers.arrive(buffers):
                own = all(bool(buffer.isfinite().all()) for buffer in buffers.values())
                broken = ranks_with_non_finite(self._connections, not own)
                sound = [rank for rank in range(self._connections.size) if rank not in broken]
                if sound:
                    broadcast_tensors(list(buffers.values()), self._connections, sound[0])
            broadcast_tensors(self._ddp().bagua_whole_buffers(), self._connections)

    # Between rounds.

    def take_anchors(self) -> None:
        """Give the weights the values of the anchors, rounded to their dtype."""
        weights = self.named()
        for fragment in self.fragments:
            fragment.take_anchor(weights)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside it the weights are the anchor's; afterwards they are this rank's, to the bit."""
        weights = self.named()
        own = {name: weight.detach().clone() for name, weight in weights.items()}
        self.take_anchors()
        self.anchored = True
        try:
            yield
        finally:
            self.anchored = False
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(own[name])

    def refuse_inside_anchor(self, what: str) -> None:
        """Raise BaguaError where the weights are swapped for the anchor's."""
        if self.anchored:
            raise _C.BaguaError(
                f"module '{self._name}': {what} inside anchor(), where the weights are not this "
                "rank's own. Leave the context first."
            )

    # State: writes into the tensors take effect.

    def named_anchors(self) -> list[tuple[str, torch.Tensor]]:
        """(name of the weight, its anchor)."""
        return [pair for fragment in self.fragments for pair in fragment.named_anchors()]

    def named_outer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of anchors and momenta."""
        for fragment in self.fragments:
            yield from fragment.named_state()

    def named_means(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of the results of the last rounds, equal on all ranks."""
        for fragment in self.fragments:
            yield from fragment.named_means()
        if self._buffers is not None:
            yield from self._buffers.named_means()

    def named_own_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of what is this rank's."""
        for fragment in self.fragments:
            yield from fragment.named_launched()

    def take_over(self, before: LocalWeights) -> None:
        """Take the outer state of the same weights, whose fragments may have other buckets."""
        for mine, theirs in zip(self.fragments, before.fragments, strict=True):
            mine.take_over(theirs)


def _like(
    views: Sequence[Sequence[tuple[str, torch.Tensor]]], flats: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Views of ``flats`` at the places of ``views``."""
    return [
        flat.as_strided(view.size(), view.stride(), view.storage_offset())
        for of_bucket, flat in zip(views, flats, strict=True)
        for _, view in of_bucket
    ]


def weights_digest(weights: Mapping[str, torch.Tensor]) -> int:
    """63 bits of names and exact values."""
    text = " ".join(f"{name}={int(digest(weights[name]))}" for name in sorted(weights))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def ranks_with_non_finite(connections: Connections, here: bool) -> list[int]:
    """The ranks whose weights hold NaN or infinity. All call it; ``here``: this one's do."""
    flags = connections.gather_numbers("looking for ranks with NaN or infinity", int(here))
    return [rank for rank, flag in enumerate(flags) if flag]


def clear_non_finite(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make NaN and infinity in the state of ``optimizers`` zero."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
