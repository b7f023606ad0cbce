"""Changes of ranks that were late, of groups and of mailboxes: as long as those of one interval."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bagua._outer.strategies import RankWeights, SinceRound


class LateWeights(RankWeights):
    """Weights of ranks that may miss rounds; ``own`` are those of ranks that miss none.

    A rank trains on when it has missed a round, so that its next change is of several intervals,
    and several times as large as that of the others. The outer momentum would amplify it: it is
    divided by the intervals. What all ranks carry over a round that failed is not divided.

    Args:
        own: how ranks weigh.
        fragments: of the plan.
        interval: steps.
    """

    def __init__(self, own: RankWeights, fragments: int, interval: int) -> None:
        self.by_samples = own.by_samples
        self._own, self._interval = own, interval
        self._steps = SinceRound(fragments)

    def count(self, samples: float) -> None:
        self._own.count(samples)

    def step(self) -> None:
        self._steps.add(1)

    def launch(self, part: int, name: str) -> float | None:
        self._steps.launch(part)
        return self._own.launch(part, name)

    def weight(self, part: int) -> float:
        return self._own.weight(part)

    def intervals(self, part: int) -> float:
        return max(1.0, self._steps.launched(part) / self._interval)

    def settle(self, part: int) -> None:
        self._steps.settle(part)
        self._own.settle(part)

    def fail(self, part: int) -> None:
        self._steps.settle(part, self._interval)

    def forget(self, part: int) -> None:
        self._steps.forget(part)
        self._own.forget(part)

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "trained_steps", self._steps.numbers
        yield from self._own.named_state()
