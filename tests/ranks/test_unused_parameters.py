"""Every parameter answers: zeros where backward did not reach, nothing if no rank used it."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training
from torch import nn


class Branches(nn.Module):
    """Which branch a forward uses is set from outside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(training.FEATURES, 7)
        self.left = nn.Linear(7, training.OUTPUTS)
        self.right = nn.Linear(7, training.OUTPUTS)
        self.nobody = nn.Linear(7, training.OUTPUTS)
        self.branch = "left"

    def forward(self, x):
        return getattr(self, self.branch)(torch.tanh(self.trunk(x)))


def wrapped(find_unused, do_flatten=True):
    model = Branches()
    return model.with_bagua(
        [training.sgd(model)],
        GradientAllReduceAlgorithm(),
        None,
        do_flatten,
        find_unused_parameters=find_unused,
    )


def step(model):
    model.zero_grad()
    training.squared_error(model, training.batch(0, dist.get_rank())).backward()
    training.assert_ranks_agree(model)


@training.with_group
def two_steps_without_a_branch():
    model = wrapped(find_unused=False)
    first = training.warnings_of(lambda: step(model))
    second = training.warnings_of(lambda: step(model))
    return first, second, {name: p.grad.abs().sum().item() for name, p in model.named_parameters()}


def test_unused_parameters_are_named_once_and_send_zeros(ranks):
    for first, second, sums in ranks(3, two_steps_without_a_branch):
        assert len(first) == 1
        for part in ("Branches", "right.weight", "nobody.bias", "zeros", "find_unused_parameters"):
            assert part in first[0]
        assert "left" not in first[0]
        assert second == []
        assert sums["left.weight"] > 0
        assert sums["right.weight"] == sums["nobody.weight"] == sums["nobody.bias"] == 0.0


@training.with_group
def one_rank_takes_another_branch(find_unused, do_flatten):
    model = wrapped(find_unused, do_flatten)
    rank, size = dist.get_rank(), dist.get_world_size()
    model.branch = "right" if rank == size - 1 else "left"
    data = training.batch(0, rank)
    local = training.local_gradients(model, training.squared_error, data)
    expected = {}
    for name, p in model.named_parameters():
        mine = torch.zeros_like(p) if local[name] is None else local[name]
        expected[name] = training.mean_over_ranks(mine)
    caught = training.warnings_of(lambda: step(model))
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[name])
    model.branch = "left"
    step(model)
    return caught, [name for name, p in model.named_parameters() if p.grad is None]


LAYOUT = pytest.mark.parametrize("do_flatten", [True, False], ids=["flattened", "copied"])


BUCKETS = pytest.mark.parametrize(
    "env", [{}, training.SMALL_BUCKETS], ids=["one_bucket", "small_buckets"]
)


@BUCKETS
@LAYOUT
def test_a_parameter_that_one_rank_used_gets_the_mean(ranks, do_flatten, env):
    results = ranks(3, one_rank_takes_another_branch, False, do_flatten, env=env)
    for caught, without_gradient in results:
        assert len(caught) == 1
        assert without_gradient == []


@BUCKETS
@LAYOUT
def test_with_find_unused_an_unused_parameter_has_no_gradient_and_no_warning(
    ranks, do_flatten, env
):
    for caught, without in ranks(3, one_rank_takes_another_branch, True, do_flatten, env=env):
        assert caught == []
        assert without == ["right.weight", "right.bias", "nobody.weight", "nobody.bias"]


@training.with_group
def momentum_of_what_nobody_uses():
    model = wrapped(find_unused=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.nobody.weight.detach().clone()
    for _ in range(3):
        step(model)
        optimizer.step()
    return torch.equal(before, model.nobody.weight)


def test_with_find_unused_the_optimizer_leaves_unused_parameters_alone(ranks):
    assert ranks(2, momentum_of_what_nobody_uses) == [True, True]


@training.with_group
def one_rank_uses_nothing():
    model = wrapped(find_unused=False)
    data = training.batch(0, dist.get_rank())
    if dist.get_rank() == 0:
        loss = (model(data[0]) * 0.0).sum()
    else:
        loss = training.squared_error(model, data)
    loss.backward()
    training.assert_ranks_agree(model)
    return model.left.weight.grad.abs().sum().item()


def test_a_rank_whose_loss_is_zero_takes_part(ranks):
    sums = ranks(3, one_rank_uses_nothing)
    assert sums[0] > 0
    assert len(set(sums)) == 1
