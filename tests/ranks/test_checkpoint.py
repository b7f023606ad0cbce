"""Saved in the middle and loaded into fresh objects: the uninterrupted run, bit for bit."""

import functools
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bagua.torch_api.algorithms import Algorithm, QAdamOptimizer
from bagua.torch_api.checkpoint import PerRank
from support import training
from torch import nn

BEFORE, AFTER = 5, 20

ALGORITHMS = {
    "exact": ("gradient_allreduce", {}),
    "bytegrad": ("bytegrad", {"hierarchical": False}),
    "decentralized-all": ("decentralized", {"hierarchical": False}),
    "decentralized-shift-one": (
        "decentralized",
        {"hierarchical": False, "peer_selection_mode": "shift_one", "communication_interval": 2},
    ),
    "low-precision": ("low_precision_decentralized", {"hierarchical": False}),
    "qadam": ("qadam", {"hierarchical": False}),
    "power-sgd": ("power_sgd", {"rank": 2, "min_compression_rate": 1.0, "warmup_steps": 0}),
    "sparse": ("sparse", {"ratio": 0.1}),
    "random-sparse": ("sparse", {"ratio": 0.1, "random_sparse": True}),
    "async-in-its-warm-up": ("async", {"warmup_steps": 100}),
}


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def wrapped(chosen, seed):
    name, arguments = ALGORITHMS[chosen]
    model = network(seed)
    if name == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)
        arguments = arguments | {"q_adam_optimizer": optimizer}
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model.with_bagua([optimizer], Algorithm.init(name, **arguments)), optimizer


def steps(model, optimizer, numbers):
    data = [training.batch(number, dist.get_rank(), rows=8) for number in numbers]
    training.train(model, [optimizer], data)


def state_bits(model):
    return training.bits([*model.parameters(), *model.buffers()])


@training.with_group
def interrupted(chosen, path):
    """(bits of the uninterrupted run, bits of the one that was saved and loaded)."""
    model, optimizer = wrapped(chosen, seed=0)
    steps(model, optimizer, range(BEFORE))
    dcp.save({"training": PerRank(model), "algorithm": model.bagua_algorithm}, checkpoint_id=path)
    steps(model, optimizer, range(BEFORE, BEFORE + AFTER))

    loaded, loaded_optimizer = wrapped(chosen, seed=1)
    assert state_bits(loaded) != state_bits(model)
    dcp.load({"training": PerRank(loaded), "algorithm": loaded.bagua_algorithm}, checkpoint_id=path)
    steps(loaded, loaded_optimizer, range(BEFORE, BEFORE + AFTER))
    return state_bits(model), state_bits(loaded)


@pytest.mark.parametrize("chosen", ALGORITHMS)
def test_twenty_steps_after_loading_are_those_of_the_uninterrupted_run(ranks, tmp_path, chosen):
    results = ranks(3, interrupted, chosen, str(tmp_path))
    for rank, (uninterrupted, loaded) in enumerate(results):
        assert loaded == uninterrupted, f"rank {rank}"
    if chosen.startswith(("decentralized", "low-precision")):
        assert len({weights for weights, _ in results}) == 3, "nothing of a rank's own was tried"


@training.with_group
def saved_by_hand(chosen, path):
    model, optimizer = wrapped(chosen, seed=0)
    steps(model, optimizer, range(BEFORE))
    file = f"{path}/rank{dist.get_rank()}.pt"
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "algorithm": model.bagua_algorithm.state_dict(),
        },
        file,
    )
    steps(model, optimizer, range(BEFORE, BEFORE + AFTER))
    loaded, loaded_optimizer = wrapped(chosen, seed=1)
    state = torch.load(file, weights_only=True)
    loaded.load_state_dict(state["model"])
    loaded_optimizer.load_state_dict(state["optimizer"])
    loaded.bagua_algorithm.load_state_dict(state["algorithm"])
    steps(loaded, loaded_optimizer, range(BEFORE, BEFORE + AFTER))
    return state_bits(model), state_bits(loaded)


@pytest.mark.parametrize("chosen", ALGORITHMS)
def test_the_same_with_torch_save_on_every_rank(ranks, tmp_path, chosen):
    for rank, (uninterrupted, loaded) in enumerate(ranks(2, saved_by_hand, chosen, str(tmp_path))):
        assert loaded == uninterrupted, f"rank {rank}"


@training.with_group
def state_of_another_algorithm():
    errors = []
    for name in ("gradient_allreduce", "async"):
        model = network(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.with_bagua([optimizer], Algorithm.init(name))
        load = model.bagua_algorithm.load_state_dict
        errors.append(training.error_of(functools.partial(load, {"iterations": 3})))
    other_ranks = {"rank7": {"model": {}, "optimizer": {}}}
    errors.append(training.error_of(lambda: PerRank(model).load_state_dict(other_ranks)))
    return errors


def test_a_state_that_does_not_fit_is_refused_by_name(ranks):
    for rank, (exact, asynchronous, per_rank) in enumerate(ranks(2, state_of_another_algorithm)):
        assert exact.startswith("ValueError: GradientAllReduceAlgorithmImpl remembers nothing")
        assert "['iterations']" in exact
        assert "AsyncModelAverageAlgorithmImpl remembers ['warmed_up'], but" in asynchronous
        assert f"nothing of rank{rank}, only ['rank7']" in per_rank


def test_a_module_that_is_not_wrapped_is_refused():
    with pytest.raises(TypeError, match="PerRank takes a module after with_bagua"):
        PerRank(nn.Linear(2, 2))


@training.with_group
def states_pickle():
    model, optimizer = wrapped("decentralized-all", seed=0)
    steps(model, optimizer, range(2))
    state = pickle.loads(pickle.dumps(model.bagua_algorithm.state_dict()))
    other, _ = wrapped("decentralized-all", seed=1)
    other.bagua_algorithm.load_state_dict(state)
    assert other.bagua_algorithm.state_dict() == state
    return state


def test_an_algorithms_state_is_plain_data(ranks):
    assert ranks(2, states_pickle) == [{"iterations": 2, "communications": 2}] * 2
