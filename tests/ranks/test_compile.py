"""torch.compile and the wrappers: either way round, the training is the uncompiled one.

Inductor: tests/deep/test_compiled_ways.py.
"""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
)
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training
from support.cases import over

ALGORITHMS = {
    "exact": lambda: GradientAllReduceAlgorithm(),
    "bytegrad": lambda: ByteGradAlgorithm(hierarchical=False),
    "decentralized": lambda: DecentralizedAlgorithm(hierarchical=False),
}


def plain(model, backend):
    return model


def compiled(model, backend):
    return torch.compile(model, backend=backend)


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model


def whole_graph(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=True)


def by_regions(model, backend):
    for i, child in enumerate(model):
        model[i] = torch.compile(child, backend=backend)
    return model


def with_bagua(model, optimizer, algorithm):
    return model.with_bagua([optimizer], algorithm)


def by_class(model, optimizer, algorithm):
    return DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm)


#: What becomes of the model, how it is wrapped, and what becomes of the wrapper.
WAYS = {
    "compiled_wrap": (plain, with_bagua, compiled),
    "wrapped_compiled": (compiled, with_bagua, plain),
    "ddp_of_compiled": (compiled, by_class, plain),
    "compiled_ddp": (plain, by_class, compiled),
    "compiled_in_place": (compiled_in_place, with_bagua, plain),
    "whole_graph": (whole_graph, with_bagua, plain),
    "by_regions": (by_regions, with_bagua, plain),
}


def trained(model, optimizer):
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            with model.no_sync():
                training.squared_error(model, training.batch(9, dist.get_rank())).backward()
        training.squared_error(model, training.batch(step, dist.get_rank())).backward()
        optimizer.step()
    return model


@training.with_group
def train(way, name, backend):
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    torch._dynamo.reset()
    expected, model = training.network(), training.network()
    optimizer = training.sgd(expected)
    trained(with_bagua(expected, optimizer, ALGORITHMS[name]()), optimizer)

    optimizer, counted = training.sgd(model), CompileCounterWithBackend(backend)
    before, wrap, after = WAYS[way]
    model = wrap(before(model, counted), optimizer, ALGORITHMS[name]())
    model = trained(after(model, counted), optimizer)
    training.assert_close(model, expected, rtol=1e-4, atol=1e-5)
    if name != "decentralized":
        training.assert_ranks_agree(model)
    graphs = counted.frame_count
    with torch.no_grad():
        model.eval()(training.batch(0, 0)[0])
    return model.bagua_stats()["rounds"], graphs


def assert_compiled_is_uncompiled(ranks, way, name):
    for rounds, graphs in ranks(2, train, way, name, "eager", timeout=120.0):
        assert rounds == 3
        expected = 3 if way == "by_regions" else 1
        assert graphs == expected, "the model is one graph, and is not compiled again"


def assert_a_compiled_backward_communicates(ranks, way):
    for rounds, graphs in ranks(3, train, way, "exact", "aot_eager", timeout=120.0):
        assert (rounds, graphs) == (3, 3 if way == "by_regions" else 1)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_training_is_the_uncompiled(ranks, way):
    assert_compiled_is_uncompiled(ranks, way, "exact")


@over(name=["bytegrad", "decentralized"])
def test_compiled_training_of_an_algorithm_is_the_uncompiled(ranks, name):
    assert_compiled_is_uncompiled(ranks, "compiled_wrap", name)


@over(way=["wrapped_compiled", "by_regions"])
def test_a_compiled_backward_communicates_too(ranks, way):
    assert_a_compiled_backward_communicates(ranks, way)


@training.with_group
def whole_graph_of_a_wrapped_module():
    model = training.network().with_bagua([], GradientAllReduceAlgorithm())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    try:
        compiled(training.batch(0, dist.get_rank())[0])
    except Exception as error:  # noqa: BLE001 - torch's own, of a private type
        return str(error)
    return "nothing"


def test_code_that_cannot_be_one_graph_raises_with_the_remedy(ranks):
    for message in ranks(2, whole_graph_of_a_wrapped_module):
        assert "bagua.wrap(torch.compile(model, fullgraph=True), ...)" in message


@training.with_group
def backward_under_compiled_autograd():
    model = training.network().with_bagua([], GradientAllReduceAlgorithm())
    loss = training.squared_error(model, training.batch(0, dist.get_rank()))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        return training.error_of(loss.backward)


def test_compiled_autograd_is_refused_with_the_remedy(ranks):
    for message in ranks(2, backward_under_compiled_autograd):
        assert "torch._dynamo.config.compiled_autograd = False" in message


@training.with_group
def ignored_names():
    model = training.network(seed=dist.get_rank())
    model._ddp_params_and_buffers_to_ignore = ["2.bias"]
    wrapped = torch.compile(model, backend="eager").with_bagua([], GradientAllReduceAlgorithm())
    trained = [name for name, _ in wrapped.bagua_build_params()]
    return trained, len(set(training.gather(training.bits([model[2].bias]))))


def test_names_to_ignore_are_the_models_also_when_it_is_compiled(ranks):
    trained = ["_orig_mod.0.weight", "_orig_mod.0.bias", "_orig_mod.2.weight"]
    assert ranks(2, ignored_names) == [(trained, 2)] * 2
