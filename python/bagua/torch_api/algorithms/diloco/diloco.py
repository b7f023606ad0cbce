"""DiLoCo: an outer optimizer on the mean of what the ranks have learnt by themselves."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from bagua import _C, BaguaError
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.saved_values import check_state, saved_count
from bagua._sync.outer.fragment import Fragment
from bagua._sync.outer.outer_sgd import OuterSGD
from bagua._sync.outer.outer_state import OuterRounds
from bagua._sync.outer.outer_synchronizer import OuterSynchronizer
from bagua._sync.outer.schedule import Schedule
from bagua._sync.outer.shares import Shares, Weight
from bagua._sync.outer.succession import succeed
from bagua._sync.outer.survival import Survival
from bagua._sync.synchronizer import Synchronizer
from bagua._sync.wrapper import Bucket, Wrapper
from bagua.torch_api.algorithms._error_feedback import (
    CompressedMeans,
    RememberedMeans,
    is_wide,
    warn_of_useless_residuals,
)
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, WrappedModule
from bagua.torch_api.algorithms.bytegrad import aligned_buckets
from bagua.torch_api.algorithms.diloco.checkpoint import OuterCheckpoint
from bagua.torch_api.algorithms.diloco.fragments import (
    Fragments,
    check_fragments,
    fragments_described,
    number_of,
    parts_of,
)
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["DiLoCoAlgorithm", "DiLoCoAlgorithmImpl"]


class DiLoCoAlgorithm(Algorithm):
    """Ranks train by themselves; every ``interval`` optimizer steps an outer step joins them.

    All ranks hold an anchor of the weights, in float32, and its momentum. In a round each sends its
    pseudo-gradient, the anchor minus its weights; the outer optimizer steps on the anchor with the
    ranks' mean, and the weights become the anchor (DiLoCo, Douillard et al. 2023). Nothing is
    sent between rounds. The moments of the optimizers given to ``with_bagua`` stay on their rank.

    Steps are counted when the last of those optimizers has stepped, or a ``GradScaler`` has skipped
    its step. So gradient accumulation needs no ``no_sync()``. All ranks make equally many steps.

    Args:
        outer_optimizer: ``OuterSGD(lr=1.0, momentum=0.0)`` is local SGD; ``nesterov=False`` is
            SlowMo.
        interval: steps from one round to the next.
        fragments: parts of the model that are averaged one after the other, at equal distances in
            the interval: a number, which deals out the layers of the longest ``ModuleList`` or
            ``Sequential`` in turn, what is outside of it to the last; lists of names of
            modules; or a function from a parameter's name to its fragment's number.
        overlap_steps: steps from the launch of a fragment's average to the use of its result, below
            the steps from one fragment to the next; 0: it is waited for.
        merge: weights that meet a late anchor: ``"keep"`` adds what they have learnt since the
            launch to it; a number from 0 to 1 is their share in the mean of both.
        codec: for the pseudo-gradients, a name of ``bagua._C.codec_names()``; None: float32.
        error_feedback: each rank adds to its pseudo-gradients what the codec has taken from those
            of the last round, and likewise to the mean of its part of a bucket. Takes 8 bytes per
            parameter, and 8 / ranks. None: with codecs of less than 16 bits.
        hierarchical: exact inside a node, ``codec`` between the nodes' leaders.
        weight: of a rank in the mean: ``"ranks"``, all alike, or ``"samples"``, the square of those
            that it has trained on since the last round, which the training loop counts by
            ``model.bagua_algorithm.count_samples(n)``.
        guard: leave a rank out of a round if the norm of what it has learnt is not finite, or,
            after 120 rounds, more than three standard deviations above the mean of its former
            ones. It starts again from the anchor.
        outer_clip: the mean pseudo-gradient of a fragment is scaled to a norm of at most this.
        warmup_steps: iterations with exact all-reduce of gradients before the first local step.
        average_buffers: floating buffers get the ranks' mean in each round, exactly, others the
            first rank's values; False: they stay each rank's own.
        elastic: training goes on without ranks that are lost after the warm-up. A round that fails
            changes nothing; in the next training forward the others agree through the job's store
            on who is left. After ``init_process_group(elastic=True)`` a rank that is started again
            comes back in ``with_bagua``. False: a lost rank is an error.
        min_ranks: with ``elastic`` all ranks raise when fewer are left.

    Raises:
        TypeError: ``outer_optimizer`` is no :class:`OuterSGD`.
        ValueError: unknown codec, or an argument out of its range; from ``with_bagua``: no
            optimizer, or fragments that do not fit the module.
    """

    def __init__(
        self,
        outer_optimizer: OuterSGD | None = None,
        interval: int = 100,
        *,
        fragments: Fragments = 1,
        overlap_steps: int = 0,
        merge: Literal["keep"] | float = "keep",
        codec: str | None = None,
        error_feedback: bool | None = None,
        hierarchical: bool = False,
        weight: Weight = "ranks",
        guard: bool = False,
        outer_clip: float | None = None,
        warmup_steps: int = 0,
        average_buffers: bool = True,
        elastic: bool = False,
        min_ranks: int = 2,
    ) -> None:
        outer_optimizer = OuterSGD() if outer_optimizer is None else outer_optimizer
        if not isinstance(outer_optimizer, OuterSGD):
            raise TypeError(
                f"DiLoCoAlgorithm: outer_optimizer is an OuterSGD, such as OuterSGD(lr=0.7), not "
                f"{outer_optimizer!r}"
            )
        if interval < 1:
            raise ValueError(f"interval={interval} must be at least 1 optimizer step")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must be 0 or more iterations")
        if outer_clip is not None and not (math.isfinite(outer_clip) and outer_clip > 0):
            raise ValueError(f"outer_clip={outer_clip} must be a positive norm, or None")
        if codec is not None:
            _C.make_codec(codec)
        if error_feedback is None:
            error_feedback = codec is not None and not is_wide(codec)
        warn_of_useless_residuals("DiLoCoAlgorithm", codec, error_feedback)
        if weight not in ("ranks", "samples"):
            raise ValueError(f'weight={weight!r} must be "ranks" or "samples"')
        if overlap_steps < 0:
            raise ValueError(f"overlap_steps={overlap_steps} must be 0 or more")
        if merge != "keep" and (isinstance(merge, str) or not 0 <= merge <= 1):
            raise ValueError(f'merge={merge!r} must be "keep" or a share from 0 to 1')
        if min_ranks < 1:
            raise ValueError(f"min_ranks={min_ranks} must be at least 1")
        check_fragments(fragments)
        if (number := number_of(fragments)) is not None:
            Schedule(interval, number, overlap_steps)
        self.outer_optimizer = outer_optimizer
        self.interval = interval
        self.fragments = fragments
        self.overlap_steps = overlap_steps
        self.merge = merge
        self.codec = codec
        self.error_feedback = error_feedback and codec is not None
        self.hierarchical = hierarchical
        self.weight = weight
        self.guard = guard
        self.outer_clip = outer_clip
        self.warmup_steps = warmup_steps
        self.average_buffers = average_buffers
        self.elastic = elastic
        self.min_ranks = min_ranks

    def describe(self) -> str:
        fragments = fragments_described(self.fragments)
        weighs = f"weight={self.weight} guard={self.guard}"
        return f"{super().describe()} fragments={fragments} {weighs} {self.outer_optimizer}"

    def reify(self, process_group: BaguaProcessGroup) -> DiLoCoAlgorithmImpl:
        return DiLoCoAlgorithmImpl(process_group, self)


class DiLoCoAlgorithmImpl(AlgorithmImpl):
    """Implementation of :class:`DiLoCoAlgorithm`: ``model.bagua_algorithm``.

    A warm-up iteration is a forward and a backward outside ``no_sync()``.

    Attributes:
        pairs: whether ranks meet one peer in each round, and hold anchors of their own.
        owner: the algorithm's name in errors.
    """

    pairs = False
    owner = "DiLoCoAlgorithm"
    broadcast_buffers = False
    ranks_agree = False
    reads_grad_scale = False
    steps_in_backward = False
    refuses_guard = (
        "it watches its own rounds. Leave guard= out: bagua_stats() has how far the ranks agree, "
        "and DiLoCoAlgorithm(guard=True, outer_clip=...) acts on it."
    )

    def __init__(self, process_group: BaguaProcessGroup, arguments: DiLoCoAlgorithm) -> None:
        comes_back = process_group.waits_to_join
        self._survival = Survival(process_group, arguments.min_ranks) if arguments.elastic else None
        self._before: OuterSynchronizer | None = None  # the plan that another one replaces
        super().__init__(process_group)
        self.arguments = arguments
        # Completed iterations of the warm-up, which is over for the ranks that one comes back to.
        self._warmed_up = arguments.warmup_steps if comes_back else 0
        self._local = False  # the warm-up is over, as far as buckets are concerned
        self._outer: OuterSynchronizer | None = None
        self._means: RememberedMeans | None = None  # with error feedback, after the warm-up
        self._outcomes: defaultdict[int, _C.RoundOutcome] = defaultdict(_C.RoundOutcome)
        self._shares: Shares | None = None
        self._parts: dict[str, int] = {}  # fragments by name of the parameter
        self._schedule = Schedule(arguments.interval, 1, 0)
        self.communications = torch.zeros((), dtype=torch.int64, device="cpu")  # with peers
        self._ddp: weakref.ref[WrappedModule] | None = None

    # Set-up.

    def need_reset(self) -> bool:
        return self._local != (self._warmed_up >= self.arguments.warmup_steps)

    def init_tensors(self, bagua_ddp: WrappedModule) -> list[torch.Tensor]:
        if not bagua_ddp.bagua_optimizers:
            raise ValueError(
                f"module '{bagua_ddp.bagua_module_name}': {self.owner} counts the steps of the "
                "optimizers given to with_bagua: give it the one that trains the module"
            )
        self._ddp = weakref.ref(bagua_ddp)
        self._outer = None
        self._means = None
        self.communications = torch.zeros((), dtype=torch.int64, device="cpu")
        self._local = self._warmed_up >= self.arguments.warmup_steps
        if not self._local:
            return super().init_tensors(bagua_ddp)
        self._means = self.make_means()
        self._outcomes.clear()
        named: list[tuple[str, torch.Tensor]] = [*bagua_ddp.bagua_build_params()]
        names = [name for name, _ in named]
        self._parts = parts_of(self.arguments.fragments, bagua_ddp.module, names)
        self._schedule = Schedule(
            self.arguments.interval,
            max(self._parts.values(), default=0) + 1,
            self.arguments.overlap_steps,
        )
        named.sort(key=lambda pair: self._parts[pair[0]])
        if self.arguments.average_buffers:
            named += bagua_ddp.bagua_floating_buffers()
        return [_wide(tensor, name, bagua_ddp.bagua_module_name) for name, tensor in named]

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        if not self._local:
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
        """The fragment of the weight that ``tensor`` stands for; None for a buffer."""
        return self._parts.get(record_of(tensor).name)

    def init_operations(self, bagua_ddp: WrappedModule, bucket: BaguaBucket) -> None:
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
        part, codec = self._part_of(bucket.tensors[0]), self.arguments.codec
        if part is not None and codec is not None and isinstance(self._means, CompressedMeans):
            self._means.append_to(bucket, codec, self._outcomes[part])
            return
        bucket.append_centralized_synchronous_op(
            hierarchical=self.arguments.hierarchical,
            average=True,
            compression=None if part is None else codec,
            group=self.process_group,
        )

    def make_fragment(self, part: int, buckets: Sequence[Bucket]) -> Fragment:
        """The outer state of a fragment."""
        return Fragment(part, buckets, keeps=self._alpha is None and self._schedule.overlap > 0)

    @property
    def _alpha(self) -> float | None:
        merge = self.arguments.merge
        return None if merge == "keep" else float(merge)

    def make_synchronizer(self, bagua_ddp: Wrapper) -> Synchronizer:
        if not self._local:
            return super().make_synchronizer(bagua_ddp)
        arguments = self.arguments
        parts: dict[int | None, list[Bucket]] = {}
        for bucket in bagua_ddp.bagua_buckets:
            parts.setdefault(self._part_of(bucket.tensors[0]), []).append(bucket)
        buffers = parts.pop(None, [])
        self._shares = self._make_shares(bagua_ddp.bagua_module_name)
        self._outer = OuterSynchronizer(
            bagua_ddp,
            [self.make_fragment(part, parts[part]) for part in range(self._schedule.fragments)],
            buffers,
            OuterRounds(
                arguments.outer_optimizer,
                self._schedule,
                alpha=self._alpha,
                clip=arguments.outer_clip,
                communications=self.communications,
                pairs=self.pairs,
                survival=self._survival,
                shares=self._shares,
            ),
        )
        if self._survival is not None:
            self._survival.found()
            if self._survival.heritage is not None:
                heritage, self._survival.heritage = self._survival.heritage, None
                succeed(self._outer, self._before, heritage, self.process_group)
        return self._outer

    def mark_pending(self, bagua_ddp: WrappedModule) -> bool:
        if self._survival is not None and self._survival.change_due:
            self._change_members(bagua_ddp)
        return False

    def _change_members(self, bagua_ddp: WrappedModule) -> None:
        """Build a plan over the ranks that are left or have come back. All of them call it."""
        assert self._survival is not None
        assert self._outer is not None
        self._before = self._outer

        def replace(joining: bool) -> None:
            if joining:
                bagua_ddp.welcome()
            bagua_ddp.rebuild()

        self._survival.change(bagua_ddp.bagua_module_name, self._before.report(), replace)
        self._before = None

    def _make_shares(self, name: str) -> Shares | None:
        arguments, fragments = self.arguments, self._schedule.fragments
        if arguments.weight == "ranks" and not arguments.guard:
            return None
        connections = self.process_group.connections
        return Shares(connections, name, fragments, arguments.weight, arguments.guard)

    def init_post_backward_hook(self, bagua_ddp: WrappedModule) -> Callable[[], None]:
        def finish_warm_up_iteration() -> None:
            bagua_ddp.wait_pending_comm_ops()
            self._warmed_up += 1

        return finish_warm_up_iteration

    def close(self) -> None:
        self._outer = None
        if self._survival is not None:
            self._survival.close()

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
            if self._survival is None or self._survival.failure is None:
                return
            self._change_members(self._wrapped())

    def count_samples(self, samples: int) -> None:
        """With ``weight="samples"``: this rank has trained on so many more, tokens for example.

        Call it after each step's forward. In the warm-up, and with other weights, nothing counts.

        Raises:
            ValueError: a negative number.
        """
        if samples < 0:
            raise ValueError(f"count_samples({samples}): a number of samples is 0 or more")
        if self._shares is not None:
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
            every parameter, of its shape and f32 (f64), and ``rank<r>/weights``, a digest by which
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

    def _checkpoint(self) -> OuterCheckpoint | None:
        """The state of the outer rounds, from the end of the warm-up on."""
        if self._outer is None:
            return None
        return OuterCheckpoint(
            self.owner, self.process_group, self._schedule, self._outer, self._means
        )

    def _wrapped(self) -> WrappedModule:
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None:
            raise BaguaError(f"{self.owner}: its module has been deleted")
        return ddp


def _wide(tensor: torch.Tensor, name: str, module_name: str) -> torch.Tensor:
    """Registered memory for a pseudo-gradient or the mean of a buffer."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    empty: torch.Tensor = torch.zeros_like(tensor, dtype=wide, requires_grad=False)
    return empty.ensure_bagua_tensor(name, module_name)  # type: ignore[attr-defined,no-any-return]
