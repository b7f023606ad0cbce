"""Saved at any step, loaded into objects that did other things: the same training, to the bit."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bagua.torch_api import communication
from bagua.torch_api.algorithms import Algorithm, QAdamOptimizer
from bagua.torch_api.checkpoint import PerRank, load_latest, save_checkpoint
from support import every_algorithm, training
from support.cases import over
from support.checkpoint_training import network, steps
from support.error_feedback import all_bits
from support.every_algorithm import LOCAL, OWN_WEIGHTS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

AFTER = 8
WARM_UP = 3
#: In the warm-up, at its end, and after it.
SAVED_AFTER = (1, WARM_UP, WARM_UP + 1, 8)

FEW_BITS = {"hierarchical": False, "codec": "bit2_block", "error_feedback": True}
#: One of each kind of state.
ALGORITHMS = {
    "exact": ("gradient_allreduce", {}),
    "bytegrad-feedback": ("bytegrad", FEW_BITS),
    "decentralized-shift-one": (
        "decentralized",
        {"hierarchical": False, "peer_selection_mode": "shift_one", "communication_interval": 2},
    ),
    "low-precision": (
        "low_precision_decentralized",
        {"hierarchical": False, "communication_interval": 2},
    ),
    "qadam-feedback": ("qadam", FEW_BITS),
    "power-sgd": (
        "power_sgd",
        {
            "rank": 2,
            "min_compression_rate": 1.0,
            "warmup_steps": WARM_UP,
            "exact_parameters": ["0.*"],
        },
    ),
    "sparse": ("sparse", {"ratio": 0.1, "warmup_steps": WARM_UP}),
    "diloco-in-flight": ("diloco", {"interval": 4, "overlap_steps": 2}),
    "async-in-its-warm-up": ("async", {"warmup_steps": 100}),
}


def wrapped(chosen, seed):
    name, arguments = ALGORITHMS[chosen]
    model = network(seed)
    if name == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=WARM_UP)
        arguments = arguments | {"q_adam_optimizer": optimizer}
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model.with_bagua([optimizer], Algorithm.init(name, **arguments)), optimizer


def through_dcp(saved, loaded, path):
    """Reads the entries that the loading object has, so it must be in the phase that was saved."""

    def parts(model):
        return {"training": PerRank(model), "algorithm": model.bagua_algorithm}

    dcp.save(parts(saved[0]), checkpoint_id=path)
    yield
    dcp.load(parts(loaded[0]), checkpoint_id=path)


def through_a_file_of_each_rank(saved, loaded, path):
    file = f"{path}-rank{dist.get_rank()}"
    torch.save([part.state_dict() for part in (*saved, saved[0].bagua_algorithm)], file)
    yield
    states = torch.load(file, weights_only=True)
    for part, state in zip((*loaded, loaded[0].bagua_algorithm), states, strict=True):
        part.load_state_dict(state)


def through_save_checkpoint(saved, loaded, path):
    def parts(model, optimizer):
        return {"model": model, "optimizer": optimizer, "algorithm": model.bagua_algorithm}

    save_checkpoint(path, parts(*saved), 1)
    yield
    assert load_latest(path, parts(*loaded)) == 1


@training.with_group
def interrupted(chosen, way, saved_after, folder):
    """Whether the loaded training goes on as the one that was saved, by steps before the save."""
    same = {}
    for before in saved_after:
        model, optimizer = saved = wrapped(chosen, seed=0)
        steps(model, optimizer, range(before))
        again, its_optimizer = loaded = wrapped(chosen, seed=1)
        other_steps = before if way is through_dcp else (WARM_UP + 2) * (before % 2)
        steps(again, its_optimizer, range(50, 50 + other_steps))
        transfer = way(saved, loaded, f"{folder}/{way.__name__}-{before}")
        next(transfer)
        steps(model, optimizer, range(before, before + AFTER))
        assert next(transfer, "loaded") == "loaded"
        steps(again, its_optimizer, range(before, before + AFTER))
        results = [
            (training.model_bits(m), all_bits(m.bagua_algorithm.state_dict()))
            for m in (model, again)
        ]
        same[before] = results[0] == results[1]
    return same, training.model_bits(model)


# Files show the contents of all states at each moment; the other ways move the same states.
@pytest.mark.parametrize("chosen", ALGORITHMS)
@over(way=[through_a_file_of_each_rank, through_dcp, through_save_checkpoint])
def test_training_goes_on_to_the_bit(ranks, tmp_path, chosen, way):
    saved_after = SAVED_AFTER if way is through_a_file_of_each_rank else SAVED_AFTER[-1:]
    results = ranks(3, interrupted, chosen, way, saved_after, str(tmp_path))
    same, weights = zip(*results, strict=True)
    assert same == (dict.fromkeys(saved_after, True),) * 3
    if chosen.startswith(("decentralized", "low-precision")):
        assert len(set(weights)) == 3, "nothing of a rank's own was tried"


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
        assert (
            "AsyncModelAverageAlgorithmImpl remembers ['averaging', 'warmed_up'], but"
            in asynchronous
        )
        assert f"nothing of rank{rank}, only ['rank7']" in per_rank


def test_a_module_that_is_not_wrapped_is_refused():
    with pytest.raises(TypeError, match=r"PerRank takes a module after bagua\.wrap"):
        PerRank(nn.Linear(2, 2))


@training.with_group
def two_groups(folder):
    """Two trainings of one job, each with a separate checkpoint; then the loaded weights."""
    groups = [communication.new_group(ranks) for ranks in ([0, 1], [2])]
    mine = groups[dist.get_rank() // 2]
    other = groups[1 - dist.get_rank() // 2]
    saved, loaded = (
        network(seed).with_bagua([], Algorithm.init("gradient_allreduce"), process_group=mine)
        for seed in (dist.get_rank() // 2, 5)
    )
    path = f"{folder}/{mine.ranks[0]}"
    save_checkpoint(path, {"model": saved}, 1, group=mine)
    refused = training.error_of(lambda: load_latest(path, {"model": loaded}, group=other))
    step = load_latest(path, {"model": loaded}, group=mine)
    return step, refused, training.model_bits(saved) == training.model_bits(loaded)


def test_the_ranks_of_a_group_save_together(ranks, tmp_path):
    for rank, (step, refused, same) in enumerate(ranks(3, two_groups, str(tmp_path))):
        assert (step, same) == (1, True)
        assert f"not a member of the group with ranks {[[2], [0, 1]][rank // 2]}" in refused


def torchs_state(model, optimizer):
    get_optimizer_state_dict(model, optimizer)


def a_step_of_its_own(model, optimizer):
    """As libraries write it that have no function of torch for it."""
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


@training.with_group
def steps_that_only_make_state(name, momentum):
    """Weights where one rank makes state before some steps, and where none does."""
    ways = [torchs_state, a_step_of_its_own] if name in LOCAL else [torchs_state]
    results = []
    for make in (None, *ways):
        model, optimizer = every_algorithm.wrapped(name, training.network())
        for group in optimizer.param_groups if name != "qadam" else ():
            group["momentum"] = momentum
        for step in range(9):
            if make and dist.get_rank() == 0 and step in ((0, 3) if momentum == 0 else (0,)):
                make(model, optimizer)
            training.train(model, optimizer, [training.batch(step, dist.get_rank())])
        results.append(training.model_bits(model))
        if name in LOCAL and make is torchs_state:
            with model.bagua_algorithm.anchor():
                make(model, optimizer)
    return results


@over(name=[*OWN_WEIGHTS, "qadam"], momentum=(0.0, 0.9))
def test_a_step_that_only_makes_state_on_one_rank_counts_nowhere(ranks, name, momentum):
    for without, *made in ranks(2, steps_that_only_make_state, name, momentum):
        assert made == [without] * len(made)


@training.with_group
def saved_at(save_at, load, folder, make):
    """Rounds after each step and the weights; saved by DCP before one, or loaded at it."""
    model = training.network()
    optimizer = make(model.parameters())
    model.with_bagua([optimizer], Algorithm.init("diloco", interval=3))
    state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
    if load:
        dcp.load(state, checkpoint_id=folder)
    rounds = [model.bagua_algorithm.outer_rounds, model.bagua_stats()["outer"]["steps"]]
    for step in range(save_at if load else 0, 8):
        if step == save_at and not load:
            dcp.save(state, checkpoint_id=folder)
        training.train(model, optimizer, [training.batch(step, dist.get_rank())])
        rounds.append(model.bagua_algorithm.outer_rounds)
    return rounds, training.model_bits(model)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def decaying_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


@over(make=(plain_sgd, decaying_sgd, torch.optim.AdamW), save_at=(0, 4))
def test_neither_a_save_nor_a_load_by_dcp_is_a_step(ranks, tmp_path_factory, make, save_at):
    folder = str(tmp_path_factory.mktemp("saved"))
    never = ranks(2, saved_at, None, False, folder, make)
    assert ranks(2, saved_at, save_at, False, folder, make) == never
    for (whole, bits), (rounds, its_bits) in zip(
        never, ranks(2, saved_at, save_at, True, folder, make), strict=True
    ):
        assert rounds[:2] == [save_at // 3, save_at % 3]
        assert rounds[2:] == whole[2 + save_at :]
        assert its_bits == bits
