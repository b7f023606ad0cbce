"""Error feedback in checkpoints, and for another number of ranks than saved it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["error_key", "load_errors", "load_views", "ranks_text"]


def error_key(rank: int, name: str) -> str:
    """What ``rank`` owes for the parameter ``name``."""
    return f"rank{rank}/error/{name}"


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks that remember, as a state has them under ``ranks``."""
    return " ".join(map(str, ranks))


def load_errors(
    state: Mapping[str, Any],
    views: Iterable[tuple[str, torch.Tensor]],
    rank: int,
    ranks: Sequence[int],
) -> None:
    """Copy errors from a state into ``views``, (name, tensor) of every parameter.

    A state of the same ranks gives every rank its own. Of other ranks, the dicts of all of them
    merged, every rank gets the mean: what is owed on average is what training depends on (Vogels et
    al., NeurIPS 2019: the aggregation is linear).

    Raises:
        ValueError: something is missing or of another shape; nothing has been copied then.
    """
    if "ranks" not in state:
        raise ValueError("the state has no 'ranks': it is of another algorithm")
    saved = [int(number) for number in str(state["ranks"]).split()]
    sources = [rank] if saved == list(ranks) else saved
    remedy = (
        "load what this rank saved, with the same model"
        if len(sources) == 1
        else f"it was saved by ranks {state['ranks']} and is loaded by {ranks_text(ranks)}: merge "
        "what all ranks saved into one dict (a | b | ...), or load it with the ranks that saved it"
    )
    found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for name, view in views:
        errors = [_entry(state, error_key(source, name), view, remedy) for source in sources]
        found.append((view, errors))
    with torch.no_grad():
        for view, errors in found:
            mean = torch.stack([error.to(view) for error in errors]).sum(0) / len(errors)
            view.copy_(errors[0] if len(errors) == 1 else mean)


def load_views(state: Mapping[str, Any], views: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy what is equal on all ranks from a state into ``views``, (key, tensor).

    Raises:
        ValueError: something is missing or of another shape; nothing has been copied then.
    """
    remedy = "load it with the same model and the same arguments of the algorithm"
    found = [(view, _entry(state, key, view, remedy)) for key, view in views]
    with torch.no_grad():
        for view, value in found:
            view.copy_(value)


def _entry(state: Mapping[str, Any], key: str, view: torch.Tensor, remedy: str) -> torch.Tensor:
    if key not in state:
        raise ValueError(f"the state has no '{key}': {remedy}")
    value = torch.as_tensor(state[key])
    if value.shape != view.shape:
        raise ValueError(
            f"'{key}' is {tuple(value.shape)} in the state, {tuple(view.shape)} here: {remedy}"
        )
    return value
