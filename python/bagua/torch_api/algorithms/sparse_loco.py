"""SparseLoCo: outer rounds that send the largest elements of each chunk, in two bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bagua import _C
from bagua._core.compression.sparse_choice import check_ratio
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops import operations
from bagua._ops.operations import Operation
from bagua._outer.optimizer import OuterSGD
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.algorithms.diloco import (
    DiLoCoAlgorithm,
    DiLoCoAlgorithmImpl,
    Fragments,
    fragments_described,
)
from bagua.torch_api.bucket import BaguaBucket

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = ["SparseLoCoAlgorithm", "SparseLoCoAlgorithmImpl"]


class SparseLoCoAlgorithm(Algorithm):
    """DiLoCo whose ranks send 64 of each 4096 elements, in two bits (SparseLoCo, 2025).

    A round sends a 141st of the bytes of the weights to every other rank. What is not sent stays in
    a residual, which decays from round to round and takes the place of the outer momentum. For long
    trainings of large models: in few rounds most of what ranks learn never leaves the residual.
    Residuals take 8 bytes per parameter.

    Args:
        outer_lr: of the outer step on the mean of what ranks send.
        interval: steps from one round to the next, as :class:`DiLoCoAlgorithm` counts them.
        ratio: the part of the elements of each chunk that is sent.
        decay: of the residual, from one round to the next; 1 keeps all of it.
        fragments: as in :class:`DiLoCoAlgorithm`.
        overlap_steps: as in :class:`DiLoCoAlgorithm`.
        warmup_steps: as in :class:`DiLoCoAlgorithm`.

    Raises:
        ValueError: an argument out of its range; from ``with_bagua``: no optimizer, fragments that
            do not fit the module, or weights that are not on the CPU.

    Example::

        model = model.with_bagua([optimizer], SparseLoCoAlgorithm(interval=30))
    """

    def __init__(
        self,
        outer_lr: float = 1.0,
        interval: int = 30,
        *,
        ratio: float = 1 / 64,
        decay: float = 0.95,
        fragments: Fragments = 1,
        overlap_steps: int = 0,
        warmup_steps: int = 0,
    ) -> None:
        check_ratio(ratio)
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay} must be from 0 to 1")
        self._arguments = DiLoCoAlgorithm(
            OuterSGD(outer_lr, momentum=0.0),
            interval,
            fragments=fragments,
            overlap_steps=overlap_steps,
            warmup_steps=warmup_steps,
        )
        self.outer_lr = outer_lr
        self.interval = interval
        self.ratio = ratio
        self.decay = decay
        self.fragments = fragments
        self.overlap_steps = overlap_steps
        self.warmup_steps = warmup_steps

    def describe(self) -> str:
        return f"{super().describe()} fragments={fragments_described(self.fragments)}"

    def reify(self, process_group: BaguaProcessGroup) -> SparseLoCoAlgorithmImpl:
        return SparseLoCoAlgorithmImpl(process_group, self._arguments, self.ratio, self.decay)


class SparseLoCoAlgorithmImpl(DiLoCoAlgorithmImpl):
    """Implementation of :class:`SparseLoCoAlgorithm`: ``model.bagua_algorithm``."""

    owner = "SparseLoCoAlgorithm"

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        arguments: DiLoCoAlgorithm,
        ratio: float,
        decay: float,
    ) -> None:
        super().__init__(process_group, arguments)
        self._sent = max(1, round(ratio * _C.SPARSE_CHUNK_NUMEL))
        self._decay = decay

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        for name, parameter in bagua_ddp.bagua_build_params():
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"{self.owner}: parameter '{name}' is on {parameter.device}, and elements are "
                    'selected on the CPU only. Take DiLoCoAlgorithm(codec="bit2_block").'
                )
        return super().init_tensors(bagua_ddp)

    def mean(self, bucket: BaguaBucket, outcome: _C.RoundOutcome) -> Operation:
        return operations.chunked_sparse(
            bucket, self._sent, self._decay, outcome, self.process_group
        )
