"""Decentralized SGD on ranks against the oracle, step by step."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from bagua.torch_api.bucket import BaguaBucket
from oracle import decentralized as oracle
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from support.cases import over

STEPS = 5
MODES = ("all", "shift_one")


@training.with_group
def train_against_the_oracle(mode, interval, nodes, do_flatten=True):
    """Weights after every step, as digests by rank, and what the engine says it did."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = training.network()
    twins = [copy.deepcopy(model) for _ in range(size)]
    expected = oracle.Ranks(twins, training.sgd, mode, interval, nodes)
    optimizer = training.sgd(model)
    chosen = DecentralizedAlgorithm(nodes is not None, mode, interval)
    caught = training.warnings_of(
        lambda: model.with_bagua([optimizer], chosen, do_flatten=do_flatten)
    )
    digests = []
    for step in range(STEPS):
        batches = [training.batch(step, other) for other in range(size)]
        training.train(model, optimizer, [batches[rank]])
        expected.step(training.squared_error, batches)
        training.assert_close(model, expected.models[rank])
        digests.append(training.gather(training.bits(model.parameters())))
    return digests, caught, model.bagua_stats(), model.bagua_algorithm.state_dict()


@over(
    mode=MODES,
    n=(2, 3, 4),
    interval=(1, 2),
    layout=[(True, {}), (False, {}), (True, training.SMALL_BUCKETS)],
)
def test_every_step_is_the_oracles(ranks, mode, n, interval, layout):
    do_flatten, env = layout
    rounds = STEPS if interval == 1 else 3  # the first step communicates
    arguments = mode, interval, None, do_flatten
    for digests, caught, stats, state in ranks(n, train_against_the_oracle, *arguments, env=env):
        assert interval == 2 or [len(set(step)) for step in digests] == [n] * STEPS
        assert caught == []
        assert state == {"iterations": STEPS, "communications": rounds}
        assert stats["rounds"] == rounds
        assert (len(stats["buckets"]) > 1) == bool(env)
        if mode == "shift_one" and n != 3:  # of three ranks one sits out in turn
            weights = sum(p.numel() * 4 for p in training.network().parameters())
            assert stats["total"]["bytes_sent"] == rounds * weights


@over(mode=MODES, sizes=[(2, 2), (3, 1), (1, 1, 1), (2, 1), (3,)])
def test_nodes_average_exactly_inside_and_weigh_by_their_ranks_between(ranks, mode, sizes):
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    env = environment_of_nodes(sizes)
    for _, caught, stats, state in ranks(
        len(nodes), train_against_the_oracle, mode, 1, nodes, env=env
    ):
        assert caught == []
        assert state["communications"] == STEPS, "non-leaders count, too"
        if len(sizes) > 1:
            assert stats["buckets"][0]["ops"][0].startswith("AverageWeights(Hierarchical(")


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
