"""Distributed algorithms, by class and by name."""

from bagua.torch_api.algorithms import (
    async_model_average,
    bytegrad,
    decentralized,
    gradient_allreduce,
)
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import (
    GradientAllReduce,
    GradientAllReduceAlgorithm,
)

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "ByteGradAlgorithm",
    "DecentralizedAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduce",
    "GradientAllReduceAlgorithm",
    "async_model_average",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
]

GlobalAlgorithmRegistry.register(
    "gradient_allreduce", GradientAllReduceAlgorithm, "exact all-reduce of gradients"
)
GlobalAlgorithmRegistry.register(
    "bytegrad", ByteGradAlgorithm, "8-bit compressed all-reduce of gradients"
)
GlobalAlgorithmRegistry.register(
    "decentralized", DecentralizedAlgorithm, "averaged weights, with all ranks or one peer a step"
)
GlobalAlgorithmRegistry.register(
    "async", AsyncModelAverageAlgorithm, "weights averaged while training goes on"
)
