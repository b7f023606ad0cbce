"""Communication hooks of torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from bagua.torch_api._bucket_ops import CommHookOp
from bagua.torch_api.algorithms.base import AlgorithmImpl, WrappedModule
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.distributed import BaguaDistributedDataParallel

__all__ = ["CommHook", "Hook", "register"]

#: ``hook(state, bucket)``: sends what it likes and returns the future of the bucket's new values.
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class CommHook(GradientAllReduceAlgorithmImpl):
    """Gradients through a user's hook, which also divides by the number of ranks.

    What a hook returns is its own affair (``noop_hook``, local SGD), so ranks need not agree.
    """

    ranks_agree = False

    sparse_gradients = False

    def __init__(self, process_group: BaguaProcessGroup, state: Any, hook: Hook) -> None:
        super().__init__(process_group)
        self._op = CommHookOp(hook, state)

    def init_operations(self, bagua_ddp: WrappedModule, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        bucket.ops.append(self._op)


def register(ddp: BaguaDistributedDataParallel, state: Any, hook: Hook) -> None:
    """Replace the communication of ``ddp`` by ``hook``. Every rank calls it.

    Raises:
        TypeError, ValueError: ``hook`` is no hook.
        RuntimeError: there is one already, training has begun, or the algorithm is no exact
            all-reduce of gradients.
    """
    _check_hook(hook)
    _check_algorithm(ddp.bagua_algorithm)
    if ddp.bagua_train_step_counter > 0:
        raise RuntimeError(
            "register_comm_hook: training has begun; register before the first training forward"
        )
    ddp.replace_algorithm(CommHook(ddp.process_group, state, hook))


def _check_algorithm(algorithm: AlgorithmImpl) -> None:
    if isinstance(algorithm, CommHook):
        raise RuntimeError("register_comm_hook: a hook is registered already; one is all there is")
    if type(algorithm) is not GradientAllReduceAlgorithmImpl:
        raise RuntimeError(
            "register_comm_hook replaces the all-reduce of GradientAllReduceAlgorithm; "
            f"{type(algorithm).__name__} has a communication of its own: drop one of the two"
        )


def _check_hook(hook: Hook) -> None:
    if not callable(hook):
        raise TypeError(f"register_comm_hook: {hook!r} is not callable")
    try:
        inspect.signature(hook).bind(None, None)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"register_comm_hook: {hook!r} must take (state, bucket): {error}"
        ) from error
