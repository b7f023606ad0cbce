"""Bagua's helpers, by their documented names."""

from bagua.torch_api.utils.flat import (
    align_size,
    apply_flattened_call,
    apply_flattened_call_all,
    check_contiguous,
    flatten,
    get_flattened_tensor,
    unflatten,
)
from bagua.torch_api.utils.names import to_bagua_datatype, to_bagua_reduce_op
from bagua.torch_api.utils.scores import average_by_removing_extreme_values

__all__ = [
    "align_size",
    "apply_flattened_call",
    "apply_flattened_call_all",
    "average_by_removing_extreme_values",
    "check_contiguous",
    "flatten",
    "get_flattened_tensor",
    "to_bagua_datatype",
    "to_bagua_reduce_op",
    "unflatten",
]
