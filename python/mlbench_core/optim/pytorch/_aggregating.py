"""Wraps an optimizer of torch with an aggregation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from bagua._core.state.initial_state import broadcast_optimizer

from mlbench_core.aggregation.pytorch.aggregation import Aggregation, Denominator
from mlbench_core.optim.pytorch._begin import begin_together
from mlbench_core.optim.pytorch._memory import memory_of, restore_memory

__all__ = ["AggregatingOptimizer", "Tracker"]

Closure = Callable[[], Any] | None
# Attributes that are made again, or given by the aggregation, when an optimizer is copied or
# pickled. A learning rate scheduler's `step` in the instance would call the original's.
_NOT_COPIED = ("aggregation", "step")


class Tracker(Protocol):
    """Events that ``step`` reports to a tracker of mlbench-core."""

    def record_batch_agg(self) -> None: ...
    def record_batch_opt_step(self) -> None: ...


class AggregatingOptimizer(torch.optim.Optimizer):
    """Aggregates gradients before, or weights after, the step of another optimizer of torch.

    To its user it is a ``torch.optim.Optimizer``: parameter groups and state are those of
    :attr:`optimizer`, so that schedulers, ``zero_grad`` and ``state_dict`` work on either.
    ``state_dict`` has one entry more, ``"aggregation"``, where the aggregation has a memory, of
    which every rank has its own.

    Construction is collective. It gives all ranks the weights, the buffers and, when
    :attr:`optimizer` is set, the optimizer state of rank 0: mlbench-core's left ranks that began
    differently different for ever. All ranks then make the same calls. A copy (``copy.deepcopy``)
    or an unpickled one makes its own connections at its first step.

    Args:
        model: its parameters are aggregated, in its order.
        recipe: makes the aggregation; a ``functools.partial``, so that it can be copied.
        world_size: number of ranks, None for what the group has.
        op: the aggregation's operation.
        agg_grad: aggregate gradients, else weights.
        by_layer: one aggregation per parameter.

    Attributes:
        aggregation: of gradients or weights.
        optimizer: the optimizer that steps. Assigning it completes the construction.

    Raises:
        ValueError: ``world_size`` is not the number of ranks.
        BaguaMismatchError: ranks have different models.
        RuntimeError: there are other ranks but no process group.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Callable[[], Aggregation],
        *,
        world_size: int | None = None,
        op: str,
        agg_grad: bool,
        by_layer: bool,
    ) -> None:
        self.model = model
        self.agg_mode = op
        self.agg_grad = agg_grad
        self.aggregation = recipe()
        self._recipe = recipe
        self._by_layer = by_layer
        self._inner: torch.optim.Optimizer | None = None
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        begin_together(self.aggregation, world_size, named, type(self).__name__)

    # The optimizer inside.

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that steps.

        Raises:
            ValueError: there is none yet.
        """
        if self._inner is None:
            raise ValueError(
                f"{type(self).__name__} has no optimizer yet: set its attribute 'optimizer'"
            )
        return self._inner

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._inner = optimizer
        groups, state = optimizer.param_groups, optimizer.state
        # The base begins with groups and state of its own, which here are the inner optimizer's.
        super().__init__(groups, optimizer.defaults)
        optimizer.param_groups, optimizer.state = groups, state
        broadcast_optimizer(optimizer, self.aggregation._connections())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of :attr:`optimizer`."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of :attr:`optimizer`."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model to :attr:`optimizer`."""
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes in :attr:`optimizer`, as mlbench-core does."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(inner, name)

    # Steps.

    def step(self, closure: Closure = None, tracker: Tracker | None = None) -> Any:
        """Aggregate and update, or, for weights, update and aggregate.

        Args:
            closure: computes the loss and the gradients. It is called before the aggregation; in
                mlbench-core it was called after it, so that ranks used their own gradients.
            tracker: notified of the end of both.

        Returns:
            What the closure returned, this rank's loss.
        """
        return self._step(closure, tracker, None)

    def _step(self, closure: Closure, tracker: Tracker | None, denom: Denominator) -> Any:
        def gradients() -> Any:
            loss = None if closure is None else closure()
            if self.agg_grad:
                self._aggregate(tracker, denom)
            self._before_update()
            return loss

        if closure is None:
            gradients()
            loss = self.optimizer.step()
        else:
            loss = self.optimizer.step(gradients)
        if tracker is not None:
            tracker.record_batch_opt_step()
        if not self.agg_grad:
            self._aggregate(tracker, denom)
        return loss

    def _aggregate(self, tracker: Tracker | None, denom: Denominator) -> None:
        make = self.aggregation.agg_grad if self.agg_grad else self.aggregation.agg_model
        make(by_layer=self._by_layer)(self.model, self.agg_mode, denom)
        if tracker is not None:
            tracker.record_batch_agg()

    def _before_update(self) -> None:
        """Called when the gradients are those that the update takes."""

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The state of :attr:`optimizer`, and under ``"aggregation"`` its residuals, if any."""
        state = self.optimizer.state_dict()
        memory = memory_of(self.aggregation)
        return state if memory is None else state | {"aggregation": memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: something does not fit, or the aggregation's memory is missing.
        """
        state = dict(state_dict)
        memory = state.pop("aggregation", None)
        restore_memory(self.aggregation, memory, type(self).__name__)
        self.optimizer.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key not in _NOT_COPIED}
        return state | {"memory of the aggregation": memory_of(self.aggregation)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        memory = state.pop("memory of the aggregation")
        self.__dict__.update(state)
        self.aggregation = self._recipe()
        if memory is not None:
            restore_memory(self.aggregation, memory, type(self).__name__)
        super().__setstate__({})
