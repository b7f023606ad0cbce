"""NoLoCo: an outer step with one peer, without a collective."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops.gossip import Gossip
from bagua._sync.outer.outer_sgd import OuterSGD
from bagua._sync.outer.weights.fragment import Fragment
from bagua._sync.outer.weights.pair_fragment import Meetings, PairFragment
from bagua._sync.wrapper import Bucket
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.algorithms.diloco.arguments import OuterArguments
from bagua.torch_api.algorithms.diloco.diloco import DiLoCoAlgorithm
from bagua.torch_api.algorithms.diloco.implementation import DiLoCoAlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["NoLoCoAlgorithm", "NoLoCoAlgorithmImpl"]


class NoLoCoAlgorithm(Algorithm):
    """DiLoCo whose ranks meet one peer in each round (NoLoCo, 2025), one drawn at random.

    Ranks hold anchors of their own, which the momentum and the meetings keep together. A round
    costs one message of the weights' size and waits for one rank. With an odd number of ranks one
    steps by itself.

    Args:
        outer_optimizer: heavy ball by default. Anchors drift apart without bound where ``lr`` is at
            least 2 (1 - momentum²), between more than two ranks: a warning says so.
        interval: steps from one round to the next, as :class:`DiLoCoAlgorithm` counts them.
        seed: of the pairs.
        warmup_steps: iterations with exact all-reduce of gradients before the first local step.
        average_buffers: floating buffers get the pair's mean; False: they stay each rank's own.
        elastic: as in :class:`DiLoCoAlgorithm`. A rank that comes back begins with the anchor of
            another one.
        min_ranks: as in :class:`DiLoCoAlgorithm`.

    Raises:
        TypeError: ``outer_optimizer`` is no :class:`OuterSGD`.
        ValueError: an argument out of its range; from ``with_bagua``: no optimizer.
    """

    def __init__(
        self,
        outer_optimizer: OuterSGD | None = None,
        interval: int = 50,
        *,
        seed: int = 0,
        warmup_steps: int = 0,
        average_buffers: bool = True,
        elastic: bool = False,
        min_ranks: int = 2,
    ) -> None:
        if outer_optimizer is None:
            outer_optimizer = OuterSGD(0.7, 0.5, nesterov=False)
        self._arguments = DiLoCoAlgorithm(
            outer_optimizer,
            interval,
            warmup_steps=warmup_steps,
            average_buffers=average_buffers,
            elastic=elastic,
            min_ranks=min_ranks,
        )
        self.outer_optimizer = outer_optimizer
        self.interval = interval
        self.seed = seed
        self.warmup_steps = warmup_steps
        self.average_buffers = average_buffers
        self.elastic = elastic
        self.min_ranks = min_ranks

    def describe(self) -> str:
        return f"{super().describe()} {self.outer_optimizer}"

    def reify(self, process_group: BaguaProcessGroup) -> NoLoCoAlgorithmImpl:
        rule = self.outer_optimizer
        bound = 2 * (1 - rule.momentum**2)
        if process_group.size > 2 and rule.lr >= bound:
            warnings.warn(
                f"NoLoCoAlgorithm: the anchors of {process_group.size} ranks drift apart without "
                f"bound with lr={rule.lr} and momentum={rule.momentum}: take lr below "
                f"2 (1 - momentum²), here {bound:.2f}.",
                stacklevel=2,
            )
        return NoLoCoAlgorithmImpl(process_group, self._arguments, self.seed)


class NoLoCoAlgorithmImpl(DiLoCoAlgorithmImpl):
    """Implementation of :class:`NoLoCoAlgorithm`: ``model.bagua_algorithm``.

    Anchors differ between ranks: so do the weights inside ``anchor()`` and after ``sync()``.
    """

    pairs = True
    owner = "NoLoCoAlgorithm"

    def __init__(
        self, process_group: BaguaProcessGroup, arguments: OuterArguments, seed: int
    ) -> None:
        super().__init__(process_group, arguments)
        self._seed = seed
        self._drawn = torch.zeros((), dtype=torch.int64, device="cpu")

    def append_mean(self, bucket: BaguaBucket) -> None:
        bucket.append_operation(Gossip(self._drawn, self.process_group))

    def make_fragment(self, part: int, buckets: Sequence[Bucket]) -> Fragment:
        return PairFragment(part, buckets, Meetings(self._seed, self.communications, self._drawn))
