"""Local training: DiLoCo (Douillard et al., 2023), in fragments or as a whole.

With x the weights of a rank, a the anchor, which is equal on all ranks, and s(a) the anchor rounded
to the dtype of the weights:

1. Each rank makes some steps on x. Nothing is sent.
2. D_i = s(a) - x, the pseudo-gradient of rank i.
3. D = mean of the D_i.
4. The outer optimizer steps on a, with the gradient D.
5. x = s(a); or x + (s(a) - x of step 2), where steps were made while D travelled.

It acts on tensors of this rank and on a group: what is inside (one process, a sharded or a parallel
module) is not seen here. What is optional is a strategy that the loop is given: ``strategies.py``,
``elastic.py``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.group.warn import warn
from bagua._core.state.entries import PLAIN_DTYPES, tensors_in
from bagua._core.state.initial_state import broadcast_state
from bagua._core.state.ledger import Commit
from bagua._core.state.saved_values import copied, digest, saved_tensor
from bagua._core.state.shards import local
from bagua._core.state.untrained import share_untrained
from bagua._outer.optimizer import (
    NO_FIGURES,
    InnerProduct,
    OuterOptimizer,
    figures,
    made,
    state_of,
)
from bagua._outer.strategies import FixedRanks, RankWeights
from bagua._sync.engine import build, finish_soon, part_of_the_round
from bagua._sync.optimizer_steps import StepAttempts, only_makes_state
from bagua._sync.synchronizer import Synchronizer

if TYPE_CHECKING:
    from bagua._core.group.connections import Connections
    from bagua.torch_api.bucket import BaguaBucket

REMEDY = "the checkpoint is of another model or algorithm"
_STARTS_AGAIN = (
    "The weights of {} hold NaN or infinity: they are reset to the anchor, and the non-finite "
    "elements of the optimizers' state to zero"
)


class OuterLoop(Synchronizer):
    """Averages the weight changes of ranks that train locally, every so many steps.

    A step is an attempted one of the last optimizer. Between rounds nothing is sent. A round that
    fails changes neither anchor nor weights.

    Args:
        local: the tensors of this rank.
        group: averages them.
        buckets: memory of the pseudo-gradients of each part, and with the last part of buffers
            that have a mean, which are not views of them.
        state: to begin or go on with.
        schedule: the steps at which rounds are launched and used.
        ranks: decides on lost ranks.
        commits: of the fragments' rounds, for residuals: a round that fails changes none.

    Attributes:
        engine: averages the pseudo-gradients.
        name: of the module; ``weights`` returns its weights by name.
        buckets: as given; so is ``schedule``.
    """

    def __init__(
        self,
        local: LocalTensors,
        group: BaguaProcessGroup,
        buckets: Sequence[BaguaBucket],
        state: OuterState,
        schedule: Schedule,
        *,
        ranks: FixedRanks,
        commits: Sequence[Commit],
    ) -> None:
        super().__init__()
        self._connections = group.connections
        plan = build(buckets, group, local.name, agrees_next=ranks.agrees)
        self.engine = plan.engine
        self.communicators, self.lanes = plan.communicators, plan.lanes
        self.state = state
        self._anchored = False
        self.name, self.weights = local.name, local.weights
        self._local = local
        self.schedule = schedule
        self._ranks = ranks
        self._commits = commits
        named = [dict(bucket.named_views()) for bucket in buckets]
        self._means = {name: view for views in named for name, view in views.items()}
        weights = {name for fragment in state.fragments for name in fragment.names}
        self._buffers = {name: v for name, v in self._means.items() if name not in weights}
        self.buckets = list(buckets)
        self._bucket_rounds = 0  # launched, of all buckets
        self._attempts = StepAttempts(local.optimizers[-1], self._after_step)

    # A round: the steps above, in the order in which they happen.

    def _after_step(self) -> None:
        """1. This rank has made a step: use the result and launch the round that are due."""
        self.state.steps += 1
        self.state.rank_weights.step()
        self.state.train_all()
        self._attempt(self._make_rounds)
        if self.state.steps == self.schedule.interval:
            self.state.steps = 0

    def _make_rounds(self) -> None:
        if self.state.result_due():
            self.use(late=True)
        part = self.schedule.launched_after(self.state.steps)
        if part is not None and self._ranks.gathered(part):
            self._round(part)

    def _round(self, part: int) -> None:
        self._launch(self.state.fragments[part], self.schedule.overlap)
        if not self.overlaps:
            self.use(late=False)

    def _launch(self, fragment: Fragment, due: int) -> None:
        """2. Send the pseudo-gradients of a fragment. All ranks call it for the same rounds."""
        samples = self.state.rank_weights.launch(fragment.part, self._local.name)
        intervals = self.state.rank_weights.intervals(fragment.part)
        fragment.launch(self._local.weights(), self._means, intervals)
        if self._is_last(fragment):
            _copy(self._local.mean_buffers(), self._buffers)
        with self._ranks.held():
            self.engine.begin_round(part=fragment.part, samples=samples)
            self.engine.mark_all()
            self._ranks.confirm(self.engine)
        self._bucket_rounds += sum(bucket.part == fragment.part for bucket in self.buckets)
        self.state.begin_round(fragment, due)

    def _receive(self) -> None:
        """3. Wait until all ranks have the mean of the round under way, if there is one."""
        pending = self.state.pending
        if pending is not None and not pending.received:
            self._ranks.receive(self.engine)
            pending.received, pending.counted = True, self._ranks.counted
            if pending.counted:
                self.commit(pending.fragment.part)

    def use(self, *, late: bool) -> None:
        """4. Step with the mean of the round under way. ``late``: steps were made meanwhile."""
        self._receive()
        # Nothing has changed so far: what fails before leaves weights and anchors unchanged.
        fragment, counted = self.state.end_round()
        norm = math.sqrt(fragment.squared_norm(self._means))
        if math.isfinite(norm):
            before = [] if counted else copied(fragment.anchors)
            self.state.count_step(norm, fragment, fragment.step(self._means))
            if counted:
                self.give_anchor(fragment, late=late)
            else:
                fragment.follow(self._local.weights(), before)
        else:
            self.state.skipped_rounds += 1
            with self._ranks.held():
                self._restart_non_finite(fragment)
        if self._is_last(fragment):
            with self._ranks.held():
                self._share_untrained()

    def give_anchor(self, fragment: Fragment, *, late: bool) -> None:
        """5. Give the weights the new anchor. ``late``: and what they have changed meanwhile."""
        weights = self._local.weights()
        if late:
            fragment.merge(weights)
        else:
            fragment.take_anchor(weights)

    # Parts of a round.

    @property
    def overlaps(self) -> bool:
        return self.schedule.overlap > 0

    def _attempt(self, rounds: Callable[[], None]) -> None:
        due = self.schedule.launched_after(self.state.steps) is not None
        self._ranks.attempt(rounds, due=due)

    def _is_last(self, fragment: Fragment) -> bool:
        return fragment.part == len(self.state.fragments) - 1

    def commit(self, part: int) -> None:
        self._commits[part].commit()

    def _restart_non_finite(self, fragment: Fragment) -> None:
        for bucket in self.buckets:
            if bucket.part == fragment.part and not self._buffers.keys() & _names(bucket):
                bucket.backend_tensor.zero_()  # the padding too, which no launch writes
        own = self._local.all_true(_all_finite(self._local.weights().values()))
        broken = self._ranks.broken
        if broken is None:
            ranks = self._ranks_with_non_finite(not own)
            broken = f"rank(s) {', '.join(map(str, ranks))}" if ranks else ""
        whose = "No rank's weights hold NaN or infinity: the sum overflowed"
        if broken:
            whose = _STARTS_AGAIN.format(broken)
        if not own:
            self.begin_at_anchors()
            _clear_non_finite(self._local.optimizers)
        warn(
            f"module '{self._local.name}': the average of an outer round is not finite, and "
            f"changes nothing. {whose}. Others keep their weights, for the next round."
        )

    def _ranks_with_non_finite(self, here: bool) -> list[int]:
        flags = self._gather("looking for ranks with NaN or infinity", int(here))
        return [rank for rank, flag in enumerate(flags) if flag]

    def _gather(self, what: str, number: int) -> list[int]:
        """All ranks' numbers. All call it; ``what`` they do is for errors."""
        with part_of_the_round(self.engine):
            return self._connections.gather_numbers(what, number)

    def _share_untrained(self) -> None:
        """Give buffers their mean or the lowest rank's values, and frozen weights their mean."""
        buffers = self._local.mean_buffers()
        means = [(buffers[name], mean) for name, mean in self._buffers.items()]
        others, frozen = self._local.other_buffers(), self._local.frozen()
        if means or others or frozen:
            with part_of_the_round(self.engine):
                share_untrained(means, others, frozen, self._connections)

    # Control.

    def step_begins(
        self, grad_scale: float = 1.0, result_scale: float = 1.0, samples: float | None = None
    ) -> bool:
        self._refuse_inside_anchor("a training forward")
        self._attempts.forward()
        self._resume()
        if samples is not None:
            self.state.rank_weights.count(samples)
        return False

    def wait(self) -> None:
        self.engine.wait()

    def sync(self) -> None:
        """A round now of each fragment that a rank has trained since its last. All call it."""
        self._refuse_inside_anchor("sync()")
        self._ranks.postponed = None  # this round is of all fragments
        self._attempt(self._sync)

    def _sync(self) -> None:
        self._resume()
        self.end_together()
        fragments = self.state.fragments
        trained = [1] * len(fragments)
        with self._ranks.held():
            own = (int(fragment.part in self.state.trained) for fragment in fragments)
            trained = self._connections.reduce_numbers("sync()", _C.ReduceOp.MAX, *own)
        for fragment in self._ranks.order(compress(fragments, trained)):
            self._launch(fragment, 0)
            self.use(late=False)
        self._start_at_anchors()

    def _start_at_anchors(self) -> None:
        self.begin_at_anchors()
        self.state.trained.clear()
        self.state.steps = 0

    def begin_at_anchors(self) -> None:
        """Give the weights the anchors, and forget what was trained."""
        self.take_anchors()
        for fragment in self.state.fragments:
            self.state.rank_weights.forget(fragment.part)

    def make_postponed(self) -> None:
        """Make the round that waited for a change of ranks. All call it before a forward."""
        part, self._ranks.postponed = self._ranks.postponed, None
        if part is not None:
            self._attempt(lambda: self._round(part))

    def follow(self, before: OuterLoop) -> None:
        """Move the weights with the anchors, which were those of ``before``."""
        weights = self._local.weights()
        for fragment, old in zip(self.state.fragments, before.state.fragments, strict=True):
            fragment.follow(weights, old.anchors)

    def take_anchors(self) -> None:
        for fragment in self.state.fragments:
            self.give_anchor(fragment, late=False)

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Inside it the weights are the anchor's; afterwards they are this rank's, to the bit."""
        if self._anchored:
            yield
            return
        own = {name: weight.detach().clone() for name, weight in self._local.weights().items()}
        self.take_anchors()
        self._anchored = True
        hooks = [o.register_step_pre_hook(self._refuse_step) for o in self._local.optimizers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._anchored = False
            _copy(own, self._local.weights())

    def _refuse_step(self, *_: Any) -> None:
        if not only_makes_state():
            self._refuse_inside_anchor("optimizer.step()")

    def _refuse_inside_anchor(self, what: str) -> None:
        if self._anchored:
            raise _C.BaguaError(
                f"module '{self._local.name}': {what} inside anchor(), where the weights are not "
                "this rank's own. Leave the context first."
            )

    def settle(self) -> None:
        self.engine.settle()

    def stats(self) -> dict[str, Any]:
        outer = {key: getattr(self.state, key) for key in ("skipped_rounds", "steps")}
        outer |= {"rounds": self.state.outer_rounds, **self.state.figures, **self._ranks.stats()}
        return {**self.engine.stats(), "outer": outer}

    def end_together(self) -> None:
        """Use the result of a round under way, before another plan takes over."""
        if self.state.pending is not None:
            self._ranks.complete(lambda: self.use(late=True))

    def close(self) -> None:
        """Count no more steps and stop the threads. Idempotent.

        A round under way is given some seconds: other ranks may wait for this rank's part of it.
        """
        self._attempts.close()
        if self.state.pending is not None:
            with suppress(_C.BaguaError):  # this rank or another has failed, and raised that
                finish_soon(self.engine, self._bucket_rounds)
            self.state.pending = None
        self.engine.stop()

    # Checkpoints.

    def named_state(self) -> dict[str, torch.Tensor]:
        """Tensors by key that are equal on all ranks.

        The result of a round under way is saved unchanged: using it early would make the training
        depend on being saved.
        """
        self.finish_round()
        return self.state.named() | self.named_means()

    def finish_round(self) -> None:
        """Wait for the result of a round under way, which is not used: its memory is at rest."""
        if self.overlaps:
            self._ranks.complete(self._receive)

    def named_means(self) -> dict[str, torch.Tensor]:
        """Results that may be under way, by key; writes into the tensors take effect."""
        means = self._means if self.overlaps else {}
        return {f"mean/{name}": mean for name, mean in means.items()}

    def named_own_state(self) -> dict[str, torch.Tensor]:
        """Tensors by key that are this rank's; writes into them take effect."""
        launched = [pair for f in self.state.fragments for pair in f.named_launched()]
        return dict([*launched, *self.state.rank_weights.named_state()])

    def digest(self) -> int | None:
        """A hash of this rank's weights, by which a load knows them again."""
        resumption = self.state.resumption
        return digest_of(self._local.weights()) if resumption is None else resumption.digest

    def resume_at(self, counters: Mapping[str, int], digest: int | None, counted: bool) -> None:
        """All tensors have been loaded, from a state with those ``counters``.

        ``counted``: a round that was under way has this rank's part.
        Ranks whose weights have the ``digest`` go on from there; others take the anchor's. Should
        there be one, all do, in the next training forward, and a result under way is used at once.
        """
        self.state.go_on_at(counters)
        part = counters["in_flight"] - 1
        if part >= 0:
            fragment = self.state.fragments[part]
            self.state.pending = PendingRound(fragment, counters["due"], True, counted)
        if digest is None or digest_of(self._local.weights()) != digest:
            self.take_anchors()
        self.state.resumption = Resumption(digest)

    def _resume(self) -> None:
        resumption, self.state.resumption = self.state.resumption, None
        if resumption is None:
            return
        found = self._local.all_true(digest_of(self._local.weights()) == resumption.digest)
        (all_found,) = self._connections.reduce_numbers(
            "comparing the weights with those of the checkpoint", _C.ReduceOp.MIN, int(found)
        )
        if not all_found:
            self.end_together()
            self._start_at_anchors()
        self._ranks.resume(self)


class Schedule:
    """Every fragment once in ``interval`` steps, one after the other, equally far apart.

    Fragment f is launched after ``(f + 1) * interval // fragments`` steps of each cycle, and its
    result used ``overlap`` steps later. ValueError where two fragments would be under way at once.
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

    def steps_to_launch(self, steps: int) -> int:
        """From so many steps of a cycle, 0 to ``interval`` - 1, to the next launch."""
        after = (offset - steps for offset in self._parts)
        return min(distance + (0 if distance > 0 else self.interval) for distance in after)


@dataclass(frozen=True)
class LocalTensors:
    """What this rank trains. The functions are called in each round.

    The steps of the last optimizer count. A round gives ``mean_buffers`` their mean, others the
    values of the lowest rank, and ``frozen`` weights that differ between the ranks their mean.
    ``all_true``: whether a flag is True on all ranks that hold shards of the same weights.
    """

    name: str
    optimizers: Sequence[torch.optim.Optimizer]
    weights: Callable[[], dict[str, torch.Tensor]]
    mean_buffers: Callable[[], dict[str, torch.Tensor]]
    other_buffers: Callable[[], list[torch.Tensor]]
    frozen: Callable[[], list[torch.Tensor]]
    all_true: Callable[[bool], bool]


class Fragment:
    """Weights that are averaged together: their anchors, and the optimizer that steps on those.

    Methods are given the weights, and the memory of pseudo-gradients and their means, by name.

    Args:
        part: its number in a plan.
        weights: by name, equal on all ranks. The anchors begin as these, in f32 (f64 of f64).
        factory: makes the outer optimizer.
        keeps: the weights at a launch are kept, for :meth:`merge`.
        inner_product: of tensors as ``weights``; over all shards, where they are shards.

    Attributes:
        own_norm: of this rank's pseudo-gradients at the last launch.
    """

    def __init__(
        self,
        part: int,
        weights: Mapping[str, torch.Tensor],
        factory: OuterOptimizer,
        keeps: bool,
        inner_product: InnerProduct = _C.inner_product,
    ) -> None:
        self.part = part
        self.names = list(weights)
        self.anchors = [_wide(weight) for weight in weights.values()]
        self.optimizer = made(factory, self.anchors, inner_product)
        self.own_norm = 0.0
        self._factory = factory
        self._inner_product = inner_product
        self._launched = [weight.detach().clone() for weight in weights.values()] if keeps else []

    def launch(
        self,
        weights: Mapping[str, torch.Tensor],
        means: Mapping[str, torch.Tensor],
        intervals: float,
    ) -> None:
        """Write the changes of the weights, which are of several ``intervals``, to ``means``."""
        own = self._of(means)
        _C.take_deltas(self._of(weights), self.anchors, own, self._launched)
        for change in own if intervals > 1 else ():
            change.div_(intervals)
        self.own_norm = math.sqrt(self._inner_product(own, own))

    def step(self, means: Mapping[str, torch.Tensor]) -> dict[str, float | None]:
        """Make a step of the outer optimizer; its figures."""
        for anchor, mean in zip(self.anchors, self._of(means), strict=True):
            anchor.grad = mean
        self.optimizer.step()
        for anchor in self.anchors:
            anchor.grad = None
        return figures(self.optimizer)

    def take_anchor(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the weights the values of the anchor, rounded to their dtype."""
        _C.take_anchors(self._of(weights), self.anchors)

    def merge(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the weights the anchor's values plus their changes since the launch."""
        _C.merge_anchors(self._of(weights), self.anchors, self._launched)

    def follow(self, weights: Mapping[str, torch.Tensor], before: list[torch.Tensor]) -> None:
        """Give the weights the anchor's values plus their changes since the anchors ``before``."""
        own = self._of(weights)
        changes = [torch.empty_like(anchor) for anchor in before]
        _C.take_deltas(own, before, changes, [])
        _C.take_anchors(own, self.anchors)
        for weight, change in zip(own, changes, strict=True):
            weight.sub_(change)

    def squared_norm(self, means: Mapping[str, torch.Tensor]) -> float:
        """Squared norm of the mean; not finite if an element is not."""
        own = self._of(means)
        return self._inner_product(own, own)

    def named_anchors(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self.names, self.anchors, strict=True))

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of what is equal on all ranks: anchors, and the optimizer's state."""
        for name, anchor in self.named_anchors():
            yield f"anchor/{name}", anchor
            for key, value in state_of(self.optimizer, anchor).items():
                yield f"{key}/{name}", value

    def named_launched(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of this rank's weights at the last launch, where they are kept."""
        for name, kept in zip(self.names, self._launched, strict=False):
            yield f"launched/{name}", kept

    def become(self, other: Fragment) -> None:
        self.anchors, self.optimizer = other.anchors, other.optimizer

    def copy(self) -> Fragment:
        """A fragment of the same state, which shares no memory with this one."""
        twin = self._new()
        for mine, theirs in zip(self.anchors, twin.anchors, strict=True):
            if mine in self.optimizer.state:
                twin.optimizer.state[theirs] = copied(self.optimizer.state[mine])
        return twin

    def loaded(self, state: Mapping[str, Any]) -> Fragment:
        """A fragment with the :meth:`named_state` of ``state``; ValueError names a wrong entry."""
        twin = self._new()
        if not any(state_of(twin.optimizer, anchor) for anchor in twin.anchors):
            twin.step({name: torch.zeros_like(anchor) for name, anchor in twin.named_anchors()})
            keys = [key for key, _ in twin.named_state() if not key.startswith("anchor/")]
            if not any(key in state for key in keys):  # saved before the first step
                twin = self._new()
        for key, view in twin.named_state():
            view.copy_(saved_tensor(state, key, view, REMEDY))
        return twin

    def _new(self) -> Fragment:
        anchors = dict(self.named_anchors())
        twin = Fragment(self.part, anchors, self._factory, False, self._inner_product)
        twin._launched = [kept.clone() for kept in self._launched]
        groups = zip(self.optimizer.param_groups, twin.optimizer.param_groups, strict=True)
        for mine, theirs in groups:
            theirs.update({key: copied(v) for key, v in mine.items() if key != "params"})
        return twin

    def _of(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[name].detach() for name in self.names]


@dataclass
class PendingRound:
    """A round under way; ``due``: the steps that remain until its result is used.

    ``counted``: this rank's part is in the result that was received.
    """

    fragment: Fragment
    due: int
    received: bool = False
    counted: bool = True


@dataclass(frozen=True)
class Resumption:
    """A load of which the ranks have not agreed yet how it goes on.

    ``digest``: of this rank's weights in the checkpoint; None: it has none of this rank.
    """

    digest: int | None


@dataclass
class OuterState:
    """State that goes on when another plan takes over, with other ranks.

    Attributes:
        fragments: parts 0, 1, ... of the plan.
        steps: attempted in the cycle of the schedule.
        communications: rounds that have ended, of checkpoints before included.
        outer_rounds: those that have changed an anchor, of checkpoints before included.
        skipped_rounds: those that were not finite.
        trained: parts of the fragments in which steps were made since their last round.
        figures: of the last outer step.
    """

    fragments: list[Fragment]
    rank_weights: RankWeights
    steps: int = 0
    communications: int = 0
    outer_rounds: int = 0
    skipped_rounds: int = 0
    trained: set[int] = field(default_factory=set)
    pending: PendingRound | None = None
    resumption: Resumption | None = None
    figures: dict[str, float | None] = field(
        default_factory=lambda: {"agreement": None, "lr": None, "momentum": None, **NO_FIGURES}
    )

    def copy(self) -> OuterState:
        """A state that shares no memory with this one, without the round under way."""
        return OuterState(
            [fragment.copy() for fragment in self.fragments],
            self.rank_weights.copy(),
            skipped_rounds=self.skipped_rounds,
            resumption=self.resumption,
            figures=self.figures,
        )

    def train_all(self) -> None:
        self.trained.update(fragment.part for fragment in self.fragments)

    def begin_round(self, fragment: Fragment, due: int) -> None:
        self.pending = PendingRound(fragment, due)
        self.trained.discard(fragment.part)

    def result_due(self) -> bool:
        """Count a step; whether the result of the round under way is used after it."""
        if self.pending is None:
            return False
        self.pending.due -= 1
        return self.pending.due == 0

    def end_round(self) -> tuple[Fragment, bool]:
        """All ranks have the result of the round under way: its fragment, and whether this rank's
        part is in it.
        """
        assert self.pending is not None
        fragment, counted, self.pending = self.pending.fragment, self.pending.counted, None
        self.communications += 1
        if counted:
            self.rank_weights.settle(fragment.part)
        else:
            self.trained.add(fragment.part)
        return fragment, counted

    def count_step(
        self, norm: float, fragment: Fragment, figures: Mapping[str, float | None]
    ) -> None:
        agreement = norm / fragment.own_norm if fragment.own_norm > 0 else None
        self.figures = {"agreement": agreement, **figures}
        self.outer_rounds += 1

    @property
    def counters(self) -> dict[str, int]:
        pending = self.pending
        return {
            "steps": self.steps,
            "outer_rounds": self.outer_rounds,
            "communications": self.communications,
            "trained": sum(1 << part for part in self.trained),
            "in_flight": 0 if pending is None else pending.fragment.part + 1,
            "due": 0 if pending is None else pending.due,
        }

    def go_on_at(self, counters: Mapping[str, int]) -> None:
        self.steps, self.outer_rounds = counters["steps"], counters["outer_rounds"]
        self.communications = counters["communications"]
        parts = range(len(self.fragments))
        self.trained = {part for part in parts if counters["trained"] >> part & 1}
        self.pending = None

    def named(self) -> dict[str, torch.Tensor]:
        """Anchors and the optimizers' state by key, equal on all ranks."""
        return dict(pair for fragment in self.fragments for pair in fragment.named_state())

    def digest(self) -> int:
        return digest_of(self.named())


def broadcast_fragments(fragments: Sequence[Fragment], connections: Connections, what: str) -> None:
    """Overwrite anchors, and the outer optimizers' state, with those of rank 0 of ``connections``.

    what: words for the wait.
    """
    anchors = [anchor for fragment in fragments for anchor in fragment.anchors]
    broadcast_state(anchors, [each.optimizer for each in fragments], connections, what=what)


def _wide(weight: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.empty_like(weight, dtype=wide, requires_grad=False).copy_(weight.detach())


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])


def _names(bucket: BaguaBucket) -> set[str]:
    return {name for name, _ in bucket.named_views()}


def _all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> int:
    text = " ".join(f"{name}={int(digest(tensors[name]))}" for name in sorted(tensors))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _clear_non_finite(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        for value in tensors_in([*optimizer.state.values()]):
            if value.is_floating_point():
                own = local(value)
                wide = own if own.dtype in PLAIN_DTYPES else own.float()
                own.copy_(wide.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
