"""Islands of several ranks with equal weights, of which the first has the mailbox.

Note [Ranks of an island]
torch averages inside an island, as its DistributedDataParallel does, so that its ranks hold equal
weights. The first one mails, reads and decides; the others wait for what it has found, which is
broadcast in the island. All call the same functions here in the same order, at the same steps.
All of them encode what one mails: residuals are then equal too, and each rank can be the first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup, Island
from bagua._core.state.initial_state import broadcast_tensors
from bagua._outer.loop import Fragment, broadcast_fragments
from bagua._outer.mailbox.patience import Noticed
from bagua._outer.mailbox.post import Overtaken

Value = TypeVar("Value")

_FAILED, _OVERTAKEN, _NOTICED = 1, 2, 3
_STATES: dict[type[Exception], int] = {Overtaken: _OVERTAKEN, Noticed: _NOTICED}


def alone_in(group: BaguaProcessGroup) -> BaguaProcessGroup:
    """The group of this rank alone, as a part of the island ``group``. All ranks of it call it."""
    if group.size == 1 or group.island is not None:
        return group
    keys = c10d.PrefixStore(f"mailbox/rank{group.rank}", group.store)
    island = Island(0, group, group.store)
    name = f"{group.group_name}/mailbox"
    return BaguaProcessGroup([0], name, keys, group.timeout, group.stream, island)


class Inside:
    """The ranks of an island: Note [Ranks of an island]. An island may be one process.

    Attributes:
        leads: whether this rank has the mailbox.
        size: ranks of the island.
    """

    def __init__(self, group: BaguaProcessGroup, name: str) -> None:
        island = None if group.island is None else group.island.group
        self._connections = None if island is None else island.connections
        self._name = name
        self.leads = island is None or island.rank == 0
        self.size = 1 if island is None else island.size

    def led(self, function: Callable[[], Value], what: str) -> Value | None:
        """Have the first rank call ``function``; None on the others. Where it raises, all do."""
        value, failure = None, None
        if self.leads:
            try:
                value = function()
            except Exception as error:  # noqa: BLE001, raised below
                failure = error
        own = 0 if failure is None else _STATES.get(type(failure), _FAILED)
        (state,) = self.told(what, own)
        if failure is not None:
            raise failure
        if state == _OVERTAKEN:
            raise Overtaken(f"{what}: its files are gone")
        if state == _NOTICED:
            raise Noticed(f"{what}: the first rank of island '{self._name}' is to leave")
        if state == _FAILED:
            raise _C.BaguaError(
                f"{what}: the first rank of island '{self._name}', which has the mailbox, has "
                "failed. Its error says why."
            )
        return value

    def told(self, what: str, *numbers: int) -> list[int]:
        """The numbers of the first rank."""
        own = numbers if self.leads else [0] * len(numbers)
        return self._reduced(what, _C.ReduceOp.SUM, *own)

    def broadcast(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Overwrite tensors with those of the first rank."""
        if self._connections is not None:
            with self._connections.collective_phase(what):
                broadcast_tensors(tensors, self._connections)

    def broadcast_fragments(self, fragments: Sequence[Fragment], what: str) -> None:
        """Overwrite anchors, and the outer optimizers' state, with those of the first rank."""
        if self._connections is not None:
            broadcast_fragments(fragments, self._connections, what)

    def total(self, what: str, number: float) -> float:
        """The sum of the ranks' numbers."""
        if self._connections is None:
            return number
        (bits,) = struct.unpack("<q", struct.pack("<d", number))
        found = self._connections.gather_numbers(what, bits)
        numbers = (struct.unpack("<d", struct.pack("<q", each)) for each in found)
        return math.fsum(number for (number,) in numbers)

    def check_equal(self, what: str, digest: int, flag: bool) -> bool:
        """Whether a rank has the flag. BaguaMismatchError: the ranks hold different weights."""
        highest, lowest, any_rank = self._reduced(what, _C.ReduceOp.MAX, digest, -digest, int(flag))
        if highest != -lowest:
            raise _C.BaguaMismatchError(
                f"{what}: the {self.size} ranks of island '{self._name}' hold different weights, "
                "and only the first one's are mailed. Have torch average inside the island: wrap "
                "DistributedDataParallel(model) with bagua, on each rank."
            )
        return bool(any_rank)

    def _reduced(self, what: str, op: _C.ReduceOp, *numbers: int) -> list[int]:
        if self._connections is None:
            return list(numbers)
        return self._connections.reduce_numbers(what, op, *numbers)
