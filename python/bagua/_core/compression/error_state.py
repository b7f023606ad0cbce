"""Error feedback: its memory, and checkpoints of it, for another number of ranks too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bagua import _C
from bagua._core.state.saved_values import saved_tensor

__all__ = ["error_key", "load_memory", "new_memory", "ranks_text", "views_of"]


def error_key(rank: int, name: str) -> str:
    """Key of the residual of ``rank`` for the parameter ``name``."""
    return f"rank{rank}/error/{name}"


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks that remember, as a state has them under ``ranks``."""
    return " ".join(map(str, ranks))


def views_of(
    flat: torch.Tensor, named: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, its part of ``flat``) of the ``named`` views of a bucket of the same layout."""
    for name, view in named:
        yield name, flat.as_strided(view.size(), view.stride(), view.storage_offset())


def new_memory(
    flat: torch.Tensor, outcome: _C.RoundOutcome, *others: torch.Tensor, error_feedback: bool
) -> _C.RoundMemory:
    """A memory with a zero residual for buckets like ``flat``, then ``others``.

    Without error feedback the residual is empty.
    """
    wide = torch.promote_types(flat.dtype, torch.float32)
    error = flat.new_zeros(flat.numel() if error_feedback else 0, dtype=wide)
    return _C.RoundMemory([error, *others], outcome)


def load_memory(
    state: Mapping[str, Any],
    *,
    equal: Iterable[tuple[str, torch.Tensor]],
    errors: Iterable[tuple[str, torch.Tensor]],
    rank: int,
    ranks: Sequence[int],
    others: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
) -> None:
    """Copy a saved state into an algorithm's tensors.

    ``equal``: (key, tensor) of values that are equal on all ranks. ``errors``: (name of parameter,
    residual). ``others``: (tensor, its value in the state), which may raise when they are asked
    for, after the checks of the rest. A state of the same ranks gives every rank its own residuals.
    From the merged dicts of other ranks every rank gets their mean, since training depends on the
    mean only (Vogels et al., NeurIPS 2019: the aggregation is linear).

    Raises:
        ValueError: something is missing, no tensor or of another shape; nothing has been copied
            then.
    """
    if "ranks" not in state:
        raise ValueError("the state has no 'ranks': it is of another algorithm")
    text = str(state["ranks"])
    saved = [int(number) for number in text.split() if number.isdigit() and len(number) < 10]
    if not saved or ranks_text(saved) != text:
        raise ValueError(f"'ranks' is {text[:80]!r} in the state, which is no list of ranks")
    sources = [rank] if saved == list(ranks) else saved
    here = "load it with the same model and the same arguments of the algorithm"
    all_ranks = (
        f"it was saved by ranks {text[:80]} and is loaded by {ranks_text(ranks)}: merge what "
        "all ranks saved into one dict (a | b | ...), or load it with the ranks that saved it"
    )
    found = [(view, saved_tensor(state, key, view, here)) for key, view in equal]
    remedy = here if saved == list(ranks) else all_ranks
    for name, view in errors:
        theirs = [saved_tensor(state, error_key(source, name), view, remedy) for source in sources]
        wide = torch.stack([residual.to(view) for residual in theirs])
        found.append((view, theirs[0] if len(theirs) == 1 else wide.sum(0) / len(theirs)))
    found.extend(others)
    with torch.no_grad():
        for view, value in found:
            view.copy_(value)
