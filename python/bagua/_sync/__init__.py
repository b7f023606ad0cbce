"""Synchronizers: the engine or averaging lane that a wrapped module runs on."""
