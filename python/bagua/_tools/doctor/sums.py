"""All-reduces over all ranks, exact and with 8 bits, compared with sums that torch makes alone."""

from __future__ import annotations

import hashlib
import math
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._tools.doctor.verdict import Finding, ranks_text
from bagua._tools.meeting import finite, mapping, text

ELEMENTS = 100_003  # of float32; no number of ranks from 2 on divides it
_CODEC = "block_uint8"
# Largest relative errors, of the Euclidean norm: float32 sums, and two roundings to 8 bits.
_LIMITS = {"exact": 1e-5, "8-bit": 0.05}


def reduce_everywhere(
    store: c10d.Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> dict[str, Any]:
    """Average a tensor over all ranks; every rank calls it.

    For ``"exact"`` and ``"8-bit"``: ``error``, relative to the mean that torch computes from all
    ranks' inputs, ``seconds``, and ``digest`` of the result.
    """
    connections = Connections(store, rank, list(range(size)), timeout)
    communicator = connections.connect("doctor", device)
    average = _C.ReduceOp.AVG
    codec = _C.make_codec(_CODEC, str(device))
    ops = {
        "exact": _C.AllReduce(communicator, average),
        "8-bit": _C.CompressedAllReduce(communicator, codec, _C.Scratch(), average),
    }
    mean = torch.zeros(ELEMENTS, dtype=torch.float64)
    for other in range(size):
        mean += _input(other).double() / size
    results = {}
    for name, op in ops.items():
        flat = _input(rank).to(device)
        op.run(flat)  # connects, and allocates
        flat.copy_(_input(rank))
        begun = time.perf_counter()
        op.run(flat)
        result = flat.cpu()
        seconds = time.perf_counter() - begun
        error = float((result.double() - mean).norm() / mean.norm())
        digest = hashlib.blake2b(result.numpy().tobytes(), digest_size=8).hexdigest()
        results[name] = {"error": error, "seconds": seconds, "digest": digest}
    return results


def sums_from(word: Any) -> dict[str, Any] | str:
    """What a rank has told of the all-reduces: as ``reduce_everywhere``, or why they failed."""
    if isinstance(word, str):
        return text(word)
    results = {}
    for name, told in mapping(word, set(_LIMITS)).items():
        result = mapping(told, {"error", "seconds", "digest"})
        if type(result["error"]) is not float:  # which may be NaN
            raise ValueError(result)
        seconds, digest = finite(result["seconds"], 0.0), text(result["digest"])
        results[name] = {"error": result["error"], "seconds": seconds, "digest": digest}
    return results


def findings_of_sums(results: dict[int, Any]) -> list[Finding]:
    failed = {rank: result for rank, result in results.items() if isinstance(result, str)}
    if failed:
        rank, reason = next(iter(failed.items()))
        return [Finding(f"the all-reduce failed on {ranks_text(list(failed))}: {reason}")]
    found = []
    for name, limit in _LIMITS.items():
        wrong = {rank: result[name]["error"] for rank, result in results.items()}
        wrong = {r: e for r, e in wrong.items() if not (math.isfinite(e) and e <= limit)}
        if wrong:
            worst = max(wrong.values())
            found.append(
                Finding(
                    f"the {name} all-reduce is wrong on {ranks_text(list(wrong))}: relative error "
                    f"{worst:.2g}, at most {limit:g} is right",
                )
            )
        digests: dict[str, list[int]] = {}
        for rank, result in results.items():
            digests.setdefault(result[name]["digest"], []).append(rank)
        if len(digests) > 1:
            parts = " against ".join(ranks_text(ranks) for ranks in digests.values())
            found.append(Finding(f"the {name} all-reduce gave different bits: {parts}"))
    return found


def _input(rank: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))
