"""When buffers are synchronised, and by what: beside torch's DistributedDataParallel."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


class Stamped(nn.Module):
    """Notes what its buffer was in each forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("stamp", torch.zeros(1))
        self.seen = []

    def forward(self, x):
        self.seen.append(self.stamp.item())
        return self.linear(x)


# Each word is a forward: t(rain), e(val with gradients), n(o_grad), a(ccumulation under no_sync).
# Before each, every rank writes a number of its own into the buffer.
SEQUENCES = ["tttt", "tnnt", "tntn", "ttaat", "eeee", "tneat"]


def run(wrap, sequence):
    torch.manual_seed(0)
    ddp = wrap(Stamped())
    rank = dist.get_rank()
    after = []
    for step, kind in enumerate(sequence):
        ddp.module.stamp.fill_(10 * step + rank)
        ddp.train(kind != "e")
        inputs = training.batch(step, rank)[0]
        if kind == "n":
            with torch.no_grad():
                ddp(inputs)
        elif kind == "a":
            with ddp.no_sync():
                ddp(inputs).sum().backward()
        else:
            ddp(inputs).sum().backward()
        after.append(ddp.module.stamp.item())
    return ddp.module.seen, after, [p.grad.clone() for p in ddp.parameters()]


def compare(sequence):
    mine = run(DistributedDataParallel, sequence)
    theirs = run(TorchDDP, sequence)
    assert mine[0] == theirs[0], "in the forwards"
    assert mine[1] == theirs[1], "after them"
    for p, q in zip(mine[2], theirs[2], strict=True):
        torch.testing.assert_close(p, q)


@training.with_group
def moments(sequence):
    compare(sequence)


@pytest.mark.parametrize("n", [2, 3], ids="{}_ranks".format)
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_buffers_are_broadcast_when_torch_does(ranks, n, sequence):
    ranks(n, moments, sequence)


@training.with_group
def switched():
    answers = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(Stamped())
        ddp.forward_sync_buffers = False
        rank = dist.get_rank()
        for _ in range(2):
            ddp.module.stamp.fill_(rank)
            ddp(training.batch(0, rank)[0]).sum().backward()
        answers.append((ddp.module.seen, ddp.broadcast_buffers, ddp.will_sync_module_buffers()))
        ddp.broadcast_buffers = True
        ddp(training.batch(0, rank)[0])
        answers[-1] += (ddp.module.stamp.item(),)
    assert answers[0] == answers[1]
    return answers[0]


def test_the_broadcast_can_be_switched_off_and_on(ranks):
    assert ranks(2, switched) == [
        ([0.0, 0.0, 0.0], False, False, 0.0),
        ([1.0, 1.0, 0.0], False, False, 0.0),
    ]
