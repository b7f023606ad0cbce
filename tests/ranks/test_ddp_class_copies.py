"""Copies, pickles and the end of a DistributedDataParallel."""

import copy
import gc
import io
import pickle

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import AsyncModelAverageAlgorithm, ByteGradAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from ranks.test_ddp_class import backward_of, normalised
from support import training
from support.processes.thread_names import thread_names
from torch import nn


def copied(ddp):
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    averaged = torch.optim.swa_utils.AveragedModel(ddp)
    averaged.update_parameters(ddp)
    return [
        copy.deepcopy(ddp),
        pickle.loads(pickle.dumps(ddp)),
        torch.load(file, weights_only=False),
        averaged.module,
    ]


@training.with_group
def copies():
    algorithm = ByteGradAlgorithm(hierarchical=False)
    ddp = DistributedDataParallel(normalised(), find_unused_parameters=True, algorithm=algorithm)
    backward_of(ddp)
    rounds = ddp.bagua_stats()["rounds"]
    grads = []
    for twin in copied(ddp):
        assert isinstance(twin, DistributedDataParallel)
        assert training.bits(twin.parameters()) == training.bits(ddp.parameters())
        with torch.no_grad():
            twin.train()(torch.zeros(2, 5))
        twin.zero_grad()
        with twin.no_sync():
            backward_of(twin)
        twin.zero_grad()
        backward_of(twin)
        grads.append(training.bits(p.grad for p in twin.parameters()))
        assert len(set(training.gather(grads[-1]))) == 1
        assert twin.bagua_stats()["rounds"] == 1
        assert type(twin.bagua_algorithm) is type(ddp.bagua_algorithm)
        assert twin.find_unused_parameters == ddp.find_unused_parameters
        backward_of(copy.deepcopy(twin))
    assert ddp.bagua_stats()["rounds"] == rounds
    assert len(set(grads)) == 1
    backward_of(ddp)
    training.assert_ranks_agree(ddp)


def test_copies_train_synchronised(ranks):
    ranks(2, copies)


@training.with_group
def evaluated():
    """Copies that one rank may evaluate alone: nothing of them waits for another rank."""
    twin = copy.deepcopy(DistributedDataParallel(normalised())).eval()
    if dist.get_rank() == 1:
        inputs = torch.zeros(1, 5, requires_grad=True)
        (saliency,) = torch.autograd.grad(twin(inputs).sum(), inputs)
        assert saliency.shape == (1, 5)
        with pytest.raises(RuntimeError, match=r"is a copy or was unpickled, .* call train"):
            twin(inputs).sum().backward()
    dist.barrier()
    halves = [dist.new_group([0]), dist.new_group([1])]
    part = DistributedDataParallel(normalised(), process_group=halves[dist.get_rank()])
    with pytest.raises(RuntimeError, match="process group was not the default one: train Distr"):
        backward_of(copy.deepcopy(part))


def test_a_copy_that_cannot_train_says_so(ranks):
    ranks(2, evaluated)


@training.with_group
def deleted():
    ddp = DistributedDataParallel(normalised())
    backward_of(ddp)
    inner = ddp.module
    assert any(name.startswith("bagua-lane") for name in thread_names())
    gc.disable()
    try:
        del ddp
        lanes = [name for name in thread_names() if name.startswith("bagua-lane")]
    finally:
        gc.enable()
    backward_of(inner)
    return lanes, len(set(training.gather(training.bits(p.grad for p in inner.parameters()))))


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
