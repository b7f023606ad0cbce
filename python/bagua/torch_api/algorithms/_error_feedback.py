"""Base of the algorithms that send a part of the gradient and keep a residual."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C
from bagua._core.compression.exact_parameters import exact_parameters
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.saved_values import check_state, saved_count
from bagua.torch_api._residuals.means import RememberedMeans, check_warmup
from bagua.torch_api.algorithms._q_adam_optimizer import QAdamOptimizer
from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = ["ErrorFeedbackImpl"]


class ErrorFeedbackImpl(AlgorithmImpl):
    """Exact rounds first, then one compressing op per bucket, with a residual.

    Parameters that ``exact`` names have buckets of their own, without a residual.

    Subclasses define the op (:meth:`append_compression`) and its state besides residuals
    (:meth:`equal_views`). The first tensor of its memory is the residual, as long as the bucket, or
    empty.

    Attributes:
        for_sgd: whether the compression is made for optimizers whose step is proportional to the
            gradient, so that others are warned of.
        outcome: shared by the memories of all buckets: they change only with a whole finite round.
    """

    ranks_agree = True
    remembers_gradients = True
    takes_unfrozen = True
    takes_uneven_inputs = True
    for_sgd = False

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool | None,
        warmup_steps: int,
        exact: Sequence[str] = (),
    ) -> None:
        super().__init__(process_group)
        check_warmup(warmup_steps)
        if not isinstance(hierarchical, bool | None):
            raise ValueError(  # now, not at the end of the warm-up
                f"{type(self).__name__}: hierarchical={hierarchical!r} must be True or False for "
                "algorithms with residuals; None lets the nodes decide"
            )
        self.hierarchical = process_group.hierarchy(hierarchical)
        self.exact = exact
        self._exact_names: set[str] = set()
        self.warmup_steps = warmup_steps
        self.outcome = _C.RoundOutcome()
        self._rounds = 0  # that were communicated
        self._compressing = False
        self._means = self.make_means()
        self._loaded: dict[str, Any] | None = None  # for buckets that are not made yet

    def append_compression(self, bucket: BaguaBucket) -> _C.RoundMemory:
        """Append the compressing op to ``bucket`` and return its memory."""
        raise NotImplementedError

    def equal_views(
        self, bucket: BaguaBucket, memory: _C.RoundMemory
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of the state that is equal on all ranks; writes into them take effect."""
        raise NotImplementedError

    def make_means(self) -> RememberedMeans:
        """The memories of new buckets, without any yet."""
        return RememberedMeans(self.process_group, self.hierarchical)

    def need_reset(self) -> bool:
        return self._compressing != (self._rounds >= self.warmup_steps)

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        if self.for_sgd and not self._rounds:
            owner = type(self).__name__.removesuffix("Impl")
            _warn_of_other_steps(owner, bagua_ddp.bagua_optimizers)
        self._compressing = self._rounds >= self.warmup_steps
        self.outcome = _C.RoundOutcome()
        self._means = self.make_means()
        all_names = bagua_ddp.module.named_parameters(remove_duplicate=False)
        exact = exact_parameters(self.exact, all_names)
        self._exact_names = {name for name, p in bagua_ddp.bagua_build_params() if id(p) in exact}
        return super().init_tensors(bagua_ddp)

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        if not (self._compressing and self._exact_names):
            return super().tensors_to_buckets(tensors, do_flatten)
        groups = [
            [tensor for tensor in group if self._is_exact(tensor) == exact]
            for group in tensors
            for exact in (False, True)
        ]
        return super().tensors_to_buckets(list(filter(None, groups)), do_flatten)

    def _is_exact(self, tensor: torch.Tensor) -> bool:
        return record_of(tensor).name in self._exact_names

    def init_operations(self, bagua_ddp: Session, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if not self._compressing:
            bucket.append_centralized_synchronous_op(average=True, group=self.process_group)
            return
        if self._is_exact(bucket.tensors[0]):
            # All elements are no sparse message: the mean is exact, and takes part in the outcome.
            bucket.append_sparse_op(
                1.0,
                self.outcome,
                hierarchical=self.hierarchical,
                group=self.process_group,
                error_feedback=False,
            )
        else:
            self._means.remember(bucket, self.append_compression(bucket))
        if self._loaded is not None and bucket is bagua_ddp.bagua_buckets[-1]:
            state, self._loaded = self._loaded, None
            self._means.restore(state, self._equal_views())

    def init_post_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        def finish() -> None:
            bagua_ddp.wait_pending_comm_ops()
            self._rounds += 1

        return finish

    # State for checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Counters and residuals: call it on every rank, between two steps.

        Returns:
            ``rounds``, the communicated ones; ``ranks``, those with residuals (with
            ``hierarchical`` the nodes' leaders); from the end of the warm-up on, for every
            parameter, of its shape and f32 (f64), ``rank<r>/error/<name>``; and further
            state of the algorithm.
        """
        equal = {key: view.clone() for key, view in self._equal_views()}
        return {"rounds": self._rounds} | equal | self._means.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`: on every rank, after ``with_bagua``.

        With another number of ranks than saved it, give every rank the dicts of all old ranks
        merged into one (``a | b | ...``): each then starts from the mean of their
        residuals.

        Raises:
            ValueError: the state is of another algorithm, model or number of ranks; names the
                entry.
        """
        check_state(state, type(self).__name__)
        rounds = saved_count(state, "rounds", type(self).__name__)
        remembers = rounds >= self.warmup_steps and not set(state) <= {"rounds", "ranks"}
        self._loaded = None
        if not self._compressing:
            self._loaded = dict(state) if remembers else None  # the next forward makes the buckets
        elif remembers:
            self._means.restore(state, self._equal_views())
        else:  # saved before the first compressed round
            self._means.clear()
            for _, view in self._equal_views():
                view.zero_()
        self._rounds = rounds

    def _equal_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket, memory in self._means.memories:
            yield from self.equal_views(bucket, memory)

    def members(self) -> list[int]:
        """The ranks that remember."""
        return self._means.members()


def _warn_of_other_steps(owner: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of the first optimizer that is adaptive, or Muon.

    QAdamOptimizer freezes its second moment, which compressed gradients then do not change.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        adaptive = any("betas" in group for group in optimizer.param_groups)
        if "muon" in name.lower():
            why = "makes all singular values of a step equal, those of the compression error too"
        elif adaptive and not isinstance(optimizer, QAdamOptimizer):
            why = "divides by a second moment that rare, large sums of compressed gradients raise"
        else:
            continue
        warnings.warn(
            f"{owner} is made for SGD with momentum, and trains worse under {name}, which {why}. "
            'Take ByteGradAlgorithm(codec="int4_block", error_feedback=True), or compare the loss '
            "with that of GradientAllReduceAlgorithm() first.",
            stacklevel=2,
        )
        return
