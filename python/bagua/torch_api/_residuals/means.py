"""Means of buckets with residuals, of plans that follow one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Ledger, Page
from bagua._ops.compressed_all_reduce import CompressedAllReduce
from bagua.torch_api.algorithms._error_feedback import is_wide, warn_of_useless_residuals
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["CompressedMeans", "RememberedMeans", "is_wide", "warn_of_useless_residuals"]


class RememberedMeans:
    """The operations of a plan's buckets that average them and keep residuals.

    Args:
        process_group: of the algorithm.
        hierarchical: exact inside a node, compressed between the nodes' leaders.
    """

    def __init__(self, process_group: BaguaProcessGroup, hierarchical: bool) -> None:
        self._group = process_group
        self._hierarchical = hierarchical
        self._ledger = Ledger(
            "DiLoCoAlgorithm", lambda: process_group.connections, hierarchical=hierarchical
        )

    def remember(self, page: Page) -> None:
        """``page`` is that of a bucket's operation."""
        self._ledger.take(page)

    def state(self) -> dict[str, Any]:
        """Residuals and the ranks that have them."""
        return {key: v for key, v in self._ledger.state().items() if key != "communications"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`, perhaps the merged ones of other ranks.

        Raises:
            ValueError: something is missing, names the entry; nothing has changed then.
        """
        self._ledger.load(state)

    def inherit(self, before: RememberedMeans, members: int) -> None:
        """Take this rank's residuals of the same parameters from a plan of other ranks."""
        before._ledger.take(*self._ledger.pages)
        self._ledger = before._ledger

    def clear(self) -> None:
        """Zero residuals: nothing has been compressed."""
        self._ledger.load({})

    def members(self) -> list[int]:
        """The ranks that remember: all, or the nodes' leaders."""
        return self._ledger.members()


class CompressedMeans(RememberedMeans):
    """The means that a codec compresses, twice."""

    def append_to(self, bucket: BaguaBucket, codec: str, outcome: _C.RoundOutcome) -> None:
        """Append the operation that averages ``bucket``.

        ``outcome``: one for all buckets whose residuals change together.
        """
        operation = CompressedAllReduce.with_error_feedback(
            bucket, codec, outcome, self._group, hierarchical=self._hierarchical
        )
        bucket.append_operation(operation)
        assert operation.page is not None
        self.remember(operation.page)
