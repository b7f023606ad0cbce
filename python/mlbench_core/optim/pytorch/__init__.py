"""Optimizers of mlbench-core, by class and by name."""

from __future__ import annotations

from typing import Any

import torch

from mlbench_core.optim.pytorch.centralized import (
    CentralizedAdam,
    CentralizedSGD,
    CentralizedSparsifiedSGD,
    CustomCentralizedOptimizer,
    GenericCentralizedOptimizer,
    PowerSGD,
)
from mlbench_core.optim.pytorch.decentralized import DecentralizedSGD
from mlbench_core.optim.pytorch.optim import SignSGD, SparsifiedSGD

__all__ = [
    "CentralizedAdam",
    "CentralizedSGD",
    "CentralizedSparsifiedSGD",
    "CustomCentralizedOptimizer",
    "DecentralizedSGD",
    "GenericCentralizedOptimizer",
    "PowerSGD",
    "SignSGD",
    "SparsifiedSGD",
    "get_optimizer",
    "optimizers",
]

optimizers: dict[str, Any] = {
    "sign_sgd": SignSGD,
    "sparsified_sgd": SparsifiedSGD,
    "centralized_sparsified_sgd": CentralizedSparsifiedSGD,
    "centralized_sgd": CentralizedSGD,
    "centralized_adam": CentralizedAdam,
    "power_sgd": PowerSGD,
    "decentralized_sgd": DecentralizedSGD,
}


def get_optimizer(optimizer: str, **kwargs: Any) -> torch.optim.Optimizer:
    """Make an optimizer by its name in :data:`optimizers`.

    Args:
        optimizer: the name.
        **kwargs: arguments of its class.

    Raises:
        KeyError: there is no such name.
    """
    if optimizer not in optimizers:
        raise KeyError(f"there is no optimizer '{optimizer}'; there are {', '.join(optimizers)}")
    made: torch.optim.Optimizer = optimizers[optimizer](**kwargs)
    return made
