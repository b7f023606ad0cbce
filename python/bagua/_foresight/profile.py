"""The measured figures that a prediction starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["BucketProfile", "CodecSpeed", "Link", "Profile"]


def _check_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{owner}: {name}={value} must be a positive number")


def _check_not_negative(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{owner}: {name}={value} must be 0 or a positive number")


@dataclass(frozen=True)
class Link:
    """A full-duplex link of a rank, with the transport that uses it.

    Attributes:
        latency: seconds, one way.
        bandwidth: bytes a second that a rank can send in an all-reduce, and receive at the same
            time.
        processor: seconds of a core that a rank spends per byte sent (and one received); at most
            1 / bandwidth counts. 0: the transfer needs no core, as with a network card.
        messages: bytes a second in messages from rank to rank, where that differs from
            ``bandwidth``, as in shared memory; None: it does not.
        overhead: seconds of a collective beyond the latency; None: ``Profile.collective``.
        per_message: seconds of a core for a message, sent and received.
        tree: whether an all-reduce may pass a tree instead of a ring where that is faster (NCCL).
        wake: seconds by which a collective takes longer while training keeps the cores busy: its
            threads, which sleep until a message has come, wait for a core then.

    Raises:
        ValueError: a figure out of its range.
    """

    latency: float
    bandwidth: float
    processor: float = 0.0
    messages: float | None = None
    overhead: float | None = None
    per_message: float = 0.0
    tree: bool = False
    wake: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("Link", bandwidth=self.bandwidth, messages=self.messages or 1.0)
        _check_not_negative(
            "Link",
            latency=self.latency,
            processor=self.processor,
            overhead=self.overhead or 0.0,
            per_message=self.per_message,
            wake=self.wake,
        )


@dataclass(frozen=True)
class CodecSpeed:
    """Speeds of a codec on one core or device, in bytes of float32 values a second.

    Raises:
        ValueError: a speed that is not positive.
    """

    encode: float
    decode: float
    decode_add: float

    def __post_init__(self) -> None:
        _check_positive(
            "CodecSpeed", encode=self.encode, decode=self.decode, decode_add=self.decode_add
        )


@dataclass(frozen=True)
class BucketProfile:
    """A bucket of gradients.

    Attributes:
        numel: elements, padding included.
        bytes: of its flat memory.
        ready: seconds from the start of the step to its last gradient, without communication.
        shapes: of its tensors as matrices, ``(rows, columns)``; a vector is ``(numel, 1)``. Empty:
            unknown, the bucket counts as one vector.

    Raises:
        ValueError: a figure out of its range.
    """

    numel: int
    bytes: int
    ready: float
    shapes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _check_positive("BucketProfile", numel=self.numel, bytes=self.bytes)
        _check_not_negative("BucketProfile", ready=self.ready)


@dataclass(frozen=True)
class Profile:
    """Figures of a training and of the machines that it runs on.

    All speeds and times are measured on all ranks at the same time: they contain what ranks of one
    host take from each other.

    Attributes:
        ranks: number of ranks.
        nodes: ranks of each node; their sum is ``ranks``.
        compute: seconds of a step without communication, optimizer included; mean over the ranks.
        optimizer: of these, seconds after backward.
        buckets: in the order in which lanes run them.
        between: link between nodes.
        inside: link between ranks of a node; None: as between nodes.
        codecs: speeds by name of the codec.
        copy: bytes a second that one core copies (memcpy), or the device.
        speeds: bytes of float32 a second of other arithmetic, by name: ``"top_k"`` selects the
            largest elements, ``"low_rank"`` makes all products of PowerSGD of rank 1. What is
            missing is derived from ``copy``.
        collective: seconds of an all-reduce of a few bytes beyond the link's latency.
        round: seconds in which the ranks agree on a step (agreement, hooks, waking the lanes).
        cores: cores that the training thread and the lanes of one rank share. 1: encoding takes its
            time from training; 2 and more: it does not. Values below 1 count as 1.
        spread: standard deviation of a rank's seconds of compute over ``compute``; steps are
            independent of each other.
        cards: network cards of a node, each with the bandwidth of ``between``.
        errors: relative L2 error of a codec on the real gradients, by name.

    Raises:
        ValueError: a figure out of its range, or figures that contradict each other.
    """

    ranks: int
    nodes: tuple[int, ...]
    compute: float
    optimizer: float
    buckets: tuple[BucketProfile, ...]
    between: Link
    inside: Link | None = None
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    copy: float = 5e9
    speeds: Mapping[str, float] = field(default_factory=dict)
    collective: float = 0.0
    round: float = 0.0
    cores: float = 2.0
    spread: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    cards: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or sum(self.nodes) != self.ranks or min(self.nodes) < 1:
            raise ValueError(f"Profile: nodes={self.nodes} do not hold ranks={self.ranks}")
        if not self.buckets:
            raise ValueError("Profile: there are no buckets")
        _check_positive("Profile", compute=self.compute, copy=self.copy, cores=self.cores)
        _check_positive("Profile", cards=self.cards)
        _check_positive("Profile: speeds", **self.speeds)
        _check_not_negative(
            "Profile",
            optimizer=self.optimizer,
            collective=self.collective,
            round=self.round,
            spread=self.spread,
        )
        _check_not_negative("Profile: errors", **self.errors)
        backward = self.compute - self.optimizer
        late = max(bucket.ready for bucket in self.buckets)
        if late > backward * (1 + 1e-6):
            raise ValueError(
                f"Profile: a bucket is ready after {late:g} s, but backward ends after "
                f"{backward:g} s (compute - optimizer)"
            )

    @property
    def numel(self) -> int:
        """Elements of all buckets."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.bytes for bucket in self.buckets)
