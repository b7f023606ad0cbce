"""Aggregation of gradients and weights."""
