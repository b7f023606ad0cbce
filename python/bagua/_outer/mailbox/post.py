"""An island's work with the files of a mailbox, on a thread: steps 1, 2 and 4 of its rounds.

Note [Rounds of a mailbox] in ``rounds.py`` has them.

Note [Shards of an island]
Where the ranks of an island hold different shards, as FSDP2 or a pipeline cuts a model, the first
rank that holds one mails it, and all read those of other islands. The first rank of all decides;
its ranks meet in collectives at the launch and the end of a round only, and in between through the
mailbox:

1. At the launch all encode, seal, and tell each other the seals; the digest in a contribution is
   that of all shards' digests. Who mails a shard writes it on its thread.
2. The first rank waits until all shards are there, then writes the contribution, which names
   them. So an island counts as a whole or not at all.
3. All ranks wait for the manifest, read its contributions, and of each their shard. The end of the
   round has failed for all where it has for one.
4. An anchor is mailed likewise: at a launch the first rank says that it is due.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from bagua import _C
from bagua._core.group.grace import Grace
from bagua._core.group.warn import warn_here
from bagua._outer.loop import OuterLoop, digest_of
from bagua._outer.mailbox import Mailbox, letters
from bagua._outer.mailbox.bodies import body_bytes, buckets_of, mean_of
from bagua._outer.mailbox.box import Box, Received, Sealed
from bagua._outer.mailbox.claims import Claim, Lives
from bagua._outer.mailbox.letters import Contribution, Manifest
from bagua._outer.mailbox.patience import Patience

if TYPE_CHECKING:
    from bagua._outer.loop import Fragment

_log = logging.getLogger("bagua")


class Overtaken(_C.BaguaError):
    """The files of a round are gone: the others are further, and have an anchor."""


class Result(NamedTuple):
    """The mean of a round, by bucket of its fragment, on the CPU.

    ``finite``: whether all of it is. ``broken``: islands whose contributions are not, looked for
    where the mean is not. ``islands``: those that count. ``counted``: this one does; of the first
    rank alone where the ranks have shards.
    """

    means: list[torch.Tensor]
    finite: bool
    broken: list[str]
    islands: list[str]
    counted: bool = False


#: Counters, the last round in which each island counted, and fragments that hold what was mailed.
Anchor: TypeAlias = "tuple[dict[str, int], dict[str, int], list[Fragment]]"


class AnchorOfShards(NamedTuple):
    """An anchor that is to be mailed: this rank's shard, and the seals of all."""

    counters: dict[str, int]
    shard: Sealed
    seals: Sequence[str]


class Mail(NamedTuple):
    """The files that a rank mails in a round.

    ``shard``: its shard; None: ``letter`` is a contribution, or another rank mails the shard.
    """

    own: Contribution
    letter: bytearray
    shard: Sealed | None = None
    anchor: AnchorOfShards | None = None


class Next(IntEnum):
    """The next act of an island that looks for rounds that were decided without it."""

    TRAIN, STEP, ADOPT, BEGIN = range(4)


class Reader:
    """Rounds and anchors of a run, as a rank reads them: its shard, where islands have shards.

    Thread safety: one thread at a time, but for ``late_rounds``.

    Attributes:
        late_rounds: those that this island's contribution came too late to.
    """

    def __init__(self, mailbox: Mailbox, box: Box) -> None:
        self.box, self.late_rounds = box, 0
        self._mailbox = mailbox
        self._mailed = -1  # the newest anchor
        #: The last round that changed an anchor by each of the islands that counted last.
        self._last_rounds: dict[str, int] = {}

    def exchange(self, loop: OuterLoop, mail: Mail, patience: Patience) -> Result:
        """Mail a shard that is given, and return the means of the round that the first rank takes
        part in."""
        for file in (mail.shard, None if mail.anchor is None else mail.anchor.shard):
            if file is not None:
                self.mail(file, patience)
        return self.step(loop, mail.own.round, mail.own.anchor, patience)

    def mail(self, file: Sealed, patience: Patience) -> None:
        patience.repeat("mailing a shard", partial(self.box.mail, file))

    def step(self, loop: OuterLoop, number: int, anchor: str, patience: Patience) -> Result:
        """The means of a round, once it is decided. ``anchor``: a digest of those here."""
        while isinstance(found := self._seen(number, patience), int):
            patience.wait_for(
                f"outer round {number + 1} is not decided yet",
                "The first rank of the island says why.",
            )
        if found.anchor != anchor:
            raise self._differs(number, [each.island for each in found.counted])
        return self._means(loop, found, {}, patience)

    def _seen(self, number: int, patience: Patience) -> Manifest | int:
        """As ``Box.manifest``. Overtaken: the round is gone."""
        found = self._manifest(number, patience)
        if isinstance(found, int) and self._newest(patience) > number:
            found = self._manifest(number, patience)  # it may have come since
            if isinstance(found, int):
                raise self._overtaken(number)
        return found

    def _manifest(self, number: int, patience: Patience) -> Manifest | int:
        return patience.repeat("looking for a manifest", lambda: self.box.manifest(number))

    def _differs(self, number: int, islands: list[str]) -> _C.BaguaError:
        return _C.BaguaMismatchError(
            f"mailbox {self.box.place.url}: the anchor of island '{self._mailbox.island}' before "
            f"outer round {number + 1} differs from that of {', '.join(islands)}. Start it again "
            "without a checkpoint: it begins with the last anchor of the mailbox."
        )

    def _overtaken(self, number: int) -> Overtaken:
        return Overtaken(f"mailbox {self.box.place.url}: outer round {number + 1} is gone")

    def _means(
        self,
        loop: OuterLoop,
        manifest: Manifest,
        arrived: Mapping[str, Received],
        patience: Patience,
    ) -> Result:
        """The mean of the contributions of a manifest."""
        bodies = [
            self._body(manifest, each, arrived.get(each.island), patience)
            for each in manifest.counted
        ]
        exact = [Fraction(each.weight) for each in manifest.counted]
        shares = [float(weight / sum(exact)) for weight in exact]
        means, broken, begin = list[torch.Tensor](), set[str](), 0
        for bucket in buckets_of(loop, manifest.part):
            end = begin + body_bytes(bucket)
            mine = [body[begin:end] for body in bodies]
            means.append(mean_of(bucket, mine, shares))
            if not _C.all_finite(means[-1]):
                for each, body in zip(manifest.counted, mine, strict=True):
                    if not _C.all_finite(mean_of(bucket, [body], [1.0])):
                        broken.add(each.island)
            begin = end
        islands = [each.island for each in manifest.counted]
        finite, counted = all(map(_C.all_finite, means)), self._mailbox.island in islands
        return Result(means, finite, sorted(broken), islands, counted)

    def count(self, islands: Sequence[str], number: int) -> None:
        """Keep the last round of islands that counts, a bounded number of them."""
        rounds = dict.fromkeys(islands, number)
        known = sorted((self._last_rounds | rounds).items(), key=lambda each: (-each[1], each[0]))
        self._last_rounds = dict(known[: letters.MOST_ISLANDS])

    def _body(
        self,
        manifest: Manifest,
        counted: letters.Counted,
        arrived: Received | None,
        patience: Patience,
    ) -> memoryview:
        """A contribution that counts."""
        read = partial(self.box.contribution, manifest.round, manifest.part, counted.name)
        while arrived is None or arrived.counted != counted:
            arrived = patience.repeat(f"reading {counted.name}", read)
            if arrived is not None and arrived.counted == counted:
                break
            if self._newest(patience) > manifest.round:
                raise self._overtaken(manifest.round)
            patience.wait_for(
                f"{counted.name} of outer round {manifest.round + 1}, which counts, is not there "
                "or not whole",
                "Start this island again.",
            )
        return arrived.body

    def _newest(self, patience: Patience) -> int:
        """Rounds behind the newest anchor; -1: there is none."""
        self._mailed = max(patience.repeat("looking for anchors", self.box.anchors), default=-1)
        return self._mailed

    def anchor(self, loop: OuterLoop, number: int, patience: Patience) -> Anchor | None:
        """An anchor that was mailed; None: not now."""

        def made(tensors: Mapping[str, torch.Tensor]) -> list[Fragment]:
            return [fragment.loaded(tensors) for fragment in loop.state.fragments]

        read = partial(self.box.anchor, number, loop.state.named(), made)
        found = patience.repeat("reading an anchor", read)
        if found is not None:
            self._last_rounds = found[1]
        return found


class PostOffice(Reader):
    """Contributions, manifests and anchors of an island that has entered a run.

    Attributes:
        ending: the round is one of ``sync()``, which does not wait for islands that have left.
    """

    def __init__(self, mailbox: Mailbox, box: Box, claim: Claim, lives: Lives) -> None:
        super().__init__(mailbox, box)
        self.claim, self.ending = claim, False
        self._lives = lives
        self._decided = -1  # the last round whose manifest this island wrote
        self._tidied = -1  # the newest anchor with nothing old before
        self._due = False  # an anchor of shards is to be mailed at the next launch
        self._told_late: set[str] = set()

    # A round.

    def exchange(self, loop: OuterLoop, mail: Mail, patience: Patience) -> Result:
        """Mail a contribution, wait for the manifest, and return the means."""
        self.claim.check()
        own = mail.own
        mine = self._contribute(mail, patience)
        if mail.anchor is not None:
            self._put_anchor_of_shards(mail.anchor, patience)
        if self._decided == own.round - 1 >= 0:
            self._tidy(loop, patience)
        arrived = {own.island: mine}
        manifest = self._agreed(own, arrived, patience)
        if manifest.anchor != own.anchor:
            raise self._differs(own.round, [each.island for each in manifest.counted])
        counted = mine.counted in manifest.counted
        if counted:
            self._stand_in(loop, manifest, patience)
        self._note(loop, manifest, counted)
        return self._means(loop, manifest, arrived, patience)._replace(counted=counted)

    def _contribute(self, mail: Mail, patience: Patience) -> Received:
        own, letter, shard, _ = mail
        if shard is None:
            write = partial(self.box.contribute, own, letter)
        else:
            self.mail(shard, patience)
            there = partial(self.box.shards_there, own)
            self._await_shards(f"outer round {own.round + 1}", there, patience)
            write = partial(self.box.contribute_shards, own, shard)
        return patience.repeat("mailing a contribution", write)

    def _await_shards(self, of: str, there: Callable[[], bool], patience: Patience) -> None:
        while not patience.repeat("looking for shards", there):
            patience.wait_for(
                f"shards of other ranks of island '{self._mailbox.island}' of {of} are not there",
                "Another rank says why; start this island again.",
            )

    def _agreed(
        self, own: Contribution, arrived: dict[str, Received], patience: Patience
    ) -> Manifest:
        """The manifest of a round, which this island may write."""
        grace = Grace(self._mailbox.quorum, self._mailbox.grace)
        number = own.round
        while True:
            found = self._seen(number, patience)
            if isinstance(found, Manifest):
                return found
            self._arrivals(own, arrived, patience)
            needed, expected = self._awaited(own, arrived, patience)
            over = grace.over(len(arrived), len(expected))
            enough = len(arrived) >= needed and over and found >= 0
            if enough and self._decide(own, arrived, needed, found, patience):
                if self._newest(patience) > number:
                    # This island was cut off meanwhile. The others have decided long ago, and
                    # removed that round.
                    raise self._overtaken(number)
                continue
            patience.wait_for(
                f"outer round {number + 1} has {', '.join(sorted(arrived))}, needs "
                f"{needed} island(s), expects {', '.join(sorted(expected)) or 'none'}",
                "Start the others, or allow fewer by quorum=.",
            )

    def _arrivals(
        self, own: Contribution, arrived: dict[str, Received], patience: Patience
    ) -> None:
        """Fetch contributions that have come."""
        look = partial(self.box.contributions, own.round)
        names = patience.repeat("looking for contributions", look)
        for island, files in list(names.items())[: letters.MOST_ISLANDS]:
            for name in files if island not in arrived else ():
                read = partial(self.box.contribution, own.round, own.part, name)
                received = patience.repeat(f"reading {name}", read)
                if received is not None and self._is_whole(received, patience):
                    arrived[island] = received
                    break

    def _is_whole(self, received: Received, patience: Patience) -> bool:
        """Whether the shards of all ranks of an island are there."""
        there = partial(self.box.shards_there, received.contribution)
        shards = received.contribution.shards
        return not shards or patience.repeat("looking for shards", there)

    def _awaited(
        self, own: Contribution, arrived: Mapping[str, Received], patience: Patience
    ) -> tuple[int, set[str]]:
        """The islands that a round needs, and those that live and have not come.

        An island that is killed leaves its claim, and one that ends takes it back.
        """
        claimed = patience.repeat("looking for islands", self._lives.look).keys()
        needed = self._mailbox.quorum
        if self.ending and own.round > 0:
            needed = min(needed, len(claimed | arrived.keys()))
        return needed, self._lives.alive() - arrived.keys()

    def _decide(
        self,
        own: Contribution,
        arrived: Mapping[str, Received],
        needed: int,
        attempt: int,
        patience: Patience,
    ) -> bool:
        """Write the manifest with those of the most common anchor, if they are enough."""
        against: dict[str, list[str]] = {}
        for island, received in sorted(arrived.items()):
            against.setdefault(received.contribution.anchor, []).append(island)
        anchor, islands = max(
            against.items(), key=lambda pair: (len(pair[1]), pair[0] == own.anchor)
        )
        if len(islands) < needed or not any(arrived[i].counted.weight for i in islands):
            return False
        if anchor != own.anchor:
            raise self._differs(own.round, islands)
        counted = [arrived[island].counted for island in islands]
        manifest = Manifest(self.box.run, own.round, own.part, anchor, own.island, counted)
        if patience.repeat("writing a manifest", lambda: self.box.decide(manifest, attempt)):
            self._decided = own.round
        return True

    def _note(self, loop: OuterLoop, manifest: Manifest, counted: bool) -> None:
        """Tell who was late."""
        islands = {each.island for each in manifest.counted}
        late = (self._lives.alive() | {self._mailbox.island}) - islands
        self.late_rounds += not counted
        if late:
            text = (
                f"module '{loop.name}': island(s) {', '.join(sorted(late))} did not come in time "
                f"to outer round {manifest.round + 1}, {', '.join(sorted(islands))} go on"
            )
            if not late <= self._told_late:
                self._told_late |= late
                warn_here(f"{text}. Later times are logged.")
            _log.info(text)

    # Anchors.

    def _tidy(self, loop: OuterLoop, patience: Patience) -> None:
        """Mail the anchors where it is time; once for each anchor, remove what is old.

        Shards of anchors are mailed at the next launch: Note [Shards of an island].
        """
        if self._newest(patience) <= loop.state.communications - self._mailbox.keep:
            if self.box.shards > 1:
                self._due = True
            else:
                self._put_anchor(loop, patience)
        if self._tidied != self._mailed:
            patience.repeat("removing old rounds", self.box.forget)
            self._tidied = self._mailed

    def _stand_in(self, loop: OuterLoop, manifest: Manifest, patience: Patience) -> None:
        """Do that for islands that were killed before they could: Note [Rounds of a mailbox]."""
        islands = [each.island for each in manifest.counted]
        turn = (islands.index(self._mailbox.island) - manifest.round) % len(islands)
        due = self._mailed + (self._mailbox.keep if self._tidied == self._mailed else 0)
        if turn < manifest.round - due:
            self._tidy(loop, patience)

    def _put_anchor(self, loop: OuterLoop, patience: Patience) -> bool:
        """Whether this is the anchor after so many rounds; False: there is another one."""
        state = loop.state
        put = partial(self.box.put_anchor, counters_of(loop), self._last_rounds, tensors_of(loop))
        first = patience.repeat("mailing an anchor", put)
        self._mailed = max(self._mailed, state.communications)
        return first

    def anchor_is_due(self, number: int) -> bool:
        """Whether shards of an anchor are to be mailed with the contribution to a round."""
        turn = self._due or self._decided == number - 1 >= 0
        self._due = turn and self._mailed <= number - self._mailbox.keep
        return self._due

    def _put_anchor_of_shards(self, anchor: AnchorOfShards, patience: Patience) -> None:
        """Mail this rank's shard of an anchor, and make it whole when all are there."""
        self.mail(anchor.shard, patience)
        number, seals = anchor.counters["rounds"], anchor.seals
        there = partial(self.box.anchor_shards_there, number, seals)
        self._await_shards(f"the anchor after {number} rounds", there, patience)
        self.begin_with(anchor, patience)

    def begin_with(self, anchor: AnchorOfShards, patience: Patience) -> bool:
        """Write an anchor whose shards are there; False: there is another one."""
        counters, _, seals = anchor
        put = partial(self.box.put_anchor_of_shards, counters, self._last_rounds, seals)
        first = patience.repeat("mailing an anchor", put)
        self._mailed, self._due = max(self._mailed, counters["rounds"]), False
        return first

    def next(self, number: int, knows: bool, patience: Patience) -> tuple[Next, int]:
        """The next act after so many rounds, and the newest anchor if it was looked for.

        ``knows``: as in :meth:`missed`.
        """
        found = self._manifest(number, patience)
        newest = -1 if isinstance(found, Manifest) and knows else self._newest(patience)
        if newest > number or (newest == number and not knows):
            return Next.ADOPT, newest
        if isinstance(found, Manifest):
            return Next.STEP, newest
        goes_on = knows or self._continues(number, patience)
        return Next.TRAIN if goes_on else Next.BEGIN, newest

    def begin(self, loop: OuterLoop, patience: Patience) -> None:
        """Remove what is old, where this island has just begun."""
        if self._tidied < 0:
            self._tidy(loop, patience)

    def wait_for_anchor(self, number: int, patience: Patience) -> None:
        """Wait before another look at what has not been whole."""
        patience.wait_for(
            f"anchor-{number:09d}, which others have mailed, is not there or not whole",
            "Remove it and start this island again, or begin anew with another URL.",
        )

    def missed(self, loop: OuterLoop, knows: bool, patience: Patience) -> Result | Anchor | None:
        """The next step that others have made, or newer anchors; None: there is neither.

        ``knows``: the anchors here are those of the mailbox after so many rounds. Otherwise this
        island has begun, or has loaded a checkpoint.
        """
        number = loop.state.communications
        while True:
            kind, newest = self.next(number, knows, patience)
            if kind == Next.ADOPT:
                anchor = self.anchor(loop, newest, patience)
                if anchor is not None:
                    return anchor
            elif kind == Next.STEP:
                try:
                    part = number % len(loop.state.fragments)
                    return self.step(loop, number, digest_before(loop, part), patience)
                except Overtaken:
                    knows = False  # there is a newer anchor
            elif kind == Next.TRAIN or self._put_anchor(loop, patience):
                self.begin(loop, patience)
                return None
            self.wait_for_anchor(max(newest, number), patience)

    def _continues(self, number: int, patience: Patience) -> bool:
        """Whether the mailbox has the round before; otherwise a checkpoint is newer."""
        return number > 0 and isinstance(self._manifest(number - 1, patience), Manifest)


def counters_of(loop: OuterLoop) -> dict[str, int]:
    """The counters of an anchor."""
    return {"rounds": loop.state.communications, "outer_rounds": loop.state.outer_rounds}


def tensors_of(loop: OuterLoop) -> dict[str, torch.Tensor]:
    """The tensors of an anchor, on the CPU."""
    return {key: tensor.cpu() for key, tensor in loop.state.named().items()}


def digest_before(loop: OuterLoop, part: int) -> str:
    """A digest of the anchors of a fragment, and of its optimizer's state."""
    return f"{digest_of(dict(loop.state.fragments[part].named_state())):016x}"
