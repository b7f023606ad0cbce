"""Builds an engine from buckets: lanes, communicators, ops, and the plan's description."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.connections import fingerprint
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops.operations import Lane, make_ops

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

#: Time for which a closed module waits for other ranks.
_SECONDS_FOR_A_LAST_ROUND = 10.0


@dataclass
class Plan:
    """An engine, where each tensor of each bucket is in it, and what its lanes send through.

    ``communicators``: (purpose, communicator) of every lane; purposes are those of Lane.
    ``non_finite``: by bucket, what counts its rounds with NaN or infinity; none on CUDA.
    """

    engine: _C.Engine
    slots: dict[str, int]
    communicators: list[tuple[str, _C.CountingCommunicator]]
    non_finite: dict[str, _C.NonFiniteRounds]


def describe(buckets: Sequence[BaguaBucket]) -> list[str]:
    lines = []
    for bucket in buckets:
        ops = [op.describe() for op in bucket.ops]
        ops += [] if bucket.asynchronous is None else [bucket.asynchronous.describe()]
        flat = bucket.backend_tensor
        lines.append(f"bucket {bucket.name}: {flat.numel()} x {flat.dtype}, ops {ops}")
        lines += [f"bucket {bucket.name}: {slot.name} at {slot.offset}" for slot in bucket.slots()]
    return lines


def warn(text: str) -> None:
    """Warn of what is no reason to end a step, not even where warnings are errors."""
    with contextlib.suppress(Warning):
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _number_of_lanes(buckets: Sequence[BaguaBucket]) -> int:
    text = os.environ.get("BAGUA_LANES", "1")
    lanes = int(text) if text.isdecimal() else 0
    if not 1 <= lanes <= 16:
        raise ValueError(f"BAGUA_LANES={text} must be a whole number between 1 and 16")
    one_order = any(op.one_order for bucket in buckets for op in bucket.ops)
    return 1 if one_order else min(lanes, max(1, len(buckets)))


def build(
    buckets: Sequence[BaguaBucket],
    group: BaguaProcessGroup,
    name: str,
    wrap: str,
    weights: _C.WeightsSample | None = None,
) -> Plan:
    """Build the engine of a module. Every rank of ``group`` calls it, with equal buckets."""
    with group.connections.collective_phase(f"connecting module '{name}'"):
        plan = _build(buckets, group, name, wrap, weights)
        # Gloo's connect may return here while another rank is still inside; it would fail there if
        # this rank replaced the plan, or ended, at once.
        group.connections.reduce_numbers(f"connecting module '{name}'", _C.ReduceOp.SUM, 0)
        return plan


def _build(
    buckets: Sequence[BaguaBucket],
    group: BaguaProcessGroup,
    name: str,
    wrap: str,
    weights: _C.WeightsSample | None,
) -> Plan:
    connections = group.connections
    description = describe(buckets)
    description += [] if weights is None else weights.describe()
    connections.agree("their buckets", description)
    count = _number_of_lanes(buckets)
    device = buckets[0].backend_tensor.device if buckets else torch.device("cpu")
    builders = [Lane(f"{wrap}/lane{i}", device, group) for i in range(count)]
    native: list[list[_C.Bucket]] = [[] for _ in range(count)]
    order: list[list[str]] = [[] for _ in range(count)]
    non_finite: dict[str, _C.NonFiniteRounds] = {}
    for i, bucket in enumerate(buckets):
        builder = builders[i % count]
        slots = bucket.slots()
        bucket.position = (i, len(buckets))
        ops, adopt_scale, rounds = make_ops(builder, bucket)
        if rounds is not None:
            non_finite[bucket.name] = rounds
        native[i % count].append(
            _C.Bucket(bucket.name, bucket.backend_tensor, slots, ops, adopt_scale, bucket.part)
        )
        order[i % count] += [slot.name for slot in slots]
    lanes = [_C.Lane(native[i], list(builders[i].communicators.values())) for i in range(count)]
    engine = _C.Engine(
        lanes,
        name=name,
        fingerprint=fingerprint(description),
        incarnation=connections.incarnation(wrap),
        timeout_s=connections.timeout.total_seconds(),
        control=connections.connect(f"{wrap}/control", "cpu"),
        board=connections.board(wrap),
        straggler_after_s=env.get_straggler_seconds(),
        on_straggler=warn,
        weights=weights,
    )
    names = [slot for lane in order for slot in lane]
    communicators = [pair for builder in builders for pair in builder.by_purpose]
    slot_numbers = {slot: i for i, slot in enumerate(names)}
    return Plan(engine, slot_numbers, communicators, non_finite)


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
