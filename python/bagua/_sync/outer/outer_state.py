"""Arguments and state of outer rounds: one under way, a checkpoint's, and what is not finite."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from bagua._core.group.connections import Connections
from bagua._core.state.weights_check import digest
from bagua._sync.outer.fragment import Fragment
from bagua._sync.outer.outer_sgd import OuterSGD
from bagua._sync.outer.schedule import Schedule
from bagua._sync.outer.shares import Shares
from bagua._sync.outer.survival import Survival

__all__ = [
    "Flight",
    "OuterRounds",
    "Resumption",
    "clear_non_finite",
    "ranks_with_non_finite",
    "weights_digest",
]


@dataclass(frozen=True)
class OuterRounds:
    """Arguments of the rounds.

    Attributes:
        rule: the outer optimizer.
        schedule: the steps at which rounds are launched and arrive.
        alpha: the weights' share where they meet an anchor that arrives late; None: the anchor and
            what they have learnt since the launch.
        clip: largest norm of the mean pseudo-gradient of a fragment; None: any.
        communications: int64 on the CPU that counts rounds, for operations that choose peers by it.
        pairs: ranks meet one peer in each round, and hold anchors of their own.
        survival: of failed rounds; None: they are errors.
        shares: of the ranks in the mean; None: all alike.
    """

    rule: OuterSGD
    schedule: Schedule
    alpha: float | None
    clip: float | None
    communications: torch.Tensor
    pairs: bool
    survival: Survival | None = None
    shares: Shares | None = None


@dataclass
class Flight:
    """A round under way. ``due``: the steps that remain until its result is used."""

    fragment: Fragment
    due: int


@dataclass(frozen=True)
class Resumption:
    """A load of which the ranks have not agreed yet how it goes on.

    Attributes:
        digest: of this rank's weights in the checkpoint; None: it has none of this rank.
    """

    digest: int | None


def weights_digest(weights: Mapping[str, torch.Tensor]) -> int:
    """63 bits of names and exact values."""
    text = " ".join(f"{name}={int(digest(weights[name]))}" for name in sorted(weights))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def ranks_with_non_finite(connections: Connections, here: bool) -> list[int]:
    """The ranks whose weights hold NaN or infinity. All call it; ``here``: this one's do."""
    flags = connections.gather_numbers("looking for ranks with NaN or infinity", int(here))
    return [rank for rank, flag in enumerate(flags) if flag]


def clear_non_finite(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make NaN and infinity in the state of ``optimizers`` zero."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
