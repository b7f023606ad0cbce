"""The fields of torch's logging data that exist here."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["logging_data"]

_DTYPES = {torch.float32: "float", torch.float64: "double"}

_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_DISTRIBUTED_DEBUG",
    "GLOO_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT",
)


def logging_data(ddp: Any) -> dict[str, Any]:
    """The names and values of torch's ``_get_ddp_logging_data``.

    Times are means over the steps so far, in nanoseconds. Torch's times of forward and backward are
    missing: they are not measured here. The hook's name is not among them.
    """
    inner = ddp.bagua_ddp
    parameters = [p for _, p in inner.bagua_build_params()]
    sizes = [_data_bytes(bucket.tensors) for bucket in inner.bagua_buckets]
    rebuilt = {"has_rebuilt_buckets": 1, "rebuilt_bucket_sizes": _joined(sizes)}
    data: dict[str, Any] = {
        **{name.lower(): os.environ.get(name, "N/A") for name in _VARIABLES},
        "world_size": inner.process_group.size,
        "rank": inner.process_group.rank,
        "module_name": type(ddp.module).__name__,
        "backend_name": _backend(ddp.process_group),
        "device_ids": _joined(ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "broadcast_buffers": int(ddp.broadcast_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(inner.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "has_sync_bn": int(_has_sync_batch_norm(ddp.module)),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "bucket_sizes": _joined(sizes),
        "num_buckets_reduced": len(sizes),
        "dtypes": _joined(sorted({_DTYPES.get(p.dtype, str(p.dtype)) for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": _data_bytes(parameters),
        "iteration": max(0, inner.bagua_train_step_counter - 1),
        **(rebuilt if ddp._has_rebuilt_buckets else {}),
    }
    if ddp.last_error is not None:
        data |= {"has_error": 1, "error": ddp.last_error}
    if ddp.joined_uneven_inputs:
        data["join_uneven_inputs"] = 1
    stats = inner.stats()
    if stats["rounds"]:
        data["avg_backward_comm_time"] = stats["busy_ns"] // stats["rounds"]
        data["avg_backward_compute_comm_overlap_time"] = stats["hidden_ns"] // stats["rounds"]
    return data


def _joined(values: Any) -> str:
    return ", ".join(map(str, values))


def _data_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _backend(group: Any) -> str:
    return dist.get_backend(group) if isinstance(group, dist.ProcessGroup) else "bagua"


def _has_sync_batch_norm(module: torch.nn.Module) -> bool:
    return any(isinstance(child, torch.nn.SyncBatchNorm) for child in module.modules())
