"""DiLoCo: local training, and an outer optimizer on the mean weight change of the ranks.

Rounds are those of ``bagua._outer.loop``. Here are the arguments, the fragments of a module, the
operations of buckets, and checkpoints.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch

from bagua import _C, BaguaError
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.group.warn import warn
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.ledger import Commit, Ledger
from bagua._core.state.saved_values import check_state, saved_count, saved_tensor
from bagua._core.state.shards import Shards, WholeSums, local
from bagua._ops.operations import Operation
from bagua._outer.loop import (
    REMEDY,
    Fragment,
    LocalTensors,
    OuterLoop,
    OuterState,
    Schedule,
)
from bagua._outer.optimizer import GrowingMomentum, OuterOptimizer, OuterSGD, describe
from bagua._outer.strategies import Elastic, FixedRanks, RankWeights, SampleWeights
from bagua._sync.synchronizer import Synchronizer
from bagua.torch_api.algorithms._error_feedback import (
    check_warmup,
    is_wide,
    warn_of_useless_residuals,
)
from bagua.torch_api.algorithms.base import (
    Algorithm,
    Groups,
    Traits,
    WarmUpImpl,
    checked_names,
    refuse_shards,
)
from bagua.torch_api.bucket import BaguaBucket, aligned_buckets

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = ["DiLoCoAlgorithm", "DiLoCoAlgorithmImpl", "Elastic", "Fragments", "OuterSGD"]

#: A number, names of modules per fragment, or a function from a parameter's name to its fragment.
Fragments: TypeAlias = int | Sequence[Sequence[str]] | Callable[[str], int]

_SIZE = "group_size"
_LOCAL = "local_training"  # 1 once it has begun
_PLAN = "fragments"  # a digest of who is in which

_log = logging.getLogger("bagua")

_OWNER = "DiLoCoAlgorithm"  # in errors
#: Outer momentum that costs accuracy over Muon: on text 0.8 costs 0.05 where 0.6 costs 0.01.
_MUCH_FOR_MUON = 0.8


class DiLoCoAlgorithm(Algorithm):
    """Local training; every ``interval`` optimizer steps an outer step averages the ranks' changes.

    All ranks hold an anchor of the weights, in float32, and its momentum. In a round each sends its
    pseudo-gradient, the anchor minus its weights; the outer optimizer steps on the anchor with the
    ranks' mean, and the weights become the anchor (DiLoCo, Douillard et al. 2023). Nothing is
    sent between rounds. The moments of the optimizers given to ``bagua.wrap`` stay on their rank.

    Steps are counted when the last of those optimizers has stepped, or a ``GradScaler`` has skipped
    its step. So gradient accumulation needs no ``no_sync()``. All ranks make equally many steps.

    Args:
        outer_optimizer: ``OuterSGD(lr=1.0, momentum=0.0)`` is local SGD; ``nesterov=False`` is
            SlowMo. Or a function that makes a ``torch.optim.Optimizer`` of the anchors, such as
            ``lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)``; it is
            called once for each fragment. None: begins as local SGD and raises momentum to
            (0.7, 0.8) as far as rounds keep a direction.
        interval: steps from one round to the next.
        fragments: parts of the model that are averaged one after the other, at equal distances in
            the interval: a number, which deals out the layers of the longest ``ModuleList`` or
            ``Sequential`` in turn, what is outside of it to the last; lists of names of
            modules; or a function from a parameter's name to its fragment's number.
        overlap_steps: steps from the launch of a fragment's average to the use of its result, below
            the steps from one fragment to the next; 0: it is waited for. Weights keep what they
            learn meanwhile.
        codec: for the pseudo-gradients, a name of ``bagua._C.codec_names()``; None: float32.
        error_feedback: each rank adds to its pseudo-gradients what the codec has taken from those
            of the last round, and likewise to the mean of its part of a bucket. Takes 8 bytes per
            parameter, and 8 / ranks. None: with codecs of less than 16 bits.
        hierarchical: exact inside a node, ``codec`` between the nodes' leaders.
        weight: of a rank in the mean of a round: ``"ranks"``, all alike; or ``"samples"``, those
            that it has trained on since its last round, as ``model.bagua_samples(n)`` says before
            each forward.
        warmup_steps: iterations with exact all-reduce of gradients before the first local step.
        elastic: training goes on without lost ranks, see :class:`Elastic`; True: ``Elastic()``.
            False: a lost rank is an error. :class:`Mailbox`: rounds between islands are files.
        mean_buffers: names of the floating-point buffers that a round gives the ranks' mean, as in
            ``state_dict()``; ``*`` stands for any text. All others get the first rank's values.
            None: ``running_mean`` and ``running_var`` of torch's batch and instance norms.

    Raises:
        TypeError: ``outer_optimizer`` makes no optimizer that steps on gradients and keeps
            tensors; ``elastic`` is not an :class:`Elastic`; ``mean_buffers`` is not a list.
        ValueError: unknown codec, or an argument out of its range; from ``bagua.wrap``: no
            optimizer, or fragments or ``mean_buffers`` that do not fit the module.

    Example::

        model = bagua.wrap(model, [optimizer], DiLoCoAlgorithm(interval=100, codec="int4_block"))
        ...  # the training loop
        with model.bagua_algorithm.anchor(), torch.no_grad():
            outputs = model(inputs)
    """

    def __init__(
        self,
        outer_optimizer: OuterOptimizer | None = None,
        interval: int = 100,
        *,
        fragments: Fragments = 1,
        overlap_steps: int = 0,
        codec: str | None = None,
        error_feedback: bool | None = None,
        hierarchical: bool = False,
        weight: Literal["ranks", "samples"] = "ranks",
        warmup_steps: int = 0,
        elastic: Elastic | bool = False,
        mean_buffers: Sequence[str] | None = None,
    ) -> None:
        if interval < 1:
            raise ValueError(f"interval={interval} must be at least 1 optimizer step")
        check_warmup(warmup_steps)
        if overlap_steps < 0:
            raise ValueError(f"overlap_steps={overlap_steps} must be 0 or more")
        if weight not in ("ranks", "samples"):
            raise ValueError(f'weight={weight!r} must be "ranks" or "samples"')
        check_fragments(fragments)
        if (number := number_of(fragments)) is not None:
            Schedule(interval, number, overlap_steps)
        self.outer_optimizer = outer_optimizer or GrowingMomentum()
        self._optimizer_described = describe(self.outer_optimizer, _OWNER)
        self.interval = interval
        self.fragments = fragments
        self.overlap_steps = overlap_steps
        self.codec = codec
        self.error_feedback = _feedback_of(codec, error_feedback)
        self.hierarchical = hierarchical
        self.weight = weight
        self.warmup_steps = warmup_steps
        self.elastic = _elastic_of(elastic)
        self.mean_buffers = checked_names(mean_buffers)

    def describe(self) -> str:
        fragments = _fragments_described(self.fragments)
        shown = f"fragments={fragments} {self.elastic} {self._optimizer_described}"
        return f"{super().describe()} {shown}"

    def plan(self) -> str:
        """Arguments that must be equal where ranks do not compare all of them."""
        return f"codec={self.codec} weight={self.weight} {self._optimizer_described}"

    def within(self, process_group: BaguaProcessGroup) -> BaguaProcessGroup:
        if self.elastic is None or not self.elastic.mails:
            return process_group
        from bagua._outer.mailbox.island import alone_in

        return alone_in(process_group)

    def reify(self, process_group: BaguaProcessGroup) -> DiLoCoAlgorithmImpl:
        return DiLoCoAlgorithmImpl(process_group, self)


def _feedback_of(codec: str | None, error_feedback: bool | None) -> bool:
    """Whether residuals are kept. Raises ValueError for an unknown codec."""
    if codec is not None:
        _C.make_codec(codec)
    if error_feedback is None:
        error_feedback = codec is not None and not is_wide(codec)
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback={error_feedback!r} must be True, False or None")
    warn_of_useless_residuals("DiLoCoAlgorithm", codec, error_feedback)
    return error_feedback and codec is not None


def _elastic_of(elastic: Elastic | bool) -> Elastic | None:
    if isinstance(elastic, bool):
        return Elastic() if elastic else None
    if not isinstance(elastic, Elastic):
        raise TypeError(
            "DiLoCoAlgorithm: elastic is True, False or Elastic(quorum=2), or a Mailbox, "
            f"not {elastic!r}"
        )
    return elastic


def _ranks_of(arguments: DiLoCoAlgorithm, group: BaguaProcessGroup) -> FixedRanks:
    elastic = arguments.elastic
    if elastic is None:
        return FixedRanks()
    if elastic.mails:
        from bagua._outer.mailbox.rounds import MailboxRanks

        return MailboxRanks(group, cast(Any, elastic), arguments.warmup_steps, arguments.plan())
    from bagua._outer.elastic import ElasticRanks

    return ElasticRanks(group, elastic)


class DiLoCoAlgorithmImpl(WarmUpImpl):
    """Implementation of :class:`DiLoCoAlgorithm`: ``model.bagua_algorithm``."""

    traits = Traits(
        ranks_agree=False,
        steps_on_gradients=False,
        reads_grad_scale=False,
        broadcast_buffers=False,
        takes_shards=True,
        refuses_guard='it watches its own rounds. Leave guard= out: bagua_stats()["outer"] has '
        "how far the ranks agree.",
    )

    def __init__(self, process_group: BaguaProcessGroup, arguments: DiLoCoAlgorithm) -> None:
        comes_back = process_group.waits_to_join
        self._ranks = _ranks_of(arguments, process_group)
        super().__init__(process_group, arguments.warmup_steps)
        self.arguments = arguments
        self.mean_buffers = arguments.mean_buffers
        self._session: weakref.ref[Session] | None = None
        self._loop: OuterLoop | None = None  # after the warm-up
        self._parts: dict[str, int] = {}  # fragments of the weights
        self._schedule = Schedule(arguments.interval, 1, 0)
        self._commits: list[Commit] = []  # by fragment
        self.ledger = Ledger(
            _OWNER,
            lambda: process_group.connections,
            counters=[self.counter],
            hierarchical=arguments.hierarchical,
        )
        if comes_back:  # the warm-up is over for the ranks that this one comes back to
            self.ledger.counters[self.counter] = arguments.warmup_steps

    # Set-up.

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        name = bagua_ddp.bagua_module_name
        if not bagua_ddp.bagua_optimizers:
            raise ValueError(
                f"module '{name}': {_OWNER} counts the steps of the "
                "optimizers given to bagua.wrap: give it the one that trains the module"
            )
        self._ranks.claim(bagua_ddp.bagua_build_params())
        self._session = weakref.ref(bagua_ddp)
        elastic = self.arguments.elastic
        if elastic and not elastic.mails and self.process_group.island is None:
            refuse_shards(bagua_ddp, "elastic", "with process_group=connect_islands(...)")
        self._loop = None
        if not self.warmed_up:
            self.ledger.restore(self.ledger.counters, [])
        return super().init_tensors(bagua_ddp)

    def later_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        weights = bagua_ddp.bagua_build_params()
        self._plan(bagua_ddp)
        self._commits = [Commit() for _ in range(self._schedule.fragments)]
        # Memory for pseudo-gradients by fragment, then for buffers that have a mean.
        by_fragment = sorted(weights, key=lambda pair: self._parts[pair[0]])
        named = [*by_fragment, *bagua_ddp.bagua_mean_buffers().items()]
        module_name = bagua_ddp.bagua_module_name
        return [_registered(local(tensor), key, module_name) for key, tensor in named]

    def _plan(self, session: Session) -> None:
        arguments, names = self.arguments, [n for n, _ in session.bagua_build_params()]
        self._parts = _parts_of(arguments.fragments, session.module, names)
        count = max(self._parts.values(), default=0) + 1
        self._schedule = Schedule(arguments.interval, count, arguments.overlap_steps)

    def tensors_to_buckets(self, tensors: Groups, do_flatten: bool) -> list[BaguaBucket]:
        if self.warming_up:
            return super().tensors_to_buckets(tensors, do_flatten)
        groups = [
            [tensor for tensor in group if self._part_of(tensor) == part]
            for part in (*range(self._schedule.fragments), None)
            for group in tensors
        ]
        buckets = aligned_buckets(list(filter(None, groups)), True, self.process_group.size)
        for bucket in buckets:
            part = self._part_of(bucket.tensors[0])
            bucket.part = self._schedule.fragments - 1 if part is None else part
        return buckets

    def _part_of(self, tensor: torch.Tensor) -> int | None:
        """The fragment of the weight that a registered ``tensor`` stands for; None for a buffer."""
        return self._parts.get(record_of(tensor).name)

    def init_operations(self, bagua_ddp: Session, bucket: BaguaBucket) -> None:
        bucket.ops += self.operations(bucket)  # whose state changes hands when the loop begins

    def later_operations(self, bucket: BaguaBucket) -> list[Operation]:
        own, group = self.arguments, self.process_group
        part = self._part_of(bucket.tensors[0])
        if part is None:
            return [bucket.sum_or_mean(hierarchical=own.hierarchical, group=group)]
        outcome = self._commits[part].outcome if own.error_feedback else None
        return [self._ranks.mean(bucket, own.codec, own.hierarchical, group, outcome)]

    def make_synchronizer(self, bagua_ddp: Session) -> Synchronizer:
        if self.warming_up:
            return super().make_synchronizer(bagua_ddp)
        tensors = local_tensors(bagua_ddp)
        state = self._ranks.inherited_state()
        if state is None:
            state = self._new_state()
            self._log_rates(tensors, state.fragments[0])
        self._loop = OuterLoop(
            tensors,
            self.process_group,
            bagua_ddp.bagua_buckets,
            state,
            self._schedule,
            ranks=self._ranks,
            commits=self._commits,
        )
        self._ranks.begin(self._loop)
        operations = [operation for bucket in bagua_ddp.bagua_buckets for operation in bucket.ops]
        self.ledger.take(*(one.page for one in operations if one.page is not None))
        return self._loop

    def _new_state(self) -> OuterState:
        arguments, count = self.arguments, self._schedule.fragments
        weights: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        for name, weight in self._wrapped().bagua_build_params():
            weights[self._parts[name]][name] = weight
        fragments = [
            Fragment(
                part,
                {name: local(weight) for name, weight in named.items()},
                arguments.outer_optimizer,
                arguments.overlap_steps > 0,
                WholeSums(list(named.values())).inner_product,
            )
            for part, named in enumerate(weights)
        ]
        own = SampleWeights(count) if arguments.weight == "samples" else RankWeights()
        return OuterState(fragments, self._ranks.weights(own, self._schedule))

    def _log_rates(self, tensors: LocalTensors, fragment: Fragment) -> None:
        momentum = fragment.optimizer.param_groups[0].get("momentum")
        if isinstance(self.arguments.outer_optimizer, GrowingMomentum):
            _log.info(
                "module '%s': the outer optimizer begins as local SGD, and goes up to lr=0.7, "
                'momentum=0.8 while rounds keep a direction; bagua_stats()["outer"] has its rates',
                tensors.name,
            )
        elif (momentum or 0) >= _MUCH_FOR_MUON and any(
            type(optimizer).__name__ == "Muon" for optimizer in tensors.optimizers
        ):
            _log.warning(
                "module '%s': with Muon inside an outer momentum of %s is much: leave "
                "outer_optimizer out, or take OuterSGD(0.7, 0.6)",
                tensors.name,
                momentum,
            )

    def mark_pending(self, bagua_ddp: Session) -> bool:
        if self._ranks.change_due and self._loop is not None:
            self._change_ranks(self._loop)
        if self._loop is not None:
            self._loop.make_postponed()
        return False

    def _change_ranks(self, loop: OuterLoop) -> None:
        session = self._wrapped()

        def replace(joining: bool) -> None:
            if joining:
                session.admit_joining_ranks()
            session.rebuild()

        self._ranks.change(loop, session.bagua_module_name, replace)

    def announce_end(self) -> None:
        session = None if self._session is None else self._session()
        state = None if self._loop is None else self._loop.state
        alone = self.process_group.size == 1 or self.process_group.rank > 0
        if session is None or state is None or not state.trained or alone:
            return
        since = f"since outer round {state.outer_rounds}" if state.outer_rounds else "at all"
        warn(
            f"module '{session.bagua_module_name}': training has ended between two outer "
            f"rounds of {self.arguments.interval} steps. No round was made {since}, so what each "
            "rank has learnt is in its own weights only. Call model.bagua_algorithm.sync() on "
            "every rank after the last step."
        )

    def close(self) -> None:
        self._loop = None
        self._ranks.close()

    # Control.

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """A context in which the model's weights are the anchor: to evaluate or to save.

        The anchor is equal on all ranks; in the warm-up the weights are. Afterwards the weights are
        this rank's own, to the bit. Buffers stay this rank's. It does not communicate. Inside
        another ``anchor()`` it changes nothing.

        Raises:
            BaguaError: a training step or ``sync()`` inside.
        """
        with nullcontext() if self._loop is None else self._loop.anchor():
            yield

    def sync(self) -> None:
        """Make an outer round now, of each fragment that a rank has trained since its last one.

        All ranks call it, between two steps. Afterwards the weights are the anchor, and the next
        round is ``interval`` steps away.

        With ``elastic`` it is repeated with those that are left where a rank is lost.

        Raises:
            BaguaError: another rank failed, or does not come.
        """
        while self._loop is not None:
            if self._ranks.change_due:
                self._change_ranks(self._loop)
            self._loop.sync()
            if self._ranks.failure is None:
                return

    @property
    def outer_rounds(self) -> int:
        """Rounds that have changed the anchor."""
        return 0 if self._loop is None else self._loop.state.outer_rounds

    @property
    def correlation(self) -> float | None:
        """Cosine of the last mean pseudo-gradient with the outer momentum before it."""
        return None if self._loop is None else self._loop.state.figures["correlation"]

    @property
    def gain(self) -> float | None:
        """Length of the last outer step along the mean pseudo-gradient, in units of that."""
        return None if self._loop is None else self._loop.state.figures["gain"]

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Anchor, momentum and counters: call it on every rank, between two steps.

        They are enough to go on with any number of ranks, from the last round. With the same number
        and every rank's own weights and optimizer state training goes on exactly.

        Returns:
            ``warmed_up`` and ``local_training``, 1 after the warm-up. Then ``fragments``, a digest
            of which parameters are in which, counters, and of every parameter ``anchor/<name>``, of
            its shape and f32 (f64), and the state of the outer optimizer as ``<key>/<name>``: of
            ``OuterSGD`` its ``momentum`` and ``rate``, the factor of that in the last step (one
            f64). ``rank<r>/weights`` is a digest by which this rank's weights are known again. With
            ``overlap_steps`` also ``mean/<name>``, the result that may be in flight, and
            ``rank<r>/launched/<name>``; of a mailbox ``rank<r>/counted``, whether this island's
            part is in that result. With error feedback the entries of Note [Ledger]: ``ranks``,
            those with residuals, ``rank<r>/error/<name>``, and
            ``rank<r>/server/<first element>/<name>``. Of a parameter that is a DTensor they are
            DTensors, for ``torch.distributed.checkpoint``; ``shards`` is the shape of the mesh, and
            ``rank<r>/`` is under ``shard<place in the mesh>/``. ``group_size`` counts all ranks.
        """
        loop = self._loop
        state: dict[str, Any] = self.ledger.counters | {_LOCAL: int(loop is not None)}
        if loop is None:
            return state
        state |= {key: value.clone() for key, value in loop.named_state().items()}
        own = loop.named_own_state()
        state |= {self._own(key): value.clone() for key, value in own.items()}
        if (digest := loop.digest()) is not None:
            state[self._own("weights")] = digest
        if loop.overlaps and self.arguments.elastic is not None and self.arguments.elastic.mails:
            pending = loop.state.pending
            state[self._own("counted")] = int(pending is None or pending.counted)
        state |= self.ledger.state()  # a round that named_state() has ended counts
        state |= {**loop.state.counters, _SIZE: self.process_group.size, _PLAN: self._digest()}
        return self._shards().saved(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`: on every rank, after ``bagua.wrap``, between two steps.

        If every rank's weights are those that were saved (loaded before or after this), training
        goes on where it was. Otherwise all ranks' weights become the anchor, and up to
        ``interval`` steps of each rank are lost. With error feedback another number of ranks than
        saved it needs the dicts of all old ranks merged into one (``a | b | ...``): each rank then
        starts from the mean of their residuals.

        A warm-up that was over when it was saved is over, whatever ``warmup_steps`` is now. One
        that was not goes on, or ends in the next training forward if it has been long enough.

        Raises:
            ValueError: the state is of another algorithm, model or schedule; names the entry, and
                nothing has changed then.
        """
        check_state(state, _OWNER)
        warmed_up = saved_count(state, self.counter, _OWNER)
        local = saved_count(state, _LOCAL, _OWNER) if _LOCAL in state else int("steps" in state)
        if not local:
            self.ledger.restore({self.counter: warmed_up}, [])
            if self._loop is not None:
                self._loop, self.warming_up = None, self.warmed_up  # the next forward builds anew
            return
        if self._loop is not None:
            self._loop.finish_round()  # whose result would overwrite a loaded one
        loaded = self._read(state)
        self.ledger.counters[self.counter] = max(warmed_up, self.warmup_steps)
        if self._loop is None:
            self._wrapped().rebuild()
        assert self._loop is not None
        loaded.give(self._loop, self._own(""))

    def _read(self, state: dict[str, Any]) -> _Loaded:
        """Check all of a state, and restore its residuals; ValueError: nothing has changed."""
        if self._loop is None:
            self._plan(self._wrapped())
        outer = self._new_state() if self._loop is None else self._loop.state
        counters = {key: _count_of(state, key) for key in outer.counters}
        plan = self._digest()
        same_plan = saved_count({_PLAN: plan, **state}, _PLAN, _OWNER) == plan
        self._check(counters, same_plan)
        same_ranks = saved_count(state, _SIZE, _OWNER) == self.process_group.size
        state, same_shards = self._shards().loaded(state)
        fragments = [fragment.loaded(state) for fragment in outer.fragments]
        likes = self._likes(outer, counters, same_ranks and same_shards)
        tensors = {key: saved_tensor(state, key, like, REMEDY) for key, like in likes.items()}
        digest = None
        if same_ranks and same_shards:
            if self._own("weights") in state:
                digest = saved_count(state, self._own("weights"), _OWNER)
            for key, like in outer.rank_weights.named_state():  # where they count something else
                saved = state.get(self._own(key))
                fits = isinstance(saved, torch.Tensor) and saved.shape == like.shape and same_plan
                fits = fits and saved.dtype == like.dtype  # type: ignore[union-attr]
                tensors[self._own(key)] = (
                    saved_tensor(state, self._own(key), like, REMEDY)
                    if fits
                    else torch.zeros_like(like)
                )
        self._restore_residuals(state, outer, same_ranks, same_shards)
        if not same_plan:
            counters["trained"] = (1 << len(fragments)) - 1
        counted = saved_count({self._own("counted"): 1, **state}, self._own("counted"), _OWNER)
        return _Loaded(fragments, tensors, counters, digest, counted != 0)

    def _likes(
        self, outer: OuterState, counters: dict[str, int], same: bool
    ) -> dict[str, torch.Tensor]:
        """What a round in flight has in a state, by key; ``same``: this rank has saved it."""
        if not counters["in_flight"]:
            return {}
        anchors = [pair for fragment in outer.fragments for pair in fragment.named_anchors()]
        named = [*anchors, *self._wrapped().bagua_mean_buffers().items()]
        likes = {f"mean/{name}": like for name, like in named}
        if same:
            for fragment in outer.fragments:
                likes |= {self._own(key): kept for key, kept in fragment.named_launched()}
        return likes

    def _restore_residuals(
        self, state: dict[str, Any], outer: OuterState, same_ranks: bool, same_shards: bool
    ) -> None:
        if not self.arguments.error_feedback:
            return
        restored: dict[str, Any] = {self.counter: self.ledger.counters[self.counter]}
        has_residuals = "ranks" in state  # not where it was saved without error feedback
        if has_residuals and same_shards and (same_ranks or not self._shards().parameters):
            restored = state
        elif has_residuals:
            _log.warning(
                "module '%s': saved by other ranks, or with other shards: residuals of the codec "
                "begin at zero",
                self._wrapped().bagua_module_name,
            )
        if self._loop is not None:
            self.ledger.restore(restored)
            return
        for name, anchor in (pair for f in outer.fragments for pair in f.named_anchors()):
            if (key := self._own(f"error/{name}")) in state:
                saved_tensor(state, key, anchor, REMEDY)
        self.ledger.restore(restored, [])

    def _check(self, counters: dict[str, int], same_plan: bool) -> None:
        schedule, part = self._schedule, counters["in_flight"] - 1
        if counters["steps"] >= schedule.interval:
            raise ValueError(
                f"{_OWNER}: saved after {counters['steps']} steps of an interval, which has "
                f"only {schedule.interval} now. Give the interval that it was saved with, or "
                "save after sync()."
            )
        if part < 0:
            return
        if part >= schedule.fragments:
            raise ValueError(
                f"{_OWNER}: saved with fragment {counters['in_flight']} in flight, there are "
                f"only {schedule.fragments} now. Give the fragments that it was saved with."
            )
        why, most = "", schedule.steps_to_launch(counters["steps"])
        if not same_plan:
            why = "other fragments. Give the fragments"
        elif schedule.overlap == 0:
            why = "overlap_steps, which are 0 now. Give the overlap_steps"
        elif not 1 <= counters["due"] <= most:
            why = (
                f"a result due in {counters['due']} steps, where the next fragment is launched "
                f"in {most} now. Give the interval, fragments and overlap_steps"
            )
        if why:
            raise ValueError(
                f"{_OWNER}: saved with a round in flight and {why} that it was saved with, or "
                "save after sync()."
            )

    def _digest(self) -> int:
        text = " ".join(f"{part}={name}" for name, part in sorted(self._parts.items()))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def _shards(self) -> Shards:
        group = self.process_group
        return Shards(_OWNER, self._wrapped().bagua_build_params(), group.rank, group.size)

    def _own(self, key: str) -> str:
        return f"rank{self.process_group.rank}/{key}"

    def _wrapped(self) -> Session:
        session = None if self._session is None else self._session()
        if session is None:
            raise BaguaError(f"{_OWNER}: its module has been deleted")
        return session


@dataclass
class _Loaded:
    """All of a state, checked; ``tensors`` by key."""

    fragments: list[Fragment]
    tensors: dict[str, torch.Tensor]
    counters: dict[str, int]
    digest: int | None
    counted: bool

    def give(self, loop: OuterLoop, own: str) -> None:
        """Have ``loop`` go on from it; keys of this rank begin with ``own``."""
        views = loop.named_means()
        views |= {own + key: view for key, view in loop.named_own_state().items()}
        for key, value in self.tensors.items():
            views[key].copy_(value)
        for mine, loaded in zip(loop.state.fragments, self.fragments, strict=True):
            mine.become(loaded)
        loop.resume_at(self.counters, self.digest, self.counted)


def _count_of(state: dict[str, Any], key: str) -> int:
    if key not in state and _LOCAL in state:
        raise ValueError(
            f"{_OWNER}: saved after the warm-up, and the state has no '{key}'. "
            "torch.distributed.checkpoint loads only what the training that loads has: wrap with "
            "warmup_steps=0 to load what was saved after the warm-up."
        )
    return saved_count(state, key, _OWNER)


def local_tensors(session: Session) -> LocalTensors:
    """What this rank trains of a wrapped module, which is not kept alive."""
    this = weakref.ref(session)
    name = session.bagua_module_name

    def alive() -> Session:
        if (session := this()) is None:
            raise RuntimeError(f"module '{name}' has been deleted")
        return session

    def weights() -> dict[str, torch.Tensor]:
        alive().check_plan()
        return {name: local(p) for name, p in alive().bagua_build_params()}

    return LocalTensors(
        name,
        session.bagua_optimizers,
        weights=weights,
        mean_buffers=lambda: alive().bagua_mean_buffers(),
        other_buffers=lambda: alive().bagua_other_buffers(),
        frozen=lambda: alive().bagua_frozen(),
        all_true=WholeSums([p for _, p in session.bagua_build_params()]).all_true,
    )


def number_of(fragments: Fragments) -> int | None:
    if isinstance(fragments, int):
        return fragments
    return None if callable(fragments) else len(fragments)


def check_fragments(fragments: Fragments) -> None:
    if callable(fragments):
        return
    if isinstance(fragments, bool) or not isinstance(fragments, (int, list, tuple)):
        raise TypeError(
            "fragments is a number, a list of lists of module names, or a function from a "
            f"parameter's name to the number of its fragment, not {fragments!r}"
        )
    if isinstance(fragments, int):
        if fragments < 1:
            raise ValueError(f"fragments={fragments} must be at least 1")
        return
    if not fragments:
        raise ValueError("fragments has no list of module names")
    for names in fragments:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"fragments: {names!r} is not a list of module names")


def _fragments_described(fragments: Fragments) -> str:
    if callable(fragments):
        return getattr(fragments, "__qualname__", type(fragments).__name__)
    return repr(fragments if isinstance(fragments, int) else [list(names) for names in fragments])


def _parts_of(
    fragments: Fragments, module: torch.nn.Module, names: Sequence[str]
) -> dict[str, int]:
    if isinstance(fragments, int):
        parts = _strided(fragments, module, names)
        count = fragments
    elif callable(fragments):
        parts = {name: fragments(name) for name in names}
        for name, part in parts.items():
            if isinstance(part, bool) or not isinstance(part, int) or part < 0:
                raise ValueError(f"fragments('{name}') is {part!r}, not a number from 0")
        count = max(parts.values(), default=-1) + 1
    else:
        parts = _listed(fragments, names)
        count = len(fragments)
    empty = sorted(set(range(count)) - set(parts.values()))
    if empty and names:
        raise ValueError(f"fragment(s) {empty} of {count} have no parameter that is trained")
    return parts


def _listed(fragments: Sequence[Sequence[str]], names: Sequence[str]) -> dict[str, int]:
    parts = {}
    for name in names:
        found = [
            part
            for part, modules in enumerate(fragments)
            if any(name == module or name.startswith(f"{module}.") for module in modules)
        ]
        if len(found) != 1:
            where = f"in fragments {found}" if found else "in no fragment"
            raise ValueError(f"parameter '{name}' is {where}; it must be in one")
        parts[name] = found[0]
    return parts


def _strided(count: int, module: torch.nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Block b to fragment b mod ``count``; what is in no block to the last."""
    if count == 1:
        return dict.fromkeys(names, 0)
    best: list[str] = []
    for path, child in module.named_modules():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            prefixes = [
                f"{path}.{key}." if path else f"{key}." for key, _ in child.named_children()
            ]
            blocks = [p for p in prefixes if any(name.startswith(p) for name in names)]
            best = max(best, blocks, key=len)
    if len(best) < count:
        raise ValueError(
            f"fragments={count}: the module has no ModuleList or Sequential of that many layers "
            f"with trained parameters, only of {len(best)}. Give lists of module names, or a "
            "function from a parameter's name to its fragment."
        )
    parts = dict.fromkeys(names, count - 1)
    for number, prefix in enumerate(best):
        for name in names:
            if name.startswith(prefix):
                parts[name] = number % count
    return parts


def _registered(like: torch.Tensor, name: str, module_name: str) -> torch.Tensor:
    """Registered memory for a pseudo-gradient or the mean of a buffer, in f32 (f64 of f64)."""
    wide = torch.promote_types(like.dtype, torch.float32)
    empty = torch.zeros_like(like, dtype=wide, requires_grad=False)
    return empty.ensure_bagua_tensor(name, module_name)  # type: ignore[attr-defined,no-any-return]
