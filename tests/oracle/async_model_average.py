"""Asynchronous averaging of all ranks in one process, from the formula and nothing else.

    w_r <- mean over ranks of their snapshots + (w_r - snapshot_r)

Training may change w_r at any moment between the snapshot and this.
"""

import torch


class Ranks:
    """`weights[rank]`, as the calls leave them."""

    def __init__(self, weights):
        self.weights = [w.double().clone() for w in weights]
        self.snapshots = [None] * len(weights)

    def train(self, rank, update):
        self.weights[rank] += update

    def snapshot(self, rank):
        self.snapshots[rank] = self.weights[rank].clone()

    def apply(self, rank):
        mean = torch.stack(self.snapshots).mean(0)
        self.weights[rank] = mean + (self.weights[rank] - self.snapshots[rank])
