"""NcclCommunicator over a fake NCCL on host memory: conformance, groups of calls, splits."""

import itertools

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from support.threads import communicator_conformance as conformance

RANKS = [1, 2, 3, 4, 7]
SUM = _C.ReduceOp.SUM


def all_reduce(comm):
    comm.all_reduce(torch.ones(3), SUM)


@pytest.mark.parametrize("n", RANKS, ids=lambda n: f"{n}-ranks")
def test_nccl_ranks_conform(nccl, n):
    assert nccl.run(n, conformance.run_all) == [(rank, n) for rank in range(n)]


def test_calls_that_nccl_has_in_progress_for_long_are_waited_for(nccl):
    nccl.set_polls(250)
    nccl.run(3, lambda comm: [check(comm, torch.float32, 31) for check in conformance.CHECKS])


def test_a_group_of_one_never_touches_nccl(nccl):
    comm = _C.NcclCommunicator(nccl.library, dist.HashStore(), 0, 1, torch.device("cpu"), 1.0)
    conformance.run_all(comm)
    assert comm.split([0]).size == 1
    assert nccl.calls_of("ncclCommInitRankConfig") == nccl.calls_of("ncclAllReduce") == 0


def test_the_average_is_ncclavg_and_an_exchange_is_one_group(nccl):
    def run(comm):
        comm.all_reduce(torch.ones(3), _C.ReduceOp.AVG)
        comm.all_to_all(torch.ones(4), torch.ones(4))

    nccl.run(2, run)
    names = ["ncclAllReduce", "ncclGroupEnd", "ncclSend", "ncclRecv"]
    assert [nccl.calls_of(name) for name in names] == [2, 2, 4, 4]


def test_the_average_of_16_bits_is_as_unbiased_as_ddps_for_any_number_of_ranks(nccl):
    for size, dtype in itertools.product((3, 5, 6, 7), (torch.bfloat16, torch.float16)):
        values = [torch.rand(2000, generator=torch.Generator().manual_seed(r)) for r in range(size)]

        def run(comm, values=values, dtype=dtype):
            mean = values[comm.rank].to(dtype)
            comm.all_reduce(mean, _C.ReduceOp.AVG)
            return mean

        exact = torch.stack([value.to(dtype).double() for value in values]).mean(0)
        for mean in nccl.run(size, run):
            assert abs((mean.double() / exact).mean().item() - 1) < 2e-4, (size, dtype)


def test_messages_of_a_rank_to_itself_arrive_and_are_no_traffic(nccl):
    def run(comm):
        counting = _C.CountingCommunicator(comm)
        received = torch.zeros(2)
        counting.exchange([(torch.ones(2), comm.rank)], [(received, comm.rank)])
        return received.tolist(), counting.traffic()["messages_sent"]

    assert nccl.run(2, run) == [([1.0, 1.0], 0)] * 2


def test_dtypes_that_nccl_cannot_add_are_moved_and_not_reduced(nccl):
    def run(comm):
        shorts = torch.full((3,), 300 + comm.rank, dtype=torch.int16)
        gathered = torch.zeros(6, dtype=torch.int16)
        comm.all_gather(shorts, gathered)
        with pytest.raises(_C.BaguaError, match="NCCL does not reduce int16"):
            comm.all_reduce(shorts, SUM)
        all_reduce(comm)
        return gathered.tolist()

    assert nccl.run(2, run) == [[300] * 3 + [301] * 3] * 2


def test_tensors_of_another_device_are_refused(nccl):
    def run(comm):
        with pytest.raises(_C.BaguaError, match=r"all_reduce: the tensor is on meta, .* of cpu"):
            comm.all_reduce(torch.ones(3, device="meta"), SUM)

    nccl.run(2, run)


@pytest.mark.parametrize("polls", [0, 20], ids=["at-once", "later"])
def test_split_makes_groups_that_work_beside_their_parent(nccl, polls):
    nccl.set_polls(polls)

    def run(comm):
        node = [0, 1, 2] if comm.rank < 3 else [4, 3]
        inner = comm.split(node)
        leaders = comm.split([3, 0])
        ones = torch.full((2,), float(comm.rank))
        inner.all_reduce(ones, SUM)
        if leaders is not None:
            leaders.broadcast(ones, 0)
        all_reduce(comm)
        inner.broadcast(ones, node.index(min(node)))
        return inner.rank, inner.size, leaders and leaders.rank, ones[0].item()

    assert nccl.run(5, run) == [
        (0, 3, 1, 7.0),
        (1, 3, None, 7.0),
        (2, 3, None, 7.0),
        (1, 2, 0, 7.0),
        (0, 2, None, 7.0),
    ]


def test_a_split_of_one_rank_is_answered_by_all_and_needs_no_nccl(nccl):
    def run(comm):
        alone = comm.split([comm.rank])
        alone.all_reduce(torch.ones(1), SUM)
        all_reduce(comm)
        return alone.size

    assert nccl.run(3, run) == [1, 1, 1]


def test_a_failed_parent_splits_no_more_and_its_children_go_on(nccl):
    def run(comm):
        child = comm.split([0, 1])
        comm.abort("enough")
        with pytest.raises(_C.BaguaError, match="split refused: aborted: enough"):
            comm.split([0, 1])
        all_reduce(child)

    nccl.run(2, run)


def test_a_child_that_nccl_never_makes_times_out_and_ends_its_parent(nccl):
    nccl.keep_children()

    def run(comm):
        with pytest.raises(_C.BaguaError, match="split failed: NCCL did not make the new group"):
            comm.split([0, 1])
        with pytest.raises(_C.BaguaError, match="all_reduce refused: an earlier call failed"):
            all_reduce(comm)

    nccl.run(2, run, timeout=0.2)
