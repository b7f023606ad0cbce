"""Islands of several ranks: with equal weights, of which the first has the mailbox, or shards.

Note [Ranks of an island]
torch averages inside an island, as its DistributedDataParallel does, so that its ranks hold equal
weights. The first one mails, reads and decides; the others wait for what it has found, which is
broadcast in the island. All call the same functions here in the same order, at the same steps.
All of them encode what one mails: residuals are then equal too, and each rank can be the first.
Ranks that hold shards mail each its own: Note [Shards of an island] in ``post.py``. Shards are
told apart by names, shapes and places in a mesh of all of a rank's parameters, so that stages of a
pipeline are shards as those of FSDP2 are. Of ranks that hold the same shard, as those of HSDP and
averaged stages do, the first mails it. All of them read, and their seals show that they are equal.
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
from bagua._core.state.shards import copies_of, is_sharded, local, place_of, ranks_of
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
        shard: the number of that which this rank holds.
        mails: whether it is the first of those that hold it.
    """

    def __init__(self, group: BaguaProcessGroup, name: str) -> None:
        island = None if group.island is None else group.island.group
        self._connections = None if island is None else island.connections
        self._name = name
        self.rank = 0 if island is None else island.rank
        self.leads = self.rank == 0
        self.size = 1 if island is None else island.size
        self.shards, self.shard, self.mails = 1, 0, self.leads
        self._held = ""  # the parameters of this rank's shard
        self._first_of = [0] * self.size  # the rank that mails what each rank holds

    def find_shards(self, what: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Find out which ranks hold which shards of the parameters ``named``.

        ValueError on all ranks: some of a rank's parameters are shards, or have copies on others.
        """
        if self.size == 1:
            return
        parameters = list(named)
        cut = [p for _, p in parameters if is_sharded(p) and len(ranks_of(p)) > 1]
        # Such would be encoded with other weights on each rank, and drift apart.
        mixed = bool(cut) and (len(cut) < len(parameters) or len({*map(copies_of, cut)}) > 1)
        self._held = "\n".join(
            f"{name} {[*local(p).shape]} {place_of(p) if is_sharded(p) else ''}"
            for name, p in parameters
        )
        found = self._gathered(what, _hash(self._held), int(mixed))
        held = [number for number, _ in found]
        self._first_of = [held.index(number) for number in held]
        firsts = self._firsts()
        if len(firsts) > MOST_SHARDS or any(flag for _, flag in found):
            raise ValueError(
                f"{what}: a rank of island '{self._name}' holds shards, and copies of other "
                "parameters as well, as of tensor parallelism, or there are more than "
                f"{MOST_SHARDS} shards. A mailbox takes islands whose parameters are all cut by "
                "fully_shard over one mesh. Others meet by Elastic() with "
                "process_group=connect_islands(...)."
            )
        first = self._first_of[self.rank]
        self.shards, self.shard, self.mails = len(firsts), firsts.index(first), first == self.rank

    def _firsts(self) -> list[int]:
        """The rank that mails each shard."""
        return sorted({*self._first_of})

    def plan(self, what: str, own: Sequence[str]) -> list[str]:
        """Lines by which islands compare shards: their number, and a hash of each one's plan."""
        lines = [f"islands of {self.shards} shard(s)"]
        if self.shards > 1:
            found = self._of_shards(what, _hash("\n".join([*own, self._held])))
            lines += [f"shard {shard}: {number:016x}" for shard, (number,) in enumerate(found)]
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
        """The seals of all shards. BaguaMismatchError: ranks of one shard have other seals."""
        found = self._gathered(what, *struct.unpack("<4q", bytes.fromhex(own)))
        if found != [found[first] for first in self._first_of]:
            raise _C.BaguaMismatchError(
                f"{what}: ranks of island '{self._name}' that hold the same parameters have other "
                "weights, and only the first one's are mailed. Have torch average them, as by "
                "HSDP or DistributedDataParallel; give parameters of different stages of a "
                "pipeline different names."
            )
        return tuple(struct.pack("<4q", *found[rank]).hex() for rank in self._firsts())

    def digest(self, what: str, own: str) -> str:
        """A digest of the ranks' digests; ``own`` where they have no shards."""
        if self.shards == 1:
            return own
        found = self._of_shards(what, *struct.unpack("<q", bytes.fromhex(own)))
        return f"{_hash(f'{found}'):016x}"

    def _of_shards(self, what: str, *own: int) -> list[list[int]]:
        """The numbers of the rank that mails each shard."""
        found = self._gathered(what, *own)
        return [found[rank] for rank in self._firsts()]

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
        """Overwrite tensors with those of the first rank, unless there are several shards."""
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
