"""The memory of an aggregation as a part of an optimizer's state."""

from __future__ import annotations

from typing import Any

from mlbench_core.aggregation.pytorch.aggregation import Aggregation

__all__ = ["memory_of", "restore_memory"]


def memory_of(aggregation: Aggregation) -> dict[str, Any] | None:
    """State of the aggregation from call to call on this rank; None where it keeps none."""
    state_dict = getattr(aggregation, "state_dict", None)
    return None if state_dict is None else state_dict()


def restore_memory(aggregation: Aggregation, memory: dict[str, Any] | None, owner: str) -> None:
    """Give an aggregation back what :func:`memory_of` returned.

    Raises:
        ValueError: it has a memory and there is nothing to restore, or what there is does not fit.
    """
    load_state_dict = getattr(aggregation, "load_state_dict", None)
    if load_state_dict is None:
        return
    if memory is None:
        raise ValueError(
            f"the state has no entry 'aggregation', which holds the gradients that {owner} has not "
            "sent yet: it was saved by another optimizer. To begin with nothing held back, set "
            "state['aggregation'] = optimizer.state_dict()['aggregation'] of a new optimizer"
        )
    load_state_dict(memory)
