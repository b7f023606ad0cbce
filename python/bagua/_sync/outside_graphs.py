"""Functions that torch.compile must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["outside_graphs", "outside_graphs_lazily"]

F = TypeVar("F", bound=Callable[..., None])


def outside_graphs(step: F) -> F:
    """A part of the training step for which torch.compile leaves a graph and comes back."""
    hidden: F = torch.compiler.disable(
        step,
        reason="bagua communicates before and after a forward. For fullgraph=True compile the "
        "module first: torch.compile(model, fullgraph=True).with_bagua(...)",
    )
    return hidden


def outside_graphs_lazily(step: F) -> F:
    """As :func:`outside_graphs`, for decorators: loads torch.compile at the first call only."""
    hidden: F = torch._disable_dynamo(step)  # type: ignore[assignment,attr-defined]
    return hidden
