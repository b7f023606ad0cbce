"""Compressed gradients in torch's own ``DistributedDataParallel``: a communication hook in C++."""

from bagua.comm_hooks._handle import Handle
from bagua.comm_hooks._register import register

__all__ = ["Handle", "register"]
