"""Seconds of a training step, from compute time, bytes and a rate, as docs/scaling.md says.

Numbers of messages and bytes are those of docs/algorithms.md, for one bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Setting(NamedTuple):
    """A training and its network.

    Attributes:
        compute: seconds of a step without communication.
        bytes: of all gradients in f32.
        rate: bytes per second of a rank's link.
        latency: seconds of a message, the processor's part included.
        hidden: the share of the compute behind which communication can hide.
        codec: bytes of gradients per second that a rank encodes, or decodes and adds.
        interval: steps of a round of local training.
    """

    compute: float
    bytes: float
    rate: float
    latency: float
    hidden: float
    codec: float
    interval: int


class Traffic(NamedTuple):
    """Work of a rank in a step of an algorithm, beside the compute.

    Attributes:
        bytes: that it sends.
        messages: that wait for each other.
        coded: bytes of gradients that it encodes or decodes.
        hides: whether it communicates during backward.
    """

    bytes: float
    messages: float
    coded: float = 0.0
    hides: bool = True

    def seconds(self, setting: Setting) -> float:
        wire = self.bytes / setting.rate + self.messages * setting.latency
        return wire + self.coded / setting.codec


def all_reduce(s: float, p: int, ratio: float = 1.0) -> Traffic:
    """Scatter and gather of parts that are ``ratio`` times as large as in f32."""
    coded = 0.0 if ratio == 1.0 else 3 * s
    return Traffic(2 * ratio * s * (p - 1) / p, 2 * (p - 1), coded)


def sparse(s: float, p: int, share: float) -> Traffic:
    """A value and a place of so many elements to every rank; exact where that is no more."""
    sent = 2 * share * s * (p - 1)
    exact = all_reduce(s, p)
    return Traffic(sent, p - 1, 2 * s) if sent < exact.bytes else exact


def per_round(traffic: Traffic, interval: int) -> Traffic:
    shares = (traffic.bytes / interval, traffic.messages / interval, traffic.coded / interval)
    return Traffic(*shares, hides=False)


#: By name, for S bytes, P ranks and rounds of H steps.
ALGORITHMS: dict[str, Callable[[float, int, int], Traffic]] = {
    "gradient_allreduce": lambda s, p, h: all_reduce(s, p),
    "bytegrad, 8 bits": lambda s, p, h: all_reduce(s, p, 1 / 4),
    "bytegrad, 4 bits": lambda s, p, h: all_reduce(s, p, 1 / 8),
    "sparse, 1 %": lambda s, p, h: sparse(s, p, 0.01),
    "decentralized, shift_one": lambda s, p, h: Traffic(s, 1),
    "low_precision_decentralized": lambda s, p, h: Traffic(2 * s / 4, 2, 3 * s),
    "diloco": lambda s, p, h: per_round(all_reduce(s, p), h),
    "diloco, 4 bits": lambda s, p, h: per_round(all_reduce(s, p, 1 / 8), h),
}


def step_seconds(name: str, setting: Setting, ranks: int) -> float:
    """Seconds of a step: what communication takes beyond its hidden part comes on top."""
    if ranks == 1:
        return setting.compute
    traffic = ALGORITHMS[name](setting.bytes, ranks, setting.interval)
    hidden = setting.hidden * setting.compute if traffic.hides else 0.0
    return setting.compute + max(0.0, traffic.seconds(setting) - hidden)
