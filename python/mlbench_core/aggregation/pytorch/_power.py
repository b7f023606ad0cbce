"""Aggregation by power iteration: gradients as products of two thin matrices."""

from __future__ import annotations

import torch
from bagua import _C
from bagua._core.compression.low_rank import check_compression_rate, low_rank_matrices
from bagua._core.group.connections import Connections
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Page

from mlbench_core.aggregation.pytorch._remembering import ErrorFeedbackAggregation, Part

__all__ = ["PowerAggregation"]


class PowerAggregation(ErrorFeedbackAggregation):
    """Means of gradients, approximated with error feedback (T. Vogels et al., NeurIPS 2019).

    Gradients of two and more dimensions become ``P Q^T`` with ``rank`` columns each, what that
    loses is added to the next gradient; vectors are averaged exactly in the same messages, which
    are two per call and dtype (two per parameter by layer). All ranks get the same bits. The
    operations are ``avg_world`` and ``avg``.

    Args:
        model: whose gradients are aggregated; memory is kept by its parameters' names.
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
        reuse_query: start from the last call's ``Q`` (warm start) instead of a random one.
        world_size: number of ranks, checked by the first aggregation; 1: whatever it is.
        rank: columns of the factors; at most the smaller side of each matrix.
        min_compression_rate: matrices that the factors do not make smaller by more than this factor
            are averaged exactly.
        error_feedback: False: the compression error is dropped.
        seed: of the random ``Q``. Global random generators are not touched.
        process_group: default: all ranks.

    Raises:
        ValueError: an argument out of range; at the first aggregation: ``world_size`` is not the
            number of ranks. At any: the model has other parameters.
        NotImplementedError: at an aggregation: another operation, or weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        use_cuda: bool = False,
        reuse_query: bool = False,
        world_size: int = 1,
        rank: int = 1,
        *,
        min_compression_rate: float = 1.0,
        error_feedback: bool = True,
        seed: int = 0,
        process_group: BaguaProcessGroup | None = None,
    ) -> None:
        # Checks
        for name, number in (("world_size", world_size), ("rank", rank)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a positive integer, not {number!r}")
        check_compression_rate(min_compression_rate)

        super().__init__(model, use_cuda, process_group=process_group)
        self.world_size = world_size
        self.reuse_query = reuse_query
        self.rank = rank
        self.min_compression_rate = min_compression_rate
        self.error_feedback = error_feedback
        self.seed = seed
        self._scratch = _C.Scratch()

    def _check_group(self, connections: Connections) -> None:
        if self.world_size not in (1, connections.size):
            raise ValueError(
                f"PowerAggregation was made with world_size={self.world_size}, but its group has "
                f"{connections.size} rank(s); pass torch.distributed.get_world_size()"
            )

    def _describe(self, op: str, denom: object) -> list[str]:
        return [
            f"rank {self.rank}, reuse_query {self.reuse_query}, seed {self.seed}, "
            f"min_compression_rate {self.min_compression_rate}, "
            f"error_feedback {self.error_feedback}"
        ]

    def _make_part(
        self,
        flat: torch.Tensor,
        named: list[tuple[str, torch.Tensor]],
        outcome: _C.RoundOutcome,
    ) -> Part:
        matrices = low_rank_matrices(named, self.rank, self.min_compression_rate)
        page = Page(
            flat,
            named,
            outcome,
            error_feedback=self.error_feedback,
            matrices=matrices,
            seed=self.seed,
        )
        op = _C.LowRank(
            self._communicator("data", flat.device),
            self._scratch,
            flat.numel(),
            list(matrices.values()),
            warm_start=self.reuse_query,
            error_feedback=self.error_feedback,
            seed=self.seed,
            memory=page.memory,
        )
        return Part(op, page)
