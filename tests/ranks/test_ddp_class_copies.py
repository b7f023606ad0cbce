"""Copies, pickles and the end of a DistributedDataParallel."""

import copy
import gc
import io
import pickle
from pathlib import Path

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import AsyncModelAverageAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from ranks import training
from torch import nn


def normalised(seed=0):
    """A model with buffers; each rank starts from weights of its own."""
    torch.manual_seed(seed + dist.get_rank())
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def backward_of(model):
    training.squared_error(model, training.batch(0, dist.get_rank())).backward()


@training.with_group
def copies():
    ddp = DistributedDataParallel(normalised())
    backward_of(ddp)
    twins = [copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))]
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    twins.append(torch.load(file, weights_only=False))
    averaged = torch.optim.swa_utils.AveragedModel(ddp)
    averaged.update_parameters(ddp)
    twins.append(averaged.module)
    rounds = ddp.bagua_stats()["rounds"]
    for twin in twins:
        assert training.bits(twin.parameters()) == training.bits(ddp.parameters())
        with pytest.raises(RuntimeError, match="is a copy or was unpickled, and does not"):
            backward_of(twin)
        assert twin.eval()(torch.zeros(1, 5)).shape == (1, 3)
        with torch.no_grad():
            twin.train()(torch.zeros(2, 5))
        again = DistributedDataParallel(twin.module)
        backward_of(again)
        training.assert_ranks_agree(again)
    assert ddp.bagua_stats()["rounds"] == rounds
    backward_of(ddp)
    training.assert_ranks_agree(ddp)


def test_copies_do_not_train_unsynchronised(ranks):
    ranks(2, copies)


@training.with_group
def deleted():
    ddp = DistributedDataParallel(normalised())
    backward_of(ddp)
    inner = ddp.module
    assert any(thread.startswith("bagua-lane") for thread in lane_threads())
    gc.disable()
    try:
        del ddp
        lanes = [t for t in lane_threads() if t.startswith("bagua-lane")]
    finally:
        gc.enable()
    backward_of(inner)
    return lanes, len(set(training.gather(training.bits(p.grad for p in inner.parameters()))))


def lane_threads():
    return [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]


def test_deleting_the_wrapper_frees_its_threads_and_leaves_the_module(ranks):
    assert ranks(2, deleted) == [([], 2)] * 2


@training.with_group
def asynchronous():
    model = normalised()
    optimizer = training.sgd(model)
    ddp = DistributedDataParallel(
        model, optimizers=[optimizer], algorithm=AsyncModelAverageAlgorithm(sync_interval_ms=10)
    )
    for step in range(5):
        optimizer.zero_grad()
        training.squared_error(ddp, training.batch(step, dist.get_rank())).backward()
        optimizer.step()
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert not twin.module._forward_pre_hooks
    ddp.bagua_algorithm.abort(ddp)
    before = copy.deepcopy(model.state_dict())
    mean = bagua.average_weights(ddp)
    assert type(mean) is nn.Sequential
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return len(set(training.gather(training.bits(mean.parameters()))))


def test_asynchronous_averaging_in_the_class(ranks):
    assert ranks(2, asynchronous) == [1, 1]
