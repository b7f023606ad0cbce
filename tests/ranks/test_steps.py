"""Steps that are not one forward, one backward and one step of the optimizer."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from bagua.torch_api.algorithms import (
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from support import training
from torch import nn

MICRO_STEPS = 3

LAYOUT = pytest.mark.parametrize("do_flatten", [True, False], ids=["flattened", "copied"])


def wrapped(do_flatten=True, seed=0):
    model = training.network(seed)
    optimizer = training.sgd(model)
    return model.with_bagua([optimizer], GradientAllReduceAlgorithm(), None, do_flatten), optimizer


def loss_on_rank(model, step):
    return training.squared_error(model, training.batch(step, dist.get_rank()))


@training.with_group
def accumulate(do_flatten, set_to_none, forward_inside):
    model, optimizer = wrapped(do_flatten)
    alone = copy.deepcopy(model)
    rounds = []
    for step in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(MICRO_STEPS - 1):
            outside = (
                loss_on_rank(model, step * MICRO_STEPS + micro) if not forward_inside else None
            )
            with model.no_sync():
                loss = outside or loss_on_rank(model, step * MICRO_STEPS + micro)
                (loss / MICRO_STEPS).backward()
        rounds.append(model.bagua_stats()["rounds"])
        (loss_on_rank(model, (step + 1) * MICRO_STEPS - 1) / MICRO_STEPS).backward()
        optimizer.step()
        training.assert_ranks_agree(model)
    whole = training.sgd(alone)
    size = dist.get_world_size()
    data = []
    for step in range(2):
        micro = [training.whole_batch(step * MICRO_STEPS + i, size) for i in range(MICRO_STEPS)]
        data.append(tuple(torch.cat(side) for side in zip(*micro, strict=True)))
    training.train(alone, whole, data)
    training.assert_close(model, alone)
    return rounds


@LAYOUT
@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads_none", "grads_zero"])
def test_micro_steps_under_no_sync_equal_one_big_batch(ranks, do_flatten, set_to_none):
    assert ranks(3, accumulate, do_flatten, set_to_none, True) == [[0, 1]] * 3


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
def use_part_of_the_model_in_the_last_micro_step():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3)})
    model.forward = lambda x, key: model[key](x)
    model.with_bagua([], GradientAllReduceAlgorithm())
    x = training.batch(0, dist.get_rank())[0]
    with model.no_sync():
        model(x, "a").square().mean().backward()
    expected = training.mean_over_ranks(model["a"].weight.grad)
    caught = training.warnings_of(lambda: model(x, "b").square().mean().backward())
    training.assert_ranks_agree(model)
    return caught, torch.allclose(expected, model["a"].weight.grad)


def test_accumulated_gradients_are_sent_though_the_last_micro_step_did_not_use_them(ranks):
    assert ranks(3, use_part_of_the_model_in_the_last_micro_step) == [([], True)] * 3


@training.with_group
def evaluate_between_steps():
    model, optimizer = wrapped()
    alone = copy.deepcopy(model)
    bytes_sent = []
    for step in range(3):
        model.eval()
        if dist.get_rank() == 0:
            model(torch.ones(2, training.FEATURES)).sum().item()
        model.train()
        with torch.no_grad():
            if dist.get_rank() == 1:
                model(torch.ones(2, training.FEATURES))
        bytes_sent.append(model.bagua_stats()["total"]["bytes_sent"])
        optimizer.zero_grad()
        loss_on_rank(model, step).backward()
        optimizer.step()
        training.assert_ranks_agree(model)
    training.assert_close(model, training.train_alone(alone, training.sgd(alone)))
    return bytes_sent[0], model.bagua_train_step_counter


def test_eval_and_no_grad_forwards_on_some_ranks_communicate_nothing(ranks):
    assert ranks(3, evaluate_between_steps) == [(0, 3)] * 3


@training.with_group
def forward_without_backward():
    model, optimizer = wrapped()
    alone = copy.deepcopy(model)
    for step in range(3):
        loss_on_rank(model, step)
        optimizer.zero_grad()
        loss_on_rank(model, step).backward()
        optimizer.step()
    training.assert_close(model, training.train_alone(alone, training.sgd(alone)))
    return training.model_bits(model), model.bagua_stats()["rounds"]


def test_a_training_forward_without_backward_is_harmless(ranks):
    results = ranks(3, forward_without_backward)
    assert len({digest for digest, _ in results}) == 1
    assert results[0][1] == 3


@training.with_group
def clip_gradients():
    model, optimizer = wrapped()
    alone = copy.deepcopy(model)
    theirs = training.sgd(alone)
    norms = []
    for step in range(3):
        for m, o, data in (
            (model, optimizer, training.batch(step, dist.get_rank())),
            (alone, theirs, training.whole_batch(step, dist.get_world_size())),
        ):
            o.zero_grad()
            training.squared_error(m, data).backward()
            norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.05).item())
            o.step()
        training.assert_ranks_agree(model)
    training.assert_close(model, alone)
    return norms


def test_gradient_clipping_sees_communicated_gradients(ranks):
    results = ranks(3, clip_gradients)
    assert results[0] == results[1] == results[2]
    assert results[0][0::2] == pytest.approx(results[0][1::2], rel=1e-5)


@training.with_group
def scale_with_overflow_on_one_rank(name, bad):
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], training.algorithm(name))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scales, moved = [], []
    for step in range(3):
        before = training.bits(model.parameters())
        optimizer.zero_grad()
        loss = loss_on_rank(model, step)
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * float(bad)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(before != training.bits(model.parameters()))
        assert len(set(training.gather(training.bits(model.parameters())))) == 1
    return scales, moved


CODECS = ["exact", *_C.codec_names()]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_the_scaler_skips_the_step_on_all_ranks_when_one_overflows(ranks, name, bad):
    results = ranks(3, scale_with_overflow_on_one_rank, name, bad)
    assert results == [([8.0, 4.0, 4.0], [True, False, True])] * 3


@training.with_group
def penalise_gradients(do_flatten):
    model, optimizer = wrapped(do_flatten)
    alone = copy.deepcopy(model)

    def loss(m, data):
        inputs = data[0].clone().requires_grad_()
        outputs = m(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return nn.functional.mse_loss(outputs, data[1]) + slope.square().mean()

    training.train_on_ranks(model, optimizer, loss=loss)
    training.assert_close(model, training.train_alone(alone, training.sgd(alone), loss=loss))
    return model.bagua_stats()["rounds"]


@LAYOUT
def test_a_gradient_penalty_is_part_of_the_step(ranks, do_flatten):
    assert ranks(3, penalise_gradients, do_flatten) == [3, 3, 3]


@training.with_group
def gradients_of_parameters_by_hand():
    model, _ = wrapped()
    loss = loss_on_rank(model, 0)
    local = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    own = training.local_gradients(
        model, training.squared_error, training.batch(0, dist.get_rank())
    )
    by_hand = all(torch.equal(g, own[name]) for g, name in zip(local, own, strict=True))
    before = model.bagua_stats()["total"]["bytes_sent"]
    loss.backward()
    training.assert_ranks_agree(model)
    for (_, p), gradient in zip(model.named_parameters(), local, strict=True):
        torch.testing.assert_close(p.grad, training.mean_over_ranks(gradient))
    return by_hand, before


def test_autograd_grad_before_backward_is_local(ranks):
    assert ranks(3, gradients_of_parameters_by_hand) == [(True, 0)] * 3


@training.with_group
def backward_twice(do_flatten, first_inside_no_sync):
    model, optimizer = wrapped(do_flatten)
    alone = copy.deepcopy(model)
    loss = loss_on_rank(model, 0)
    with model.no_sync() if first_inside_no_sync else contextlib.nullcontext():
        loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    training.assert_ranks_agree(model)
    whole = training.sgd(alone)
    loss = training.squared_error(alone, training.whole_batch(0, dist.get_world_size()))
    (2 * loss).backward()
    whole.step()
    training.assert_close(model, alone)
    return model.bagua_stats()["rounds"]


@LAYOUT
@pytest.mark.parametrize("first_inside_no_sync", [False, True])
def test_a_second_backward_through_one_forward_is_a_round_of_its_own(
    ranks, do_flatten, first_inside_no_sync
):
    assert ranks(3, backward_twice, do_flatten, first_inside_no_sync) == [2, 2, 2]


@training.with_group
def backward_inside_no_sync():
    model, _ = wrapped()
    loss = loss_on_rank(model, 0)
    with model.no_sync():
        loss.backward()
    training.assert_ranks_agree(model)
    with model.no_sync():
        loss = loss_on_rank(model, 1)
    loss.backward()
    return model.bagua_stats()["rounds"]


def test_the_forward_decides_whether_its_backward_communicates(ranks):
    assert ranks(2, backward_inside_no_sync) == [1, 1]


@training.with_group
def backward_with_a_graph(do_flatten):
    model, _ = wrapped(do_flatten)
    own = training.local_gradients(
        model, training.squared_error, training.batch(0, dist.get_rank())
    )
    loss_on_rank(model, 0).backward(create_graph=True)
    for name, parameter in model.named_parameters():
        assert parameter.grad.requires_grad
        torch.testing.assert_close(parameter.grad.detach(), training.mean_over_ranks(own[name]))
    slopes = torch.autograd.grad(
        sum(p.grad.square().sum() for p in model.parameters()), list(model.parameters())
    )
    model.zero_grad()
    return all(slope.isfinite().all() for slope in slopes)


@LAYOUT
def test_backward_with_create_graph_communicates_values_and_keeps_the_graph(ranks, do_flatten):
    assert ranks(3, backward_with_a_graph, do_flatten) == [True] * 3
