"""The class of :mod:`bagua.torch_api.data_parallel`, where Bagua's examples import it from."""

from bagua.torch_api.data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
