"""Distributed algorithms, by class and by name."""

from bagua.torch_api.algorithms import (
    async_model_average,
    auto,
    bytegrad,
    decentralized,
    diloco,
    gradient_allreduce,
    power_sgd,
    q_adam,
    sparse,
)
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua.torch_api.algorithms.auto import AutoAlgorithm
from bagua.torch_api.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    GlobalAlgorithmRegistry,
    Traits,
)
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.algorithms.decentralized import (
    DecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua.torch_api.algorithms.diloco import (
    DiLoCoAlgorithm,
    Elastic,
    OuterSGD,
)
from bagua.torch_api.algorithms.gradient_allreduce import (
    GradientAllReduce,
    GradientAllReduceAlgorithm,
)
from bagua.torch_api.algorithms.power_sgd import PowerSGDAlgorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.algorithms.sparse import SparseAlgorithm

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "AutoAlgorithm",
    "ByteGradAlgorithm",
    "DecentralizedAlgorithm",
    "DiLoCoAlgorithm",
    "Elastic",
    "GlobalAlgorithmRegistry",
    "GradientAllReduce",
    "GradientAllReduceAlgorithm",
    "LowPrecisionDecentralizedAlgorithm",
    "OuterSGD",
    "PowerSGDAlgorithm",
    "QAdamAlgorithm",
    "QAdamOptimizer",
    "SparseAlgorithm",
    "Traits",
    "async_model_average",
    "auto",
    "bytegrad",
    "decentralized",
    "diloco",
    "gradient_allreduce",
    "power_sgd",
    "q_adam",
    "sparse",
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
    "low_precision_decentralized",
    LowPrecisionDecentralizedAlgorithm,
    "weights mixed with both neighbours on a ring, through 8-bit differences",
)
GlobalAlgorithmRegistry.register(
    "async", AsyncModelAverageAlgorithm, "weights averaged during training"
)
GlobalAlgorithmRegistry.register(
    "diloco", DiLoCoAlgorithm, "local steps, joined by an outer optimizer every so many"
)
GlobalAlgorithmRegistry.register(
    "qadam", QAdamAlgorithm, "Adam with 8-bit momentum after a warm-up of exact gradients"
)
GlobalAlgorithmRegistry.register(
    "power_sgd", PowerSGDAlgorithm, "low-rank gradients with error feedback"
)
GlobalAlgorithmRegistry.register(
    "sparse", SparseAlgorithm, "the largest elements of gradients, with error feedback"
)
GlobalAlgorithmRegistry.register(
    "auto",
    AutoAlgorithm,
    "the fastest of those that compress gradients, or exact ones, by measuring",
)
