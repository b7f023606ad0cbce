"""The engine of some buckets: how it is built, and how a wrapped module uses it in one step."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.connections import Connections, Peers, fingerprint, of_agreements
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.group.warn import warn_here
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.snapshot import warn_past_wrapper, warn_unused
from bagua._ops.operations import Lane, make_ops
from bagua._sync.hooks import WeakHook
from bagua._sync.synchronizer import Synchronizer

if TYPE_CHECKING:
    from bagua.torch_api._session import Session
    from bagua.torch_api.bucket import BaguaBucket

#: Time for which a closed module waits for other ranks.
_SECONDS_FOR_A_LAST_ROUND = 10.0

#: Lanes between ranks that are far apart, and how many connections they may take a rank.
_LANES_OF_FAR_RANKS = 8
_CONNECTIONS_OF_LANES = 128

_WITHOUT_BBR = (
    ". The kernel has no BBR, which keeps its rate where packets are lost: modprobe tcp_bbr on "
    "every machine"
)

_log = logging.getLogger("bagua")


@dataclass
class Plan:
    """An engine, where each tensor of each bucket is in it, and what its lanes send through.

    ``communicators``: (purpose, communicator) of every lane; purposes are those of Lane.
    """

    engine: _C.Engine
    slots: dict[str, int]
    communicators: list[tuple[str, _C.CountingCommunicator]]
    lanes: int


def describe(buckets: Sequence[BaguaBucket]) -> list[str]:
    lines = []
    for bucket in buckets:
        ops = [op.describe() for op in bucket.ops]
        ops += [] if bucket.asynchronous is None else [bucket.asynchronous.describe()]
        flat = bucket.backend_tensor
        lines.append(f"bucket {bucket.name}: {flat.numel()} x {flat.dtype}, ops {ops}")
        lines += [f"bucket {bucket.name}: {slot.name} at {slot.offset}" for slot in bucket.slots()]
    return lines


def _chosen_lanes() -> int | None:
    """``BAGUA_LANES``; None: unset."""
    text = os.environ.get("BAGUA_LANES")
    if not text:
        return None
    lanes = int(text) if text.isdecimal() else 0
    if not 1 <= lanes <= 16:
        raise ValueError(f"BAGUA_LANES={text} must be a whole number between 1 and 16")
    return lanes


def _number_of_lanes(
    buckets: Sequence[BaguaBucket], device: torch.device, connections: Connections
) -> int:
    """Equal on all ranks. Between ranks that are far apart a bucket waits for its messages most of
    the time, so that several are to be under way; each lane has connections to all other ranks.
    """
    lanes = _chosen_lanes()
    if lanes is None:
        several = connections.are_far and device.type == "cpu"
        affordable = max(2, _CONNECTIONS_OF_LANES // max(1, connections.size - 1))
        lanes = min(_LANES_OF_FAR_RANKS, affordable) if several else 1
    one_order = any(op.one_order for bucket in buckets for op in bucket.ops)
    return 1 if one_order else min(lanes, max(1, len(buckets)))


def _peers(buckets: Sequence[BaguaBucket]) -> Peers:
    """With whom a rank exchanges messages of ``buckets``, and of agreements about them."""
    asked = {op.peers for bucket in buckets for op in bucket.ops}
    return lambda rank, size: of_agreements(rank, size).union(
        *(peers(rank, size) for peers in asked)
    )


def _agree_in_the_lane(count: int, device: torch.device, size: int) -> bool:
    """Whether many ranks agree over the connections of their only lane."""
    return count == 1 and device.type == "cpu" and size > _C.MOST_RANKS_TOLD_DIRECTLY


def _lanes(
    wrap: str,
    count: int,
    device: torch.device,
    group: BaguaProcessGroup,
    peers: Peers,
    control: str,
) -> list[Lane]:
    """Lanes of which the first one connects the others, and for agreements, at the same time."""
    names = [f"{wrap}/lane{i}" for i in range(count)]
    beside = [f"{name}/all" for name in names[1:]]
    if not _agree_in_the_lane(count, device, group.connections.size):
        beside.append(control)
    lanes = [Lane(name, device, group, peers=peers) for name in names]
    lanes[0].beside = beside
    return lanes


def _control(lanes: Sequence[Lane], name: str) -> _C.CountingCommunicator:
    """For agreements. Of many ranks: connections of a single lane, whose thread uses them in turn.

    New ones where there are several lanes, or those of the lane are between nodes or of CUDA.
    """
    connections, device = lanes[0].connections(None), lanes[0].device
    if _agree_in_the_lane(len(lanes), device, connections.size):
        for (among, *_), members in lanes[0].communicators.items():
            if among is connections and members.size == connections.size:
                return members.counted_apart()
    made = connections.connect(name, "cpu", peers=of_agreements)
    connections.forget_unused()
    return made


def build(
    buckets: Sequence[BaguaBucket],
    group: BaguaProcessGroup,
    name: str,
    weights: _C.WeightsSample | None = None,
    *,
    agrees_next: bool = False,
) -> Plan:
    """Build the engine of a module. Every rank of ``group`` calls it, with equal buckets.

    ``agrees_next``: the caller's next act is a collective call of all ranks.
    """
    with group.connections.collective_phase(f"connecting module '{name}'"):
        plan = _build(buckets, group, name, weights)
        # Gloo's connect may return here while another rank is still inside; it would fail there if
        # this rank replaced the plan, or ended, at once.
        if not agrees_next:
            group.connections.reduce_numbers(f"connecting module '{name}'", _C.ReduceOp.SUM, 0)
        return plan


def _build(
    buckets: Sequence[BaguaBucket],
    group: BaguaProcessGroup,
    name: str,
    weights: _C.WeightsSample | None,
) -> Plan:
    connections = group.connections
    wrap = connections.next_wrap()
    description = describe(buckets)
    description += [] if weights is None else weights.describe()
    description.append(f"BAGUA_LANES={_chosen_lanes() or 'unset'}")
    incarnation = connections.agree("their buckets", description)
    device = buckets[0].backend_tensor.device if buckets else torch.device("cpu")
    count = _number_of_lanes(buckets, device, connections)
    if connections.are_far:
        _log.info(
            "module '%s': messages take %.1f ms there and back, so %d bucket(s) are under way at a "
            "time (BAGUA_LANES); congestion control of TCP: %s (BAGUA_CONGESTION_CONTROL)%s",
            *(name, connections.round_trip_us / 1000, count, connections.congestion_control),
            "" if env.congestion_control_of_far_ranks() else _WITHOUT_BBR,
        )
    control = f"{wrap}/control"
    builders = _lanes(wrap, count, device, group, _peers(buckets), control)
    native: list[list[_C.Bucket]] = [[] for _ in range(count)]
    order: list[list[str]] = [[] for _ in range(count)]
    for i, bucket in enumerate(buckets):
        builder = builders[i % count]
        slots = bucket.slots()
        bucket.position = (i, len(buckets))
        ops, adopt_scale = make_ops(builder, bucket)
        native[i % count].append(
            _C.Bucket(bucket.name, bucket.backend_tensor, slots, ops, adopt_scale, bucket.part)
        )
        order[i % count] += [slot.name for slot in slots]
    lanes = [_C.Lane(native[i], list(builders[i].communicators.values())) for i in range(count)]
    engine = _C.Engine(
        lanes,
        name=name,
        fingerprint=fingerprint(description),
        incarnation=incarnation,
        timeout_s=connections.timeout.total_seconds(),
        control=_control(builders, control),
        board=connections.board(wrap, f"module '{name}'"),
        straggler_after_s=env.get_straggler_seconds(),
        on_straggler=warn_here,
        weights=weights,
    )
    names = [slot for lane in order for slot in lane]
    communicators = [pair for builder in builders for pair in builder.by_purpose]
    slot_numbers = {slot: i for i, slot in enumerate(names)}
    return Plan(engine, slot_numbers, communicators, count)


@contextlib.contextmanager
def part_of_the_round(engine: _C.Engine) -> Iterator[None]:
    """Messages of the main thread inside belong to the round of ``engine``, and fail with it."""
    try:
        yield
    except _C.BaguaMismatchError:
        raise
    except _C.BaguaError as error:
        engine.fail(str(error), isinstance(error, _C.BaguaTimeoutError))


def finish_soon(engine: _C.Engine, bucket_rounds: int) -> bool:
    """Give the open round of ``engine``, all of whose slots are marked, some seconds to end.

    Returns whether its buckets have made ``bucket_rounds``, added up; then ``wait()`` returns at
    once.
    """
    deadline = time.monotonic() + _SECONDS_FOR_A_LAST_ROUND
    while time.monotonic() < deadline:
        engine.mark_ready(0)  # again, which does nothing but raise a failure
        if sum(bucket["rounds"] for bucket in engine.stats()["buckets"]) == bucket_rounds:
            return True
        time.sleep(0.005)
    return False


class EngineSynchronizer(Synchronizer):
    """The engine of a module's buckets, from one (re)build of the buckets to the next."""

    makes_rounds = True

    def __init__(self, ddp: Session) -> None:
        super().__init__()
        buckets, group = ddp.bagua_buckets, ddp.process_group
        plan = build(buckets, group, ddp.bagua_module_name, ddp.weights_sample())
        self.engine = plan.engine
        self.communicators, self.lanes = plan.communicators, plan.lanes
        self._buckets = buckets
        self._slots = plan.slots
        self._places = {
            record_of(tensor).name: (bucket, i)
            for bucket in self._buckets
            for i, tensor in enumerate(bucket.tensors)
        }
        for bucket in self._buckets:
            for tensor in bucket.tensors:
                record_of(tensor).marker = weakref.ref(self)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._path = self._make_path(ddp)
        self._begun = 0  # the last round that step_begins() was called for

    def _make_path(self, ddp: Session) -> _C.GradientPath:
        algorithm = ddp.bagua_algorithm
        own_marks = algorithm.overrides("init_backward_hook")
        own_wait = algorithm.overrides("init_post_backward_hook")
        checks = algorithm.overrides("init_pre_backward_hook")
        # The C++ hooks mark gradients; what else is registered is marked at the end of backward.
        plain = all(bucket.gradients for bucket in self._buckets)
        marks_at_end = not plain and not own_marks and not algorithm.traits.opens_at_forward
        # Weights that are communicated hold still in backward.
        weights: list[tuple[str, torch.Tensor]] = []
        if algorithm.traits.opens_at_forward:
            weights += ddp.bagua_build_params()
        owner = weakref.ref(ddp)
        this = weakref.ref(self)

        def after_backward() -> None:
            ddp, running = owner(), this()
            if ddp is not None and running is not None:
                if marks_at_end:
                    running.mark_all()
                ddp.bagua_algorithm.init_post_backward_hook(ddp)()

        def before_backward() -> None:
            if (ddp := owner()) is not None:
                ddp.bagua_algorithm.init_pre_backward_hook(ddp)()

        if own_marks:
            self._handles = _backward_hooks(ddp)
        return _C.GradientPath(
            self.engine,
            install_hooks=not own_marks,
            find_unused=ddp.find_unused_parameters,
            static_graph=ddp.static_graph,
            weights=weights,
            open_round=WeakHook(ddp.open_round_in_backward),
            before_backward=before_backward if checks else None,
            after_backward=None if plain and not own_wait else after_backward,
            after_gradients=WeakHook(ddp.after_gradients),
            on_unused=partial(warn_unused, ddp.bagua_module_name),
            on_past_wrapper=partial(warn_past_wrapper, ddp.bagua_module_name),
        )

    # One step, in the order in which things happen.

    def begin_forward(self, communicates: bool) -> None:
        self._path.begin_forward(communicates)

    def step_begins(
        self, grad_scale: float = 1.0, result_scale: float = 1.0, samples: float | None = None
    ) -> bool:
        self._path.begin_round(grad_scale, result_scale, samples)
        before, self._begun = self._begun, self.engine.round
        return self._begun != before

    def begin_without_inputs(self, result_scale: float) -> None:
        self.engine.begin_round(has_inputs=False)
        self.step_begins(1.0, result_scale)

    def agree_on_unfreezing(self, names: list[str]) -> None:
        digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest()
        self.engine.begin_round(frozen=int.from_bytes(digest, "little"))
        self.engine.await_agreement()

    @contextlib.contextmanager
    def part_of_the_round(self, by_samples: bool = False) -> Iterator[None]:
        if not self.engine.round_open:
            self.engine.begin_round(samples=1.0 if by_samples else None, samples_later=True)
        self.engine.await_agreement()
        with part_of_the_round(self.engine):
            yield

    def watch(self, outputs: list[torch.Tensor]) -> None:
        self._path.watch(outputs)

    @property
    def weight(self) -> float:
        return self.engine.weight

    @property
    def in_backward(self) -> bool:
        return self._path.in_backward

    def mark_tensor_ready(self, tensor: torch.Tensor) -> None:
        """Mark a registered tensor, for ``bagua_mark_communication_ready``."""
        name = record_of(tensor).name
        bucket, index = self._places[name]
        slot = self._slots[name]
        if self.engine.round_open and self.engine.marked(slot):
            raise _C.BaguaError(
                f"tensor '{name}' was marked ready twice in one round, after its bucket may have "
                "been sent; mark each tensor once"
            )
        if bucket.gradients:
            self._path.adopt(slot)
        else:
            bucket.copy_in(index)
        self.engine.mark_ready(slot)

    def mark_all(self) -> None:
        for bucket in self._buckets:
            if bucket.gradients or bucket.check_flatten():
                continue
            for index, tensor in enumerate(bucket.tensors):
                if not self.engine.marked(self._slots[record_of(tensor).name]):
                    bucket.copy_in(index)
        self.engine.mark_all()

    def answer_with_zeros(self) -> None:
        self._path.answer_with_zeros()

    def wait(self) -> None:
        self.engine.wait()
        for bucket in self._buckets:
            if not bucket.gradients:
                bucket.copy_out()

    def finish_soon(self) -> None:
        if finish_soon(self.engine, self.engine.round * len(self._buckets)):
            self.wait()

    @property
    def synchronising(self) -> bool:
        return self.engine.round_open

    @property
    def communicating(self) -> bool:
        return self._path.communicating

    # Control.

    def settle(self) -> None:
        self.engine.settle()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._path.remove_hooks()
        self.engine.stop()


def _backward_hooks(ddp: Session) -> list[torch.utils.hooks.RemovableHandle]:
    """The algorithm's own backward hook, on every parameter that is trained."""
    this = weakref.ref(ddp)
    handles = []
    for name, parameter in ddp.bagua_build_params():

        def hook(p: Any, name: str = name) -> None:
            session = this()
            if session is not None and session.communicates_in_backward:
                session.bagua_algorithm.init_backward_hook(session)(name, p)

        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return handles
