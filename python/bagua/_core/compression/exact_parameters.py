"""Parameters that are averaged exactly beside others that are compressed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

__all__ = ["check_patterns", "exact_parameters"]


def check_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """The patterns as a tuple.

    Raises:
        TypeError: one string instead of several.
    """
    if isinstance(patterns, str):
        raise TypeError(
            f"exact_parameters={patterns!r} is one string: give a list of names or patterns, such "
            f"as [{patterns!r}]"
        )
    return tuple(patterns)


def exact_parameters(
    patterns: Sequence[str], named: Iterable[tuple[str, torch.nn.Parameter]]
) -> set[int]:
    """The ``id`` of each parameter that has a name which a pattern matches.

    Args:
        patterns: with the wildcards of :mod:`fnmatch`.
        named: all names of all parameters.

    Raises:
        ValueError: a pattern matches none; names it.
    """
    named = list(named)
    chosen = set()
    for pattern in patterns:
        matched = {id(parameter) for name, parameter in named if fnmatchcase(name, pattern)}
        if not matched:
            names = ", ".join(name for name, _ in named[:8]) + (", ..." if named[8:] else "")
            raise ValueError(
                f"exact_parameters: {pattern!r} matches no parameter of the model; it has {names}"
            )
        chosen |= matched
    return chosen
