"""Ranks of one host use shared memory, all of them or none, and say why not."""

import resource

import pytest
import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from support import training
from support.processes.pool import run_on_network
from support.programs.benchmark_programs import load
from support.threads.shared_ranks import is_shared

network = load("network")

SHM = {"BAGUA_COMM": "shm"}
GLOO = {"BAGUA_COMM": "gloo"}


def two_backwards(algorithm):
    """The wrapped module, and its gradients in one tensor."""
    model = training.wide_network()
    model.with_bagua([], algorithm)
    for step in range(2):
        training.squared_error(model, training.batch(step, dist.get_rank())).backward()
    training.assert_ranks_agree(model)
    return model, torch.cat([p.grad.flatten() for p in model.parameters()])


@training.with_group
def traffic_of_steps(algorithm):
    model, gradients = two_backwards(algorithm)
    stats = model.bagua_stats()
    tables = [stats["total"], stats["control"], *stats["communicators"].values()]
    return gradients, [(table["shm_bytes"], table["bytes_sent"]) for table in tables]


@pytest.mark.parametrize(
    "algorithm",
    [GradientAllReduceAlgorithm(), ByteGradAlgorithm(hierarchical=False)],
    ids=["exact", "bytegrad"],
)
@pytest.mark.parametrize("n", [2, 4])
def test_results_and_bytes_are_those_of_gloo(ranks, n, algorithm):
    over_memory = ranks(n, traffic_of_steps, algorithm, env=SHM)
    over_gloo = ranks(n, traffic_of_steps, algorithm, env=GLOO)
    for (mine, shared), (theirs, sent) in zip(over_memory, over_gloo, strict=True):
        assert [bytes_sent for _, bytes_sent in shared] == [bytes_sent for _, bytes_sent in sent]
        assert all(shm_bytes == bytes_sent for shm_bytes, bytes_sent in shared)
        assert all(shm_bytes == 0 for shm_bytes, _ in sent)
        assert shared[0][0] > 0
        if n == 2 or isinstance(algorithm, ByteGradAlgorithm):  # sums of more have another order
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs)


def two_nodes(env):
    return [
        {"GROUP_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"} | env
        for rank in range(4)
    ]


@training.with_group
def error_of_wrap():
    model = training.network()
    return training.error_of(lambda: model.with_bagua([], GradientAllReduceAlgorithm()))


def test_shared_memory_between_hosts_is_an_error_that_says_why(ranks):
    for error in ranks(4, error_of_wrap, env=two_nodes(SHM)):
        assert "BAGUA_COMM=shm: ranks [0, 1, 2, 3] of the group cannot share memory" in error
        assert "ranks 0 and 2 are on nodes 0 and 1" in error
        assert "Unset BAGUA_COMM" in error


@training.with_group
def shares_of_purposes():
    """(bytes through memory, all bytes) that were sent, by purpose."""
    model = training.network()
    model.with_bagua([], GradientAllReduceAlgorithm(hierarchical=True))
    training.squared_error(model, training.batch(0, dist.get_rank())).backward()
    training.assert_ranks_agree(model)
    purposes = model.bagua_stats()["communicators"]
    return {name: (t["shm_bytes"], t["bytes_sent"]) for name, t in purposes.items()}


def test_only_the_ranks_of_a_node_share_memory(ranks):
    for rank, purposes in enumerate(ranks(4, shares_of_purposes, env=two_nodes({}))):
        shm_bytes, bytes_sent = purposes["node"]
        assert shm_bytes == bytes_sent > 0
        assert ("leaders" in purposes) == (rank in (0, 2))
        if "leaders" in purposes:
            shm_bytes, bytes_sent = purposes["leaders"]
            assert shm_bytes == 0 < bytes_sent


def why_not():
    """The records of bagua's log, after two wraps."""
    wrapped = []
    records = training.log_of(
        lambda: wrapped.extend(traffic_of_steps(GradientAllReduceAlgorithm())[1] for _ in range(2))
    )
    lines = [text for _, text in records if "gloo instead of shared memory" in text]
    return lines, [shm_bytes for tables in wrapped for shm_bytes, _ in tables]


def limit_files_of_rank_one():
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    return why_not()


def test_ranks_that_cannot_share_memory_use_gloo_and_one_line_per_group_says_why(ranks):
    first, *others = ranks(3, limit_files_of_rank_one, fresh=True)
    assert len(first[0]) == 2  # two groups were made
    assert (
        "ranks [0, 1, 2] use gloo instead of shared memory: rank 1: shared memory of" in first[0][0]
    )
    for _, shm_bytes in [first, *others]:
        assert set(shm_bytes) == {0}
    assert [lines for lines, _ in others] == [[], []]


def test_a_rank_that_does_not_want_it_decides_for_all(ranks):
    env = [{}, GLOO, {}]
    for _, tables in ranks(3, traffic_of_steps, GradientAllReduceAlgorithm(), env=env):
        assert all(shm_bytes == 0 for shm_bytes, _ in tables)


@training.with_group
def places_of_buckets(algorithm):
    """Whether each bucket lies in memory that others can map, and the gradients of two steps."""
    model, gradients = two_backwards(algorithm)
    buckets = [bucket.backend_tensor for bucket in model.bagua_buckets]
    return [is_shared(bucket) for bucket in buckets], gradients


def test_buckets_of_exact_gradients_lie_in_shared_memory(ranks):
    in_place = ranks(2, places_of_buckets, GradientAllReduceAlgorithm())
    over_gloo = ranks(2, places_of_buckets, GradientAllReduceAlgorithm(), env=GLOO)
    for (places, mine), (others, theirs) in zip(in_place, over_gloo, strict=True):
        assert all(places)
        assert not any(others)
        assert torch.equal(mine, theirs)
    for places, _ in ranks(2, places_of_buckets, ByteGradAlgorithm(hierarchical=False)):
        assert not any(places)


@training.with_group
def bytes_of_hook(algorithm):
    """(through memory, all) that a hook of torch's class has sent."""
    ddp = torch.nn.parallel.DistributedDataParallel(training.network())
    handle = comm_hooks.register(ddp, algorithm)
    training.squared_error(ddp, training.batch(0, dist.get_rank())).backward()
    total = handle.stats()["total"]
    return total["shm_bytes"], total["bytes_sent"]


@pytest.mark.parametrize(
    ("algorithm", "env", "shares"),
    [
        ("gradient_allreduce", {}, False),
        ("gradient_allreduce", {"BAGUA_COMM": "auto"}, True),
        ("bytegrad", {}, True),
    ],
    ids=["exact", "exact, on request", "bytegrad"],
)
def test_the_exact_hook_shares_memory_on_request_only(ranks, algorithm, env, shares):
    algorithm = ByteGradAlgorithm(hierarchical=False) if algorithm == "bytegrad" else algorithm
    for shm_bytes, bytes_sent in ranks(2, bytes_of_hook, algorithm, env=env):
        assert shm_bytes == (bytes_sent if shares else 0)
        assert bytes_sent > 0


NETWORK_SCRIPT = """
import torch, bagua.torch_api as bagua
from bagua.torch_api import communication
bagua.init_process_group()
total = torch.ones(1000)
bagua.allreduce_inplace(total)
traffic = communication.get_default_group().get_global_communicator().traffic()
print(total[0].item(), traffic["shm_bytes"], traffic["bytes_sent"])
"""


@pytest.mark.skipif(
    network.why_unavailable() is not None, reason=f"no namespaces: {network.why_unavailable()}"
)
def test_network_namespaces_are_hosts_whatever_the_launcher_says():
    with network.Network(2) as link:
        for end in run_on_network(link, NETWORK_SCRIPT):
            assert end.returncode == 0, end.stderr
            total, shm_bytes, bytes_sent = end.stdout.split()
            assert (total, shm_bytes) == ("2.0", "0")
            assert int(bytes_sent) >= 4000
