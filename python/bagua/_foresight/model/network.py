"""Groups of ranks, and the cost of what they send to each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bagua._foresight.model.messages import all_reduce_bytes, broadcast_children
from bagua._foresight.profile import Link, Profile

__all__ = ["Cluster", "Members", "Stage"]

#: More pieces than these change the overlap of transfer and arithmetic by less than a twelfth.
_MOST_PIECES = 12


@dataclass(frozen=True)
class Stage:
    """A step of an operation: arithmetic, then messages, and arithmetic as they arrive.

    Attributes:
        before: seconds of a core before anything is sent.
        latency: seconds in which neither a core nor the link is busy.
        wake: seconds of waiting for a core, where none is free.
        wire: seconds on the link at its full speed.
        cores: that the transfer takes meanwhile.
        link: its name; None: nothing is sent.
        during: seconds of a core for what arrives, in as many pieces as arrive one after another.
        pieces: their number.
        sent: bytes that a rank sends.
    """

    before: float = 0.0
    latency: float = 0.0
    wake: float = 0.0
    wire: float = 0.0
    cores: float = 0.0
    link: str | None = None
    during: float = 0.0
    pieces: int = 1
    sent: int = 0


@dataclass(frozen=True)
class Members:
    """Ranks that communicate with each other, and what one of them sees.

    Attributes:
        ranks: their number.
        link: the slowest one on the way around all of them.
        name: of that link.
        overhead: seconds of a collective beyond its latency.
        crowd: share of messages, and of the ranks of a node that send at the same time, on the
            node's card: seconds of the link per second of a rank that has it alone.
    """

    ranks: int
    link: Link
    name: str
    overhead: float
    crowd: float = 1.0

    def all_reduce(self, size: int, *, before: float = 0.0) -> Stage:
        """A ring: 2 (P - 1) messages of ``size`` / P bytes, one after the other.

        A tree has 2 log P messages on the longest way instead, and as many bytes on each link.
        """
        if self.ranks == 1 or size == 0:
            return Stage(before=before)
        sent = all_reduce_bytes(size, self.ranks)
        hops = broadcast_children(self.ranks) if self.link.tree else self.ranks - 1
        return Stage(
            before=before,
            latency=self.overhead + 2 * hops * self.link.latency,
            wake=self.link.wake,
            wire=sent / self.link.bandwidth,
            cores=self._cores,
            link=self.name,
            sent=sent,
        )

    def exchange(
        self, sent: int, messages: int, *, before: float = 0.0, during: float = 0.0, pieces: int = 1
    ) -> Stage:
        """Messages of ``sent`` bytes in all, which every member sends and receives at once."""
        if self.ranks == 1 or sent == 0:
            return Stage(before=before + during)
        return Stage(
            before=before + messages * self.link.per_message,
            latency=self.overhead + self.link.latency,
            wake=self.link.wake,
            wire=sent * self.crowd / self._messages,
            cores=self._cores,
            link=self.name,
            during=during,
            pieces=min(_MOST_PIECES, max(1, pieces)),
            sent=sent,
        )

    def broadcast(self, size: int) -> Stage:
        """A binomial tree, of which the root sends most."""
        children = broadcast_children(self.ranks)
        if children == 0 or size == 0:
            return Stage()
        return Stage(
            latency=self.overhead + children * self.link.latency,
            wake=self.link.wake,
            wire=children * size / self._messages,
            cores=self._cores,
            link=self.name,
            sent=children * size,
        )

    @property
    def _messages(self) -> float:
        """Bytes a second in messages from rank to rank."""
        return self.link.messages or self.link.bandwidth

    @property
    def _cores(self) -> float:
        return min(1.0, self.link.processor * self.link.bandwidth)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equally many ranks.

    Attributes:
        ranks: in all.
        per_node: ranks of a node.
    """

    ranks: int
    per_node: int
    between: Link
    inside: Link
    collective: float
    cards: int = 1

    @classmethod
    def of(
        cls, profile: Profile, ranks: int | None, between: Link | None, inside: Link | None
    ) -> Cluster:
        """The profile's, or one of other links, or of more nodes of the same size.

        Raises:
            ValueError: a number of ranks below 1.
        """
        ranks = profile.ranks if ranks is None else ranks
        if ranks < 1:
            raise ValueError(f"ranks={ranks} must be at least 1")
        between = profile.between if between is None else between
        own = profile.inside if inside is None else inside
        return cls(
            ranks,
            min(ranks, max(profile.nodes)),
            between,
            between if own is None else own,
            profile.collective,
            profile.cards,
        )

    @property
    def nodes(self) -> int:
        """Their number."""
        return math.ceil(self.ranks / self.per_node)

    def everyone(self) -> Members:
        """All ranks; a ring passes each card once, one link of it in each direction."""
        if self.nodes == 1:
            return self._members(self.ranks, self.inside, "inside")
        if self.per_node == 1:
            return self._members(self.ranks, self.between, "between")
        slower = min(self.inside, self.between, key=lambda link: link.bandwidth)
        name = "inside" if slower is self.inside else "between"
        members = self._members(self.ranks, slower, name)
        latest = max(self.inside.latency, self.between.latency)
        return Members(
            members.ranks,
            replace(
                slower,
                latency=latest,
                messages=self.between.messages,
                per_message=self.between.per_message,
                wake=max(self.inside.wake, self.between.wake),
            ),
            name,
            members.overhead,
            self._crowd((self.ranks - self.per_node) / (self.ranks - 1)),
        )

    def neighbours(self) -> Members:
        """All ranks on a ring of messages: of a node's, one crosses in each direction."""
        everyone = self.everyone()
        if self.nodes == 1 or self.per_node == 1:
            return everyone
        return replace(everyone, crowd=0.5 / self.cards)

    def leaders(self) -> Members:
        """One rank of each node."""
        return self._members(self.nodes, self.between, "between")

    def shares(self) -> Members:
        """The ranks that have one share of a bucket, one of each node; all shares at once."""
        crowd = max(1.0, self.per_node / self.cards)
        link = self.between
        shared = replace(
            link,
            bandwidth=link.bandwidth / crowd,
            messages=None if link.messages is None else link.messages / crowd,
        )
        return self._members(self.nodes, shared, "between")

    def node(self) -> Members:
        """The ranks of a node."""
        return self._members(self.per_node, self.inside, "inside")

    def _crowd(self, share: float) -> float:
        return share * max(1.0, self.per_node / self.cards)

    def _members(self, ranks: int, link: Link, name: str) -> Members:
        overhead = self.collective if link.overhead is None else link.overhead
        return Members(ranks, link, name, overhead)
