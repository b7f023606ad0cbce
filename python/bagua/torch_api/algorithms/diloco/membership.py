"""Plans of an elastic algorithm that follow one another, with other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.initial_state import broadcast_tensors
from bagua._sync.outer.outer_loop import OuterLoop
from bagua._sync.outer.survival import Heritage, Survival
from bagua._sync.outer.weights import weights_digest
from bagua.torch_api._residuals.means import RememberedMeans

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = ["Membership"]


@dataclass(frozen=True)
class _Before:
    """A plan that another one, of other ranks, replaces.

    Attributes:
        means: with residuals; None: no error feedback.
        members: how many ranks have residuals.
    """

    outer: OuterLoop
    means: RememberedMeans | None
    members: int


class Membership:
    """Replaces the plan of an elastic algorithm where ranks are lost or come back.

    Args:
        group: of the algorithm, whose members change.
        least: ranks without which nobody goes on.

    Attributes:
        survival: of failed rounds.
    """

    def __init__(self, group: BaguaProcessGroup, least: int) -> None:
        self.survival = Survival(group, least)
        self._group = group
        self._before: _Before | None = None  # until the plan after it is complete

    @property
    def failed(self) -> bool:
        """Whether a round has failed since the last change."""
        return self.survival.failure is not None

    def complete(self, outer: OuterLoop, means: RememberedMeans | None) -> None:
        """Give a plan that has just been built the state to go on with."""
        self.survival.found()
        heritage, self.survival.heritage = self.survival.heritage, None
        if heritage is None:
            return
        before = self._before
        _succeed(outer, None if before is None else before.outer, heritage, self._group)
        if before is not None and before.means is not None and means is not None:
            means.inherit(before.means, before.members)

    def change(self, bagua_ddp: Session, outer: OuterLoop, means: RememberedMeans | None) -> None:
        """Build a plan over the ranks that are left or have come back. All of them call it.

        Args:
            outer: the plan until now.
            means: its residuals.

        Raises:
            BaguaError: too few ranks are left, this one was given up, or changes fail repeatedly.
        """
        self._before = _Before(outer, means, 0 if means is None else len(means.members()))

        def replace(joining: bool) -> None:
            if joining:
                bagua_ddp.welcome()
            bagua_ddp.rebuild()

        self.survival.change(bagua_ddp.bagua_module_name, outer.report(), replace)
        self._before = None


def _succeed(
    after: OuterLoop,
    before: OuterLoop | None,
    heritage: Heritage,
    group: BaguaProcessGroup,
) -> None:
    """Give ``after``, a new plan, the state to go on with. All members call it.

    Args:
        after: built over the present members.
        before: this rank's plan over the members before; None: it has joined.
        heritage: who gives what to whom.
        group: of the present members.

    Raises:
        BaguaMismatchError: the ranks' anchors differ.
        BaguaError: a rank was lost.
    """
    own = group.ranks[group.rank]
    if before is not None:
        after.take_over(before)
    takers = sorted(heritage.joined + heritage.behind)
    some = group.connect_some("outer", [heritage.source, *takers]) if takers else None
    if some is not None:
        with some.collective_phase(f"giving the anchor of rank {heritage.source}"):
            broadcast_tensors([tensor for _, tensor in after.weights.named_outer_state()], some)
    if own in heritage.joined:
        after.weights.take_anchors()  # they begin at the anchor
    elif own in heritage.behind and before is not None:
        after.use_result_of(before, changed=heritage.counters["outer_rounds"])
    after.go_on_at(heritage.counters)
    digest = weights_digest(dict(after.weights.named_outer_state()))
    group.connections.agree("their anchors", [f"anchors and momenta {digest}"])
    group.admission = None
