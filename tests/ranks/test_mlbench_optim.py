"""Optimizers of mlbench_core on several ranks, rank 0 among them, against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from mlbench_core.optim.pytorch import (
    CentralizedAdam,
    CentralizedSGD,
    CustomCentralizedOptimizer,
    DecentralizedSGD,
)
from support.training import (
    assert_close,
    assert_ranks_agree,
    batch,
    bits,
    error_of,
    gather,
    network,
    squared_error,
    train,
    train_alone,
    train_on_ranks,
    with_group,
)
from torch import nn

STEPS = 4


def make(kind, model, **options):
    """An optimizer over all ranks, and torch's for one process with all data."""
    size = dist.get_world_size()
    if kind == "sgd":
        arguments = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
        return CentralizedSGD(size, model, **arguments, **options), torch.optim.SGD, arguments
    if kind == "weights":
        arguments = {"lr": 0.1, "weight_decay": 0.01}  # without momentum both ways are the same
        ours = CentralizedSGD(size, model, **arguments, agg_grad=False, **options)
        return ours, torch.optim.SGD, arguments
    if kind == "adam":
        arguments = {"lr": 0.01, "eps": 1e-4}
        return CentralizedAdam(size, model, **arguments, **options), torch.optim.Adam, arguments
    inner = torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-4)
    ours = CustomCentralizedOptimizer(model, size, inner, average_world=True, **options)
    return ours, torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-4}


@with_group
def train_centralized(kind, by_layer):
    # Every rank begins with other weights: those of rank 0 must win.
    model, oracle = network(seed=dist.get_rank()), network(seed=0)
    optimizer, theirs, arguments = make(kind, model, by_layer=by_layer)
    assert_ranks_agree(model)
    assert bits(model.parameters()) == bits(oracle.parameters())
    train_on_ranks_or_weights(kind, model, optimizer)
    train_alone(oracle, theirs(oracle.parameters(), **arguments), STEPS)
    assert_close(model, oracle, rtol=1e-4, atol=1e-5)


def train_on_ranks_or_weights(kind, model, optimizer):
    if kind != "weights":
        train_on_ranks(model, optimizer, STEPS)
        return
    data = [batch(step, dist.get_rank()) for step in range(STEPS)]
    for part in data:
        train(model, optimizer, [part])
        model.zero_grad()  # the gradients are this rank's own
        assert_ranks_agree(model)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("by_layer", [False, True], ids=["by_model", "by_layer"])
@pytest.mark.parametrize("kind", ["sgd", "weights", "adam", "custom"])
def test_training_is_that_of_one_process_on_all_data(ranks, n, by_layer, kind):
    ranks(n, train_centralized, kind, by_layer)


@with_group
def train_by_closures():
    model, oracle = network(), network()
    optimizer = CentralizedSGD(dist.get_world_size(), model, lr=0.1)
    for step in range(STEPS):
        data = batch(step, dist.get_rank())

        def closure(data=data):
            optimizer.zero_grad()
            loss = squared_error(model, data)
            loss.backward()
            return loss

        optimizer.step(closure)
        assert_ranks_agree(model)
    train_alone(oracle, torch.optim.SGD(oracle.parameters(), lr=0.1), STEPS)
    assert_close(model, oracle)


def test_the_gradients_of_a_closure_are_aggregated(ranks):
    ranks(3, train_by_closures)


def sum_of_squares(model, data):
    inputs, targets = data
    return nn.functional.mse_loss(model(inputs), targets, reduction="sum")


@with_group
def train_on_uneven_batches():
    rank, size = dist.get_rank(), dist.get_world_size()
    model, oracle = network(), network()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = CustomCentralizedOptimizer(model, size, inner, average_custom=True, grad_clip=0.1)
    plain = torch.optim.SGD(oracle.parameters(), lr=0.5)
    for step in range(STEPS):
        parts = [batch(step, other, rows=other + 1) for other in range(size)]
        joined = tuple(torch.cat(side) for side in zip(*parts, strict=True))
        denom = torch.tensor(joined[1].numel())
        optimizer.zero_grad()
        sum_of_squares(model, parts[rank]).backward()
        optimizer.step(denom=denom)
        plain.zero_grad()
        squared_error(oracle, joined).backward()
        assert nn.utils.clip_grad_norm_(oracle.parameters(), 0.1) > 0.1
        plain.step()
        assert_ranks_agree(model)
    assert_close(model, oracle)


def test_uneven_batches_are_weighted_by_the_denominator_and_clipped_together(ranks):
    ranks(3, train_on_uneven_batches)


@with_group
def weights_over_a_denominator():
    model = nn.Linear(2, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = CustomCentralizedOptimizer(
        model, dist.get_world_size(), inner, average_custom=True, agg_grad=False
    )
    model.weight.data.fill_(3.0)
    model.weight.grad = torch.full((1, 2), float(dist.get_rank()))
    optimizer.step(denom=4)
    return model.weight.tolist()


def test_weights_are_summed_over_the_denominator(ranks):
    assert ranks(2, weights_over_a_denominator) == [[[1.25, 1.25]]] * 2  # (3 + 2) / 4


@with_group
def copies():
    model = network()
    optimizer, _, _ = make("sgd", model)
    train_on_ranks(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    restored = copy.deepcopy(model)
    restored_optimizer, _, _ = make("sgd", restored)
    restored_optimizer.load_state_dict(saved)
    for trained, own in (
        (model, optimizer),
        (twin, twin_optimizer),
        (restored, restored_optimizer),
    ):
        train_on_ranks(trained, own, STEPS)
    assert bits(model.parameters()) == bits(twin.parameters()) == bits(restored.parameters())


def test_copies_and_restored_ones_go_on_to_the_bit(ranks):
    ranks(2, copies)


@with_group
def state_of_rank_0():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1 + dist.get_rank(), momentum=0.9)
    if dist.get_rank() == 0:
        train(model, inner, [batch(0, 0)])
    CustomCentralizedOptimizer(model, dist.get_world_size(), inner, average_world=True)
    momentum = [inner.state[p]["momentum_buffer"] for p in model.parameters()]
    return inner.param_groups[0]["lr"], bits(momentum), bits(model.parameters())


def test_all_ranks_begin_with_the_weights_and_the_optimizer_state_of_rank_0(ranks):
    first, *others = ranks(3, state_of_rank_0)
    assert first[0] == 0.1
    assert others == [first] * 2


# Refusals.


@with_group
def refused():
    rank, size = dist.get_rank(), dist.get_world_size()
    model = network(outputs=1 + rank)
    before = bits(model.parameters())
    messages = [
        error_of(lambda: CentralizedSGD(size, model, lr=0.1)),
        error_of(lambda: CentralizedSGD(size + 1, network(), lr=0.1)),
        error_of(lambda: DecentralizedSGD(rank, [1] if rank == 0 else [], network(), lr=0.1)),
    ]
    assert bits(model.parameters()) == before
    return gather(messages)[rank]


def test_invalid_arguments_are_refused_on_every_rank(ranks):
    for models, sizes, graph in ranks(2, refused):
        assert (
            "BaguaMismatchError: ranks differ in the parameters and buffers of CentralizedSGD"
            in models
        )
        assert "rank 0 has [2.weight [1, 7] torch.float32]" in models
        assert "world_size=3" in sizes
        assert "neighbour" in graph
