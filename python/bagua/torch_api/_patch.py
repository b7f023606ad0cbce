"""The only place that changes torch: methods of its classes, and a start that is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers as rendezvous_handlers

from bagua._core.group.job import as_bagua_group, ensure_initialised, known_bagua_group
from bagua._core.group.process_group import CommMember, Communicator
from bagua._core.group.rendezvous import OWN_RENDEZVOUS, refuse_stale_addresses
from bagua._core.state.bagua_tensor import METHODS, PROPERTIES
from bagua._sync.optimizer_steps import attempt_of
from bagua.torch_api._session import Session
from bagua.torch_api.algorithms.auto import AutoAlgorithm
from bagua.torch_api.algorithms.base import Algorithm, check_arguments
from bagua.torch_api.distributed import BaguaModule, watch_copy, wrap_class
from bagua.torch_api.guard import Guard


def install() -> None:
    """Give torch's classes ``with_bagua``, ``bagua_patch`` and the methods of BaguaTensor.

    And have torch.distributed refuse to start with the addresses of dead processes, copies of
    wrapped modules say so when they are trained alone, and scalers say which steps they skip.
    """
    torch.nn.Module.with_bagua = wrap  # type: ignore[attr-defined]
    if torch.nn.Module.__setstate__ is not _set_state:
        torch.nn.Module.__setstate__ = _set_state  # type: ignore[method-assign]
    for name, attribute in {**METHODS, **PROPERTIES}.items():
        setattr(torch.Tensor, name, attribute)
    for name, group_attribute in GROUP_ATTRIBUTES.items():
        setattr(dist.ProcessGroup, name, group_attribute)
    if torch.amp.GradScaler.step is not _step_of_scaler:
        torch.amp.GradScaler.step = _step_of_scaler  # type: ignore[method-assign]
    if rendezvous_handlers["env"] is not _rendezvous_from_environment:
        _torch_rendezvous["env"] = rendezvous_handlers["env"]
        rendezvous_handlers["env"] = _rendezvous_from_environment


def wrap(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | None = None,
    process_group: Any = None,
    do_flatten: bool | None = True,
    *,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    guard: Guard | None = None,
) -> BaguaModule:
    """Train ``model`` data-parallel; ``model.with_bagua(...)`` is the same.

    Every rank of the group calls it, with the same model and arguments. Parameters, buffers and
    optimizer state of the group's first rank are given to all. Calling it again switches to another
    algorithm.

    Args:
        model: any module; stays the same object.
        optimizers: the optimizers used for the module (a list).
        algorithm: how and when ranks communicate (``bagua.torch_api.algorithms``). None:
            ``AutoAlgorithm()``, which measures its candidates and keeps the fastest.
        process_group: who communicates: None for all ranks, a torch process group, a ``DeviceMesh``
            of one dimension, or a ``BaguaProcessGroup``.
        do_flatten: make gradients views of their buckets; False copies them in and out. None: views
            only where the algorithm needs them.
        find_unused_parameters: ranks exchange which parameters were used, and one that no rank
            used keeps its ``.grad``. Unused parameters never hang, with or without it.
        broadcast_buffers: give every rank the first rank's buffers before a training forward.
            None: as the algorithm has it.
        grad_scaler: the ``GradScaler`` of the loss. Algorithms with momentum or residuals need it
            to keep them unscaled: if you use one and do not pass it, they are silently wrong.
        guard: optional accuracy monitor, which warns if the algorithm loses too much. None: that of
            the algorithm, off for most.

    Returns:
        ``model`` itself, now a :class:`BaguaModule`.

    Raises:
        RuntimeError: before ``init_process_group``, of bagua or of torch.distributed.
        BaguaMismatchError: the ranks' models or arguments differ; names the first difference.
        BaguaError: a rank did not come, or was lost; says where the others are.
        TypeError, ValueError, NotImplementedError: bad arguments or parameters, by name.

    Note:
        To ignore parameters or buffers, assign the list of their names (as in ``state_dict()``) to
        ``module._bagua_params_and_buffers_to_ignore`` before the call.

    Example::

        model = bagua.wrap(model, [optimizer], ByteGradAlgorithm())
        loss_function(model(inputs), targets).backward()
        optimizer.step()
    """
    algorithm = AutoAlgorithm() if algorithm is None else algorithm
    check_arguments("with_bagua", optimizers, algorithm, grad_scaler, guard)
    if dist.is_initialized():
        ensure_initialised()
    group = as_bagua_group(process_group)
    if isinstance(model, BaguaModule):
        model.bagua_ddp.pause()
        model.bagua_ddp.close()
    with group.connections.collective_phase("with_bagua"):
        ddp = Session(
            model,
            optimizers,
            algorithm,
            group,
            getattr(model, "_bagua_module_name", None),
            gradient_as_bucket_view=do_flatten,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            grad_scaler=grad_scaler,
            guard=guard,
        )
    wrapped = wrap_class(model)
    wrapped._attach(ddp)
    return wrapped


def bagua_patch(self: dist.ProcessGroup, stream: Any = None) -> dist.ProcessGroup:
    """Make the bagua group of this torch group, which is returned. Every member calls it.

    Again it does nothing. ``stream``: the CUDA stream to remember (``BaguaProcessGroup.stream``).
    """
    as_bagua_group(self, stream)
    return self


def bagua_get_global_communicator(self: dist.ProcessGroup) -> Communicator | CommMember:
    return known_bagua_group(self).get_global_communicator()


def bagua_get_inter_node_communicator(self: dist.ProcessGroup) -> Communicator | CommMember:
    return known_bagua_group(self).get_inter_node_communicator()


def bagua_get_intra_node_communicator(self: dist.ProcessGroup) -> Communicator | CommMember:
    return known_bagua_group(self).get_intra_node_communicator()


GROUP_ATTRIBUTES = {
    "bagua_patch": bagua_patch,
    "bagua_pg": property(known_bagua_group),
    "bagua_get_global_communicator": bagua_get_global_communicator,
    "bagua_get_inter_node_communicator": bagua_get_inter_node_communicator,
    "bagua_get_intra_node_communicator": bagua_get_intra_node_communicator,
}

_module_set_state = torch.nn.Module.__setstate__


def _set_state(self: torch.nn.Module, state: dict[str, Any]) -> None:
    """torch's own; copies and unpickled copies of wrapped modules are watched."""
    _module_set_state(self, state)
    watch_copy(self)


_scaler_step = torch.amp.GradScaler.step


def _step_of_scaler(
    self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> float | None:
    """torch's own; algorithms that count attempted steps count those that it skips."""
    with attempt_of(optimizer):
        return _scaler_step(self, optimizer, *args, **kwargs)


_torch_rendezvous: dict[str, Callable[..., Iterator[Any]]] = {}


def _rendezvous_from_environment(url: str, **options: Any) -> Iterator[Any]:
    """torch's own, but for a job that was restarted: there it fails or hangs."""
    if url != OWN_RENDEZVOUS:
        refuse_stale_addresses(url)
    return _torch_rendezvous["env"](url, **options)
