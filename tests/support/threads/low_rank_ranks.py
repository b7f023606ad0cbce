"""Helpers for tests of low-rank means: a rank with its op and memory, and gradients."""

import torch
from bagua import _C

#: Two of one shape, a gap before, between and behind: (offset, rows, columns, rank).
MATRICES = [(3, 20, 30, 2), (603, 20, 30, 2), (1210, 7, 50, 4), (1560, 50, 7, 1)]
NUMEL = 1915


class Rank:
    """One rank's op, its memory and its communicator."""

    def __init__(
        self, comm, numel=NUMEL, matrices=MATRICES, dtype=torch.float32, device="cpu", **options
    ):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        queries = sum(columns * rank for _, _, columns, rank in matrices)
        options = {"warm_start": True, "error_feedback": True, "seed": 0} | options
        errors = numel if options["error_feedback"] else 0
        shares = [torch.zeros(size, dtype=wide, device=device) for size in (errors, queries)]
        self.memory = _C.RoundMemory(
            [*shares, torch.zeros(1, dtype=torch.int64)], _C.RoundOutcome()
        )
        self.comm = _C.CountingCommunicator(comm)
        self.op = _C.LowRank(
            self.comm, _C.Scratch(), numel, matrices, memory=self.memory, **options
        )

    def run(self, flat, step, grad_scale=1.0):
        flat = flat.clone()
        self.op.run(flat, step=step, grad_scale=grad_scale, bucket="b")
        return flat

    def remembered(self):
        return [self.memory.value(i).clone() for i in range(3)]


def gradients(n, steps, numel=NUMEL, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(numel, generator=generator).to(dtype) for _ in range(steps)] for _ in range(n)
    ]
