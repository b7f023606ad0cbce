"""Bagua's names of dtypes and numbers of reductions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["to_bagua_datatype", "to_bagua_reduce_op"]

_DATATYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.uint8: "u8",
    torch.int64: "i64",
}
_REDUCE_OPS = {
    dist.ReduceOp.SUM: 0,
    dist.ReduceOp.PRODUCT: 1,
    dist.ReduceOp.MIN: 2,
    dist.ReduceOp.MAX: 3,
    dist.ReduceOp.BOR: 7,
    dist.ReduceOp.BAND: 8,
    dist.ReduceOp.BXOR: 9,
    dist.ReduceOp.AVG: 10,
}


def to_bagua_datatype(datatype: torch.dtype) -> str:
    """Bagua's name of a dtype: "f32", "f16", "u8" or "i64".

    Raises:
        ValueError: Bagua has none for it. Bagua's buckets here take more dtypes than these.
    """
    if datatype not in _DATATYPES:
        raise ValueError(f"unsupported data type {datatype}: Bagua names {list(_DATATYPES)}")
    return _DATATYPES[datatype]


def to_bagua_reduce_op(torch_reduce_op: Any) -> int:
    """The number of ``bagua.ReduceOp`` for an operation of torch.

    Raises:
        ValueError: Bagua has none for it.
    """
    if torch_reduce_op not in _REDUCE_OPS:
        raise ValueError(f"unsupported reduce op {torch_reduce_op}")
    return _REDUCE_OPS[torch_reduce_op]
