"""Objects that have statistics, and the sums over what they have sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from bagua._core.group.connections import MOVED

__all__ = ["Source", "moved", "source_of"]


@runtime_checkable
class Source(Protocol):
    """The wrapper of a module, or the handle of a communication hook."""

    def stats(self) -> dict[str, Any]:
        """See ``BaguaModule.bagua_stats``."""


def source_of(model: Any) -> Source:
    """The statistics of ``model``: a wrapped module, ``DistributedDataParallel``, or a handle.

    Raises:
        TypeError: it is none of these.
    """
    source = getattr(model, "bagua_ddp", model)
    if not isinstance(source, Source):
        raise TypeError(
            "statistics are those of a module after with_bagua, of bagua's "
            "DistributedDataParallel or of a handle of bagua.comm_hooks.register, not of "
            f"{type(model).__name__}"
        )
    return source


def moved(stats: Mapping[str, Any]) -> dict[str, int]:
    """Bytes and messages over all communicators, the ranks' agreements included."""
    tables = [*stats["communicators"].values(), stats["control"]]
    return {key: sum(table[key] for table in tables) for key in MOVED}
