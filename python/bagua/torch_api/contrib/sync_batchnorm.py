"""Bagua's address of torch's synchronised batch normalization, which needs a GPU."""

from torch.nn import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
