"""Islands of several ranks: with equal weights, of which the first has the mailbox, or shards.

Note [Ranks of an island]
torch averages inside an island, as its DistributedDataParallel does, so that its ranks hold equal
weights. The first one mails, reads and decides; the others wait for what it has found, which is
broadcast in the island. All call the same functions here in the same order, at the same steps.
All of them encode what one mails: residuals are then equal too, and each rank can be the first.
Ranks that hold shards mail each its own: Note [Shards of an island] in ``post.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

import torch
from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup, Island
from bagua._core.state.initial_state import broadcast_tensors
from bagua._core.state.shards import copied_between_shards, is_sharded, place_of, ranks_of
from bagua._outer.loop import Fragment, broadcast_fragments
from bagua._outer.mailbox.letters import MOST_SHARDS
from bagua._outer.mailbox.patience import Noticed
from bagua._outer.mailbox.post import Overtaken

Value = TypeVar("Value")

_OVERTAKEN, _NOTICED, _FAILED = 1, 2, 3  # of several ranks the highest
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
        leads: whether this rank decides, and alone has the mailbox where the ranks have no shards.
        rank: of this process in the island.
        size: ranks of the island.
        shards: their number; 1: the ranks hold equal weights.
    """

    def __init__(self, group: BaguaProcessGroup, name: str) -> None:
        island = None if group.island is None else group.island.group
        self._connections = None if island is None else island.connections
        self._name = name
        self.rank = 0 if island is None else island.rank
        self.leads = self.rank == 0
        self.size = 1 if island is None else island.size
        self.shards = 1
        self._places = list[str]()  # of the parameters in the shards' mesh

    def find_shards(self, what: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Find out whether the ranks hold shards of the parameters ``named``.

        ValueError on all ranks: they hold neither shards of all, nor all of the same parameters.
        """
        if self.size == 1:
            return
        parameters = list(named)
        sharded = any(is_sharded(p) and len(ranks_of(p)) > 1 for _, p in parameters)
        copied = copied_between_shards(parameters) if sharded else None
        whole = all(len(ranks_of(p)) == self.size for _, p in parameters if is_sharded(p))
        shapes = 0 if sharded else _hash(f"{[(name, [*p.shape]) for name, p in parameters]}")
        bad = copied is not None or not whole or (sharded and self.size > MOST_SHARDS)
        flags = self._reduced(
            what, _C.ReduceOp.MAX, sharded, not sharded, bad, shapes, -shapes
        )  # of any rank
        if flags[2]:
            held = "not of all ranks" if copied is None else f"such as of '{copied}'"
            raise ValueError(
                f"{what}: the ranks of island '{self._name}' hold shards, and copies as well or "
                f"shards of some of the ranks ({held}), as of HSDP, tensor parallelism and "
                f"pipelines. A mailbox takes islands of {MOST_SHARDS} ranks at most whose "
                "parameters are all cut by fully_shard over all ranks. Others meet by "
                "Elastic() with process_group=connect_islands(...)."
            )
        if flags[0] == flags[1] or flags[3] != -flags[4]:
            raise ValueError(
                f"{what}: the ranks of island '{self._name}' hold other parameters than each "
                "other, as the stages of a pipeline do. Islands of a mailbox hold the same on all "
                "ranks, or shards by fully_shard. Pipelines meet by Elastic() with "
                "process_group=connect_islands(...)."
            )
        self.shards = self.size if sharded else 1
        self._places = [f"{name} {place_of(p)}" for name, p in parameters if is_sharded(p)]

    def plan(self, what: str, own: Sequence[str]) -> list[str]:
        """Lines by which islands compare their shards: a number, and a hash of each rank's plan."""
        lines = [f"islands of {self.shards} shard(s)"]
        if self.shards > 1:
            found = self._gathered(what, _hash("\n".join([*own, *self._places])))
            lines += [f"shard {rank}: {number:016x}" for rank, (number,) in enumerate(found)]
        return lines

    def led(self, function: Callable[[], Value], what: str) -> Value | None:
        """Have the first rank call ``function``; None on the others. Where it raises, all do."""
        return self._together(function if self.leads else lambda: None, what)

    def mailing(self, function: Callable[[], Value], what: str) -> Value | None:
        """As :meth:`led`, on every rank where they have shards."""
        return self.led(function, what) if self.shards == 1 else self._together(function, what)

    def _together(self, function: Callable[[], Value | None], what: str) -> Value | None:
        value, failure = None, None
        try:
            value = function()
        except Exception as error:  # noqa: BLE001, raised below
            failure = error
        own = 0 if failure is None else _STATES.get(type(failure), _FAILED)
        (state,) = self._reduced(what, _C.ReduceOp.MAX, own)
        if failure is not None and own == state:
            raise failure
        whose = "the first rank" if self.shards == 1 else "a rank"
        if state == _OVERTAKEN:
            raise Overtaken(f"{what}: its files are gone")
        if state == _NOTICED:
            raise Noticed(f"{what}: {whose} of island '{self._name}' is to leave")
        if state == _FAILED:
            has = ", which has the mailbox," if self.shards == 1 else ""
            raise _C.BaguaError(
                f"{what}: {whose} of island '{self._name}'{has} has failed. Its error says why."
            )
        return value

    def seals(self, what: str, own: str) -> tuple[str, ...]:
        """The seals of all ranks."""
        found = self._gathered(what, *struct.unpack("<4q", bytes.fromhex(own)))
        return tuple(struct.pack("<4q", *numbers).hex() for numbers in found)

    def digest(self, what: str, own: str) -> str:
        """A digest of the ranks' digests; ``own`` where they have no shards."""
        if self.shards == 1:
            return own
        found = self._gathered(what, *struct.unpack("<q", bytes.fromhex(own)))
        return f"{_hash(f'{found}'):016x}"

    def _gathered(self, what: str, *own: int) -> list[list[int]]:
        """The numbers of each rank."""
        before, behind = [0] * len(own) * self.rank, [0] * len(own) * (self.size - self.rank - 1)
        found = self._reduced(what, _C.ReduceOp.SUM, *before, *own, *behind)
        return [found[at : at + len(own)] for at in range(0, len(found), len(own))]

    def any(self, what: str, flag: bool) -> bool:
        """Whether a rank has the flag."""
        return bool(self._reduced(what, _C.ReduceOp.MAX, int(flag))[0])

    def told(self, what: str, *numbers: int) -> list[int]:
        """The numbers of the first rank."""
        own = numbers if self.leads else [0] * len(numbers)
        return self._reduced(what, _C.ReduceOp.SUM, *own)

    def broadcast(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Overwrite tensors with those of the first rank, but for shards."""
        if self._connections is not None and self.shards == 1:
            with self._connections.collective_phase(what):
                broadcast_tensors(tensors, self._connections)

    def broadcast_fragments(self, fragments: Sequence[Fragment], what: str) -> None:
        """Overwrite anchors, and outer optimizers' state, by the first rank's, but for shards."""
        if self._connections is not None and self.shards == 1:
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


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
