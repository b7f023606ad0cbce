"""The guard of one wrapped module: asks for samples, compares figures, and switches ops."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.statistics import MainThreadTraffic
from bagua._guard.arguments import Guard
from bagua._guard.non_finite import NonFiniteShare
from bagua._guard.record import Record
from bagua._guard.sample import Sample, figures_of, places_of, samples_with
from bagua._guard.warning import breach_text
from bagua._guard.watched import Bucket, Watched
from bagua._ops.contract.watch import EIGHT_BITS, BucketWatch
from bagua._sync.engine_synchronizer import EngineSynchronizer

__all__ = ["GuardAtWork"]

_log = logging.getLogger("bagua")
_MOST_LISTED = 20  # breaches in the statistics


class GuardAtWork:
    """One per wrapped module (``module.bagua_guard``). All ranks make the same calls.

    Note [When a guard decides]
    A sample is asked for as a round begins, taken by the lane, and compared as the next round
    begins: optimizers have stepped by then, on which residuals may wait. Nothing of that round has
    been sent, so what is decided holds in it, on all ranks. The decision is made of figures that
    the ranks have reduced together.

    Args:
        guard: what to measure, and the thresholds.
        module_name: for messages.
        process_group: whose ranks communicate.
        ranks_agree: whether all ranks hold the same results.
        adaptive: whether an optimizer divides by the magnitude of past gradients.
    """

    def __init__(
        self,
        guard: Guard,
        module_name: str,
        process_group: BaguaProcessGroup,
        *,
        ranks_agree: bool,
        adaptive: bool,
    ) -> None:
        self.guard = guard
        self._module_name = module_name
        self._group = process_group
        self._record = Record(guard)
        self._watched: list[Watched] = []
        self._breaches: list[dict[str, Any]] = []
        self._checks = 0
        self._idle_until = 0  # before this round there is nothing to do
        self._adaptive = adaptive
        speaks = process_group.connections.rank == 0
        self._speaks = speaks
        self._non_finite = NonFiniteShare(guard, speaks or not ranks_agree, module_name)

    def attach(self, buckets: Sequence[Bucket]) -> None:
        """Watch new buckets. Called when they have their operations, before the engine is built."""
        self._watched = []
        self._idle_until = 0
        for bucket in buckets:
            operation = bucket.ops[-1] if bucket.ops else None
            if operation is None or operation.approximates is None:
                continue
            bucket.watch = BucketWatch()
            names = [record_of(tensor).name for tensor in bucket.tensors]
            entry = Watched(bucket, bucket.watch, operation, names)
            self._recall(entry)
            self._watched.append(entry)

    def begin_round(self, rounds: EngineSynchronizer, traffic: MainThreadTraffic) -> None:
        """Compare what was sampled, decide, and ask for new samples.

        Called once as each round begins, before anything of it is sent. All ranks call it.

        Raises:
            BaguaError: another rank failed.
        """
        number = self._record.rounds
        if number < self._idle_until:
            self._record.rounds += 1
            return
        asked = [entry for entry in self._watched if entry.places is not None]
        if asked:
            rounds.await_agreement()
            with traffic.counted("guard"), rounds.part_of_the_round():
                self._check(asked)
            self._checks += 1
        self._switch()
        self._ask()
        self._non_finite.check(number, rounds.non_finite)
        self._record.rounds += 1
        again = [self._busy_again(entry, number) for entry in self._watched]
        self._idle_until = min([number + self.guard.every, *again])

    def _busy_again(self, entry: Watched, number: int) -> int:
        """A round after ``number`` before which there is nothing to do for a bucket."""
        if entry.places is not None:
            return number + 1
        if entry.exact:
            return max(entry.exact_until, number + 1)
        every, age = self.guard.every, number + 1 - entry.since
        tenth = max(1, every // 10)
        again = number + min(every - (number + 1) % every, tenth - age % tenth)
        return min(again, entry.eight_bits_until) if entry.eight_bits else again

    def _check(self, asked: Sequence[Watched]) -> None:
        samples = [entry.take_sample() for entry in asked]
        breaches = []
        for entry, sample, figures in zip(
            asked, samples, figures_of(samples, self._group.connections), strict=True
        ):
            above, before = self._above(entry, figures), entry.suspected
            entry.figures, entry.suspected = figures, above
            if confirmed := above & before:
                entry.suspected = frozenset()
                breaches.append((entry, sample, max(confirmed, key=figures.__getitem__)))
        helped = self._helped_by_eight_bits(breaches)
        for entry, _, figure in breaches:
            self._breach(entry, figure, entry in helped)

    def _above(self, entry: Watched, figures: Mapping[str, float]) -> frozenset[str]:
        return frozenset(name for name in figures if figures[name] > self._threshold(name, entry))

    def _helped_by_eight_bits(
        self, breaches: Sequence[tuple[Watched, Sample, str]]
    ) -> list[Watched]:
        """Those with fewer bits and a first breach, of whose samples 8 bits would lose less.

        All ranks call it alike, and find the same.
        """
        new = [
            (entry, sample, figure)
            for entry, sample, figure in breaches
            if entry.operation.has_eight_bits_beside and not self._record.breaches(entry.names)
        ]
        if not new:
            return []
        connections = self._group.connections
        expected = samples_with(_C.make_codec(EIGHT_BITS), [s for _, s, _ in new], connections)
        return [
            entry
            for (entry, _, figure), found in zip(
                new, figures_of(expected, connections), strict=True
            )
            if figure in found and not self._above(entry, found)
        ]

    def _threshold(self, name: str, entry: Watched) -> float:
        memory = entry.operation.remembered()
        remembers = memory is not None and memory.value(0).numel() > 0
        if name == "relative_error" and remembers:
            return math.inf  # a round's error is sent later: the residual counts
        if name == "residual" and not self._adaptive:
            return math.inf
        return float(getattr(self.guard, name))

    def _breach(self, entry: Watched, figure: str, eight_bits_help: bool) -> None:
        rounds: int | None = 0
        eight_bit_rounds = 0
        if eight_bits_help:
            eight_bit_rounds = self._record.add_eight_bits(entry.names)
        else:
            rounds = self._record.add_breach(entry.names)
        self._recall(entry)
        breach = {
            "round": self._record.rounds + 1,
            "bucket": entry.bucket.name,
            "figure": figure,
            "value": (entry.figures or {})[figure],
            "threshold": self._threshold(figure, entry),
            "exact_rounds": rounds if entry.operation.has_exact_beside else 0,
            "eight_bit_rounds": eight_bit_rounds,
        }
        self._breaches = [*self._breaches, breach][-_MOST_LISTED:]
        text = breach_text(self._module_name, entry.names, breach)
        _log.info("%s", text)
        if self._speaks:
            with contextlib.suppress(Warning):  # no reason to end a step
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _recall(self, entry: Watched) -> None:
        """Take over from the record until when the bucket is exact, or in 8 bits."""
        entry.exact_until = self._record.exact_until(entry.names)
        if entry.operation.has_eight_bits_beside:
            entry.eight_bits_until = self._record.eight_bits_until(entry.names)

    def _switch(self) -> None:
        """Have buckets be exact, or in 8 bits, as the record has it, from this round on."""
        number = self._record.rounds
        for entry in self._watched:
            exact = entry.exact_until > number
            eight_bits = not exact and entry.eight_bits_until > number
            if (exact, eight_bits) != (entry.exact, entry.eight_bits):
                entry.exact, entry.eight_bits = exact, eight_bits
                entry.watch.use(exact=exact, eight_bits=eight_bits)
            # Counted from the record, so that checks come in the same rounds after a checkpoint.
            began = entry.eight_bits_until - (self.guard.exact_rounds if eight_bits else 0)
            entry.since = max(entry.exact_until, began)

    def _ask(self) -> None:
        """Ask for samples in the round that begins: of what is suspected, and of what is due."""
        number, most = self._record.rounds, self.guard.buckets
        due = [entry for entry in self._watched if self._is_due(entry, number + 1)]
        first = number * most % max(1, len(due))
        chosen = (due[first:] + due[:first])[:most]
        for i, entry in enumerate(self._watched):
            if not entry.suspected and entry not in chosen:
                continue
            flat, padding = entry.bucket.backend_tensor, entry.bucket.padding_tensor
            numel = flat.numel() - (0 if padding is None else padding.numel())
            if numel:
                seed = number * len(self._watched) + i
                entry.places = places_of(numel, self.guard.elements, seed)
                if entry.operation.approximates == "mean" and entry.watch.sampled is not None:
                    entry.watch.sampled.request(entry.places.reshape(-1).to(flat.device))

    def _is_due(self, entry: Watched, number: int) -> bool:
        """Whether round ``number`` is one of a check, or of the more frequent ones at the start.

        Where training goes wrong at once the first rounds count most, after exact ones too.
        """
        every, age = self.guard.every, number - entry.since
        starts = age <= every // 2 and age % max(1, every // 10) == 0
        return not entry.exact and (starts or number % every == 0)

    # Findings.

    def stats(self) -> dict[str, Any]:
        """``bagua_stats()["guard"]``; see ``BaguaModule.bagua_stats``."""
        buckets = {
            entry.bucket.name: {
                **(entry.figures or {}),
                "exact": entry.exact,
                "eight_bits": entry.eight_bits,
                "breaches": self._record.breaches(entry.names),
            }
            for entry in self._watched
        }
        return {
            "rounds": self._record.rounds,
            "checks": self._checks,
            "buckets": buckets,
            "nonfinite_share": self._non_finite.share,
            "breaches": [dict(breach) for breach in self._breaches],
        }

    def state_dict(self) -> dict[str, Any]:
        """Counters and exact rounds, equal on all ranks, for a checkpoint between two steps.

        Training that goes on with it has the same buckets exact, or in 8 bits, in the same rounds.
        A sample that was taken in the last round before it is not in it: that check comes ``every``
        rounds later.
        """
        return self._record.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, on every rank, after ``with_bagua``.

        Raises:
            ValueError: the state is of something else; names the entry.
        """
        self._record.load_state_dict(state)
        self._idle_until = 0
        for entry in self._watched:
            self._recall(entry)
            entry.places, entry.suspected = None, frozenset()
            if entry.watch.sampled is not None:
                entry.watch.sampled.take()
        self._non_finite.restart(self._record.rounds)
