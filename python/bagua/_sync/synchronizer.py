"""The protocol of a wrapped module's communication."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from bagua import _C
from bagua._sync.engine_synchronizer import EngineSynchronizer

__all__ = ["Synchronizer"]


class Synchronizer(Protocol):
    """Communicates for a wrapped module, from one (re)build of its buckets to the next.

    Attributes:
        communicators: (purpose, communicator) of its lanes, for statistics.
        non_finite: by bucket, the counter of its rounds with NaN or infinity; none on CUDA.
    """

    communicators: list[tuple[str, _C.CountingCommunicator]]
    non_finite: dict[str, _C.NonFiniteRounds]

    @property
    def rounds(self) -> EngineSynchronizer | None:
        """The synchronizer itself if the ranks' steps are rounds that all of them take part in."""

    def step_begins(self, grad_scale: float, result_scale: float) -> bool:
        """A forward that trains begins.

        Args:
            grad_scale: the factor that the gradients of this forward will carry.
            result_scale: factor for the communicated values, at the end of backward.

        Returns:
            Whether it has opened a round.

        Raises:
            BaguaError: this rank or another has failed.
        """

    def wait(self) -> None:
        """Block until all launched work is done; raise a failure of it."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Inside it no weights change but by the caller."""

    def stats(self) -> dict[str, Any]:
        """Counters of the C++ core."""

    def hook_ids(self) -> list[int]:
        """Ids of the hooks, for copies that must not have them."""

    def end_together(self) -> None:
        """End work between steps on all ranks, before another synchronizer replaces this one."""

    def close(self) -> None:
        """Remove the hooks and end the threads, without asking the other ranks. Idempotent."""
