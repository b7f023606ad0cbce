"""Steps that are not one forward, one backward and one step of the optimizer."""

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from support import training

MICRO_STEPS = 3


def loss_on_rank(model, step):
    return training.squared_error(model, training.batch(step, dist.get_rank()))


@training.with_group
def accumulate_by_the_attribute():
    """As nanoGPT: the attribute is set before each micro-step, the first time before the wrap."""
    sent = []
    for algorithm in (GradientAllReduceAlgorithm(), LowPrecisionDecentralizedAlgorithm(False)):
        model = training.network()
        optimizer = training.sgd(model)
        model.require_backward_grad_sync = False
        model.with_bagua([optimizer], algorithm)
        assert not model.require_backward_grad_sync
        for step in range(2 * MICRO_STEPS):
            model.require_backward_grad_sync = step % MICRO_STEPS == MICRO_STEPS - 1
            loss_on_rank(model, step).backward()
            if model.require_backward_grad_sync:
                optimizer.step()
                optimizer.zero_grad()
            sent.append(model.bagua_stats()["rounds"])
        with model.no_sync():
            assert not model.require_backward_grad_sync
        model.require_backward_grad_sync = False
        with model.no_sync():
            model.with_bagua([optimizer], algorithm)
        assert not model.require_backward_grad_sync
    return sent


def test_require_backward_grad_sync_of_the_module_is_no_sync(ranks):
    assert ranks(2, accumulate_by_the_attribute) == [[0, 0, 1, 1, 1, 2] * 2] * 2


@training.with_group
def backward_twice_and_with_a_graph():
    """Gradients that lie outside of the buckets."""
    model = training.network()
    model.with_bagua([], GradientAllReduceAlgorithm(), None, False)
    own = training.local_gradients(
        model, training.squared_error, training.batch(0, dist.get_rank())
    )
    loss = loss_on_rank(model, 0)
    loss.backward(retain_graph=True)
    loss.backward(create_graph=True)
    for name, parameter in model.named_parameters():
        assert parameter.grad.requires_grad
        expected = 2 * training.mean_over_ranks(own[name])
        torch.testing.assert_close(parameter.grad.detach(), expected)
    slopes = torch.autograd.grad(
        sum(p.grad.square().sum() for p in model.parameters()), list(model.parameters())
    )
    assert all(slope.isfinite().all() for slope in slopes)
    return model.bagua_stats()["rounds"]


def test_without_flattening_backwards_add_up_and_keep_their_graph(ranks):
    assert ranks(3, backward_twice_and_with_a_graph) == [2] * 3
