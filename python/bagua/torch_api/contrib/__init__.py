"""Bagua's contributions: names for what torch has today."""

from bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer

__all__ = ["fuse_optimizer"]
