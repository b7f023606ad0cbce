"""Arguments and state of outer rounds: one under way, and a checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass, field

from bagua._sync.outer.outcomes import Outcomes
from bagua._sync.outer.outer_sgd import GrowingMomentum, OuterSGD
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
        survival: of failed rounds; None: they are errors.
        shares: of the ranks in the mean; None: all alike.
        outcomes: of the fragments' rounds, for residuals.
    """

    rule: OuterSGD | GrowingMomentum
    schedule: Schedule
    survival: Survival | None = None
    shares: Shares | None = None
    outcomes: Outcomes = field(default_factory=Outcomes)


@dataclass
class Flight:
    """A round under way.

    Attributes:
        due: the steps that remain until its result is used.
        landed: whether all ranks are known to have its result.
    """

    fragment: Fragment
    due: int
    landed: bool = False


@dataclass(frozen=True)
class Resumption:
    """A load of which the ranks have not agreed yet how it goes on.

    Attributes:
        digest: of this rank's weights in the checkpoint; None: it has none of this rank.
    """

    digest: int | None
