"""The stages of each operation of a bucket, as ``csrc/op`` has them.

Arithmetic that no figure of the profile names is counted in passes over memory, in units of a
copy: reading two and writing one array 1.5, changing one in place 1, filling one 0.5, reading one
0.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bagua._core.compression.sparse_choice import number_sent
from bagua._foresight.model import messages
from bagua._foresight.model.network import Members, Stage
from bagua._foresight.profile import BucketProfile, CodecSpeed, Profile

__all__ = ["Arithmetic", "Operations"]

_ADD = 1.5
_CHANGE = 1.0
_FILL = 0.5
_READ = 0.4
_MEAN = 1.2  # of two arrays, tile by tile
#: Of codecs whose speed nobody has measured, in units of a copy.
_CODEC = {"encode": 0.9, "decode": 1.2, "decode_add": 1.2}
_TOP_K = 0.3
_LOW_RANK = 0.3
#: Seconds of another column of PowerSGD over those of the first.
_COLUMN = 0.25
#: Elements a second that are added at indices, in units of bytes copied a second.
_SCATTERED = 0.03


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of a core, or of the device."""

    profile: Profile

    def passes(self, size: float, count: float = 1.0) -> float:
        """``count`` copies of ``size`` bytes."""
        return size * count / self.profile.copy

    def codec(self, name: str) -> CodecSpeed:
        """The measured speeds of a codec, or those of a typical one."""
        known = self.profile.codecs.get(name)
        if known is not None:
            return known
        return CodecSpeed(**{key: ratio * self.profile.copy for key, ratio in _CODEC.items()})

    def speed(self, name: str, in_copies: float) -> float:
        """A measured speed, or ``in_copies`` times that of a copy."""
        return self.profile.speeds.get(name, in_copies * self.profile.copy)


class Operations:
    """Stages of operations among some ranks."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic

    def exact(self, members: Members, bucket: BucketProfile) -> list[Stage]:
        """``AllReduce``."""
        stage = members.all_reduce(bucket.bytes)
        return [stage, self._look(bucket)]

    def compressed(
        self, members: Members, bucket: BucketProfile, codec: str, *, error_feedback: bool
    ) -> list[Stage]:
        """``CompressedAllReduce``: parts to their owners, and their sums to everyone."""
        ranks = members.ranks
        if ranks == 1:
            return []
        a, speed = self._arithmetic, self._arithmetic.codec(codec)
        numel = messages.padded(bucket.numel, ranks)
        size, part = 4 * numel, 4 * numel / ranks
        others = size - part
        sent = (ranks - 1) * messages.part_bytes(codec, numel // ranks)
        pieces = messages.segments(codec, numel // ranks)
        encode = others / speed.encode
        reduce = part / speed.encode + ranks * part / speed.decode_add
        reduce += a.passes(part, _FILL + _CHANGE) + part / speed.encode + part / speed.decode
        if error_feedback:
            encode = a.passes(size, _ADD) + size / speed.encode + a.passes(size, _CHANGE / 2)
            reduce = ranks * part / speed.decode_add + a.passes(part, _FILL + _CHANGE + _ADD)
            reduce += part / speed.encode + a.passes(part, _CHANGE / 2) + part / speed.decode
        return [
            members.exchange(
                sent, pieces * (ranks - 1), before=encode, during=reduce, pieces=pieces
            ),
            members.exchange(
                sent,
                pieces * (ranks - 1),
                during=others / speed.decode,
                pieces=pieces * (ranks - 1),
            ),
            self._look(bucket),
        ]

    def low_rank(
        self, members: Members, bucket: BucketProfile, rank: int, min_compression_rate: float
    ) -> list[Stage]:
        """``LowRank``: three passes of products, two all-reduces."""
        if members.ranks == 1:
            return []
        shapes = bucket.shapes
        left, right = messages.low_rank_numbers(shapes, bucket.numel, rank, min_compression_rate)
        a = self._arithmetic
        products = bucket.bytes / a.speed("low_rank", _LOW_RANK) * (1 + _COLUMN * (rank - 1))
        return [
            members.all_reduce(4 * left, before=0.4 * products),
            members.all_reduce(4 * right, before=0.2 * products + a.passes(8 * rank * left)),
            Stage(before=0.4 * products),
        ]

    def sparse(
        self, members: Members, bucket: BucketProfile, ratio: float, *, codec: str | None
    ) -> list[Stage]:
        """``Sparse``, or ``ErrorFeedbackAllReduce`` where the exact mean has fewer bytes."""
        a, ranks = self._arithmetic, members.ranks
        message = messages.sparse_bytes(bucket.numel, ratio, codec)
        if ranks == 1 or ranks * message >= 2 * bucket.bytes:
            return [members.all_reduce(bucket.bytes), self._look(bucket)]
        size, k = 4 * bucket.numel, number_sent(bucket.numel, ratio)
        take = a.passes(size, _ADD + _FILL) + size / a.speed("top_k", _TOP_K)
        add = ranks * k / (_SCATTERED * a.profile.copy)
        return [
            members.exchange((ranks - 1) * message, ranks - 1, before=take),
            Stage(before=add + a.passes(size, _CHANGE + _READ)),
        ]

    def random_sparse(self, members: Members, bucket: BucketProfile, ratio: float) -> list[Stage]:
        """``RandomSparse``: an all-reduce of the drawn elements and a flag."""
        a, k = self._arithmetic, number_sent(bucket.numel, ratio)
        if members.ranks == 1 or 4 * (k + 1) >= bucket.bytes:
            return [members.all_reduce(bucket.bytes), self._look(bucket)]
        size, moved = 4 * bucket.numel, k / (_SCATTERED * a.profile.copy)
        return [
            members.all_reduce(4 * (k + 1), before=a.passes(size, _ADD + _READ) + 2 * moved),
            Stage(before=a.passes(size, _FILL) + moved),
        ]

    def gossip(self, members: Members, bucket: BucketProfile) -> list[Stage]:
        """``Gossip``: the whole bucket to one peer, and the mean of both."""
        if members.ranks == 1:
            return []
        mean = self._arithmetic.passes(bucket.bytes, _MEAN)
        stage = members.exchange(bucket.bytes, 1)
        if members.ranks % 2:  # one rank in its turn has no peer, and waits for the others
            stage = replace(stage, sent=bucket.bytes * (members.ranks - 1) // members.ranks)
        return [stage, Stage(before=mean), self._look(bucket)]

    def compressed_gossip(self, members: Members, bucket: BucketProfile, codec: str) -> list[Stage]:
        """``CompressedGossip``: the difference to both neighbours."""
        if members.ranks == 1:
            return []
        a, speed = self._arithmetic, self._arithmetic.codec(codec)
        neighbours, size = min(2, members.ranks - 1), 4 * bucket.numel
        sent = neighbours * messages.part_bytes(codec, bucket.numel)
        pieces = messages.segments(codec, bucket.numel)
        encode = a.passes(size, 2 * _CHANGE) + size / speed.encode
        apply = 3 * (size / speed.decode + a.passes(size, _ADD)) + a.passes(size, _CHANGE)
        return [
            members.exchange(sent, pieces * neighbours, before=encode, during=apply, pieces=pieces),
            self._look(bucket),
        ]

    def chunked_sparse(self, members: Members, bucket: BucketProfile, ratio: float) -> list[Stage]:
        """``ChunkedSparse`` of SparseLoCo."""
        a, ranks = self._arithmetic, members.ranks
        if ranks == 1:
            return []
        size, k = 4 * bucket.numel, number_sent(bucket.numel, ratio)
        take = a.passes(size, _ADD) + size / a.speed("top_k", _TOP_K)
        add = ranks * k / (_SCATTERED * a.profile.copy) + a.passes(size, _FILL + _CHANGE + _READ)
        message = messages.chunked_sparse_bytes(bucket.numel, ratio)
        return [
            members.exchange((ranks - 1) * message, ranks - 1, before=take),
            Stage(before=add),
        ]

    def copy(self, bucket: BucketProfile) -> Stage:
        """The first step of ``AverageWeights``."""
        return Stage(before=self._arithmetic.passes(bucket.bytes))

    def _look(self, bucket: BucketProfile) -> Stage:
        """``CountNonFinite``."""
        return Stage(before=self._arithmetic.passes(bucket.bytes, _READ))
