"""Rounds between islands whose contributions are files."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bagua._outer.mailbox import letters
from bagua._outer.mailbox.store import public
from bagua._outer.strategies import Elastic

_LEAST_SECRET = 16  # bytes


def secret_of(given: str | bytes | None) -> bytes | None:
    """The secret of a mailbox: as given, or of BAGUA_MAILBOX_SECRET. ValueError: it is short."""
    secret = os.environ.get("BAGUA_MAILBOX_SECRET") or None if given is None else given
    secret = secret.encode() if isinstance(secret, str) else secret
    if secret is not None and len(secret) < _LEAST_SECRET:
        raise ValueError(f"Mailbox: secret must have {_LEAST_SECRET} bytes or more")
    return secret


@dataclass(frozen=True, init=False, repr=False)
class Mailbox(Elastic):
    """Rounds between islands that meet in a folder or an object store.

    An island is a process that trains, started by itself, or the ranks of a ``torchrun`` whose
    weights torch's DistributedDataParallel keeps equal, or of which each holds a shard by
    ``fully_shard``, HSDP too, or a stage of a pipeline: then each shard is mailed by the first rank
    that holds it. It needs neither addresses of others nor
    their number, and only connections that it opens. All islands use one URL. They apply the
    contributions that count in one order, so that their anchors have equal bits. An island may come
    at any time, leave, and come back with the same name; if all are gone, the next one that starts
    goes on after the last round.

    Args:
        url: a folder as path or ``file://`` URL, or a URL of fsspec, such as ``s3://bucket/run``;
            its storage must be able to create a file only if there is none.
        island: the name of this one, letters, digits, ``-`` and ``_``, of 64 at most.
        quorum: islands that a round needs; it waits for them until the group's timeout. Rounds of
            ``sync()`` need no more than have not ended.
        grace: seconds that a round waits for late islands at most. Once the quorum has come it
            waits twice as long as that took, at least a second. A late island's steps count in its
            next round. None: it waits for all that live.
        secret: of all islands, 16 bytes or more: files without it are refused. None: that of the
            environment, ``BAGUA_MAILBOX_SECRET``; without one files are checked for damage only.
        keep: rounds between two anchors that are mailed. At most 2 ``keep`` + 1 rounds and three
            anchors lie in the mailbox; 2 (``keep`` + islands) + 1 rounds where islands are killed
            before they could remove old ones, and two more where they have shards.
        leave_within: seconds in which a process that gets SIGTERM leaves, see ``bagua.leave``.

    Raises:
        ValueError: an argument is out of its range. From ``bagua.wrap``: ranks that hold shards
            and copies, a warm-up, or a storage that cannot create files exclusively.

    Example::

        mailbox = Mailbox("s3://bucket/run", island="oslo", quorum=2, grace=60.0)
        algorithm = DiLoCoAlgorithm(codec="int4_block", elastic=mailbox)
    """

    url: str = ""
    island: str = ""
    secret: bytes | None = None
    keep: int = 16
    mails = True

    def __init__(
        self,
        url: str,
        *,
        island: str,
        quorum: int = 2,
        grace: float | None = None,
        secret: str | bytes | None = None,
        keep: int = 16,
        leave_within: float = 30.0,
    ) -> None:
        super().__init__(quorum, grace, leave_within)
        if not letters.is_island(island):
            raise ValueError(
                f"Mailbox: island={island!r} must be 1 to 64 letters, digits, '-' or '_'"
            )
        if quorum > letters.MOST_ISLANDS:
            raise ValueError(f"Mailbox: quorum={quorum} must be at most {letters.MOST_ISLANDS}")
        if not 1 <= keep <= 10_000:
            raise ValueError(f"Mailbox: keep={keep} must be between 1 and 10000 rounds")
        own = {"url": str(url), "island": island, "secret": secret_of(secret)}
        for name, value in {**own, "keep": keep}.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """Without the secret, and without those in the URL."""
        numbers = f"quorum={self.quorum}, grace={self.grace}, keep={self.keep}"
        return f"Mailbox('{public(self.url)}', island='{self.island}', {numbers})"
