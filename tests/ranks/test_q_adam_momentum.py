"""After the warm-up of QAdam `.grad` holds momentum: what may touch it, and when."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from support import q_adam_training as q_adam
from support import training


@training.with_group
def forget_to_zero(how):
    model, optimizer = q_adam.wrapped(warmup_steps=1)
    if how == "gradients":  # before the switch that is accumulation over two rounds
        q_adam.backward_of(model, 0)
        q_adam.backward_of(model, 1)
        return None
    for step in range(2):
        q_adam.train_step(model, optimizer, step)
    if how != "after_step":
        optimizer.zero_grad()
        q_adam.backward_of(model, 2)
    expected = training.gather(training.model_bits(model))
    message = training.error_of(lambda: q_adam.backward_of(model, 3), bagua.BaguaError)
    assert training.gather(training.model_bits(model)) == expected, "nothing was added"
    for step in range(3, 5):  # zeroed, it goes on
        q_adam.train_step(model, optimizer, step)
        q_adam.assert_ranks_agree(model, optimizer)
    return message


@pytest.mark.parametrize("how", ["after_step", "without_step"])
def test_a_backward_onto_momentum_raises_and_says_what_to_do(ranks, how):
    for message in ranks(2, forget_to_zero, how):
        assert "BaguaError: module 'Sequential': a backward began while .grad of" in message
        assert "call zero_grad() before every backward" in message
        assert "no_sync()" in message
    assert ranks(2, forget_to_zero, "gradients") == [None] * 2


@training.with_group
def step_without_a_round(steps_before):
    model, optimizer = q_adam.wrapped(warmup_steps=1)
    for step in range(steps_before):
        q_adam.train_step(model, optimizer, step)
    if steps_before == 1:  # the first forward after the warm-up switches
        model(training.batch(1, dist.get_rank())[0])
    optimizer.zero_grad()
    with model.no_sync():
        q_adam.backward_of(model, 7)
    weights = training.bits(model.parameters())
    message = training.error_of(optimizer.step, bagua.BaguaError)
    assert training.bits(model.parameters()) == weights
    optimizer.zero_grad()
    for step in range(3, 5):
        q_adam.train_step(model, optimizer, step)
        q_adam.assert_ranks_agree(model, optimizer)
    return message


@pytest.mark.parametrize("steps_before", [1, 3], ids=["at-the-switch", "later"])
def test_a_step_with_gradients_of_this_rank_alone_is_refused(ranks, steps_before):
    for message in ranks(2, step_without_a_round, steps_before):
        assert "no backward was communicated since the last step" in message
        assert "outside of no_sync()" in message


@training.with_group
def zero_late():
    """zero_grad between forward and backward, other backwards, forwards without backward: fine."""
    model, optimizer = q_adam.wrapped(warmup_steps=1)
    for step in range(4):
        inputs, targets = q_adam.data_of(model, step, dist.get_rank())
        inputs.requires_grad_()
        model(inputs)
        output = model(inputs)
        before = q_adam.Before(model, optimizer, q_adam.local_gradients(model, step))
        torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        torch.nn.functional.mse_loss(output, targets).backward()
        optimizer.step()
        q_adam.assert_ranks_agree(model, optimizer)
        if step >= 1:
            before.assert_compressed_step(model)
    return optimizer.compressed_steps


def test_gradients_may_be_zeroed_right_before_backward(ranks):
    assert ranks(2, zero_late) == [3, 3]
