"""Optimizers that update all parameters at once."""
