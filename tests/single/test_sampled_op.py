"""The op around a watched one: some elements from before and after, in rounds that ask for them."""

import pytest
import torch
from bagua import _C
from support.threads.thread_ranks import run_thread_ranks

RANKS = [1, 2, 3, 4]
NUMEL = 96


def values(rank, round_):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * round_ + rank))


@pytest.mark.parametrize("size", RANKS)
def test_a_sample_has_elements_from_before_and_after_the_op_once(size):
    places = torch.tensor([0, 5, 5, NUMEL - 1])

    def rank(comm):
        op = _C.Sampled(_C.AllReduce(comm, _C.ReduceOp.AVG))
        flat = values(comm.rank, 0)
        op.run(flat)
        assert op.take() is None
        op.request(places)
        assert op.take() is None
        flat = values(comm.rank, 1)
        op.run(flat, step=2, grad_scale=8.0)
        before, after, scale = op.take()
        assert torch.equal(before, values(comm.rank, 1)[places])
        assert torch.equal(after, flat[places])
        assert scale == 8.0
        op.run(flat, step=3)
        assert op.take() is None, "one round per request"

    run_thread_ranks(size, rank)
