"""All ranks start with the optimizer state of rank 0. Weights: situations/buffers.py."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training


def stepped_adam(model, lr):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5 + lr, 0.9), amsgrad=True)
    training.train(model, optimizer, [training.batch(step, 0) for step in range(2)])
    return optimizer


@training.with_group
def resume_with_adam(state_on_every_rank):
    rank = dist.get_rank()
    model = training.network(seed=rank)
    lr = 0.01 * (rank + 1)
    if rank == 0 or state_on_every_rank:
        optimizer = stepped_adam(model, lr)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, amsgrad=True)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    states = [optimizer.state[p] for p in model.parameters()]
    digests = [training.bits([state[key] for key in sorted(state)]) for state in states]
    steps = [(state["step"].item(), state["step"].device.type) for state in states]
    group = optimizer.param_groups[0]
    training.train_on_ranks(model, optimizer)
    return digests, steps, group["lr"], group["betas"]


@pytest.mark.parametrize("everywhere", [True, False], ids=["differing", "only_on_rank_0"])
def test_optimizer_state_and_hyperparameters_of_rank_0_are_broadcast(ranks, everywhere):
    results = ranks(3, resume_with_adam, everywhere)
    assert results[0] == results[1] == results[2]
    _, steps, lr, betas = results[0]
    assert steps == [(2.0, "cpu")] * 4
    assert lr == 0.01
    assert betas == (0.51, 0.9)


@training.with_group
def wrap_with_unknown_state(holders):
    model = training.network()
    optimizer = training.sgd(model)
    if dist.get_rank() in holders:
        optimizer.param_groups[0]["strange"] = {1, 2}
    return training.error_of(lambda: model.with_bagua([optimizer], GradientAllReduceAlgorithm()))


def test_optimizer_state_that_cannot_be_sent_is_named_and_raises_everywhere(ranks):
    for message in ranks(2, wrap_with_unknown_state, [0, 1]):
        assert "TypeError" in message
        assert "'strange' is a set" in message
    first, second = ranks(2, wrap_with_unknown_state, [0])
    assert "'strange' is a set" in first
    assert second.startswith("TypeError: an optimizer of rank 0 has an entry that cannot be sent")
