"""Aggregation of gradients and weights of torch modules."""
