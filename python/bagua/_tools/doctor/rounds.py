"""Order in which pairs of ranks are measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

__all__ = ["all_pairs", "rounds_of_pairs"]


def rounds_of_pairs(
    nodes: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Rounds that hold each of ``pairs`` once, and no node twice in a round.

    So links between nodes are measured without traffic beside. ``nodes``: node of every rank.
    """
    left = list(pairs)
    rounds = []
    while left:
        busy: set[int] = set()
        chosen, later = [], []
        for pair in left:
            touched = {nodes[rank] for rank in pair}
            if busy & touched:
                later.append(pair)
            else:
                busy |= touched
                chosen.append(pair)
        rounds.append(chosen)
        left = later
    return rounds


def all_pairs(size: int) -> list[tuple[int, int]]:
    """Every two of ``size`` ranks, the lower one first."""
    return list(itertools.combinations(range(size), 2))
