"""State dicts of a damaged or another file: refused with ValueError, nothing changed, or loaded."""

import copy

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from mlbench_core.aggregation.pytorch.centralized import (
    PowerAggregation,
    SparsifiedAggregation,
)
from support import training
from support.every_algorithm import ALGORITHMS, WARM_UP, wrapped
from support.mutations import attempt, chances, changed_value

MEMORYLESS = [name for name in ALGORITHMS if name.startswith(("gradient", "bytegrad"))]
STATES = 250
SEED = 30


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return first == second


def load_many(owner, state):
    """Loads changed states; (those refused, those whose refusal changed something)."""
    refused, changed = 0, []
    for number, chance in chances(STATES, SEED):
        before = copy.deepcopy(owner.state_dict())
        _, message = attempt(ValueError, owner.load_state_dict, changed_value(chance, state))
        if not message:
            continue
        refused += 1
        after = owner.state_dict()
        if before.keys() != after.keys() or not all(same(before[k], after[k]) for k in before):
            changed.append((number, message))
    return refused, changed


@training.with_group
def load_into_algorithm(name):
    model = training.network()
    model, optimizer = wrapped(name, model)
    rank = dist.get_rank()
    training.train(model, optimizer, [training.batch(s, rank) for s in range(WARM_UP + 2)])
    if name == "async":
        bagua_algorithm = model.bagua_algorithm
        bagua_algorithm.abort(model)
    state = copy.deepcopy(model.bagua_algorithm.state_dict())
    outcome = load_many(model.bagua_algorithm, state)
    model.bagua_algorithm.load_state_dict(state)
    if name != "async":
        training.train(model, optimizer, [training.batch(9, rank)])
    return outcome


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_takes_any_state(ranks, name):
    for refused, changed in ranks(2, load_into_algorithm, name):
        # Where nothing is remembered a changed state is mostly an empty one.
        assert refused > (STATES * 0.2 if name not in MEMORYLESS else 0)
        assert changed == []


AGGREGATIONS = {
    "power": lambda model: PowerAggregation(model=model),
    "sparsified": lambda model: SparsifiedAggregation(model, ratio=0.2),
}


@training.with_group
def load_into_aggregation(name):
    model = training.network()
    aggregation = AGGREGATIONS[name](model)
    data = training.batch(0, dist.get_rank())
    training.squared_error(model, data).backward()
    aggregation.agg_grad()(model, "avg_world")
    state = copy.deepcopy(aggregation.state_dict())
    outcome = load_many(aggregation, state)
    aggregation.load_state_dict(state)
    aggregation.agg_grad()(model, "avg_world")
    return outcome


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_takes_any_state(ranks, name):
    for refused, changed in ranks(2, load_into_aggregation, name):
        assert refused > STATES * 0.2
        assert changed == []


@training.with_group
def load_into_per_rank():
    model, optimizer = wrapped("decentralized-all", training.network())
    training.train(model, optimizer, [training.batch(0, dist.get_rank())])
    keeper = bagua.checkpoint.PerRank(model)
    own = f"rank{dist.get_rank()}"
    wrong = ([], {1: 2}, {}, {"rank7": {}}, {own: []}, {own: {}}, {own: {"model": {}}})
    return [training.error_of(lambda s=state: keeper.load_state_dict(s)) for state in wrong]


def test_per_rank_refuses_objects_without_state(ranks):
    for messages in ranks(2, load_into_per_rank):
        assert all(message.startswith("ValueError: ") for message in messages)
