"""Checkpoints: files that survive a crash, also of ranks that hold different weights."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from bagua import _C
from bagua._core.eager.objects import broadcast_object
from bagua._core.group.connections import Connections
from bagua._core.group.job import as_bagua_group
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state import checkpoint_file as _checkpoint_file
from bagua._core.state import checkpoint_folder as _checkpoint_folder
from bagua._core.state import checkpoint_tree as _checkpoint_tree
from bagua._core.state.checkpoint_folder import Saved, file_of
from bagua._core.state.checkpoint_tree import Conflict, Leaves
from bagua.torch_api._per_rank import PerRank
from bagua.torch_api._wrapper import BaguaDistributedDataParallel
from bagua.torch_api.distributed import BaguaModule

__all__ = ["PerRank", "load_latest", "save_checkpoint"]


def save_checkpoint(
    folder: str | PathLike[str],
    state: Mapping[str, Any],
    step: int,
    *,
    keep: int = 2,
    group: Any = None,
) -> Path:
    """Write a checkpoint from which training can continue. All ranks call it, between two steps::

        state = {"model": model, "optimizer": optimizer, "algorithm": model.bagua_algorithm}
        save_checkpoint(folder, state, step)

    When it returns every rank's file is on the disk, whatever happens afterwards; until then the
    checkpoints before are there. Every rank writes one file; tensors that have the same bits as on
    rank 0 are in rank 0's alone. A file is readable by ``torch.load(path, weights_only=True)``.

    Args:
        folder: seen by all ranks, of this training alone; made if it is not there.
        state: by name, whatever has ``state_dict`` and ``load_state_dict``, with the same names on
            all ranks. Tensors, numbers, strings and dicts, lists and tuples of them are saved.
        step: a number that grows, equal on all ranks: :func:`load_latest` returns it.
        keep: how many checkpoints stay, this one included; older ones are removed.
        group: the ranks that save together; default: all.

    Returns:
        This rank's file.

    Raises:
        TypeError: something of ``state`` has no ``state_dict`` or ``load_state_dict``.
        ValueError: ``step`` is negative or not rank 0's, or ``keep`` is below 1.
        OSError, RuntimeError: this rank cannot write (a full disk).
        pickle.UnpicklingError: ``state`` holds what ``weights_only=True`` does not load.
        BaguaError: another rank cannot write; names it.
    """
    # Checks
    _check_state(state)
    if step < 0 or keep < 1:
        raise ValueError(f"save_checkpoint: step={step} must not be negative, nor keep={keep} 0")
    joined = _members(group)
    rank, folder = joined.rank, Path(folder)

    # 1. A copy of one moment; 2. what rank 0 has alike.
    with _exclusive(state):
        mine = _checkpoint_tree.leaves(
            {
                name: _checkpoint_tree.copied(part.state_dict(), "cpu")
                for name, part in state.items()
            }
        )
    table = _checkpoint_tree.table(mine)
    saving, first_step, first = broadcast_object(
        (secrets.randbits(62), step, table), 0, joined.get_global_communicator()
    )
    alike = [path for path in table if rank != 0 and first.get(path) == table[path]]

    # 3. This rank's file.
    path = file_of(folder, Saved(step, joined.size), rank)
    problem: Exception | None = None
    try:
        if step != first_step:
            raise ValueError(f"save_checkpoint: step={step} here, {first_step} on rank 0")
        folder.mkdir(parents=True, exist_ok=True)
        own = list(_checkpoint_tree.without(mine, set(alike)).items())
        _checkpoint_file.write(path, {"step": step, "own": own, "alike": alike}, saving)
    except Exception as error:  # noqa: BLE001 - the other ranks must not wait
        problem = error

    # 4. Older ones go when all ranks have written.
    _raise_if_any(problem, step, joined.connections)
    if rank == 0:
        steps = sorted({s.step for s in _checkpoint_folder.complete(folder) if s.step <= step})
        if len(steps) > keep:
            _checkpoint_folder.remove_before(folder, steps[-keep])
    return path


def _raise_if_any(problem: Exception | None, step: int, connections: Connections) -> None:
    mine = [
        int(problem is not None and rank == connections.rank) for rank in range(connections.size)
    ]
    everyone = connections.reduce_numbers("save_checkpoint", _C.ReduceOp.SUM, *mine)
    if problem is not None:
        raise problem
    failed = [rank for rank, count in enumerate(everyone) if count]
    if failed:
        raise _C.BaguaError(
            f"save_checkpoint: rank(s) {failed} could not write step {step}, and say why; the "
            "checkpoints before it are kept"
        )


def load_latest(
    folder: str | PathLike[str], state: Mapping[str, Any], *, group: Any = None
) -> int | None:
    """Load the newest checkpoint that all ranks have whole. All call it, after ``with_bagua``.

    With the number of ranks that saved, every rank gets its own state. With another number every
    rank gets the values that were equal on all ranks (and rank 0's buffers, where the algorithm
    broadcasts them), and residuals whose mean over the ranks is kept.

    Files that are missing, truncated or corrupted, on any rank, are refused with a warning that
    names them and what is loaded instead.

    Args:
        folder: as given to :func:`save_checkpoint`.
        state: the objects to load into, in this order, under the names that they were saved by.
        group: as given to :func:`save_checkpoint`.

    Returns:
        The ``step`` of the checkpoint, the same on all ranks; None where there is none yet.

    Raises:
        TypeError: something of ``state`` has no ``state_dict`` or ``load_state_dict``.
        BaguaError: there are checkpoints, and none is whole.
        ValueError: it is of another model or algorithm, or of another number of ranks that held
            different weights; names what does not fit.
    """
    # Checks
    _check_state(state)
    joined = _members(group)
    folder = Path(folder)

    saved, refused = _checkpoint_folder.choose(folder, joined.connections)
    if refused:
        instead = (
            "nothing, training starts anew" if saved is None else f"step {saved.step} of {folder}"
        )
        warnings.warn(
            f"checkpoints refused: {_checkpoint_folder.refused_text(refused)}. Loaded instead: "
            f"{instead}",
            stacklevel=2,
        )
    if saved is None:
        return None
    if saved.size == joined.size:
        found = _of_rank(folder, saved, joined.rank)
    else:
        found = _of_all_ranks(folder, saved, joined.size, state)
    states = _checkpoint_tree.tree(found)
    missing = [name for name in state if name not in states]
    if missing:
        raise ValueError(
            f"{file_of(folder, saved, 0)} has nothing under {missing}, only under {[*states]}"
        )
    with _exclusive(state):
        for name, part in state.items():
            part.load_state_dict(states[name])
    return saved.step


def _check_state(state: Mapping[str, Any]) -> None:
    for name, part in state.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(
                f"state['{name}'] is a {type(part).__name__}, which has no state_dict and "
                "load_state_dict; give the object itself, not what its state_dict() returns"
            )


def _members(group: Any) -> BaguaProcessGroup:
    joined = as_bagua_group(group)
    if joined.rank < 0:
        raise ValueError(
            f"this process is not a member of the group with ranks {joined.ranks}: save and load "
            "on the members only"
        )
    return joined


def _wrapped_in(state: Mapping[str, Any]) -> Iterator[tuple[str, BaguaDistributedDataParallel]]:
    """(name, what communicates for it) of the wrapped modules."""
    for name, part in state.items():
        wrapped = part if isinstance(part, BaguaModule) else getattr(part, "module", None)
        if isinstance(wrapped, BaguaModule):
            yield name, wrapped.bagua_ddp


@contextmanager
def _exclusive(state: Mapping[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for _, ddp in _wrapped_in(state):
            stack.enter_context(ddp.exclusive())
        yield


def _of_rank(folder: Path, saved: Saved, rank: int) -> Leaves:
    """State that one rank saved."""
    content = _checkpoint_file.read(file_of(folder, saved, rank))
    found: Leaves = dict(content["own"])
    if content["alike"]:
        first = dict(_checkpoint_file.read(file_of(folder, saved, 0))["own"])
        found |= {path: first[path] for path in content["alike"]}
    return found


def _of_all_ranks(folder: Path, saved: Saved, size: int, state: Mapping[str, Any]) -> Leaves:
    """State that all ranks saved, for another number of ranks."""
    parts = [
        dict(_checkpoint_file.read(file_of(folder, saved, rank))["own"])
        for rank in range(saved.size)
    ]
    of_first = [
        (name, *buffer)
        for name, ddp in _wrapped_in(state)
        if ddp.broadcast_buffers
        for buffer in _buffers_of(state[name], ddp)
    ]
    try:
        return _checkpoint_tree.joined(parts, of_first)
    except Conflict as conflict:
        text = _checkpoint_tree.path_text(conflict.args[0])
        raise ValueError(
            f"{folder}, step {saved.step}: '{text}' differs between the {saved.size} ranks that "
            f"saved it, and there are {size} now, so that it has no meaning for them. Load it with "
            f"{saved.size} ranks, or leave it out of the state."
        ) from None


def _buffers_of(part: Any, ddp: BaguaDistributedDataParallel) -> Iterator[tuple[str]]:
    within = "" if part is ddp.module else "module."
    for name, _ in ddp.module.named_buffers():
        yield (within + name,)
