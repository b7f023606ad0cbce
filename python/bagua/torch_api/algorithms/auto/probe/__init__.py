"""Measurements of ``AutoAlgorithm``: links, times of steps, and errors of codecs."""
