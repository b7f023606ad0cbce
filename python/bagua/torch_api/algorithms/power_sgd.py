"""PowerSGD: gradients as products of two thin matrices, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from bagua import _C
from bagua._core.compression import check_compression_rate
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

__all__ = ["PowerSGDAlgorithm", "PowerSGDAlgorithmImpl"]


@dataclass(eq=False)
class PowerSGDAlgorithm(Algorithm):
    """Low-rank gradients (T. Vogels et al., *PowerSGD*, NeurIPS 2019, Algorithms 1 and 2).

    Every gradient of two and more dimensions is approximated by ``P Q^T`` with ``rank`` columns
    each, by one step of power iteration; the residual is added to the next gradient. Vectors are
    averaged exactly in the same messages: two per bucket. Every rank computes the same bits.

    The published algorithm applies momentum after decompression, which is what the optimizer does.
    Under an adaptive optimizer and under Muon it trains worse than exact gradients: take
    ``ByteGradAlgorithm`` in 4 bits with error feedback there. A longer warm-up and exact embeddings
    bring the loss closer.
    Pass a ``GradScaler`` to ``bagua.wrap``. With ``find_unused_parameters`` a parameter that no
    rank used keeps its ``.grad``, but its residual counts as sent.

    Args:
        rank: columns of the factors; at most the smaller side of each matrix.
        hierarchical: exact inside a node, low rank between the nodes' leaders.
            None: True where there are several nodes with several ranks on one, else False.
        warmup_steps: rounds that average exactly before the first compressed one; torch's hook has
            1000. Gradients of the first steps change the most.
        min_compression_rate: matrices that the factors do not make smaller by this factor are
            averaged exactly.
        warm_start: start from the last round's ``Q``, as published; False: a random one each time.
        error_feedback: False: the compression error is dropped.
        seed: of the random ``Q``. Global random generators are not used.
        exact_parameters: names of parameters that are averaged exactly, or patterns of
            :mod:`fnmatch`: embeddings and output layers, for example.

    Warns:
        UserWarning: from ``bagua.wrap``: an optimizer is adaptive or Muon.

    Raises:
        TypeError: ``exact_parameters`` is one string.
        ValueError: an argument out of range; from ``bagua.wrap``: a pattern that matches no
            parameter.

    Example::

        algorithm = PowerSGDAlgorithm(rank=4, exact_parameters=["*bias"])
        model = bagua.wrap(model, [optimizer], algorithm)
    """

    rank: int = 4
    hierarchical: bool | None = None
    _: KW_ONLY
    warmup_steps: int = 100
    min_compression_rate: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True
    seed: int = 0
    exact_parameters: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: a matrix is approximated by at least rank 1")
        check_compression_rate(self.min_compression_rate)
        check_warmup(self.warmup_steps)
        self.exact_parameters = check_patterns(self.exact_parameters)

    def reify(self, process_group: BaguaProcessGroup) -> PowerSGDAlgorithmImpl:
        return PowerSGDAlgorithmImpl(process_group, self, self.warmup_steps, self.exact_parameters)


class PowerSGDAlgorithmImpl(ErrorFeedbackImpl):
    """Implementation of :class:`PowerSGDAlgorithm`."""

    arguments: PowerSGDAlgorithm
    for_sgd = True

    def compression(self, bucket: BaguaBucket, outcome: _C.RoundOutcome) -> Operation:
        own = self.arguments
        return operations.low_rank(
            bucket,
            own.rank,
            outcome,
            hierarchical=self.hierarchical,
            min_compression_rate=own.min_compression_rate,
            warm_start=own.warm_start,
            error_feedback=own.error_feedback,
            seed=own.seed,
            group=self.process_group,
        )
