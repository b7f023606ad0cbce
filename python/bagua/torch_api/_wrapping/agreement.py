"""The ranks' agreement on a wrap: model, arguments and environment."""

from __future__ import annotations

from bagua._core.state.initial_state import InitialState, communicating_optimizer
from bagua._core.state.shared_state import SharedState
from bagua._core.state.snapshot import ModuleSnapshot
from bagua.torch_api._wrapping.owner import Owner

__all__ = ["agree_on_wrap", "refuse_communicating_optimizers"]


def refuse_communicating_optimizers(owner: Owner) -> None:
    """Refuse an optimizer that communicates by itself where ranks step on their own gradients.

    Raises:
        NotImplementedError: names the optimizer and what can be used instead.
    """
    algorithm = owner.bagua_algorithm
    if algorithm.steps_in_backward:
        return
    optimizer = communicating_optimizer(owner.bagua_optimizers)
    if optimizer is not None:
        name = type(algorithm).__name__.removesuffix("Impl")
        raise NotImplementedError(
            f"module '{owner.bagua_module_name}': {type(optimizer).__name__} communicates in its "
            f"step(), and with {name} each rank steps on gradients of its own data, so parameters "
            "would learn from the data of one rank only. Use a plain optimizer of all parameters, "
            "such as torch.optim.AdamW, or an algorithm that averages gradients: "
            "GradientAllReduceAlgorithm or ByteGradAlgorithm."
        )


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
