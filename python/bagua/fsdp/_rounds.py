"""Rounds of a sharded model, which torch does not announce."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagua import _C

__all__ = ["Rounds"]


class Rounds:
    """Numbers the reductions of gradients by rounds, and ends what is remembered with them.

    In a backward torch reduces the gradients of every module once over its shards, with hybrid
    sharding once over its replicas, or not at all where no parameter of the module has one. So a
    round ends where a module comes again.

    Attributes:
        number: of the round under way; 0 before the first one.
        grad_scale: the factor that the gradients of this round carry.

    Args:
        memories: by name of the module.
        outcome: of all memories.
        read_scale: called as a round begins: the factor of its gradients.
    """

    def __init__(
        self,
        memories: Mapping[str, _C.RoundMemory],
        outcome: _C.RoundOutcome,
        read_scale: Callable[[], float],
    ) -> None:
        self._memories = memories
        self._outcome = outcome
        self._read_scale = read_scale
        self._came: set[tuple[str, str]] = set()  # (module, ranks)
        self.number = 0
        self.grad_scale = 1.0

    def reduce(self, module: str, over: str) -> None:
        """The gradients of ``module`` are about to be reduced over its "shards" or "replicas"."""
        if self.number == 0 or (module, over) in self._came:
            self.settle()
            self.number += 1
            self._came = set()
            self.grad_scale = self._read_scale()
        self._came.add((module, over))

    def settle(self) -> None:
        """Between rounds: memories hold what they are to hold in the next one."""
        if self.number == 0:
            return
        for module in self._memories:
            if (module, "shards") not in self._came:
                self._outcome.leave(self.number)
                self._came.add((module, "shards"))
        for memory in self._memories.values():
            memory.value(0)
