"""The first stage of ``AutoAlgorithm``: exact steps, in which the training is measured."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bagua._core.group.connections import Connections
from bagua._foresight.candidate import Candidate
from bagua._foresight.probe.speeds import codec_speed, copy_speed
from bagua._foresight.profile import BucketProfile, CodecSpeed, Profile
from bagua.torch_api.algorithms.auto.agreed import largest, mean, smallest
from bagua.torch_api.algorithms.auto.candidates import codecs_of, loss_of
from bagua.torch_api.algorithms.auto.probe.errors import error_of
from bagua.torch_api.algorithms.auto.probe.links import measure_links, node_sizes
from bagua.torch_api.algorithms.auto.probe.steps import Gradients, StepTimes

__all__ = ["Group", "Measuring"]

_WHAT = "measuring the training for AutoAlgorithm"
#: Steps with gradients taken: the first one warms up, later ones follow an overflow of AMP.
_SAMPLED, _MOST_SAMPLED = 2, 8
_TIMED = 4
#: An exact step that takes longer is not repeated: predictions differ by more than noise there.
_SLOW_SECONDS = 1.0
_MOST_CODEC_NUMEL = 1024**2
_COPIED_NUMEL = 8 * 1024**2  # more than caches hold


@dataclass(frozen=True)
class Group:
    """Tensors that share a bucket by default.

    Attributes:
        names: of the parameters.
        numel: elements of all.
        bytes: of all.
        shapes: as matrices; a vector is ``(numel, 1)``.
    """

    names: tuple[str, ...]
    numel: int
    bytes: int
    shapes: tuple[tuple[int, int], ...]


class Measuring:
    """Measures until :meth:`round_ended` returns a profile, the same on all ranks.

    Args:
        named: the parameters that are trained.
        groups: how they share buckets by default.
        candidates: whose codecs and losses are measured.
        most_steps: after which the profile is made.
        most_seconds: of training, likewise.

    Attributes:
        rounds: that have ended.
    """

    def __init__(
        self,
        connections: Connections,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        groups: Sequence[Group],
        candidates: Sequence[Candidate],
        most_steps: int,
        most_seconds: float,
    ) -> None:
        self.times = StepTimes()
        self._connections = connections
        self._device = named[0][1].device
        self._groups = groups
        self._candidates = candidates
        self._most_steps = most_steps
        self._most_seconds = most_seconds
        self._begun = time.perf_counter()
        self.rounds = 0
        self._timed = 0  # without hooks
        self._wire = math.inf  # of the fastest round so far
        self._hooks: Gradients | None = Gradients(named)
        self._ready: dict[str, float] = {}
        self._errors: dict[str, float] = {}
        self._profile: Profile | None = None

    def forward_begins(self) -> None:
        """Called before the forward of each step."""
        if self._hooks is not None:
            self._hooks.step_begins()
        self.times.forward_begins()

    def round_ended(self, exposed: float, wire: float) -> Profile | None:
        """Called after each round.

        Args:
            exposed: seconds in which it blocked this rank.
            wire: seconds of this rank's lane inside communicators.
        """
        self.rounds += 1
        self.times.backward_ended(exposed)
        self._wire = min(self._wire, wire)
        if self._profile is None:
            self._profile = self._machine()
        slow = self._exact_seconds() > _SLOW_SECONDS
        if self._hooks is not None:
            return self._sampled(slow)
        self._timed += 1
        return self._complete() if self._timed > _TIMED or self._over() else None

    def _sampled(self, slow: bool) -> Profile | None:
        """A step has ended in which gradients were taken."""
        last = slow or self._over()
        if last or self.rounds >= _SAMPLED:
            self._take_sample()
            finite = math.isfinite(sum(self._errors.values()))
            if finite or self.rounds >= _MOST_SAMPLED:
                self.close()
                if last:
                    return self._complete()
        self.times.restart()
        return None

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def _over(self) -> bool:
        seconds = time.perf_counter() - self._begun
        (most,) = largest(self._connections, _WHAT, [seconds])
        return most > self._most_seconds or self.rounds >= self._most_steps

    def _exact_seconds(self) -> float:
        assert self._profile is not None
        size = self._connections.size
        return 2 * self._profile.bytes * (size - 1) / size / self._profile.between.bandwidth

    def _machine(self) -> Profile:
        """Links, codecs and memory; times of steps are those of the first, for want of others."""
        connections, device = self._connections, self._device
        links = measure_links(connections, device)
        numel = min(max(group.numel for group in self._groups), _MOST_CODEC_NUMEL)
        names = codecs_of(self._candidates)
        speeds = [codec_speed(name, numel, device) for name in names]
        flat = [v for speed in speeds for v in (speed.encode, speed.decode, speed.decode_add)]
        copy, *agreed = smallest(connections, _WHAT, [copy_speed(device, _COPIED_NUMEL), *flat])
        sizes = node_sizes(connections)
        share = max(sizes) if device.type == "cpu" else 1
        buckets = tuple(
            BucketProfile(group.numel, group.bytes, 0.0, group.shapes) for group in self._groups
        )
        return Profile(
            ranks=connections.size,
            nodes=sizes,
            compute=1e-9,
            optimizer=0.0,
            buckets=buckets,
            between=links.between,
            inside=links.inside,
            collective=links.between.overhead or 0.0,
            round=(links.between.overhead or 0.0) + 2 * links.between.latency,
            codecs={name: CodecSpeed(*agreed[3 * i : 3 * i + 3]) for i, name in enumerate(names)},
            copy=copy,
            cores=max(1.0, len(os.sched_getaffinity(0)) / share),
        )

    def _take_sample(self) -> None:
        assert self._hooks is not None
        sample = self._hooks.sample
        self._ready = sample.ready()
        keys = sorted({loss_of(one).key for one in self._candidates} - {""})
        gradients = list(sample.values.values())
        found = [error_of(key, gradients) for key in keys]
        self._errors = dict(zip(keys, largest(self._connections, _WHAT, found), strict=True))

    def _complete(self) -> Profile:
        assert self._profile is not None
        self.close()
        last = max(self._ready.values(), default=0.0)
        inside, after = self.times.compute()
        # Hooks slow down the step in which gradients are taken: its times are only proportions. On
        # a device they are all there is, as the host does not wait for it.
        timed = self._timed > 0 and inside > 0 and self._device.type == "cpu"
        inside = inside if timed else last
        scale = inside / last if last > 0 else 1.0
        ready = [
            max((self._ready.get(name, last) for name in group.names), default=last) * scale
            for group in self._groups
        ]
        inside, square, after, *ready = mean(
            self._connections, _WHAT, [inside, inside**2, after, *ready]
        )
        inside = max(inside, *ready, 1e-6)
        buckets = tuple(
            replace(bucket, ready=at)
            for bucket, at in zip(self._profile.buckets, ready, strict=True)
        )
        return replace(
            self._with_exact_rounds(self._profile),
            compute=inside + after,
            optimizer=after,
            buckets=buckets,
            spread=math.sqrt(max(square - inside**2, 0.0)) / (inside + after),
            errors={key: error for key, error in self._errors.items() if math.isfinite(error)},
        )

    def _with_exact_rounds(self, profile: Profile) -> Profile:
        """``profile`` with the bandwidth that the all-reduces of the steps had.

        The rank that comes last waits least: the shortest time of all ranks counts.
        """
        (wire,) = smallest(self._connections, _WHAT, [self._wire])
        ranks, links = profile.ranks, [profile.between, profile.inside or profile.between]
        slower = min(links, key=lambda link: link.bandwidth)
        seconds = wire - (slower.overhead or 0.0) - 2 * (ranks - 1) * slower.latency
        if not (0 < seconds < math.inf):
            return profile
        messages = slower.messages or slower.bandwidth
        bandwidth = 2 * profile.bytes * (ranks - 1) / ranks / seconds
        found = replace(slower, bandwidth=bandwidth, messages=messages)
        found = replace(found, processor=min(found.processor, 1 / bandwidth))
        if slower is profile.inside:
            return replace(profile, inside=found)
        return replace(profile, between=found)
