"""From one plan of outer rounds to the next one, with other ranks: Note [Elastic rounds]."""

from __future__ import annotations

from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.initial_state import broadcast_tensors
from bagua._sync.outer.outer_synchronizer import OuterSynchronizer
from bagua._sync.outer.survival import Heritage
from bagua._sync.outer.weights.values import weights_digest

__all__ = ["succeed"]


def succeed(
    after: OuterSynchronizer,
    before: OuterSynchronizer | None,
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
