"""Compares the weights of ranks that should be equal: ``BAGUA_CHECK_WEIGHTS_EVERY``.

Ranks that drift apart train on without an error. The check finds the step and the parameter. By
default the core compares a sample in the agreement of each round (:func:`sample`). A number of
steps in the variable replaces it by a comparison of everything every so many steps, buffers that
are broadcast included (:class:`WeightsCheck`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch

from bagua import _C
from bagua._core.group.connections import Connections

__all__ = ["DEFAULT_EVERY", "WeightsCheck", "digest", "sample"]

#: Rounds in which the default compares each element once.
DEFAULT_EVERY = 100

#: Elements that are hashed at once: bounds the memory to a few times eight bytes of it.
_CHUNK = 2**18
#: Odd numbers: multiplying by them modulo 2**64 loses nothing.
_MULTIPLIER = -7046029254386353131
_CHUNK_MULTIPLIER = 6364136223846793005
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def sample(named: Sequence[tuple[str, torch.Tensor]]) -> _C.WeightsSample | None:
    """The sample of ``named`` that the core compares; None if there is nothing to compare.

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
    return _C.WeightsSample([(n, t) for n, t in plain if t.device == device], DEFAULT_EVERY)


class WeightsCheck:
    """Compares tensors between all members of a group, every so many times; 0: never.

    Costs a pass over the tensors (each element becomes eight bytes in between) and one all_gather
    of eight bytes per tensor.
    """

    def __init__(self, every: int, module_name: str, connections: Connections) -> None:
        self._every = every
        self._module_name = module_name
        self._connections = connections
        self._rounds = 0

    def due(self) -> bool:
        """Counts; True every so many calls. To be called equally often on all ranks."""
        if self._every == 0 or self._connections.size == 1:
            return False
        self._rounds += 1
        return self._rounds % self._every == 0

    def compare(self, named: Sequence[tuple[str, torch.Tensor]], step: int) -> None:
        """Compare the exact bits of ``named`` between the ranks. All ranks call it.

        Raises:
            BaguaMismatchError: on all ranks, naming the first tensor that differs, and the ranks.
        """
        if not named:
            return
        device = named[0][1].device
        mine = torch.stack([digest(tensor).to(device) for _, tensor in named])
        everyone = mine.new_empty(self._connections.size * len(named))
        self._connections.main_communicator(device).all_gather(mine, everyone)
        table = everyone.view(self._connections.size, len(named))
        differs = (table != table[0]).any(dim=0)
        if not differs.any():
            return
        first = int(differs.nonzero()[0])
        others = int(differs.sum()) - 1
        more = f"; {others} more of {len(named)} differ too" if others else ""
        camps = self._camps(table[:, first].tolist())
        raise _C.BaguaMismatchError(
            f"module '{self._module_name}', training forward {step}: ranks hold different "
            f"weights. First difference: '{named[first][0]}' ({camps}){more}. Since the last check "
            f"(BAGUA_CHECK_WEIGHTS_EVERY={self._every}) something changed it on some ranks only: "
            "an assignment outside of the optimizer, an optimizer that was not given to "
            "with_bagua, different learning rates, or step() on some ranks only."
        )

    def _camps(self, digests: list[int]) -> str:
        camps: dict[int, list[int]] = {}
        for rank, value in zip(self._connections.ranks, digests, strict=True):
            camps.setdefault(value, []).append(rank)
        return " against ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            for ranks in camps.values()
        )


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
