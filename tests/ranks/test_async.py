"""Asynchronous model averaging on ranks: warm-up, averages during training, abort and resume."""

import time

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    GradientAllReduceAlgorithm,
)
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import faults, training
from support.async_training import averages, step, train_until, weights_of, wrapped
from support.cases import over
from torch import nn


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


@over(case=[(2, 4), (3, 1), (4, 0)])
def test_after_an_exact_warm_up_weights_are_averaged_while_training_goes_on(ranks, case):
    n, warmup_steps = case
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
    rank = float(dist.get_rank())
    norm = nn.BatchNorm1d(7)
    model = nn.Sequential(nn.Linear(3, 7), norm).to(dtype)
    model.append(Half(7, 2).bfloat16())
    model, optimizer = wrapped(model, lr=0.0)
    with torch.no_grad():
        for tensor in [*model.parameters(), norm.running_var]:
            tensor.fill_(rank)
    norm.running_mean = torch.full_like(norm.running_mean, rank)  # another one, in no bucket
    norm.num_batches_tracked.fill_(rank)
    norm.momentum = 0.0
    inputs = torch.randn(4, 3, dtype=dtype)
    while averages(model) < 3:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    model.bagua_algorithm.abort(model)
    averaged = [*model.parameters(), norm.running_mean, norm.running_var]
    values = {value.item() for tensor in averaged for value in tensor.flatten()}
    return values, norm.num_batches_tracked.item() >= rank


@over(dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_weights_and_floating_buffers_become_the_mean(ranks, dtype):
    assert ranks(3, average_what_nobody_trains, dtype) == [({1.0}, True)] * 3


class NewMemory(torch.optim.SGD):
    """Gives weights new memory in each step, as `p.data = p.data - lr * p.grad` does."""

    def step(self, closure=None):
        super().step(closure)
        replace(self.param_groups[0]["params"])


def replace(tensors):
    for tensor in tensors:
        tensor.data = tensor.detach().clone()


class Renewed(nn.Linear):
    """Gives its weight new memory in each forward, and its buffer another object."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.weight.data = self.weight.data.clone()
        self.seen = self.seen.clone()
        return super().forward(x)


def step_of_ones(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


@training.with_group
def average_where_memory_is_new(place):
    model = Renewed() if place == "forward" else nn.Linear(3, 2)
    optimizer = (NewMemory if place == "step" else torch.optim.SGD)(model.parameters(), lr=0.0)
    seen = ["seen"] if place == "forward" else []
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=1, mean_buffers=seen)
    model.with_bagua([optimizer], algorithm)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(dist.get_rank())
    while averages(model) < 6:
        step_of_ones(model, optimizer)
        if place == "between":
            replace(model.parameters())
            time.sleep(0.005)  # for averages that go to the memory that the weights have left
    model.bagua_algorithm.abort(model)
    tensors = [*model.parameters(), *model.buffers()]
    return {value for tensor in tensors for value in tensor.unique().tolist()}


class Inherited(torch.optim.SGD):
    """Goes on after the step of the class that it inherits."""

    def step(self, closure=None):
        super().step(closure)
        self.inside = self.lane.inside


@training.with_group
def gate_in_an_inherited_step():
    model = nn.Linear(3, 2)
    optimizer = Inherited(model.parameters(), lr=0.0)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=1))
    optimizer.lane = model.bagua_ddp._running.lane
    step_of_ones(model, optimizer)
    inside = optimizer.inside, optimizer.lane.inside
    model.bagua_algorithm.abort(model)
    return inside


def test_no_average_comes_between_an_inherited_step_and_its_end(ranks):
    assert ranks(2, gate_in_an_inherited_step) == [(True, False)] * 2


@over(place=["step", "forward", "between"])
def test_averages_reach_weights_that_training_gives_new_memory(ranks, place):
    first, second = ranks(2, average_where_memory_is_new, place)
    assert first == second
    assert len(first) == 1


@training.with_group
def end_with_a_queue():
    model = nn.Linear(3, 2)
    model.register_buffer("queue", torch.zeros(2))
    model.register_parameter("slow", nn.Parameter(torch.zeros(2), requires_grad=False))
    model, optimizer = wrapped(model, lr=0.0)
    queues = set()
    while averages(model) < 3:
        step_of_ones(model, optimizer)
        model.queue.fill_(dist.get_rank() + 1)
        model.slow.data = torch.full((2,), float(dist.get_rank()))
        queues.add(model.queue[0].item())
    model.bagua_algorithm.abort(model)
    return queues, model.queue.tolist(), model.slow.tolist()


def test_the_end_gives_the_first_ranks_buffers_and_the_mean_of_frozen_weights(ranks):
    ended = ([1.0, 1.0], [0.5, 0.5])
    assert ranks(2, end_with_a_queue) == [({1.0}, *ended), ({2.0}, *ended)]


@training.with_group
def uneven_steps():
    model, optimizer = wrapped()
    train_until(model, optimizer, 8 if dist.get_rank() else 2)
    if dist.get_rank() == 0:
        model(training.batch(0, 0)[0])  # an exception ends the loop in the middle of a step
    own = averages(model)
    model.bagua_algorithm.abort(model)
    return own, averages(model)


def test_a_rank_that_leaves_its_loop_early_waits_in_abort_and_goes_on_averaging(ranks):
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
def held_weights(how):
    """Steps in which weights changed after the first forward, averages, and weights at the end."""
    model = training.network()
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if how == "class":
        model = DistributedDataParallel(model, algorithm=algorithm)
    else:
        model = model.with_bagua([optimizer] if how == "optimizers" else [], algorithm)
    changed = 0
    for number in range(60):
        optimizer.zero_grad()
        losses = [
            training.squared_error(model, training.batch(number, dist.get_rank())) for _ in range(2)
        ]
        held = weights_of(model)
        time.sleep(0.003)
        sum(losses).backward()
        changed += not torch.equal(held, weights_of(model))
        optimizer.step()
        with torch.no_grad():  # another value each step, so that averages show
            next(model.parameters()).add_(dist.get_rank() + 1)
    count = averages(model)
    algorithm.abort(model)
    algorithm.resume(model)
    train_until(model, optimizer, averages(model) + 2)
    algorithm.abort(model)
    return changed, count, weights_of(model).tolist()


@over(how=["optimizers", "no optimizers", "class"])
def test_weights_do_not_change_from_the_first_forward_to_the_last_backward(ranks, how):
    (changed, count, weights), (also_changed, _, others) = ranks(2, held_weights, how)
    assert changed == also_changed == 0
    assert count >= 10
    assert weights == others


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
def load_in_a_longer_warm_up(averaging):
    """Whether averaging has begun after a step, and how far the weights are from this rank's."""
    model, optimizer = wrapped(warmup_steps=5, interval_ms=100_000)
    model.bagua_algorithm.load_state_dict({"warmed_up": 2, "averaging": averaging})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(dist.get_rank())
    step(model, optimizer)
    begun = model.bagua_algorithm.state_dict()["averaging"]
    distance = max(float((p - dist.get_rank()).abs().max()) for p in model.parameters())
    model.bagua_algorithm.abort(model)
    return begun, distance


def test_a_warm_up_that_was_over_is_over_where_it_is_longer_now(ranks):
    for begun, distance in ranks(2, load_in_a_longer_warm_up, 1):
        assert begun == 1
        # The first average may have come; what rank 0 has would be at a distance of 1 from rank 1.
        assert distance < 0.8, "each rank goes on with its weights"
    assert [begun for begun, _ in ranks(2, load_in_a_longer_warm_up, 0)] == [0, 0]


@training.with_group
def switch_to_exact():
    model, optimizer = wrapped()
    train_until(model, optimizer, 2)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    # Asserts that ranks agree.
    return training.warnings_of(lambda: training.train_on_ranks(model, optimizer))


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
    for arguments, words in [
        (("shift_one", 500, 0), "'all' only, not 'shift_one'"),
        (("all", -1, 0), "sync_interval_ms=-1 must be 0 or more"),
        (("all", 500, -1), "warmup_steps=-1 must be 0 or more"),
    ]:
        with pytest.raises(ValueError, match=words):
            AsyncModelAverageAlgorithm(*arguments)
    assert isinstance(Algorithm.init("async"), AsyncModelAverageAlgorithm)
