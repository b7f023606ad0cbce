"""The buckets of a wrapped module: as its algorithm has them, and built anew with its state."""

from __future__ import annotations

from bagua._core.state.bagua_tensor import bagua_getter_closure, is_sparse
from bagua._core.state.snapshot import ModuleSnapshot
from bagua._sync.bucketing import split_by_bucket_size
from bagua._sync.engine_synchronizer import EngineSynchronizer
from bagua.torch_api._wrapping.owner import Owner

__all__ = ["agree_on_unfrozen", "make_buckets", "rebuild_with_state"]


def make_buckets(owner: Owner, bucket_bytes: int) -> None:
    """Register the tensors of the algorithm of ``owner``, and give it buckets with operations.

    ``bucket_bytes``: after which a bucket is closed.
    """
    algorithm = owner.bagua_algorithm
    gradients = [(p, p.grad) for _, p in owner.bagua_build_params()]
    tensors = algorithm.init_tensors(owner)
    groups = split_by_bucket_size(tensors, bagua_getter_closure, bucket_bytes, is_sparse)
    owner.bagua_buckets = algorithm.tensors_to_buckets(groups, owner.gradient_as_bucket_view)
    for bucket in owner.bagua_buckets:
        algorithm.init_operations(owner, bucket)
    if owner.guard is not None:
        owner.guard.attach(owner.bagua_buckets)
    # Building replaces gradients; training continues with tensors that the user may hold.
    for parameter, gradient in gradients:
        parameter.grad = gradient


def agree_on_unfrozen(
    owner: Owner, snapshot: ModuleSnapshot, rounds: EngineSynchronizer
) -> list[str]:
    """Count unfrozen parameters among the trained ones; their names.

    Where there are any, all ranks agree on them, and ``rounds`` ends.

    Raises:
        BaguaMismatchError: another rank has not unfrozen the same.
    """
    names = snapshot.unfrozen(owner.module)
    snapshot.accept_unfrozen(owner.module)
    if names:
        snapshot.refuse_unsupported(owner.module, owner.bagua_algorithm)
        rounds.agree_on_unfreezing(names)
    return names


def rebuild_with_state(owner: Owner) -> None:
    """Build new buckets; the algorithm continues with its state (``carry_over``)."""
    algorithm = owner.bagua_algorithm
    state = algorithm.state_dict()
    owner.rebuild()
    fresh = algorithm.state_dict()
    algorithm.load_state_dict(algorithm.carry_over(state, fresh))
