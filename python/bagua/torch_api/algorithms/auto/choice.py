"""The choice among candidates: predicted steps, measured errors, and the table of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bagua._foresight.candidate import Candidate
from bagua._foresight.cost import predict
from bagua._foresight.profile import Profile
from bagua.torch_api.algorithms.auto.candidates import loss_of

__all__ = ["Limits", "Row", "best_of", "finalists", "rows_of", "table_text"]

#: A candidate that loses more has to be faster by this share: a smaller gain is noise.
WORTH = 0.03
#: Candidates whose predictions are within this share of the best one are worth a trial.
_CLOSE = 0.2
#: Where exact gradients keep a lane busy for more than this share of a step, less communication may
#: be faster although it is predicted to be slower by up to _DOUBT: predictions err by more.
_BUSY, _DOUBT = 0.1, 0.05
#: Candidates that are tried, exact gradients apart.
_MOST_TRIALS = 2


@dataclass(frozen=True)
class Limits:
    """The relative L2 error of a gradient that is allowed.

    Attributes:
        without_feedback: of algorithms that forget what they lose.
        with_feedback: of algorithms whose residual sends it later.
    """

    without_feedback: float
    with_feedback: float


@dataclass(frozen=True)
class Row:
    """A candidate in the table.

    Attributes:
        candidate: algorithm and arguments.
        predicted: seconds of a step; None: the model does not know the candidate.
        bytes_sent: by a rank in a step.
        error: relative L2 error on the real gradients; None: not measured.
        refusal: the reason for which it is not taken; empty: it may be.
        measured: seconds of a step in a trial; None: not tried.
        busy: predicted seconds of a step in which a lane communicates.
    """

    candidate: Candidate
    predicted: float | None
    bytes_sent: int
    error: float | None
    refusal: str = ""
    measured: float | None = None
    busy: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a step: measured, or else predicted."""
        if self.measured is not None:
            return self.measured
        return float("inf") if self.predicted is None else self.predicted

    def values(self) -> dict[str, Any]:
        """The row as plain data, for statistics and logs."""
        return {
            "candidate": self.candidate.label(),
            "predicted_seconds": self.predicted,
            "measured_seconds": self.measured,
            "bytes_sent": self.bytes_sent,
            "error": self.error,
            "refusal": self.refusal,
        }


def rows_of(
    profile: Profile,
    candidates: Sequence[Candidate],
    limits: Limits,
    refused: Mapping[Candidate, str] | None = None,
    *,
    ranks: int | None = None,
) -> list[Row]:
    """A row for each candidate, in their order; the same on ranks with the same profile.

    Args:
        profile: with the errors of what the candidates lose.
        candidates: to choose from.
        limits: of the errors.
        refused: candidates that are not to be taken, with the reason.
        ranks: of the group; None: those of the profile.
    """
    rows = []
    for candidate in candidates:
        loss = loss_of(candidate)
        error = profile.errors.get(loss.key) if loss.key else 0.0
        limit = limits.with_feedback if loss.feedback else limits.without_feedback
        refusal = (refused or {}).get(candidate, "")
        if not refusal and loss.key and error is None:
            refusal = "error not measured"
        if not refusal and error is not None and error > limit:
            refusal = f"error {error:.2g} > {limit:g}"
        seconds, sent, busy = None, 0, 0.0
        try:
            predicted = predict(profile, candidate, ranks=ranks)
            seconds, sent, busy = predicted.step, predicted.bytes_sent, predicted.busy
        except ValueError as problem:
            refusal = refusal or str(problem)
        rows.append(Row(candidate, seconds, sent, error, refusal, busy=busy))
    return rows


def best_of(rows: Sequence[Row]) -> Row:
    """The row to take: of those within 3 % of the fastest the one that loses least, then the first.

    Rows that were tried are compared with each other only: a prediction is no measurement. Where
    everything is refused, what loses least is taken.
    """
    allowed = [row for row in rows if not row.refusal]
    if not allowed:
        return min(rows, key=lambda row: row.error or 0.0)
    compared = [row for row in allowed if row.measured is not None] or allowed
    least = min(row.seconds for row in compared)
    near = [row for row in compared if row.seconds * (1 - WORTH) <= least]
    return min(near, key=lambda row: row.error or 0.0)


def finalists(rows: Sequence[Row]) -> list[Row]:
    """The rows that are worth a trial: the fastest without loss, and faster ones close to the best.

    One row only where the prediction leaves no doubt: nothing that loses is predicted to win, and
    exact gradients communicate little.
    """
    allowed = sorted((row for row in rows if not row.refusal), key=lambda row: row.seconds)
    lossless = next((row for row in allowed if not row.error), None)
    doubtful = lossless is not None and lossless.busy > _BUSY * lossless.seconds
    limit = float("inf") if lossless is None else lossless.seconds * (1 + _DOUBT * doubtful)
    others = [row for row in allowed if row.error and row.seconds < limit]
    others = [row for row in others if row.seconds <= others[0].seconds * (1 + _CLOSE)]
    best = best_of(rows)
    if not others or (best is lossless and not doubtful):
        return [best]
    near = lossless is not None and lossless.seconds <= others[0].seconds * (1 + 2 * _CLOSE)
    found = others[:_MOST_TRIALS]
    return [lossless, *found] if near and lossless is not None else found


def with_trials(rows: Sequence[Row], measured: Mapping[Candidate, float]) -> list[Row]:
    """``rows`` with the measured steps of some candidates."""
    return [replace(row, measured=measured.get(row.candidate, row.measured)) for row in rows]


def table_text(rows: Sequence[Row], chosen: Candidate) -> str:
    """The rows as text, the chosen one marked."""
    lines = [f"{'':2}{'candidate':58} {'predicted':>10} {'measured':>10} {'sent':>10} {'error':>8}"]
    for row in rows:
        mark = "* " if row.candidate == chosen else "  "
        lines.append(
            f"{mark}{row.candidate.label():58} {_milliseconds(row.predicted):>10} "
            f"{_milliseconds(row.measured):>10} {row.bytes_sent / 1e6:>7.2f} MB "
            f"{'' if row.error is None else format(row.error, '.2g'):>8}  {row.refusal}".rstrip()
        )
    return "\n".join(lines)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f} ms"
