"""The state of an algorithm in the checkpoints of a Trainer, which rank 0 alone writes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua._core.eager.objects import gather_plain_objects
from bagua._core.group.process_group import get_default_group
from bagua._core.state import saved_values as _saved_values
from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.data_parallel import DistributedDataParallel

__all__ = ["KEY", "RankState", "add", "copied", "of_all_ranks", "of_this_rank", "restore"]

#: Of a checkpoint: ``{"name": ..., "algorithm": ..., "ranks": [...]}``.
KEY = "bagua"


@dataclass(frozen=True)
class RankState:
    """State of one rank, between two steps. Plain data: a Trainer that holds it can be copied.

    Attributes:
        name: the algorithm's.
        algorithm: its ``state_dict()``.
        training: this rank's weights and optimizers, where ranks hold different ones.
    """

    name: str
    algorithm: dict[str, Any]
    training: dict[str, Any]


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with copies of its tensors."""
    result: dict[str, Any] = _saved_values.copied(state)
    return result


def of_this_rank(
    wrapper: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]
) -> RankState:
    """Copy the state of the algorithm; of one whose ranks disagree, weights and optimizers too."""
    ddp = wrapper.bagua_ddp
    algorithm = ddp.bagua_algorithm
    training: dict[str, Any] = {}
    with ddp.exclusive():
        if algorithm.ranks_agree is False:
            training = {
                "model": wrapper.module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            }
        return RankState(_name_of(algorithm), copied(algorithm.state_dict()), copied(training))


def of_all_ranks(own: RankState) -> dict[str, Any] | None:
    """The entry of a checkpoint, on rank 0; None on the others, and where there is no state.

    Every rank of the default group calls it.

    Raises:
        BaguaError: another rank failed.
    """
    if not (own.algorithm or own.training):
        return None
    group = get_default_group()
    # Entries without a rank are equal on all.
    part = own.algorithm if group.rank == 0 else _of_rank(own.algorithm, group.rank)
    parts = gather_plain_objects(
        {"algorithm": part, "training": own.training}, 0, group.get_global_communicator()
    )
    if parts is None:
        return None
    merged: dict[str, Any] = {}
    for other in parts:
        merged |= other["algorithm"]
    ranks = [other["training"] for other in parts]
    return {"name": own.name, "algorithm": merged, "ranks": ranks}


def add(checkpoint: dict[str, Any], own: RankState, *, alone: bool) -> None:
    """Put the states of all ranks into rank 0's ``checkpoint``. Every rank calls it.

    Args:
        alone: the others may be gone; the checkpoint stays without these states, and a warning
            says so.

    Raises:
        BaguaError: another rank failed.
    """
    if not alone:
        entry = of_all_ranks(own)
        if entry is not None:
            checkpoint[KEY] = entry
    elif own.algorithm or own.training:
        warnings.warn(
            "training was interrupted, so the checkpoint has no state of bagua's algorithm: other "
            "ranks, which hold a part of it, may be gone",
            RuntimeWarning,
            stacklevel=2,
        )


def _name_of(algorithm: AlgorithmImpl) -> str:
    return type(algorithm).__name__.removesuffix("Impl")


def _of_rank(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith(f"rank{rank}/")}


def restore(
    checkpoint: Mapping[str, Any],
    wrapper: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Restore what :func:`add` has put there. Every rank calls it, after the wrap.

    Raises:
        ValueError: it is of another algorithm or, where ranks hold different weights, of another
            number of ranks.
    """
    ddp = wrapper.bagua_ddp
    algorithm = ddp.bagua_algorithm
    name = _name_of(algorithm)
    if KEY not in checkpoint:
        if algorithm.state_dict():
            warnings.warn(
                f"the checkpoint has no state of {name}: it begins anew, with the weights of the "
                "checkpoint",
                stacklevel=2,
            )
        return
    saved = checkpoint[KEY]
    try:
        if algorithm.ranks_agree is False:
            _load_training(saved["ranks"], wrapper, optimizers)
        algorithm.load_state_dict(saved["algorithm"])
    except ValueError as error:
        if saved["name"] == name:
            raise
        raise ValueError(
            f"the checkpoint is of {saved['name']}, and this training of {name}: give the strategy "
            "that algorithm, or begin with the weights alone, by load_from_checkpoint() and fit() "
            f"without ckpt_path ({error})"
        ) from error


def _load_training(
    saved: Sequence[Mapping[str, Any]],
    wrapper: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    ddp = wrapper.bagua_ddp
    group = ddp.process_group
    if len(saved) != group.size or not all(saved):
        raise ValueError(
            f"the checkpoint has the weights of {sum(map(bool, saved))} ranks, and "
            f"{type(ddp.bagua_algorithm).__name__} trains {group.size} here, each with its own: "
            "resume with the number of ranks that saved it, or start from its weights alone, with "
            "load_from_checkpoint()"
        )
    own = saved[group.rank]
    with ddp.exclusive():
        wrapper.module.load_state_dict(own["model"])
        for optimizer, state in zip(optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(state)
