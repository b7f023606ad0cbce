"""Checkpoints: folders that survive a crash, also of ranks that hold different weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from bagua import _C
from bagua._core.eager.objects import broadcast_object, gather_plain_objects
from bagua._core.group.job import as_bagua_group
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state import step_folder as _step_folder
from bagua._core.state.saved_values import check_state, copied, digest, saved_count
from bagua._core.state.shards import is_sharded
from bagua._core.state.step_folder import Damaged, Leaves
from bagua.torch_api._session import Session
from bagua.torch_api.distributed import BaguaModule

__all__ = ["PerRank", "load_latest", "save_checkpoint"]

_WITHOUT_STATE = "optimizers_without_state"


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

    When it returns the checkpoint is on the disk, whatever happens afterwards; until then the
    checkpoints before are there. Every rank writes a part of it with
    ``torch.distributed.checkpoint``; tensors that have the same bits as on rank 0 are in rank 0's
    alone.

    Args:
        folder: seen by all ranks, of this training alone; made if it is not there.
        state: by name, whatever has ``state_dict`` and ``load_state_dict``, with the same names on
            all ranks. Tensors, numbers, strings and dicts, lists and tuples of them are saved.
        step: a number that grows, equal on all ranks: :func:`load_latest` returns it.
        keep: how many checkpoints stay, this one included; older ones are removed.
        group: the ranks that save together; default: all.

    Returns:
        The folder of this rank's part.

    Raises:
        TypeError: something of ``state`` has no ``state_dict`` or ``load_state_dict``, or has
            DTensors.
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
        mine = _leaves({name: copied(part.state_dict(), "cpu") for name, part in state.items()})
    _refuse_shards(mine)
    table = _table(mine)
    if rank == 0:
        _step_folder.clear(folder)
    comm = joined.get_global_communicator()
    first_step, first = broadcast_object((step, table), 0, comm)
    alike = {path for path in table if rank != 0 and first.get(path) == table[path]}

    # 3. This rank's part; 4. when all ranks have theirs, the checkpoint gets its name.
    place = _step_folder.place_of(folder, step)
    lines: list[str] | None = None
    problem: Exception | None = None
    try:
        if step != first_step:
            raise ValueError(f"save_checkpoint: step={step} here, {first_step} on rank 0")
        own = {path: value for path, value in mine.items() if path not in alike}
        part = _step_folder.part_of(_step_folder.hidden(place), rank)
        lines = _step_folder.write(part, own, alike=list(alike))
    except Exception as error:  # noqa: BLE001 - the other ranks must not wait
        problem = error
    everyone = gather_plain_objects(lines, 0, comm)
    failed: list[int] = []
    try:
        if everyone is not None:
            failed = _finish(place, everyone, keep)
    except OSError as error:
        problem, failed = error, [0]
    _raise_if_any(problem, broadcast_object(failed, 0, comm), step)
    return _step_folder.part_of(place, rank)


def _finish(place: Path, everyone: Sequence[list[str] | None], keep: int) -> list[int]:
    """Give the checkpoint its name and remove older ones, unless a rank has failed: which ones."""
    failed = [rank for rank, lines in enumerate(everyone) if lines is None]
    if failed:
        _step_folder.clear(place.parent)
        return failed
    _step_folder.publish(place, chain(*filter(None, everyone)))
    folders = [_step_folder.place_of(place.parent, s) for s in _step_folder.steps(place.parent)]
    for older in folders[: folders.index(place) + 1][:-keep]:
        _step_folder.remove(older)
    return []


def _raise_if_any(problem: Exception | None, failed: Sequence[int], step: int) -> None:
    if problem is not None:
        raise problem
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

    Example::

        model = model.with_bagua([optimizer])
        state = {"model": model, "optimizer": optimizer, "algorithm": model.bagua_algorithm}
        first = load_latest(folder, state) or 0
    """
    # Checks
    _check_state(state)
    joined = _members(group)
    folder = Path(folder)

    newest = _newest(folder, joined)
    if newest is None:
        return None
    step, saved = newest
    place = _step_folder.place_of(folder, step)
    if saved == joined.size:
        found = _of_rank(place, joined.rank)
    else:
        found = _of_all_ranks(place, saved, joined.size, state)
    states = _tree(found)
    missing = [name for name in state if name not in states]
    if missing:
        raise ValueError(f"{place} has nothing under {missing}, only under {[*states]}")
    with _exclusive(state):
        for name, part in state.items():
            part.load_state_dict(states[name])
    return step


def _newest(folder: Path, joined: BaguaProcessGroup) -> tuple[int, int] | None:
    """The newest step that all ranks can load, and how many saved it; warns of those refused."""
    steps = broadcast_object(_step_folder.steps(folder), 0, joined.get_global_communicator())
    refused: list[str] = []
    for step in reversed(steps):
        saved, place = 0, _step_folder.place_of(folder, step)
        reason = f"{place}: whole, but another rank cannot load its part"
        try:
            saved = _step_folder.check(place, joined.rank, joined.size)
        except Damaged as damaged:
            reason = f"{damaged.args[0]}: {damaged.args[1]}"
        (whole,) = joined.connections.reduce_numbers(
            "choosing a checkpoint", _C.ReduceOp.MIN, int(saved > 0)
        )
        if whole:
            if refused:
                instead = f"Loaded instead: step {step} of {folder}"
                warnings.warn(f"checkpoints refused: {'; '.join(refused)}. {instead}", stacklevel=3)
            return step, saved
        refused.append(reason)
    if refused:
        raise _C.BaguaError(
            f"{folder}: none of the checkpoints there can be loaded. {'; '.join(refused)}. Put "
            "back the files, or start anew in another folder."
        )
    return None


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


def _wrapped_in(state: Mapping[str, Any]) -> Iterator[tuple[str, Session]]:
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


def _of_rank(place: Path, rank: int) -> Leaves:
    found, more = _step_folder.read(_step_folder.part_of(place, rank))
    if more["alike"]:
        first, _ = _step_folder.read(_step_folder.part_of(place, 0))
        found |= {path: first[path] for path in more["alike"]}
    return found


def _of_all_ranks(place: Path, saved: int, size: int, state: Mapping[str, Any]) -> Leaves:
    of_first = {
        (name, *buffer)
        for name, ddp in _wrapped_in(state)
        if ddp.broadcast_buffers
        for buffer in _buffers_of(state[name], ddp)
    }
    result: Leaves = {}
    for rank in range(saved):
        for path, value in _step_folder.read(_step_folder.part_of(place, rank))[0].items():
            known = result.setdefault(path, value)
            if path not in of_first and not _equal(known, value):
                raise ValueError(
                    f"{place}: '{'/'.join(map(str, path))}' differs between the {saved} ranks "
                    f"that saved it, and there are {size} now, so that it has no meaning for them. "
                    f"Load it with {saved} ranks, or leave it out of the state."
                )
    return result


def _buffers_of(part: Any, ddp: Session) -> Iterator[tuple[str]]:
    within = "" if part is ddp.module else "module."
    for name, _ in ddp.module.named_buffers():
        yield (within + name,)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Leaves:
    """Everything in nested dicts that is no dict with entries, by its path, in order."""
    if not (isinstance(value, Mapping) and value):
        return {path: value}
    found: Leaves = {}
    for key, item in value.items():
        found |= _leaves(item, (*path, key))
    return found


def _tree(found: Leaves) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for path, value in found.items():
        place = root
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return root


def _refuse_shards(found: Leaves) -> None:
    for path, value in found.items():
        if isinstance(value, torch.Tensor) and is_sharded(value):
            raise TypeError(
                f"save_checkpoint: '{'/'.join(map(str, path))}' is a DTensor, of which each rank "
                "has a shard: save by torch.distributed.checkpoint.save(), which knows them"
            )


def _table(found: Leaves) -> dict[tuple[Any, ...], tuple[int, str]]:
    """Returns a key by which tensors are equal: 64 bits over values; dtype, shape, strides."""
    return {
        path: (int(digest(value)), f"{value.dtype} {tuple(value.shape)} {value.stride()}")
        for path, value in found.items()
        if _step_folder.is_tensor(value)
    }


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class PerRank:
    """Every rank's own weights and optimizer state, for ``torch.distributed.checkpoint``.

    That module keeps one rank's copy of equal keys, which is right where ranks hold the same bits
    and wrong for decentralized and asynchronous algorithms, and for their optimizers' momentum.
    Here every rank has keys of its own::

        state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
        dcp.save(state, checkpoint_id=path)

        model = model.with_bagua([optimizer], algorithm)  # first: it broadcasts rank 0's weights
        state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
        dcp.load(state, checkpoint_id=path)

    Save and load between two steps, on every rank, with the number of ranks that saved. Weights
    that are being averaged asynchronously are copied at one moment. Ranks are those of the module's
    group: where several groups train different parameters of the same names, as stages of a
    pipeline do, give each group keys of its own (``f"stage{stage}/training"``).

    Args:
        model: a module after ``with_bagua``.

    Raises:
        TypeError: the module is not wrapped.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, BaguaModule):
            raise TypeError("PerRank takes a module after with_bagua")
        self._ddp = model.bagua_ddp
        self._optimizers = tuple(model.bagua_optimizers)
        self._key = f"rank{self._ddp.process_group.connections.rank}"

    def state_dict(self) -> dict[str, Any]:
        """``{"rank<r>": {"model": ..., "optimizer": ..., "optimizers_without_state": ...}}``.

        Tensors are copied. The last entry is a sum of ``2**number`` of the optimizers that had made
        no state, and have none after a load.
        """
        # Not at the top: it takes a second, which every program would pay.
        from torch.distributed.checkpoint.state_dict import get_state_dict

        with self._ddp.exclusive():
            # get_state_dict makes a step where there is no state, which an optimizer may count.
            without = [optimizer for optimizer in self._optimizers if not optimizer.state]
            model, optimizer = get_state_dict(self._ddp.module, self._optimizers)
            state = copied({"model": model, "optimizer": optimizer})
            for made in without:
                made.state.clear()
        numbers = [1 << i for i, o in enumerate(self._optimizers) if o in without]
        return {self._key: state | {_WITHOUT_STATE: sum(numbers)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give model and optimizers what :meth:`state_dict` had.

        Raises:
            ValueError: there is nothing of this rank in it, or something else.
        """
        check_state(state, "PerRank")
        if self._key not in state:
            raise ValueError(
                f"the checkpoint has nothing of {self._key}, only {sorted(state)}; load it with "
                "the number of ranks that saved it"
            )
        check_state(state[self._key], f"PerRank: {self._key}")
        if not {"model", "optimizer"} <= set(state[self._key]):
            raise ValueError(
                f"PerRank: {self._key} has {sorted(state[self._key])}, not 'model' and 'optimizer'"
            )
        from torch.distributed.checkpoint.state_dict import set_state_dict

        own = state[self._key]
        without = saved_count({_WITHOUT_STATE: 0, **own}, _WITHOUT_STATE, "PerRank")
        with self._ddp.exclusive():
            set_state_dict(
                self._ddp.module,
                self._optimizers,
                model_state_dict=own["model"],
                optim_state_dict=own["optimizer"],
            )
            for number, optimizer in enumerate(self._optimizers):
                if without >> number & 1:
                    optimizer.state.clear()
