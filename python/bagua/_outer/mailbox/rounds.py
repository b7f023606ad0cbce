"""Outer rounds whose contributions are files.

Note [Rounds of a mailbox]
Round N is the one after N rounds; its fragment is N modulo the number of fragments.

1. An island encodes its pseudo-gradients, and mails them with a digest of the anchors that they are
   against, and with its weight.
2. It waits until the quorum is there, and for late islands as long as :class:`Grace` says. Then it
   writes the manifest, which lists who counts, unless another island was first.
3. All islands add the contributions of the manifest in its order, each times its share of the
   weights, and step: equal bits. The residual of the codec counts where the contribution does.
4. Every ``keep`` rounds the author of the last manifest mails the anchors, and removes old rounds.
   So does an island that begins and finds that it is time. If neither has, as they were killed, an
   island of the next round stands in, two in the round after it, and so on.

An island that is not in the manifest makes the step too, and its weights move with the anchors:
what it has trained is in its next pseudo-gradient, which is divided by the intervals that it is of.
Before a launch, and when it begins, an island makes the steps of all rounds that were decided
without it, or takes a newer anchor where their files are gone. The first island of all mails its
anchors, and the others begin with them.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup, close_at_exit
from bagua._core.state.ledger import Page
from bagua._ops import operations
from bagua._ops.operations import Operation
from bagua._outer import leaving
from bagua._outer.late import LateWeights
from bagua._outer.loop import OuterLoop, PendingRound, digest_of
from bagua._outer.mailbox import Mailbox, letters
from bagua._outer.mailbox.bodies import body_bytes, buckets_of, encode
from bagua._outer.mailbox.box import Box
from bagua._outer.mailbox.claims import Claim, Lives
from bagua._outer.mailbox.island import Inside
from bagua._outer.mailbox.letters import Contribution
from bagua._outer.mailbox.patience import Noticed, Patience, Task
from bagua._outer.mailbox.places import Place, place_at, shown
from bagua._outer.mailbox.post import (
    Anchor,
    AnchorOfShards,
    Mail,
    Next,
    Overtaken,
    PostOffice,
    Reader,
    Result,
    counters_of,
    digest_before,
    tensors_of,
)
from bagua._outer.mailbox.store import told
from bagua._outer.strategies import FixedRanks, RankWeights
from bagua._sync.engine import describe

if TYPE_CHECKING:
    import torch

    from bagua._outer.loop import Fragment, Schedule
    from bagua.torch_api.bucket import BaguaBucket

Value = TypeVar("Value")

_log = logging.getLogger("bagua")

_MOST_TRIES = 4  # of a fragment's round in sync()
# Until threads are left behind when the module is closed: that of a round, and that of the claim.
_SECONDS_TO_END = 5.0, 3.0
_OF_A_NOTICE = 0.85  # of the seconds to leave in, in which an island that leaves has ended both


class MailboxRanks(FixedRanks):
    """An island's part in the rounds of a mailbox: Note [Rounds of a mailbox].

    ``plan``: arguments that all islands must share, besides their buckets.
    """

    def __init__(
        self, group: BaguaProcessGroup, mailbox: Mailbox, warmup_steps: int, plan: str
    ) -> None:
        if group.size > 1:
            raise ValueError(
                "Mailbox: process_group= connects islands. Give it the ranks of this island, or "
                "leave it out: an island's ranks are all that its launcher has started."
            )
        if warmup_steps > 0:
            raise ValueError(
                f"Mailbox: warmup_steps={warmup_steps} exchanges gradients in each step, which "
                "islands cannot. Leave it out: islands begin with the weights of the first one."
            )
        self._mailbox, self._plan = mailbox, plan
        self._inside = Inside(group, mailbox.island)
        # The other ranks of an island are to hear of a time-out before their own.
        self._timeout = group.timeout.total_seconds() * (1.0 if self._inside.size == 1 else 0.9)
        self._stop = threading.Event()
        self._sigterm = leaving.Sigterm(mailbox.leave_within)
        self._leaves = False  # after this step, all ranks of the island
        self._last = False  # the last round of one that leaves is under way
        self._entered = False
        #: Of an island that has entered: of its first rank, and of all where they have shards.
        self._post: Reader | None = None
        self._loop: Callable[[], OuterLoop | None] = lambda: None
        self._task: Task[Result] | None = None  # of the round under way
        self._in_order = False  # sync() is at its rounds
        self._launches = 0
        self._sent = -1  # the round that the last launch was for, until it is known who counts
        self._reached = -1  # rounds that are behind the anchors here, as the mailbox has them
        close_at_exit(self)

    # The plan.

    def claim(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._inside.find_shards("Mailbox", named)

    def mean(
        self,
        bucket: BaguaBucket,
        codec: str | None,
        hierarchical: bool,
        group: BaguaProcessGroup,
        outcome: _C.RoundOutcome | None,
    ) -> Operation:
        if hierarchical:
            raise ValueError(
                "Mailbox: hierarchical=True is for several ranks of a node: leave it out"
            )
        page = None
        if codec is not None and outcome is not None:
            page = Page(bucket.backend_tensor, bucket.named_views(), outcome)
        alone = operations.all_reduce(bucket, group=group)  # of one rank, which sends nothing
        arguments = {"codec": codec, "error_feedback": page is not None}
        return replace(alone, name="Mailed", arguments=arguments, page=page, of_divided=None)

    def begin(self, loop: OuterLoop) -> None:
        self._loop = weakref.ref(loop)
        with self._until_told():
            if not self._entered:
                enters = f"{self._who(loop)}, entering"
                own = [*describe(loop.buckets), *_parts(loop)]
                plan = [self._plan, *self._inside.plan(enters, own), *own]
                self._post = self._inside.led(lambda: self._enter(loop, plan), enters)
                if self._inside.shards > 1:
                    follows = partial(self._follow, loop)
                    self._post = self._inside.mailing(lambda: self._post or follows(), enters)
                self._entered = True
            self._reached = -1
            self._catch_up(loop)

    def _enter(self, loop: OuterLoop, plan: list[str]) -> PostOffice:
        """Begin or join the run, under this island's name."""
        own = self._mailbox

        def enter(patience: Patience) -> tuple[Box, Claim]:
            box = self._box(loop, patience)
            patience.repeat("opening the run", lambda: box.open_run(plan))
            claim = Claim(box.place, box.run, own.secret, own.island)
            claim.take(patience)
            return box, claim

        box, claim = self._run(loop, "entering", enter)
        weakref.finalize(self, claim.end)
        return PostOffice(own, box, claim, Lives(box.place, box.run, own.secret, claim.clock))

    def _follow(self, loop: OuterLoop) -> Reader:
        """Join the run that the first rank of this island has entered."""

        def enter(patience: Patience) -> Box:
            box = self._box(loop, patience)
            box.run = patience.repeat("opening the run", box.known_run)
            return box

        return Reader(self._mailbox, self._run(loop, "entering", enter))

    def _box(self, loop: OuterLoop, patience: Patience) -> Box:
        bodies = [0] * len(loop.state.fragments)
        for bucket in loop.buckets:
            bodies[bucket.part] += body_bytes(bucket)
        place, inside = patience.repeat("reaching it", self._place), self._inside
        secret = self._mailbox.secret
        return Box(place, secret, bodies, inside.shard, inside.shards)

    def _place(self) -> Place:
        own = self._mailbox
        try:
            return place_at(own.url, own.island)
        except TimeoutError:  # it may be repeated
            raise
        except OSError as error:
            raise _C.BaguaError(
                f"mailbox {shown(own.url)}: it cannot be reached or written "
                f"({told(error, own.url)}). Give this island the right to write there, or another "
                "URL to all."
            ) from None

    def _run(
        self,
        loop: OuterLoop,
        what: str,
        function: Callable[[Patience], Value],
        patience: Patience | None = None,
    ) -> Value:
        """Have a thread do it, and wait for that."""
        return Task(function, patience or self._patience()).result(f"{self._who(loop)}, {what},")

    def _patience(self) -> Patience:
        own = self._mailbox
        return Patience(own.url, self._timeout, own.leave_within, self._stop)

    def _who(self, loop: OuterLoop) -> str:
        return f"module '{loop.name}': island '{self._mailbox.island}'"

    # A round.

    def weights(self, own: RankWeights, schedule: Schedule) -> RankWeights:
        return LateWeights(own, schedule.fragments, schedule.interval)

    def gathered(self, part: int) -> bool:
        loop = self._known_loop()
        self._catch_up(loop)
        due = loop.state.communications % len(loop.state.fragments)
        if due == part:
            return True
        # The others are elsewhere in the cycle: go on there.
        self.postponed = due
        schedule = loop.schedule
        cycle = range(1, schedule.interval + 1)
        loop.state.steps = next(step for step in cycle if schedule.launched_after(step) == due)
        return False

    def order(self, fragments: Iterable[Fragment]) -> Iterator[Fragment]:
        """Rounds of all fragments in turn, until what was trained of each is in one."""
        loop = self._known_loop()
        every = loop.state.fragments
        missing = {fragment.part for fragment in fragments}
        if not loop.state.rank_weights.by_samples:  # the others may wait for this island
            missing = {fragment.part for fragment in every}
        self._end(True)
        self._in_order = True
        try:
            for _ in range(_MOST_TRIES * len(every)):
                if not missing:
                    self._in_order = False
                    return
                self._catch_up(loop)
                fragment = every[loop.state.communications % len(every)]
                yield fragment
                if self.counted:
                    missing.discard(fragment.part)
        finally:
            self._end(False)

    def _end(self, ending: bool) -> None:
        if isinstance(self._post, PostOffice):
            self._post.ending = ending

    def attempt(self, rounds: Callable[[], None], *, due: bool) -> None:
        for _ in range(_MOST_TRIES):
            self._in_order = False
            self.complete(rounds)
            if not self._in_order:  # else the others were further, and sync() begins anew
                break
        if self._inside.size == 1:
            self._leaves = leaving.noticed() is not None
        if self._leaves and not self._last:
            self._leave(self._known_loop(), None)

    def complete(self, receive: Callable[[], None]) -> None:
        with self._until_told():
            try:
                receive()
            except Overtaken:
                loop = self._known_loop()
                loop.state.pending = None
                self._catch_up(loop)

    @contextmanager
    def _until_told(self) -> Iterator[None]:
        """Leave where a notice comes to a wait that does not end soon."""
        try:
            yield
        except Noticed as error:
            if self._last:
                raise
            self._leave(self._known_loop(), error)

    def _leave(self, loop: OuterLoop, error: _C.BaguaError | None) -> None:
        """Make the last round, or leave the contribution to it; then end the process.

        ``error``: of a round under way that was not decided in time.
        """
        leaving.leave()  # on ranks that have heard of it from another one
        self._last = True
        try:
            if error is None:
                loop.sync()
        except _C.BaguaError as failure:
            error = failure
        how = "its steps are in the anchor"
        if error is not None:
            how = f"its last steps count in a round of the others, if they were mailed ({error})"
        _log.warning("%s leaves by notice: %s", self._who(loop), how)
        self.close()
        raise SystemExit(0)

    def confirm(self, engine: _C.Engine) -> None:
        """Mail the pseudo-gradients of the fragment that is due."""
        engine.wait()  # for a group of one rank: they lie in the buckets
        loop, post = self._known_loop(), self._post
        number = loop.state.communications
        part = number % len(loop.state.fragments)
        what = f"{self._who(loop)}, launching outer round {number + 1}"
        if self._inside.size > 1:
            told = leaving.noticed() is not None
            digest = 0 if self._inside.shards > 1 else digest_of(loop.weights())
            self._leaves = self._inside.check_equal(what, digest, told)
        weight = self._weight(loop, part, what)
        buckets = buckets_of(loop, part)
        own, letter = None, bytearray(sum(map(body_bytes, buckets)))
        body = memoryview(letter)
        if post is not None:
            anchor = self._inside.digest(what, digest_before(loop, part))
            own = Contribution(post.box.run, self._mailbox.island, number, part, anchor, weight)
            letter = post.box.new_contribution(own)
            body = letters.body_of(letter)
        begin = 0
        for bucket in buckets:
            end = begin + body_bytes(bucket)
            encode(bucket, body[begin:end])
            begin = end
        self._launches += 1
        self._sent = number
        if post is not None and own is not None:
            mail = Mail(own, letter)
            if self._inside.shards > 1:
                mail = self._of_shards(loop, mail, what)
            self._task = Task(partial(post.exchange, loop, mail), self._patience())

    def _of_shards(self, loop: OuterLoop, mail: Mail, what: str) -> Mail:
        """This rank's part of a contribution of shards: Note [Shards of an island]."""
        post = self._known_post()
        shard = post.box.sealed_shard(mail.own, mail.letter)
        own = replace(mail.own, shards=self._inside.seals(what, shard.seal))
        due = isinstance(post, PostOffice) and post.anchor_is_due(own.round)
        anchor = self._anchor_of_shards(loop, what) if self._inside.any(what, due) else None
        if not self._inside.mails:
            return mail._replace(own=own)
        return Mail(own, mail.letter, shard, anchor)

    def _anchor_of_shards(self, loop: OuterLoop, what: str) -> AnchorOfShards:
        box, counters = self._known_post().box, counters_of(loop)
        shard = box.sealed_anchor_shard(counters["rounds"], tensors_of(loop))
        return AnchorOfShards(counters, shard, self._inside.seals(what, shard.seal))

    def _weight(self, loop: OuterLoop, part: int, what: str) -> float:
        """The weight of this island in a round."""
        own = loop.state.rank_weights.weight(part)
        by_samples = loop.state.rank_weights.by_samples
        return self._inside.total(what, own) if by_samples else own

    def receive(self, engine: _C.Engine) -> None:
        """Wait for the mean of the round under way, and put it into the buckets."""
        loop = self._known_loop()
        number = loop.state.communications
        what = f"{self._who(loop)}, in outer round {number + 1}"
        result = self._inside.mailing(lambda: self._received(what), what)
        finite, self.counted = self._give(loop, result, what)
        self._end_launch(loop, finite)
        self._reached = number + 1

    def _end_launch(self, loop: OuterLoop, finite: bool) -> None:
        """The last launch's round is known: its residuals count where its part is committed."""
        part = self._sent % len(loop.state.fragments)
        for bucket in buckets_of(loop, part):
            if (page := bucket.ops[0].page) is not None:
                page.memory.leave(self._launches, finite)
        self._sent = -1

    def _received(self, what: str) -> Result:
        task, self._task = self._task, None
        if task is None:  # it was received, and what came after has failed
            raise _C.BaguaError(f"{what}: the round under way has failed before")
        return task.result(f"{what},")

    def resume(self, loop: OuterLoop) -> None:
        """Make the steps that a checkpoint lacks, before anything is trained.

        Weights that contributions of this island to them had must not count again. Neither must
        those of one that lies in a round which nobody has decided yet.
        """
        self._sent = -1
        loop.end_together()
        with self._until_told():
            self._catch_up(loop, loaded=True)
            what = f"{self._who(loop)}, looking for its contributions"
            (mailed,) = self._inside.told(what, int(bool(self._inside.led(self._has_mailed, what))))
            if mailed:
                part = loop.state.communications % len(loop.state.fragments)
                self._forget_trained(loop, loop.state.fragments[part])

    def _has_mailed(self) -> bool:
        """Whether an earlier process of this island has mailed a part of the next round."""
        loop, what = self._known_loop(), "looking for its contributions"
        look = partial(self._office().box.contributions, loop.state.communications)
        found = self._run(loop, what, lambda patience: patience.repeat(what, look))
        return self._mailbox.island in found

    def _catch_up(self, loop: OuterLoop, *, loaded: bool = False) -> None:
        """Make the steps of rounds that were decided without this island.

        ``loaded``: all that it has trained is of a checkpoint.
        """
        what = f"{self._who(loop)}, looking for rounds"
        while True:
            number = loop.state.communications
            knows = number == self._reached
            if self._inside.shards > 1:
                found = self._look_for_shards(loop, knows, what)
            else:
                found = self._inside.led(partial(self._look, loop, knows), what)
            step, anchor = isinstance(found, Result), type(found) is tuple
            steps, adopts = self._inside.told(what, int(step), int(anchor))
            if steps:
                result = found if isinstance(found, Result) else None
                finite, counts = self._give(loop, result, what)
                launched, trained = number == self._sent, set(loop.state.trained)
                self.counted = counts and launched
                fragment = loop.state.fragments[number % len(loop.state.fragments)]
                if launched:
                    self._end_launch(loop, finite)
                if self.counted:
                    loop.commit(fragment.part)
                loop.state.pending = PendingRound(fragment, 0, True, self.counted)
                loop.use(late=loop.overlaps)
                if not launched:  # nothing was trained for that round
                    loop.state.trained = trained
                if counts and loaded:
                    self._forget_trained(loop, fragment)
            elif adopts:
                self._adopt(loop, None if isinstance(found, Result) else found, what, loaded)
            self._reached = loop.state.communications
            if not steps and not adopts:
                return

    def _look(self, loop: OuterLoop, knows: bool) -> Result | Anchor | None:
        search = partial(self._office().missed, loop, knows)
        return self._run(loop, "looking for rounds", search)

    def _look_for_shards(self, loop: OuterLoop, knows: bool, what: str) -> Result | Anchor | None:
        """As ``PostOffice.missed``, on all ranks: the first one says what is to be done."""
        number, patience = loop.state.communications, self._patience()
        awaited = -1  # an anchor that is not whole
        while True:
            look = partial(self._next, loop, knows, awaited, patience)
            kind, newest = self._inside.told(what, *(self._inside.led(look, what) or (0, 0)))
            if kind == Next.ADOPT:
                anchor = self._inside.mailing(partial(self._read_anchor, loop, newest), what)
                if not self._inside.any(what, anchor is None):
                    return anchor
            elif kind == Next.STEP:
                own = digest_before(loop, number % len(loop.state.fragments))
                digest = self._inside.digest(what, own)
                step = partial(self._known_post().step, loop, number, digest)
                try:
                    reads = partial(self._run, loop, "looking for rounds", step)
                    return self._inside.mailing(reads, what)
                except Overtaken:
                    knows = False  # there is a newer anchor
            elif kind == Next.TRAIN or self._begins(loop, what):
                return None
            awaited = max(newest, number)

    def _next(
        self, loop: OuterLoop, knows: bool, awaited: int, patience: Patience
    ) -> tuple[int, int]:
        office, number = self._office(), loop.state.communications

        def look(patience: Patience) -> tuple[int, int]:
            if awaited >= 0:
                office.wait_for_anchor(awaited, patience)
            kind, newest = office.next(number, knows, patience)
            if kind == Next.TRAIN:
                office.begin(loop, patience)
            return int(kind), newest

        return self._run(loop, "looking for rounds", look, patience)

    def _read_anchor(self, loop: OuterLoop, number: int) -> Anchor | None:
        read = partial(self._known_post().anchor, loop, number)
        return self._run(loop, "reading an anchor", read)

    def _begins(self, loop: OuterLoop, what: str) -> bool:
        """Mail the first anchor of a run, on all ranks; False: there is another one."""
        anchor, post = self._anchor_of_shards(loop, what), self._known_post()

        def mail() -> None:
            if self._inside.mails:
                self._run(loop, "mailing an anchor", partial(post.mail, anchor.shard))

        self._inside.mailing(mail, what)

        def first() -> bool:
            begin = partial(self._office().begin_with, anchor)
            return self._run(loop, "mailing an anchor", begin)

        return bool(self._inside.told(what, int(self._inside.led(first, what) or 0))[0])

    def _forget_trained(self, loop: OuterLoop, fragment: Fragment) -> None:
        """The anchor of a fragment has what was trained of it."""
        loop.give_anchor(fragment, late=False)
        loop.state.rank_weights.forget(fragment.part)
        loop.state.trained.discard(fragment.part)

    def _adopt(self, loop: OuterLoop, found: Anchor | None, what: str, loaded: bool) -> None:
        """Go on with anchors of the mailbox; the weights move with them.

        The round under way is gone. Where this island counted in it the anchors have its part.
        """
        weights, first = loop.weights(), loop.state.communications
        before = loop.state.fragments
        counters, last, fragments = found or ({}, {}, [each.copy() for each in before])
        self._inside.broadcast_fragments(fragments, what)
        reached = (counters.get(key, 0) for key in ("rounds", "outer_rounds"))
        own_last = last.get(self._mailbox.island, -1)
        rounds, outer_rounds, last_round = self._inside.told(what, *reached, own_last)
        sent = self._sent % len(fragments) if self._sent >= 0 else None
        counted = sent if last_round == self._sent else None
        for own, taken in zip(before, fragments, strict=True):
            anchors = own.anchors
            own.become(taken)
            if own.part == counted:
                loop.give_anchor(own, late=loop.overlaps)
            else:
                own.follow(weights, anchors)
        # Earlier rounds than the last one in which it counted are not known: most have its part.
        for number in range(first, min(last_round + 1, first + len(before))) if loaded else ():
            self._forget_trained(loop, before[number % len(before)])
        self.counted = counted is not None
        if sent is not None:
            self._end_launch(loop, True)
        if counted is not None:
            loop.state.rank_weights.settle(counted)
            loop.commit(counted)
        elif sent is not None:
            loop.state.trained.add(sent)
        own_counters = loop.state.counters | {
            "communications": rounds,
            "outer_rounds": outer_rounds,
        }
        loop.state.go_on_at(own_counters)

    def _give(self, loop: OuterLoop, result: Result | None, what: str) -> tuple[bool, bool]:
        """Put the mean of a round into the buckets; whether it is finite, and this island in it."""
        buckets = buckets_of(loop, loop.state.communications % len(loop.state.fragments))
        names, own = "that another rank names", (0, 0, 0)
        if result is not None:
            for bucket, mean in zip(buckets, result.means, strict=True):
                bucket.backend_tensor.copy_(mean)
            names = ", ".join(result.broken)
            own = int(result.finite), int(result.counted), len(result.broken)
            names = names or "that another rank names"
        self._inside.broadcast([bucket.backend_tensor for bucket in buckets], what)
        finite, counted, broken = self._inside.told(what, *own)
        if self._inside.shards > 1:
            finite = not self._inside.any(what, not own[0])
            broken = self._inside.any(what, own[2] > 0)
        if result is not None and self._post is not None and finite:
            self._post.count(result.islands, loop.state.communications)
        self.broken = f"island(s) {names}" if broken else ""
        return bool(finite), bool(counted)

    # Control.

    def stats(self) -> dict[str, Any]:
        post = self._post
        return {
            "late_rounds": 0 if post is None else post.late_rounds,
            "sent_bytes": 0 if post is None else post.box.place.sent,
            "received_bytes": 0 if post is None else post.box.place.received,
        }

    def close(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        if not self._last:  # else the process is to end in time while this waits for a storage
            self._sigterm.end()
        of_a_round, of_a_claim = _SECONDS_TO_END
        if self._task is not None:
            self._task.end(self._to_end(of_a_round))
            self._task = None
        if isinstance(self._post, PostOffice):
            self._post.claim.release(self._to_end(of_a_claim))
        self._sigterm.end()

    def _to_end(self, most: float) -> float:
        """Seconds that the end of a thread is waited for."""
        noticed = leaving.noticed() if self._last else None
        if noticed is None:
            return most
        end = noticed + _OF_A_NOTICE * self._mailbox.leave_within
        return min(most, max(0.0, end - time.monotonic()))

    def _known_loop(self) -> OuterLoop:
        loop = self._loop()
        assert loop is not None
        return loop

    def _known_post(self) -> Reader:
        assert self._post is not None
        return self._post

    def _office(self) -> PostOffice:
        """Of the first rank."""
        assert isinstance(self._post, PostOffice)
        return self._post


def _parts(loop: OuterLoop) -> list[str]:
    return [f"bucket {bucket.name}: fragment {bucket.part}" for bucket in loop.buckets]
