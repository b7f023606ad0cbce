"""Local training: ranks train by themselves and average what they have learnt from time to time."""

from bagua._sync.outer.outer_sgd import OuterSGD
from bagua.torch_api.algorithms.diloco.diloco import DiLoCoAlgorithm, Elastic
from bagua.torch_api.algorithms.diloco.implementation import DiLoCoAlgorithmImpl
from bagua.torch_api.algorithms.diloco.sparse_loco import (
    SparseLoCoAlgorithm,
    SparseLoCoAlgorithmImpl,
)

__all__ = [
    "DiLoCoAlgorithm",
    "DiLoCoAlgorithmImpl",
    "Elastic",
    "OuterSGD",
    "SparseLoCoAlgorithm",
    "SparseLoCoAlgorithmImpl",
]
