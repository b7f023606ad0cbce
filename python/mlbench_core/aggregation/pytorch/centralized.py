"""Aggregations in which all ranks get the same result: mlbench-core's documented address."""

from mlbench_core.aggregation.pytorch._all_reduce import (
    ALLREDUCE_AGGREGATION_OPS,
    AVG_CUSTOM,
    AVG_WORLD,
    AllReduceAggregation,
)
from mlbench_core.aggregation.pytorch._error_feedback import (
    PowerAggregation,
    SparsifiedAggregation,
)
from mlbench_core.aggregation.pytorch._horovod import AllReduceAggregationHVD

__all__ = [
    "ALLREDUCE_AGGREGATION_OPS",
    "AVG_CUSTOM",
    "AVG_WORLD",
    "AllReduceAggregation",
    "AllReduceAggregationHVD",
    "PowerAggregation",
    "SparsifiedAggregation",
]
