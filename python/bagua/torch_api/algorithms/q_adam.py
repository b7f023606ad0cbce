"""QAdam: exact Adam first, then compressed momentum under a frozen second moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C, BaguaError
from bagua._core.group.process_group import BaguaProcessGroup, Hierarchy
from bagua._core.state.ledger import Commit, Ledger
from bagua._ops import operations
from bagua._sync.hooks import WeakHook
from bagua.torch_api.algorithms._error_feedback import check_hierarchy, warn_of_useless_residuals
from bagua.torch_api.algorithms._q_adam_optimizer import QAdamOptimizer
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, Groups, Traits
from bagua.torch_api.bucket import BaguaBucket, aligned_buckets

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]


@dataclass(eq=False)
class QAdamAlgorithm(Algorithm):
    """Adam with an 8-bit first moment (Bagua, VLDB 2022, "QAdam"; Tang et al., ICML 2021).

    In the optimizer's warm-up gradients are averaged exactly. From then on the ranks average
    ``beta1 m + (1 - beta1) g`` through a codec, each with its own gradient ``g`` and all with the
    same ``m``; every rank decodes the same bytes, so weights and momentum stay equal to the bit.

    After the warm-up ``.grad`` holds the averaged momentum when ``backward()`` returns: what clips
    or looks at gradients sees that. It must be zeroed or None before the next backward; gradients
    are accumulated inside ``no_sync()``. With a ``GradScaler`` pass it to ``bagua.wrap``.

    Args:
        q_adam_optimizer: one of those given to ``bagua.wrap``; it must have all parameters that are
            trained, and no others.
        hierarchical: exact inside a node, compressed between the nodes' leaders, so not at all with
            one node; ``"sharded"``: between all ranks, each with a share of a bucket, for nodes
            with several network cards. None: True where there are several nodes with several ranks
            on one, else False.
        codec: a name of ``bagua._C.codec_names()``; ``"minmax_uint8"`` is Bagua's format.
            ``"bit2_block"`` sends a quarter of the default's bytes, with error feedback at little
            loss.
        error_feedback: each rank adds to its momentum what compression has taken from that of the
            last step, and likewise to the mean of its part of a bucket. Takes 8 bytes per
            parameter, and 8 / ranks. Residuals change with ``step()``.

    Raises:
        TypeError: the optimizer is not a :class:`QAdamOptimizer`.
        ValueError: unknown codec, or error feedback with ``hierarchical="sharded"``; from
            ``bagua.wrap``: an optimizer that does not fit the module.

    Example::

        optimizer = QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=100)
        model = bagua.wrap(model, [optimizer], QAdamAlgorithm(optimizer))
    """

    q_adam_optimizer: QAdamOptimizer
    hierarchical: Hierarchy | None = None
    _: KW_ONLY
    codec: str = "block_uint8"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.q_adam_optimizer, QAdamOptimizer):
            raise TypeError(
                "QAdamAlgorithm takes a QAdamOptimizer (bagua.torch_api.algorithms.q_adam), not "
                f"{type(self.q_adam_optimizer).__name__}"
            )
        _C.make_codec(self.codec)
        check_hierarchy("QAdamAlgorithm", self.hierarchical, self.error_feedback)
        warn_of_useless_residuals("QAdamAlgorithm", self.codec, self.error_feedback)

    def reify(self, process_group: BaguaProcessGroup) -> QAdamAlgorithmImpl:
        return QAdamAlgorithmImpl(
            process_group,
            self.q_adam_optimizer,
            self.hierarchical,
            codec=self.codec,
            error_feedback=self.error_feedback,
        )


class QAdamAlgorithmImpl(AlgorithmImpl):
    """Implementation of :class:`QAdamAlgorithm`.

    Its state for checkpoints has ``steps`` of the optimizer, by which the next training forward
    knows whether the optimizer's state was loaded too, and with error feedback residuals as in Note
    [Ledger].

    ``gradients_hold_momentum``: the last round left momentum in ``.grad``; the optimizer asks.
    """

    traits = Traits(ranks_agree=True, steps_on_gradients=False, remembers_gradients=True)

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        q_adam_optimizer: QAdamOptimizer,
        hierarchical: Hierarchy | None = None,
        *,
        codec: str = "block_uint8",
        error_feedback: bool = False,
    ) -> None:
        super().__init__(process_group)
        self.optimizer = q_adam_optimizer
        self.hierarchical = process_group.hierarchy(hierarchical)
        self.codec = codec
        self.error_feedback = error_feedback
        self._commit = Commit()  # of residuals, with the steps
        self.ledger = Ledger(
            type(self).__name__,
            lambda: process_group.connections,
            counters=["steps"],
            hierarchical=bool(self.hierarchical),
            pages=error_feedback,
        )
        self.gradients_hold_momentum = False
        self.compressing = False
        # Inputs of the buckets' ops: exp_avg of every parameter, and beta1 of every tensor of
        # a bucket with the numbers of the optimizer's groups that they come from.
        self._groups: dict[torch.Tensor, int] = {}
        self._memories: dict[torch.Tensor, torch.Tensor] = {}
        self._betas: list[tuple[torch.Tensor, list[int]]] = []
        self._last_forward = 0  # the wrapper's count of training forwards, no_sync() included
        self._accumulated = False  # under no_sync() since the last round
        self._fresh = False  # momentum has been averaged, and no step has used it
        self._finite: torch.Tensor | None = None  # by gradient, whether the last ones were
        self._loaded_steps: int | None = None
        self._on_load: torch.utils.hooks.RemovableHandle | None = None

    def need_reset(self) -> bool:
        self._check_loaded_steps()
        return self.compressing == self.optimizer.warming_up

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        self._groups = _groups_of(self.optimizer, bagua_ddp)
        self.compressing = not self.optimizer.warming_up
        self.gradients_hold_momentum = self._fresh = False
        self._finite = None
        self._memories, self._betas = {}, []
        self._commit = Commit()
        self.ledger.put_aside(*self.ledger.pages)
        self.optimizer._source = weakref.ref(self)
        if self._on_load is None:
            take_over = WeakHook(self._take_over_loaded_state)
            self._on_load = self.optimizer.register_load_state_dict_post_hook(take_over)
        return super().init_tensors(bagua_ddp)

    def tensors_to_buckets(self, tensors: Groups, do_flatten: bool) -> list[BaguaBucket]:
        return aligned_buckets(tensors, do_flatten, self.process_group.size)

    def init_operations(self, bagua_ddp: Session, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if not self.compressing:
            bucket.append_centralized_synchronous_op(
                hierarchical=False, average=True, group=self.process_group
            )
            return
        memories = [self.optimizer.state_of(tensor)["exp_avg"] for tensor in bucket.tensors]
        betas = torch.zeros(len(bucket.tensors), dtype=torch.float64, device="cpu")
        self._betas.append((betas, [self._groups[tensor] for tensor in bucket.tensors]))
        self._memories.update(zip(bucket.tensors, memories, strict=True))
        bucket.append_operation(operations.update_momentum(bucket, memories, betas))
        operation = operations.compressed_all_reduce(
            bucket,
            self.codec,
            self.hierarchical,
            group=self.process_group,
            outcome=self._commit.outcome if self.error_feedback else None,
        )
        bucket.append_operation(operation)
        if operation.page is not None:
            self.ledger.take(operation.page)

    def init_forward_pre_hook(self, bagua_ddp: Session) -> Callable[[Any], None]:
        def start(_: Any) -> None:
            forward = bagua_ddp.bagua_train_step_counter
            if forward != self._last_forward + 1:
                self._accumulated = True
            self._last_forward = forward
            beta1 = [float(group["betas"][0]) for group in self.optimizer.param_groups]
            for betas, groups in self._betas:
                betas.copy_(betas.new_tensor([beta1[i] for i in groups]))

        return start

    def init_pre_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        def check() -> None:
            accumulated = (
                self._accumulated or bagua_ddp.bagua_train_step_counter != self._last_forward
            )
            if not self.gradients_hold_momentum or accumulated:
                return
            for bucket in bagua_ddp.bagua_buckets:
                # The smallest gradient decides: where it is zeroed instead of None, this reads it.
                held = [t for t in bucket.tensors if t.requires_grad and t.grad is not None]
                tensor = min(held, key=torch.Tensor.numel, default=None)
                if tensor is not None and bool(tensor.grad.any()):  # type: ignore[union-attr]
                    raise BaguaError(
                        f"module '{bagua_ddp.bagua_module_name}': a backward began while .grad of "
                        f"'{tensor.bagua_tensor_name}' still holds the averaged momentum of the "  # type: ignore[attr-defined]
                        "round before, to which it would add gradients. After the warm-up of "
                        "QAdam call zero_grad() before every backward, and accumulate gradients "
                        "inside no_sync()."
                    )

        return check

    def init_post_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        def finish() -> None:
            bagua_ddp.wait_pending_comm_ops()
            self.gradients_hold_momentum = self._fresh = self.compressing
            self._accumulated = False

        return finish

    def use_momentum(self) -> None:
        """Called by the optimizer's step, which takes ``.grad`` for momentum."""
        if not self._fresh:
            raise BaguaError(
                "QAdamOptimizer.step(): no backward was communicated since the last step, so "
                "gradients are this rank's own and no averaged momentum. After the warm-up let the "
                "last backward before each step run outside of no_sync(), and step once for it."
            )
        self._refuse_non_finite()
        self._fresh = False
        self._commit.commit()

    def _refuse_non_finite(self) -> None:
        """Raise on all ranks alike, as they hold the same means, before the step changes anything.

        On a device the answer is that of the step before: the host does not wait for its queue.
        """
        held = {t: t.grad for t in self._memories if t.grad is not None and t.numel()}
        if not held:
            return
        gradients = list(held.values())
        if gradients[0].is_cpu:  # where the norm takes many times as long
            finite = torch.stack([gradient.sum().float() for gradient in gradients]).isfinite()
            if not finite.all():  # finite numbers may have a sum that is not
                finite = torch.stack([gradient.isfinite().all() for gradient in gradients])
        else:
            largest = torch._foreach_norm(gradients, float("inf"))
            finite = torch.stack([norm.float() for norm in largest]).isfinite()
        before, self._finite = self._finite, finite
        known = finite if finite.is_cpu else before
        if known is None or len(known) != len(held) or bool(known.all()):
            return
        names = [tensor.bagua_tensor_name for tensor in held]  # type: ignore[attr-defined]
        bad = [name for name, good in zip(names, known.tolist(), strict=True) if not good]
        raise BaguaError(
            f"QAdamOptimizer.step(): the averaged momentum of '{bad[0]}' and {len(bad) - 1} others "
            f"is not finite, {self.optimizer.compressed_steps} steps after the warm-up; momentum "
            "would stay so for ever. Go back to a checkpoint and take a smaller learning rate or a "
            "longer warm-up (QAdamOptimizer(warmup_steps=)); with float16 autocast pass the "
            "GradScaler to bagua.wrap, and such steps are skipped."
        )

    def close(self) -> None:
        self.gradients_hold_momentum = self.compressing = False
        if self._on_load is not None:
            self._on_load.remove()
            self._on_load = None

    def update_ledger(self) -> None:
        self.ledger.counters["steps"] = self.optimizer.completed_steps

    def ledger_loaded(self) -> None:
        self._loaded_steps = self.ledger.counters["steps"]

    def _check_loaded_steps(self) -> None:
        saved, self._loaded_steps = self._loaded_steps, None
        steps = self.optimizer.completed_steps if saved is not None else None
        if saved != steps:
            raise ValueError(
                f"QAdamAlgorithm: its state was saved after {saved} steps, the optimizer has done "
                f"{steps}. Load the optimizer's state_dict of the same checkpoint, on every rank."
            )

    def _take_over_loaded_state(self) -> None:
        # The ops hold tensors; load_state_dict has put others in their place.
        for parameter, memory in self._memories.items():
            state = self.optimizer.state_of(parameter)
            memory.copy_(state["exp_avg"])
            state["exp_avg"] = memory


def _groups_of(optimizer: QAdamOptimizer, bagua_ddp: Session) -> dict[torch.Tensor, int]:
    """The number of each parameter's group, after checking that optimizer and module fit."""
    module = f"module '{bagua_ddp.bagua_module_name}'"
    if not any(optimizer is other for other in bagua_ddp.bagua_optimizers):
        raise ValueError(
            f"{module}: the optimizer of QAdamAlgorithm is not among those given to bagua.wrap; "
            "call bagua.wrap(model, [optimizer], QAdamAlgorithm(optimizer))"
        )
    trained = {parameter: name for name, parameter in bagua_ddp.bagua_build_params()}
    names = {parameter: name for name, parameter in bagua_ddp.module.named_parameters()}
    groups = {}
    for number, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if parameter not in trained:
                unknown = f"{i} of group {number}, of shape {tuple(parameter.shape)},"
                raise ValueError(
                    f"{module}: parameter {names.get(parameter, unknown)} of the QAdamOptimizer is "
                    "not trained by this module: it is frozen, ignored, an expert's, or not a part "
                    "of it. Give the optimizer only what is trained."
                )
            groups[parameter] = number
    for parameter, name in trained.items():
        if parameter not in groups:
            raise ValueError(
                f"{module}: parameter {name} is trained, but the QAdamOptimizer does not have it. "
                "Add it to the optimizer, freeze it, or put its name into "
                "_bagua_params_and_buffers_to_ignore."
            )
    return groups
