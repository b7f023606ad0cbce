"""The arguments that implementations of local training share."""

from __future__ import annotations

from typing import Literal, Protocol

from bagua._sync.outer.outer_sgd import OuterSGD
from bagua._sync.outer.shares import Weight
from bagua.torch_api.algorithms.diloco.fragments import Fragments

__all__ = ["OuterArguments"]


class OuterArguments(Protocol):
    """Arguments of local training; see ``DiLoCoAlgorithm``."""

    outer_optimizer: OuterSGD
    interval: int
    fragments: Fragments
    overlap_steps: int
    merge: Literal["keep"] | float
    codec: str | None
    error_feedback: bool | Literal["weights"]
    hierarchical: bool
    inner: Literal["local", "node"]
    weight: Weight
    max_interval: int | None
    guard: bool
    outer_clip: float | None
    warmup_steps: int
    average_buffers: bool
    outer_device: Literal["cpu"] | None
    elastic: bool
    min_ranks: int
