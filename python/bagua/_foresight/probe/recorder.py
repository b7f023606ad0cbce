"""Writes the profile of a training, measured while it runs."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.connections import Connections
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._foresight import profile_file
from bagua._foresight.probe import links, speeds
from bagua._foresight.probe.steps import StepProbe, StepTimes
from bagua._foresight.profile import BucketProfile, CodecSpeed, Link, Profile
from bagua._sync.bucketing import split_by_bucket_size
from bagua._sync.outside_graphs import outside_graphs

__all__ = ["ASSUMED_LINK", "ProfileMeasured", "Recorder", "end_when_done", "record"]

#: Of a profile of one rank, which has no link: 10 Gbit/s.
ASSUMED_LINK = Link(latency=50e-6, bandwidth=1.25e9)

_CODECS = ("block_uint8", "int4_block", "bit2_block")
#: Elements that codecs are timed with: as many as the model has, within these bounds,
#: so that caches hold as much of them as in training.
_LEAST_NUMEL, _MOST_NUMEL = 1 << 20, 1 << 24
_MATRIX = (1024, 2048)
_log = logging.getLogger("bagua")


class ProfileMeasured(BaseException):
    """Ends a script after its profile has been measured."""


class Recorded(Protocol):
    """The wrapper of a module."""

    bagua_module_name: str
    process_group: BaguaProcessGroup

    @property
    def module(self) -> torch.nn.Module: ...

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]: ...

    def stats(self) -> dict[str, Any]: ...


def record(owner: Recorded, bucket_bytes: int) -> list[RemovableHandle]:
    """Record the first module of the process that is wrapped, if ``BAGUA_PROFILE`` asks for it.

    Returns:
        The hooks on the module, which copies of it must not have.
    """
    global _recorder
    path = env.get_profile_path()
    if path is None or _recorder is not None or not owner.bagua_build_params():
        return []
    _recorder = Recorder(owner, Path(path), bucket_bytes)
    return [_recorder.handle]


def end_when_done() -> None:
    """Raise :class:`ProfileMeasured` in the training when the profile is written."""
    global _ends
    _ends = True


class Recorder:
    """Measures the steps of a module, then the machine, and writes the profile on the first rank.

    A step is from one training forward to the next; gradients are not accumulated. All ranks make
    equally many steps until then. Time in which communication blocks the training does not count;
    what lanes take from the training's cores does, unless there is one rank.

    Args:
        owner: of the module; held weakly.
        path: of the file.
        bucket_bytes: as of the wrap.

    Attributes:
        done: whether the profile has been measured.
        handle: of the hook on the module.
    """

    def __init__(self, owner: Recorded, path: Path, bucket_bytes: int) -> None:
        self.done = False
        self._owner = weakref.ref(owner)
        self._path = path
        self._bucket_bytes = bucket_bytes
        this = weakref.ref(owner)

        def blocked() -> float:
            wrapper = this()
            exposed = 0 if wrapper is None else wrapper.stats()["exposed_ns"]
            return float(exposed) / 1e9

        self._probe = StepProbe(owner.bagua_build_params(), blocked)
        self.handle = owner.module.register_forward_pre_hook(outside_graphs(self._forward_begins))

    def _forward_begins(self, module: torch.nn.Module, _: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        self._probe.step_begins()
        owner = self._owner()
        if not self._probe.done or owner is None:
            return
        self.handle.remove()
        self._probe.close()
        named = owner.bagua_build_params()
        connections = owner.process_group.connections
        profile = measured(self._probe.times(), named, connections, self._bucket_bytes)
        if connections.rank == 0:
            profile_file.write_profile(profile, self._path)
            _log.info("module '%s': profile in %s", owner.bagua_module_name, self._path)
        self.done = True
        if _ends:
            connections.reduce_numbers("ending bagua profile", _C.ReduceOp.MAX, 0)
            raise ProfileMeasured


def measured(
    times: StepTimes,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    connections: Connections,
    bucket_bytes: int,
) -> Profile:
    """The profile of these times and of this machine; the first rank's has the links.

    All ranks call it. Buckets are those of ``gradient_allreduce``.
    """
    device = named[0][1].device
    ready = [times.ready.get(name, times.compute - times.optimizer) for name, _ in named]
    numel = sum(parameter.numel() for _, parameter in named)
    numel = min(max(numel, _LEAST_NUMEL), _MOST_NUMEL)
    codecs = {name: speeds.codec_speed(name, numel, device) for name in _CODECS}
    own = [
        times.compute,
        times.compute**2 * (1 + times.spread**2),
        times.optimizer,
        speeds.copy_speed(device),
        *(v for speed in codecs.values() for v in (speed.encode, speed.decode, speed.decode_add)),
        *ready,
    ]
    arithmetic: dict[str, float] = {}
    between, inside, agreement = ASSUMED_LINK, None, 0.0
    nodes = connections.node_of_ranks()
    sizes = tuple(nodes.count(node) for node in dict.fromkeys(nodes))
    if connections.size > 1:
        communicator = connections.main_communicator(device)
        own = _means(communicator, own, device)
        between, inside = _links(connections, device, sizes)
        agreement = links.round_of(communicator, device)
    if device.type == "cpu":
        arithmetic["top_k"] = speeds.top_k_speed(numel)
        if connections.size > 1:
            arithmetic["low_rank"] = speeds.low_rank_speed(communicator, *_MATRIX)
    compute, square, optimizer, copies, *rest = own
    figures, ready = rest[: 3 * len(codecs)], rest[3 * len(codecs) :]
    return Profile(
        ranks=connections.size,
        nodes=sizes,
        compute=compute,
        optimizer=optimizer,
        buckets=_buckets(
            named,
            dict(zip((name for name, _ in named), ready, strict=True)),
            bucket_bytes,
        ),
        between=between,
        inside=inside,
        codecs={name: CodecSpeed(*figures[3 * i : 3 * i + 3]) for i, name in enumerate(codecs)},
        copy=copies,
        speeds=arithmetic,
        round=agreement,
        cores=len(os.sched_getaffinity(0)) / max(sizes) if device.type == "cpu" else 2.0,
        spread=max(0.0, square / compute**2 - 1) ** 0.5,
    )


def _links(
    connections: Connections, device: torch.device, sizes: Sequence[int]
) -> tuple[Link, Link | None]:
    """Between nodes and inside one, as the first rank sees them. All ranks call it.

    Where all ranks share a node its link is both, to be replaced by the one of a simulation.
    """
    if len(sizes) == 1 or len(sizes) == connections.size:
        link = links.link_of(connections.main_communicator(device), device)
        return link, link if len(sizes) == 1 else None
    node, leaders = connections.connect_nodes("profile", device)
    inside = links.link_of(node, device) if node.size > 1 else None
    connections.reduce_numbers("measuring links inside nodes", _C.ReduceOp.MAX, 0)
    between = ASSUMED_LINK if leaders is None else links.link_of(leaders, device)
    connections.reduce_numbers("measuring links between nodes", _C.ReduceOp.MAX, 0)
    return between, inside


def _buckets(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    ready: Mapping[str, float],
    bucket_bytes: int,
) -> tuple[BucketProfile, ...]:
    """The buckets of the gradients, in the order of the algorithms."""
    groups = split_by_bucket_size(list(reversed(named)), lambda pair: pair[1], bucket_bytes)
    return tuple(
        BucketProfile(
            sum(parameter.numel() for _, parameter in group),
            sum(parameter.numel() * parameter.element_size() for _, parameter in group),
            max(ready[name] for name, _ in group),
            tuple(_matrix(parameter) for _, parameter in group),
        )
        for group in groups
    )


def _matrix(parameter: torch.Tensor) -> tuple[int, int]:
    """Rows and columns as PowerSGD has them."""
    if parameter.dim() < 2 or parameter.numel() == 0:
        return parameter.numel(), 1
    return parameter.shape[0], parameter.numel() // parameter.shape[0]


def _means(
    communicator: _C.Communicator, values: Sequence[float], device: torch.device
) -> list[float]:
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    communicator.all_reduce(numbers, _C.ReduceOp.SUM)
    means: list[float] = (numbers / communicator.size).tolist()
    return means


_recorder: Recorder | None = None
_ends = False
