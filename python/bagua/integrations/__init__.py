"""Compressed gradients in training libraries that construct ``DistributedDataParallel`` themselves.

Import the module of the library: ``bagua.integrations.accelerate`` or
``bagua.integrations.transformers``.
"""
