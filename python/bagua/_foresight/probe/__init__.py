"""Measures the figures of a profile."""
