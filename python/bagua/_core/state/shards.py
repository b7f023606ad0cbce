"""Tensors of which this rank holds a shard: torch's DTensors, of FSDP2 and tensor parallelism."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from bagua import _C, BaguaError

#: Parameters of the ``ignored_params`` of ``fully_shard``, which the user averages or keeps apart.
_ignored: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def note_ignored(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        _ignored[parameter] = True


def refuse_unaveraged(owner: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise BaguaError, with their names, where plain parameters beside shards are trained.

    torch averages the gradients of shards only. Those that ``fully_shard`` was told to ignore may
    be trained, and those that a ``DistributedDataParallel`` averages.
    """
    names = [
        f"'{name}'"
        for name, p in named
        if p.requires_grad
        and not (is_sharded(p) or p in _ignored or getattr(p, "expert", False))
        and not _C.has_torch_reducer(p)
    ]
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise BaguaError(
            f"{owner}: the model is sharded, but parameters {', '.join(names[:5])}{more} are "
            "trainable and not sharded, so no rank averages their gradients. Add them before "
            "fully_shard, which shards them; freeze them; or say that they are your own, by "
            "fully_shard(..., ignored_params=...) after the import of bagua, or by their names in "
            "the model's _bagua_params_and_buffers_to_ignore"
        )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor."""
    torchs = sys.modules.get("torch.distributed.tensor")  # whose import is slow
    return torchs is not None and isinstance(tensor, torchs.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, without autograd, of the same memory; of a plain tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def whole(shard: torch.Tensor, like: Any) -> torch.Tensor:
    """The DTensor of which ``shard`` is this rank's part, placed as ``like``.

    ``shard`` itself where ``like`` is a plain tensor, or its shard has another shape.
    """
    if not is_sharded(like) or local(like).shape != shard.shape:
        return shard
    made: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.size(),
        stride=like.stride(),
    )
    return made


class WholeSums:
    """Sums over all elements of tensors of which this rank has parts, those of ``parameters``.

    All ranks that hold shards of one parameter call its methods together, and get equal bits.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        #: By mesh and number of copies of a shard in it: positions of the parameters.
        self._kinds: dict[tuple[Any, int], list[int]] = {}
        for position, parameter in enumerate(parameters):
            kind: tuple[Any, int] = (None, 1)
            if is_sharded(parameter):
                kind = (parameter.device_mesh, _copies(parameter))  # type: ignore[attr-defined]
            self._kinds.setdefault(kind, []).append(position)

    def inner_product(self, left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
        """The sum of the products, in f64."""
        total = 0.0
        for (mesh, copies), positions in self._kinds.items():
            own = _C.inner_product([left[i] for i in positions], [right[i] for i in positions])
            total += _sum_over(mesh, own / copies)
        return total

    def all_true(self, flag: bool) -> bool:
        """Whether ``flag`` is True on all ranks."""
        return sum(_sum_over(mesh, float(not flag)) for mesh, _ in self._kinds) == 0


def _copies(tensor: Any) -> int:
    places = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(ranks for ranks, place in places if not place.is_shard())


def _sum_over(mesh: Any, value: float) -> float:
    """The sum of the values of the ranks of a mesh; None: of this rank alone."""
    if mesh is None:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=mesh.device_type)
    for dimension in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(dimension))
    return total.item()


def place_of(tensor: Any) -> str:
    """Placements and the number of this rank's shard, equal on all ranks that hold that shard."""
    mesh = tensor.device_mesh
    placements = ", ".join(map(repr, tensor.placements))
    places = zip(mesh.get_coordinate(), tensor.placements, strict=True)
    shard = tuple(at if place.is_shard() else 0 for at, place in places)
    return f"{placements} of a mesh {tuple(mesh.shape)}, shard {shard}"


class Shards:
    """Parameters of which this rank holds shards, as the state of an algorithm has them.

    In a state dict the tensors of such a parameter are DTensors of its placements, for
    ``torch.distributed.checkpoint``; ``shards`` is the shape of the mesh, and what is under
    ``rank<r>/`` otherwise is under ``shard<place in the mesh>/ranks<number>/rank<r>/``. Without
    DTensors a state is unchanged.

    ``rank``, ``ranks``: of this process among those that hold the same shards, and their number.
    """

    def __init__(
        self, owner: str, named: Iterable[tuple[str, torch.Tensor]], rank: int, ranks: int
    ) -> None:
        self.parameters = {name: p for name, p in named if is_sharded(p)}
        self._owner = owner
        self._own = f"rank{rank}/"
        place, self._shapes = _label_of(self.parameters.values())
        self._place = f"shard{place}/ranks{ranks}/"

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """The saved form of a state of plain tensors."""
        if not self.parameters:
            return state
        found: dict[str, Any] = {"shards": self._shapes}
        for key, value in state.items():
            own = self._place if key.startswith(self._own) else ""
            like = self.parameters.get(key.partition("/")[2])
            found[own + key] = whole(value, like) if isinstance(value, torch.Tensor) else value
        return found

    def loaded(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """A state of plain tensors, and whether the present shards have saved it."""
        found: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and is_sharded(value):
                like = self.parameters.get(key.partition("/")[2])
                here = "no DTensor" if like is None else place_of(like)
                if place_of(value) != here:
                    raise ValueError(
                        f"{self._owner}: '{key}' is {place_of(value)} in the state, its parameter "
                        f"{here}. Load it by torch.distributed.checkpoint, which shards it anew."
                    )
                value = local(value)
            found[key.removeprefix(self._place)] = value
        return found, found.get("shards", "") == self._shapes


def _label_of(tensors: Iterable[Any]) -> tuple[str, str]:
    """(this rank's place in the meshes of ``tensors``, their shapes); empty without DTensors."""
    meshes = {tensor.device_mesh for tensor in tensors}
    places = sorted((tuple(mesh.shape), tuple(mesh.get_coordinate())) for mesh in meshes)
    shapes = ["x".join(map(str, shape)) for shape, _ in places]
    own = [".".join(map(str, coordinate)) for _, coordinate in places]
    return "-".join(map("of".join, zip(own, shapes, strict=True))), "-".join(shapes)


def copies_of(tensor: Any) -> tuple[Any, tuple[int, ...]]:
    """The mesh of a DTensor, and its dimensions along which ranks hold the same shard."""
    places = enumerate(tensor.placements)
    return tensor.device_mesh, tuple(at for at, place in places if not place.is_shard())


def ranks_of(tensor: Any) -> set[int]:
    return set(tensor.device_mesh.mesh.flatten().tolist())


def copied_between_shards(named: Sequence[tuple[str, torch.Tensor]]) -> str | None:
    """The first of ``named`` that several ranks hold, if others among them are shards."""
    if not any(is_sharded(tensor) for _, tensor in named):
        return None
    for name, tensor in named:
        if not is_sharded(tensor) or _copies(tensor) > 1:
            return name
    return None


def has_fsdp(module: torch.nn.Module) -> bool:
    """Whether torch's FSDP2 has cut parameters of ``module`` between several ranks."""
    several = any(is_sharded(p) and len(ranks_of(p)) > 1 for p in module.parameters())
    return several and bool(_fsdp_modules(module))


def _fsdp_modules(module: torch.nn.Module) -> list[Any]:
    torchs = sys.modules.get("torch.distributed.fsdp")
    return [c for c in module.modules() if torchs is not None and isinstance(c, torchs.FSDPModule)]


def reshard(module: torch.nn.Module) -> None:
    """Have FSDP2's modules show their shards, which the outermost one does not after a forward."""
    for child in _fsdp_modules(module):
        child.reshard()
