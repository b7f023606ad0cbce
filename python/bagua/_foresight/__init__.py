"""Predicts the seconds of a training step for an algorithm, from measured figures."""
