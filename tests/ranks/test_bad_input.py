"""Input that differs between ranks or that cannot be: found at the wrap, by name, on every rank."""

import functools
import os
from unittest import mock

import bagua.torch_api as bagua
import pytest
import torch
from bagua.torch_api import Guard
from bagua.torch_api.algorithms import (
    AutoAlgorithm,
    ByteGradAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    PowerSGDAlgorithm,
    SparseAlgorithm,
)
from ranks.test_groups_and_nodes import environment_of_nodes
from support import every_algorithm, faults
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

EXACT = GradientAllReduceAlgorithm()
INT4 = functools.partial(ByteGradAlgorithm, False, codec="int4_block")
OUTER_SGD = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)

#: Another model on the last rank: how it is changed before the wrap, and what the others then read.
MODELS = [
    (lambda model: model.__setitem__(2, nn.Linear(20, 4)), "parameter 2.weight: (4, 20)"),
    (lambda model: model.double(), "parameter 0.weight: (20, 5) torch.float64 cpu"),
    (lambda model: model.__delitem__(2), "buffer 1.running_mean"),
    (
        lambda model: model[0].weight.requires_grad_(False),
        "parameter 0.weight: (20, 5) torch.float32 cpu frozen",
    ),
    (
        lambda model: model.register_buffer("counts", torch.zeros(2)),
        "buffer counts: (2,) torch.float32 cpu",
    ),
    (
        lambda model: setattr(model, "_bagua_params_and_buffers_to_ignore", ["0.weight"]),
        "parameter 0.bias: (20,) torch.float32 cpu",
    ),
]
#: Other arguments of the wrap on the last rank, and a part of what is said about it.
ARGUMENTS = [
    ({"algorithm": GradientAllReduceAlgorithm(average=False)}, "'average': False"),
    ({"do_flatten": False}, "do_flatten=False"),
    ({"find_unused_parameters": True}, "find_unused_parameters=True"),
    ({"broadcast_buffers": False}, "broadcast_buffers=False"),
    ({"guard": Guard(every=7)}, "Guard(every=7"),
    ({"optimizer": torch.optim.Adam}, "optimizers ['Adam']"),
    ({"environment": {"BAGUA_DEFAULT_BUCKET_SIZE": "100"}}, "bucket size 100"),
    ({"environment": {"BAGUA_CHECKSUM": "1"}}, "BAGUA_CHECKSUM=1"),
    ({"environment": {"BAGUA_CHECK_WEIGHTS_EVERY": "3"}}, "BAGUA_CHECK_WEIGHTS_EVERY=3"),
]
#: The last rank's algorithm and that of the others, and what is said about each.
ALGORITHMS = [
    (INT4(), INT4(error_feedback=True), "feedback': False", "feedback': True"),
    # Between nodes the default is the same.
    (ByteGradAlgorithm(), ByteGradAlgorithm(True), "'hierarchical': None", "'hierarchical': True"),
    (PowerSGDAlgorithm(2), PowerSGDAlgorithm(1), "'rank': 2", "'rank': 1"),
    (
        SparseAlgorithm(0.1, exact_parameters=["2.*"]),
        SparseAlgorithm(0.1, exact_parameters=["0.*"]),
        "'exact_parameters': ('2.*',)",
        "'exact_parameters': ('0.*',)",
    ),
    (
        DiLoCoAlgorithm(fragments=[["1", "2"], ["0"]]),
        DiLoCoAlgorithm(fragments=[["0"], ["1", "2"]]),
        "fragments=[['1', '2'], ['0']]",
        "fragments=[['0'], ['1', '2']]",
    ),
    (
        DiLoCoAlgorithm(torch.optim.AdamW),
        DiLoCoAlgorithm(OUTER_SGD),
        "AdamW {'lr': 0.001",
        "SGD {'lr': 0.7, 'momentum': 0.9",
    ),
    (AutoAlgorithm(["sparse"]), AutoAlgorithm(["bytegrad"]), "sparse", "bytegrad"),
]
#: Arguments of `wrap` on the last rank and on the others, and what is said about each.
DIFFERENT = (
    [({"change": change}, {}, f" [{words}", "") for change, words in MODELS]
    + [(last, {}, words, "") for last, words in ARGUMENTS]
    + [({"algorithm": a}, {"algorithm": b}, *words) for a, b, *words in ALGORITHMS]
)


def wrap(change=None, optimizer=torch.optim.SGD, algorithm=EXACT, environment=(), **options):
    model = faults.network()
    if change is not None:
        change(model)
    with mock.patch.dict(os.environ, environment):
        return model.with_bagua([optimizer(model.parameters(), lr=0.1)], algorithm, **options)


@faults.with_bagua_group
def wrap_differently():
    errors = []
    for last, others, *_ in DIFFERENT:
        errors.append(faults.error_of(wrap, **(last if faults.is_last() else others)))
    model = faults.network()
    options = {"do_flatten": False} if faults.is_last() else {}
    faults.error_of(model.with_bagua, [], EXACT, **options)
    assert not hasattr(model, "bagua_ddp")
    model.with_bagua([], EXACT)
    faults.loss_of(model).backward()
    return errors, model.bagua_stats()["rounds"]


def test_what_differs_between_ranks_is_told_at_the_wrap_and_another_wrap_works(ranks):
    for errors, rounds in ranks(3, wrap_differently, env=environment_of_nodes((2, 1))):
        assert rounds == 1
        for error, (_, _, of_last, of_others) in zip(errors, DIFFERENT, strict=True):
            assert error.startswith("BaguaMismatchError: ranks differ in the model or the argum")
            assert "same model with the same arguments on every rank" in error
            others, last = error.split("First difference: rank 0 has")[1].split("rank 2 has")
            assert of_others in others
            assert of_last in last


class SparseByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(10, 4))

    def forward(self, index):
        return nn.functional.embedding(index, self.table, sparse=True)


@faults.with_bagua_group
def sparse_gradient():
    model = SparseByHand().with_bagua([], EXACT)
    return faults.error_of(model(torch.tensor([1, 2])).sum().backward)


def test_a_sparse_gradient_that_no_embedding_announced_is_refused_by_name(ranks):
    for error in ranks(2, sparse_gradient):
        assert error.startswith("BaguaError")
        assert "the gradient of 'table' is sparse" in error
        assert "_bagua_params_and_buffers_to_ignore" in error


#: A variable, values that it cannot have, and a part of the error.
VARIABLES = [
    ("BAGUA_LANES", ["two", "0", "17", "1.5", "²"], "must be a whole number between 1 and 16"),
    ("BAGUA_DEFAULT_BUCKET_SIZE", ["0", "-5"], "must be a positive number of bytes"),
    ("BAGUA_DEFAULT_BUCKET_SIZE", ["ten"], "is not an integer"),
    ("BAGUA_CHECKSUM", ["yes"], "must be 0 or 1"),
    ("BAGUA_CHECK_WEIGHTS_EVERY", ["often"], "is not an integer"),
    ("BAGUA_CHECK_WEIGHTS_EVERY", ["-1"], "must be a number of steps, or 0"),
]


@faults.with_bagua_group
def wrong_arguments():
    model, of_bytes = faults.network(), nn.Module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_bytes.p = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
    with_bagua = model.with_bagua
    for words, function, *arguments in [
        (f"bagua.wrap: {EXACT!r} stands in the place of the optimizers", with_bagua, EXACT),
        ("bagua.wrap: 'bytegrad' stands in the place of the optimizers", with_bagua, "bytegrad"),
        ("bagua.wrap: Sequential is not a torch.optim.Optimizer", with_bagua, [model], EXACT),
        ("bagua.wrap: 'qadam' needs q_adam_optimizer: pass QAdamAlg", with_bagua, (), "qadam"),
        ("QAdamAlgorithm takes a QAdamOptimizer", with_bagua, optimizer, "qadam"),
        (
            "bagua.wrap: algorithm must be a name or an instance of",
            with_bagua,
            [optimizer],
            GradientAllReduceAlgorithm,
        ),
        ("process_group must be None", with_bagua, [optimizer], EXACT, 3),
        ("parameter 'p' is torch.float8_e4m3fn", of_bytes.with_bagua, [], EXACT),
    ]:
        assert faults.error_of(function, *arguments).startswith(f"TypeError: {words}")
    for variable, values, words in VARIABLES:
        for value in values:
            error = faults.error_of(wrap, environment={variable: value})
            assert error.startswith("ValueError: ")
            assert variable in error
            assert value in error
            assert words in error


def test_wrong_arguments_and_variables_are_named(ranks):
    ranks(1, wrong_arguments)


OPTIMIZERS = {
    "ZeroRedundancyOptimizer": lambda parameters: ZeroRedundancyOptimizer(
        parameters, torch.optim.SGD, lr=0.1
    ),
    "PostLocalSGDOptimizer": lambda parameters: PostLocalSGDOptimizer(
        torch.optim.SGD(parameters, lr=0.1), PeriodicModelAverager(period=2)
    ),
}


@faults.with_bagua_group
def wrap_optimizers_that_communicate():
    refused = []
    for name in [n for n in every_algorithm.ALGORITHMS if n not in ("qadam", "auto")]:
        for kind, make in OPTIMIZERS.items():
            model = faults.network()
            try:
                model.with_bagua([make(model.parameters())], every_algorithm.made(name))
            except NotImplementedError as error:
                refused.append((name, kind, str(error)))
    return refused


def test_optimizers_that_communicate_are_refused_where_ranks_step_on_their_own_gradients(ranks):
    own = [*every_algorithm.OWN_WEIGHTS, "async"]
    for refused in ranks(2, wrap_optimizers_that_communicate):
        assert [case[:2] for case in refused] == [
            (name, kind) for name in own for kind in OPTIMIZERS
        ]
        for _, kind, text in refused:
            assert f"{kind} communicates in its step()" in text
            assert "Use a plain optimizer of all parameters" in text


BUFFERS = {
    "is expanded": lambda: torch.zeros(1).expand(3),
    "is sparse or quantised": lambda: torch.eye(3).to_sparse(),
    "is of torch.inference_mode()": torch.inference_mode()(lambda: torch.zeros(3)),
    "is a lazy negative": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
}


@faults.with_bagua_group
def buffers_that_cannot_be_written():
    errors = []
    for make in BUFFERS.values():
        model = nn.Linear(2, 2)
        model.register_buffer("odd", make())
        errors.append(faults.error_of(lambda model=model: model.with_bagua([], EXACT)))
    return errors


def test_a_buffer_into_which_no_other_ranks_values_can_be_written_is_named(ranks):
    for errors in ranks(2, buffers_that_cannot_be_written):
        for why, error in zip(BUFFERS, errors, strict=True):
            assert f"buffer 'odd' {why}, so no other rank's values" in error
            assert "_bagua_params_and_buffers_to_ignore" in error


def test_a_wrap_before_initialisation_says_what_to_call():
    assert not bagua.communication.is_initialized()
    with pytest.raises(RuntimeError, match=r"call bagua.init_process_group\(\) before bagua.wrap"):
        faults.network().with_bagua([], EXACT)
