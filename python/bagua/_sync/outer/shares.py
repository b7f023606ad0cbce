"""The share of each rank in the mean of an outer round."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._sync.outer.weights.fragment import Fragment

__all__ = ["Shares", "Weight"]

#: "ranks": all alike; "steps": by the steps since the last round; "samples": by the square of the
#: samples that a rank has counted, over its steps: quantity times rate.
Weight = Literal["ranks", "steps", "samples"]

_FORGET = 0.02  # share of the newest norm in the moving mean and variance
_WARM_UP = 120  # rounds before a norm is called unusual
_UNUSUAL = 3.0  # standard deviations
_LEFT_OUT = -1  # in place of a number of samples


class Shares:
    """Weighs pseudo-gradients before they are averaged, as all ranks agree on.

    A rank of weight w scales its pseudo-gradients by w P / sum of w, so that the mean of P ranks is
    the weighted one. With equal weights that is 1.

    With ``guard`` a rank has weight 0 if its norm is not finite, or lies above the mean of its
    former ones by more than three standard deviations (EDiT, Cheng et al. 2024). Mean and variance
    are exponential moving ones, of the rounds that it took part in; in the first 120 of these only
    norms that are not finite count as unusual.

    Args:
        connections: of the ranks.
        name: of the module, for warnings.
        fragments: their number.
        weight: of a rank.
        guard: leave out ranks with an unusual norm.
        uneven: ranks make different numbers of steps.

    Attributes:
        left_out: the ranks that the last round was made without.
    """

    def __init__(
        self,
        connections: Connections,
        name: str,
        fragments: int,
        weight: Weight,
        guard: bool,
        uneven: bool = False,
    ) -> None:
        self._connections = connections
        self._name = name
        self._weight = weight
        self._guard = guard
        self._samples = torch.zeros(fragments, dtype=torch.int64, device="cpu")
        # By fragment: rounds that count, mean and variance of the norms.
        self._norms = torch.zeros(fragments, 3, dtype=torch.float64, device="cpu")
        # Likewise of the last round: whether this rank, all ranks were left out; samples weighed.
        self._ends = torch.zeros(fragments, 3, dtype=torch.int64, device="cpu")
        # By fragment: steps since its last round, and those of the round under way.
        self._steps = torch.zeros(fragments, 2, dtype=torch.int64, device="cpu")
        self._counts_steps = weight == "steps" or (weight == "samples" and uneven)
        self.left_out: list[int] = []

    def count_step(self) -> None:
        """This rank has made one more."""
        self._steps[:, 0] += 1

    def count(self, samples: int) -> None:
        """This rank has trained on so many more."""
        self._samples += samples

    def weigh(self, fragment: Fragment) -> None:
        """Scale what ``fragment`` has launched. All ranks call it.

        Raises:
            BaguaError: another rank failed; no rank has counted samples.
        """
        part, size, rank = fragment.part, self._connections.size, self._connections.rank
        steps = [1] * size
        if self._counts_steps:
            self._steps[part, 1] = self._steps[part, 0]
            made = int(self._steps[part, 0])
            steps = self._connections.gather_numbers("weighing an outer round", made)
        own = int(self._samples[part]) if self._weight == "samples" else 1
        self._ends[part, 2] = self._samples[part]
        if self._guard and self._unusual(part, fragment.own_norm):
            own = _LEFT_OUT
        numbers = self._connections.gather_numbers("weighing an outer round", own)
        self.left_out = [other for other in range(size) if numbers[other] == _LEFT_OUT]
        self._ends[part, 0] = int(own == _LEFT_OUT)
        self._ends[part, 1] = int(len(self.left_out) == size)
        if self.left_out:
            self._warn()
        weights = [
            _weight_of(self._weight, number, count)
            for number, count in zip(numbers, steps, strict=True)
        ]
        if len(self.left_out) == size:
            fragment.scale(math.nan)  # nothing changes, residuals neither
        elif not sum(weights):
            raise _C.BaguaError(
                f"module '{self._name}': weight=\"samples\", but no rank has counted any since the "
                "last round: call model.bagua_algorithm.count_samples() in each step"
            )
        else:
            fragment.scale(float(weights[rank] * size / sum(weights)))

    def settle(self, part: int) -> None:
        """The last round of a fragment has been made: its samples are in the anchor."""
        self._samples[part] -= self._ends[part, 2]
        self._ends[part, 2] = 0
        self._steps[part, 0] -= self._steps[part, 1]
        self._steps[part, 1] = 0

    def take_over(self, before: Shares) -> None:
        """Take this rank's state from the plan before."""
        for (_, mine), (_, theirs) in zip(self.named_state(), before.named_state(), strict=True):
            mine.copy_(theirs)

    def here_left_out(self, part: int) -> bool:
        """Whether the last round of a fragment was made without this rank."""
        return bool(self._ends[part, 0])

    def all_left_out(self, part: int) -> bool:
        """Whether the last round of a fragment was made without any rank."""
        return bool(self._ends[part, 1])

    def _unusual(self, part: int, norm: float) -> bool:
        """Note the norm unless it is unusual."""
        rounds, mean, variance = self._norms[part].tolist()
        if not math.isfinite(norm):
            return True
        if rounds >= _WARM_UP and norm - mean > _UNUSUAL * math.sqrt(variance):
            return True
        off = norm - mean if rounds else 0.0
        mean = mean + _FORGET * off if rounds else norm
        variance = (1 - _FORGET) * (variance + _FORGET * off * off)
        self._norms[part] = torch.tensor([rounds + 1, mean, variance], dtype=torch.float64)
        return False

    def _warn(self) -> None:
        ranks = ", ".join(map(str, self.left_out))
        warnings.warn(
            f"module '{self._name}': rank(s) {ranks} are left out of an outer round, since the "
            "norm of what they have learnt is unusual, or not finite. They start again from the "
            "anchor.",
            stacklevel=2,
        )

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of this rank's; writes into the tensors take effect."""
        yield "samples", self._samples
        yield "norms", self._norms
        yield "left_out", self._ends
        if self._counts_steps:
            yield "steps", self._steps


def _weight_of(kind: Weight, number: int, steps: int) -> Fraction:
    """The weight of a rank; equal ones give a factor of exactly 1."""
    if number == _LEFT_OUT or steps == 0:
        return Fraction(0)
    return Fraction(steps) if kind == "steps" else Fraction(number**2, steps)
