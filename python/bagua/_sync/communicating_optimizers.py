"""Optimizers that communicate: recognised at sight, or by what their first steps call.

Calls of other threads are not counted: one that saves a checkpoint may communicate at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup, watched
from bagua._core.state.shards import is_sharded
from bagua._sync.optimizer_steps import only_makes_state, part_of_a_step

#: Steps that are watched: some optimizers begin to communicate after a warm-up.
_WATCHED = 100
_AT_SIGHT = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"}
_OF_HOROVOD = "_allreduce_grad_async"


def _refusal(module_name: str, algorithm_name: str, optimizer: torch.optim.Optimizer) -> str:
    return (
        f"module '{module_name}': {type(optimizer).__name__} communicates in its step(), and with "
        f"{algorithm_name} each rank steps on gradients of its own data, so parameters would learn "
        "from the data of one rank only. Use a plain optimizer of all parameters, such as "
        "torch.optim.AdamW, or an algorithm that averages gradients: GradientAllReduceAlgorithm or "
        "ByteGradAlgorithm."
    )


def refuse_at_sight(
    module_name: str, algorithm_name: str, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    for optimizer in optimizers:
        names = {owner.__name__ for owner in type(optimizer).__mro__}
        if names & _AT_SIGHT or hasattr(optimizer, _OF_HOROVOD):
            raise NotImplementedError(_refusal(module_name, algorithm_name, optimizer))


class FirstSteps:
    """Raises NotImplementedError at the end of a step that has sent to ranks of ``group``.

    All ranks that took part in it raise alike. A closure is not a part of the step, nor are hooks.
    """

    def __init__(
        self,
        module_name: str,
        algorithm_name: str,
        optimizer: torch.optim.Optimizer,
        group: BaguaProcessGroup,
    ) -> None:
        self._names = module_name, algorithm_name
        self._group = group
        self._left = _WATCHED
        self.handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]
        # Before hooks that make rounds.
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self.handles[1].id, last=False)

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._left == 0 or only_makes_state() or part_of_a_step(optimizer):
            return None
        _watch()
        given = [*args]
        if len(given) > 1 and callable(given[1]):
            given[1] = self._unwatched(optimizer, given[1])
        elif callable(closure := kwargs.get("closure")):
            kwargs = kwargs | {"closure": self._unwatched(optimizer, closure)}
        else:
            return None
        return tuple(given), kwargs

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._left > 0 and not (only_makes_state() or part_of_a_step(optimizer)):
            self._left -= 1
            self._look(optimizer)

    def _unwatched(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        def run() -> Any:
            self._look(optimizer)
            try:
                return closure()
            finally:
                _watch()

        return run

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        """End watching; raise if anything has been sent."""
        calls = [_ranks_of(name, optimizer) for _, name in _C.watched_collectives()]
        calls += watched.calls or []
        watched.calls = None
        members = self._group.torch_ranks
        if any(len(members & ranks) > 1 for ranks in calls):
            self._left = 0
            raise NotImplementedError(_refusal(*self._names, optimizer))


def _watch() -> None:
    """Note what this thread asks of torch's process groups and of eager collectives from now on."""
    _C.watch_collectives()
    watched.calls = []


def _ranks_of(group_name: str, optimizer: torch.optim.Optimizer) -> set[int]:
    """All, where the group is unknown; but shards are exchanged inside an island then."""
    if not group_name:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return set() if any(map(is_sharded, parameters)) else {*range(dist.get_world_size())}
    torchs: Any = dist.distributed_c10d
    try:
        group = torchs._resolve_process_group(group_name)
    except (RuntimeError, ValueError, LookupError):  # destroyed since
        return {*range(dist.get_world_size())}
    return {*dist.get_process_group_ranks(group)}
