"""Aggregations in which all ranks get the same result: mlbench-core's documented address."""

from mlbench_core.aggregation.pytorch._all_reduce import (
    ALLREDUCE_AGGREGATION_OPS as ALLREDUCE_AGGREGATION_OPS,
    AVG_CUSTOM as AVG_CUSTOM,
    AVG_WORLD as AVG_WORLD,
    AllReduceAggregation as AllReduceAggregation,
)
from mlbench_core.aggregation.pytorch._error_feedback import (
    PowerAggregation as PowerAggregation,
    SparsifiedAggregation as SparsifiedAggregation,
)
from mlbench_core.aggregation.pytorch._horovod import (
    AllReduceAggregationHVD as AllReduceAggregationHVD,
)
