"""The loop of local training: rounds at optimizer steps, of pseudo-gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.state.weights_check import WeightsCheck
from bagua._sync.outer.outer_sgd import GrowingMomentum, OuterSGD
from bagua._sync.outer.shares import EqualShares
from bagua._sync.outer.step_attempts import StepAttempts
from bagua._sync.outer.survival import Mortal, Survival
from bagua._sync.outer.weights import Fragment, LocalWeights, OuterNumbers
from bagua._sync.plan import build, finish_soon, part_of_the_round
from bagua._sync.synchronizer import Synchronizer

if TYPE_CHECKING:
    from bagua.torch_api._session import Session
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["Outcomes", "OuterLoop", "Schedule"]


class Schedule:
    """Every fragment once in ``interval`` steps, one after the other, equally far apart.

    Args:
        interval: steps.
        fragments: their number. Fragment f is launched after ``(f + 1) * interval // fragments``
            steps of each cycle.
        overlap: steps from a launch to the arrival of its result.

    Raises:
        ValueError: two fragments would be under way at once.
    """

    def __init__(self, interval: int, fragments: int, overlap: int) -> None:
        offsets = [(f + 1) * interval // fragments for f in range(fragments)]
        gaps = [b - a for a, b in zip([0, *offsets], offsets, strict=False)]
        if min(gaps) < 1:
            raise ValueError(
                f"fragments={fragments} of which one is averaged after another need an interval of "
                f"as many steps, not interval={interval}"
            )
        if overlap >= min(gaps):
            raise ValueError(
                f"overlap_steps={overlap} must be below {min(gaps)}, the steps from one fragment "
                f"to the next with interval={interval} and {fragments} fragment(s)"
            )
        self._parts = {offset: part for part, offset in enumerate(offsets)}
        self.interval = interval
        self.fragments = fragments
        self.overlap = overlap

    def launched_after(self, steps: int) -> int | None:
        """The fragment that is launched after so many steps of the cycle, 1 to ``interval``."""
        return self._parts.get(steps)


class Outcomes:
    """Residuals of a fragment change with a round that all ranks have the result of.

    Each operation of a round reports whether its bucket is finite (Note [Memory commits with the
    round] in the C++ core). The fragment is one more part of the round, and reports in
    :meth:`commit`: a round that fails after its last operation changes no residual.
    """

    def __init__(self) -> None:
        self._outcomes: dict[int, _C.RoundOutcome] = {}
        self._committed: dict[int, int] = {}  # the last round, by fragment

    def of(self, part: int) -> _C.RoundOutcome:
        """The outcome that the memories of a fragment's operations share."""
        if part not in self._outcomes:
            self._outcomes[part] = _C.RoundOutcome()
            _C.RoundMemory([], self._outcomes[part])  # joins, and is not needed any more
        return self._outcomes[part]

    def commit(self, part: int) -> None:
        """The last round of a fragment has its result on all ranks. Idempotent."""
        outcome = self._outcomes.get(part)
        if outcome is not None and self._committed.get(part) != outcome.newest:
            self._committed[part] = outcome.newest
            outcome.leave(outcome.newest)


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


class OuterLoop(Synchronizer):
    """Lets ranks train by themselves, and averages what they have learnt every so many steps.

    A step is an attempted one of the last optimizer given to the wrap. Between rounds nothing is
    sent. A round that fails changes neither anchor nor weights.

    Args:
        fragments: parts 0, 1, ... of the plan.
        buffer_buckets: of the last part, for floating buffers.
        rule: the outer optimizer.
        schedule: the steps at which rounds are launched and arrive.
        survival: of failed rounds.
        shares: of the ranks in the mean.
        outcomes: of the fragments' rounds, for residuals.

    Attributes:
        engine: averages the pseudo-gradients.
        communicators: (purpose, communicator) of the engine's lanes, for statistics.
        steps: attempted in the cycle of the schedule.
        communications: rounds that have ended, of checkpoints before included.
        outer_rounds: those that have changed an anchor, of checkpoints before included.
        skipped_rounds: those that were not finite.
        numbers: of the last outer step.
        weights: that train, and their anchors.
    """

    def __init__(
        self,
        ddp: Session,
        fragments: Sequence[Fragment],
        buffer_buckets: Sequence[BaguaBucket],
        *,
        rule: OuterSGD | GrowingMomentum,
        schedule: Schedule,
        survival: Survival | Mortal,
        shares: EqualShares,
        outcomes: Outcomes,
    ) -> None:
        super().__init__()
        connections = ddp.process_group.connections
        name = ddp.bagua_module_name
        plan = build(ddp.bagua_buckets, ddp.process_group, name, connections.next_wrap())
        self.engine = plan.engine
        self.communicators = plan.communicators
        self.non_finite = plan.non_finite
        self.steps = 0
        self.communications = 0
        self.outer_rounds = 0
        self.skipped_rounds = 0
        self.numbers = OuterNumbers(None, None, None, None, None)
        self.weights = LocalWeights(ddp, fragments, buffer_buckets)
        self._rule = rule
        self._schedule = schedule
        self._survival = survival
        self._shares = shares
        self._outcomes = outcomes
        self._connections = connections
        self._name = name
        self._flight: Flight | None = None
        self._missed: int | None = None  # the part whose round was under way at the failure
        self._buckets = list(ddp.bagua_buckets)
        self._bucket_rounds = 0  # launched, of all buckets
        self._trained = False  # since the last round, which was of all fragments
        self._resumption: Resumption | None = None
        self._check = WeightsCheck(env.get_check_weights_every() or 0, name, connections)
        self._attempts = StepAttempts(ddp.bagua_optimizers[-1], self._after_step)

    @property
    def fragments(self) -> list[Fragment]:
        """The parts of the plan."""
        return self.weights.fragments

    # One step, in the order in which things happen.

    def step_begins(self, grad_scale: float = 1.0, result_scale: float = 1.0) -> bool:
        """A forward that trains begins; no round does."""
        self.weights.refuse_inside_anchor("a training forward")
        self._resume()
        return False

    def _after_step(self) -> None:
        self.weights.refuse_inside_anchor("optimizer.step()")
        self.steps += 1
        self._trained = True
        self._try(self._arrive_and_launch)
        if self.steps == self._schedule.interval:
            self.steps = 0

    def _try(self, rounds: Callable[[], None]) -> None:
        """Make rounds, whose failure is an error unless it can be survived."""
        failure = self._survival.failure
        if failure is not None and self._schedule.launched_after(self.steps) is not None:
            raise failure  # and no training forward has come to replace the plan
        self._survival.attempt(rounds)

    def _arrive_and_launch(self) -> None:
        """Use the result and launch the round that are due after a step."""
        if self._flight is not None:
            self._flight.due -= 1
            if self._flight.due == 0:
                self._arrive(late=True)
        overlap = self._schedule.overlap
        part = self._schedule.launched_after(self.steps)
        if part is not None:
            self._launch(self.fragments[part], overlap)
            if overlap == 0:
                self._arrive(late=False)

    def _launch(self, fragment: Fragment, due: int) -> None:
        """All ranks call it for the same rounds."""
        self.engine.begin_round(part=fragment.part)
        self._compare_anchors()
        self.weights.launch(fragment)
        with part_of_the_round(self.engine):
            self._shares.weigh(fragment)
        self.engine.mark_all()
        self._survival.meet(self.engine)
        self._bucket_rounds += sum(bucket.part == fragment.part for bucket in self._buckets)
        self._flight = Flight(fragment, due)
        self._trained = len(self.fragments) > 1

    def _arrive(self, *, late: bool) -> None:
        """Wait for the flight and use its result. ``late``: steps were made since its launch."""
        assert self._flight is not None
        self._land()
        # Nothing has changed so far: what fails before leaves weights and anchors as they were.
        fragment, self._flight = self._flight.fragment, None
        self.communications += 1
        self._shares.settle(fragment.part)
        numbers = fragment.arrive(self._rule)
        if numbers is None:
            self.skipped_rounds += 1
            self.weights.restart_non_finite(self.engine)
        else:
            self.numbers = numbers
            self.outer_rounds += 1
            if late:
                fragment.merge(self.weights.named())
            else:
                fragment.take_anchor(self.weights.named())
        self.weights.share_buffers(fragment, self.engine)

    def _land(self) -> None:
        """Wait until all ranks have the result of the round under way, if there is one."""
        self.engine.wait()
        if self._flight is None or self._flight.landed:
            return
        self._survival.met(self.engine)
        self._flight.landed = True
        self._outcomes.commit(self._flight.fragment.part)

    def _compare_anchors(self) -> None:
        if self._check.due():
            self.engine.await_agreement()
            with part_of_the_round(self.engine):
                self._check.compare(self.weights.named_anchors(), self.outer_rounds)

    def wait(self) -> None:
        """Block until the engine is done; raise a failure of it."""
        self.engine.wait()

    # Control.

    def sync(self) -> None:
        """A round of all fragments now, unless no rank has made a step since one. All call it."""
        self.weights.refuse_inside_anchor("sync()")
        self._try(self._sync)

    def _sync(self) -> None:
        self._resume()
        if self._flight is not None:
            self._arrive(late=True)
        trained = int(self._trained)
        (trained,) = self._connections.reduce_numbers("sync()", _C.ReduceOp.MAX, trained)
        for fragment in self.fragments if trained else ():
            self._launch(fragment, 0)
            self._arrive(late=False)
        self.weights.take_anchors()
        self._trained = False
        self.steps = 0

    def anchor(self) -> AbstractContextManager[None]:
        """Inside it the weights are the anchor's; afterwards they are this rank's, to the bit."""
        self.weights.refuse_inside_anchor("anchor()")
        return self.weights.swapped()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside it no weights change: between steps nothing here touches them.

        Raises:
            BaguaError: the device has failed at what earlier rounds gave it.
        """
        self.engine.settle()
        yield

    def stats(self) -> dict[str, Any]:
        """The engine's, and ``outer``: of the last outer step."""
        return {
            **self.engine.stats(),
            "outer": {
                "rounds": self.outer_rounds,
                "skipped_rounds": self.skipped_rounds,
                "steps": self.steps,
                **asdict(self.numbers),
            },
        }

    def end_together(self) -> None:
        """Use the result of a flight, before another plan takes over."""
        if self._flight is not None:
            self._arrive(late=True)

    def close(self) -> None:
        """Count no more steps and stop the threads. Idempotent.

        A round under way is given some seconds: other ranks may wait for this rank's part of it.
        """
        self._attempts.close()
        if self._flight is not None:
            with suppress(_C.BaguaError):  # this rank or another has failed, and raised that
                finish_soon(self.engine, self._bucket_rounds)
            self._flight = None
        self.engine.stop()

    # State.

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of what is equal on all ranks; writes into the tensors take effect.

        Waits for a round under way, whose result is saved as it is: using it early would make the
        training depend on being saved.
        """
        yield from self.weights.named_outer_state()
        if self._schedule.overlap > 0:
            self._land()
            yield from self.weights.named_means()

    def named_own_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of what is this rank's; writes into the tensors take effect."""
        yield from self.weights.named_own_state()
        yield from self._shares.named_state()

    @property
    def counters(self) -> dict[str, int]:
        """Numbers equal on all ranks, for a checkpoint."""
        flight = self._flight
        return {
            "steps": self.steps,
            "outer_rounds": self.outer_rounds,
            "communications": self.communications,
            "trained": int(self._trained),
            "in_flight": 0 if flight is None else flight.fragment.part + 1,
            "due": 0 if flight is None else flight.due,
        }

    # Another plan of the same rounds, with other ranks: Note [Elastic rounds].

    def report(self) -> dict[str, int]:
        """Counters for other ranks after a failed round, or before ranks join."""
        self._missed = None if self._flight is None else self._flight.fragment.part
        failed = self._survival.failure is not None
        return self.counters | {"trained": int(self._trained or failed)}

    def take_over(self, before: OuterLoop) -> None:
        """Take this rank's state from the plan before."""
        self.weights.take_over(before.weights)
        self._shares.take_over(before._shares)
        self.skipped_rounds = before.skipped_rounds
        self.numbers = before.numbers
        self._resumption = before._resumption

    def use_result_of(self, before: OuterLoop, changed: int) -> None:
        """Use the anchor of a round that failed here, after other ranks had made it.

        ``changed``: rounds that have changed the anchor on those.
        """
        if before._missed is None or changed == before.outer_rounds:
            return
        fragment = self.fragments[before._missed]
        before._outcomes.commit(fragment.part)
        self._shares.settle(fragment.part)
        if self._schedule.overlap > 0:
            fragment.merge(self.weights.named())
        else:
            fragment.take_anchor(self.weights.named())

    def go_on_at(self, counters: dict[str, int]) -> None:
        """Count from there. No round is under way."""
        self.steps, self.outer_rounds = counters["steps"], counters["outer_rounds"]
        self.communications = counters["communications"]
        self._trained = bool(counters["trained"])

    def digest(self) -> int | None:
        """A hash of this rank's weights, by which a load knows them again."""
        if self._resumption is not None:
            return self._resumption.digest
        return self.weights.digest()

    def resume_at(self, counters: dict[str, int], digest: int | None) -> None:
        """All tensors have been loaded, from a state with those ``counters``.

        Ranks whose weights are those of that state, which have the ``digest``, go on from there. A
        rank without them takes the anchor's. Should there be one, all do, in the next training
        forward, and a result in flight is used at once.
        """
        self.steps, self.outer_rounds = counters["steps"], counters["outer_rounds"]
        self.communications = counters["communications"]
        self._trained = bool(counters["trained"])
        part, self._flight = counters["in_flight"] - 1, None
        if part >= 0:
            self._flight = Flight(self.fragments[part], counters["due"], landed=True)
        if digest is None or self.weights.digest() != digest:
            self.weights.take_anchors()
        self._resumption = Resumption(digest)

    def _resume(self) -> None:
        resumption, self._resumption = self._resumption, None
        if resumption is None:
            return
        found = int(self.weights.digest() == resumption.digest)
        (all_found,) = self._connections.reduce_numbers(
            "comparing the weights with those of the checkpoint", _C.ReduceOp.MIN, found
        )
        if all_found:
            return
        if self._flight is not None:
            self._arrive(late=True)
        self.weights.take_anchors()
        self._trained = False
        self.steps = 0
