"""Aggregation by power iteration: gradients as products of two thin matrices."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bagua import _C
from bagua._core.compression.low_rank import (
    Matrices,
    check_compression_rate,
    low_rank_matrices,
    low_rank_memory,
    queries_of,
)
from bagua._core.group.connections import Connections
from bagua._core.group.process_group import BaguaProcessGroup

from mlbench_core.aggregation.pytorch._remembering import ErrorFeedbackAggregation, Part

__all__ = ["PowerAggregation"]


@dataclass
class _LowRankPart(Part):
    matrices: Matrices


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
        places: dict[str, tuple[int, torch.Size]],
        flat: torch.Tensor,
        outcome: _C.RoundOutcome,
    ) -> Part:
        views = [
            (name, flat[offset : offset + shape.numel()].view(shape))
            for name, (offset, shape) in places.items()
        ]
        matrices = low_rank_matrices(views, self.rank, self.min_compression_rate)
        memory = low_rank_memory(
            flat,
            matrices,
            outcome,
            error_feedback=self.error_feedback,
            communications=self._calls,
        )
        op = _C.LowRank(
            self._communicator("data", flat.device),
            self._scratch,
            flat.numel(),
            list(matrices.values()),
            warm_start=self.reuse_query,
            error_feedback=self.error_feedback,
            seed=self.seed,
            memory=memory,
        )
        part = _LowRankPart(places, op, memory, matrices)
        if self._calls > 0:  # the op would take what is there for the last round's
            for key, query in self._equal_memory(part):
                generator = torch.Generator().manual_seed(self.seed + zlib.crc32(key.encode()))
                query.copy_(torch.randn(query.shape, generator=generator, device="cpu"))
        return part

    def _equal_memory(self, part: Part) -> Iterator[tuple[str, torch.Tensor]]:
        assert isinstance(part, _LowRankPart)
        for name, query in queries_of(part.memory, part.matrices).items():
            yield f"query/{name}", query
