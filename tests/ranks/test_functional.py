"""Collectives that autograd sees, against the derivative of the sum of all ranks' losses."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.communication import ReduceOp, new_group
from bagua.torch_api.data_parallel import functional
from support import training
from support.cases import over

ORACLE = {
    "SUM": lambda stack: stack.sum(0),
    "AVG": lambda stack: stack.mean(0),
    "MAX": lambda stack: stack.amax(0),  # amax shares the gradient of equal values
    "MIN": lambda stack: stack.amin(0),
}


def inputs(rank):
    """Rows: different on every rank, equal on all, equal on some, and with opposite signs."""
    generator = torch.Generator().manual_seed(rank)
    own = torch.randn(5, generator=generator)
    return torch.stack([own, torch.arange(5.0), own * (rank > 0), -own])


def loss_of(result, rank):
    weights = torch.linspace(-1, 2, result.numel()).view_as(result) * (rank + 1)
    return (result.square() * weights).sum()


@training.with_group
def gradient(name, torchs_op):
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = inputs(rank).requires_grad_()
    op = getattr(dist.ReduceOp if torchs_op else ReduceOp, name)
    result = functional.all_reduce(mine, op)
    loss_of(result, rank).backward()

    everyone = [inputs(r).requires_grad_() for r in range(size)]
    expected = ORACLE[name](torch.stack(everyone))
    sum(loss_of(expected, r) for r in range(size)).backward()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(mine.grad, everyone[rank].grad)
    assert torch.equal(mine, inputs(rank)), "the input stays as it is"
    assert mine.grad.abs().sum() > 0


@over(n=[2, 3], name=ORACLE, torchs_op=[False, True])
def test_gradients_are_those_of_the_sum_of_losses(ranks, n, name, torchs_op):
    ranks(n, gradient, name, torchs_op)


@training.with_group
def in_groups():
    rank = dist.get_rank()
    halves = [new_group([0, 1]), new_group([2])]
    mine = torch.tensor([1.0 + rank], requires_grad=True)
    result = functional.all_reduce(mine, group=halves[0] if rank < 2 else halves[1])
    (result * (rank + 1)).sum().backward()
    outside = functional.all_reduce(torch.ones(1), group=halves[0]).item()
    torchs = [dist.new_group([0, 1]), dist.new_group([2])][rank == 2]
    whole = functional.all_reduce(torch.ones(1), group=dist.group.WORLD)
    half = functional.all_reduce(torch.ones(1), group=torchs)
    return result.item(), mine.grad.item(), outside, whole.item(), half.item()


def test_groups_are_torchs_or_baguas(ranks):
    answers = ranks(3, in_groups)
    assert answers == [(3, 3, 2, 3, 2), (3, 3, 2, 3, 2), (3, 3, 1, 3, 1)]


@training.with_group
def second_derivative():
    rank = dist.get_rank()
    x = torch.tensor([2.0 + rank], requires_grad=True)
    y = functional.all_reduce(x).pow(3)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    first.sum().backward()
    return first.item(), x.grad.item()


def test_gradients_can_be_differentiated_again(ranks):
    # s = 2 + 3; the losses' sum is 2 s^3, its derivative 6 s^2; of the sum of both, 2 * 12 s.
    assert ranks(2, second_derivative) == [(150.0, 120.0)] * 2


@training.with_group
def refused():
    for op, name in [(ReduceOp.PRODUCT, "PRODUCT"), (dist.ReduceOp.BAND, "BAND"), ("sum", "sum")]:
        with pytest.raises(ValueError, match=f"all_reduce: {name} has no gradient here, only SUM"):
            functional.all_reduce(torch.ones(2), op)
    strided = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(functional.all_reduce(strided), 2 * strided)
    integers = functional.all_reduce(torch.tensor([1, 2]), ReduceOp.MAX)
    assert integers.tolist() == [1, 2]


def test_operations_without_a_gradient_are_refused(ranks):
    ranks(2, refused)


def implicit():
    try:
        assert not bagua.communication.is_initialized()
        return functional.all_reduce(torch.ones(1)).item()
    finally:
        bagua.destroy_process_group()


def test_a_script_of_torch_needs_no_other_initialisation(ranks):
    assert ranks(2, implicit) == [2.0, 2.0]
