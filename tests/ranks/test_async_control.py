"""Asynchronous model averaging on ranks: abort, resume, what ends early and what does not fit."""

import time

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.torch_api.algorithms.async_model_average import (
    AsyncModelAverageAlgorithm,
)
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import faults, training
from support.async_training import averages, step, train_until, weights_of, wrapped
from torch import nn


@training.with_group
def abort_and_resume():
    model, optimizer = wrapped()
    algorithm = model.bagua_algorithm
    algorithm.abort(model)  # before anything began
    algorithm.resume(model)
    counts = []
    for _ in range(3):
        train_until(model, optimizer, averages(model) + 2)
        algorithm.abort(model)
        algorithm.abort(model)
        counts.append(averages(model))
        for number in range(5):
            step(model, optimizer, number)
        time.sleep(0.02)
        assert averages(model) == counts[-1], "averages went on after abort"
        algorithm.resume(model)
        algorithm.resume(model)
    train_until(model, optimizer, averages(model) + 1)
    algorithm.abort(model)
    return counts


def test_abort_ends_averaging_and_resume_goes_on_again_and_again(ranks):
    first, second, third = ranks(3, abort_and_resume)
    assert first == second == third
    assert first[0] < first[1] < first[2]


@training.with_group
def abort_in_the_warm_up():
    model, optimizer = wrapped(warmup_steps=3)
    step(model, optimizer)
    model.bagua_algorithm.abort(model)
    for number in range(6):
        step(model, optimizer, number)
    time.sleep(0.05)
    quiet = averages(model)
    model.bagua_algorithm.resume(model)
    train_until(model, optimizer, 2)
    model.bagua_algorithm.abort(model)
    return quiet, averages(model)


def test_after_abort_in_the_warm_up_averaging_begins_with_resume_only(ranks):
    for quiet, count in ranks(2, abort_in_the_warm_up):
        assert quiet == 0
        assert count >= 2


@training.with_group
def leave_the_loop_by_an_exception():
    model, optimizer = wrapped()
    train_until(model, optimizer, 2)
    if dist.get_rank() == 0:
        try:
            model(training.batch(0, 0)[0])
            raise KeyError("in the middle of a step")
        except KeyError:
            pass
    else:
        train_until(model, optimizer, averages(model) + 1)
    model.bagua_algorithm.abort(model)
    return averages(model)


def test_a_loop_left_by_an_exception_can_be_aborted(ranks):
    first, second = ranks(2, leave_the_loop_by_an_exception)
    assert first == second >= 3


@training.with_group
def switch_to_exact():
    model, optimizer = wrapped()
    train_until(model, optimizer, 2)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    caught = training.warnings_of(
        lambda: training.train_on_ranks(model, optimizer)  # asserts that ranks agree
    )
    return caught


def test_another_algorithm_takes_over_without_abort(ranks):
    assert ranks(2, switch_to_exact) == [[]] * 2


@training.with_group
def average_for_export():
    model, optimizer = wrapped()
    train_until(model, optimizer, 2)
    for number in range(3):
        step(model, optimizer, number)
    averaged = bagua.average_weights(model)
    model.bagua_algorithm.abort(model)
    return training.bits(averaged.parameters()), type(averaged) is nn.Sequential


def test_the_mean_for_export_is_the_same_on_all_ranks_while_averaging_runs(ranks):
    first, second = ranks(2, average_for_export)
    assert first == second
    assert first[1]


# What does not fit.


@faults.with_bagua_group
def one_rank_goes_without_abort():
    model, optimizer = wrapped()
    train_until(model, optimizer, 2)
    faults.barrier_of_store("trained")
    if faults.is_last():
        caught = training.warnings_of(lambda: model.bagua_ddp.close())
        faults.barrier_of_store("failed")
        return caught
    error, _ = faults.steps_until_error(model, optimizer, most=100000)
    again = faults.error_of(lambda: faults.step(model, optimizer))
    model.bagua_algorithm.abort(model)  # quietly: the error is known
    faults.barrier_of_store("failed")
    return [error, again]


def test_a_rank_that_goes_without_abort_warns_and_the_others_say_who(ranks):
    errors, caught = ranks(2, one_rank_goes_without_abort)
    assert len(caught) == 1
    assert "asynchronous averaging was still running" in caught[0]
    assert "Call model.bagua_algorithm.abort(model) on every rank" in caught[0]
    for error in errors:
        assert error.startswith("BaguaError: rank 1 exited after ")
        assert "Every rank must call abort(model) before it ends" in error


@faults.with_bagua_group
def copied_layout():
    return faults.error_of(wrapped, do_flatten=False)


def test_do_flatten_false_is_refused(ranks):
    for error in ranks(2, copied_layout):
        assert error == "ValueError: asynchronous averaging needs do_flatten=True"


def test_arguments_that_make_no_sense_are_refused_by_name():
    cases = [
        (("shift_one", 500, 0), "'all' only, not 'shift_one'"),
        (("all", -1, 0), "sync_interval_ms=-1 must be 0 or more"),
        (("all", 500, -1), "warmup_steps=-1 must be 0 or more"),
    ]
    for arguments, words in cases:
        with pytest.raises(ValueError, match=words):
            AsyncModelAverageAlgorithm(*arguments)
    assert isinstance(Algorithm.init("async"), AsyncModelAverageAlgorithm)


@training.with_group
def without_optimizers(by_class):
    """Averages until 5 of them, with a gate that no step's end opens."""
    model = training.network()
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        next(model.parameters()).add_(dist.get_rank())
    if by_class:
        model = DistributedDataParallel(model, algorithm=algorithm)
    else:
        model = model.with_bagua([], algorithm)
    train_until(model, optimizer, 5)
    changed = 0
    for number in range(30):  # two forwards, and weights that stay until both backwards are through
        losses = [
            training.squared_error(model, training.batch(number, dist.get_rank())) for _ in range(2)
        ]
        held = weights_of(model)
        time.sleep(0.003)
        sum(losses).backward()
        changed += not torch.equal(held, weights_of(model))
    algorithm.abort(model)
    quiet = averages(model)
    step(model, optimizer)
    time.sleep(0.02)
    assert averages(model) == quiet
    algorithm.resume(model)
    train_until(model, optimizer, quiet + 2)
    algorithm.abort(model)
    return changed, weights_of(model).tolist()


@pytest.mark.parametrize("by_class", [False, True], ids=["with_bagua", "class"])
def test_without_optimizers_averages_are_applied_between_steps(ranks, by_class):
    (changed, weights), (also_changed, others) = ranks(2, without_optimizers, by_class)
    assert changed == also_changed == 0
    assert weights == others
