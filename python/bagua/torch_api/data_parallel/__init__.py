"""torch's DistributedDataParallel, with Bagua's algorithms: one import changes."""

from bagua.torch_api.data_parallel import functional
from bagua.torch_api.data_parallel.distributed import (
    DistributedDataParallel,
    DistributedDataParallel_V1_9_0,
)

__all__ = ["DistributedDataParallel", "DistributedDataParallel_V1_9_0", "functional"]
