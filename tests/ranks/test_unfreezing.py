"""Parameters that were frozen at the wrap and are unfrozen: new buckets at an agreed step.

`tests/ranks/situations/freezing.py` compares the exact algorithm with torch.
"""

import pytest
import torch
import torch.distributed as dist
from bagua import comm_hooks
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


def unfreeze(model):
    model[0].weight.requires_grad_(True)


def add_adapter(model):
    model[0].register_parameter("late", torch.nn.Parameter(torch.ones(1)))


def replace_weight(model):
    model[2].load_state_dict(model[2].state_dict(), assign=True)


def cast(model):
    model.double()


#: Changes after which torch's reducer does not average a parameter, and the name of that one.
LATE = {unfreeze: "0.weight", add_adapter: "0.late", replace_weight: "2.weight", cast: "2.weight"}


def torchs(model):
    return torch.nn.parallel.DistributedDataParallel(model)


@training.with_group
def change_under_a_hook(change):
    """Messages: of a forward after the change, and of registering after it."""
    registered, late = torchs(half_frozen()), torchs(half_frozen())
    comm_hooks.register(registered, "bytegrad")
    step(registered, training.sgd(registered), 0)
    change(registered.module)
    inputs = training.batch(1, 0)[0].to(registered.module[2].weight.dtype)
    with torch.no_grad():
        registered(inputs)
    message = training.error_of(lambda: registered(inputs))
    change(late.module)
    return message, training.error_of(lambda: comm_hooks.register(late, "bytegrad"))


@pytest.mark.parametrize("change", LATE)
def test_a_hook_refuses_a_parameter_that_torch_does_not_average(ranks, change):
    for messages in ranks(2, change_under_a_hook, change):
        for message in messages:
            assert f"BaguaError: module 'Sequential': parameter '{LATE[change]}' was" in message
            assert "Construct DistributedDataParallel again after such a change" in message


@training.with_group
def changes_that_torch_follows():
    """Weights after a frozen and an ignored addition, freezing, unfreezing and a new wrapper."""
    model = training.network()
    ddp = torchs(model)
    comm_hooks.register(ddp, "bytegrad")
    optimizer = training.sgd(ddp)
    model[0].register_parameter("frozen", torch.nn.Parameter(torch.ones(1), requires_grad=False))
    step(ddp, optimizer, 0)
    for trained in (False, True):
        model[0].bias.requires_grad_(trained)
        with ddp.no_sync():
            training.squared_error(ddp, training.batch(1, dist.get_rank())).backward()
    step(ddp, optimizer, 1)
    add_adapter(model)
    model._ddp_params_and_buffers_to_ignore = ["0.late"]
    step(ddp, optimizer, 2)
    del model._ddp_params_and_buffers_to_ignore
    ddp = torchs(model)
    comm_hooks.register(ddp, "bytegrad")
    ddp.module[0].register_forward_hook(lambda layer, _, output: output * layer.late)
    step(ddp, training.sgd(ddp), 3)
    training.assert_ranks_agree(model)
    return training.bits(model.parameters())


def test_a_hook_takes_what_torch_follows_and_a_new_wrapper_everything(ranks):
    first, second = ranks(2, changes_that_torch_follows)
    assert first == second
