"""Communication hooks of torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)

from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops import operations
from bagua._ops.operations import Operation
from bagua.torch_api._session import Session
from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket

#: ``hook(state, bucket)``: sends what it likes and returns the future of the bucket's new values.
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


#: Hooks after which all ranks are known to hold the same gradients.
_AGREEING = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
    powerSGD_hook.powerSGD_hook,
    powerSGD_hook.batched_powerSGD_hook,
    quantization_hooks.quantization_pertensor_hook,
    quantization_hooks.quantization_perchannel_hook,
)


class CommHook(GradientAllReduceAlgorithmImpl):
    """Gradients through a user's hook, which also divides by the number of ranks.

    An unknown hook may return different values on each rank (``noop_hook``, local SGD).
    """

    def __init__(self, process_group: BaguaProcessGroup, state: Any, hook: Hook) -> None:
        super().__init__(process_group, average=False)  # the hook divides
        self.hook = hook
        self.state = state
        self.traits = replace(
            self.traits,
            ranks_agree=hook in _AGREEING,
            sparse_gradients=False,
            takes_unfrozen=False,  # its state may be of the buckets
        )
        self._op = operations.comm_hook(hook, state)

    def operations(self, bucket: BaguaBucket) -> list[Operation]:
        return [self._op]


def register(ddp: Session, state: Any, hook: Hook) -> None:
    _check_hook(hook)
    _check_algorithm(ddp.bagua_algorithm)
    if ddp.synchronising:
        raise RuntimeError(
            "register_comm_hook: a forward waits for its backward; call it between two steps, "
            "after the backward"
        )
    ddp.replace_algorithm(CommHook(ddp.process_group, state, hook))


def _check_algorithm(algorithm: AlgorithmImpl) -> None:
    if isinstance(algorithm, CommHook):
        raise RuntimeError(
            "register_comm_hook: a hook is registered already; register_comm_hook or "
            "register_builtin_comm_hook can only be called once"
        )
    if type(algorithm) is not GradientAllReduceAlgorithmImpl:
        raise RuntimeError(
            "register_comm_hook replaces the all-reduce of GradientAllReduceAlgorithm; "
            f"{type(algorithm).__name__} has a separate communication: drop one of the two"
        )


def _check_hook(hook: Hook) -> None:
    if not callable(hook):
        raise TypeError(
            f"register_comm_hook: Communication hook must be callable; {hook!r} is not callable"
        )
    try:
        signature = inspect.signature(hook)
        bound = signature.bind(None, None)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"register_comm_hook: {hook!r} must take (state, bucket): {error}"
        ) from error
    # Annotations may be strings; those are as good as none.
    bucket = signature.parameters[list(bound.arguments)[-1]].annotation
    if isinstance(bucket, type) and bucket not in (inspect.Parameter.empty, GradBucket):
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket, not "
            f"{bucket.__name__}"
        )
    result = signature.return_annotation
    if isinstance(result, type) and result not in (inspect.Signature.empty, torch.futures.Future):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], "
            f"not {result.__name__}"
        )
