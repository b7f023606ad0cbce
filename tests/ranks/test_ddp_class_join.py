"""Uneven inputs: join() with other algorithms. Beside torch: situations/joining.py."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    SparseAlgorithm,
)
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training
from support.cases import over
from torch import nn
from torch.distributed.algorithms.join import Join


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def train(ddp, inputs, **join):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    rank = dist.get_rank()
    with ddp.join(**join):
        for step in range(inputs[rank]):
            optimizer.zero_grad()
            training.squared_error(ddp, training.batch(step, rank)).backward()
            optimizer.step()
    return ddp


@training.with_group
def every_forward_is_no_step(inputs):
    """Evaluation, and a forward whose output is dropped, between steps of only one rank."""
    ddp = DistributedDataParallel(network())
    rank = dist.get_rank()
    with ddp.join():
        for step in range(inputs[rank]):
            with torch.no_grad():
                ddp(training.batch(step, rank)[0])
            ddp(training.batch(step, rank)[0])
            training.squared_error(ddp, training.batch(step, rank)).backward()
    return ddp.bagua_stats()["rounds"]


def test_forwards_without_backward_inside_join_need_no_answer(ranks):
    assert ranks(2, every_forward_is_no_step, (1, 4)) == [4, 4]


@training.with_group
def disabled():
    ddp = DistributedDataParallel(network())
    train(ddp, (2, 2), enable=False)
    training.assert_ranks_agree(ddp)
    averaged = network()
    local = DistributedDataParallel(
        averaged, optimizers=[training.sgd(averaged)], algorithm=DecentralizedAlgorithm(False)
    )
    with pytest.raises(NotImplementedError, match="power_sgd and sparse; with Decentr"):
        local.join()
    train(local, (2, 2), enable=False)
    model = network()
    adam = QAdamOptimizer(model.parameters(), warmup_steps=1)
    momentum = DistributedDataParallel(model, optimizers=[adam], algorithm=QAdamAlgorithm(adam))
    with pytest.raises(NotImplementedError, match="without inputs makes no optimizer step"):
        momentum.join()
    with (
        pytest.raises(NotImplementedError, match="without inputs makes no optimizer step"),
        Join([momentum]),
    ):
        training.squared_error(momentum, training.batch(0, dist.get_rank())).backward()


LOSSY = {
    "power_sgd": lambda: PowerSGDAlgorithm(1, min_compression_rate=1.0, warmup_steps=0),
    "sparse": lambda: SparseAlgorithm(ratio=0.2),
    "bytegrad": lambda: ByteGradAlgorithm(hierarchical=False),
}


@training.with_group
def lossy(name, inputs):
    """Beside ranks that go on with a loss of zero instead of joining."""
    rank = dist.get_rank()
    joined = train(DistributedDataParallel(training.network(), algorithm=LOSSY[name]()), inputs)
    expected = DistributedDataParallel(training.network(), algorithm=LOSSY[name]())
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(max(inputs)):
        optimizer.zero_grad()
        loss = training.squared_error(expected, training.batch(step, rank))
        (loss * float(step < inputs[rank])).backward()
        optimizer.step()
    for p, q in zip(joined.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert len(set(training.gather(training.bits(joined.parameters())))) == 1


@over(name=LOSSY)
def test_ranks_without_inputs_send_zeros_and_accumulated_gradients(ranks, name):
    ranks(3, lossy, name, (3, 1, 2))


def test_join_can_be_disabled_and_is_for_synchronous_gradients_only(ranks):
    ranks(2, disabled)


@training.with_group
def optimizer_state(inputs):
    ddp_model = network()
    optimizer = torch.optim.Adam(ddp_model.parameters())
    ddp = DistributedDataParallel(ddp_model, optimizers=[optimizer])
    rank = dist.get_rank()
    with ddp.join():
        for step in range(inputs[rank]):
            optimizer.zero_grad()
            training.squared_error(ddp, training.batch(step, rank)).backward()
            optimizer.step()
    state = optimizer.state_dict()["state"]
    steps = int(state[0]["step"])
    digest = training.gather(training.bits(entry["exp_avg_sq"] for entry in state.values()))
    training.train_on_ranks(ddp, optimizer)  # asserts that ranks agree
    return steps, len(set(digest))


def test_optimizers_of_the_wrap_go_on_equal_after_join(ranks):
    assert ranks(3, optimizer_state, (1, 3, 0)) == [(3, 1)] * 3
