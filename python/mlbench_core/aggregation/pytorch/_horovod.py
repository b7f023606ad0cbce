"""AllReduceAggregation through Horovod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from bagua import _C
from bagua._core.group.connections import Connections

from mlbench_core.aggregation.pytorch._all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch._horovod_start import import_horovod, start_horovod
from mlbench_core.aggregation.pytorch._horovod_transport import (
    HorovodCommunicator,
    HorovodTransport,
)
from mlbench_core.aggregation.pytorch.aggregation import Denominator, Kind

__all__ = ["AllReduceAggregationHVD"]


class AllReduceAggregationHVD(AllReduceAggregation):
    """:class:`AllReduceAggregation` with Horovod for communication; the results are the same.

    By layer each tensor is reduced by one ``hvd.allreduce_``, by model the flat tensors of all
    dtypes by one ``hvd.grouped_allreduce_`` (where there is one dtype, its flat tensor by
    ``hvd.allreduce_``). Horovod adds or takes the extremes; averages are divided here. bfloat16
    travels as float32, bytes and booleans as int32, because Horovod refuses them.

    It needs Horovod and no process group of torch or bagua, but works next to one. Constructing it
    starts Horovod where the script has not: under ``horovodrun``, or under ``torchrun`` without any
    other launcher. Horovod shuts down when the process ends.

    Args:
        world_size: number of ranks.
        divide_before: divide before the sum, so that it does not overflow in half precision.
        use_cuda: hand CUDA tensors to Horovod as they are, which must be built for that; otherwise
            they go through CPU memory.

    Raises:
        ImportError: Horovod is missing; the message says how to get it.
        ValueError: ``world_size`` is not Horovod's, or Horovod cannot start.
    """

    def __init__(
        self, world_size: int, divide_before: bool = False, use_cuda: bool = False
    ) -> None:
        super().__init__(world_size, divide_before, use_cuda)
        horovod = import_horovod()
        start_horovod(horovod)
        connections = HorovodTransport(horovod)
        self._check_group(connections)
        self._joined = connections

    def _check_group(self, connections: Connections) -> None:
        if connections.size != self.world_size:
            raise ValueError(
                f"{type(self).__name__} was made with world_size={self.world_size}, but Horovod "
                f"has {connections.size} process(es): pass the number that was launched and, under "
                "torchrun, leave hvd.init() to this class"
            )

    def _aggregate(
        self,
        named: list[tuple[str, torch.Tensor]],
        by_layer: bool,
        op: str,
        denom: Denominator,
        *,
        kind: Kind,
    ) -> None:
        if by_layer:
            super()._aggregate(named, by_layer, op, denom, kind=kind)
            return
        self._staging.run_together(
            [tensor for _, tensor in named],
            self._device_for,
            lambda batch: self._agg_together(batch, op, denom),
        )

    def _reduce_together(self, batch: Sequence[torch.Tensor], op: _C.ReduceOp) -> None:
        for device in sorted({data.device for data in batch}, key=str):
            here = [data for data in batch if data.device == device]
            if len(here) == 1:
                self._reduce(here[0], op)
            else:
                communicator = self._communicator("data", device)
                cast("HorovodCommunicator", communicator).all_reduce_together(here, op)
