"""torch's DistributedDataParallel, with Bagua's algorithms: one import changes."""

from bagua.torch_api.data_parallel import functional
from bagua.torch_api.data_parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel", "functional"]
