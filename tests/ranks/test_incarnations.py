"""A job that starts again over the same store reads nothing that dead processes have written."""

import datetime
import os
import time

import bagua.torch_api as bagua
import pytest
import torch.distributed as dist
from bagua._core.group import job
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import faults
from torch import nn

RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1"}


def job_store():
    """The store that torchrun's agent serves."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False)


def train(rounds=2):
    model, optimizer = faults.wrapped()
    for _ in range(rounds):
        faults.step(model, optimizer)
    return model.bagua_stats()["rounds"]


def start_and_train():
    bagua.init_process_group(timeout=datetime.timedelta(seconds=20))
    result = train()
    bagua.destroy_process_group()
    return result


def test_agents_that_count_restarts_differently_start_together(ranks):
    counts = [{"TORCHELASTIC_RESTART_COUNT": str(n)} for n in (1, 0, 3)]
    assert ranks(3, start_and_train, env=counts, init=False) == [2, 2, 2]


def start_over_a_dead_job():
    """As if the processes had been killed in the middle of starting, and then while training."""
    store, rank, size = job_store(), os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    if rank == "0":
        for other in range(8):
            store.set(f"bagua/hello/{other}", f"dead{other}")
            store.set(f"bagua/welcome/dead{other}", "stale")
            for group in ("stale/0", "stale/torch/default_pg"):
                store.set(f"bagua/{group}/cpu//cpu//{other}", "127.0.0.1:1")
            store.set(f"bagua/stale/came/{other}", "")
    store.add("met", 1)
    while store.add("met", 0) < size:
        time.sleep(0.001)
    bagua.init_process_group(timeout=datetime.timedelta(seconds=20))
    name = job.this_job().incarnation
    result = train()
    bagua.destroy_process_group()
    return result, name


def test_keys_of_dead_ranks_are_not_read(ranks):
    first, *others = ranks(3, start_over_a_dead_job, init=False, env=RESTARTED)
    assert first[0] == 2
    assert first[1] != "stale"
    assert others == [first, first]


def start_again_with_another_size():
    """Two processes of the store's first start; then three, of which one is new."""
    store, rank = job_store(), int(os.environ["RANK"])
    if rank < 2:
        os.environ["WORLD_SIZE"] = "2"
        bagua.init_process_group(timeout=datetime.timedelta(seconds=20))
        train()
        bagua.destroy_process_group()
        os.environ["WORLD_SIZE"] = "3"
    store.add("through", 1)
    while store.add("through", 0) < 3:
        time.sleep(0.001)
    return start_and_train()


def test_a_rank_that_is_new_joins_those_that_were_there_before(ranks):
    assert ranks(3, start_again_with_another_size, init=False) == [2, 2, 2]


def keys_after_starts():
    store, counts = job_store(), []
    for starts in (3, 3):
        for _ in range(starts):
            start_and_train()
        store.add("met", 1)
        while store.add("met", 0) % int(os.environ["WORLD_SIZE"]):
            time.sleep(0.001)
        counts.append(store.num_keys())
    return counts


def test_starts_leave_no_more_keys_when_there_are_many(ranks):
    for few, many in ranks(2, keys_after_starts, init=False):
        assert many <= few


def start_without(absent):
    if int(os.environ["RANK"]) == absent:
        return ""
    return faults.error_of(bagua.init_process_group, timeout=datetime.timedelta(seconds=1.5))


def test_a_rank_that_does_not_come_is_named_on_all_others(ranks):
    first, absent, third = ranks(3, start_without, 1, init=False)
    assert absent == ""
    for rank, error in ((0, first), (2, third)):
        expected = f"BaguaTimeoutError: rank {rank} of 3: rank 1 did not come within 1.5 s"
        assert error.startswith(expected)


def test_without_rank_zero_the_others_say_so(ranks):
    for rank, error in enumerate(ranks(3, start_without, 0, init=False)[1:], 1):
        assert error.startswith(f"BaguaTimeoutError: rank {rank} of 3: rank 0 did not answer")


def start_with_a_group_of_ones_own(imports_first):
    if not imports_first:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
        dist.init_process_group("gloo")
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        model = nn.Linear(2, 2)
        errors = [
            faults.error_of(bagua.init_process_group),
            faults.error_of(DistributedDataParallel, model),
        ]
        assert not bagua.communication.is_initialized()
        dist.barrier()  # gloo's connect fails where a rank that has returned from it ends
        dist.destroy_process_group()
    else:
        errors = [
            faults.error_of(dist.init_process_group, "gloo"),
            faults.error_of(dist.init_process_group, "gloo", init_method="env://"),
        ]
        assert not dist.is_initialized()
    return errors, start_and_train()


@pytest.mark.parametrize("imports_first", [True, False], ids=["after-import", "before-import"])
def test_a_group_by_env_after_a_restart_is_refused_with_the_remedy(ranks, imports_first):
    results = ranks(2, start_with_a_group_of_ones_own, imports_first, init=False, env=RESTARTED)
    for errors, rounds in results:
        for error in errors:
            assert error.startswith("RuntimeError: torchrun has restarted this job")
            assert "Call bagua.init_process_group() instead" in error
        assert rounds == 2


def start_where_nothing_is_stale(how):
    """A restart whose group is not made from the agent's keys."""
    if how == "store-of-ones-own":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("mine", job_store()), rank=rank, world_size=size
        )
    else:  # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: rank 0 serves a store that starts with it
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = os.environ["OTHER"]
        dist.init_process_group("gloo")
    result = start_and_train()
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("how", ["store-of-ones-own", "store-of-rank-0"])
def test_a_group_over_fresh_keys_is_used_as_it_is(ranks, how):
    env = RESTARTED | {"OTHER": str(bagua.env.find_free_network_port())}
    assert ranks(2, start_where_nothing_is_stale, how, init=False, env=env) == [2, 2]
