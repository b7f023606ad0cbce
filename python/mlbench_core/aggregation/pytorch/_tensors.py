"""Which tensors of a module are aggregated, and which cannot be."""

from __future__ import annotations

import torch

__all__ = ["refusal", "tensors_of"]


def tensors_of(model: torch.nn.Module, buffers: bool) -> dict[str, torch.Tensor]:
    """The parameters, tied ones once, and if asked for the floating-point buffers, by name."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    if buffers:
        found |= {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    return found


def refusal(owner: torch.Tensor, tensor: torch.Tensor | None) -> str:
    """Why a tensor (a parameter, or its gradient) cannot be aggregated; empty if it can be."""
    if owner.is_meta:
        return "it is on the meta device and has no values; materialise the model first"
    if owner.is_complex():
        return f"complex numbers ({owner.dtype}) are not supported; use torch.view_as_real"
    if tensor is None:
        return ""
    if tensor.layout != torch.strided:
        return f"it is sparse ({tensor.layout}); make it dense, e.g. nn.Embedding(sparse=False)"
    if tensor.dtype != owner.dtype:
        return f"it is {tensor.dtype}, the parameter is {owner.dtype}; convert it first"
    if any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return f"elements share memory (strides {list(tensor.stride())}); use .contiguous()"
    return ""
