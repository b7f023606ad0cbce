"""Compares the weights of ranks that should be equal: ``BAGUA_CHECK_WEIGHTS_EVERY``.

Ranks that drift apart train on without an error. The core compares a sample in the agreement of
each round, and finds the round and the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch

from bagua import _C

__all__ = ["digest", "sample"]

#: Elements that are hashed at once: bounds the memory to a few times eight bytes of it.
_CHUNK = 2**18
#: Odd numbers: multiplying by them modulo 2**64 loses nothing.
_MULTIPLIER = -7046029254386353131
_CHUNK_MULTIPLIER = 6364136223846793005
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def sample(named: Sequence[tuple[str, torch.Tensor]], every: int) -> _C.WeightsSample | None:
    """The sample of ``named`` that the core compares, all of them in ``every`` rounds; None if
    there is nothing to compare.

    Parameters are held, not their memory: ``parameter.data = x`` is seen. Those on another device
    than most are left out, and tensor subclasses, whose values may lie anywhere.
    """
    plain = [
        (name, tensor)
        for name, tensor in named
        if type(tensor) in (torch.nn.Parameter, torch.Tensor) and tensor.layout == torch.strided
    ]
    sizes: Counter[torch.device] = Counter()
    for _, tensor in plain:
        if not tensor.is_meta:
            sizes[tensor.device] += tensor.numel()
    if not sizes.total():
        return None
    device, _ = sizes.most_common(1)[0]
    return _C.WeightsSample([(n, t) for n, t in plain if t.device == device], every)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits of the exact bits of ``tensor`` and their order, on its device (int64, no dims).

    The sum of all elements' bits, each times an odd number that depends on its place, modulo 2**64:
    a change of one element always changes it.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    result = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factors = _factors(tensor.device)
    for part in bits.split(_CHUNK):
        products = part.to(torch.int64) * factors[: part.numel()]
        result = result * _CHUNK_MULTIPLIER + products.sum()
    return result


@lru_cache(maxsize=4)
def _factors(device: torch.device) -> torch.Tensor:
    return (torch.arange(_CHUNK, device=device) * _MULTIPLIER).bitwise_or(1)
