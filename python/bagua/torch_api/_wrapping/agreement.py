"""The ranks' agreement on a wrap: model, arguments and environment."""

from __future__ import annotations

from bagua._core.state.initial_state import InitialState
from bagua._core.state.shared_state import SharedState
from bagua._core.state.snapshot import ModuleSnapshot
from bagua.torch_api._wrapping.owner import Owner

__all__ = ["agree_on_wrap"]


def agree_on_wrap(
    owner: Owner,
    snapshot: ModuleSnapshot,
    algorithm: str,
    initial_state: InitialState,
    *,
    bucket_bytes: int,
    scales_gradients: bool,
) -> SharedState:
    """Check that all ranks wrap the same module with the same arguments. All ranks call it.

    ``algorithm``: described.

    Returns:
        The state that the ranks share, which is not shared yet.

    Raises:
        BaguaMismatchError: on all ranks, naming the first difference.
    """
    shared = SharedState(
        snapshot,
        owner.bagua_optimizers,
        owner.process_group,
        owner.bagua_module_name,
        with_buffers=owner.broadcast_buffers,
        ranks_agree=owner.bagua_algorithm.ranks_agree,
        initial_state=initial_state,
    )
    arguments = {
        "algorithm ": algorithm,
        "optimizers ": [type(optimizer).__name__ for optimizer in owner.bagua_optimizers],
        "do_flatten=": owner.gradient_as_bucket_view,
        "find_unused_parameters=": owner.find_unused_parameters,
        "static_graph=": owner.static_graph,
        "broadcast_buffers=": owner.broadcast_buffers,
        "grad_scaler=": scales_gradients,
        "bucket size ": bucket_bytes,
        "guard ": None if owner.guard is None else owner.guard.guard,
    }
    shared.describe(owner.module, arguments).agree()
    return shared
