"""Streams: results wait for slow kernels wherever these run, and the host does not wait for them.

`delay` keeps a stream busy for a tenth of a second, so that whoever does not wait for it reads what
was there before. On CPU the same bodies run without streams.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from support import training
from support.devices import cases_on_each, delay, each_device, side_stream
from support.every_algorithm import CODECS, SYNCHRONOUS, wrapped
from support.threads.engine_ranks import alone, plan
from torch import nn

STEPS = 4


@each_device
def test_a_lane_waits_for_every_stream_that_filled_its_bucket(device):
    """And what it did is there for the stream that calls wait(), the default one or another."""
    flat, copied = (torch.zeros(2000, device=device) for _ in range(2))
    count = torch.zeros((), dtype=torch.int64)

    def copy_on_the_lane(comm):
        return [_C.AverageWeights(copied, count, _C.AllReduce(comm, _C.ReduceOp.SUM))]

    engine = alone(plan("b", flat, ops=copy_on_the_lane))
    for value in (1.0, 2.0, 3.0, 4.0):
        engine.begin_round()
        for slot in (0, 1):
            with side_stream(device):
                delay(device)
                flat[1000 * slot : 1000 * (slot + 1)] = value
                engine.mark_ready(slot)
        with side_stream(device if value > 2 else "cpu"):
            engine.wait()
            seen = copied.clone()
            assert seen.tolist() == [value] * 2000
    assert count.item() == 4


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        delay(gradient.device)
        return gradient.clone()


class Slow(nn.Module):
    """A network whose first layers' gradients come late."""

    def __init__(self):
        super().__init__()
        self.layers = training.network()

    def forward(self, x):
        return self.layers[2](SlowGradient.apply(torch.tanh(SlowGradient.apply(self.layers[0](x)))))


class Plain(Slow):
    def forward(self, x):
        return self.layers(x)


def on_stream(kind):
    """Where training runs: "default", or a "side" stream."""
    return side_stream(training.device() if kind == "side" else "cpu")


@training.with_group
def train(name, network, kind):
    with on_stream(kind):
        model, optimizer = wrapped(name, {"slow": Slow, "plain": Plain}[network]())
        seen = []
        for step in range(STEPS):
            training.train(model, optimizer, [training.batch(step, dist.get_rank())])
            seen.append(training.bits(model.parameters()))
        dist.barrier()  # a rank that leaves would fail the last, streamed round of a slower one
        return seen


@cases_on_each(
    "device",
    name=[*CODECS, *SYNCHRONOUS],
    kind=["default", "side"],
)
def test_late_gradients_give_the_bits_of_early_ones(ranks, name, kind, device):
    env = training.on_device(device) | training.SMALL_BUCKETS
    late = ranks(3, train, name, "slow", kind, env=env)
    assert late == ranks(3, train, name, "plain", "default", env=env)


@training.with_group
def write_gradients_by_hand(kind):
    """Gradients that the caller's stream scales late, between backward and step, are the scaled."""
    model, alone = training.network(), training.network()
    optimizer, own = training.sgd(model), training.sgd(alone)
    model.with_bagua([optimizer], training.algorithm("exact"))
    with on_stream(kind):
        for step in range(STEPS):
            whole = training.whole_batch(step, dist.get_world_size())
            mine = training.batch(step, dist.get_rank())
            for trained, trainer, data in ((model, optimizer, mine), (alone, own, whole)):
                trainer.zero_grad()
                training.squared_error(trained, data).backward()
                delay(training.device())
                for p in trained.parameters():
                    p.grad.mul_(0.5)
                trainer.step()
            training.assert_ranks_agree(model)
    training.assert_close(model, alone)
    return True


@each_device
@pytest.mark.parametrize("kind", ["default", "side"])
def test_work_on_gradients_after_backward_is_in_order(ranks, kind, device):
    assert all(ranks(3, write_gradients_by_hand, kind, env=training.on_device(device)))


@training.with_group
def return_early(name):
    """Whether the device was still busy when backward() and a whole step had returned."""
    device = training.device()
    model, optimizer = wrapped(name, Plain())
    for step in range(3):  # connections, buffers and the rebuild of buckets are made here
        training.train(model, optimizer, [training.batch(step, dist.get_rank())])
    expected = copy.deepcopy(model.state_dict())
    data = training.batch(3, dist.get_rank())  # a copy from pageable memory waits for the device
    torch.accelerator.synchronize(device)
    optimizer.zero_grad()
    delay(device, 2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    training.squared_error(model, data).backward()
    after_backward = not busy.query()
    optimizer.step()
    after_step = not busy.query()
    torch.accelerator.synchronize(device)
    moved = any(not torch.equal(p, expected[key]) for key, p in model.state_dict().items())
    return after_backward, after_step, moved


@pytest.mark.needs_cuda
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad"])
def test_backward_returns_while_the_device_is_busy(ranks, name, n):
    """One rank: nothing is sent, and the host has nothing to wait for."""
    if torch.cuda.device_count() < n:
        pytest.skip("one GPU only: NCCL takes one rank on each")
    env = {"TEST_DEVICE": "cuda"}
    assert ranks(n, return_early, name, env=env, fresh=True) == [(True, True, True)] * n
