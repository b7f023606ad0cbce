"""Islands that are worlds of torch of their own. Lost ones: tests/deep/test_island_jobs.py."""

import os
from datetime import timedelta
from unittest import mock

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bagua.torch_api.algorithms import (
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua.torch_api.checkpoint import PerRank
from bagua.torch_api.communication import connect_islands
from ranks.test_elastic_rounds import fail_round
from ranks.test_islands import INTERVAL, by_fsdp, loss_of, network, sgd, shard_of
from support import faults, sharded, training
from support.cases import over
from support.processes.pool import new_store, torchrun_environment
from torch.distributed.device_mesh import init_device_mesh


def on_islands(ranks, sizes, function, *args):
    """Results of `function(address, island, *args)` on islands of that many ranks."""
    stores = [new_store() for _ in sizes]
    of_all = new_store()
    variables = [
        torchrun_environment(rank, size, store.port) | {"ISLAND": str(island)}
        for island, (size, store) in enumerate(zip(sizes, stores, strict=True))
        for rank in range(size)
    ]
    address = f"127.0.0.1:{of_all.port}"
    return ranks(sum(sizes), function, address, *args, env=variables, init=False)


def train(model, group, source):
    optimizer = sgd(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(interval=INTERVAL, codec="int4_block"), group)
    for step in range(3 * INTERVAL):
        optimizer.zero_grad()
        loss_of(model, step, source).backward()
        optimizer.step()
    sent = model.bagua_stats()["total"]["bytes_sent"]
    return training.bits(map(shard_of, model.parameters())), sent


@sharded.with_torch_group
def train_in_one_world():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    torch.manual_seed(0)
    return train(by_fsdp(network(), mesh["shard"]), mesh["island"], dist.get_rank())


@training.with_group
def train_in_two_worlds(address):
    island = int(os.environ["ISLAND"])
    torch.manual_seed(island)  # the weights of the first island are given to the other
    model = by_fsdp(network(), init_device_mesh("cpu", (2,)))
    group = connect_islands(address, island, 2)
    assert (group.ranks, group.rank, group.size) == ([0, 1], island, 2)
    return train(model, group, 2 * island + dist.get_rank())


def test_islands_of_own_worlds_train_and_send_as_those_of_one(ranks):
    together = ranks(4, train_in_one_world)
    apart = on_islands(ranks, (2, 2), train_in_two_worlds)
    for (bits, sent), (expected, of_one) in zip(apart, together, strict=True):
        assert bits == expected
        assert abs(sent - of_one) < 0.1 * of_one  # that says who is there is not counted alike
    assert apart[0][0] == apart[2][0] != apart[1][0] == apart[3][0]


ALGORITHMS = {
    "diloco": lambda: DiLoCoAlgorithm(interval=INTERVAL, overlap_steps=1, codec="int4_block"),
    "decentralized": lambda: DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    "low precision": LowPrecisionDecentralizedAlgorithm,
}


@training.with_group
def save_and_load(address, folder, name):
    """Bits after steps behind a checkpoint, and after those of another start from it."""
    island = int(os.environ["ISLAND"])

    def wrapped():
        model = by_fsdp(network(), init_device_mesh("cpu", (2,)))
        optimizer = sgd(model)
        model.with_bagua([optimizer], ALGORITHMS[name](), connect_islands(address, island, 2))
        return optimizer, model, {"training": PerRank(model), "algorithm": model.bagua_algorithm}

    def steps(model, optimizer, numbers):
        for step in numbers:
            optimizer.zero_grad()
            loss_of(model, step, 2 * island + dist.get_rank()).backward()
            optimizer.step()
        return training.bits(map(shard_of, model.parameters()))

    torch.manual_seed(0)
    optimizer, model, state = wrapped()
    steps(model, optimizer, range(2 * INTERVAL))
    dcp.save(state, checkpoint_id=f"{folder}/{island}")
    if name == "low precision":  # keeps weights of the neighbours' shards
        foreign = model.bagua_algorithm.state_dict() | {"shards": "4"}
        error = training.error_of(lambda: model.bagua_algorithm.load_state_dict(foreign))
        assert "saved with other shards" in error
    bits = steps(model, optimizer, range(2 * INTERVAL, 4 * INTERVAL))
    bagua.destroy_process_group()
    bagua.init_process_group()
    optimizer, model, state = wrapped()
    dcp.load(state, checkpoint_id=f"{folder}/{island}")
    return bits, steps(model, optimizer, range(2 * INTERVAL, 4 * INTERVAL))


@over(name=ALGORITHMS)
def test_islands_go_on_to_the_bit_from_folders_of_their_own(ranks, tmp_path, name):
    for bits, again in on_islands(ranks, (2, 2), save_and_load, str(tmp_path / name), name):
        assert bits == again


@training.with_group
def one_rank_fails(address, method):
    """Digests of the weights after each round, where the third rank fails in the second round: at
    its launch ("confirm"), or when its group has the result ("confirmed")."""
    island = int(os.environ["ISLAND"])
    torch.manual_seed(0)
    model = by_fsdp(network(), init_device_mesh("cpu", (2,)))
    optimizer = sgd(model)
    algorithm = DiLoCoAlgorithm(interval=INTERVAL, codec="int4_block", elastic=True)
    model.with_bagua([optimizer], algorithm, connect_islands(address, island, 2))
    restore = fail_round(2, 0, method) if island == 1 else lambda: None
    step, rounds = 0, []
    try:
        while model.bagua_algorithm.outer_rounds < 4:
            optimizer.zero_grad()
            loss_of(model, step, 2 * island + dist.get_rank()).backward()
            before = model.bagua_algorithm.outer_rounds
            optimizer.step()
            step += 1
            if model.bagua_algorithm.outer_rounds > before:
                rounds.append(training.bits(map(shard_of, model.parameters())))
    finally:
        restore()
    return rounds, step


@pytest.mark.filterwarnings("ignore:module")
@over(method=["confirm", "confirmed"])
def test_an_island_fails_as_a_whole_where_one_of_its_ranks_does(ranks, method):
    results = on_islands(ranks, (2, 2), one_rank_fails, method)
    for (rounds, steps), (others, _) in zip(results[:2], results[2:], strict=True):
        if method == "confirmed":  # the others have made the round, which this one takes over
            rounds = [rounds[0], *rounds[2:]]
        assert rounds == others
        assert steps == 5 * INTERVAL


@training.with_group
def connect(address):
    """What is said against it."""
    try:
        connect_islands(address, int(os.environ["ISLAND"]), 2)
    except (bagua.BaguaError, ValueError) as error:
        return str(error)
    return ""


def test_islands_of_different_sizes_are_refused(ranks):
    errors = on_islands(ranks, (2, 1), connect)
    assert any(errors)
    for error, own, other in zip(errors, (2, 2, 1), (1, 1, 2), strict=True):
        assert not error or f"has {own} ranks, others have {other}" in error


def connect_beside_a_stranger(address):
    """Somebody has written what islands write, with escapes and too long."""
    ask = dist.PrefixStore.compare_set

    def answer(store, key, *texts):
        return b"\x1b[31m" * 10**6 if key == "ranks" else ask(store, key, *texts)

    with mock.patch.object(dist.PrefixStore, "compare_set", answer):
        return connect(address)


def test_a_strangers_number_of_ranks_is_refused_with_its_key(ranks):
    for error in on_islands(ranks, (1, 1), connect_beside_a_stranger):
        assert "under 'ranks', which is not a number" in error
        assert "\x1b" not in error
        assert len(error) < 500


#: The store's address, or None for one that is there, the island, and a part of what is said.
WRONG = [
    (None, 0, "BaguaTimeoutError: island 0 of 2: island 1 did not come within 1 s."),
    (None, 0, "calls connect_islands() too"),
    ("127.0.0.1:1", 0, "BaguaError: there is no store at 127.0.0.1:1: "),
    ("here", 0, "store='here' is not an address, such as '10.0.0.1:29500'"),
    ("127.0.0.1:1", -1, "island=-1 of islands=2 is none"),
]


@training.with_group
def connect_wrongly(address):
    for wrong, island, words in WRONG:
        arguments = (wrong or address, island, 2, timedelta(seconds=1))
        assert words in faults.error_of(connect_islands, *arguments)


@pytest.mark.timeout(60)
def test_a_store_or_an_island_that_cannot_be_or_does_not_come_is_refused_with_the_remedy(ranks):
    on_islands(ranks, (1,), connect_wrongly)
    with pytest.raises(RuntimeError, match=r"call bagua\.init_process_group\(\)"):
        connect_islands("127.0.0.1:1", 0, 2)
