"""Optimizers that aggregate."""
