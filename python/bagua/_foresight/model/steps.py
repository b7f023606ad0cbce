"""A step of training beside lanes: where its buckets become ready, and where it waits for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from bagua._foresight.model.events import Timeline
from bagua._foresight.model.lanes import Lanes, union
from bagua._foresight.model.network import Stage
from bagua._foresight.prediction import Prediction, Span
from bagua._foresight.profile import BucketProfile, Profile

__all__ = [
    "Setting",
    "Work",
    "async_step",
    "gradients",
    "rounds",
    "weights_after",
    "weights_before",
]

# In units of a copy of memory:
_ADOPT = 1.0  # a gradient into its bucket
_LAUNCH = 2.3  # pseudo-gradients and their norm
_ARRIVE = 6.5  # two norms and a product in float64, the outer step, and the weights
_IN_THE_GATE = 3.0  # snapshot; weights - snapshot + mean


@dataclass(frozen=True)
class Work:
    """A bucket with the stages of its operations."""

    bucket: BucketProfile
    stages: Sequence[Stage]


@dataclass(frozen=True)
class Setting:
    """Figures that all kinds of steps share.

    Attributes:
        profile: of the training.
        lanes: their number.
        waits_for: ranks that a step waits for, its own included.
    """

    profile: Profile
    lanes: int
    waits_for: int

    def slowest(self, steps: int = 1) -> float:
        """Seconds of compute of the slowest of those ranks, per step, over so many steps.

        The expected maximum of normal variables by Blom's approximation (*Statistical Estimates and
        Transformed Beta-Variables*, 1958); the sum of independent steps varies by their root. Ranks
        that share cores lose nothing: one that waits leaves its cores to the others.
        """
        ranks, spread = self.waits_for, self.profile.spread
        if ranks < 2 or self.profile.cores < 1:
            return self.profile.compute
        above = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        return self.profile.compute * (1 + spread * above / math.sqrt(steps))

    def seconds_of_copy(self, size: float) -> float:
        return size / self.profile.copy


def gradients(setting: Setting, work: Sequence[Work]) -> Prediction:
    """Buckets of gradients that become ready during backward, whose results the optimizer needs."""
    profile = setting.profile
    slow = setting.slowest() / profile.compute
    timeline = Timeline(profile.cores)
    lanes = Lanes(timeline, setting.lanes, timeline.add(profile.round))
    # Training computes up to the readiness of a bucket, and copies its gradients into it.
    order = sorted(range(len(work)), key=lambda i: work[i].bucket.ready)
    ready, trained, last = [0] * len(work), 0.0, None
    for index in order:
        bucket = work[index].bucket
        seconds = (bucket.ready - trained) * slow + setting.seconds_of_copy(bucket.bytes) * _ADOPT
        last = timeline.add(seconds, cores=1.0, after=(last,))
        ready[index], trained = last, bucket.ready
    for index, item in enumerate(work):
        lanes.run(ready[index], item.stages)
    backward = (profile.compute - profile.optimizer - trained) * slow
    last = timeline.add(backward, cores=1.0, after=(last,))
    timeline.add(profile.optimizer * slow, cores=1.0, after=(last, *lanes.ends))
    return _prediction(setting, timeline.run(), lanes, 1)


def weights_before(setting: Setting, work: Sequence[Work], interval: int) -> Prediction:
    """Buckets of weights that are ready at the forward, and copied back after backward."""
    profile = setting.profile
    slow = setting.slowest() / profile.compute
    timeline = Timeline(profile.cores)
    begin = timeline.add(0.0)
    lanes = Lanes(timeline, setting.lanes, timeline.add(profile.round))
    for item in work:
        lanes.run(begin, item.stages)
    backward = timeline.add((profile.compute - profile.optimizer) * slow, cores=1.0)
    size = sum(item.bucket.bytes for item in work)
    copied = timeline.add(setting.seconds_of_copy(size), cores=1.0, after=(backward, *lanes.ends))
    timeline.add(profile.optimizer * slow, cores=1.0, after=(copied,))
    return _prediction(setting, timeline.run(), lanes, interval)


def weights_after(setting: Setting, work: Sequence[Work], interval: int) -> Prediction:
    """Buckets of weights that are ready after the optimizer's step, which waits for them."""
    timeline = Timeline(setting.profile.cores)
    begin = timeline.add(setting.slowest(), cores=1.0)
    lanes = Lanes(timeline, setting.lanes, None)
    for item in work:
        lanes.run(begin, item.stages)
    return _prediction(setting, timeline.run(), lanes, interval)


def rounds(
    setting: Setting,
    fragments: Sequence[Sequence[Work]],
    interval: int,
    overlap: int,
) -> Prediction:
    """Rounds of fragments, each once in ``interval`` steps; ``overlap`` steps of training beside.

    A round: pseudo-gradients and their norm, the agreement, the operations, the norms of mean and
    momentum, the outer step, and the anchor's values for the weights.
    """
    profile, compute = setting.profile, setting.slowest(interval)
    total, sent, busy = compute * interval, 0, 0.0
    spans: tuple[Span, ...] = ()
    for work in fragments:
        size = sum(item.bucket.bytes for item in work)
        timeline = Timeline(profile.cores)
        launched = timeline.add(setting.seconds_of_copy(size) * _LAUNCH, cores=1.0)
        agreed = timeline.add(profile.round, after=(launched,))
        lanes = Lanes(timeline, setting.lanes, agreed)
        for item in work:
            lanes.run(launched, item.stages)
        trained = timeline.add(compute * overlap, cores=1.0, after=(launched,))
        timeline.add(
            setting.seconds_of_copy(size) * _ARRIVE, cores=1.0, after=(trained, *lanes.ends)
        )
        total += timeline.run() - compute * overlap
        sent += lanes.sent
        spans = lanes.spans()
        busy += union(spans)
    step = total / interval
    return Prediction(step, step - profile.compute, round(sent / interval), busy / interval, spans)


def async_step(setting: Setting, average: Sequence[Stage], pause: float) -> Prediction:
    """Steps beside a lane that averages the weights, and sleeps for ``pause`` seconds after it.

    Snapshot and result enter through a gate which training holds during a step: the lane waits for
    the end of one on every rank, training waits while the lane is inside.
    """
    profile = setting.profile
    cores, size = profile.cores, profile.bytes
    inside = setting.seconds_of_copy(size) * _IN_THE_GATE
    timeline = Timeline(cores)
    begin = timeline.add(0.0)
    lanes = Lanes(timeline, 1, None)
    lanes.run(begin, average)
    alone = timeline.run()
    # Beside training: the same with a thread that never ends.
    timeline = Timeline(cores)
    horizon = 1000 * (alone + profile.compute)
    timeline.add(horizon, cores=1.0)
    lanes = Lanes(timeline, 1, None)
    lanes.run(timeline.add(0.0), average)
    finished = timeline.run() - horizon
    lost = max(0.0, finished)
    beside = max(span.end for span in lanes.spans())
    period = pause + beside + inside + 2 * setting.slowest()
    step = profile.compute * period / max(period - inside - lost, 0.1 * period)
    spans = lanes.spans()
    share = step / period
    return Prediction(
        step, step - profile.compute, round(lanes.sent * share), beside * share, spans
    )


def _prediction(setting: Setting, end: float, lanes: Lanes, interval: int) -> Prediction:
    compute, spans = setting.profile.compute, lanes.spans()
    alone = setting.slowest(interval)
    step = (end + (interval - 1) * alone) / interval
    return Prediction(
        step,
        max(0.0, step - compute),
        round(lanes.sent / interval),
        union(spans) / interval,
        spans,
    )
