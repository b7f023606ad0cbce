"""Checkpoints: folders that survive a crash, also of ranks that hold different weights."""

from __future__ import annotations

import operator
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from bagua import _C
from bagua._core.eager.collectives import broadcast
from bagua._core.eager.objects import broadcast_object, gather_plain_objects
from bagua._core.group.job import as_bagua_group
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.group.warn import warn
from bagua._core.state import step_folder as _step_folder
from bagua._core.state.entries import (
    PLAIN_DTYPES,
    beyond_archives,
    boxed,
    described,
    held,
    load_state,
    unboxed,
)
from bagua._core.state.saved_values import check_state, copied, digest, saved_count, short_text
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

    A failure of one rank raises on all, and the checkpoints before are kept. Ranks exchange six
    messages, one after the other.

    Raises:
        TypeError: something of ``state`` has no ``state_dict`` or ``load_state_dict``, or has
            DTensors or values that are not plain data.
        ValueError: ``step`` is negative or not rank 0's, or ``keep`` is below 1.
        OSError, RuntimeError: this rank cannot write (a full disk), or does not see the folder
            that rank 0 sees, or another training writes into it.
        BaguaError: another rank has failed; names it, with the reason.
    """
    joined = _members(group)
    with joined.connections.act("save_checkpoint"):
        return _save(joined, folder, state, step, keep)


def _save(
    joined: BaguaProcessGroup,
    folder: str | PathLike[str],
    state: Mapping[str, Any],
    step: int,
    keep: int,
) -> Path:
    rank, comm = joined.rank, joined.get_global_communicator()
    tried = _Tries(joined, "save_checkpoint", f"write step {step}", _KEPT)
    place, owner = Path(), uuid.uuid4().hex
    mine: Leaves = {}
    table: dict[tuple[Any, ...], tuple[int, str]] = {}
    lines: list[str] = []

    # 1. A copy of one moment, and on rank 0 a folder for it; 2. what rank 0 has alike.
    with tried:
        place = _checked_place(Path(folder), state, step, keep)
        mine, table = _copied(state)
        if rank == 0:
            _refuse_another_training(place.parent)
            _step_folder.begin(place, owner)
    seen = f"{socket.gethostname()}:{place.parent.absolute()}"
    reason, *first = broadcast_object((tried.reason, str(step), owner, seen, table), 0, comm)
    tried.end_with({0: reason} if reason else {})

    # 3. This rank's part; 4. when all ranks have theirs, the checkpoint gets its name.
    if tried.problem is None:
        with tried:
            lines = _write_part(place, rank, str(step), mine, table, first, _names_of(state))
    everyone = gather_plain_objects((tried.reason, lines), 0, comm)
    failed = {other: why for other, (why, _) in enumerate(everyone or []) if why}
    if everyone is not None and not failed:
        with tried, _of_one_training(place):
            _step_folder.publish(place, chain(*(lines for _, lines in everyone)))
        failed = {0: tried.reason} if tried.reason else {}
    count = torch.tensor([len(failed)], device="cpu")
    broadcast(count, 0, comm)
    if count.item():
        if rank == 0:
            _step_folder.clear(place.parent)
        tried.end_with(broadcast_object(failed, 0, comm))

    # 5. All look for it where load_latest does; 6. then older ones are not needed.
    with tried, _of_one_training(place):
        _step_folder.confirm(place, lines)
    _settle(place, keep, rank, tried)
    return _step_folder.part_of(place, rank)


_KEPT = "; the checkpoints before it are kept"
#: By folder, on rank 0: the checkpoints that it had after the last save of this process.
_left: dict[Path, dict[int, str]] = {}
_MOST_FOLDERS = 16


class _Tries:
    """Acts of all ranks, of which the first exception is kept until all have heard of it.

    Args:
        call, aim, end: for errors: "save_checkpoint: rank(s) [1] could not write step 3: ...".

    A BaguaError passes through: communication has failed, of which all hear by themselves.
    """

    def __init__(self, joined: BaguaProcessGroup, call: str, aim: str, end: str = "") -> None:
        self._joined, self._call, self._aim, self._end = joined, call, aim, end
        self.problem: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, _C.BaguaError):
            return False
        self.problem = self.problem or error
        return True

    @property
    def reason(self) -> str:
        """The exception for other ranks; empty: there is none."""
        return "" if self.problem is None else short_text(self.problem)

    def first_failed(self) -> dict[int, str]:
        """The lowest rank that has an exception, with it; the same on all ranks."""
        rank, size = self._joined.rank, self._joined.size
        (lowest,) = self._joined.connections.reduce_numbers(
            self._call, _C.ReduceOp.MIN, rank if self.reason else size
        )
        if lowest == size:
            return {}
        comm = self._joined.get_global_communicator()
        return {lowest: broadcast_object(self.reason, lowest, comm)}

    def end_with(self, failed: Mapping[int, str]) -> None:
        """Raise what went wrong, if anything has; ``failed`` is the same on all ranks."""
        if failed and self.problem is not None:
            raise self.problem
        if failed:
            first = failed[min(failed)]
            raise _C.BaguaError(
                f"{self._call}: rank(s) {[*failed]} could not {self._aim}: {first}{self._end}"
            )


def _checked_place(folder: Path, state: Mapping[str, Any], step: int, keep: int) -> Path:
    _check_state(state)
    if not 0 <= operator.index(step) < 10**18 or keep < 1:
        raise ValueError(f"save_checkpoint: step={step} must not be negative, nor keep={keep} 0")
    return _step_folder.place_of(folder, step)


def _copied(state: Mapping[str, Any]) -> tuple[Leaves, dict[tuple[Any, ...], tuple[int, str]]]:
    with _exclusive(state):
        mine = _leaves({name: copied(part.state_dict(), "cpu") for name, part in state.items()})
    _refuse_others(mine)
    return mine, _table(mine)


def _write_part(
    place: Path,
    rank: int,
    step: str,
    mine: Leaves,
    table: Mapping[tuple[Any, ...], tuple[int, str]],
    first: Sequence[Any],
    names: _step_folder.Names,
) -> list[str]:
    """Write what rank 0 does not have alike, if this rank sees the folder that rank 0 has begun."""
    first_step, owner, seen, of_first = first
    if step != first_step:
        raise ValueError(f"save_checkpoint: step={step} here, {first_step} on rank 0")
    if not _step_folder.is_begun(place, owner):
        raise FileNotFoundError(
            f"save_checkpoint: {socket.gethostname()}:{place.parent.absolute()} is not the folder "
            f"that rank 0 sees as {seen}: give a folder of a file system that all ranks share, by "
            "the same absolute path, into which no other training writes"
        )
    alike = {path for path in table if rank != 0 and of_first.get(path) == table[path]}
    own = {path: value for path, value in mine.items() if path not in alike}
    part = _step_folder.part_of(_step_folder.hidden(place), rank)
    with _of_one_training(place):
        return _step_folder.write(part, own, names, alike=list(alike))


@contextmanager
def _of_one_training(place: Path) -> Iterator[None]:
    """Files that are gone, or others, while a checkpoint is saved: OSError with the remedy."""
    try:
        yield
    except (Damaged, FileNotFoundError) as error:
        raise FileNotFoundError(
            f"save_checkpoint: the files of {place} have changed while they were written ({error}):"
            " another training or a cleaner is at work there; give each training another folder"
        ) from error


def _refuse_another_training(folder: Path) -> None:
    """Raise where checkpoints have come since the last save of this process."""
    known = _left.get(folder.absolute())
    there = _step_folder.fingerprints(folder)
    strange = [step for step in there if known is not None and known.get(step) != there[step]]
    if strange:
        del _left[folder.absolute()]
        raise FileExistsError(
            f"save_checkpoint: another training has written step(s) {strange[:3]} into {folder} "
            "since this one saved there: give each training another folder"
        )


def _settle(place: Path, keep: int, rank: int, tried: _Tries) -> None:
    """Remove older checkpoints; or the new one, if a rank does not see it."""
    if failed := tried.first_failed():
        if rank == 0 and tried.problem is None:
            with suppress(OSError):
                _step_folder.remove(place)
        tried.end_with(failed)
    folder = place.parent
    _left.pop(folder.absolute(), None)
    if rank != 0:
        return
    try:
        there = [_step_folder.place_of(folder, step) for step in _step_folder.steps(folder)]
        for older in [each for each in there if each <= place][:-keep]:
            _step_folder.remove(older)
    except OSError as error:
        warn(f"save_checkpoint: an older checkpoint stays: {error}")
    while len(_left) >= _MOST_FOLDERS:
        _left.pop(next(iter(_left)))
    _left[folder.absolute()] = _step_folder.fingerprints(folder)


def load_latest(
    folder: str | PathLike[str], state: Mapping[str, Any], *, group: Any = None
) -> int | None:
    """Load the newest checkpoint that all ranks have whole. All call it, after ``bagua.wrap``.

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
        FileNotFoundError: this rank sees a newer checkpoint there than rank 0.
        BaguaError: there are checkpoints, and none is whole; or another rank has failed.
        ValueError: it is of another model or algorithm, or of another number of ranks that held
            different weights; names what does not fit.

    Example::

        model = bagua.wrap(model, [optimizer])
        state = {"model": model, "optimizer": optimizer, "algorithm": model.bagua_algorithm}
        first = load_latest(folder, state) or 0
    """
    joined = _members(group)
    with joined.connections.act("load_latest"):
        return _load(joined, folder, state)


def _load(
    joined: BaguaProcessGroup, folder: str | PathLike[str], state: Mapping[str, Any]
) -> int | None:
    tried, root = _Tries(joined, "load_latest", f"look into {folder}"), Path()
    with tried:
        _check_state(state)
        root = Path(folder)
    _left.pop(root.absolute(), None)
    newest = _newest(root, joined, state, tried)
    if newest is None:
        return None
    step, states = newest
    tried = _Tries(joined, "load_latest", f"load step {step} of {folder}")
    with tried:
        missing = [name for name in state if name not in states]
        if missing:
            place = _step_folder.place_of(root, step)
            raise ValueError(f"{place} has nothing under {missing}, only under {[*states]}")
        with _exclusive(state):
            for name, part in state.items():
                _load_into(part, states[name], f"step {step} of {folder}: state['{name}']")
    tried.end_with(tried.first_failed())
    return step


def _load_into(part: Any, state: Any, name: str) -> None:
    try:
        load_state(part, state)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{name} is not what a {type(part).__name__} has saved ({type(error).__name__}: "
            f"{error}): the checkpoint is damaged, or of another model or optimizer"
        ) from error


def _newest(
    folder: Path, joined: BaguaProcessGroup, state: Mapping[str, Any], tried: _Tries
) -> tuple[int, dict[Any, Any]] | None:
    """The newest step that all ranks can load, and its states; warns of those refused."""
    refused: list[str] = []
    for step in reversed(_steps_of_all(folder, joined, tried)):
        place, states = _step_folder.place_of(folder, step), {}
        damaged, other = (
            _Tries(joined, "load_latest", f"load step {step} of {folder}") for _ in range(2)
        )
        with other:
            try:
                states = _states_of(place, joined, state)
            except Damaged as error:
                damaged.problem = error
        other.end_with(other.first_failed())
        failed = damaged.first_failed()
        if not failed:
            if refused:
                instead = f"Loaded instead: step {step} of {folder}"
                warn(f"checkpoints refused: {'; '.join(refused)}. {instead}")
            return step, states
        (first,) = failed.items()
        refused.append(damaged.reason or f"{place}: rank {first[0]} cannot load it: {first[1]}")
    if refused:
        raise _C.BaguaError(
            f"{folder}: none of the checkpoints there can be loaded. {'; '.join(refused)}. Put "
            "back the files, or start anew in another folder."
        )
    return None


def _steps_of_all(folder: Path, joined: BaguaProcessGroup, tried: _Tries) -> list[int]:
    """The steps that rank 0 sees, unless another rank sees a newer one."""
    own: list[int] = []
    with tried:
        own = _step_folder.steps(folder)
    steps: list[int] = broadcast_object(own, 0, joined.get_global_communicator())
    with tried:
        if own[-1:] > steps[-1:]:
            raise FileNotFoundError(
                f"load_latest: {socket.gethostname()}:{folder.absolute()} has step {own[-1]}, and "
                f"rank 0 sees {steps[-1:] or 'no step'} there: give a folder that all ranks share"
            )
    tried.end_with(tried.first_failed())
    return steps


def _states_of(place: Path, joined: BaguaProcessGroup, state: Mapping[str, Any]) -> dict[Any, Any]:
    """The states of a checkpoint for this rank, by their names."""
    saved = _step_folder.check(place, joined.rank, joined.size)
    if saved == joined.size:
        return _tree(place, _of_rank(place, joined.rank, _names_of(state)))
    return _tree(place, _of_all_ranks(place, saved, joined.size, state))


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


def _names_of(state: Mapping[str, Any]) -> _step_folder.Names:
    """Of the classes and functions that the objects to save or to load into hold."""
    return lambda: held(
        [part.param_groups, part.defaults, part.state]
        if isinstance(part, torch.optim.Optimizer)
        else getattr(part, "__dict__", {})
        for part in state.values()
    )


def _of_rank(place: Path, rank: int, names: _step_folder.Names) -> Leaves:
    found, more = _step_folder.read(_step_folder.part_of(place, rank), names)
    with _step_folder.refusing(_step_folder.part_of(place, rank)):
        if more["alike"]:
            first, _ = _step_folder.read(_step_folder.part_of(place, 0), names)
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
    names = _names_of(state)
    for rank in range(saved):
        for path, value in _step_folder.read(_step_folder.part_of(place, rank), names)[0].items():
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
    """Everything in nested dicts that is not a dict with entries, by its path, in order."""
    if not (isinstance(value, Mapping) and value and all(map(_is_plain_key, value))):
        return {path: value}
    found: Leaves = {}
    for key, item in value.items():
        found |= _leaves(item, (*path, key))
    return found


def _is_plain_key(key: Any) -> bool:
    return type(key) in (str, int, float, bool, type(None), tuple) and not beyond_archives(key, {})


def _tree(place: Path, found: Leaves) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for path, value in found.items():
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise Damaged(place, "a value of it is inside of another")
        inner[path[-1]] = value
    if not all(isinstance(state, dict) for state in root.values()):
        raise Damaged(place, f"one of {[*root][:3]} has no names")
    return root


def _refuse_others(found: Leaves) -> None:
    for path, value in found.items():
        if not isinstance(value, torch.Tensor):
            continue
        name = "/".join(map(str, path))
        if is_sharded(value):
            raise TypeError(
                f"save_checkpoint: '{name}' is a DTensor, of which each rank has a shard: save by "
                "torch.distributed.checkpoint.save(), which knows them"
            )
        if value.is_quantized:
            raise TypeError(
                f"save_checkpoint: '{name}' is of dtype {value.dtype}, which is not loaded; save "
                "its int_repr(), or dequantize() it"
            )


def _table(found: Leaves) -> dict[tuple[Any, ...], tuple[int, str]]:
    """Returns a key by which tensors are equal: 64 bits over values; dtype, shape, strides."""
    return {
        path: (int(digest(value)), f"{value.dtype} {tuple(value.shape)} {value.stride()}")
        for path, value in found.items()
        if _step_folder.is_tensor(value)
    }


def _equal(a: Any, b: Any) -> bool:
    try:
        (mine, of_mine), (theirs, of_theirs) = (described(each, "a value") for each in (a, b))
    except TypeError:  # sparse, or of a class that the user has allowed torch
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return torch.equal(a, b) if both else bool(a == b)
    return str(mine) == str(theirs) and all(map(_same_elements, of_mine, of_theirs))


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype not in PLAIN_DTYPES:  # torch compares no others
        a, b = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(a, b)


class PerRank:
    """Every rank's own weights and optimizer state, for ``torch.distributed.checkpoint``.

    That module keeps one rank's copy of equal keys, which is right where ranks hold the same bits
    and wrong for decentralized and asynchronous algorithms, and for their optimizers' momentum.
    Here every rank has its own keys::

        state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
        dcp.save(state, checkpoint_id=path)

        model = bagua.wrap(model, [optimizer], algorithm)  # first: it broadcasts rank 0's weights
        state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
        dcp.load(state, checkpoint_id=path)

    Save and load between two steps, on every rank, with the number of ranks that saved. Weights
    that are being averaged asynchronously are copied at one moment. Ranks are those of the module's
    group: where several groups train different parameters of the same names, as stages of a
    pipeline do, give each group its own keys (``f"stage{stage}/training"``).

    Args:
        model: a module after ``bagua.wrap``.

    Raises:
        TypeError: the module is not wrapped.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, BaguaModule):
            raise TypeError("PerRank takes a module after bagua.wrap")
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

        for key in chain(*(optimizer.state for optimizer in self._optimizers)):
            if not isinstance(key, torch.Tensor):
                raise TypeError(
                    f"PerRank: the optimizer's state['{key}'] is of no parameter, which torch's "
                    "get_state_dict does not take: save it by save_checkpoint(), which does"
                )
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
            self._check(own["model"], own["optimizer"])
            set_state_dict(
                self._ddp.module,
                self._optimizers,
                model_state_dict=own["model"],
                optim_state_dict={**own["optimizer"], "state": boxed(own["optimizer"]["state"])},
            )
            for number, optimizer in enumerate(self._optimizers):
                unboxed(optimizer.state)
                if without >> number & 1:
                    optimizer.state.clear()

    def _check(self, model: Any, optimizer: Any) -> None:
        """Raise ValueError where torch would after it has loaded a part of them."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        owner, here = f"PerRank: {self._key}", get_model_state_dict(self._ddp.module)
        check_state(model, f"{owner}: 'model'")
        if model.keys() != here.keys():
            names = sorted(model.keys() ^ here.keys())[:3]
            raise ValueError(f"{owner}: the state and the model here differ in {names}: {_SAME}")
        for name, tensor in here.items():
            if isinstance(tensor, torch.Tensor):
                _check_like(model[name], tensor, f"{owner}: '{name}'")
        check_state(optimizer, f"{owner}: 'optimizer'")
        state, groups = (optimizer.get(key) for key in ("state", "param_groups"))
        check_state(state, f"{owner}: 'optimizer/state'")
        if not isinstance(groups, list) or not all(isinstance(each, Mapping) for each in groups):
            raise ValueError(f"{owner}: 'optimizer/param_groups' is not a list of dicts: {_SAME}")
        members = [each.get("params") for each in groups]
        if not all(isinstance(names, list) for names in members):
            raise ValueError(f"{owner}: a group of 'optimizer' has no list of 'params': {_SAME}")
        self._check_groups([*chain(*members)], groups, state, here, owner)

    def _check_groups(
        self,
        names: list[Any],
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[str, Any],
        here: Mapping[str, Any],
        owner: str,
    ) -> None:
        expected = [group for each in self._optimizers for group in each.param_groups]
        count = sum(len(group["params"]) for group in expected)
        known = all(isinstance(name, str) and name in here for name in (*names, *state))
        if not known or len(names) != count or len(set(names)) != count:
            raise ValueError(
                f"{owner}: 'optimizer' is of {len(names)} parameters, {count} here, or of others: "
                f"{_SAME}"
            )
        options = set.intersection(*(set(group) for group in expected)) if expected else set()
        for group in groups:
            if not options <= group.keys() or not all(isinstance(key, str) for key in group):
                missing = sorted(options - group.keys())
                raise ValueError(f"{owner}: a group of 'optimizer' has no {missing}: {_SAME}")
        for name, values in state.items():
            check_state(values, f"{owner}: 'optimizer/state/{name}'")


_SAME = "load it with the same model and optimizers"


def _check_like(value: Any, here: torch.Tensor, name: str) -> None:
    if not isinstance(value, torch.Tensor) or value.layout != here.layout:
        raise ValueError(f"{name} is a {type(value).__name__} in the state, not a tensor: {_SAME}")
    if value.shape != here.shape or value.is_complex() != here.is_complex():
        raise ValueError(
            f"{name} is {tuple(value.shape)} {value.dtype} in the state, {tuple(here.shape)} "
            f"{here.dtype} here: {_SAME}"
        )
