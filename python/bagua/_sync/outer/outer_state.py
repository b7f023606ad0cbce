"""Arguments and state of outer rounds: one under way, and a checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from bagua._sync.outer.outcomes import Outcomes
from bagua._sync.outer.outer_sgd import OuterSGD
from bagua._sync.outer.schedule import Schedule
from bagua._sync.outer.shares import Shares
from bagua._sync.outer.survival import Survival
from bagua._sync.outer.weights.fragment import Fragment

__all__ = ["Flight", "OuterRounds", "Resumption"]


@dataclass(frozen=True)
class OuterRounds:
    """Arguments of the rounds.

    Attributes:
        rule: the outer optimizer.
        schedule: the steps at which rounds are launched and arrive.
        alpha: the weights' share where they meet an anchor that arrives late; None: the anchor and
            what they have learnt since the launch.
        clip: largest norm of the mean pseudo-gradient of a fragment; None: any.
        survival: of failed rounds; None: they are errors.
        shares: of the ranks in the mean; None: all alike.
        outcomes: of the fragments' rounds, for residuals.
        unsent: by name, what of a fragment's pseudo-gradients the codec has taken, for the weights
            to keep; None: the operations keep it.
    """

    rule: OuterSGD
    schedule: Schedule
    alpha: float | None
    clip: float | None
    survival: Survival | None = None
    shares: Shares | None = None
    outcomes: Outcomes = field(default_factory=Outcomes)
    unsent: Callable[[int], Mapping[str, torch.Tensor]] | None = None


@dataclass
class Flight:
    """A round under way.

    Attributes:
        due: the steps that remain until its result is used.
        landed: whether all ranks are known to have its result.
        idle: no rank has made a step since the last round: its result is not used.
    """

    fragment: Fragment
    due: int
    landed: bool = False
    idle: bool = False


@dataclass(frozen=True)
class Resumption:
    """A load of which the ranks have not agreed yet how it goes on.

    Attributes:
        digest: of this rank's weights in the checkpoint; None: it has none of this rank.
    """

    digest: int | None
