"""``BaguaTensor``: a tensor that an algorithm has registered for communication."""

from bagua._core.state.bagua_tensor import BaguaTensor

__all__ = ["BaguaTensor"]
