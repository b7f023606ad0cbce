"""``Synchronizer``: base of what communicates for a wrapped module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bagua import _C
from bagua._core.state.statistics import NOTHING


class Synchronizer:
    """Communicates for a wrapped module, from one (re)build of its buckets to the next.

    This one communicates nothing: it is that of a module without buckets.
    """

    #: Whether steps are rounds that all ranks take part in; methods of rounds do nothing elsewhere.
    makes_rounds = False

    def __init__(self) -> None:
        #: (Purpose, communicator) of the lanes, for statistics.
        self.communicators: list[tuple[str, _C.CountingCommunicator]] = []
        self.lanes = 1

    # One step, in the order in which things happen.

    def begin_forward(self, communicates: bool) -> None:
        """Say before a forward with gradients whether its backwards communicate."""

    def step_begins(
        self, grad_scale: float = 1.0, result_scale: float = 1.0, samples: float | None = None
    ) -> bool:
        """A forward that trains begins: open a round, or continue the open one.

        Gradients will carry the factor ``grad_scale``, and communicated values get ``result_scale``
        at the end of backward. They are of ``samples``; None: this rank has not said. False if it
        was called for the open round before.
        """
        return False

    def begin_without_inputs(self, result_scale: float) -> None:
        """Open a round of the ranks that still have inputs, on one that has none."""

    @contextmanager
    def part_of_the_round(self, by_samples: bool = False) -> Iterator[None]:
        """Messages of the main thread inside belong to the open round or the next.

        ``by_samples``: this rank will say of how many samples the next is.
        """
        yield

    def agree_on_unfreezing(self, names: list[str]) -> None:
        """Block until all ranks are about to unfreeze ``names``; this synchronizer ends then."""

    def watch(self, outputs: list[torch.Tensor]) -> None:
        """After a forward that communicates: so does every backward through ``outputs``."""

    def answer_with_zeros(self) -> None:
        """The open round, of a rank without inputs: it contributes zeros; no ``.grad`` changes."""

    def mark_all(self) -> None:
        """Mark every tensor that is not marked yet."""

    def wait(self) -> None:
        """Block until all launched work is done; raise a failure of it."""

    @property
    def weight(self) -> float:
        """The factor of this rank's gradients in the last round: 1 unless ranks say samples."""
        return 1.0

    @property
    def in_backward(self) -> bool:
        """Whether this thread is inside a backward that is communicated."""
        return False

    @property
    def synchronising(self) -> bool:
        """Whether a round is open."""
        return False

    @property
    def communicating(self) -> bool:
        """Whether the backward that is running is communicated."""
        return False

    # Control.

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside it no weights change but by the caller."""
        self.settle()
        yield

    def stats(self) -> dict[str, Any]:
        """Counters of the C++ core, for :func:`bagua._core.state.statistics.statistics`."""
        return NOTHING

    def hook_ids(self) -> list[int]:
        """Ids of the hooks, for copies that must not have them."""
        return []

    def settle(self) -> None:
        """Raise a failure of the device at what earlier steps gave it."""

    def finish_soon(self) -> None:
        """Give the buckets that were marked some seconds: other ranks may be gone."""

    def end_together(self) -> None:
        """End work between steps on all ranks, before another synchronizer replaces this one."""

    def close(self) -> None:
        """Remove the hooks and end the threads, without asking the other ranks. Idempotent."""
