"""Compressed gradients, and weights, in torch's FSDP2 (``torch.distributed.fsdp.fully_shard``)."""

from bagua.fsdp._compress import compress
from bagua.fsdp._handle import Handle

__all__ = ["Handle", "compress"]
