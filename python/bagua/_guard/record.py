"""The record of a guard: breaches of the buckets, and what they are averaged with since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagua._core.state.saved_values import check_state, saved_count
from bagua._guard.arguments import Guard

__all__ = ["FOR_GOOD", "Record"]

#: The end of exact rounds that do not end.
FOR_GOOD = 2**62


class Record:
    """Breaches by tensor, so that they keep their meaning where buckets are built anew.

    Attributes:
        rounds: that have begun.
    """

    def __init__(self, guard: Guard) -> None:
        self.rounds = 0
        self._guard = guard
        self._breaches: dict[str, int] = {}  # that were answered with exact rounds
        self._exact_until: dict[str, int] = {}  # the first round that is not exact again
        self._eight_bits_until: dict[str, int] = {}

    def exact_until(self, names: Sequence[str]) -> int:
        """The first round, from 0, in which a bucket with tensors ``names`` is not exact again.

        0: it was never exact.
        """
        return max((self._exact_until.get(name, 0) for name in names), default=0)

    def eight_bits_until(self, names: Sequence[str]) -> int:
        """The first round in which the bucket has its own codec again; 0: it always had.

        Exact rounds count before those of 8 bits.
        """
        return max((self._eight_bits_until.get(name, 0) for name in names), default=0)

    def breaches(self, names: Sequence[str]) -> int:
        """How often the bucket has had a figure above its threshold."""
        return self._attempts(names) + (self.eight_bits_until(names) > 0)

    def add_eight_bits(self, names: Sequence[str]) -> int:
        """Count a breach; the number of rounds, from this one on, that are in 8 bits.

        Once per bucket: it does not count as one of the attempts.
        """
        for name in names:
            self._eight_bits_until[name] = self.rounds + self._guard.exact_rounds
        return self._guard.exact_rounds

    def add_breach(self, names: Sequence[str]) -> int | None:
        """Count a breach; the number of rounds, from this one on, that are exact; None: all."""
        count = self._attempts(names) + 1
        rounds = self._guard.exact_rounds * 2 ** (count - 1)
        for_good = count >= self._guard.attempts
        for name in names:
            self._breaches[name] = count
            self._exact_until[name] = FOR_GOOD if for_good else self.rounds + rounds
        return None if for_good else rounds

    def state_dict(self) -> dict[str, Any]:
        """``rounds``; of tensors that were made exact ``breaches/<name>``, how often, and
        ``exact_until/<name>``; of those that were in 8 bits ``eight_bits_until/<name>``.
        """
        state: dict[str, Any] = {"rounds": self.rounds}
        state |= {f"breaches/{name}": count for name, count in self._breaches.items()}
        state |= {f"exact_until/{name}": end for name, end in self._exact_until.items()}
        return state | {f"eight_bits_until/{n}": end for n, end in self._eight_bits_until.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; raises ValueError for the state of something else."""
        check_state(state, "Guard")
        rounds = saved_count(state, "rounds", "Guard")
        kinds = ("breaches", "exact_until", "eight_bits_until")
        tables: dict[str, dict[str, int]] = {kind: {} for kind in kinds}
        for key in state:
            kind, _, name = key.partition("/")
            if kind in tables and name:
                tables[kind][name] = saved_count(state, key, "Guard")
            elif key != "rounds":
                raise ValueError(f"Guard: its state has no '{key}'; it is of something else")
        self.rounds = rounds
        self._breaches, self._exact_until, self._eight_bits_until = tables.values()

    def _attempts(self, names: Sequence[str]) -> int:
        """How often the bucket was made exact."""
        return max((self._breaches.get(name, 0) for name in names), default=0)
