"""Decentralized SGD on ranks against the oracle, step by step."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.decentralized import (
    DecentralizedAlgorithm,
)
from bagua.torch_api.bucket import BaguaBucket
from oracle import decentralized as oracle
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training

STEPS = 5
LAYOUT = pytest.mark.parametrize("do_flatten", [True, False], ids=["flattened", "copied"])
MODE = pytest.mark.parametrize("mode", ["all", "shift_one"])
RANKS = pytest.mark.parametrize("n", [2, 3, 4], ids=lambda n: f"{n}-ranks")


def train_step(model, optimizer, step):
    training.train(model, optimizer, [training.batch(step, dist.get_rank())])


def oracle_of(model, mode, interval=1, nodes=None):
    twins = [copy.deepcopy(model) for _ in range(dist.get_world_size())]
    return oracle.Ranks(twins, training.sgd, mode, interval, nodes)


def oracle_step(expected, step):
    batches = [training.batch(step, rank) for rank in range(len(expected.models))]
    expected.step(training.squared_error, batches)
    return expected.models[dist.get_rank()]


@training.with_group
def train_against_the_oracle(mode, interval=1, nodes=None, do_flatten=True):
    """Weights after every step, as digests by rank, and what the engine says it did."""
    model = training.network()
    expected = oracle_of(model, mode, interval, nodes)
    optimizer = training.sgd(model)
    chosen = DecentralizedAlgorithm(nodes is not None, mode, interval)
    caught = training.warnings_of(
        lambda: model.with_bagua([optimizer], chosen, do_flatten=do_flatten)
    )
    digests = []
    for step in range(STEPS):
        train_step(model, optimizer, step)
        training.assert_close(model, oracle_step(expected, step))
        digests.append(training.gather(training.bits(model.parameters())))
    return digests, caught, model.bagua_stats(), model.bagua_algorithm.state_dict()


@RANKS
@MODE
@LAYOUT
def test_every_step_is_the_oracles(ranks, mode, n, do_flatten):
    for digests, caught, stats, state in ranks(
        n, train_against_the_oracle, mode, 1, None, do_flatten
    ):
        assert [len(set(step)) for step in digests] == [n] * STEPS, "weights are each rank's own"
        assert caught == []
        assert state == {"iterations": STEPS, "communications": STEPS}
        assert stats["rounds"] == STEPS
        if mode == "shift_one" and n != 3:  # of three ranks one sits out in turn
            weights = sum(p.numel() * 4 for p in training.network().parameters())
            assert stats["total"]["bytes_sent"] == STEPS * weights


@RANKS
@MODE
def test_with_interval_two_every_other_step_communicates_and_the_first_does(ranks, mode, n):
    for _, _, stats, state in ranks(n, train_against_the_oracle, mode, 2):
        assert state == {"iterations": STEPS, "communications": 3}
        assert stats["rounds"] == 3


@MODE
def test_several_buckets_meet_the_same_peer(ranks, mode):
    for _, _, stats, state in ranks(3, train_against_the_oracle, mode, env=training.SMALL_BUCKETS):
        assert state["communications"] == STEPS
        assert len(stats["buckets"]) > 1


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1, 1), (2, 1)], ids=str)
@MODE
def test_nodes_average_exactly_inside_and_weigh_by_their_ranks_between(ranks, mode, sizes):
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    results = ranks(
        len(nodes), train_against_the_oracle, mode, 1, nodes, env=environment_of_nodes(sizes)
    )
    for _, caught, stats, state in results:
        assert caught == []
        assert state["communications"] == STEPS, "non-leaders count, too"
        assert stats["buckets"][0]["ops"][0].startswith("AverageWeights(Hierarchical(")


def test_on_one_node_hierarchical_shift_one_is_the_mean_of_all(ranks):
    for mode in ("shift_one", "all"):
        for _, caught, *_ in ranks(3, train_against_the_oracle, mode, 1, [0, 0, 0]):
            assert caught == []


@training.with_group
def overlap():
    """Whether the average was done before the caller asked for it."""
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], DecentralizedAlgorithm(False, "shift_one"))
    output = model(training.batch(0, dist.get_rank())[0])
    engine = model.bagua_ddp._running.engine
    engine.wait()  # nothing of backward is needed
    operations = model.bagua_algorithm._operations
    counted = [int(operation.communications) for _, operation in operations]
    output.sum().backward()
    return counted


def test_averaging_runs_from_forward_on(ranks):
    assert ranks(2, overlap) == [[1]] * 2


def test_a_peer_weight_that_does_not_fit_its_bucket_is_refused():
    tensor = torch.zeros(3).ensure_bagua_tensor("weight", "module")
    bucket = BaguaBucket([tensor], "b", flatten=True)
    with pytest.raises(ValueError, match=r"bucket 'b': peer_weight is torch.float32 \(4,\), the "):
        bucket.append_decentralized_synchronous_op(torch.zeros(4))
    with pytest.raises(ValueError, match="unknown peer_selection_mode 'ring'"):
        bucket.append_decentralized_synchronous_op(torch.zeros(3), True, "ring")
    op = bucket.append_decentralized_synchronous_op(torch.full((3,), 2.0))
    op.copy_back_peer_weight(bucket)
    assert tensor.tolist() == [2.0, 2.0, 2.0]


def test_arguments_that_make_no_sense_are_refused_by_name():
    with pytest.raises(ValueError, match="unknown peer_selection_mode 'ring'; known: all, sh"):
        DecentralizedAlgorithm(True, "ring")
    with pytest.raises(ValueError, match="communication_interval=0 must be at least 1"):
        DecentralizedAlgorithm(True, "all", 0)
    assert isinstance(Algorithm.init("decentralized"), DecentralizedAlgorithm)
