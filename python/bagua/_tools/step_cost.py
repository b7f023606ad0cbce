"""Seconds of a training step, from compute time, bytes and a link, as docs/scaling.md says.

Numbers of messages and bytes are those of docs/algorithms.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from bagua._core.group.environment import FAR_US, bucket_size_among

FAR = FAR_US / 2e6  # seconds of a message from which on ranks are far from each other
_LANES = 8  # buckets that are under way at a time between far ranks
_EIGHT_BITS, _FOUR_BITS = 0.251, 0.129  # of f32
_INTERVALS = (50, 100, 200, 500, 1000, 2000)  # of DiLoCo
_ENOUGH = 1.1  # times the compute alone, which a step with gradients may take
#: From the first on, each changes the training more.
_GRADIENTS = ("gradient_allreduce", "bytegrad, 8 bits", "bytegrad, 4 bits")
ROUNDS = "diloco, 4 bits"
#: Of the time, which rounds may take.
MOST_SHARE = 0.1


class Setting(NamedTuple):
    """A training and its network.

    Attributes:
        compute: seconds of a step without communication.
        bytes: of all gradients in f32.
        rate: bytes per second of a rank's link.
        latency: seconds of a message, the processor's part included: half a round trip.
        hidden: the share of the compute behind which communication can hide.
        codec: bytes of gradients per second that a rank encodes, or decodes and adds.
        interval: steps of a round of local training.
        exact: bytes of an exact gradient or weight, relative to f32.
    """

    compute: float
    bytes: float
    rate: float
    latency: float
    hidden: float = 0.5
    codec: float = 3e9
    interval: int = _INTERVALS[0]
    exact: float = 1.0


class Traffic(NamedTuple):
    """Work of a rank in a step of an algorithm, beside the compute.

    Attributes:
        bytes: that it sends.
        messages: of a bucket, that wait for each other; half round trips where ranks are far.
        coded: bytes of gradients that it encodes or decodes.
        hides: whether it communicates during backward.
        rounds: in a step.
    """

    bytes: float
    messages: float
    coded: float = 0.0
    hides: bool = True
    rounds: float = 1.0

    def seconds(self, setting: Setting, ranks: int) -> float:
        """Seconds of communication in a step. Between far ranks buckets wait beside each other."""
        buckets = math.ceil(setting.bytes / bucket_size_among(ranks))
        lanes = min(_LANES, buckets) if _far(setting) else 1
        wire, wait = self.bytes / setting.rate, self.rounds * self.messages * setting.latency
        return max(wire + wait, (wire + buckets * wait) / lanes) + self.coded / setting.codec


def _far(setting: Setting) -> bool:
    return setting.latency >= FAR


def _sum(setting: Setting, p: int, ratio: float) -> Traffic:
    """Scatter and gather of parts that are ``ratio`` times as large as in f32."""
    sent = 2 * ratio * setting.bytes * (p - 1) / p
    return Traffic(sent, (3 if p == 2 else 4) if _far(setting) else 2 * (p - 1))


def _compressed(setting: Setting, p: int, ratio: float) -> Traffic:
    messages = 4 if _far(setting) else 2 * (p - 1)
    return _sum(setting, p, ratio)._replace(messages=messages, coded=3 * setting.bytes)


def _low_rank(setting: Setting, p: int) -> Traffic:
    """Two sums of factors, in four passes over the gradients."""
    one = _sum(setting, p, 0.01)
    # Ranks agree, which takes half a round trip, before the first sum only.
    messages = 2 * one.messages - 1 if _far(setting) else 2 * one.messages
    return one._replace(messages=messages, coded=4 * setting.bytes)


def _sparse(setting: Setting, p: int, share: float) -> Traffic:
    """A value and a place of so many elements to every rank; exact where that is not more."""
    sent = 2 * share * setting.bytes * (p - 1)
    exact = _sum(setting, p, setting.exact)
    messages = 3 if _far(setting) else p - 1
    return Traffic(sent, messages, 2 * setting.bytes) if sent < exact.bytes else exact


def _gossip(setting: Setting, ratio: float, peers: int, coded: float = 0.0) -> Traffic:
    messages = 3 if _far(setting) else peers
    return Traffic(peers * ratio * setting.bytes, messages, coded * setting.bytes)


def _per_round(setting: Setting, traffic: Traffic) -> Traffic:
    h = setting.interval
    return Traffic(traffic.bytes / h, traffic.messages, traffic.coded / h, False, 1 / h)


#: By name, for P ranks. PowerSGD's bytes are those of matrices with some 800 rows and columns.
ALGORITHMS: dict[str, Callable[[Setting, int], Traffic]] = {
    "gradient_allreduce": lambda s, p: _sum(s, p, s.exact),
    "bytegrad, 8 bits": lambda s, p: _compressed(s, p, _EIGHT_BITS),
    "bytegrad, 4 bits": lambda s, p: _compressed(s, p, _FOUR_BITS),
    "power_sgd, rank 4": _low_rank,
    "sparse, 1 %": lambda s, p: _sparse(s, p, 0.01),
    "decentralized, shift_one": lambda s, p: _gossip(s, s.exact, 1),
    "low_precision_decentralized": lambda s, p: _gossip(s, _EIGHT_BITS, min(2, p - 1), 3),
    "diloco": lambda s, p: _per_round(s, _sum(s, p, 1.0)),
    ROUNDS: lambda s, p: _per_round(s, _compressed(s, p, _FOUR_BITS)),
}


def step_seconds(name: str, setting: Setting, ranks: int) -> float:
    """Seconds of a step: what communication takes beyond its hidden part comes on top."""
    if ranks == 1:
        return setting.compute
    traffic = ALGORITHMS[name](setting, ranks)
    hidden = setting.hidden * setting.compute if traffic.hides else 0.0
    return setting.compute + max(0.0, traffic.seconds(setting, ranks) - hidden)


def share_of_rounds(setting: Setting, ranks: int) -> float:
    """The share of the time that rounds of DiLoCo in 4 bits take."""
    return 1 - setting.compute / step_seconds(ROUNDS, setting, ranks)


def fitting_interval(setting: Setting, ranks: int) -> int:
    """The shortest interval of DiLoCo in 4 bits whose rounds take at most a tenth of the time.

    The longest one where none is long enough.
    """
    shares = ((h, share_of_rounds(setting._replace(interval=h), ranks)) for h in _INTERVALS)
    return next((h for h, share in shares if share <= MOST_SHARE), _INTERVALS[-1])


def choice(setting: Setting, ranks: int) -> str:
    """The most exact gradients whose steps hardly wait for the network, else ``ROUNDS``."""
    enough = _ENOUGH * setting.compute
    fast = (name for name in _GRADIENTS if step_seconds(name, setting, ranks) <= enough)
    return next(fast, ROUNDS)
