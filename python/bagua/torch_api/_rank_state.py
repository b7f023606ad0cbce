"""Checkpoints of other libraries: the weights that ranks share, and the state of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from bagua._core.eager.objects import gather_plain_objects
from bagua._core.group.process_group import get_default_group
from bagua._core.group.warn import warn
from bagua._core.state.entries import (
    allowed_by_user,
    beyond_archives,
    described,
    held,
    load_state,
    undescribed,
)
from bagua._core.state.saved_values import copied
from bagua.torch_api._session import Session
from bagua.torch_api.algorithms.base import name_of

_NAME = "algorithm_name"
_SIZE = "world_size"
_TRAINING = "/training"
_ENTRY = "entry"


@contextmanager
def shared_weights(session: Session) -> Iterator[None]:
    """Inside it the weights are those to save: of one moment, and the anchor if there is one."""
    if session.bagua_algorithm.traits.ranks_agree is not False:
        yield
        return
    with session.exclusive(), session.bagua_algorithm.anchor():
        yield


def rank_state(session: Session) -> dict[str, Any]:
    """A copy of the state of this rank between two steps; empty where nothing is remembered.

    The algorithm's ``state_dict()``, its name, the number of ranks, and where ranks hold different
    weights, under ``rank<r>/training``, this rank's weights and optimizers.
    """
    algorithm = session.bagua_algorithm
    with session.exclusive():
        state = dict(algorithm.state_dict())
        if algorithm.traits.ranks_agree is False:
            state[f"rank{session.process_group.rank}{_TRAINING}"] = {
                "model": session.module.state_dict(),
                "optimizers": [_plain(each.state_dict()) for each in session.bagua_optimizers],
            }
        about = {_NAME: name_of(algorithm), _SIZE: session.process_group.size}
        return copied(state | about) if state else {}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as ``torch.load(weights_only=True)`` reads it."""
    if not beyond_archives(state, allowed_by_user()):
        return state
    entry, tensors = described(state, "of the optimizer")
    return {_ENTRY: entry, "tensors": tensors}


def of_all_ranks(state: dict[str, Any]) -> dict[str, Any] | None:
    """The ranks' states as one, on rank 0; None on others, and without state. All call it."""
    if not state:
        return None
    group = get_default_group()
    if group.rank != 0:  # entries without a rank are equal on all
        state = {key: v for key, v in state.items() if key.startswith(f"rank{group.rank}/")}
    parts = gather_plain_objects(state, 0, group.get_global_communicator())
    return None if parts is None else {key: v for part in parts for key, v in part.items()}


def restore(session: Session, saved: Mapping[str, Any] | None, remedy: str) -> None:
    """Restore a state, after the checkpoint's weights were loaded. Every rank calls it.

    ``saved``: of all ranks or, of as many ranks, this rank's; None: the algorithm begins anew, with
    a warning. ``remedy``: for who has a checkpoint of another algorithm. ValueError for such a one
    or, where ranks hold different weights and have no anchor, of another number of ranks.
    """
    algorithm = session.bagua_algorithm
    name = name_of(algorithm)
    if saved is None:
        if algorithm.state_dict():
            warn(
                f"the checkpoint has no state of {name}: it begins anew, with the weights of the "
                "checkpoint"
            )
        if algorithm.overrides("anchor"):
            session.rebuild()
        return
    about = {_NAME, _SIZE, *(key for key in saved if key.endswith(_TRAINING))}
    state = {key: value for key, value in saved.items() if key not in about}
    try:
        if algorithm.traits.ranks_agree is False:
            _load_training(session, saved)
        algorithm.load_state_dict(state)
    except ValueError as error:
        other = saved.get(_NAME, "a communication hook")
        if other == name:
            raise
        raise ValueError(
            f"the checkpoint is of {other}, and this training of {name}: {remedy} ({error})"
        ) from error


def _load_training(session: Session, saved: Mapping[str, Any]) -> None:
    group, name = session.process_group, name_of(session.bagua_algorithm)
    size = saved.get(_SIZE, 0)
    if size != group.size:
        if session.bagua_algorithm.overrides("anchor"):
            return  # ranks begin with the anchor
        raise ValueError(
            f"the checkpoint has the weights of {size} ranks, and {name} trains {group.size} here, "
            "each with its own: resume with the number of ranks that saved it, or start from its "
            "weights alone"
        )
    own = saved[f"rank{group.rank}{_TRAINING}"]
    with session.exclusive():
        session.module.load_state_dict(own["model"])
        for optimizer, state in zip(session.bagua_optimizers, own["optimizers"], strict=True):
            if _ENTRY in state:
                here = [optimizer.param_groups, optimizer.defaults, optimizer.state]
                state = undescribed(
                    state[_ENTRY], state["tensors"], "the optimizer", partial(held, here)
                )
            load_state(optimizer, state)
