"""Local training saved in the middle: it goes on to the bit, or from the anchor."""

import itertools
import time

import torch
import torch.distributed as dist
from bagua._core.state.saved_values import copied
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from ranks.test_diloco import (
    adamw,
    assert_outer_state_agrees,
    outer_state,
    own_step,
    torchs_adamw,
    torchs_sgd,
)
from support import training
from support.cases import over
from torch import nn

FRAGMENTS = [["0"], ["1", "2"]]
#: Arguments, and the steps before the checkpoint.
CASES = [
    ({"interval": 4}, 8),
    ({"interval": 4, "overlap_steps": 1, "fragments": FRAGMENTS}, 6),
    ({"interval": 4, "overlap_steps": 2, "codec": "bit2_block"}, 5),
    ({"interval": 4, "codec": "bit2_block", "fragments": FRAGMENTS}, 6),
    ({"interval": 4, "outer_optimizer": None, "fragments": FRAGMENTS}, 14),
    ({"interval": 4, "outer_optimizer": torchs_adamw}, 10),
    ({"interval": 4, "outer_optimizer": torchs_sgd, "fragments": FRAGMENTS}, 3),
    ({"interval": 4, "warmup_steps": 9}, 6),
    ({"interval": 2, "overlap_steps": 1, "weight": "samples"}, 5),
]
AFTER = 9


def wrapped(arguments, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = adamw(model)
    arguments = {"outer_optimizer": OuterSGD(0.7, 0.9), **arguments}
    model.with_bagua([optimizer], DiLoCoAlgorithm(**arguments))
    return model, optimizer


def named(model, optimizer, algorithm_first=False):
    state = {"model": model, "optimizer": optimizer, "algorithm": model.bagua_algorithm}
    return dict(sorted(state.items())) if algorithm_first else state


def train(model, optimizer, steps):
    """Steps with those numbers; samples count where ranks are weighted by them."""
    for step in steps:
        own_step(model, optimizer, step, samples=step + dist.get_rank())


def bits(model):
    return training.bits([*model.parameters(), *model.buffers(), *outer_state(model).values()])


@training.with_group
def go_on(arguments, before, folder):
    """Bits of a training that is saved, of two that load it in either order, and of one unsaved."""
    model, optimizer = wrapped(arguments)
    train(model, optimizer, range(before))
    saved = save_checkpoint(folder, named(model, optimizer), before)
    assert torch.load(saved / "values.pt", weights_only=True)
    trained = [(model, optimizer)]
    for algorithm_first in (False, True):
        trained.append(wrapped(arguments, seed=1))
        assert load_latest(folder, named(*trained[-1], algorithm_first)) == before
    for pair in trained:
        train(*pair, range(before, before + AFTER))
    unsaved, of_unsaved = wrapped(arguments)
    train(unsaved, of_unsaved, range(before + AFTER))
    return [bits(pair[0]) for pair in trained], bits(unsaved)


@over(case=CASES)
def test_training_goes_on_to_the_bit(ranks, tmp_path_factory, case):
    folder = str(tmp_path_factory.mktemp("saved"))
    for (uninterrupted, *loaded), unsaved in ranks(3, go_on, *case, folder):
        assert uninterrupted == unsaved, "saving changes nothing"
        assert loaded == [uninterrupted] * 2, "in order, and with the algorithm first"


@training.with_group
def save_only_the_algorithm(folder, arguments, upto):
    model, optimizer = wrapped(arguments)
    train(model, optimizer, range(upto))
    save_checkpoint(folder, {"algorithm": model.bagua_algorithm}, upto)
    return outer_state(model)


@training.with_group
def load_only_the_algorithm(folder, arguments):
    """The outer state that was loaded, the weights' distance from it, and rounds afterwards."""
    model, optimizer = wrapped(arguments, seed=5)
    load_latest(folder, {"algorithm": model.bagua_algorithm})
    state = outer_state(model)
    evaluated = all(
        torch.equal(p.detach(), state[f"anchor/{name}"]) for name, p in model.named_parameters()
    )
    before = model.bagua_algorithm.outer_rounds
    train(model, optimizer, range(8))
    assert_outer_state_agrees(model)
    return state, evaluated, model.bagua_algorithm.outer_rounds - before


@over(size=(1, 4))
def test_any_number_of_ranks_goes_on_from_the_anchor(ranks, tmp_path_factory, size):
    arguments, folder = {"interval": 4}, str(tmp_path_factory.mktemp("saved"))
    saved = ranks(3, save_only_the_algorithm, folder, arguments, 6)[0]
    for state, evaluated, rounds in ranks(size, load_only_the_algorithm, folder, arguments):
        assert state.keys() == saved.keys()
        assert all(torch.equal(state[key], saved[key]) for key in saved)
        assert evaluated
        assert rounds == 2


def test_a_result_in_flight_is_used_where_the_weights_are_lost(ranks, tmp_path):
    arguments = {"interval": 4, "overlap_steps": 2}
    ranks(3, save_only_the_algorithm, str(tmp_path), arguments, 5)
    for _, evaluated, rounds in ranks(2, load_only_the_algorithm, str(tmp_path), arguments):
        assert evaluated
        assert rounds == 2, "the one in flight, and one of the two launched since"


@training.with_group
def one_rank_has_other_weights(folder):
    model, optimizer = wrapped({"interval": 4})
    train(model, optimizer, range(6))
    save_checkpoint(folder, named(model, optimizer), 6)
    load_latest(folder, named(model, optimizer))
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight.add_(1.0)
    own_step(model, optimizer, 6)
    first = model.bagua_stats()["outer"]["steps"]
    train(model, optimizer, range(7, 10))
    assert_outer_state_agrees(model)
    return first, model.bagua_algorithm.outer_rounds


def test_all_ranks_start_from_the_anchor_if_one_has_other_weights(ranks, tmp_path):
    assert ranks(2, one_rank_has_other_weights, str(tmp_path)) == [(1, 2)] * 2


@training.with_group
def refusals(changes):
    model, optimizer = wrapped({"interval": 4, "overlap_steps": 2})
    train(model, optimizer, range(5))
    state = model.bagua_algorithm.state_dict()
    before = bits(model)
    states = [{k: v for k, v in (state | c).items() if v is not None} for c in changes]
    load = model.bagua_algorithm.load_state_dict
    errors = [training.error_of(lambda changed=changed: load(changed)) for changed in states]
    assert bits(model) == before
    return errors


def test_states_that_do_not_fit_are_refused_by_name(ranks):
    changes = [
        {"steps": 4},
        {"in_flight": 2},
        {"outer_rounds": -1},
        {"anchor/0.weight": torch.zeros(3)},
        {"warmed_up": "x"},
        {"group_size": None, "ranks": 1},
    ]
    for errors in ranks(1, refusals, changes):
        assert all(error.startswith("ValueError") for error in errors)
        assert "saved after 4 steps of an interval, which has only 4 now" in errors[0]
        assert "saved with fragment 2 in flight, there are only 1 now" in errors[1]
        assert "'outer_rounds' is -1" in errors[2]
        assert "'anchor/0.weight' is (3,) in the state, (7, 5) here" in errors[3]
        assert "'warmed_up' is x" in errors[4]
        assert "the state has no 'group_size'" in errors[5], "as it was before 0.1.0"


def saved(model, optimizer):
    """What is loaded, in this order."""
    state = copied({k: part.state_dict() for k, part in named(model, optimizer).items()})
    return [*state.items()]


def loaded(state, model, optimizer):
    for name, value in state:
        named(model, optimizer)[name].load_state_dict(copied(value))
    return model, optimizer


@training.with_group
def load_beside_a_round():
    """Loads while a round is under way, whose other rank is late: whether training goes on."""
    arguments = {"interval": 4, "overlap_steps": 3}
    model, optimizer = wrapped(arguments)
    train(model, optimizer, range(5))
    again, of_again = wrapped(arguments, seed=1)
    train(again, of_again, range(20, 23))
    state = saved(model, optimizer)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1)
    own_step(again, of_again, 23)
    loaded(state, again, of_again)
    for pair in ((model, optimizer), (again, of_again)):
        train(*pair, range(5, 12))
    return bits(again) == bits(model)


def test_the_result_of_a_round_under_way_is_not_taken_for_that_of_a_loaded_one(ranks):
    assert ranks(2, load_beside_a_round) == [True] * 2


WARMUPS, STEPS = (0, 2, 3, 5), 11


@training.with_group
def around_the_end_of_the_warm_up(arguments):
    """By way of loading: whether it goes on as an uninterrupted training with that warm-up."""
    uninterrupted, states, same = {}, {}, {}
    for warmup in WARMUPS:
        used = wrapped(arguments | {"warmup_steps": warmup})
        for step in range(STEPS):
            states[warmup, step] = saved(*used)
            train(*used, [step])
        uninterrupted[warmup] = bits(used[0])
    for step, now in itertools.product((2, 3, 4, 6), WARMUPS):
        expected = 3 if step > 3 else max(step, now)  # an ended warm-up is not taken up again
        fresh = wrapped(arguments | {"warmup_steps": now}, seed=1)
        for pair in (fresh, used) if now == WARMUPS[-1] else (fresh,):
            train(*loaded(states[3, step][:: 1 if now else -1], *pair), range(step, STEPS))
            name = f"saved after {step}, loaded with {now}, {'anew' if pair is fresh else 'again'}"
            same[name] = bits(pair[0]) == uninterrupted[expected]
    return same


@over(
    case=[
        {"interval": 4},
        {"interval": 4, "overlap_steps": 1, "codec": "bit2_block", "fragments": FRAGMENTS},
        {"interval": 3, "overlap_steps": 2, "weight": "samples"},
    ]
)
def test_every_step_around_the_end_of_a_warm_up_goes_on_with_any_warm_up(ranks, case):
    for same in ranks(2, around_the_end_of_the_warm_up, case):
        assert len(same) == 20
        assert all(same.values()), [name for name, equal in same.items() if not equal]


IN_FLIGHT = {"interval": 4, "overlap_steps": 3}  # after five steps, due in two
CODED = {"interval": 4, "codec": "bit2_block"}
HALVES = {"interval": 4, "fragments": FRAGMENTS}
#: Arguments of the training that saves after five steps, of the one that loads, and an error.
CHANGES = [
    (IN_FLIGHT, {"interval": 4}, "overlap_steps, which are 0 now. Give the overlap_steps that"),
    (IN_FLIGHT, {"interval": 4, "warmup_steps": 3}, "which are 0 now"),
    (IN_FLIGHT, {"interval": 2, "overlap_steps": 1}, "due in 2 steps, where the next fragment"),
    (IN_FLIGHT, HALVES | {"overlap_steps": 1}, "in flight and other fragments. Give the"),
    (IN_FLIGHT, {"interval": 4, "overlap_steps": 2}, None),
    ({"interval": 8, "overlap_steps": 3}, {"interval": 8}, None),
    ({"interval": 8}, {"interval": 8, "overlap_steps": 3}, None),
    ({"interval": 8}, {"interval": 4}, "saved after 5 steps of an interval, which has only 4"),
    (HALVES, {"interval": 4}, None),
    ({"interval": 4}, HALVES | {"weight": "samples"}, None),
    (HALVES | {"weight": "samples"}, {"interval": 4, "weight": "samples"}, None),
    (CODED, {"interval": 4}, None),
    ({"interval": 4}, CODED | {"warmup_steps": 9}, None),
    (CODED, CODED | {"error_feedback": False}, None),
]


@training.with_group
def load_with_other_arguments():
    """Of each change the error, or whether the ranks go on together."""
    results = []
    for before, now, _ in CHANGES:
        first = wrapped(before)
        train(*first, range(5))
        state = saved(*first)
        model, optimizer = wrapped(now, seed=1)
        untouched = bits(model), model.bagua_algorithm.state_dict().keys()
        algorithm = dict(state)["algorithm"]
        error = ""
        try:
            model.bagua_algorithm.load_state_dict(copied(algorithm))
        except ValueError as refusal:
            error = str(refusal)
            kept = untouched == (bits(model), model.bagua_algorithm.state_dict().keys())
            results.append((error, kept))
        else:
            loaded(state, model, optimizer)
        train(model, optimizer, range(5, 18))
        assert_outer_state_agrees(model)
        if not error:
            results.append(("", model.bagua_algorithm.outer_rounds > algorithm["outer_rounds"]))
    return results


def test_other_arguments_work_or_are_refused_before_anything_has_changed(ranks):
    for results in ranks(2, load_with_other_arguments):
        for (*change, expected), (error, well) in zip(CHANGES, results, strict=True):
            assert bool(expected) == bool(error), (change, error)
            assert (expected or "") in error, change
            assert well, change
