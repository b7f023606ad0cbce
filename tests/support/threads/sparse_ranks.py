"""Helpers for tests of sparse ops: ops with memories, rounds of them, and the oracle's."""

import torch
from bagua import _C
from oracle import sparse as oracle
from support.threads.op_ranks import inputs, run_rounds

SIZES = [0, 1, 31, 4096, 5003]
ROUNDS = 4


def k_of(numel, ratio=0.03):
    return min(numel, max(1, round(numel * ratio)))


def memory_of(numel, dtype, outcome=None, remembers=True, device="cpu"):
    error = torch.zeros(numel if remembers else 0, dtype=oracle.wide(dtype), device=device)
    return _C.RoundMemory([error, torch.zeros(1, dtype=torch.int64)], outcome or _C.RoundOutcome())


def make(comm, kind, numel, k, memory):
    return {
        "top-k": lambda: _C.Sparse(comm, _C.Scratch(), numel, k, memory),
        "exact": lambda: _C.ErrorFeedbackAllReduce(comm, _C.Scratch(), numel, memory),
    }[kind]()


def sparse_rounds(n, k, rounds, scale=1.0, remembers=True):
    """By rank: the bucket and the error after each round. `rounds`: by round, what ranks bring."""
    numel, dtype = rounds[0][0].numel(), rounds[0][0].dtype

    def op_of(comm):
        memory = memory_of(numel, dtype, remembers=remembers)
        return make(comm, "top-k", numel, k, memory), memory, (0,)

    return run_rounds(n, op_of, rounds, scale)


def expected_rounds(k, rounds, scale=1.0, remembers=True):
    n, numel, dtype = len(rounds[0]), rounds[0][0].numel(), rounds[0][0].dtype
    errors = [torch.zeros(numel, dtype=oracle.wide(dtype))] * n
    for brought in rounds:
        result, errors = oracle.top_k(brought, errors, k, scale)
        if not remembers:
            errors = [torch.zeros_like(error) for error in errors]
        yield result, errors


def bring(n, numel, dtype, rounds=ROUNDS):
    return [inputs(n, numel, dtype, salt=17 * step) for step in range(rounds)]


def alone():
    return _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
