"""Optimizers that step on a copy of the weights, and so undo what a round has given.

1. In the first steps: weights that ``step()`` overwrites with values which do not depend on them.
2. Of those, where there are any, elements before a round, after it and after the next step. A step
   on the weights ends near those that the round gave, one on a copy near those before it.

Neither alone decides: what reads the weights may run outside of torch's dispatcher, and a legal
step may lead back to where the rank was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from bagua import _C, BaguaError
from bagua._core.state.shards import local
from bagua._sync.optimizer_steps import StepHook

_WATCHED_STEPS = 3  # of each optimizer: the first one makes the copy, from the weights
_MOST_ROUNDS = 20  # without a decision, after which there is none
_SAMPLED_ELEMENTS = 256  # of each weight
_FAR = 2.0  # times farther from the one than from the other


class KeptWeights:
    """Watches the first steps of one optimizer, and raises BaguaError at the end of one."""

    def __init__(
        self,
        module_name: str,
        algorithm_name: str,
        optimizer: torch.optim.Optimizer,
        weights: Sequence[tuple[str, torch.nn.Parameter]],
    ) -> None:
        self._module_name = module_name
        self._algorithm_name = algorithm_name
        self._optimizer_name = type(optimizer).__name__
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._weights = [(name, p) for name, p in weights if id(p) in own]
        self._watch: _C.OverwriteWatch | None = None
        self._steps = self._rounds = 0
        self._suspects: list[tuple[str, torch.nn.Parameter]] = []
        self._left: list[torch.Tensor] = []  # samples at the end of the last step
        self._given: list[torch.Tensor] = []  # and at the begin of this one
        # Before the hooks that make a round after a step.
        self.handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(StepHook(self._begin_step)),
            optimizer.register_step_post_hook(StepHook(self._end_step)),
        ]

    def _begin_step(self) -> None:
        if self._suspects:
            self._given = self._sample()
        elif self._steps < _WATCHED_STEPS:
            self._watch = _C.OverwriteWatch([local(p) for _, p in self._weights])

    def _end_step(self) -> None:
        if self._suspects:
            now = self._sample()
            self._decide(now)
            self._left = now
        elif self._watch is not None:
            self._suspects = [self._weights[number] for number in self._watch.end()]
            self._watch = None
            self._steps += 1
            self._left = self._sample()

    def _sample(self) -> list[torch.Tensor]:
        return [_sample_of(local(p.data)) for _, p in self._suspects]

    def _decide(self, now: list[torch.Tensor]) -> None:
        if _distance(self._left, self._given) == 0:
            return  # no round has given other weights
        from_own, from_given = _distance(self._left, now), _distance(self._given, now)
        if from_given > _FAR * from_own:
            raise BaguaError(self._error())
        self._rounds += 1
        if from_own > _FAR * from_given or self._rounds == _MOST_ROUNDS:
            self._suspects, self._steps = [], _WATCHED_STEPS  # it is let pass

    def _error(self) -> str:
        name, more = self._suspects[0][0], len(self._suspects) - 1
        which = f"'{name}'" + (f" and {more} more" if more else "")
        return (
            f"module '{self._module_name}': {self._optimizer_name} steps on a copy of the weights "
            f"that it keeps itself, so the weights of {which} that {self._algorithm_name} had "
            "given were overwritten by its next step(), and the ranks train apart. Give "
            "with_bagua an optimizer that steps on the module's parameters: keep these in float32, "
            "on the device, and compute in bfloat16 by torch.autocast. Or take an algorithm that "
            "averages gradients, such as GradientAllReduceAlgorithm or ByteGradAlgorithm."
        )


def _sample_of(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)].to(torch.float64, copy=True)


def _distance(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    squares = (float((a - b).square().sum()) for a, b in zip(first, second, strict=True))
    return math.sqrt(sum(squares))
