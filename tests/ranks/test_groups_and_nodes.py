"""Sub-groups, and nodes that are emulated with the launcher's variables."""

import bagua.torch_api as bagua
import pytest
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    Algorithm,
    GradientAllReduceAlgorithm,
    QAdamOptimizer,
)
from support import training


def environment_of_nodes(sizes):
    """Variables that torchrun sets on machines with `sizes` ranks each, by rank."""
    return [
        {"GROUP_RANK": str(node), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}
        for node, size in enumerate(sizes)
        for local in range(size)
    ]


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
