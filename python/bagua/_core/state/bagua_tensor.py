"""``BaguaTensor``: a tensor that an algorithm has registered for communication.

The functions here become methods of ``torch.Tensor`` (see ``_patch``). Their state lies in a
side table, not on the tensor, so that pickling and copying a parameter stay unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from bagua import _C

if TYPE_CHECKING:
    from bagua._sync.engine import EngineSynchronizer

#: The type that annotations name: a ``torch.Tensor`` with the methods of this module.
BaguaTensor = torch.Tensor

Getter = Callable[[torch.Tensor], torch.Tensor]
Setter = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(eq=False)
class Record:
    name: str
    module_name: str | None
    getter: Getter | None
    setter: Setter | None
    marker: weakref.ref[EngineSynchronizer] | None = None
    #: On their way to the other ranks: gradients of sparse layout; None: they are dense.
    sparse: _C.SparseGradient | None = None


_records: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def record_of(tensor: torch.Tensor) -> Record:
    record = _records.get(tensor)
    if record is None:
        raise RuntimeError("not a Bagua tensor; call ensure_bagua_tensor(name, module_name) first")
    assert isinstance(record, Record)
    return record


def carries_gradient(tensor: torch.Tensor) -> bool:
    """Whether what is communicated is the tensor's ``.grad``."""
    record = record_of(tensor)
    getter = record.getter
    if record.sparse is not None:
        return True
    return getter is not None and tensor.grad is not None and getter(tensor) is tensor.grad


def is_sparse(tensor: torch.Tensor) -> bool:
    return record_of(tensor).sparse is not None


def is_bagua_tensor(self: torch.Tensor) -> bool:
    """Whether the tensor has been registered."""
    return self in _records


def ensure_bagua_tensor(
    self: torch.Tensor,
    name: str | None = None,
    module_name: str | None = None,
    getter_closure: Getter | None = None,
    setter_closure: Setter | None = None,
) -> torch.Tensor:
    """Register this tensor, in place.

    Args:
        name: unique within the module.
        module_name: of the wrapped module (``bagua_ddp.bagua_module_name``).
        getter_closure: from this tensor to the one that is communicated, such as its ``.grad``.
        setter_closure: replaces the communicated tensor.

    Raises:
        ValueError: a setter without a getter, or another name than at an earlier registration.
    """
    if setter_closure is not None and getter_closure is None:
        raise ValueError(f"tensor '{name}': a setter_closure needs a getter_closure")
    old = _records.get(self)
    if old is not None and name is not None and old.name != name and old.module_name == module_name:
        raise ValueError(f"tensor is registered as '{old.name}' already, not '{name}'")
    if old is not None and name is None:
        name = old.name
    _records[self] = Record(name or "", module_name, getter_closure, setter_closure)
    return self


def to_bagua_tensor(
    self: torch.Tensor,
    name: str | None = None,
    module_name: str | None = None,
    getter_closure: Getter | None = None,
    setter_closure: Setter | None = None,
) -> torch.Tensor:
    """Like :func:`ensure_bagua_tensor` on a new tensor object with the same storage."""
    alias = self.detach().view_as(self)
    return ensure_bagua_tensor(alias, name, module_name, getter_closure, setter_closure)


def bagua_getter_closure(self: torch.Tensor) -> torch.Tensor:
    """The tensor that is communicated: this one, or what its getter returns."""
    getter = record_of(self).getter
    return self if getter is None else getter(self)


def bagua_setter_closure(self: torch.Tensor, tensor: torch.Tensor) -> None:
    """Replace the tensor that is communicated.

    Raises:
        RuntimeError: the tensor was registered without a setter.
    """
    setter = record_of(self).setter
    if setter is None:
        raise RuntimeError(f"tensor '{record_of(self).name}' was registered without setter_closure")
    setter(self, tensor)


def bagua_set_storage(
    self: torch.Tensor, storage: torch.UntypedStorage, storage_offset: int = 0
) -> None:
    """Point the communicated tensor into ``storage`` (offset in elements)."""
    record = record_of(self)
    effective = bagua_getter_closure(self)
    view = torch.empty(0, dtype=effective.dtype, device=effective.device)
    with torch.no_grad():
        view.set_(storage, storage_offset, effective.size(), effective.stride())
    point_at(self, record, view)


def point_at(tensor: torch.Tensor, record: Record, view: torch.Tensor) -> None:
    """Make ``view`` the communicated tensor, without copying."""
    if record.setter is not None:
        record.setter(tensor, view)
    else:
        storage, offset = view.untyped_storage(), view.storage_offset()
        with torch.no_grad():
            bagua_getter_closure(tensor).set_(storage, offset, view.size(), view.stride())


def bagua_ensure_grad(self: torch.Tensor) -> torch.Tensor:
    """Give the parameter a zero ``.grad`` if it has none."""
    if self.grad is None:
        parameter = isinstance(self, torch.nn.Parameter)  # a frozen one is thawed later
        if not parameter and not (self.requires_grad and self.is_leaf):
            raise NotImplementedError("only parameters can be given a gradient")
        self.grad = torch.zeros_like(self)
    return self


def bagua_backend_tensor(self: torch.Tensor) -> torch.Tensor:
    """The communicated tensor (upstream: a native handle)."""
    return bagua_getter_closure(self)


def bagua_mark_communication_ready(self: torch.Tensor) -> None:
    """Mark this tensor as ready to be sent.

    Raises:
        RuntimeError: the tensor belongs to no wrapped module, or no round is open.
    """
    record = record_of(self)
    marker = record.marker() if record.marker is not None else None
    if marker is None:
        raise RuntimeError(f"tensor '{record.name}' is in no bucket of a wrapped module")
    marker.mark_tensor_ready(self)


METHODS = {
    function.__name__: function
    for function in (
        is_bagua_tensor,
        ensure_bagua_tensor,
        to_bagua_tensor,
        bagua_getter_closure,
        bagua_setter_closure,
        bagua_set_storage,
        bagua_ensure_grad,
        bagua_backend_tensor,
        bagua_mark_communication_ready,
    )
}
METHODS["bagua_mark_communication_ready_without_synchronization"] = bagua_mark_communication_ready


def _property(attribute: str) -> property:
    def read(self: torch.Tensor) -> Any:
        return getattr(record_of(self), attribute)

    return property(read)


PROPERTIES = {
    "bagua_tensor_name": _property("name"),
    "bagua_module_name": _property("module_name"),
}
