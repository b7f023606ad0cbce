"""The engine of local training: rounds at optimizer steps, of pseudo-gradients."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.state.initial_state import broadcast_tensors
from bagua._core.state.weights_check import WeightsCheck
from bagua._sync.outer.buffer_average import BufferAverage
from bagua._sync.outer.fragment import Fragment, OuterNumbers
from bagua._sync.outer.outer_state import (
    Flight,
    OuterRounds,
    Resumption,
    clear_non_finite,
    ranks_with_non_finite,
    weights_digest,
)
from bagua._sync.outer.step_attempts import StepAttempts
from bagua._sync.plan import build, finish_soon, part_of_the_round
from bagua._sync.wrapper import Bucket, Wrapper

__all__ = ["OuterSynchronizer"]

_STARTS_AGAIN = (
    "The weights of {} hold NaN or infinity: they become the anchor again, and the non-finite "
    "elements of the optimizers' state zero"
)


class OuterSynchronizer:
    """Lets ranks train by themselves, and averages what they have learnt every so many steps.

    A step is an attempted one of the last optimizer given to the wrap. Between rounds nothing is
    sent. A round that fails changes neither anchor nor weights.

    Args:
        fragments: parts 0, 1, ... of the plan.
        buffer_buckets: of the last part, for floating buffers.

    Attributes:
        engine: averages the pseudo-gradients.
        communicators: (purpose, communicator) of the engine's lanes, for statistics.
        steps: attempted in the cycle of the schedule.
        outer_rounds: those that have changed an anchor, of checkpoints before included.
        skipped_rounds: those that were not finite.
        numbers: of the last outer step.
        pairs: whether ranks hold anchors of their own.
    """

    rounds = None  # the ranks' steps are no rounds

    def __init__(
        self,
        ddp: Wrapper,
        fragments: Sequence[Fragment],
        buffer_buckets: Sequence[Bucket],
        arguments: OuterRounds,
    ) -> None:
        connections = ddp.process_group.connections
        name = ddp.bagua_module_name
        plan = build(ddp.bagua_buckets, ddp.process_group, name, connections.next_wrap())
        self.engine = plan.engine
        self.communicators = plan.communicators
        self.non_finite = plan.non_finite
        self.steps = 0
        self.outer_rounds = 0
        self.skipped_rounds = 0
        self.numbers = OuterNumbers(None, None, None)
        self.fragments = list(fragments)
        self._buffers = BufferAverage(buffer_buckets) if buffer_buckets else None
        self.pairs = arguments.pairs
        self._arguments = arguments
        self._connections = connections
        self._name = name
        self._owner = weakref.ref(ddp)
        self._flight: Flight | None = None
        self._missed: int | None = None  # the part whose round was under way at the failure
        self._buckets = list(ddp.bagua_buckets)
        self._bucket_rounds = 0  # launched, of all buckets
        self._trained = False  # since the last round, which was of all fragments
        self._anchored = False  # the weights are swapped for the anchor's
        self._resumption: Resumption | None = None
        every = 0 if arguments.pairs else env.get_check_weights_every() or 0
        self._check = WeightsCheck(every, name, connections)
        self._attempts = StepAttempts(ddp.bagua_optimizers[-1], self._after_step)
        weights = self._weights()
        for fragment in self.fragments:
            fragment.begin(weights)

    def _ddp(self) -> Wrapper:
        ddp = self._owner()
        if ddp is None:
            raise RuntimeError(f"module '{self._name}' has been deleted")
        return ddp

    def _weights(self) -> dict[str, torch.Tensor]:
        return dict(self._ddp().bagua_build_params())

    # One step, in the order in which things happen.

    def step_begins(self, grad_scale: float = 1.0, result_scale: float = 1.0) -> bool:
        """A forward that trains begins; no round does."""
        self._refuse_inside_anchor("a training forward")
        self._resume()
        return False

    def _after_step(self) -> None:
        self._refuse_inside_anchor("optimizer.step()")
        self.steps += 1
        self._trained = True
        self._try(self._arrive_and_launch)
        if self.steps == self._arguments.schedule.interval:
            self.steps = 0

    def _try(self, rounds: Callable[[], None]) -> None:
        """Make rounds, whose failure is an error unless it can be survived."""
        survival, schedule = self._arguments.survival, self._arguments.schedule
        if survival is None:
            return rounds()
        if survival.failure is not None and schedule.launched_after(self.steps) is not None:
            raise survival.failure  # and no training forward has come to replace the plan
        survival.attempt(rounds)

    def _arrive_and_launch(self) -> None:
        """Use the result and launch the round that are due after a step."""
        schedule = self._arguments.schedule
        if self._flight is not None:
            self._flight.due -= 1
            if self._flight.due == 0:
                self._arrive(late=True)
        part = schedule.launched_after(self.steps)
        if part is not None:
            self._launch(self.fragments[part], schedule.overlap)
            if schedule.overlap == 0:
                self._arrive(late=False)

    def _launch(self, fragment: Fragment, due: int) -> None:
        """All ranks call it after equal numbers of steps."""
        self.engine.begin_round(part=fragment.part)
        self._compare_anchors()
        fragment.launch(self._weights())
        if self._arguments.shares is not None:
            with part_of_the_round(self.engine):
                self._arguments.shares.weigh(fragment)
        if self._buffers is not None and fragment is self.fragments[-1]:
            self._buffers.launch(dict(self._ddp().bagua_floating_buffers()))
        self.engine.mark_all()
        if self._arguments.survival is not None:
            self._arguments.survival.meet(self.engine)
        self._bucket_rounds += sum(bucket.part == fragment.part for bucket in self._buckets)
        self._flight = Flight(fragment, due)
        self._trained = len(self.fragments) > 1

    def _arrive(self, *, late: bool) -> None:
        """Wait for the flight and use its result. ``late``: steps were made since its launch."""
        assert self._flight is not None
        self.engine.wait()
        if self._arguments.survival is not None:
            self._arguments.survival.met(self.engine)
        # Nothing has changed so far: what fails before leaves weights and anchors as they were.
        fragment, self._flight = self._flight.fragment, None
        self._arguments.communications.add_(1)
        weights = self._weights()
        shares = self._arguments.shares
        if shares is not None:
            shares.settle(fragment.part)
        left_out = shares is not None and shares.here_left_out(fragment.part)
        numbers = fragment.arrive(self._arguments.rule, self._arguments.clip)
        if shares is not None and shares.all_left_out(fragment.part):
            self.skipped_rounds += 1
        elif numbers is None:
            self._leave_out(weights)
        else:
            self.numbers = numbers
            self.outer_rounds += 1
        if left_out:
            fragment.take_anchor(weights)
            clear_non_finite(self._ddp().bagua_optimizers)
        elif numbers is not None:
            if late:
                fragment.merge(weights, self._arguments.alpha)
            else:
                fragment.take_anchor(weights)
        if self._buffers is not None and fragment is self.fragments[-1]:
            self._share_buffers(dict(self._ddp().bagua_floating_buffers()))

    def _compare_anchors(self) -> None:
        if self._check.due():
            self.engine.await_agreement()
            named = [pair for fragment in self.fragments for pair in fragment.named_anchors()]
            with part_of_the_round(self.engine):
                self._check.compare(named, self.outer_rounds)

    def _share_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        """Give floating buffers their mean, others the lowest rank's."""
        assert self._buffers is not None
        if self.pairs:
            self._buffers.arrive(buffers)
            return
        with part_of_the_round(self.engine):
            if not self._buffers.arrive(buffers):
                own = all(bool(buffer.isfinite().all()) for buffer in buffers.values())
                broken = ranks_with_non_finite(self._connections, not own)
                sound = [rank for rank in range(self._connections.size) if rank not in broken]
                if sound:
                    broadcast_tensors(list(buffers.values()), self._connections, sound[0])
            broadcast_tensors(self._ddp().bagua_whole_buffers(), self._connections)

    def _leave_out(self, weights: dict[str, torch.Tensor]) -> None:
        """After a round that was not finite: find the ranks with NaN, which start anew."""
        self.skipped_rounds += 1
        own = all(bool(x.detach().isfinite().all()) for x in weights.values())
        if self.pairs:
            whose = (
                "The peer's weights hold NaN or infinity"
                if own
                else _STARTS_AGAIN.format("this rank")
            )
        else:
            with part_of_the_round(self.engine):
                broken = ranks_with_non_finite(self._connections, not own)
            whose = "No rank's weights hold NaN or infinity: the sum overflowed"
            if broken:
                whose = _STARTS_AGAIN.format(f"rank(s) {', '.join(map(str, broken))}")
        if not own:
            self._take_anchors(weights)
            clear_non_finite(self._ddp().bagua_optimizers)
        warnings.warn(
            f"module '{self._name}': the average of an outer round is not finite, and changes "
            f"nothing. {whose}. Other ranks keep their weights, for the next round.",
            stacklevel=2,
        )

    def wait(self) -> None:
        """Block until the engine is done; raise a failure of it."""
        self.engine.wait()

    # Control.

    def sync(self) -> None:
        """A round of all fragments now, unless no rank has made a step since one. All call it."""
        self._refuse_inside_anchor("sync()")
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
        self._take_anchors(self._weights())
        self._trained = False
        self.steps = 0

    def _take_anchors(self, weights: dict[str, torch.Tensor]) -> None:
        for fragment in self.fragments:
            fragment.take_anchor(weights)

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Inside it the weights are the anchor's; afterwards they are this rank's, to the bit."""
        self._refuse_inside_anchor("anchor()")
        weights = self._weights()
        own = {name: weight.detach().clone() for name, weight in weights.items()}
        self._take_anchors(weights)
        self._anchored = True
        try:
            yield
        finally:
            self._anchored = False
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(own[name])

    def _refuse_inside_anchor(self, what: str) -> None:
        if self._anchored:
            raise _C.BaguaError(
                f"module '{self._name}': {what} inside anchor(), where the weights are not this "
                "rank's own. Leave the context first."
            )

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
        shares = self._arguments.shares
        return {
            **self.engine.stats(),
            "outer": {
                "rounds": self.outer_rounds,
                "skipped_rounds": self.skipped_rounds,
                "steps": self.steps,
                **asdict(self.numbers),
                **({} if shares is None else {"left_out": shares.left_out}),
            },
        }

    def hook_ids(self) -> list[int]:
        """There are no hooks on the module."""
        return []

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
        if not self.pairs:
            for fragment in self.fragments:
                yield from fragment.named_state()
        if self._arguments.schedule.overlap == 0:
            return
        self.engine.wait()
        for fragment in self.fragments:
            yield from fragment.named_means()
        if self._buffers is not None:
            yield from self._buffers.named_means()

    def named_own_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of what is this rank's; writes into the tensors take effect."""
        for fragment in self.fragments:
            if self.pairs:
                yield from fragment.named_state()
            yield from fragment.named_launched()
        if self._arguments.shares is not None:
            yield from self._arguments.shares.named_state()

    @property
    def counters(self) -> dict[str, int]:
        """Numbers equal on all ranks, for a checkpoint."""
        flight = self._flight
        return {
            "steps": self.steps,
            "outer_rounds": self.outer_rounds,
            "communications": int(self._arguments.communications),
            "trained": int(self._trained),
            "in_flight": 0 if flight is None else flight.fragment.part + 1,
            "due": 0 if flight is None else flight.due,
        }

    # Another plan of the same rounds, with other ranks: Note [Elastic rounds].

    def report(self) -> dict[str, int]:
        """Counters for other ranks after a failed round, or before ranks join."""
        self._missed = None if self._flight is None else self._flight.fragment.part
        failed = self._arguments.survival is not None and self._arguments.survival.failure
        return self.counters | {"trained": int(self._trained or bool(failed))}

    def named_outer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of anchors and momenta; writes into the tensors take effect."""
        for fragment in self.fragments:
            yield from fragment.named_state()

    def take_over(self, before: OuterSynchronizer) -> None:
        """Take this rank's state from the plan before."""
        for mine, theirs in zip(self.fragments, before.fragments, strict=True):
            mine.take_over(theirs)
        if self._arguments.shares is not None and before._arguments.shares is not None:
            self._arguments.shares.take_over(before._arguments.shares)
        self.skipped_rounds = before.skipped_rounds
        self.numbers = before.numbers
        self._resumption = before._resumption

    def begin_at_the_anchor(self) -> None:
        """The weights become those of the anchor."""
        self._take_anchors(self._weights())

    def use_result_of(self, before: OuterSynchronizer, changed: int) -> None:
        """Use the anchor of a round that failed here, after other ranks had made it.

        ``changed``: rounds that have changed the anchor on those.
        """
        if before._missed is None or changed == before.outer_rounds:
            return
        fragment = self.fragments[before._missed]
        if self._arguments.shares is not None:
            self._arguments.shares.settle(fragment.part)
        if self._arguments.schedule.overlap > 0:
            fragment.merge(self._weights(), self._arguments.alpha)
        else:
            fragment.take_anchor(self._weights())

    def go_on_at(self, counters: dict[str, int]) -> None:
        """Count from there. No round is under way."""
        self.steps, self.outer_rounds = counters["steps"], counters["outer_rounds"]
        self._arguments.communications.fill_(counters["communications"])
        self._trained = bool(counters["trained"])

    def digest(self) -> int | None:
        """A hash of this rank's weights, by which a load knows them again."""
        if self._resumption is not None:
            return self._resumption.digest
        return weights_digest(self._weights())

    def resume_at(self, counters: dict[str, int], digest: int | None) -> None:
        """All tensors have been loaded, from a state with those ``counters``.

        Ranks whose weights are those of that state, which have the ``digest``, go on from there. A
        rank without them takes the anchor's. Should there be one, all do, in the next training
        forward, and a result in flight is used at once.
        """
        self.steps, self.outer_rounds = counters["steps"], counters["outer_rounds"]
        self._arguments.communications.fill_(counters["communications"])
        self._trained = bool(counters["trained"])
        part, self._flight = counters["in_flight"] - 1, None
        if part >= 0:
            self._flight = Flight(self.fragments[part], counters["due"])
        weights = self._weights()
        if digest is None or weights_digest(weights) != digest:
            self._take_anchors(weights)
        self._resumption = Resumption(digest)

    def _resume(self) -> None:
        resumption, self._resumption = self._resumption, None
        if resumption is None:
            return
        weights = self._weights()
        found = int(weights_digest(weights) == resumption.digest)
        (all_found,) = self._connections.reduce_numbers(
            "comparing the weights with those of the checkpoint", _C.ReduceOp.MIN, found
        )
        if all_found:
            return
        if self._flight is not None:
            self._arrive(late=True)
        self._take_anchors(weights)
        self._trained = False
        self.steps = 0
