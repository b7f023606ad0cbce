"""The course of a choice: measuring, trying what is close, and watching the links afterwards."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bagua._core.group.connections import Connections
from bagua._core.state.bagua_tensor import bagua_getter_closure, is_sparse, record_of
from bagua._foresight.candidate import Candidate
from bagua._foresight.profile import Profile
from bagua._foresight.profile_file import values_of
from bagua._sync.bucketing import split_by_bucket_size
from bagua.torch_api.algorithms.auto.candidates import codecs_of, loss_of
from bagua.torch_api.algorithms.auto.choice import (
    WORTH,
    Limits,
    Row,
    best_of,
    finalists,
    rows_of,
    table_text,
    with_trials,
)
from bagua.torch_api.algorithms.auto.probe.errors import typical_errors
from bagua.torch_api.algorithms.auto.probe.links import measure_links
from bagua.torch_api.algorithms.auto.probe.measuring import Group, Measuring
from bagua.torch_api.algorithms.auto.sizes import other_size
from bagua.torch_api.algorithms.auto.trials import Trials
from bagua.torch_api.algorithms.auto.watching import Watching, changed, renewed
from bagua.torch_api.algorithms.base import WrappedModule

__all__ = ["Course", "Settings"]

_log = logging.getLogger("bagua")
#: One bucket while steps are measured: communication begins when all gradients are there, so that
#: it takes nothing from the time of the backward.
_ONE_BUCKET = 2**62


@dataclass(frozen=True)
class Settings:
    """Arguments of ``AutoAlgorithm``, see there."""

    limits: Limits
    most_steps: int
    most_seconds: float
    replan: bool


class Course:
    """Stages of the choice for one wrapped module; decisions are equal on all ranks.

    Attributes:
        chosen: the candidate; None while it is being looked for.
        profile: what was measured, or given.
    """

    def __init__(
        self,
        settings: Settings,
        connections: Connections,
        device: torch.device,
        module_name: str,
        candidates: Sequence[Candidate],
        refused: Mapping[Candidate, str],
    ) -> None:
        self.chosen: Candidate | None = None
        self.profile: Profile | None = None
        self._settings = settings
        self._connections = connections
        self._device = device
        self._module_name = module_name
        self._candidates = candidates
        self._refused = refused
        self._groups: list[Group] = []
        self._rows: list[Row] = []
        self._why = ""
        self._replans = 0
        self._spent_ns = 0, 0  # blocked by communication, on the wire
        self._measuring: Measuring | None = None
        self._trials: Trials | None = None
        self._steps_left = 0  # for trials
        self._smaller_tried = False
        self._watching: Watching | None = None

    @property
    def open(self) -> bool:
        """Whether the choice may change."""
        return self.chosen is None or self._watching is not None

    def begin(self, profile: Profile | None, numel: int) -> Candidate | None:
        """Choose at once where there is nothing to measure; None: steps have to be measured.

        Args:
            profile: given by the user.
            numel: elements of all gradients.
        """
        possible = [one for one in self._candidates if one not in self._refused]
        if self._connections.size == 1 or numel == 0:
            lossless = [one for one in possible if not loss_of(one).key]
            why = "one rank" if self._connections.size == 1 else "there are no gradients"
            return self._choose((lossless or possible or self._candidates)[0], why)
        if len(possible) <= 1:
            return self._choose((possible or self._candidates)[0], "the only candidate")
        if profile is not None:
            known = typical_errors(codecs_of(self._candidates)) | dict(profile.errors)
            self.profile = replace(profile, errors=known)
            self._predict()
            return self._choose_best()
        return None

    def arrange(
        self, tensors: Sequence[Sequence[torch.Tensor]], at_work: Candidate
    ) -> Sequence[Sequence[torch.Tensor]]:
        """Tensors grouped as the buckets of ``at_work`` shall be; given as they are by default."""
        groups = [_group_of(group) for group in tensors]
        self._groups = [group for group in groups if group.numel > 0]
        measures = self.chosen is None and self._trials is None
        size = _ONE_BUCKET if measures else at_work.bucket_bytes
        if size is None:
            return tensors
        flat = [tensor for group in tensors for tensor in group]
        limits = (size,) if measures else size
        return split_by_bucket_size(flat, _gradient, limits, is_sparse)

    def forward_begins(self, bagua_ddp: WrappedModule) -> None:
        """Called before the forward of every step."""
        if self.chosen is not None:
            return
        if self._trials is not None:
            self._trials.forward_begins()
            return
        if self._measuring is None:
            named = bagua_ddp.bagua_build_params()
            settings = self._settings
            self._measuring = Measuring(
                self._connections,
                named,
                self._groups,
                self._candidates,
                settings.most_steps,
                settings.most_seconds,
            )
        self._measuring.forward_begins()

    def round_ended(self, bagua_ddp: WrappedModule) -> Candidate | None:
        """Called after every round: the candidate to communicate by from now on, or None."""
        if self._measuring is not None:
            stats = bagua_ddp.stats()
            now = int(stats["exposed_ns"]), int(stats["total"]["wire_ns"])
            exposed, wire = (new - old for new, old in zip(now, self._spent_ns, strict=True))
            self._spent_ns = now
            profile = self._measuring.round_ended(exposed / 1e9, wire / 1e9)
            if profile is None:
                return None
            self._steps_left = self._settings.most_steps - self._measuring.rounds
            self._measuring, self.profile = None, profile
            return self._decide()
        if self._trials is not None:
            return self._try(self._trials)
        if self._watching is not None:
            total = bagua_ddp.stats()["total"] if self._watching.needs_stats() else None
            if self._watching.round_ended(total):
                return self._plan_again(self._watching)
        return None

    def close(self) -> None:
        """Remove hooks. Idempotent."""
        if self._measuring is not None:
            self._measuring.close()

    def restore(self, candidate: Candidate, profile: Profile | None) -> None:
        """Take the choice of a checkpoint."""
        self.close()
        self._measuring, self._watching, self._trials = None, None, None
        self.profile = profile
        if profile is not None:
            self._predict(candidate)
        self._choose(candidate, "restored from a checkpoint")

    def values(self) -> dict[str, Any]:
        """The choice as plain data: see ``BaguaModule.bagua_stats``."""
        trying = "measuring" if self._trials is None else "trying"
        return {
            "state": trying if self.chosen is None else "chosen",
            "chosen": None if self.chosen is None else self.chosen.label(),
            "why": self._why,
            "table": [row.values() for row in self._rows],
            "replans": self._replans,
            "profile": None if self.profile is None else values_of(self.profile),
        }

    # Deciding.

    def _rows_of(self, candidates: Sequence[Candidate]) -> list[Row]:
        assert self.profile is not None
        return rows_of(
            self.profile,
            candidates,
            self._settings.limits,
            self._refused,
            ranks=self._connections.size,
        )

    def _predict(self, at_work: Candidate | None = None) -> None:
        """Rows of all candidates; ``at_work`` keeps the size of its buckets, which was tried."""
        self._rows = self._rows_of(self._candidates)
        if at_work is not None and at_work not in self._candidates:
            default = replace(at_work, bucket_bytes=None)
            self._rows = [
                replace(row, candidate=at_work) if row.candidate == default else row
                for row in self._rows
            ]

    def _decide(self) -> Candidate:
        self._predict()
        # The likely winner comes last, so that no buckets are built for it again; residuals of the
        # others are lost with them.
        close = sorted(finalists(self._rows), key=lambda row: (bool(row.error), -row.seconds))
        if len(close) > 1 and self._begin_trials(close):
            return close[0].candidate
        return self._try_smaller() or self._choose_best()

    def _begin_trials(self, rows: Sequence[Row]) -> bool:
        """Whether there are enough steps left for them."""
        if self._steps_left < 2 * len(rows):
            return False
        self._trials = Trials(self._connections, rows, self._steps_left)
        return True

    def _try(self, trials: Trials) -> Candidate | None:
        if not trials.round_ended():
            return None
        if not trials.done:
            return trials.at_work
        self._trials = None
        self._steps_left -= trials.rounds
        self._rows = with_trials(self._rows, trials.measured)
        last, best = trials.at_work, self._try_smaller() or self._choose_best()
        return None if best == last else best

    def _try_smaller(self) -> Candidate | None:
        """Begin a trial of the best row with smaller buckets, where that is worth it."""
        assert self.profile is not None
        best = best_of(self._rows)
        smaller = None if self._smaller_tried else other_size(self.profile, best)
        self._smaller_tried = True
        rows = [] if smaller is None else self._rows_of([smaller])
        if not rows or rows[0].refusal:
            return None
        trials = [replace(best, candidate=rows[0].candidate), *[best] * (best.measured is None)]
        if not self._begin_trials(trials):
            return None
        self._rows += rows
        return trials[0].candidate

    def _choose_best(self) -> Candidate:
        best = best_of(self._rows)
        exact = min(
            (row for row in self._rows if not loss_of(row.candidate).key),
            key=lambda row: row.seconds,
            default=None,
        )
        kind = "predicted" if best.measured is None else "measured"
        why = f"{best.seconds * 1e3:.2f} ms a step {kind}"
        if not loss_of(best.candidate).key:
            why = f"exact gradients, {why}: nothing that is allowed is faster by {WORTH:.0%}"
        elif exact is not None:
            why += f", {exact.seconds * 1e3:.2f} ms with exact gradients"
        return self._choose(best.candidate, why)

    def _choose(self, candidate: Candidate, why: str) -> Candidate:
        self.chosen, self._why = candidate, why
        if self._connections.rank == 0:
            _log.info(
                "module '%s': auto takes %s: %s%s%s",
                self._module_name,
                candidate.label(),
                why,
                "\n" if self._rows else "",
                table_text(self._rows, candidate),
            )
        watches = self._settings.replan and self.profile is not None and self._watching is None
        if watches:
            row = next((row for row in self._rows if row.candidate == candidate), None)
            seconds = float("inf") if row is None else row.seconds
            self._watching = Watching(self._connections, seconds)
        return candidate

    def _plan_again(self, watching: Watching) -> Candidate | None:
        assert self.profile is not None
        links = measure_links(self._connections, self._device)
        if not changed(self.profile, links):
            watching.begin_anew(false_alarm=True)
            return None
        watching.begin_anew(false_alarm=False)
        self.profile = renewed(self.profile, links)
        self._replans += 1
        last = self.chosen
        self._predict(last)
        best = self._choose_best()
        return None if best == last else best


def _group_of(tensors: Sequence[torch.Tensor]) -> Group:
    # A gradient of sparse layout is not there yet: it counts as its parameter.
    effective = [tensor if is_sparse(tensor) else _gradient(tensor) for tensor in tensors]
    return Group(
        tuple(record_of(tensor).name for tensor in tensors),
        sum(one.numel() for one in effective),
        sum(one.numel() * one.element_size() for one in effective),
        tuple(_as_matrix(one) for one in effective),
    )


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    gradient: torch.Tensor = bagua_getter_closure(tensor)
    return gradient


def _as_matrix(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.dim() < 2 or tensor.numel() == 0:
        return tensor.numel(), 1
    return tensor.shape[0], tensor.numel() // tensor.shape[0]
