"""Aggregation of some elements of gradients: the largest, or others at random."""

from __future__ import annotations

import torch
from bagua import _C
from bagua._core.compression.sparse_choice import (
    check_codec,
    check_ratio,
    number_sent,
    sparse_mean,
)
from bagua._core.group import environment as env
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Page

from mlbench_core.aggregation.pytorch._remembering import ErrorFeedbackAggregation, Part

__all__ = ["SparsifiedAggregation"]


class SparsifiedAggregation(ErrorFeedbackAggregation):
    """Means of some elements of gradients, with error feedback (S. Stich et al., NeurIPS 2018).

    Each rank sends the elements of largest magnitude, exactly selected from all gradients of a
    dtype (by layer: from each parameter's); what it does not send is added to its next gradient.
    Where sparse messages would not be smaller than all of it, the mean is exact. All ranks get the
    same bits. The operations are ``avg_world`` and ``avg``.

    Args:
        model: whose gradients are aggregated; memory is kept by its parameters' names.
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
        ratio: the part of the elements that is sent, at least one.
        k: the number of elements that is sent, instead of a part; of fewer elements, all.
        random_sparse: send elements drawn at random, the same on all ranks: each once before any
            comes again. No index travels, and costs do not grow with the number of ranks.
        error_feedback: False: elements that are not sent are lost.
        seed: of ``random_sparse``. Global random generators are not touched.
        codec: of the values that are sent, a name of ``bagua._C.codec_names()``; the residual keeps
            what it loses of them. None: they travel as they are. On the CPU, and not with
            ``random_sparse``.
        process_group: default: all ranks.

    Raises:
        ValueError: an argument out of range, or an unknown codec; at an aggregation: the model has
            other parameters.
        NotImplementedError: at an aggregation: another operation, weights, or ``codec`` of
            gradients on another device.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        use_cuda: bool = False,
        *,
        ratio: float = 0.01,
        k: int | None = None,
        random_sparse: bool = False,
        error_feedback: bool = True,
        seed: int = 0,
        codec: str | None = None,
        process_group: BaguaProcessGroup | None = None,
    ) -> None:
        # Checks
        check_ratio(ratio)
        check_codec(codec, random_sparse)
        if k is not None and (not isinstance(k, int) or k < 1):
            raise ValueError(f"k must be a positive integer, not {k!r}")

        super().__init__(model, use_cuda, process_group=process_group)
        self.ratio = ratio
        self.k = k
        self.random_sparse = random_sparse
        self.error_feedback = error_feedback
        self.seed = seed
        self.codec = codec
        self._scratch = _C.Scratch()

    def _describe(self, op: str, denom: object) -> list[str]:
        return [
            f"ratio {self.ratio}, k {self.k}, random_sparse {self.random_sparse}, "
            f"error_feedback {self.error_feedback}, seed {self.seed}, codec {self.codec}",
            f"BAGUA_CHECKSUM={int(env.get_checksum())}",
        ]

    def _make_part(
        self,
        flat: torch.Tensor,
        named: list[tuple[str, torch.Tensor]],
        outcome: _C.RoundOutcome,
    ) -> Part:
        numel = flat.numel()
        page = Page(flat, named, outcome, error_feedback=self.error_feedback)
        op = sparse_mean(
            self._communicator("data", flat.device),
            self._scratch,
            flat,
            number_sent(numel, self.ratio) if self.k is None else min(self.k, numel),
            page.memory,
            random_sparse=self.random_sparse,
            seed=self.seed,
            codec=self.codec,
        )
        return Part(op, page)
