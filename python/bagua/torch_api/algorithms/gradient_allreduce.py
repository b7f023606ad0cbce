"""Exact gradients: the mean (or sum) over all ranks, as torch's DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass

from bagua._core.group.process_group import BaguaProcessGroup, Hierarchy
from bagua._ops.operations import Operation
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, Traits
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["GradientAllReduce", "GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]


@dataclass(eq=False)
class GradientAllReduceAlgorithm(Algorithm):
    """Exact all-reduce of gradients.

    Args:
        hierarchical: all-reduce inside each node, then between one leader per node.
            With ``"sharded"`` every rank of a node communicates between nodes, with a share of
            each bucket: for nodes with several network cards.
        average: mean over the ranks; False gives the sum.

    Example::

        model = bagua.wrap(model, [optimizer], GradientAllReduceAlgorithm())
    """

    hierarchical: Hierarchy = False
    average: bool = True

    def reify(self, process_group: BaguaProcessGroup) -> GradientAllReduceAlgorithmImpl:
        return GradientAllReduceAlgorithmImpl(process_group, self.hierarchical, self.average)


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """Implementation of :class:`GradientAllReduceAlgorithm`."""

    traits = Traits(
        ranks_agree=True,
        reads_grad_scale=False,
        takes_uneven_inputs=True,
        takes_unfrozen=True,
        shares_parameters=True,
        complex_parameters=True,
        sparse_gradients=True,
    )

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: Hierarchy = False,
        average: bool = True,
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.average = average

    def operations(self, bucket: BaguaBucket) -> list[Operation]:
        operation = bucket.sum_or_mean(
            hierarchical=self.hierarchical, average=self.average, group=self.process_group
        )
        return [operation]


#: The spelling of the documentation's example.
GradientAllReduce = GradientAllReduceAlgorithm
