"""Changes to torch that last: methods of its classes, and a start that is refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers as rendezvous_handlers

from bagua._core.group.job import as_bagua_group, known_bagua_group
from bagua._core.group.process_group import CommMember, Communicator
from bagua._core.group.rendezvous import OWN_RENDEZVOUS, refuse_stale_addresses
from bagua._core.state.bagua_tensor import METHODS, PROPERTIES
from bagua._core.state.shards import note_ignored
from bagua._sync.optimizer_steps import attempt_of
from bagua.torch_api.distributed import watch_copy, wrap


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
    watch_fully_shard()


def watch_fully_shard() -> None:
    """Have torch's FSDP2, if it has been imported, note its ``ignored_params``. Idempotent."""
    for name in ("_fsdp_init", "_fully_shard"):
        module: Any = sys.modules.get(f"torch.distributed.fsdp._fully_shard.{name}")
        original = getattr(module, "_get_managed_states", None)
        if original is not None and not hasattr(original, "__wrapped__"):
            module._get_managed_states = _noting_ignored(original)


def _noting_ignored(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def managed_states(
        modules: Any, ignored_params: Iterable[torch.Tensor] | None = None, *others: Any
    ) -> Any:
        note_ignored(ignored_params or ())
        return original(modules, ignored_params, *others)

    return managed_states


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
    watch_fully_shard()
    if url != OWN_RENDEZVOUS:
        refuse_stale_addresses(url)
    return _torch_rendezvous["env"](url, **options)
