"""The guard of a wrap: the one that was asked for, or the algorithm's own."""

from __future__ import annotations

from bagua._guard.guard import Guard, GuardAtWork
from bagua.torch_api._wrapping.owner import Owner, WorkingAlgorithm

__all__ = ["guard_of"]


def guard_of(guard: Guard | None, algorithm: WorkingAlgorithm, owner: Owner) -> GuardAtWork | None:
    """The guard at work; ``guard`` None: the ``default_guard`` of ``algorithm``.

    Raises:
        ValueError: the algorithm cannot be guarded; with the reason and what to do.
    """
    guard = algorithm.default_guard if guard is None else guard
    if guard is None:
        return None
    if algorithm.refuses_guard:
        raise ValueError(f"guard= with {type(algorithm).__name__}: {algorithm.refuses_guard}")
    return GuardAtWork(
        guard,
        owner.bagua_module_name,
        owner.process_group,
        ranks_agree=algorithm.ranks_agree is True,
        adaptive=any({"betas", "eps"} & set(o.defaults) for o in owner.bagua_optimizers),
    )
