"""``BaguaBucket``: a builder. The engine's own bucket is made from it and immutable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua import _C
from bagua.torch_api._bucket_appends import AppendsOperations
from bagua.torch_api._bucket_ops import BucketOp, PythonOp
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.tensor import (
    bagua_getter_closure,
    carries_gradient,
    point_at,
    record_of,
)

__all__ = ["BaguaBucket"]


class BaguaBucket(AppendsOperations):
    """Tensors that are communicated together.

    Args:
        tensors: registered tensors (``ensure_bagua_tensor``), same module, dtype and device.
        name: unique within the module.
        flatten: make the communicated tensors views of one contiguous memory. Otherwise they stay
            where they are and are copied in and out.
        alignment: the number of elements is padded with zeros to a multiple of it.

    Attributes:
        tensors: without padding.
        backend_tensor: the flat memory, padding included.
        padding_tensor: the padding, or None.

    Raises:
        ValueError: no tensors, a duplicate name, or mixed module names, dtypes or devices.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], name: str, flatten: bool, alignment: int = 1
    ) -> None:
        if not tensors:
            raise ValueError(f"bucket '{name}' has no tensors")
        self.tensors = list(tensors)
        self.name = name
        self.flatten = flatten
        self.alignment = alignment
        self.ops: list[BucketOp] = []
        self._check()
        self.gradients = all(carries_gradient(tensor) for tensor in self.tensors)
        self._allocate()

    @property
    def bagua_module_name(self) -> str | None:
        return record_of(self.tensors[0]).module_name

    def _check(self) -> None:
        first = bagua_getter_closure(self.tensors[0])
        names: set[str] = set()
        for tensor in self.tensors:
            record = record_of(tensor)
            effective = bagua_getter_closure(tensor)
            if record.name in names:
                raise ValueError(f"bucket '{self.name}': tensor '{record.name}' occurs twice")
            names.add(record.name)
            if record.module_name != self.bagua_module_name:
                raise ValueError(
                    f"bucket '{self.name}': tensor '{record.name}' belongs to module "
                    f"'{record.module_name}', not '{self.bagua_module_name}'"
                )
            if (effective.dtype, effective.device) != (first.dtype, first.device):
                raise ValueError(
                    f"bucket '{self.name}': tensor '{record.name}' is {effective.dtype} on "
                    f"{effective.device}, others are {first.dtype} on {first.device}; "
                    "one bucket holds one dtype on one device"
                )

    def _allocate(self) -> None:
        effective = [bagua_getter_closure(tensor) for tensor in self.tensors]
        numel = sum(tensor.numel() for tensor in effective)
        padded = -(-numel // self.alignment) * self.alignment
        first = effective[0]
        with torch.no_grad():
            flat = torch.zeros(padded, dtype=first.dtype, device=first.device)
        self.backend_tensor = flat
        self.padding_tensor = flat[numel:] if padded > numel else None
        self._views: list[torch.Tensor] = []
        offset = 0
        for tensor, value in zip(self.tensors, effective, strict=True):
            layout = tensor if self.gradients else value
            strides = _dense_strides(layout)
            view = flat.as_strided(layout.size(), strides, offset)
            with torch.no_grad():
                view.copy_(value)
            if self.flatten:
                point_at(tensor, record_of(tensor), view)
            self._views.append(view)
            offset += value.numel()

    def view_of(self, index: int) -> torch.Tensor:
        """Where tensor ``index`` lies in the flat memory."""
        return self._views[index]

    def slots(self) -> list[_C.Slot]:
        """The engine's description of the tensors."""
        adopt = _C.Adopt.NONE
        if self.gradients:
            adopt = _C.Adopt.GRAD_VIEW if self.flatten else _C.Adopt.GRAD_COPY
        return [
            _C.Slot(
                record_of(tensor).name,
                int(view.storage_offset()),
                list(view.size()),
                list(view.stride()),
                adopt,
                tensor if self.gradients else None,
            )
            for tensor, view in zip(self.tensors, self._views, strict=True)
        ]

    def copy_in(self, index: int) -> None:
        """Bring a tensor that is no view of the flat memory (any more) into it."""
        tensor, view = self.tensors[index], self._views[index]
        effective = self._effective(index)
        if effective.data_ptr() == view.data_ptr():
            return
        with torch.no_grad():
            view.copy_(effective)
        if self.flatten:
            point_at(tensor, record_of(tensor), view)

    def copy_out(self) -> None:
        """Give tensors that are not flattened the communicated values."""
        if self.flatten:
            return
        with torch.no_grad():
            for index, view in enumerate(self._views):
                self._effective(index).copy_(view)

    def flattened_tensor(self) -> torch.Tensor:
        """A contiguous copy of all communicated tensors, padding included."""
        for index in range(len(self.tensors)):
            self.copy_in(index)
        return self.backend_tensor.clone()

    def check_flatten(self) -> bool:
        """Whether the communicated tensors are views of the flat memory."""
        return all(
            self._effective(index).data_ptr() == view.data_ptr()
            for index, view in enumerate(self._views)
        )

    def _effective(self, index: int) -> torch.Tensor:
        """The communicated tensor; its place in the flat memory while there is none (no grad)."""
        effective: torch.Tensor | None = bagua_getter_closure(self.tensors[index])
        return self._views[index] if effective is None else effective

    def bytes(self) -> int:
        """Bytes of the communicated tensors, without padding."""
        return sum(view.numel() * view.element_size() for view in self._views)

    def append_python_op(
        self,
        python_function: Callable[[str], None],
        group: BaguaProcessGroup | None = None,
    ) -> BaguaBucket:
        """Call ``python_function(bucket_name)`` on the lane's thread, with the GIL.

        An exception in it is raised by the end of backward, on this rank and the others.
        """
        del group  # upstream: whose CUDA stream it runs on; here the lane's
        if self.flatten:
            self.ops.append(PythonOp(python_function))
            return self

        def on_copies(name: str) -> None:
            self.copy_out()
            python_function(name)
            for index in range(len(self.tensors)):
                self.copy_in(index)

        self.ops.append(PythonOp(on_copies))
        return self


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it is dense (channels_last), else those of a fresh tensor."""
    return torch.empty_like(tensor, device="meta").stride()
