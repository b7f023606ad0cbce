"""Statistics per round: numbers for a ``SummaryWriter``, and three lines for people."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from bagua._core.group.connections import MOVED

_TIMES = ("wire_ns", "encode_ns", "waiting_ns")  # of the buckets, in `total`
_CLOCKED = (
    "busy_ns",
    "hidden_ns",
    "exposed_ns",
)  # by the clock; a communication hook has the first only


class Writer(Protocol):
    """``torch.utils.tensorboard.SummaryWriter``, or anything else with this method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


# By source: the statistics at the last call, by id of the writer.
_last: weakref.WeakKeyDictionary[Any, dict[int, dict[str, Any]]] = weakref.WeakKeyDictionary()


def source_of(model: Any) -> Any:
    """The statistics of ``model``: a wrapped module, ``DistributedDataParallel``, or a handle."""
    source = getattr(model, "bagua_ddp", model)
    if not callable(getattr(source, "stats", None)):
        raise TypeError(
            "statistics are those of a module after bagua.wrap, of bagua's "
            "DistributedDataParallel or of a handle of bagua.comm_hooks.register, not of "
            f"{type(model).__name__}"
        )
    return source


def moved(stats: Mapping[str, Any]) -> dict[str, int]:
    """Bytes and messages over all communicators, the ranks' agreements included."""
    tables = [*stats["communicators"].values(), stats["control"]]
    return {key: sum(table[key] for table in tables) for key in MOVED}


def write_stats(
    model: Any, writer: Writer, step: int | None = None, *, prefix: str = "bagua"
) -> dict[str, float]:
    """Write what communication has cost per round since the last call with this writer.

    Call it every so many steps, on the ranks that have a writer; it does not communicate. Before
    the first round, and where no round has ended since the last call, nothing is written.

    Args:
        model: a module after ``bagua.wrap``, bagua's ``DistributedDataParallel``, or the handle of
            ``bagua.comm_hooks.register``.
        writer: an object with ``add_scalar(tag, value, step)``, as TensorBoard's ``SummaryWriter``.
        step: the step to write; None: the number of rounds since the buckets were built.
        prefix: of the tags.

    Returns:
        The values by tag, without the prefix; ``docs/observability.md`` has their units.

    Raises:
        TypeError: the model has no statistics, or the writer no ``add_scalar``.

    Example::

        writer = torch.utils.tensorboard.SummaryWriter(folder)
        model = bagua.wrap(model, [optimizer])
        loss_function(model(inputs), targets).backward()
        values = bagua.write_stats(model, writer, step=1)
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            f"{type(writer).__name__} has no add_scalar(tag, value, step) method; pass e.g. a "
            "SummaryWriter"
        )
    source = source_of(model)
    stats = source.stats()
    last = _last.setdefault(source, {})
    values = per_round(stats, last.get(id(writer)))
    if values:
        last[id(writer)] = stats
    for tag, value in values.items():
        writer.add_scalar(f"{prefix}/{tag}", value, stats["rounds"] if step is None else step)
    return values


def per_round(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, float]:
    """Values by tag, over the rounds from ``before`` to ``now``; {} where there were none.

    From the start where ``before`` is None, or of buckets that have been built anew since.
    """
    earlier = before
    if before is not None and before.get("built") != now.get("built"):
        earlier = None
    begin = {} if earlier is None else _counters(earlier)
    rounds = now["rounds"] - (0 if earlier is None else earlier["rounds"])
    if rounds == 0:
        return {}
    values: dict[str, float] = {}
    for key, count in _counters(now).items():
        each = (count - begin.get(key, 0)) / rounds
        if key.endswith("_ns"):
            values[f"{key.removesuffix('_ns')}_ms_per_round"] = each / 1e6
        else:
            values[f"{key}_per_round"] = each
    if values["busy_ms_per_round"] and "hidden_ms_per_round" in values:
        values["hidden_share"] = values["hidden_ms_per_round"] / values["busy_ms_per_round"]
    if now["total"]["nonfinite_rounds"] is not None:
        values["nonfinite_rounds"] = float(now["total"]["nonfinite_rounds"])
    return values


def _counters(stats: Mapping[str, Any]) -> dict[str, int]:
    of_buckets = {key: stats["total"][key] for key in _TIMES}
    by_the_clock = {key: stats[key] for key in _CLOCKED if key in stats}
    return {**moved(stats), **of_buckets, **by_the_clock}


def summary(algorithm: str, ranks: int, stats: Mapping[str, Any]) -> str:
    """See ``BaguaModule.bagua_summary``; ``stats``: of ``BaguaModule.bagua_stats``."""
    rounds, choice = stats["rounds"], stats.get("choice")
    if choice:
        algorithm += f" ({choice['chosen'] or choice['state']})"
    if ranks == 1:
        return f"{algorithm}, 1 rank: nothing is communicated"
    begin = f"{algorithm}, {ranks} ranks"
    if rounds == 0:
        return f"{begin}: no round yet"
    ops = sorted({op for bucket in stats["buckets"] for op in bucket["ops"]})
    size = stats["total"]["bytes"]
    sent = _megabytes(moved(stats)["bytes_sent"] / rounds)
    exact = _megabytes(2 * size * (ranks - 1) / ranks)
    hidden = stats["hidden_ns"] / stats["busy_ns"] if stats["busy_ns"] else 0.0
    return "\n".join(
        [
            f"{begin}, {rounds} rounds of {_megabytes(size)}: {', '.join(ops)}",
            f"sent {sent} per round and rank (an exact all-reduce: {exact})",
            f"blocked {_milliseconds(stats['exposed_ns'] / rounds)} per round, at most "
            f"{_milliseconds(stats['longest_wait_ns'])}; {hidden:.0%} of communication is hidden "
            "behind computation",
        ]
    )


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB"


def _milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3g} ms"
