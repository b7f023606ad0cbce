"""Eager collectives."""
