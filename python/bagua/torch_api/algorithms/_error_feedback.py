"""Base of the algorithms that send a part of the gradient and keep a residual."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup, Hierarchy
from bagua._core.group.warn import warn
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.ledger import Ledger
from bagua._ops import operations
from bagua._ops.operations import Operation
from bagua.torch_api.algorithms.base import Groups, Traits, WarmUpImpl, name_of
from bagua.torch_api.bucket import BaguaBucket

if TYPE_CHECKING:
    from bagua.torch_api._session import Session


def check_hierarchy(owner: str, hierarchical: Hierarchy | None, error_feedback: bool) -> None:
    """Raise ValueError where residuals, which are of whole buckets, meet shares of buckets."""
    if error_feedback and hierarchical == "sharded":
        raise ValueError(
            f'{owner}: error_feedback=True is not supported with hierarchical="sharded"; '
            "take True or False"
        )


def check_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise TypeError(
            f"exact_parameters={patterns!r} is one string: give a list of names or patterns, such "
            f"as [{patterns!r}]"
        )
    return tuple(patterns)


def check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} must be 0 or more iterations")


def is_wide(codec: str) -> bool:
    numel = 1024
    payload = _C.make_codec(codec).payload_bytes(torch.float32, numel)
    return payload >= 2 * numel


def warn_of_useless_residuals(owner: str, codec: str | None, error_feedback: bool) -> None:
    if not error_feedback or not (codec is None or is_wide(codec)):
        return
    what = "without a codec: nothing is lost"
    if codec is not None:
        what = f'with codec="{codec}": 8 bytes per parameter for less than a hundredth of a value'
    warn(
        f"{owner}: error_feedback=True {what}. Leave it out, or take a codec of fewer bits, such "
        'as "int4_block".'
    )


class ErrorFeedbackImpl(WarmUpImpl):
    """Exact rounds first, then a compressing op per bucket (:meth:`compression`), with a residual.

    Parameters that ``exact`` names have separate buckets, without a residual. Its state for
    checkpoints, besides ``rounds``, is that of Note [Ledger], from the end of the warm-up on.
    Residuals that are loaded before wait for that.

    ``for_sgd``: the compression is made for steps proportional to the gradient; optimizers with
    others are warned of. ``outcome``: shared by the memories of all buckets, which change only with
    a whole finite round.
    """

    traits = Traits(
        ranks_agree=True, remembers_gradients=True, takes_uneven_inputs=True, takes_unfrozen=True
    )
    outcome: _C.RoundOutcome
    for_sgd = False
    counter = "rounds"

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        arguments: Any,
        warmup_steps: int = 0,
        exact: Sequence[str] = (),
    ) -> None:
        super().__init__(process_group, warmup_steps)
        self.arguments = arguments
        hierarchical = arguments.hierarchical
        if not isinstance(hierarchical, bool | None):
            raise ValueError(  # now, not at the end of the warm-up
                f"{type(self).__name__}: hierarchical={hierarchical!r} must be True or False for "
                "algorithms with residuals; None lets the nodes decide"
            )
        self.hierarchical = process_group.hierarchy(hierarchical)
        self.exact = exact
        self._exact_names: set[str] = set()
        self.outcome = _C.RoundOutcome()
        self.ledger = Ledger(
            type(self).__name__,
            lambda: process_group.connections,
            counters=[self.counter],
            hierarchical=bool(self.hierarchical),
        )

    def compression(self, bucket: BaguaBucket, outcome: _C.RoundOutcome) -> Operation:
        """The compressing op of ``bucket``, with a page of its state."""
        raise NotImplementedError

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        if self.for_sgd and not self.ledger.counters["rounds"]:
            _warn_of_other_steps(name_of(self), bagua_ddp.bagua_optimizers)
        self.outcome = _C.RoundOutcome()
        self.ledger.put_aside(*self.ledger.pages)
        all_names = bagua_ddp.module.named_parameters(remove_duplicate=False)
        exact = _exact_parameters(self.exact, all_names)
        self._exact_names = {name for name, p in bagua_ddp.bagua_build_params() if id(p) in exact}
        return super().init_tensors(bagua_ddp)

    def tensors_to_buckets(self, tensors: Groups, do_flatten: bool) -> list[BaguaBucket]:
        if self.warming_up or not self._exact_names:
            return super().tensors_to_buckets(tensors, do_flatten)
        groups = [
            [tensor for tensor in group if self._is_exact(tensor) == exact]
            for group in tensors
            for exact in (False, True)
        ]
        return super().tensors_to_buckets(list(filter(None, groups)), do_flatten)

    def _is_exact(self, tensor: torch.Tensor) -> bool:
        return record_of(tensor).name in self._exact_names

    def later_operations(self, bucket: BaguaBucket) -> list[Operation]:
        if not self._exact_names or not self._is_exact(bucket.tensors[0]):
            return [self.compression(bucket, self.outcome)]
        # All elements make no sparse message: the mean is exact, and takes part in the outcome.
        exact = operations.sparse(
            bucket,
            1.0,
            self.outcome,
            hierarchical=self.hierarchical,
            group=self.process_group,
            error_feedback=False,
        )
        return [exact]


def _warn_of_other_steps(owner: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of the first optimizer that is adaptive, or Muon.

    One that freezes its second moment, which compressed gradients then do not change, says so by
    an attribute ``freezes_second_moment``.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        adaptive = any("betas" in group for group in optimizer.param_groups)
        if "muon" in name.lower():
            why = "makes all singular values of a step equal, those of the compression error too"
        elif adaptive and not getattr(optimizer, "freezes_second_moment", False):
            why = "divides by a second moment that rare, large sums of compressed gradients raise"
        else:
            continue
        warn(
            f"{owner} is made for SGD with momentum, and trains worse under {name}, which {why}. "
            'Take ByteGradAlgorithm(codec="int4_block", error_feedback=True), or compare the loss '
            "with that of GradientAllReduceAlgorithm() first."
        )
        return


def _exact_parameters(
    patterns: Sequence[str], named: Iterable[tuple[str, torch.nn.Parameter]]
) -> set[int]:
    """The ``id`` of each parameter that has a name which a pattern matches; each matches some."""
    named = list(named)
    chosen = set()
    for pattern in patterns:
        matched = {id(parameter) for name, parameter in named if fnmatchcase(name, pattern)}
        if not matched:
            names = ", ".join(name for name, _ in named[:8]) + (", ..." if named[8:] else "")
            raise ValueError(
                f"exact_parameters: {pattern!r} matches no parameter of the model; it has {names}"
            )
        chosen |= matched
    return chosen
