"""AutoAlgorithm: the choice is the same on all ranks, and trains as what was chosen.

Times of steps come from a clock that a test turns, so that no machine decides.
"""

import functools
import json

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bagua.torch_api import Guard
from bagua.torch_api.algorithms import AutoAlgorithm, SparseAlgorithm
from bagua.torch_api.algorithms.auto import TIMED, WARM_UP
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from bagua.torch_api.data_parallel import DistributedDataParallel
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from support.error_feedback import all_bits, train_step, wide_network
from torch import nn

EXACT = "gradient_allreduce"
EIGHT = "bytegrad"
FOUR = "bytegrad(codec='int4_block', error_feedback=True)"
FOUR_IS_FASTEST = {EXACT: 1.0, EIGHT: 0.8, FOUR: 0.6}
EXACT_IS_FASTEST = {EXACT: 0.9, EIGHT: 1.0, FOUR: 1.0}
STEPS = 1 + WARM_UP + TIMED
UNTIL_CHOSEN = 3 * STEPS


def turn_clock(model, seconds, of_rank=1.0):
    """Have steps of each candidate take `seconds`, times `of_rank` on this rank."""
    algorithm, now = model.bagua_algorithm, [0.0]

    def clock():
        now[0] += seconds[algorithm.selection.at_work.label] * of_rank
        return now[0]

    algorithm.clock = clock


def wrapped(seconds=FOUR_IS_FASTEST, algorithm=None, model=None, of_rank=1.0, **arguments):
    model = wide_network() if model is None else model
    optimizer = training.sgd(model, lr=0.02)
    model.with_bagua([optimizer], algorithm or AutoAlgorithm(), **arguments)
    turn_clock(model, seconds, of_rank)
    return model, optimizer


def choice_of(model):
    choice = model.bagua_stats()["choice"]
    json.dumps(choice)  # plain data
    return choice["state"], choice["chosen"]


def train(model, optimizer, steps, first=0):
    data = [training.batch(first + step, dist.get_rank()) for step in range(steps)]
    training.train(model, optimizer, data, after_step=training.assert_ranks_agree)


@training.with_group
def chosen_by_the_slowest():
    # The others' steps seem a thousand times as fast.
    of_rank = 1.0 if dist.get_rank() == dist.get_world_size() - 1 else 1e-3
    model, optimizer = wrapped(algorithm=AutoAlgorithm(max_error=0.05), of_rank=of_rank)
    at_work = []
    for step in range(UNTIL_CHOSEN + 1):
        at_work.append(model.bagua_algorithm.selection.at_work.label)
        train(model, optimizer, 1, first=step)
    return at_work, model.bagua_stats()["choice"]


def test_candidates_take_turns_and_all_ranks_choose_the_fastest_that_is_allowed(ranks):
    results = ranks(3, chosen_by_the_slowest)
    assert results == [results[0]] * 3
    at_work, choice = results[0]
    assert at_work == [one for one in (EXACT, EIGHT, FOUR) for _ in range(STEPS)] + [EIGHT]
    assert (choice["state"], choice["chosen"], choice["turns"]) == ("chosen", EIGHT, 1)
    table = choice["table"]
    assert [row["candidate"] for row in table] == [EXACT, EIGHT, FOUR]
    assert [row["seconds"] for row in table] == pytest.approx(list(FOUR_IS_FASTEST.values()))
    errors = [row["error"] for row in table]
    assert errors[0] == 0
    assert 0 < errors[1] < 0.05 < errors[2] < 0.3


@training.with_group
def with_a_slow_rank(times):
    # Seconds beside which those of this machine, in which ranks wait, are nothing.
    seconds = {label: 1e6 * each for label, each in FOUR_IS_FASTEST.items()}
    of_rank = times if dist.get_rank() == 1 else 1.0
    model, optimizer = wrapped(seconds, of_rank=of_rank)
    train(model, optimizer, UNTIL_CHOSEN + 1)
    return model.bagua_stats()["choice"]["advice"]


def test_a_rank_that_computes_for_longer_is_named_with_its_part_of_the_batch(ranks):
    slow = "rank 1 takes 1.9 times as long: give it 0.53 of the batch"
    assert ranks(3, with_a_slow_rank, 1.9) == [slow] * 3
    assert ranks(2, with_a_slow_rank, 1.1) == [""] * 2


@training.with_group
def exact_from_then_on():
    model, optimizer = wrapped(EXACT_IS_FASTEST, AutoAlgorithm([]))
    oracle = wide_network()
    train(model, optimizer, 14)
    training.train_alone(oracle, training.sgd(oracle, lr=0.02), 14)
    training.assert_close(model, oracle)
    return choice_of(model), model.bagua_stats()["choice"]["why"]


def test_exact_gradients_alone_need_no_trials(ranks):
    assert ranks(2, exact_from_then_on) == [(("chosen", EXACT), "the only candidate")] * 2
    assert ranks(1, exact_from_then_on) == [(("chosen", EXACT), "one rank")]


@training.with_group
def train_between_nodes():
    model, optimizer = wrapped()
    train(model, optimizer, UNTIL_CHOSEN + 2)
    return choice_of(model), sorted(model.bagua_stats()["communicators"])


def test_between_nodes_of_several_ranks_the_choice_is_hierarchical(ranks):
    results = ranks(3, train_between_nodes, env=environment_of_nodes((2, 1)))
    for choice, purposes in results:
        assert choice == ("chosen", FOUR)
        assert "node" in purposes


@training.with_group
def overflows_at_first():
    """Errors are those of the first gradients that are finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    model, optimizer = wrapped(grad_scaler=scaler)
    for step in range(UNTIL_CHOSEN):
        train_step(model, optimizer, step, scaler, overflow=step % STEPS < 3)
        training.assert_ranks_agree(model)
    _, eight, four = (row["error"] for row in model.bagua_stats()["choice"]["table"])
    assert 0 < eight < four < 0.3
    return choice_of(model), training.model_bits(model)


@training.with_group
def accumulated_and_evaluated():
    """Two backwards a step, one of which communicates, and evaluations between the steps."""
    model, optimizer = wrapped()
    for step in range(UNTIL_CHOSEN + 3):
        optimizer.zero_grad()
        with model.no_sync():
            training.squared_error(model, training.batch(step, dist.get_rank())).backward()
        training.squared_error(model, training.batch(99 + step, dist.get_rank())).backward()
        optimizer.step()
        training.assert_ranks_agree(model)
        with torch.no_grad():
            model.eval()(training.batch(step, dist.get_rank())[0])
        model.train()
    return choice_of(model), training.model_bits(model)


@training.with_group
def uneven_inputs():
    model = wide_network()
    optimizer = training.sgd(model, lr=0.02)
    ddp = DistributedDataParallel(model, optimizers=[optimizer], algorithm=AutoAlgorithm())
    turn_clock(ddp, FOUR_IS_FASTEST)

    def steps(count):
        data = [training.batch(number, dist.get_rank()) for number in range(count)]
        training.train(ddp, optimizer, data)

    steps(STEPS)  # the next forward is to build the next candidate's buckets
    for rounds in (1, 5, 2 * STEPS - 6):  # join() between two trials, and within one
        with ddp.join():
            steps(5 * dist.get_rank())
        steps(rounds)
    return choice_of(ddp), training.bits(model.parameters())


@training.with_group
def unfrozen_in_a_trial():
    model = wide_network()
    model[0].weight.requires_grad_(False)
    _, optimizer = wrapped(model=model)
    train(model, optimizer, 2 * STEPS + 5)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, STEPS)
    return choice_of(model), training.model_bits(model)


@training.with_group
def sparse_gradients():
    """Exact gradients take them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], AutoAlgorithm())
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[step, dist.get_rank()]])).square().sum().backward()
        optimizer.step()
    return choice_of(model), training.bits(model.parameters())


@training.with_group
def breached_after_the_choice():
    """A choice that loses more than the guard allows ends in exact gradients."""
    # Checks come in rounds 1 and 20 of new buckets: the second one is after the choice.
    model = wide_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    algorithm = AutoAlgorithm([SparseAlgorithm(0.01)], max_error=2.0)
    model.with_bagua([optimizer], algorithm, guard=Guard(every=200, residual=2.0))
    turn_clock(model, {EXACT: 1.0, "sparse": 0.5})
    states = []

    def run():
        for step in range(80):
            train(model, optimizer, 1, first=step)
            states.append(choice_of(model))

    said = [text for text in training.warnings_of(run) if "threshold" in text]
    assert len(said) == (dist.get_rank() == 0)
    order = list(dict.fromkeys(states))
    assert order == [("trying", None), ("chosen", "sparse"), ("chosen", EXACT)]
    assert model.bagua_stats()["choice"]["why"] == "sparse lost more than the guard allows"
    return choice_of(model), training.model_bits(model)


SITUATIONS = {
    overflows_at_first: FOUR,
    accumulated_and_evaluated: FOUR,
    uneven_inputs: FOUR,
    unfrozen_in_a_trial: FOUR,
    breached_after_the_choice: EXACT,
    sparse_gradients: EXACT,
}


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda function: function.__name__)
def test_steps_that_are_not_plain_leave_all_ranks_with_the_right_choice(ranks, situation):
    first, second = ranks(2, situation)
    assert first == second
    assert first[0] == ("chosen", SITUATIONS[situation])


def auto_state(seed=0):
    model, optimizer = wrapped(model=wide_network(seed))
    return model, optimizer, {"m": model, "o": optimizer, "a": model.bagua_algorithm}


@training.with_group
def resumed(folder):
    model, optimizer, state = auto_state()
    train(model, optimizer, UNTIL_CHOSEN + 4)
    save_checkpoint(folder, state, 4)
    train(model, optimizer, 3, first=4)
    again, its_optimizer, its_state = auto_state(seed=1)
    train(again, its_optimizer, 1, first=50)
    step = load_latest(folder, its_state)
    train(again, its_optimizer, 3, first=step)
    same = all_bits(again.bagua_algorithm.state_dict()) == all_bits(
        model.bagua_algorithm.state_dict()
    )
    return choice_of(again), same, training.model_bits(again) == training.model_bits(model)


def test_a_checkpoint_brings_the_choice_and_its_residuals_without_trials(ranks, tmp_path):
    assert ranks(2, resumed, str(tmp_path)) == [(("chosen", FOUR), True, True)] * 2


@training.with_group
def resumed_from_dcp(folder):
    model, optimizer, _ = auto_state()
    train(model, optimizer, UNTIL_CHOSEN + 4)
    dcp.save({"m": model, "a": model.bagua_algorithm}, checkpoint_id=folder)
    again, _, _ = auto_state(seed=1)
    for _ in range(2):  # the first brings the choice, whose residuals the second one asks for
        dcp.load({"m": again, "a": again.bagua_algorithm}, checkpoint_id=folder)
    states = [all_bits(one.bagua_algorithm.state_dict()) for one in (model, again)]
    return choice_of(again), states[0] == states[1]


def test_distributed_checkpoints_bring_the_choice_then_its_residuals(ranks, tmp_path):
    assert ranks(2, resumed_from_dcp, str(tmp_path)) == [(("chosen", FOUR), True)] * 2


@training.with_group
def saved_too_early_and_damaged():
    model, optimizer = wrapped()
    algorithm = model.bagua_algorithm
    train(model, optimizer, 20)
    early = algorithm.state_dict()
    assert early == {"choice": ""}
    algorithm.load_state_dict(early)
    for state, words in [
        ({"rounds": 3}, "no 'choice': it is of another algorithm"),
        ({"choice": "?"}, "none of the candidates gradient_allreduce, "),
        ({"choice": ["?"]}, "none of the candidates gradient_allreduce, "),
    ]:
        assert words in training.error_of(functools.partial(algorithm.load_state_dict, state))
    train(model, optimizer, UNTIL_CHOSEN - 20, first=20)
    return choice_of(model)


def test_a_state_from_before_the_choice_changes_nothing_and_others_are_refused(ranks):
    assert ranks(2, saved_too_early_and_damaged) == [("chosen", FOUR)] * 2


@training.with_group
def other_kinds():
    for name in ("decentralized", "diloco", "async"):
        with pytest.raises(ValueError, match="changes more than the way of gradients"):
            wrapped(algorithm=AutoAlgorithm([name]))


def test_algorithms_that_change_more_than_the_way_of_gradients_are_refused(ranks):
    ranks(2, other_kinds)


def warnings_of_the_start():
    try:
        return training.warnings_of(bagua.init_process_group)
    finally:
        bagua.destroy_process_group()


def test_variables_of_baguas_autotuning_are_taken_with_a_word_on_rank_0(ranks):
    asked = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_MAX_SAMPLES": "30"}
    first, second = ranks(2, warnings_of_the_start, env=asked)
    assert second == []
    (said,) = first
    assert "BAGUA_AUTOTUNE, BAGUA_AUTOTUNE_MAX_SAMPLES: no effect" in said
    assert "Algorithm.init('auto')" in said
    assert ranks(2, warnings_of_the_start, env={"BAGUA_AUTOTUNE": "0"}) == [[], []]
