"""Decentralized SGD: ranks average weights with others, or mix them with neighbours' in 8 bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C, BaguaError
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Ledger
from bagua._core.state.shards import Shards, is_sharded, local
from bagua._ops import operations
from bagua._ops.operations import AverageWeights
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, Groups, StepHook, Traits
from bagua.torch_api.bucket import BaguaBucket

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = [
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
]


_ONLY_THE_SAME = (
    "replicas would not be the neighbours' weights: load what this rank saved, with the same ranks "
    "and nodes, or only the weights"
)


def _check_interval(communication_interval: int) -> None:
    if communication_interval < 1:
        raise ValueError(
            f"communication_interval={communication_interval} must be at least 1 iteration"
        )


class _LocalWeightsImpl(AlgorithmImpl):
    """Weights travel instead of gradients, and are unchanged from forward to backward.

    An iteration is a forward and a backward outside ``no_sync()``. Subclasses set a :attr:`ledger`
    that counts them.
    """

    traits = Traits(
        ranks_agree=False,
        steps_on_gradients=False,
        opens_at_forward=True,
        reads_grad_scale=False,
        broadcast_buffers=False,
        takes_shards=True,
    )

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool | None,
        communication_interval: int,
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = process_group.hierarchy(hierarchical)
        self.communication_interval = communication_interval
        self._between_forward_and_backward = False

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        self._between_forward_and_backward = False
        return [
            parameter.ensure_bagua_tensor(  # type: ignore[attr-defined]
                name, bagua_ddp.bagua_module_name, getter_closure=local
            )
            for name, parameter in bagua_ddp.bagua_build_params()
        ]

    def tensors_to_buckets(self, tensors: Groups, do_flatten: bool) -> list[BaguaBucket]:
        # FSDP2 gathers shards from separate memory, where they stay.
        apart = any(is_sharded(tensor) for group in tensors for tensor in group)
        return super().tensors_to_buckets(tensors, do_flatten and not apart)

    def _communicates(self) -> bool:
        return self.ledger.counters["iterations"] % self.communication_interval == 0

    def _check_step(self, bagua_ddp: Session, danger: str) -> None:
        """Refuse an optimizer's step inside an iteration; ``danger`` completes "..., "."""
        if self._between_forward_and_backward:
            raise BaguaError(
                f"module '{bagua_ddp.bagua_module_name}': optimizer.step() came between a training "
                f"forward and the end of its backward, {danger}. Run other forwards in eval() or "
                "under no_grad(), compute the loss from tensors that forward returns, and call "
                "backward() without inputs=."
            )


@dataclass(eq=False)
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
        model = bagua.wrap(model, [optimizer], algorithm)
    """

    hierarchical: bool | None = None
    peer_selection_mode: str = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        operations.check_peer_selection_mode(self.peer_selection_mode)
        _check_interval(self.communication_interval)

    def reify(self, process_group: BaguaProcessGroup) -> DecentralizedAlgorithmImpl:
        return DecentralizedAlgorithmImpl(
            process_group, self.hierarchical, self.peer_selection_mode, self.communication_interval
        )


class DecentralizedAlgorithmImpl(_LocalWeightsImpl):
    """Implementation of :class:`DecentralizedAlgorithm`.

    The state for checkpoints has ``iterations`` and ``communications``, which decide when and with
    whom the next communication is. Weights are not in it: save every rank's own.
    """

    traits = replace(_LocalWeightsImpl.traits, takes_unfrozen=True)

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool | None = None,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        super().__init__(process_group, hierarchical, communication_interval)
        self.peer_selection_mode = peer_selection_mode
        self.ledger = Ledger(
            type(self).__name__,
            lambda: process_group.connections,
            counters=["iterations", "communications"],
            pages=False,
        )
        self._operations: list[tuple[BaguaBucket, AverageWeights]] = []
        self._under_way = False  # weights are being averaged and have not been copied back

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        self.update_ledger()
        self._operations = []
        self._under_way = False
        return super().init_tensors(bagua_ddp)

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
            # A second forward before the backward: its communication continues.
            if not self._under_way and self._communicates():
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

    def init_post_optimizer_step_hook(self, bagua_ddp: Session) -> StepHook:
        def check(optimizer: torch.optim.Optimizer) -> None:
            self._check_step(bagua_ddp, "when weights are on their way to other ranks")

        return check

    def update_ledger(self) -> None:
        for _, operation in self._operations[:1]:
            self.ledger.counters["communications"] = int(operation.communications)

    def ledger_loaded(self) -> None:
        for _, operation in self._operations:
            operation.communications.fill_(self.ledger.counters["communications"])


@dataclass(eq=False)
class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """After the optimizer's step, weights are mixed with both neighbours' on a ring of the ranks.

    What travels is the compressed difference from what the neighbours already know (DCD-PSGD:
    H. Tang et al., *Communication Compression for Decentralized Training*, NeurIPS 2018; Bagua,
    VLDB 2022). Ranks hold different weights; buffers stay each rank's own.

    Args:
        hierarchical: exact mean inside a node, the ring between the nodes' leaders. When all ranks
            share one node, True is the mean over all ranks, and compresses nothing.
            None: True where there are several nodes with several ranks on one, else False.
        communication_interval: iterations from one communication to the next. The first iteration
            communicates.
        codec: a name of ``bagua._C.codec_names()``. The default has one range per 2048 elements;
            ``"minmax_uint8"`` is Bagua's format, one range per bucket.

    Raises:
        ValueError: an interval below 1, or an unknown codec.

    Example::

        model = bagua.wrap(model, [optimizer], LowPrecisionDecentralizedAlgorithm())
    """

    hierarchical: bool | None = None
    communication_interval: int = 1
    _: KW_ONLY
    codec: str = "block_uint8"

    def __post_init__(self) -> None:
        _check_interval(self.communication_interval)
        _C.make_codec(self.codec)

    def reify(self, process_group: BaguaProcessGroup) -> LowPrecisionDecentralizedAlgorithmImpl:
        return LowPrecisionDecentralizedAlgorithmImpl(
            process_group, self.hierarchical, self.communication_interval, codec=self.codec
        )


class LowPrecisionDecentralizedAlgorithmImpl(_LocalWeightsImpl):
    """Implementation of :class:`LowPrecisionDecentralizedAlgorithm`.

    The round of a communicating iteration is due from the end of its backward on, and runs exactly
    once: after the last optimizer's step, or, if a step was skipped (``GradScaler``), before the
    next training forward or a checkpoint.

    The state for checkpoints has ``iterations``; ``ranks``, those on the ring; and, of the shape of
    each parameter and f32, ``rank<r>/weight/<name>``, ``rank<r>/left/<name>`` and
    ``rank<r>/right/<name>``. It loads with the same ranks and nodes. Weights are not in it: save
    every rank's own after it, since a round that is due runs first.
    """

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool | None = None,
        communication_interval: int = 1,
        *,
        codec: str = "block_uint8",
    ) -> None:
        super().__init__(process_group, hierarchical, communication_interval)
        self.codec = codec
        self._name = type(self).__name__
        self.ledger = Ledger(
            self._name,
            lambda: process_group.connections,
            counters=["iterations"],
            hierarchical=bool(self.hierarchical),
            only_same_ranks=_ONLY_THE_SAME,
            pages=False,
            shards=self._shards,
        )
        self._due = False  # the round of the last iteration has not run
        self._optimizers: set[int] = set()  # ids of those that step the weights
        self._stepped: set[int] = set()  # ids of those that did since the round became due
        self._wrapper: weakref.ref[Session] | None = None

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        named = bagua_ddp.bagua_build_params()
        steps = {
            id(optimizer): {id(p) for group in optimizer.param_groups for p in group["params"]}
            for optimizer in bagua_ddp.bagua_optimizers
        }
        lost = [name for name, p in named if not any(id(p) in own for own in steps.values())]
        if lost:
            raise RuntimeError(
                f"module '{bagua_ddp.bagua_module_name}': parameters {lost} are in none of the "
                "optimizers given to bagua.wrap, so no step would send them. Give their optimizer "
                "too, freeze them, or put them into _bagua_params_and_buffers_to_ignore."
            )
        weights = {id(p) for _, p in named}
        self._optimizers = {optimizer for optimizer, own in steps.items() if own & weights}
        self._wrapper = weakref.ref(bagua_ddp)
        self.ledger.own = {}
        return super().init_tensors(bagua_ddp)

    def init_operations(self, bagua_ddp: Session, bucket: BaguaBucket) -> None:
        # Weights have just been broadcast: the own ones are those of both neighbours.
        own, left, right = (bucket.backend_tensor.to(torch.float32, copy=True) for _ in range(3))
        bucket.clear_ops()
        bucket.append_low_precision_decentralized_synchronous_op(
            own,
            left,
            right,
            hierarchical=self.hierarchical,
            compression=self.codec,
            group=self.process_group,
        )
        for kind, replica in (("weight", own), ("left", left), ("right", right)):
            for name, place in bucket.named_views():
                view = replica.as_strided(place.size(), place.stride(), place.storage_offset())
                self.ledger.own[f"{kind}/{name}"] = view

    def init_forward_pre_hook(self, bagua_ddp: Session) -> Callable[[Any], None]:
        def begin(_: Any) -> None:
            self._between_forward_and_backward = True

        return begin

    def init_post_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        def end() -> None:
            self._between_forward_and_backward = False
            self._due = self._communicates()
            self._stepped.clear()
            self.ledger.counters["iterations"] += 1

        return end

    def init_post_optimizer_step_hook(self, bagua_ddp: Session) -> StepHook:
        def after_step(optimizer: torch.optim.Optimizer) -> None:
            self._check_step(bagua_ddp, "so backward would see other weights than forward")
            self._stepped.add(id(optimizer))
            if self._stepped >= self._optimizers and self.mark_pending(bagua_ddp):
                bagua_ddp.wait_pending_comm_ops()

        return after_step

    def mark_pending(self, bagua_ddp: Session) -> bool:
        if not self._due:
            return False
        self._due = False
        bagua_ddp.mark_all_ready()
        return True

    def run_pending(self) -> None:
        """Run the round that is due because a step was skipped, rather than in the next forward.

        Other ranks wait for it inside their ``step()``: call it on every rank after ``step()``
        where the loop makes collectives itself before the next training forward. Where nothing is
        due it returns at once.
        """
        wrapper = self._wrapper() if self._wrapper is not None else None
        if wrapper is not None and self.mark_pending(wrapper):
            wrapper.wait_pending_comm_ops()

    def update_ledger(self) -> None:
        self.run_pending()

    def _shards(self) -> Shards:
        session = None if self._wrapper is None else self._wrapper()
        named = [] if session is None else session.bagua_build_params()
        return Shards(self._name, named, self.process_group.rank, self.process_group.size)
