"""Local training of nodes: gradients inside a node in each step, outer rounds between all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bagua._core.group.process_group import BaguaProcessGroup
from bagua._sync.engine_synchronizer import EngineSynchronizer
from bagua._sync.outer.outer_synchronizer import OuterSynchronizer
from bagua._sync.wrapper import Bucket, Wrapper

__all__ = ["NodeSynchronizer"]

_SUMS = ("busy_ns", "hidden_ns", "exposed_ns")


class NodeSynchronizer:
    """Two plans of one module, with an engine each.

    The ranks' steps are rounds of their node's plan, so its ranks hold equal weights and make equal
    optimizer steps; after these come the outer rounds, as without nodes.

    Args:
        buckets: of gradients, whose operations are over ``node``.
        node: the ranks of this node.
        outer: the plan of all ranks.

    Attributes:
        rounds: the node's plan.
        communicators: (purpose, communicator) of both; ``node`` are those of gradients too.
    """

    def __init__(
        self,
        ddp: Wrapper,
        buckets: Sequence[Bucket],
        node: BaguaProcessGroup,
        outer: OuterSynchronizer,
    ) -> None:
        self.rounds = EngineSynchronizer(ddp, buckets, node)
        self._outer = outer
        self.communicators = [("node", members) for _, members in self.rounds.communicators]
        self.communicators += outer.communicators
        self.non_finite = self.rounds.non_finite | outer.non_finite

    def step_begins(self, grad_scale: float = 1.0, result_scale: float = 1.0) -> bool:
        """Open a round of the node, or continue an open one; False if it was open before."""
        self._outer.step_begins(grad_scale, result_scale)
        return self.rounds.step_begins(grad_scale, result_scale)

    def wait(self) -> None:
        """Block until the gradients are there. An outer round may go on."""
        self.rounds.wait()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside it no weights change: between steps nothing here touches them.

        Raises:
            BaguaError: the device has failed at what earlier rounds gave it.
        """
        with self.rounds.exclusive(), self._outer.exclusive():
            yield

    def stats(self) -> dict[str, Any]:
        """Both plans: buckets one after the other, times and control traffic added up."""
        node, outer = self.rounds.stats(), self._outer.stats()
        control = {key: value + node["control"][key] for key, value in outer["control"].items()}
        return {
            **outer,
            **{key: node[key] + outer[key] for key in _SUMS},
            "longest_wait_ns": max(node["longest_wait_ns"], outer["longest_wait_ns"]),
            "rounds": node["rounds"],
            "buckets": node["buckets"] + outer["buckets"],
            "control": control,
        }

    def hook_ids(self) -> list[int]:
        """Ids of the hooks, for copies that must not have them."""
        return self.rounds.hook_ids()

    def end_together(self) -> None:
        """Use the result of a flight, before another plan takes over."""
        self._outer.end_together()

    def close(self) -> None:
        """Remove the hooks and end the threads of both plans. Idempotent."""
        self._outer.close()
        self.rounds.close()
