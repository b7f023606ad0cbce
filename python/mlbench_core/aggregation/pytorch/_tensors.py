"""Selects the tensors of a module that are aggregated, and refuses others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Candidate", "Kind", "candidates_of"]

Kind = Literal["gradient", "weight"]


@dataclass(frozen=True)
class Candidate:
    """A tensor that may be aggregated.

    Attributes:
        owner: the parameter, or the buffer.
        tensor: its gradient, or itself without autograd; None for a gradient that is not there.
        refusal: why the tensor cannot be aggregated; empty if it can be.
    """

    name: str
    owner: torch.Tensor
    tensor: torch.Tensor | None
    refusal: str

    def describe(self) -> str:
        """Description that is equal on all ranks."""
        return f"{self.name} {list(self.owner.shape)} {self.owner.dtype}"


def candidates_of(
    model: torch.nn.Module, kind: Kind, buffers: bool, refusal_of: Callable[[torch.dtype], str]
) -> list[Candidate]:
    """The parameters or their gradients, tied ones once, in the module's order.

    Args:
        buffers: the floating-point buffers too.
        refusal_of: why tensors of a dtype cannot be aggregated, or empty.
    """
    owners: dict[str, torch.Tensor] = dict(model.named_parameters())
    if buffers:
        owners |= {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    found = []
    for name, owner in owners.items():
        tensor = owner.grad if kind == "gradient" else owner.detach()
        refusal = ""
        if tensor is not None:
            refusal = _refusal(tensor, owner.dtype) or refusal_of(tensor.dtype)
        found.append(Candidate(name, owner, tensor, refusal))
    return found


def _refusal(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    if tensor.is_meta:
        return "it is on the meta device and has no values; materialise the model first"
    if tensor.is_complex():
        return f"complex numbers ({tensor.dtype}) are not supported; use torch.view_as_real"
    if tensor.layout != torch.strided:
        return f"it is sparse ({tensor.layout}); make it dense, e.g. nn.Embedding(sparse=False)"
    if tensor.dtype != dtype:
        return f"it is {tensor.dtype}, the parameter is {dtype}; convert it first"
    if any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return f"elements share memory (strides {list(tensor.stride())}); use .contiguous()"
    return ""
