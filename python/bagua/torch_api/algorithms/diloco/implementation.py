"""Local training at work: its plan, its rounds on request, its state."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bagua import BaguaError
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.saved_values import check_state, saved_count, saved_tensor
from bagua._sync.outer.outer_loop import Outcomes, OuterLoop, Schedule
from bagua._sync.outer.outer_sgd import GrowingMomentum
from bagua._sync.outer.shares import EqualShares, SampleShares
from bagua._sync.outer.survival import Mortal
from bagua._sync.outer.weights import Fragment
from bagua._sync.synchronizer import Synchronizer
from bagua.torch_api._residuals.means import CompressedMeans, RememberedMeans
from bagua.torch_api.algorithms.base import AlgorithmImpl, Traits
from bagua.torch_api.algorithms.diloco.fragments import Parts
from bagua.torch_api.algorithms.diloco.membership import Membership
from bagua.torch_api.bucket import BaguaBucket, aligned_buckets

if TYPE_CHECKING:
    from bagua.torch_api._session import Session
    from bagua.torch_api.algorithms.diloco.diloco import DiLoCoAlgorithm

__all__ = ["DiLoCoAlgorithmImpl"]

_REMEDY = "the checkpoint is of another model or algorithm, or of other overlap_steps"
_ERROR_RANKS = "error_ranks"

_log = logging.getLogger("bagua")

#: Outer momentum that costs accuracy over Muon: on text 0.8 costs 0.05 where 0.6 costs 0.01.
_MUCH_FOR_MUON = 0.8


class DiLoCoAlgorithmImpl(AlgorithmImpl):
    """Implementation of :class:`DiLoCoAlgorithm`: ``model.bagua_algorithm``.

    A warm-up iteration is a forward and a backward outside ``no_sync()``.

    Attributes:
        owner: the algorithm's name in errors.
    """

    owner = "DiLoCoAlgorithm"
    traits = Traits(
        ranks_agree=False,
        steps_on_gradients=False,
        reads_grad_scale=False,
        broadcast_buffers=False,
        refuses_guard='it watches its own rounds. Leave guard= out: bagua_stats()["outer"] has '
        "how far the ranks agree.",
    )

    def __init__(self, process_group: BaguaProcessGroup, arguments: DiLoCoAlgorithm) -> None:
        comes_back = process_group.waits_to_join
        self._members: Membership | None = None
        if arguments.elastic is not None:
            self._members = Membership(process_group, arguments.elastic.min_ranks)
        super().__init__(process_group)
        self.arguments = arguments
        # Completed iterations of the warm-up, which is over for the ranks that one comes back to.
        self._warmed_up = arguments.warmup_steps if comes_back else 0
        self._local = False  # the warm-up is over, as far as buckets are concerned
        self._outer: OuterLoop | None = None
        self._means: RememberedMeans | None = None  # with error feedback, after the warm-up
        self._outcomes = Outcomes()
        self._shares = EqualShares()
        self._parts: Parts | None = None  # after the warm-up
        self._schedule = Schedule(arguments.interval, 1, 0)
        self._ddp: weakref.ref[Session] | None = None

    # Set-up.

    def need_reset(self) -> bool:
        return self._local != (self._warmed_up >= self.arguments.warmup_steps)

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        if not bagua_ddp.bagua_optimizers:
            raise ValueError(
                f"module '{bagua_ddp.bagua_module_name}': {self.owner} counts the steps of the "
                "optimizers given to with_bagua: give it the one that trains the module"
            )
        self._ddp = weakref.ref(bagua_ddp)
        self._outer = None
        self._means = None
        self._local = self._warmed_up >= self.arguments.warmup_steps
        if not self._local:
            return super().init_tensors(bagua_ddp)
        self._means = self.make_means()
        self._outcomes = Outcomes()
        arguments = self.arguments
        self._log_rates(bagua_ddp)
        self._parts = Parts(arguments.fragments, bagua_ddp)
        self._schedule = Schedule(arguments.interval, self._parts.count, arguments.overlap_steps)
        return self._parts.make_tensors(bagua_ddp)

    def _log_rates(self, bagua_ddp: Session) -> None:
        name, rule = bagua_ddp.bagua_module_name, self.arguments.outer_optimizer
        if isinstance(rule, GrowingMomentum):
            _log.info(
                "module '%s': the outer optimizer begins as local SGD, and goes up to lr=0.7, "
                'momentum=0.8 while rounds keep a direction; bagua_stats()["outer"] has its rates',
                name,
            )
        elif rule.momentum >= _MUCH_FOR_MUON and any(
            type(optimizer).__name__ == "Muon" for optimizer in bagua_ddp.bagua_optimizers
        ):
            _log.warning(
                "module '%s': with Muon inside an outer momentum of %s is much: leave "
                "outer_optimizer out, or take OuterSGD(0.7, 0.6)",
                name,
                rule.momentum,
            )

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        if not self._local:
            return super().tensors_to_buckets(tensors, do_flatten)
        groups = self._plan.groups(tensors)
        buckets = aligned_buckets(groups, True, self.process_group.size)
        self._plan.assign(buckets)
        return buckets

    @property
    def _plan(self) -> Parts:
        assert self._parts is not None
        return self._parts

    def init_operations(self, bagua_ddp: Session, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if self._local:
            self.append_mean(bucket)
        else:
            bucket.append_centralized_synchronous_op(average=True, group=self.process_group)

    def make_means(self) -> RememberedMeans | None:
        """The means with residuals; None: there is no error feedback."""
        if not self.arguments.error_feedback:
            return None
        return CompressedMeans(self.process_group, self.arguments.hierarchical)

    def append_mean(self, bucket: BaguaBucket) -> None:
        """Append the operation that averages pseudo-gradients or buffers."""
        part, codec = self._plan.of(bucket.tensors[0]), self.arguments.codec
        if part is not None and codec is not None and isinstance(self._means, CompressedMeans):
            self._means.append_to(bucket, codec, self._outcomes.of(part))
            return
        bucket.append_centralized_synchronous_op(
            hierarchical=self.arguments.hierarchical,
            average=True,
            compression=None if part is None else codec,
            group=self.process_group,
        )

    def make_fragment(self, part: int, buckets: Sequence[BaguaBucket]) -> Fragment:
        """The outer state of a fragment."""
        return Fragment(part, buckets, keeps=self._schedule.overlap > 0)

    def make_synchronizer(self, bagua_ddp: Session) -> Synchronizer:
        if not self._local:
            return super().make_synchronizer(bagua_ddp)
        arguments = self.arguments
        parts, buffers = self._plan.split(bagua_ddp.bagua_buckets)
        if arguments.weight == "samples":
            self._shares = SampleShares(
                self.process_group.connections,
                bagua_ddp.bagua_module_name,
                self._schedule.fragments,
            )
        self._outer = OuterLoop(
            bagua_ddp,
            [self.make_fragment(part, buckets) for part, buckets in enumerate(parts)],
            buffers,
            rule=arguments.outer_optimizer,
            schedule=self._schedule,
            survival=Mortal() if self._members is None else self._members.survival,
            shares=self._shares,
            outcomes=self._outcomes,
        )
        if self._members is not None:
            self._members.complete(self._outer, self._means)
        return self._outer

    def mark_pending(self, bagua_ddp: Session) -> bool:
        if self._members is not None and self._members.survival.change_due:
            self._change_members()
        return False

    def _change_members(self) -> None:
        assert self._members is not None
        assert self._outer is not None
        self._members.change(self._wrapped(), self._outer, self._means)

    def init_post_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        def finish_warm_up_iteration() -> None:
            bagua_ddp.wait_pending_comm_ops()
            self._warmed_up += 1

        return finish_warm_up_iteration

    def close(self) -> None:
        self._outer = None
        if self._members is not None:
            self._members.survival.close()

    # Control.

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """A context in which the model's weights are the anchor: to evaluate or to save.

        The anchor is equal on all ranks; in the warm-up the weights are. Afterwards the weights are
        this rank's own, to the bit. Buffers stay this rank's. It does not communicate.

        Raises:
            BaguaError: inside another ``anchor()``; a training step inside.
        """
        if self._outer is None:
            yield
            return
        with self._outer.anchor():
            yield

    def sync(self) -> None:
        """Make an outer round now, unless no rank has made a step since the last one.

        All ranks call it, between two steps. Afterwards the weights are the anchor, and the next
        round is ``interval`` steps away.

        With ``elastic`` it is repeated with those that are left where a rank is lost.

        Raises:
            BaguaError: another rank failed, or does not come.
        """
        while self._outer is not None:
            self._outer.sync()
            if self._members is None or not self._members.failed:
                return
            self._change_members()

    def count_samples(self, samples: int) -> None:
        """With ``weight="samples"``: this rank has trained on so many more, tokens for example.

        Call it after each step's forward. In the warm-up, and with other weights, nothing counts.

        Raises:
            ValueError: a negative number.
        """
        if samples < 0:
            raise ValueError(f"count_samples({samples}): a number of samples is 0 or more")
        self._shares.count(samples)

    @property
    def outer_rounds(self) -> int:
        """Rounds that have changed the anchor."""
        return 0 if self._outer is None else self._outer.outer_rounds

    @property
    def correlation(self) -> float | None:
        """Cosine of the last mean pseudo-gradient with the outer momentum before it."""
        return None if self._outer is None else self._outer.numbers.correlation

    @property
    def gain(self) -> float | None:
        """Length of the last outer step along the mean pseudo-gradient, in units of that."""
        return None if self._outer is None else self._outer.numbers.gain

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Anchor, momentum and counters: call it on every rank, between two steps.

        They are enough to go on with any number of ranks, from the last round. With the same number
        and every rank's own weights and optimizer state training goes on exactly.

        Returns:
            ``warmed_up``; after the warm-up counters, ``anchor/<name>`` and ``momentum/<name>`` of
            every parameter, of its shape and f32 (f64), ``rate/<name>``, the momentum of its last
            outer step (one f64), and ``rank<r>/weights``, a digest by which
            this rank's weights are known again. With ``overlap_steps`` also ``mean/<name>``, the
            result that may be in flight, and ``rank<r>/launched/<name>``. With error feedback
            ``error_ranks``, those with residuals (with ``hierarchical`` the nodes' leaders),
            ``rank<r>/error/<name>``, and ``rank<r>/server/<first element>/<name>``, what the means
            lose that rank r has encoded.
        """
        state: dict[str, Any] = {"warmed_up": self._warmed_up}
        checkpoint = self._checkpoint()
        return state if checkpoint is None else state | checkpoint.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`: on every rank, after ``with_bagua``, between two steps.

        If every rank's weights are those that were saved (loaded before or after this), training
        goes on where it was. Otherwise all ranks' weights become the anchor, and up to
        ``interval`` steps of each rank are lost. With error feedback another number of ranks than
        saved it needs the dicts of all old ranks merged into one (``a | b | ...``): each rank then
        starts from the mean of their residuals.

        Raises:
            ValueError: the state is of another algorithm, model or schedule; names the entry.
        """
        check_state(state, self.owner)
        warmed_up = saved_count(state, "warmed_up", self.owner)
        if self._local != (warmed_up >= self.arguments.warmup_steps):
            self._warmed_up = warmed_up
            self._wrapped().rebuild()
        checkpoint = self._checkpoint()
        if checkpoint is not None:
            checkpoint.restore(state)
        self._warmed_up = warmed_up

    def _checkpoint(self) -> _Checkpoint | None:
        """The state of the outer rounds, from the end of the warm-up on."""
        if self._outer is None:
            return None
        return _Checkpoint(self.owner, self.process_group, self._schedule, self._outer, self._means)

    def _wrapped(self) -> Session:
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None:
            raise BaguaError(f"{self.owner}: its module has been deleted")
        return ddp


class _Checkpoint:
    """The state of a plan of local training, by name of the parameter.

    Args:
        owner: the algorithm's name in errors.
        process_group: of the algorithm.
        schedule: of the rounds.
        outer: the plan.
        means: residuals of the plan's operations; None: no error feedback.
    """

    def __init__(
        self,
        owner: str,
        process_group: BaguaProcessGroup,
        schedule: Schedule,
        outer: OuterLoop,
        means: RememberedMeans | None,
    ) -> None:
        self._owner = owner
        self._size = process_group.size
        self._rank = process_group.connections.rank
        self._schedule = schedule
        self._outer = outer
        self._means = means

    def state(self) -> dict[str, Any]:
        """All that :meth:`restore` takes. Waits for a round under way."""
        outer = self._outer
        state: dict[str, Any] = {**outer.counters, "ranks": self._size}
        state |= {key: view.clone() for key, view in outer.named_state()}
        state |= {self._own(key): view.clone() for key, view in outer.named_own_state()}
        if self._means is not None:
            residuals = self._means.state()
            state |= {_ERROR_RANKS: residuals.pop("ranks"), **residuals}
        digest = outer.digest()
        return state if digest is None else state | {self._own("weights"): digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`, perhaps the merged ones of all ranks.

        Raises:
            ValueError: something does not fit, names the entry; nothing has changed then.
        """
        outer, owner = self._outer, self._owner
        counters = {key: saved_count(state, key, owner) for key in outer.counters}
        self._check(counters)
        saved = [
            (view, saved_tensor(state, key, view, _REMEDY)) for key, view in outer.named_state()
        ]
        digest = None
        if saved_count(state, "ranks", owner) == self._size:
            if self._own("weights") in state:
                digest = saved_count(state, self._own("weights"), owner)
            saved += [
                (view, saved_tensor(state, self._own(key), view, _REMEDY))
                for key, view in outer.named_own_state()
            ]
        if self._means is not None:
            if _ERROR_RANKS in state:
                self._means.restore(state | {"ranks": state[_ERROR_RANKS]})
            else:  # saved in the warm-up, or without error feedback
                self._means.clear()
        for view, value in saved:
            view.copy_(value)
        outer.resume_at(counters, digest)

    def _check(self, counters: dict[str, int]) -> None:
        if counters["steps"] >= self._schedule.interval:
            raise ValueError(
                f"{self._owner}: saved after {counters['steps']} steps of an interval, which has "
                f"only {self._schedule.interval} now. Give the interval that it was saved with, or "
                "save after sync()."
            )
        if counters["in_flight"] > self._schedule.fragments:
            raise ValueError(
                f"{self._owner}: saved with fragment {counters['in_flight']} in flight, there are "
                f"only {self._schedule.fragments} now. Give the fragments that it was saved with."
            )

    def _own(self, key: str) -> str:
        return f"rank{self._rank}/{key}"
