"""States as trees of dicts: values that are equal on all ranks are stored once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from bagua._core.state.weights_check import digest

__all__ = ["Conflict", "copied", "joined", "leaves", "path_text", "table", "tree", "without"]

#: The keys from the root to a leaf; a leaf is whatever is no dict with entries.
Path = tuple[Any, ...]
Leaves = dict[Path, Any]


class Conflict(ValueError):
    """Ranks have different values where there is room for one; the argument is the path."""


def copied(value: Any, device: str | None = None) -> Any:
    """``value`` with its tensors copied, to another device if one is named."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: copied(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item, device) for item in value)
    return value


def leaves(value: Any, path: Path = ()) -> Leaves:
    """All leaves by their paths, in order."""
    if not (isinstance(value, Mapping) and value):
        return {path: value}
    found: Leaves = {}
    for key, item in value.items():
        found |= leaves(item, (*path, key))
    return found


def tree(found: Leaves) -> Any:
    """The inverse of :func:`leaves`."""
    if () in found:
        return found[()]
    root: dict[Any, Any] = {}
    for path, value in found.items():
        place = root
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return root


def path_text(path: Path) -> str:
    """The text of a path for messages."""
    return "/".join(map(str, path))


def table(found: Leaves) -> dict[Path, tuple[int, str]]:
    """Hash for equality of tensors: 64 bits over values, dtype, shape and strides."""
    return {
        path: (int(digest(value)), f"{value.dtype} {tuple(value.shape)} {value.stride()}")
        for path, value in found.items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    }


def without(found: Leaves, paths: Collection[Path]) -> Leaves:
    """The leaves that are not at ``paths``."""
    return {path: value for path, value in found.items() if path not in paths}


def joined(ranks: Sequence[Leaves], of_first: Iterable[Path]) -> Leaves:
    """All ranks' leaves in one. At the paths ``of_first`` the first rank's count.

    Raises:
        Conflict: two ranks have different values elsewhere.
    """
    first_counts = set(of_first)
    result = dict(ranks[0])
    for other in ranks[1:]:
        for path, value in other.items():
            if path not in result:
                result[path] = value
            elif path not in first_counts and not _equal(result[path], value):
                raise Conflict(path)
    return result


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
