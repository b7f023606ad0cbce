"""Wrong calls of comm_hooks.register, each with its error."""

import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import Algorithm, ByteGradAlgorithm, GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel as Own
from support import training
from support.hooked import network
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def nothing(state, bucket):
    raise AssertionError("not called")


@training.with_group
def refused():
    """Errors of wrong calls."""

    def fresh(model=None, **arguments):
        return DistributedDataParallel(network() if model is None else model, **arguments)

    hooked = fresh()
    comm_hooks.register(hooked, "gradient_allreduce")
    other_hook = fresh()
    other_hook.register_comm_hook(None, nothing)
    model = network()
    ours = model.with_bagua([training.sgd(model)], GradientAllReduceAlgorithm())
    own = Own(network(), algorithm=GradientAllReduceAlgorithm())
    python_reducer = fresh()
    python_reducer._use_python_reducer = True
    embedding = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3))
    complex_model = nn.Linear(3, 3, dtype=torch.complex64)
    calls = {
        "module": (network(), "bytegrad"),
        "own_class": (own, "bytegrad"),
        "twice": (hooked, "bytegrad"),
        "other_hook": (other_hook, "bytegrad"),
        "with_bagua": (fresh(ours), "bytegrad"),
        "python_reducer": (python_reducer, "bytegrad"),
        "sparse": (fresh(embedding), "gradient_allreduce"),
        "complex": (fresh(complex_model), "bytegrad"),
        "name": (fresh(), "bytegrd"),
        "no_algorithm": (fresh(), ByteGradAlgorithm),
        "decentralized": (fresh(), "decentralized"),
        "async": (fresh(), "async"),
        "low_precision": (fresh(), Algorithm.init("low_precision_decentralized")),
    }
    said = {
        case: training.error_of(lambda arguments=arguments: comm_hooks.register(*arguments))
        for case, arguments in calls.items()
    }
    said["second_hook"] = training.error_of(lambda: hooked.register_comm_hook(None, nothing))
    differing = ByteGradAlgorithm(average=dist.get_rank() == 0)
    said["ranks_differ"] = training.error_of(lambda: comm_hooks.register(fresh(), differing))
    return said


REFUSALS = {
    "module": ("TypeError", "torch.nn.parallel.DistributedDataParallel"),
    "own_class": ("TypeError", "take algorithm= themselves"),
    "twice": ("RuntimeError", "has a communication hook already"),
    "other_hook": ("RuntimeError", "has a communication hook already"),
    "with_bagua": ("RuntimeError", "with_bagua has wrapped"),
    "python_reducer": ("RuntimeError", "python_reducer"),
    "sparse": ("NotImplementedError", "'0.weight' has sparse gradients"),
    "complex": ("NotImplementedError", "'weight' is complex"),
    "name": ("ValueError", "unknown algorithm 'bytegrd'; registered: gradient_allreduce"),
    "no_algorithm": ("TypeError", "such as ByteGradAlgorithm()"),
    "decentralized": ("NotImplementedError", "module.with_bagua(optimizers, algorithm)"),
    "async": (
        "NotImplementedError",
        "AsyncModelAverageAlgorithm does more than reduce the gradients",
    ),
    "low_precision": ("NotImplementedError", "with_bagua"),
    "second_hook": ("RuntimeError", "can only be called once"),
    "ranks_differ": ("BaguaMismatchError", "'average': True"),
}


def test_wrong_calls_are_refused(ranks):
    for said in ranks(2, refused):
        assert set(said) == set(REFUSALS)
        for case, (kind, text) in REFUSALS.items():
            assert said[case].startswith(kind), said[case]
            assert text in said[case], said[case]
