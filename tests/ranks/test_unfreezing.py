"""Parameters that were frozen at the wrap and are unfrozen: new buckets at an agreed step.

`tests/ranks/situations/freezing.py` compares the exact algorithm with torch.
"""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import PowerSGDAlgorithm, QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import every_algorithm, training
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

#: Those with state per parameter that is not of the ledger, or with weights in flight.
NOT_FOLLOWING = [
    *every_algorithm.LOCAL,
    "low_precision_decentralized",
    "qadam",
    "async",
]
FOLLOWING = [
    name
    for name in every_algorithm.ALGORITHMS
    if name not in NOT_FOLLOWING and not name.startswith("bytegrad-")
]


def step(model, optimizer, number):
    optimizer.zero_grad()
    training.squared_error(model, training.batch(number, dist.get_rank())).backward()
    optimizer.step()


def half_frozen():
    model = training.network()
    model[0].requires_grad_(False)
    return model


@training.with_group
def toggle(name):
    """The half that was frozen at the wrap and the other one in turn."""
    model, optimizer = every_algorithm.wrapped(name, half_frozen())
    moved = []

    def train():
        for number in range(8):
            model[0].requires_grad_(number % 2 == 1)
            model[2].requires_grad_(number % 2 == 0)
            before = model[0].weight.clone()
            step(model, optimizer, number)
            moved.append(not torch.equal(before, model[0].weight))
            if name not in every_algorithm.OWN_WEIGHTS:
                training.assert_ranks_agree(model)

    lines = [line for _, line in training.log_of(train) if "as unfrozen" in line]
    communications = model.bagua_algorithm.state_dict().get("communications", 8)
    assert int(communications) == 8
    return lines, len(model.bagua_build_params()), moved


@pytest.mark.parametrize("name", FOLLOWING)
def test_the_first_unfreezing_makes_new_buckets_and_is_logged_once(ranks, name):
    for lines, count, moved in ranks(3, toggle, name):
        assert lines == ["module 'Sequential': new buckets, as unfrozen: 0.weight, 0.bias"]
        assert count == 4
        if name in ("gradient_allreduce", "bytegrad", "power_sgd"):
            assert moved == [False, True] * 4


@training.with_group
def unfreeze_on_one_rank(kind):
    model, optimizer = every_algorithm.wrapped("gradient_allreduce", half_frozen())
    step(model, optimizer, 0)
    if dist.get_rank() == 0:
        model[0].weight.requires_grad_()
    elif kind == "other":
        model[0].bias.requires_grad_()
    return training.error_of(lambda: step(model, optimizer, 1))


@pytest.mark.parametrize("kind", ["nothing", "other"])
def test_ranks_that_unfreeze_different_parameters_raise(ranks, kind):
    for message in ranks(3, unfreeze_on_one_rank, kind):
        assert "BaguaMismatchError" in message
        assert "round 2 was not started: ranks differ in the parameters that were frozen" in message
        assert "ranks froze or unfroze different parameters" in message


@training.with_group
def unfreeze_where_it_is_not_followed(name):
    model = half_frozen()
    if name == "qadam":
        optimizer = QAdamOptimizer(model[2].parameters(), warmup_steps=1)
        model.with_bagua([optimizer], QAdamAlgorithm(optimizer))
    else:
        model, optimizer = every_algorithm.wrapped(name, model)
    step(model, optimizer, 0)
    model[0].requires_grad_(True)
    return training.error_of(lambda: step(model, optimizer, 1))


@pytest.mark.parametrize("name", NOT_FOLLOWING)
def test_algorithms_with_state_per_parameter_ask_for_another_wrap(ranks, name):
    for message in ranks(2, unfreeze_where_it_is_not_followed, name):
        assert "BaguaError: module 'Sequential': '0.weight' was unfrozen" in message
        assert "Call bagua.wrap again, on every rank" in message


@training.with_group
def unfreeze_at_a_bad_moment(moment):
    if moment == "under a hook":
        model = DistributedDataParallel(half_frozen())
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    else:
        model, _ = every_algorithm.wrapped("gradient_allreduce", half_frozen())
    data = training.batch(0, dist.get_rank())
    if moment == "in an open round":
        model(data[0])
    if moment == "in eval":
        model.eval()
    for p in model.parameters():
        p.requires_grad_(True)
    return training.error_of(lambda: training.squared_error(model, data).backward())


@pytest.mark.parametrize("moment", ["under a hook", "in an open round", "in eval"])
def test_moments_at_which_buckets_cannot_change_ask_for_another_wrap(ranks, moment):
    for message in ranks(2, unfreeze_at_a_bad_moment, moment):
        assert "'0.weight' was unfrozen" in message
        assert "Call bagua.wrap again, on every rank" in message


@training.with_group
def freeze_while_the_warm_up_ends():
    """New buckets are made while a parameter is frozen that was not at the wrap."""
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], PowerSGDAlgorithm(rank=2, warmup_steps=2))
    for number in range(6):
        model[0].requires_grad_(number not in (1, 2))
        step(model, optimizer, number)
        training.assert_ranks_agree(model)
    return len(model.bagua_build_params())


def test_a_parameter_that_is_frozen_while_buckets_are_made_is_still_communicated(ranks):
    assert ranks(2, freeze_while_the_warm_up_ends) == [4, 4]
