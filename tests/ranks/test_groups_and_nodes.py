"""Sub-groups, and nodes that are emulated with the launcher's variables."""

import bagua.torch_api as bagua
import pytest
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
    QAdamOptimizer,
)
from support import training

NODES = pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1, 1), (2, 1)], ids=str)


def environment_of_nodes(sizes):
    """Variables that torchrun sets on machines with `sizes` ranks each, by rank."""
    return [
        {"GROUP_RANK": str(node), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}
        for node, size in enumerate(sizes)
        for local in range(size)
    ]


@training.with_group
def gradients_over_nodes(algorithm, average):
    model = training.network()
    data = training.batch(0, dist.get_rank())
    local = training.local_gradients(model, training.squared_error, data)
    if algorithm == "exact":
        chosen = GradientAllReduceAlgorithm(hierarchical=True, average=average)
    else:
        chosen = ByteGradAlgorithm(hierarchical=True, average=average, codec=algorithm)
    caught = training.warnings_of(lambda: model.with_bagua([], chosen))
    training.squared_error(model, data).backward()
    training.assert_ranks_agree(model)
    worst = 0.0
    for name, p in model.named_parameters():
        expected = training.mean_over_ranks(local[name])
        expected = expected if average else expected * dist.get_world_size()
        largest = max(max(training.gather(local[name].abs().max().item())), 1e-9)
        worst = max(worst, (p.grad - expected).abs().max().item() / largest)
    ops = {op for bucket in model.bagua_stats()["buckets"] for op in bucket["ops"]}
    return worst, caught, sorted(ops)


@NODES
@pytest.mark.parametrize("average", [True, False], ids=["mean", "sum"])
def test_the_exact_hierarchical_result_weighs_every_rank_the_same(ranks, sizes, average):
    results = ranks(
        sum(sizes), gradients_over_nodes, "exact", average, env=environment_of_nodes(sizes)
    )
    for worst, caught, ops in results:
        assert worst < 1e-6 * (1 if average else sum(sizes))
        assert caught == []
        assert len(ops) == 1
        assert ops[0].startswith(f"Hierarchical({len(sizes)} nodes")
    assert f"ranks {len(sizes)}" in results[0][2][0]


def test_on_one_node_hierarchical_averages_are_exact(ranks):
    for worst, caught, _ in ranks(3, gradients_over_nodes, "minmax_uint8", True):
        assert worst < 1e-6
        assert caught == []


@training.with_group
def defaults():
    """By name, whether the default is hierarchical, what warns, and one asked for."""
    found, said = {}, []
    gossip = ["decentralized", "low_precision_decentralized"]
    for name in ["bytegrad", "qadam", "power_sgd", "sparse", *gossip]:
        model = training.network()
        optimizer = QAdamOptimizer(model.parameters()) if name == "qadam" else training.sgd(model)
        more = {"q_adam_optimizer": optimizer} if name == "qadam" else {}
        chosen = Algorithm.init(name, **more)
        said += training.warnings_of(lambda m=model, o=optimizer, c=chosen: m.with_bagua([o], c))
        found[name] = model.bagua_algorithm.hierarchical
    group = model.bagua_algorithm.process_group
    return found, said, [group.hierarchy(asked) for asked in (False, True, "sharded")]


@pytest.mark.parametrize("sizes", [(3,), (1, 1, 1), (2, 1), (1, 2)], ids=str)
def test_the_default_is_hierarchical_between_nodes_of_several_ranks(ranks, sizes):
    expected = 1 < len(sizes) < sum(sizes)
    for found, said, asked in ranks(sum(sizes), defaults, env=environment_of_nodes(sizes)):
        assert set(found.values()) == {expected}
        assert said == []
        assert asked == [False, True, "sharded"]


@training.with_group
def train_in_a_bagua_group():
    group = bagua.communication.new_group([2, 1])
    if dist.get_rank() == 0:
        model = training.network()
        return training.error_of(lambda: model.with_bagua([], GradientAllReduceAlgorithm(), group))
    model = training.network(seed=dist.get_rank())
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm(), group)
    training.train(model, optimizer, [training.batch(step, dist.get_rank()) for step in range(2)])
    return training.model_bits(model)


def test_a_bagua_sub_group_trains_and_non_members_get_an_error(ranks):
    outsider, first, second = ranks(3, train_in_a_bagua_group)
    assert "not a member of the group with ranks [1, 2]" in outsider
    assert first == second
