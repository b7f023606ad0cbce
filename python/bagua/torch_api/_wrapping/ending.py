"""The end of a wrapped module's communication."""

from __future__ import annotations

from contextlib import suppress

from bagua import BaguaError
from bagua._sync.engine_synchronizer import EngineSynchronizer
from bagua.torch_api._wrapping.owner import Owner

__all__ = ["finish_rounds", "refuse_to_train_alone"]


def finish_rounds(owner: Owner, rounds: EngineSynchronizer) -> BaguaError | None:
    """Give the round that an earlier iteration has left some seconds to run.

    Returns:
        A failure of the device at the last steps, which no step has raised.
    """
    late_failure: BaguaError | None = None
    try:
        rounds.engine.settle()
    except BaguaError as error:
        late_failure = error
    with suppress(BaguaError):  # this rank or another has failed, and raised that
        if owner.bagua_algorithm.mark_pending(owner):
            rounds.finish_soon()
    return late_failure


def refuse_to_train_alone(module_name: str) -> None:
    """Raise BaguaError: the process group is gone, and a forward would communicate."""
    raise BaguaError(
        f"module '{module_name}': its process group was destroyed, so it would "
        "train without the other ranks. Call init_process_group() and wrap the module "
        "again, on every rank."
    )
