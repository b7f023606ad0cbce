"""Optimizers that step on a copy of the weights, and so undo what a round has given.

1. In the first steps: weights that ``step()`` overwrites with values which do not depend on them.
2. Of those, elements before a round, after it and after the next step. A step on the weights ends
   near those that the round gave, one on a copy near those before it.

Both together are an error. The second alone is a warning, where it comes again and again and such
steps go farther from what a round gave than steps between rounds go: what writes the weights may
run outside of torch's dispatcher or begin later. A legal step, as where ranks' gradients point
away from each other, may lead back to where the rank was, but is no longer than others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from bagua import _C, BaguaError
from bagua._core.group.warn import warn
from bagua._core.state.shards import local
from bagua._sync.optimizer_steps import StepHook

_WATCHED_STEPS = 3  # that change weights: the first one makes the copy, from the weights
_MOST_ROUNDS = 20  # without a decision, after which there is none
_MOST_STEPS = 500  # in which rounds are looked at
_UNDONE_ROUNDS = 5  # after which a warning is due
_SAMPLED_ELEMENTS = 256  # of each weight
_SAMPLED_WEIGHTS = 8  # while nothing was seen to overwrite one
_FAR = 2.0  # times farther from the one than from the other


def refuse_others(
    module_name: str,
    algorithm_name: str,
    optimizers: Sequence[torch.optim.Optimizer],
    module: torch.nn.Module,
) -> None:
    """Raise ValueError where no optimizer has a parameter of the module."""
    own = {id(p) for p in module.parameters()}
    theirs = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if own and optimizers and not own & theirs:
        shown = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"module '{module_name}': {shown} has none of its parameters, but copies of them, or "
            f"those that it had before they were replaced. What {algorithm_name} gives the "
            "parameters would be lost. Give bagua.wrap an optimizer that is made of "
            "module.parameters()."
        )


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
        self._watched = self._steps = self._rounds = self._undone = 0
        self._usual = 0.0  # the farthest that a step between rounds went
        self._seen = False  # that suspects were overwritten; else they are a sample
        self._suspects = self._weights[:: -(-len(self._weights) // _SAMPLED_WEIGHTS) or 1]
        self._left: list[torch.Tensor] = []  # samples at the end of the last step that changed them
        self._given: list[torch.Tensor] = []  # and at the begin of this one
        # Before the hooks that make a round after a step.
        self.handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(StepHook(self._begin_step)),
            optimizer.register_step_post_hook(StepHook(self._end_step)),
        ]

    def _begin_step(self) -> None:
        if self._suspects:
            self._given = self._sample()
            if self._watched < _WATCHED_STEPS and not self._seen:
                self._watch = _C.OverwriteWatch([local(p) for _, p in self._weights])

    def _end_step(self) -> None:
        if not self._given:  # a step inside this one has taken it
            return
        now, given = self._sample(), self._given
        self._given = []
        overwritten = self._watch.end() if self._watch else []
        self._watch = None
        self._steps += 1
        if overwritten:
            self._seen = True
            self._suspects = [self._weights[number] for number in overwritten]
            now = self._sample()
        elif _distance(given, now) > 0:  # else a step of several to come, as where gradients add up
            self._watched += 1
            if self._left:
                self._decide(given, now)
        elif self._left:
            now = self._left  # what comes may still undo a round before
        self._left = now
        if self._steps == _MOST_STEPS or self._rounds == _MOST_ROUNDS:
            self._suspects = []  # it is let pass

    def _sample(self) -> list[torch.Tensor]:
        return [_sample_of(local(p.data)) for _, p in self._suspects]

    def _decide(self, given: list[torch.Tensor], now: list[torch.Tensor]) -> None:
        if _distance(self._left, given) == 0:  # no round has given other weights
            self._usual = max(self._usual, _distance(given, now))
            return
        from_own, from_given = _distance(self._left, now), _distance(given, now)
        undone, followed = from_given > _FAR * from_own, from_own > _FAR * from_given
        if undone and self._seen:
            raise BaguaError(self._text("steps on a copy", "were overwritten by its next step()"))
        self._rounds += 1
        self._undone += undone and from_given > _FAR * self._usual > 0
        due = self._undone == _UNDONE_ROUNDS
        if due:
            leads = f"were led back to those before by the step() after {_UNDONE_ROUNDS} rounds"
            warn(self._text("seems to step on a copy", leads))
        if due or (followed and self._seen):
            self._suspects = []

    def _text(self, does: str, became: str) -> str:
        name, more = self._suspects[0][0], len(self._suspects) - 1
        which = f"'{name}'" + (f" and {more} more" if more else "")
        return (
            f"module '{self._module_name}': {self._optimizer_name} {does} of the weights "
            f"that it keeps itself, so the weights of {which} that {self._algorithm_name} had "
            f"given {became}, and the ranks train apart. Give "
            "bagua.wrap an optimizer that steps on the module's parameters: keep these in float32, "
            "on the device, and compute in bfloat16 by torch.autocast. Or take an algorithm that "
            "averages gradients, such as GradientAllReduceAlgorithm or ByteGradAlgorithm."
        )


def _sample_of(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)].to(torch.float64, copy=True)


def _distance(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    squares = (float((a - b).square().sum()) for a, b in zip(first, second, strict=True))
    return math.sqrt(sum(squares))
