"""The only place where classes of torch gain anything."""

from __future__ import annotations

import torch

from bagua.torch_api.distributed import with_bagua
from bagua.torch_api.tensor import METHODS, PROPERTIES

__all__ = ["install"]


def install() -> None:
    """Give ``torch.nn.Module`` ``with_bagua`` and ``torch.Tensor`` the methods of BaguaTensor."""
    torch.nn.Module.with_bagua = with_bagua  # type: ignore[attr-defined]
    for name, attribute in {**METHODS, **PROPERTIES}.items():
        setattr(torch.Tensor, name, attribute)
