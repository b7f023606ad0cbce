"""Bodies of contributions: payloads of the buckets of a fragment, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bagua import _C
from bagua._outer.mailbox import letters

if TYPE_CHECKING:
    from bagua._outer.loop import OuterLoop
    from bagua.torch_api.bucket import BaguaBucket

_RESIDUAL, _COMMUNICATIONS = 0, 1  # in the memory of a page


def buckets_of(loop: OuterLoop, part: int) -> list[BaguaBucket]:
    """In the order of their payloads."""
    return [bucket for bucket in loop.buckets if bucket.part == part]


def _codec_of(bucket: BaguaBucket) -> str | None:
    codec: str | None = bucket.ops[0].arguments.get("codec")
    return codec


def body_bytes(bucket: BaguaBucket) -> int:
    """Bytes of a bucket's payload in a contribution."""
    flat, codec = bucket.backend_tensor, _codec_of(bucket)
    if codec is None:
        return flat.nbytes
    return _C.make_codec(codec).payload_bytes(torch.float32, flat.numel())


def encode(bucket: BaguaBucket, place: memoryview) -> None:
    """Write a bucket's contribution, and what its codec loses into the next residual."""
    flat, codec, page = bucket.backend_tensor, _codec_of(bucket), bucket.ops[0].page
    end = flat.numel() - (0 if bucket.padding_tensor is None else bucket.padding_tensor.numel())
    flat[end:].zero_()
    if codec is None:
        letters.put(flat.cpu(), place)
        return
    values = flat.to(torch.float32, copy=True)
    if page is not None:
        values.add_(page.memory.value(_RESIDUAL).to(torch.float32))
    made = _C.make_codec(codec, str(flat.device))
    payload = torch.empty(len(place), dtype=torch.uint8, device=flat.device)
    made.encode_residual(values, 1, payload)
    if page is not None:
        values[end:].zero_()
        count = page.memory.value(_COMMUNICATIONS)
        page.memory.next(_COMMUNICATIONS).copy_(count + 1)
        page.memory.next(_RESIDUAL).copy_(values)
    letters.put(payload.cpu(), place)


def mean_of(bucket: BaguaBucket, bodies: list[memoryview], weights: list[float]) -> torch.Tensor:
    """The sum of weight times value, in the order of ``bodies``: equal bits on all processors."""
    flat, codec = bucket.backend_tensor, _codec_of(bucket)
    dtype = flat.dtype if codec is None else torch.float32
    total = torch.zeros(flat.numel(), dtype=dtype, device="cpu")
    made = None if codec is None else _C.make_codec(codec)
    for body, weight in zip(bodies, weights, strict=True):
        if weight == 0:  # of no samples, which may not be finite
            continue
        if made is None:  # a product and a sum, never joined into one operation
            total.add_(torch.frombuffer(body, dtype=dtype).mul(weight))
        else:
            made.decode_add(torch.frombuffer(body, dtype=torch.uint8), dtype, total, weight)
    return total
