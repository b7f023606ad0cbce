"""Input that differs between ranks or that cannot be: found at the wrap, by name, on every rank."""

import os

import bagua.torch_api as bagua
import pytest
import torch
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
)
from support import every_algorithm, faults
from support.cases import over
from torch import nn


def _extra_layer(model):
    model.add_module("extra", nn.Linear(3, 3))


def _freeze(model):
    model[0].weight.requires_grad_(False)


def _extra_buffer(model):
    model.register_buffer("counts", torch.zeros(2))


def _ignore(model):
    model._bagua_params_and_buffers_to_ignore = ["0.weight"]


# Another model on the last rank: how it is changed before the wrap, and what the others then read.
MODELS = {
    "shape": (lambda model: model.__setitem__(2, nn.Linear(7, 4)), "parameter 2.weight: (4, 7)"),
    "dtype": (lambda model: model.double(), "parameter 0.weight: (7, 5) torch.float64 cpu"),
    "more-parameters": (_extra_layer, "parameter extra.weight: (3, 3) torch.float32 cpu"),
    "fewer-parameters": (lambda model: model.__delitem__(2), "buffer 1.running_mean"),
    "frozen": (_freeze, "parameter 0.weight: (7, 5) torch.float32 cpu frozen"),
    "buffer": (_extra_buffer, "buffer counts: (2,) torch.float32 cpu"),
    "ignored": (_ignore, "parameter 0.bias: (7,) torch.float32 cpu"),
}


@faults.with_bagua_group
def wrap_another_model(kind):
    model = faults.network()
    if faults.is_last():
        MODELS[kind][0](model)
    return faults.error_of(faults.wrapped, model)


@pytest.mark.parametrize("kind", MODELS)
def test_another_model_on_one_rank_is_found_at_the_wrap(ranks, kind):
    for error in ranks(3, wrap_another_model, kind):
        assert error.startswith("BaguaMismatchError: ranks differ in the model or the arguments")
        assert "First difference: rank 0 has [" in error
        assert f"rank 2 has [{MODELS[kind][1]}" in error
        assert "same model with the same arguments on every rank" in error


# Other arguments on the last rank, and what the others then read.
ARGUMENTS = {
    "algorithm": ({"algorithm": ByteGradAlgorithm(hierarchical=False)}, "ByteGradAlgorithm"),
    "average": ({"algorithm": GradientAllReduceAlgorithm(average=False)}, "'average': False"),
    "do-flatten": ({"do_flatten": False}, "do_flatten=False"),
    "find-unused": ({"find_unused_parameters": True}, "find_unused_parameters=True"),
    "buffers": ({"broadcast_buffers": False}, "broadcast_buffers=False"),
}


@faults.with_bagua_group
def wrap_with_other_arguments(kind):
    return faults.error_of(faults.wrapped, **(ARGUMENTS[kind][0] if faults.is_last() else {}))


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_other_arguments_on_one_rank_are_found_at_the_wrap(ranks, kind):
    for error in ranks(2, wrap_with_other_arguments, kind):
        assert error.startswith("BaguaMismatchError: ranks differ in the model or the arguments")
        assert ARGUMENTS[kind][1] in error.split("rank 1 has")[1]


@faults.with_bagua_group
def wrap_with_another_optimizer():
    model = faults.network()
    kind = torch.optim.Adam if faults.is_last() else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    return faults.error_of(model.with_bagua, [optimizer], GradientAllReduceAlgorithm())


@faults.with_bagua_group
def wrap_with_another_bucket_size():
    if faults.is_last():
        os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = "100"
    return faults.error_of(faults.wrapped)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (wrap_with_another_optimizer, "optimizers ['Adam']"),
        (wrap_with_another_bucket_size, "bucket size 100"),
    ],
    ids=["optimizer", "bucket-size"],
)
def test_another_setting_on_one_rank_is_found_at_the_wrap(ranks, function, words):
    for error in ranks(2, function):
        assert error.startswith("BaguaMismatchError")
        assert words in error.split("rank 1 has")[1]


@faults.with_bagua_group
def wrap_after_a_mismatch():
    options = {"do_flatten": False} if faults.is_last() else {}
    model = faults.network()
    faults.error_of(faults.wrapped, model, **options)
    plain = not hasattr(model, "bagua_ddp")
    model, optimizer = faults.wrapped(model)
    faults.step(model, optimizer)
    return plain, model.bagua_stats()["rounds"]


def test_after_a_mismatch_the_model_is_plain_and_can_be_wrapped(ranks):
    assert ranks(2, wrap_after_a_mismatch) == [(True, 1), (True, 1)]


@faults.with_bagua_group
def sparse_embedding(ignored):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    if ignored:
        model._bagua_params_and_buffers_to_ignore = ["0.weight"]
        model.with_bagua([], GradientAllReduceAlgorithm())
        model(torch.tensor([1, 2])).sum().backward()
        return model[0].weight.grad.is_sparse, model.bagua_stats()["rounds"]
    return faults.error_of(model.with_bagua, [], ByteGradAlgorithm())


def test_sparse_embeddings_are_refused_at_the_wrap_and_can_be_left_out(ranks):
    for error in ranks(2, sparse_embedding, False):
        assert error.startswith("NotImplementedError: '0.weight' has sparse gradients, which ByteG")
        assert "_bagua_params_and_buffers_to_ignore" in error
    assert ranks(2, sparse_embedding, True) == [(True, 1), (True, 1)]


class SparseByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(10, 4))

    def forward(self, index):
        return nn.functional.embedding(index, self.table, sparse=True)


@faults.with_bagua_group
def sparse_gradient():
    model = SparseByHand().with_bagua([], GradientAllReduceAlgorithm())
    return faults.error_of(model(torch.tensor([1, 2])).sum().backward)


def test_a_sparse_gradient_is_refused_by_name(ranks):
    for error in ranks(2, sparse_gradient):
        assert "the gradient of 'table' is sparse" in error
        assert "_bagua_params_and_buffers_to_ignore" in error
        assert error.startswith("BaguaError")


@faults.with_bagua_group
def wrong_arguments():
    model = faults.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = GradientAllReduceAlgorithm()
    model_of_bytes = nn.Module()
    model_of_bytes.p = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
    return [
        faults.error_of(model.with_bagua, optimizer, exact),
        faults.error_of(model.with_bagua, [model], exact),
        faults.error_of(model.with_bagua, [optimizer], "bytegrad"),
        faults.error_of(model.with_bagua, [optimizer], GradientAllReduceAlgorithm),
        faults.error_of(model.with_bagua, [optimizer], exact, process_group=3),
        faults.error_of(model_of_bytes.with_bagua, [], exact),
    ]


@faults.with_bagua_group
def wrap_optimizers_that_communicate():
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            torch.distributed.all_reduce(self.param_groups[0]["params"][0].grad)
            return super().step(closure)

    errors = {}
    for name in [n for n in every_algorithm.ALGORITHMS if n not in ("qadam", "auto")]:
        for kind in (ZeroRedundancyOptimizer, PostLocalSGDOptimizer, Own):
            model = faults.network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if kind is ZeroRedundancyOptimizer:
                optimizer = kind(model.parameters(), torch.optim.SGD, lr=0.1)
            elif kind is PostLocalSGDOptimizer:
                optimizer = kind(optimizer, PeriodicModelAverager(period=2))
            else:
                optimizer = kind(model.parameters(), lr=0.1)
            try:
                model.with_bagua([optimizer], every_algorithm.made(name))
            except NotImplementedError as error:
                errors.setdefault(name, []).append(str(error))
    return errors


def test_optimizers_that_communicate_are_refused_where_ranks_step_on_their_own_gradients(ranks):
    for errors in ranks(2, wrap_optimizers_that_communicate):
        assert set(errors) == {*every_algorithm.OWN_WEIGHTS, "async"}
        for of_name in errors.values():
            kinds = ["ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "Own"]
            for kind, text in zip(kinds, of_name, strict=True):
                assert f"{kind} communicates in its step()" in text
                assert "Use a plain optimizer of all parameters" in text


def test_wrong_arguments_are_named(ranks):
    for errors in ranks(1, wrong_arguments):
        expected = [
            "TypeError: with_bagua takes a list of optimizers",
            "TypeError: with_bagua: Sequential is not a torch.optim.Optimizer",
            "TypeError: with_bagua: algorithm must be an instance of",
            "TypeError: with_bagua: algorithm must be an instance of",
            "TypeError: process_group must be None",
            "TypeError: parameter 'p' is torch.float8_e4m3fn",
        ]
        for error, words in zip(errors, expected, strict=True):
            assert error.startswith(words)


@faults.with_bagua_group
def wrap_with_lanes(value):
    os.environ["BAGUA_LANES"] = value
    return faults.error_of(faults.wrapped)


@over(value=["two", "0", "17", "1.5", "²"])
def test_a_number_of_lanes_that_is_none_is_named(ranks, value):
    (error,) = ranks(1, wrap_with_lanes, value, env={"BAGUA_LANES": "1"})
    assert f"BAGUA_LANES={value} must be a whole number between 1 and 16" in error


def test_a_wrap_before_initialisation_says_what_to_call():
    assert not bagua.communication.is_initialized()
    with pytest.raises(RuntimeError, match=r"call bagua.init_process_group\(\) before with_bagua"):
        faults.network().with_bagua([], GradientAllReduceAlgorithm())
