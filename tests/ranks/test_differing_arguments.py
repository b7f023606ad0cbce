"""Arguments of algorithms that differ between ranks: told at the wrap, by name, on every rank.

Those of with_bagua itself: test_bad_input.py.
"""

import functools

import torch
import torch.distributed as dist
from bagua.torch_api import Guard
from bagua.torch_api.algorithms import (
    AutoAlgorithm,
    ByteGradAlgorithm,
    DiLoCoAlgorithm,
    PowerSGDAlgorithm,
    SparseAlgorithm,
)
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training

INT4 = functools.partial(ByteGradAlgorithm, False, codec="int4_block")
OUTER_SGD = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)
#: The algorithm of rank 0, that of the others, and what is told.
CASES = [
    (INT4(error_feedback=True), INT4(), ["feedback': True", "feedback': False"]),
    # Between nodes the default is the same.
    (
        ByteGradAlgorithm(True),
        ByteGradAlgorithm(),
        ["'hierarchical': True", "'hierarchical': None"],
    ),
    (PowerSGDAlgorithm(1), PowerSGDAlgorithm(2), ["'rank': 1", "'rank': 2"]),
    (
        SparseAlgorithm(0.1, exact_parameters=["0.*"]),
        SparseAlgorithm(0.1, exact_parameters=["2.*"]),
        ["exact_parameters=('0.*',)", "exact_parameters=('2.*',)"],
    ),
    (
        DiLoCoAlgorithm(fragments=[["0"], ["2"]]),
        DiLoCoAlgorithm(fragments=[["2"], ["0"]]),
        ["fragments=[['0'], ['2']]", "fragments=[['2'], ['0']]"],
    ),
    (
        DiLoCoAlgorithm(OUTER_SGD),
        DiLoCoAlgorithm(torch.optim.AdamW),
        ["SGD {'lr': 0.7, 'momentum': 0.9", "AdamW {'lr': 0.001"],
    ),
    (AutoAlgorithm(["bytegrad"]), AutoAlgorithm(["sparse"]), []),
]


@training.with_group
def wrap_differently():
    """The error of each case, and that of another guard."""
    rank = dist.get_rank()

    def error_of(algorithm, guard=None):
        model = training.network()
        wrap = functools.partial(model.with_bagua, [training.sgd(model)], algorithm)
        return training.error_of(lambda: wrap(guard=guard))

    found = [error_of(others if rank else first) for first, others, _ in CASES]
    return found, error_of(INT4(), None if rank else Guard(every=7))


def test_arguments_of_algorithms_that_differ_are_told_at_the_wrap(ranks):
    for found, of_guard in ranks(3, wrap_differently, env=environment_of_nodes((2, 1))):
        assert "Guard(every=7" in of_guard
        for error, (_, _, words) in zip([*found, of_guard], [*CASES, ("", "", [])], strict=True):
            assert error.startswith("BaguaMismatchError: ranks differ in the model or the argum")
            assert all(word in error for word in words), error
