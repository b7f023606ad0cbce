"""Fragments: which parameters are averaged together, and their tensors and buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from bagua._core.state.bagua_tensor import record_of
from bagua.torch_api.bucket import BaguaBucket

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = ["Fragments", "Parts", "check_fragments", "fragments_described", "number_of"]

#: A number, names of modules per fragment, or a function from a parameter's name to its fragment.
Fragments: TypeAlias = int | Sequence[Sequence[str]] | Callable[[str], int]


def number_of(fragments: Fragments) -> int | None:
    """The number of fragments; None where the parameters' names decide."""
    if isinstance(fragments, int):
        return fragments
    return None if callable(fragments) else len(fragments)


def check_fragments(fragments: Fragments) -> None:
    """Raise TypeError or ValueError unless ``fragments`` is one of :data:`Fragments`."""
    if callable(fragments):
        return
    if isinstance(fragments, bool) or not isinstance(fragments, (int, list, tuple)):
        raise TypeError(
            "fragments is a number, a list of lists of module names, or a function from a "
            f"parameter's name to the number of its fragment, not {fragments!r}"
        )
    if isinstance(fragments, int):
        if fragments < 1:
            raise ValueError(f"fragments={fragments} must be at least 1")
        return
    if not fragments:
        raise ValueError("fragments has no list of module names")
    for names in fragments:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"fragments: {names!r} is no list of module names")


def fragments_described(fragments: Fragments) -> str:
    """One line, equal on all ranks where they are given the same."""
    if callable(fragments):
        return getattr(fragments, "__qualname__", type(fragments).__name__)
    return repr(fragments if isinstance(fragments, int) else [list(names) for names in fragments])


class Parts:
    """Fragments of the trained weights; floating buffers belong to none.

    Args:
        fragments: of the weights.
        bagua_ddp: the wrapped module.

    Attributes:
        count: the number of fragments, at least 1.

    Raises:
        ValueError: ``fragments`` do not fit the module.
    """

    def __init__(self, fragments: Fragments, bagua_ddp: Session) -> None:
        names = [name for name, _ in bagua_ddp.bagua_build_params()]
        self._of = _find_parts(fragments, bagua_ddp.module, names)
        self.count = max(self._of.values(), default=0) + 1

    def of(self, tensor: torch.Tensor) -> int | None:
        """The fragment of the weight that a registered ``tensor`` stands for; None for a buffer."""
        return self._of.get(record_of(tensor).name)

    def make_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        """Registered memory for pseudo-gradients by fragment, then for floating buffers."""
        named: list[tuple[str, torch.Tensor]] = [*bagua_ddp.bagua_build_params()]
        named.sort(key=lambda pair: self._of[pair[0]])
        named += bagua_ddp.bagua_floating_buffers()
        module = bagua_ddp.bagua_module_name
        return [_wide(tensor, name, module) for name, tensor in named]

    def groups(self, tensors: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The tensors of each bucket, of one fragment or of buffers."""
        groups = [
            [tensor for tensor in group if self.of(tensor) == part]
            for part in (*range(self.count), None)
            for group in tensors
        ]
        return list(filter(None, groups))

    def assign(self, buckets: Sequence[BaguaBucket]) -> None:
        """Say which part of the plan each bucket is of; those of buffers are of the last."""
        for bucket in buckets:
            part = self.of(bucket.tensors[0])
            bucket.part = self.count - 1 if part is None else part

    def split(
        self, buckets: Sequence[BaguaBucket]
    ) -> tuple[list[list[BaguaBucket]], list[BaguaBucket]]:
        """(buckets of each fragment, buckets of buffers)."""
        found: dict[int | None, list[BaguaBucket]] = {}
        for bucket in buckets:
            found.setdefault(self.of(bucket.tensors[0]), []).append(bucket)
        return [found.get(part, []) for part in range(self.count)], found.get(None, [])


def _find_parts(
    fragments: Fragments, module: torch.nn.Module, names: Sequence[str]
) -> dict[str, int]:
    """The fragment of each parameter of ``names``.

    Raises:
        ValueError: a parameter is in none or in two, a fragment is empty, or there are no blocks to
            make so many of; names it.
    """
    if isinstance(fragments, int):
        parts = _strided(fragments, module, names)
        count = fragments
    elif callable(fragments):
        parts = {name: fragments(name) for name in names}
        for name, part in parts.items():
            if isinstance(part, bool) or not isinstance(part, int) or part < 0:
                raise ValueError(f"fragments('{name}') is {part!r}, not a number from 0")
        count = max(parts.values(), default=-1) + 1
    else:
        parts = _listed(fragments, names)
        count = len(fragments)
    empty = sorted(set(range(count)) - set(parts.values()))
    if empty and names:
        raise ValueError(f"fragment(s) {empty} of {count} have no parameter that is trained")
    return parts


def _listed(fragments: Sequence[Sequence[str]], names: Sequence[str]) -> dict[str, int]:
    parts = {}
    for name in names:
        found = [
            part
            for part, modules in enumerate(fragments)
            if any(name == module or name.startswith(f"{module}.") for module in modules)
        ]
        if len(found) != 1:
            where = f"in fragments {found}" if found else "in no fragment"
            raise ValueError(f"parameter '{name}' is {where}; it must be in one")
        parts[name] = found[0]
    return parts


def _strided(count: int, module: torch.nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Block b to fragment b mod ``count``; what is in no block to the last."""
    if count == 1:
        return dict.fromkeys(names, 0)
    best: list[str] = []
    for path, child in module.named_modules():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            prefixes = [
                f"{path}.{key}." if path else f"{key}." for key, _ in child.named_children()
            ]
            blocks = [p for p in prefixes if any(name.startswith(p) for name in names)]
            best = max(best, blocks, key=len)
    if len(best) < count:
        raise ValueError(
            f"fragments={count}: the module has no ModuleList or Sequential of that many layers "
            f"with trained parameters, only of {len(best)}. Give lists of module names, or a "
            "function from a parameter's name to its fragment."
        )
    parts = dict.fromkeys(names, count - 1)
    for number, prefix in enumerate(best):
        for name in names:
            if name.startswith(prefix):
                parts[name] = number % count
    return parts


def _wide(tensor: torch.Tensor, name: str, module_name: str) -> torch.Tensor:
    """Registered memory for a pseudo-gradient or the mean of a buffer."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    empty = torch.zeros_like(tensor, dtype=wide, requires_grad=False)
    return empty.ensure_bagua_tensor(name, module_name)  # type: ignore[attr-defined,no-any-return]
