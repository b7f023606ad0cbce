"""Chooses the algorithm by measuring the training while it begins."""

from bagua._foresight.candidate import Candidate
from bagua.torch_api.algorithms.auto.auto import AutoAlgorithm, AutoAlgorithmImpl

__all__ = ["AutoAlgorithm", "AutoAlgorithmImpl", "Candidate"]
