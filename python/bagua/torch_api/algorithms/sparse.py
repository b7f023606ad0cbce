"""Sparse gradients: the largest elements, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from bagua import _C
from bagua._core.compression import check_ratio
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops import operations
from bagua._ops.operations import Operation
from bagua.torch_api.algorithms._error_feedback import (
    ErrorFeedbackImpl,
    check_patterns,
    check_warmup,
)
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["SparseAlgorithm", "SparseAlgorithmImpl"]


@dataclass(eq=False)
class SparseAlgorithm(Algorithm):
    """Sparse gradients with error feedback (S. Stich et al., NeurIPS 2018, Algorithm 1).

    Each rank sends the elements of largest magnitude of every bucket, exactly selected, and adds
    the residual to its next gradient. Every rank sums the same messages in the same order
    and holds the same bits. A bucket whose sparse messages would not be smaller, as with many
    ranks, is averaged exactly.

    Under ``AdamW`` sparse gradients train much worse than exact ones: each element arrives rarely
    and large, and is divided by the root of its own square. Take ``ByteGradAlgorithm`` there, in 4
    bits with error feedback.

    Pass a ``GradScaler`` to ``bagua.wrap``. With ``find_unused_parameters`` a parameter that no
    rank used keeps its ``.grad``, but its residual counts as sent.

    Args:
        ratio: the part of each bucket's elements that is sent, at least one.
        hierarchical: exact inside a node, sparse between the nodes' leaders.
            None: True where there are several nodes with several ranks on one, else False.
        warmup_steps: rounds that average exactly before the first sparse one.
        exact_parameters: names of parameters that are averaged exactly, or patterns of
            :mod:`fnmatch`.

    Warns:
        UserWarning: from ``bagua.wrap``: an optimizer is adaptive or Muon.

    Raises:
        TypeError: ``exact_parameters`` is one string.
        ValueError: an argument out of range; from ``bagua.wrap``: a pattern that matches no
            parameter.

    Example::

        model = bagua.wrap(model, [optimizer], SparseAlgorithm(ratio=0.01))
    """

    ratio: float = 0.01
    hierarchical: bool | None = None
    _: KW_ONLY
    warmup_steps: int = 0
    exact_parameters: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_warmup(self.warmup_steps)
        self.exact_parameters = check_patterns(self.exact_parameters)

    def reify(self, process_group: BaguaProcessGroup) -> SparseAlgorithmImpl:
        return SparseAlgorithmImpl(process_group, self, self.warmup_steps, self.exact_parameters)


class SparseAlgorithmImpl(ErrorFeedbackImpl):
    """Implementation of :class:`SparseAlgorithm`."""

    arguments: SparseAlgorithm
    for_sgd = True

    def compression(self, bucket: BaguaBucket, outcome: _C.RoundOutcome) -> Operation:
        own = self.arguments
        return operations.sparse(
            bucket,
            own.ratio,
            outcome,
            hierarchical=self.hierarchical,
            group=self.process_group,
        )
