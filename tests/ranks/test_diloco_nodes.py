"""Local training of nodes: exact gradients inside a node, outer rounds between nodes."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from oracle import diloco as oracle
from ranks.test_diloco import (
    adamw,
    assert_outer_state_agrees,
    assert_weights_are_the_anchor,
    own_step,
)
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training

RULE = OuterSGD(0.7, 0.5)
INTERVAL = 3
ROUNDS = 3
NODES = (2, 2)


def wrapped(model=None, interval=INTERVAL, **arguments):
    model = training.network() if model is None else model
    optimizer = adamw(model)
    algorithm = DiLoCoAlgorithm(RULE, interval, inner="node", **arguments)
    return model.with_bagua([optimizer], algorithm), optimizer


def node_batches(step):
    """What each node sees, its ranks together."""
    batches = [training.batch(step, rank) for rank in range(dist.get_world_size())]
    of_nodes, first = [], 0
    for size in NODES:
        parts = batches[first : first + size]
        of_nodes.append(tuple(torch.cat(side) for side in zip(*parts, strict=True)))
        first += size
    return of_nodes


@training.with_group
def train_against_the_oracle():
    """By step the digests of all ranks' weights, and what leaders have sent."""
    model = training.network()
    twins = [copy.deepcopy(model) for _ in NODES]
    expected = oracle.Ranks(twins, adamw, RULE.lr, RULE.momentum, RULE.nesterov, INTERVAL)
    model, optimizer = wrapped(model)
    node = dist.get_rank() // 2
    seen, sent = [], []
    for step in range(ROUNDS * INTERVAL):
        own_step(model, optimizer, step)
        expected.step(training.squared_error, node_batches(step))
        training.assert_close(model, expected.models[node], rtol=1e-4, atol=1e-6)
        assert_outer_state_agrees(model)
        seen.append(training.gather(training.bits(model.parameters())))
        traffic = model.bagua_stats()["communicators"]
        sent.append(traffic.get("leaders", {"bytes_sent": 0})["bytes_sent"])
        if (step + 1) % INTERVAL == 0:
            assert_weights_are_the_anchor(model)
    stats = model.bagua_stats()
    assert stats["rounds"] == ROUNDS * INTERVAL
    assert stats["outer"]["rounds"] == ROUNDS
    assert {bucket["name"] for bucket in stats["buckets"]} == {"node0", "0"}
    assert stats["communicators"]["node"]["bytes_sent"] > 0
    return seen, sent


def test_a_node_trains_as_one_rank_and_sends_to_others_in_rounds_only(ranks):
    results = ranks(4, train_against_the_oracle, env=environment_of_nodes(NODES))
    for rank, (seen, sent) in enumerate(results):
        for step, (first, second, third, fourth) in enumerate(seen, start=1):
            assert first == second
            assert third == fourth
            assert (first == third) == (step % INTERVAL == 0)
        changes = [after - before for before, after in zip([0, *sent], sent, strict=False)]
        in_rounds = [rank % 2 == 0 and step % INTERVAL == 0 for step in range(1, len(sent) + 1)]
        assert [change > 0 for change in changes] == in_rounds


@training.with_group
def in_all_forms(arguments):
    """Bits of two trainings: with accumulation in the node, and one that is resumed."""
    model, optimizer = wrapped(interval=4, **arguments)
    assert model.bagua_algorithm.arguments.hierarchical
    rank, digests = dist.get_rank(), []
    for step in range(10):
        optimizer.zero_grad()
        with model.no_sync():
            training.squared_error(model, training.batch(100 + step, rank)).backward()
        training.squared_error(model, training.batch(step, rank)).backward()
        optimizer.step()
        digests.append(training.gather(training.bits(model.parameters())))
        if step == 5:
            state = model.bagua_algorithm.state_dict()
            weights, moments = copy.deepcopy(model.state_dict()), optimizer.state_dict()
            moments = copy.deepcopy(moments)
    again, of_again = wrapped(interval=4, **arguments)
    again.load_state_dict(weights)
    of_again.load_state_dict(moments)
    again.bagua_algorithm.load_state_dict(state)
    for step in range(6, 10):
        of_again.zero_grad()
        with again.no_sync():
            training.squared_error(again, training.batch(100 + step, rank)).backward()
        training.squared_error(again, training.batch(step, rank)).backward()
        of_again.step()
    return digests, training.bits(model.parameters()) == training.bits(again.parameters())


@pytest.mark.parametrize(
    "arguments",
    [
        {"codec": "int4_block"},
        {"fragments": 2, "overlap_steps": 1, "codec": "bit2_block"},
        {"warmup_steps": 2, "outer_device": "cpu"},
    ],
    ids=["int4", "streamed-bit2", "warm-up"],
)
def test_ranks_of_a_node_stay_equal_and_a_resumed_training_has_the_same_bits(ranks, arguments):
    for digests, same in ranks(3, in_all_forms, arguments, env=environment_of_nodes((2, 1))):
        assert all(first == second for first, second, _ in digests)
        assert any(first != third for first, _, third in digests)
        assert same


@training.with_group
def on_one_node():
    model, optimizer = wrapped(interval=2)
    exact = copy.deepcopy(model)
    of_exact = adamw(exact)
    size = dist.get_world_size()
    for step in range(1):
        own_step(model, optimizer, step)
        training.train(exact, of_exact, [training.whole_batch(step, size)])
    training.assert_close(model, exact, rtol=1e-4, atol=1e-6)
    own_step(model, optimizer, 1)
    assert_weights_are_the_anchor(model)
    return model.bagua_algorithm.outer_rounds


def test_one_node_has_exact_gradients_and_an_outer_optimizer(ranks):
    assert ranks(2, on_one_node) == [1, 1]


def test_what_nodes_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"inner='rack' must be"):
        DiLoCoAlgorithm(inner="rack")
    with pytest.raises(ValueError, match=r'inner="node" cannot be elastic'):
        DiLoCoAlgorithm(inner="node", elastic=True)
