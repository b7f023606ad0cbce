"""The weights and buffers of a module that trains locally, with their anchors."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bagua import _C
from bagua._core.state.initial_state import broadcast_tensors
from bagua._sync.outer.weights.buffer_average import BufferAverage
from bagua._sync.outer.weights.fragment import Fragment
from bagua._sync.outer.weights.values import clear_non_finite, ranks_with_non_finite, weights_digest
from bagua._sync.plan import part_of_the_round
from bagua._sync.wrapper import Bucket, Wrapper

__all__ = ["LocalWeights"]

_STARTS_AGAIN = (
    "The weights of {} hold NaN or infinity: they become the anchor again, and the non-finite "
    "elements of the optimizers' state zero"
)


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
        ddp: Wrapper,
        fragments: Sequence[Fragment],
        buffer_buckets: Sequence[Bucket],
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

    def _ddp(self) -> Wrapper:
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
