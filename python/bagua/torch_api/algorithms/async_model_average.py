"""Asynchronous model averaging: ranks train independently, and a thread averages weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Ledger
from bagua._core.state.shards import copied_between_shards, is_sharded, local
from bagua._ops.operations import Operation
from bagua._sync.averaging_synchronizer import AsynchronousAverage, check_asynchronous_mode
from bagua.torch_api.algorithms._error_feedback import check_warmup
from bagua.torch_api.algorithms.base import (
    Algorithm,
    Groups,
    Traits,
    WarmUpImpl,
    checked_names,
)
from bagua.torch_api.bucket import BaguaBucket

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = ["AsyncModelAverageAlgorithm", "AsyncModelAverageAlgorithmImpl"]

_AVERAGING = "averaging"  # 1 once it has begun


@dataclass(eq=False)
class AsyncModelAverageAlgorithm(Algorithm):
    """Weights are averaged by a separate thread (Bagua, VLDB 2022, asynchronous centralized).

    A step costs as much as without communication. Every average adds to a rank's weights the
    difference between all ranks' mean and its own snapshot, so updates made during the transfer are
    kept. Ranks need not make equal numbers of steps. Call ``model.bagua_algorithm.abort(model)`` on
    every rank after training, and before evaluating or saving weights that all ranks should hold.

    Averages are applied after a step of the optimizers that ``bagua.wrap`` was given; without any,
    before the first forward after a backward.

    Args:
        peer_selection_mode: ``"all"``, the only one.
        sync_interval_ms: milliseconds from the end of an average to the begin of the next.
        warmup_steps: iterations with exact all-reduce of gradients before averaging begins.
        mean_buffers: names of the floating-point buffers that are averaged with the weights, as in
            ``state_dict()``; ``*`` stands for any text. All others are each rank's own until
            ``abort``, which gives them the first rank's values. None: ``running_mean`` and
            ``running_var`` of torch's batch and instance norms.

    Raises:
        TypeError: ``mean_buffers`` is not a list of names.
        ValueError: an argument out of its range; from ``bagua.wrap``: ``mean_buffers`` that do not
            fit the module.

    Example::

        model = bagua.wrap(model, [optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=100))
        ...  # the training loop
        model.bagua_algorithm.abort(model)
        averaged = bagua.average_weights(model)
    """

    peer_selection_mode: str = "all"
    sync_interval_ms: int = 500
    warmup_steps: int = 0
    mean_buffers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_asynchronous_mode(self.peer_selection_mode)
        self.mean_buffers = checked_names(self.mean_buffers)
        if self.sync_interval_ms < 0:
            raise ValueError(
                f"sync_interval_ms={self.sync_interval_ms} must be 0 or more milliseconds"
            )
        check_warmup(self.warmup_steps)

    def reify(self, process_group: BaguaProcessGroup) -> AsyncModelAverageAlgorithmImpl:
        made = AsyncModelAverageAlgorithmImpl(
            process_group, self.peer_selection_mode, self.sync_interval_ms, self.warmup_steps
        )
        made.mean_buffers = self.mean_buffers
        return made

    def abort(self, model: Any) -> None:
        """``model.bagua_algorithm.abort(model)``, as older scripts spell it."""
        _averaging(model).abort(model)

    def resume(self, model: Any) -> None:
        """``model.bagua_algorithm.resume(model)``, as older scripts spell it."""
        _averaging(model).resume(model)


def _averaging(model: Any) -> AsyncModelAverageAlgorithmImpl:
    algorithm = getattr(model, "bagua_algorithm", None)
    if not isinstance(algorithm, AsyncModelAverageAlgorithmImpl):
        raise TypeError(
            f"{type(model).__name__} is not averaged asynchronously: pass the module that "
            "bagua.wrap or DistributedDataParallel returned for AsyncModelAverageAlgorithm"
        )
    return algorithm


class AsyncModelAverageAlgorithmImpl(WarmUpImpl):
    """Implementation of :class:`AsyncModelAverageAlgorithm`."""

    traits = Traits(
        ranks_agree=False,
        steps_on_gradients=False,
        opens_at_forward=True,
        needs_flat_buckets=True,
        takes_shards=True,
        refuses_guard="ranks average whenever they come to it, so there is no round in which all "
        "of them could compare weights. Leave guard= out; bagua_stats() counts averages that were "
        "not finite.",
    )

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        peer_selection_mode: str = "all",
        sync_interval_ms: int = 500,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(process_group, warmup_steps)
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = sync_interval_ms
        self.ledger = Ledger(
            type(self).__name__,
            lambda: process_group.connections,
            counters=[self.counter, _AVERAGING],
            pages=False,
        )
        self._operations: list[AsynchronousAverage] = []
        self._aborted = False

    # Set-up.

    def need_reset(self) -> bool:
        return self.warming_up and self.warmed_up  # averaging is not left again

    def later_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        self._operations = []
        if not bagua_ddp.gradient_as_bucket_view:
            raise ValueError("asynchronous averaging needs do_flatten=True")
        parameters = bagua_ddp.bagua_build_params()
        if copied := copied_between_shards(parameters):
            raise ValueError(
                f"module '{bagua_ddp.bagua_module_name}': several ranks of an island hold all of "
                f"parameter '{copied}', and would average it at different times: take "
                "DiLoCoAlgorithm or DecentralizedAlgorithm"
            )
        return [
            tensor.ensure_bagua_tensor(  # type: ignore[attr-defined]
                name, bagua_ddp.bagua_module_name, getter_closure=local
            )
            for name, tensor in [*parameters, *bagua_ddp.bagua_mean_buffers().items()]
        ]

    def tensors_to_buckets(self, tensors: Groups, do_flatten: bool) -> list[BaguaBucket]:
        if self.warming_up:
            return super().tensors_to_buckets(tensors, do_flatten)
        # One bucket of each dtype and device: all weights are of the same moment anyway. FSDP2
        # gathers shards from separate memory, where they stay.
        kinds: dict[tuple[torch.dtype, torch.device, bool], list[torch.Tensor]] = {}
        for tensor in (tensor for group in tensors for tensor in group):
            kind = (tensor.dtype, tensor.device, is_sharded(tensor))
            kinds.setdefault(kind, []).append(tensor)
        return [
            BaguaBucket(group, name=str(i), flatten=not apart)
            for i, ((_, _, apart), group) in enumerate(kinds.items())
        ]

    def later_operations(self, bucket: BaguaBucket) -> list[Operation]:
        operation = bucket.append_asynchronous_model_average_op(
            self.peer_selection_mode, self.process_group, sync_interval_ms=self.sync_interval_ms
        )
        self._operations.append(operation)
        return []

    def init_forward_pre_hook(self, bagua_ddp: Session) -> Callable[[Any], None]:
        def keep_averaging(_: Any) -> None:
            if not self._aborted:
                for operation in self._operations:
                    operation.reset()

        return keep_averaging

    # Control.

    def abort(self, bagua_ddp: Any) -> None:
        """End averaging: returns once every rank has called it. Again, or in the warm-up, too.

        Until the last rank calls it averages continue, also of this rank's weights. Ranks hold
        different weights afterwards: ``bagua.torch_api.average_weights(model)`` gives their mean.
        Frozen weights that training has moved get their mean, and buffers that are not averaged
        the first rank's values.

        Args:
            bagua_ddp: the wrapped module.

        Raises:
            BaguaError: another rank ended without ``abort``, and no forward has raised that yet.
        """
        del bagua_ddp  # upstream's signature
        self._aborted = True
        for operation in self._operations:
            operation.abort()

    def resume(self, bagua_ddp: Any) -> None:
        """Average again after :meth:`abort`, from the next training forward on. On every rank.

        Args:
            bagua_ddp: the wrapped module.

        Raises:
            BaguaError: averaging has failed before; wrap the module again.
        """
        del bagua_ddp  # upstream's signature
        self._aborted = False
        for operation in self._operations:
            operation.check()

    def update_ledger(self) -> None:
        self.ledger.counters[_AVERAGING] = int(not self.warming_up)

    def ledger_loaded(self) -> None:
        counters = self.ledger.counters
        if counters[_AVERAGING]:  # ranks have their own weights: they take up no warm-up again
            counters[self.counter] = max(counters[self.counter], self.warmup_steps)
            self.traits = replace(self.traits, reset_gives_state=False)

    def close(self) -> None:
        self._operations = []
