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

An island that is not in the manifest makes the step too, and its weights move with the anchors:
what it has trained is in its next pseudo-gradient. Before a launch, and when it begins, an island
makes the steps of all rounds that were decided without it, or takes a newer anchor where their
files are gone. The first island of all mails its anchors, and the others begin with them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from bagua import _C
from bagua._core.group.grace import Grace
from bagua._core.group.process_group import BaguaProcessGroup, close_at_exit
from bagua._core.group.warn import warn_here
from bagua._core.state.ledger import Page
from bagua._ops import operations
from bagua._ops.operations import Operation
from bagua._outer.loop import OuterLoop, PendingRound, digest_of
from bagua._outer.mailbox import Mailbox, letters
from bagua._outer.mailbox.box import Box, Received
from bagua._outer.mailbox.claims import Claim, Lives
from bagua._outer.mailbox.letters import Contribution, Manifest
from bagua._outer.mailbox.patience import Job, Patience
from bagua._outer.mailbox.store import place_at
from bagua._outer.strategies import FixedRanks, RankWeights
from bagua._sync.engine import describe

if TYPE_CHECKING:
    from bagua._outer.loop import Fragment
    from bagua.torch_api.bucket import BaguaBucket

Value = TypeVar("Value")

_MAILED = "Mailed"  # name of the operation of buckets of weights
_RESIDUAL, _COMMUNICATIONS = 0, 1  # in the memory of a page
_MOST_TRIES = 4  # of a fragment's round in sync()
_SECONDS_TO_END = 5.0  # of what the thread is at when the module is closed

_log = logging.getLogger("bagua")


class Overtaken(_C.BaguaError):
    """The files of the round under way are gone: the others are further, and have an anchor."""


class MailboxRanks(FixedRanks):
    """An island's part in the rounds of a mailbox: Note [Rounds of a mailbox].

    ``plan``: arguments that all islands must share, besides their buckets.
    """

    def __init__(
        self, group: BaguaProcessGroup, mailbox: Mailbox, warmup_steps: int, plan: str
    ) -> None:
        if group.size > 1 or group.island is not None:
            raise ValueError(
                f"Mailbox: island '{mailbox.island}' has {group.size} ranks in its process group, "
                "and is one process yet. Start each island by itself, or connect islands of "
                "several ranks with connect_islands()."
            )
        if warmup_steps > 0:
            raise ValueError(
                f"Mailbox: warmup_steps={warmup_steps} exchanges gradients in each step, which "
                "islands cannot. Leave it out: islands begin with the weights of the first one."
            )
        self._mailbox, self._plan = mailbox, plan
        self._timeout = group.timeout.total_seconds()
        self._stop = threading.Event()
        self._box: Box | None = None
        self._claim: Claim | None = None
        self._lives: Lives | None = None
        self._loop: Callable[[], OuterLoop | None] = lambda: None
        self._job: Job[_Result] | None = None  # of the round under way
        self._launches = 0
        self._reached = -1  # rounds that are behind the anchors here, as the mailbox has them
        self._decided = -1  # the last round whose manifest this island wrote
        self._late_rounds = 0
        self._told_late: set[str] = set()
        close_at_exit(self)

    # The plan.

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
        return replace(alone, name=_MAILED, arguments=arguments, page=page, of_divided=None)

    def begin(self, loop: OuterLoop) -> None:
        self._loop = weakref.ref(loop)
        if self._box is None:
            self._box = self._enter(loop)
        self._reached = -1
        self._catch_up(loop)

    def _enter(self, loop: OuterLoop) -> Box:
        """Begin or join the run, under this island's name."""
        own = self._mailbox
        place = place_at(own.url, own.island)
        bodies = [0] * len(loop.state.fragments)
        for bucket in loop.buckets:
            bodies[bucket.part] += _body_bytes(bucket)
        box = Box(place, own.secret, bodies)
        plan = [self._plan, *describe(loop.buckets)]
        plan += [f"bucket {bucket.name}: fragment {bucket.part}" for bucket in loop.buckets]

        def enter(patience: Patience) -> Claim:
            patience.repeat("opening the run", lambda: box.open_run(plan))
            claim = Claim(place, box.run, own.secret, own.island)
            claim.take(patience)
            return claim

        self._claim = self._run(loop, box, "entering", enter)
        weakref.finalize(self, self._claim.end)
        self._lives = Lives(place, box.run, own.secret)
        return box

    def _run(
        self, loop: OuterLoop, box: Box, what: str, function: Callable[[Patience], Value]
    ) -> Value:
        """Have a thread do it, and wait for that."""
        patience = Patience(box.place, self._timeout, self._stop)
        return Job(function, patience).result(f"{self._who(loop)}, {what},")

    def _who(self, loop: OuterLoop) -> str:
        return f"module '{loop.name}': island '{self._mailbox.island}'"

    # A round.

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
        if type(loop.state.rank_weights) is RankWeights:  # the others may wait for this island
            missing = {fragment.part for fragment in every}
        for _ in range(_MOST_TRIES * len(every)):
            if not missing:
                return
            self._catch_up(loop)
            fragment = every[loop.state.communications % len(every)]
            yield fragment
            if self.counted:
                missing.discard(fragment.part)

    def attempt(self, rounds: Callable[[], None], *, due: bool) -> None:
        try:
            rounds()
        except Overtaken:
            loop = self._known_loop()
            loop.state.pending = None
            self._catch_up(loop)

    def confirm(self, engine: _C.Engine) -> None:
        """Mail the pseudo-gradients of the fragment that is due."""
        engine.wait()  # for a group of one rank: they lie in the buckets
        loop, box = self._known_loop(), self._known_box()
        assert self._claim is not None
        self._claim.check()
        number = loop.state.communications
        part = number % len(loop.state.fragments)
        own = Contribution(
            run=box.run,
            island=self._mailbox.island,
            round=number,
            part=part,
            anchor=_digest(loop, part),
            weight=loop.state.rank_weights.weight(part),
        )
        letter = box.new_contribution(own)
        body, begin = letters.body_of(letter), 0
        for bucket in _buckets(loop, part):
            end = begin + _body_bytes(bucket)
            _encode(bucket, body[begin:end])
            begin = end
        self._launches += 1
        patience = Patience(box.place, self._timeout, self._stop)
        self._job = Job(lambda p: self._exchange(loop, box, own, letter, p), patience)

    def receive(self, engine: _C.Engine) -> None:
        """Wait for the mean of the round under way, and put it into the buckets."""
        loop = self._known_loop()
        job, self._job = self._job, None
        if job is None:  # it was received, and what came after has failed
            raise _C.BaguaError(f"{self._who(loop)}: the round under way has failed before")
        number = loop.state.communications
        result = job.result(f"{self._who(loop)}, in outer round {number + 1},")
        finite = _give(loop, result)
        for bucket in _buckets(loop, result.part):
            if (page := bucket.ops[0].page) is not None:
                page.memory.leave(self._launches, finite)
        self.counted, self._reached = result.counted, number + 1

    def _exchange(
        self,
        loop: OuterLoop,
        box: Box,
        own: Contribution,
        letter: bytearray,
        patience: Patience,
    ) -> _Result:
        """On a thread: mail a contribution, wait for the manifest, and return the means."""
        mine = patience.repeat("mailing a contribution", lambda: box.contribute(own, letter))
        if self._decided == own.round - 1 >= 0:
            self._mail_anchor(loop, box, patience)
        arrived = {own.island: mine}
        manifest = self._agreed(box, own, arrived, patience)
        if manifest.anchor != own.anchor:
            raise self._differs(box, own.round, [each.island for each in manifest.counted])
        counted = mine.counted in manifest.counted
        self._note(loop, manifest, counted)
        return self._means(loop, box, manifest, arrived, patience)._replace(counted=counted)

    def _agreed(
        self, box: Box, own: Contribution, arrived: dict[str, Received], patience: Patience
    ) -> Manifest:
        """The manifest of a round, which this island may write."""
        grace = Grace(self._mailbox.quorum, self._mailbox.grace)
        while True:
            found = patience.repeat("looking for a manifest", lambda: box.manifest(own.round))
            if isinstance(found, Manifest):
                return found
            there = self._arrivals(box, own, arrived, patience)
            expected = self._expected(box, arrived, patience)
            over = grace.over(len(arrived), len(expected))
            enough = len(arrived) >= self._mailbox.quorum and over and found >= 0
            if enough and self._decide(box, own, arrived, found, patience):
                continue
            if not there and self._newest(box, patience) > own.round:
                raise Overtaken(f"mailbox {box.place.url}: round {own.round} is gone")
            patience.doing = (
                f"outer round {own.round + 1} has {', '.join(sorted(arrived))}, needs "
                f"{self._mailbox.quorum} island(s), expects {', '.join(sorted(expected)) or 'none'}"
            )
            if patience.over:
                raise _C.BaguaTimeoutError(
                    f"mailbox {box.place.url}: {patience.doing}, and {self._timeout:g} s are over. "
                    "Start the others, or allow fewer by quorum=."
                )
            patience.pause()

    def _arrivals(
        self, box: Box, own: Contribution, arrived: dict[str, Received], patience: Patience
    ) -> bool:
        """Fetch contributions that have come; whether the own one is there."""
        names = patience.repeat("looking for contributions", lambda: box.contributions(own.round))
        for island, files in list(names.items())[: letters.MOST_ISLANDS]:
            for name in files if island not in arrived else ():
                read = partial(box.contribution, own.round, own.part, name)
                received = patience.repeat(f"reading {name}", read)
                if received is not None:
                    arrived[island] = received
                    break
        return own.island in names

    def _expected(self, box: Box, arrived: dict[str, Received], patience: Patience) -> set[str]:
        """Islands that live and have not come."""
        assert self._lives is not None
        patience.repeat("looking for islands", self._lives.look)
        return self._lives.alive() - arrived.keys()

    def _decide(
        self,
        box: Box,
        own: Contribution,
        arrived: dict[str, Received],
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
        if len(islands) < self._mailbox.quorum or not any(
            arrived[i].counted.weight for i in islands
        ):
            return False
        if anchor != own.anchor:
            raise self._differs(box, own.round, islands)
        counted = [arrived[island].counted for island in islands]
        manifest = Manifest(box.run, own.round, own.part, anchor, own.island, counted)
        if patience.repeat("writing a manifest", lambda: box.decide(manifest, attempt)):
            self._decided = own.round
        return True

    def _differs(self, box: Box, number: int, islands: list[str]) -> _C.BaguaError:
        return _C.BaguaMismatchError(
            f"mailbox {box.place.url}: the anchor of island '{self._mailbox.island}' before outer "
            f"round {number + 1} differs from that of {', '.join(islands)}. Start it again "
            "without a checkpoint: it begins with the last anchor of the mailbox."
        )

    def _note(self, loop: OuterLoop, manifest: Manifest, counted: bool) -> None:
        """Tell who was late."""
        assert self._lives is not None
        islands = {each.island for each in manifest.counted}
        late = (self._lives.alive() | {self._mailbox.island}) - islands
        self._late_rounds += not counted
        if late:
            text = (
                f"{self._who(loop)}: island(s) {', '.join(sorted(late))} did not come in time to "
                f"outer round {manifest.round + 1}, {', '.join(sorted(islands))} go on"
            )
            if not late <= self._told_late:
                self._told_late |= late
                warn_here(f"{text}. Later times are logged.")
            _log.info(text)

    def _means(
        self,
        loop: OuterLoop,
        box: Box,
        manifest: Manifest,
        arrived: dict[str, Received],
        patience: Patience,
    ) -> _Result:
        """The mean of the contributions of a manifest."""
        bodies = [
            self._body(box, manifest, each, arrived.get(each.island), patience)
            for each in manifest.counted
        ]
        exact = [Fraction(each.weight) for each in manifest.counted]
        shares = [float(weight / sum(exact)) for weight in exact]
        alike = [1.0 / len(bodies)] * len(bodies)
        means, begin = [], 0
        for bucket in _buckets(loop, manifest.part):
            end = begin + _body_bytes(bucket)
            weights = shares if bucket.ops[0].name == _MAILED else alike
            means.append(_mean(bucket, [body[begin:end] for body in bodies], weights))
            begin = end
        return _Result(manifest.part, means, counted=False)

    def _body(
        self,
        box: Box,
        manifest: Manifest,
        counted: letters.Counted,
        arrived: Received | None,
        patience: Patience,
    ) -> memoryview:
        """A contribution that counts."""
        while arrived is None or arrived.counted != counted:
            read = partial(box.contribution, manifest.round, manifest.part, counted.name)
            arrived = patience.repeat(f"reading {counted.name}", read)
            if arrived is not None and arrived.counted == counted:
                break
            if self._newest(box, patience) > manifest.round:
                raise Overtaken(f"mailbox {box.place.url}: round {manifest.round} is gone")
            patience.doing = f"{counted.name} of outer round {manifest.round + 1}, which counts"
            if patience.over:
                raise _C.BaguaTimeoutError(
                    f"mailbox {box.place.url}: {patience.doing}, cannot be read, and "
                    f"{self._timeout:g} s are over. Start this island again."
                )
            patience.pause()
        return arrived.body

    # Anchors.

    def _mail_anchor(self, loop: OuterLoop, box: Box, patience: Patience) -> None:
        """Mail the anchors where it is time, and remove what is old."""
        state = loop.state
        if self._newest(box, patience) > state.communications - self._mailbox.keep:
            return
        self._put_anchor(loop, box, patience)
        patience.repeat("removing old rounds", box.forget)

    def _put_anchor(self, loop: OuterLoop, box: Box, patience: Patience) -> bool:
        """Whether this is the anchor after so many rounds; False: there is another one."""
        state = loop.state
        counters = {"rounds": state.communications, "outer_rounds": state.outer_rounds}
        tensors = {key: tensor.cpu() for key, tensor in state.named().items()}
        return patience.repeat("mailing an anchor", lambda: box.put_anchor(counters, tensors))

    def _newest(self, box: Box, patience: Patience) -> int:
        """Rounds behind the newest anchor; -1: there is none."""
        return max(patience.repeat("looking for anchors", box.anchors), default=-1)

    def _catch_up(self, loop: OuterLoop) -> None:
        """Make the steps of rounds that were decided without this island."""
        box = self._known_box()
        search = partial(self._missed, loop, box)
        while (found := self._run(loop, box, "looking for rounds", search)) is not None:
            if isinstance(found, _Result):
                _give(loop, found)
                self.counted = False
                loop.state.pending = PendingRound(loop.state.fragments[found.part], 0, True)
                loop.use(late=False)
            else:
                self._adopt(loop, *found)
            self._reached = loop.state.communications
        self._reached = loop.state.communications

    def _missed(
        self, loop: OuterLoop, box: Box, patience: Patience
    ) -> _Result | tuple[dict[str, int], list[Fragment]] | None:
        """On a thread: the next step, or newer anchors; None: there is neither."""
        number = loop.state.communications
        knows = number == self._reached  # or it has begun, or loaded a checkpoint
        while True:
            found = patience.repeat("looking for a manifest", partial(box.manifest, number))
            if isinstance(found, Manifest) and knows:
                return self._decided_result(loop, box, found, patience)
            newest = self._newest(box, patience)
            if newest > number or (newest == number and not knows):
                anchor = self._anchor(loop, box, newest, patience)
                if anchor is not None:
                    return anchor
            elif isinstance(found, Manifest):
                return self._decided_result(loop, box, found, patience)
            elif (
                knows
                or self._continues(box, number, patience)
                or self._put_anchor(loop, box, patience)
            ):
                return None
            patience.pause()

    def _decided_result(
        self, loop: OuterLoop, box: Box, manifest: Manifest, patience: Patience
    ) -> _Result | tuple[dict[str, int], list[Fragment]]:
        own = _digest(loop, manifest.part)
        if manifest.anchor != own:
            raise self._differs(box, manifest.round, [each.island for each in manifest.counted])
        try:
            return self._means(loop, box, manifest, {}, patience)
        except Overtaken:
            while True:
                newest = self._newest(box, patience)
                anchor = self._anchor(loop, box, newest, patience)
                if anchor is not None:
                    return anchor
                patience.pause()

    def _continues(self, box: Box, number: int, patience: Patience) -> bool:
        """Whether the mailbox has the round before; otherwise a checkpoint is newer."""
        before = partial(box.manifest, number - 1)
        return number > 0 and isinstance(
            patience.repeat("looking for a manifest", before), Manifest
        )

    def _anchor(
        self, loop: OuterLoop, box: Box, number: int, patience: Patience
    ) -> tuple[dict[str, int], list[Fragment]] | None:
        """(counters, fragments) of an anchor that was mailed; None: not now."""

        def made(tensors: Mapping[str, torch.Tensor]) -> list[Fragment]:
            return [fragment.loaded(tensors) for fragment in loop.state.fragments]

        like = loop.state.named()
        return patience.repeat("reading an anchor", lambda: box.anchor(number, like, made))

    def _adopt(
        self, loop: OuterLoop, counters: Mapping[str, int], fragments: Sequence[Fragment]
    ) -> None:
        """Go on with anchors of the mailbox; the weights move with them."""
        weights = loop.weights()
        for own, taken in zip(loop.state.fragments, fragments, strict=True):
            before = own.anchors
            own.become(taken)
            own.follow(weights, before)
        own_counters = loop.state.counters | {
            "communications": counters["rounds"],
            "outer_rounds": counters["outer_rounds"],
        }
        loop.state.go_on_at(own_counters)

    # Control.

    def stats(self) -> dict[str, Any]:
        if self._box is None:
            return {}
        place = self._box.place
        return {
            "late_rounds": self._late_rounds,
            "sent_bytes": place.sent,
            "received_bytes": place.received,
        }

    def close(self) -> None:
        self._stop.set()
        if self._job is not None:
            self._job.end(_SECONDS_TO_END)
            self._job = None
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _known_loop(self) -> OuterLoop:
        loop = self._loop()
        assert loop is not None
        return loop

    def _known_box(self) -> Box:
        assert self._box is not None
        return self._box


class _Result(NamedTuple):
    """The mean of a round, by bucket of its fragment, on the CPU."""

    part: int
    means: list[torch.Tensor]
    counted: bool


def _give(loop: OuterLoop, result: _Result) -> bool:
    """Put the mean of a round into the buckets; whether all of it is finite."""
    for bucket, mean in zip(_buckets(loop, result.part), result.means, strict=True):
        bucket.backend_tensor.copy_(mean)
    return all(_C.all_finite(mean) for mean in result.means)


def _buckets(loop: OuterLoop, part: int) -> list[BaguaBucket]:
    return [bucket for bucket in loop.buckets if bucket.part == part]


def _digest(loop: OuterLoop, part: int) -> str:
    return f"{digest_of(dict(loop.state.fragments[part].named_state())):016x}"


def _codec_of(bucket: BaguaBucket) -> str | None:
    codec: str | None = bucket.ops[0].arguments.get("codec")
    return codec


def _body_bytes(bucket: BaguaBucket) -> int:
    """Of a bucket in a contribution."""
    flat, codec = bucket.backend_tensor, _codec_of(bucket)
    if codec is None:
        return flat.nbytes
    return _C.make_codec(codec).payload_bytes(torch.float32, flat.numel())


def _encode(bucket: BaguaBucket, place: memoryview) -> None:
    """Write a bucket's contribution, and what its codec loses into the next residual."""
    flat, codec, page = bucket.backend_tensor, _codec_of(bucket), bucket.ops[0].page
    end = flat.numel() - (0 if bucket.padding_tensor is None else bucket.padding_tensor.numel())
    flat[end:].zero_()
    if codec is None:
        letters.put(flat.cpu(), place)
        return
    values = flat.to(torch.float32, copy=True)
    if page is not None:
        values.add_(page.memory.value(_RESIDUAL).to(torch.float32))
    made = _C.make_codec(codec, str(flat.device))
    payload = torch.empty(len(place), dtype=torch.uint8, device=flat.device)
    made.encode_residual(values, 1, payload)
    if page is not None:
        values[end:].zero_()
        count = page.memory.value(_COMMUNICATIONS)
        page.memory.next(_COMMUNICATIONS).copy_(count + 1)
        page.memory.next(_RESIDUAL).copy_(values)
    letters.put(payload.cpu(), place)


def _mean(bucket: BaguaBucket, bodies: list[memoryview], weights: list[float]) -> torch.Tensor:
    """The sum of weight times value, in the order of ``bodies``: equal bits on all processors."""
    flat, codec = bucket.backend_tensor, _codec_of(bucket)
    dtype = flat.dtype if codec is None else torch.float32
    total = torch.zeros(flat.numel(), dtype=dtype, device="cpu")
    made = None if codec is None else _C.make_codec(codec)
    for body, weight in zip(bodies, weights, strict=True):
        if made is None:  # a product and a sum, never joined into one operation
            total.add_(torch.frombuffer(body, dtype=dtype).mul(weight))
        else:
            made.decode_add(torch.frombuffer(body, dtype=torch.uint8), dtype, total, weight)
    return total
