"""Exceptions in the middle of a step: what is left of it, and what the next step says."""

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("in the middle of backward")


class Interruptible(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = training.network()
        self.interrupt = False

    def forward(self, x):
        hidden = self.layers[1](self.layers[0](x))
        return self.layers[2](RaisesInBackward.apply(hidden) if self.interrupt else hidden)


@training.with_group
def interrupt_backward(everywhere):
    model = Interruptible()
    model.with_bagua([], GradientAllReduceAlgorithm())
    data = training.batch(0, dist.get_rank())
    training.squared_error(model, data).backward()
    model.interrupt = everywhere or dist.get_rank() == 1
    first = None
    try:
        training.squared_error(model, data).backward()
    except Exception as error:  # noqa: BLE001 - returned
        first = f"{type(error).__name__}: {error}"
    model.interrupt = False
    if everywhere:
        dist.barrier()  # or what a faster rank says next comes before a slower one's exception
    second = None
    if first is not None and "ZeroDivisionError" in first:
        second = training.error_of(lambda: training.squared_error(model, data).backward())
    model.with_bagua([], GradientAllReduceAlgorithm())
    training.squared_error(model, data).backward()
    training.assert_ranks_agree(model)
    return first, second


UNFINISHED = ("the round was left unfinished", "round 2", "Interruptible", "bagua.wrap")


def test_after_an_exception_within_backward_on_all_ranks_the_next_step_raises_everywhere(ranks):
    for first, second in ranks(3, interrupt_backward, True):
        assert first == "ZeroDivisionError: in the middle of backward"
        for part in UNFINISHED:
            assert part in second


def test_an_exception_within_backward_on_one_rank_reaches_the_others(ranks):
    results = ranks(3, interrupt_backward, False)
    assert results[1][0] == "ZeroDivisionError: in the middle of backward"
    for part in UNFINISHED:
        assert part in results[1][1]
    for first, _ in (results[0], results[2]):
        assert first.startswith("BaguaError")
        assert "rank 1" in first
        for part in UNFINISHED:
            assert part in first


@training.with_group
def interrupt_backward_without_anything_sent():
    model = training.network()
    model.with_bagua([], GradientAllReduceAlgorithm())
    loss = training.squared_error(model, training.batch(0, dist.get_rank()))
    message = training.error_of(lambda: RaisesInBackward.apply(loss).backward())
    training.squared_error(model, training.batch(0, dist.get_rank())).backward()
    training.assert_ranks_agree(model)
    return message, model.bagua_stats()["rounds"]


def test_an_exception_before_any_gradient_leaves_the_round_open_for_the_next_step(ranks):
    results = ranks(2, interrupt_backward_without_anything_sent)
    assert results == [("ZeroDivisionError: in the middle of backward", 1)] * 2
