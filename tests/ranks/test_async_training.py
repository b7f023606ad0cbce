"""Asynchronous model averaging on ranks: warm-up, averages while training goes on."""

import time

import pytest
import torch
import torch.distributed as dist
from support import training
from support.async_training import averages, step, train_until, weights_of, wrapped
from torch import nn

RANKS = pytest.mark.parametrize("n", [2, 3, 4], ids=lambda n: f"{n}-ranks")


@training.with_group
def warm_up_then_average(warmup_steps):
    model, optimizer = wrapped(warmup_steps=warmup_steps)
    expected = training.network()
    expected_optimizer = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9)
    for number in range(warmup_steps):
        step(model, optimizer, number)
        training.assert_ranks_agree(model)
        whole = training.whole_batch(number, dist.get_world_size())
        training.train(expected, expected_optimizer, [whole])
        training.assert_close(model, expected)
    rounds_of_warm_up = averages(model)
    step(model, optimizer)  # the first without synchronisation: what was counted begins anew
    train_until(model, optimizer, 3)
    model.bagua_algorithm.abort(model)
    return rounds_of_warm_up, averages(model), model.bagua_stats()["buckets"][0]["ops"]


@RANKS
@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
def test_after_an_exact_warm_up_weights_are_averaged_while_training_goes_on(ranks, n, warmup_steps):
    results = ranks(n, warm_up_then_average, warmup_steps)
    for before, after, ops in results:
        assert before == warmup_steps
        assert after >= 3
        assert ops == [f"AsyncAverage(ranks {n})"]
    assert len({after for _, after, _ in results}) == 1, "ranks counted different averages"


class Half(nn.Linear):
    """Computes in bfloat16, whatever comes and goes."""

    def forward(self, x):
        return super().forward(x.bfloat16()).to(x.dtype)


@training.with_group
def average_what_nobody_trains(dtype):
    model = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7)).to(dtype)
    model.append(Half(7, 2).bfloat16())
    model, optimizer = wrapped(model, lr=0.0)
    with torch.no_grad():
        for tensor in [*model.parameters(), model[1].running_mean]:
            tensor.fill_(float(dist.get_rank()))
    model[1].num_batches_tracked.fill_(dist.get_rank())
    model[1].momentum = 0.0
    inputs = torch.randn(4, 3, dtype=dtype)
    while averages(model) < 2:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    model.bagua_algorithm.abort(model)
    values = {v.item() for t in [*model.parameters(), model[1].running_mean] for v in t.flatten()}
    return values, model[1].num_batches_tracked.item() >= dist.get_rank()


def test_weights_and_floating_buffers_become_the_mean(ranks):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert ranks(3, average_what_nobody_trains, dtype) == [({1.0}, True)] * 3, dtype


# Steps that differ between ranks, and steps with extras.


@training.with_group
def uneven_steps():
    model, optimizer = wrapped()
    train_until(model, optimizer, 2 if dist.get_rank() == 0 else 8)
    own = averages(model)
    model.bagua_algorithm.abort(model)
    return own, averages(model)


def test_a_rank_with_fewer_steps_waits_in_abort_and_goes_on_averaging(ranks):
    (own, total), (_, other_total) = ranks(2, uneven_steps)
    assert own >= 2
    assert total == other_total >= 8


@training.with_group
def steps_with_extras():
    model, optimizer = wrapped()
    # Two good steps double the scale that the skipped one halves: it stays, and training too.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    rank = dist.get_rank()
    number = 0
    while averages(model) < 6 and number < 20000:
        optimizer.zero_grad()
        with model.no_sync():
            scaler.scale(training.squared_error(model, training.batch(number, rank))).backward()
        loss = training.squared_error(model, training.batch(number + 1, rank))
        if number % 3 == 0 and rank == 0:
            loss = loss * float("inf")  # this rank alone skips the step
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            model.eval()
            model(training.batch(number, rank)[0])
            model.train()
        number += 1
    model.bagua_algorithm.abort(model)
    return averages(model), bool(weights_of(model).isfinite().all())


def test_accumulation_scaling_skipped_steps_and_evaluation_do_not_hold_it_up(ranks):
    for count, finite in ranks(2, steps_with_extras):
        assert count >= 6
        assert finite


@training.with_group
def weights_during_a_step():
    """Whether any weight changed between a forward and the end of its step but by the step."""
    model, optimizer = wrapped(lr=0.0, interval_ms=0)
    with torch.no_grad():
        next(model.parameters()).add_(dist.get_rank())
    changed = 0
    for number in range(60):
        optimizer.zero_grad()
        loss = training.squared_error(model, training.batch(number, dist.get_rank()))
        before = weights_of(model)
        time.sleep(0.003)
        loss.backward()
        changed += not torch.equal(before, weights_of(model))
        optimizer.step()
        with torch.no_grad():  # another value each step, so that averages show
            next(model.parameters()).add_(dist.get_rank() + 1)
    count = averages(model)
    model.bagua_algorithm.abort(model)
    return changed, count


def test_weights_do_not_change_from_forward_to_step(ranks):
    for changed, count in ranks(2, weights_during_a_step):
        assert changed == 0
        assert count >= 10


@training.with_group
def buffer_that_is_replaced():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model, optimizer = wrapped(model, lr=0.0)
    model[1].momentum = 0.0
    rank = dist.get_rank()
    model[1].running_mean = torch.full((4,), float(rank))  # another tensor, not in the bucket
    while averages(model) < 3:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    model.bagua_algorithm.abort(model)
    return model[1].running_mean.tolist()


def test_a_buffer_that_was_replaced_is_taken_back(ranks):
    assert ranks(2, buffer_that_is_replaced) == [[0.5] * 4] * 2
