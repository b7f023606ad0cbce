"""Tests of ranks with GPUs of their own: nodes, torch's DDP beside ours, contexts, and ranks
that are lost, whose body tests/deep/test_random_faults.py has on CPU.
"""

import copy
import os
import subprocess

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from deep.test_random_faults import soak
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from support.async_training import weights_of
from support.devices import each_place, gpus, ranks_on
from support.error_feedback import wide_network
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
NODES = {"2 and 2": (2, 2), "3 and 1": (3, 1)}
# Exact: sums in another order. 8 bits: a level is 1/255 of a range of gradients; see
# tests/cuda/test_algorithms.py.
ALGORITHMS = {"gradient_allreduce": 1e-5, "bytegrad": 2e-2}


def beside_ddp(algorithm):
    """Weights after the same steps under `algorithm` and under torch's DDP, with the ranks' own
    devices for both, and before them."""
    ours = wide_network()
    theirs = copy.deepcopy(ours)
    start = weights_of(ours).cpu()
    optimizer, others = training.sgd(ours, lr=0.05), training.sgd(theirs, lr=0.05)
    ours = ours.with_bagua([optimizer], algorithm)
    on_gpu = training.device().type == "cuda" and os.environ["BAGUA_COMM"] == "nccl"
    group = dist.new_group(backend="nccl") if on_gpu else None
    wrapped = DistributedDataParallel(theirs, process_group=group)
    for step in range(STEPS):
        data = [training.batch(step, dist.get_rank())]
        training.train(ours, optimizer, data)
        training.assert_ranks_agree(ours)
        training.train(wrapped, others, data)
    return weights_of(ours).cpu(), weights_of(theirs).cpu(), start


@training.with_group
def between_nodes(name, hierarchical):
    return beside_ddp(algorithm(name, hierarchical))


def algorithm(name, hierarchical):
    made = {"gradient_allreduce": GradientAllReduceAlgorithm, "bytegrad": ByteGradAlgorithm}[name]
    return made(hierarchical=hierarchical)


def assert_near_ddp(results, tolerance):
    for ours, theirs, start in results:
        assert (ours - theirs).abs().max() <= tolerance
        # Or else a tolerance proves nothing.
        assert (ours - start).abs().max() > 5 * tolerance


@each_place
@pytest.mark.parametrize("hierarchical", [True, "sharded"], ids=["leaders", "sharded"])
@pytest.mark.parametrize("sizes", NODES.values(), ids=NODES.keys())
@pytest.mark.parametrize("name", ALGORITHMS)
def test_twenty_steps_between_nodes_are_those_of_ddp(ranks, name, sizes, hierarchical, place):
    n = ranks_on(place, fewest=sum(sizes), most=sum(sizes))
    env = [node | training.on_device(place) for node in environment_of_nodes(sizes)]
    results = ranks(n, between_nodes, name, hierarchical, env=env)
    assert_near_ddp(results, ALGORITHMS[name])


def contexts():
    """How many processes have a context on a GPU, counted once for each GPU."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader"]
    return len(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split())


@training.with_group
def count_contexts():
    beside_ddp(algorithm("bytegrad", hierarchical=False))
    dist.barrier()
    found = contexts()
    dist.barrier()
    return found


@pytest.mark.needs_cuda
def test_a_rank_has_a_context_on_its_own_gpu_only(ranks):
    n = ranks_on("nccl")
    torch.zeros(1, device="cuda")  # this process has one, and nvidia-smi should know
    before = contexts()
    if before == 0:
        pytest.skip("nvidia-smi lists no processes here, as in some containers")
    env = training.on_device("nccl")
    assert ranks(n, count_contexts, env=env, fresh=True, timeout=120) == [before + n] * n


@pytest.mark.needs_cuda
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["cuda", "nccl"])
def test_lost_ranks_are_named_and_leave_no_hang(monkeypatch, place):
    """Killed, stopped, late and bad ranks, in trainings of 2 to 4."""
    ranks_on(place, fewest=4)
    for name, value in training.on_device(place).items():
        monkeypatch.setenv(name, value)
    at_once = max(1, gpus() // 4) if place == "nccl" else 2
    printed = soak("--faults", 24, "--seed", 9000, "--at-once", at_once)
    assert "24 cases: hang 0, silent divergence 0, unnamed error 0, crash 0" in printed
