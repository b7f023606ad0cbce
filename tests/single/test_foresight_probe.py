"""What the probes of a profile measure: steps, speeds, and links between thread ranks."""

import time

import pytest
import torch
from bagua import _C
from bagua._foresight.probe import speeds
from bagua._foresight.probe.links import link_of, round_of
from bagua._foresight.probe.steps import StepProbe
from support.threads.thread_ranks import run_thread_ranks


class Slow(torch.autograd.Function):
    """The identity, whose backward takes 4 ms."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.004)
        return gradient


def train(probe, first, second):
    steps = 0
    while not probe.done:
        probe.step_begins()
        y = second(Slow.apply(first(torch.ones(1, 4))))
        y.sum().backward()
        time.sleep(0.002)
        steps += 1
    return steps


def test_a_probe_finds_when_gradients_are_ready_and_what_follows_them():
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    named = [
        (f"{n}.{m}", p)
        for n, one in (("a", first), ("b", second))
        for m, p in one.named_parameters()
    ]
    probe = StepProbe(named)
    steps = train(probe, first, second)
    assert steps < 20
    times = probe.times()
    assert set(times.ready) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    # Backward reaches the second layer first; the first one's gradients come later.
    assert times.ready["a.weight"] > times.ready["b.weight"]
    assert times.optimizer > 0
    assert times.compute >= 0.006
    assert all(0 < at <= times.compute for at in times.ready.values())
    assert not any(p._post_accumulate_grad_hooks for _, p in named)


def test_time_in_which_communication_blocks_does_not_count():
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    seconds = iter(range(1000))  # another second in each step, all of it and more
    probe = StepProbe(list(first.named_parameters()), lambda: float(next(seconds)))
    train(probe, first, second)
    assert probe.times().compute < 0.006


def test_speeds_are_those_of_the_work_that_is_done():
    assert 1e8 < speeds.copy_speed(numel=1 << 18) < 1e12
    speed = speeds.codec_speed("int4_block", 1 << 16)
    assert min(speed.encode, speed.decode, speed.decode_add) > 1e7
    assert speeds.top_k_speed(1 << 16) > 1e6


def test_ranks_agree_on_their_link():
    def measure(comm):
        return link_of(comm), round_of(comm), speeds.low_rank_speed(comm, 64, 64)

    found = run_thread_ranks(2, measure)
    assert found[0][:2] == found[1][:2]
    link, agreement, low_rank = found[0]
    assert link.bandwidth > 1e6
    assert link.messages > 1e6
    assert 0 <= link.processor <= 1 / link.bandwidth
    assert 0 <= link.wake < 0.1
    assert agreement > 0
    assert low_rank > 0


def test_a_link_needs_two_ranks():
    alone = _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
    with pytest.raises(ValueError, match="a link needs two ranks"):
        link_of(alone)
    assert speeds.low_rank_speed(alone, 8, 8) == 0.0
