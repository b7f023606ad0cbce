"""The arguments that all ways of wrapping a module share."""

from __future__ import annotations

from typing import Any

import torch

from bagua.torch_api.algorithms.base import Algorithm

__all__ = ["check_optimizers_and_algorithm"]


def check_optimizers_and_algorithm(caller: str, optimizers: Any, algorithm: Any) -> None:
    """Raise TypeError, naming ``caller``, unless they are a list of optimizers and an algorithm."""
    if isinstance(optimizers, torch.optim.Optimizer):
        raise TypeError(f"{caller} takes a list of optimizers: [optimizer]")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{caller}: {type(optimizer).__name__} is not a torch.optim.Optimizer")
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"{caller}: algorithm must be an instance of bagua.torch_api.algorithms.Algorithm, "
            f"such as GradientAllReduceAlgorithm(), not {algorithm!r}"
        )
