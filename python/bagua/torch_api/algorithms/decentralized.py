"""Decentralized SGD: ranks average weights, with all others or with one peer a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Ledger
from bagua._ops.operations import AverageWeights, check_peer_selection_mode
from bagua.torch_api.algorithms.base import Algorithm, LocalWeightsImpl
from bagua.torch_api.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from bagua.torch_api.bucket import BaguaBucket

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = [
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
]


def _check(peer_selection_mode: str, communication_interval: int) -> None:
    check_peer_selection_mode(peer_selection_mode)
    if communication_interval < 1:
        raise ValueError(
            f"communication_interval={communication_interval} must be at least 1 iteration"
        )


class DecentralizedAlgorithm(Algorithm):
    """Weights are averaged while forward and backward run (Bagua, VLDB 2022, decentralized SGD).

    A step computes ``x = mean(x) - lr * g(x)``: the gradient is the rank's own and that of its
    weights before averaging. Ranks hold different weights; buffers stay each rank's own.

    Args:
        hierarchical: exact mean inside a node, ``peer_selection_mode`` between the nodes' leaders.
            When all ranks share one node, True makes every mode the mean over all ranks.
            None: True where there are several nodes with several ranks on one, else False.
        peer_selection_mode: ``"all"``: the mean over all ranks. ``"shift_one"``: the mean of two
            ranks, which change partners every time (``bagua._C.shift_one_peer``); with an odd
            number of ranks each in its turn keeps its weights once.
        communication_interval: iterations from one communication to the next. The first iteration
            communicates.

    Raises:
        ValueError: unknown mode, or an interval below 1.

    Example::

        algorithm = DecentralizedAlgorithm(peer_selection_mode="shift_one")
        model = model.with_bagua([optimizer], algorithm)
    """

    def __init__(
        self,
        hierarchical: bool | None = None,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        _check(peer_selection_mode, communication_interval)
        self.hierarchical = hierarchical
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = communication_interval

    def reify(self, process_group: BaguaProcessGroup) -> DecentralizedAlgorithmImpl:
        return DecentralizedAlgorithmImpl(
            process_group, self.hierarchical, self.peer_selection_mode, self.communication_interval
        )


class DecentralizedAlgorithmImpl(LocalWeightsImpl):
    """Implementation of :class:`DecentralizedAlgorithm`.

    An iteration is a forward and a backward outside ``no_sync()``. The state for checkpoints has
    ``iterations`` and ``communications``, the numbers of completed ones, which decide when and with
    whom the next communication is. Weights are not in it: save every rank's own.
    """

    traits = replace(LocalWeightsImpl.traits, takes_unfrozen=True)

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool | None = None,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        super().__init__(process_group)
        _check(peer_selection_mode, communication_interval)
        self.hierarchical = process_group.hierarchy(hierarchical)
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = communication_interval
        self.ledger = Ledger(
            type(self).__name__,
            lambda: process_group.connections,
            counters=["iterations", "communications"],
            pages=False,
        )
        self._operations: list[tuple[BaguaBucket, AverageWeights]] = []
        self._between_forward_and_backward = False
        self._under_way = False  # weights are being averaged and have not been copied back

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        self.update_ledger()
        self._operations = []
        self._between_forward_and_backward = False
        self._under_way = False
        return self.register_weights(bagua_ddp)

    def init_operations(self, bagua_ddp: Session, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        operation = bucket.append_decentralized_synchronous_op(
            torch.empty_like(bucket.backend_tensor),
            hierarchical=self.hierarchical,
            peer_selection_mode=self.peer_selection_mode,
            group=self.process_group,
        )
        operation.communications.fill_(self.ledger.counters["communications"])
        self._operations.append((bucket, operation))

    def init_forward_pre_hook(self, bagua_ddp: Session) -> Callable[[Any], None]:
        def start(_: Any) -> None:
            self._between_forward_and_backward = True
            if self._under_way:  # a second forward before the backward: its communication continues
                return
            if self.ledger.counters["iterations"] % self.communication_interval != 0:
                return
            self._under_way = True
            bagua_ddp.mark_all_ready()

        return start

    def init_post_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        def finish() -> None:
            self._between_forward_and_backward = False
            self.ledger.counters["iterations"] += 1
            if not self._under_way:
                return
            bagua_ddp.wait_pending_comm_ops()
            for bucket, operation in self._operations:
                operation.copy_back_peer_weight(bucket)
            self._under_way = False

        return finish

    def init_post_optimizer_step_hook(
        self, bagua_ddp: Session
    ) -> Callable[[torch.optim.Optimizer], None]:
        def check(optimizer: torch.optim.Optimizer) -> None:
            self.check_step(bagua_ddp, "when weights are on their way to other ranks")

        return check

    def update_ledger(self) -> None:
        for _, operation in self._operations[:1]:
            self.ledger.counters["communications"] = int(operation.communications)

    def ledger_loaded(self) -> None:
        for _, operation in self._operations:
            operation.communications.fill_(self.ledger.counters["communications"])
