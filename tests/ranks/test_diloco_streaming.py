"""Fragments, and rounds that last several steps."""

import time

import pytest
import torch.distributed as dist
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from ranks.test_diloco import (
    adamw,
    assert_outer_state_agrees,
    assert_weights_are_the_anchor,
    layers,
    own_step,
    own_steps,
)
from support import training


@training.with_group
def fragment_by_fragment(fragments):
    """The number of different versions of each layer among the ranks, after each step."""
    model = layers()
    optimizer = adamw(model)
    algorithm = DiLoCoAlgorithm(OuterSGD(0.7, 0.9), interval=4, fragments=fragments)
    model.with_bagua([optimizer], algorithm)
    versions, sent, before = [], [], 0
    for step in range(8):
        own_step(model, optimizer, step)
        versions.append(
            "".join(
                str(len(set(training.gather(training.bits(layer.parameters()))))) for layer in model
            )
        )
        now = model.bagua_stats()["total"]["bytes_sent"]
        sent.append(now - before)
        before = now
    assert_outer_state_agrees(model)
    assert model.bagua_algorithm.outer_rounds == 4
    return versions, sent


def layer_modulo_two(name):
    return int(name.split(".")[0]) % 2


@pytest.mark.parametrize(
    "fragments",
    [2, [["0", "2"], ["1", "3"]], layer_modulo_two],
    ids=["number", "names", "function"],
)
def test_fragments_are_averaged_in_turn(ranks, fragments):
    for versions, sent in ranks(2, fragment_by_fragment, fragments):
        assert versions == ["2222", "1212", "2222", "2121"] * 2
        assert sent[0] == sent[2] == sent[4] == sent[6] == 0
        assert 0 < sent[1] == sent[5]
        assert 0 < sent[3] == sent[7]


@training.with_group
def a_step_too_many():
    """Rank 1 makes two steps that the others do not."""
    model = layers()
    optimizer = adamw(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(interval=4, fragments=2))

    def train():
        for step in range(8):
            own_step(model, optimizer, step)
            if step == 0 and dist.get_rank() == 1:
                model.bagua_algorithm._loop.state.steps += 2  # as if it had been loaded wrongly

    return training.error_of(train)


def test_ranks_at_different_fragments_are_told(ranks):
    for error in ranks(2, a_step_too_many):
        assert error.startswith("BaguaMismatchError")
        assert "ranks differ in the fragment that they average (rank 0: 1, rank 1: 2)" in error


@training.with_group
def end_in_flight(how):
    """Whether ranks can end while a round is under way, one of them much later."""
    model = layers()
    optimizer = adamw(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(interval=4, overlap_steps=2))
    own_steps(model, optimizer, range(4))
    assert model.bagua_algorithm.state_dict()["in_flight"] == 1
    if how == "sync":
        model.bagua_algorithm.sync()
        assert_weights_are_the_anchor(model)
        return model.bagua_algorithm.outer_rounds
    if how == "again":
        model.with_bagua([optimizer], DiLoCoAlgorithm(interval=4))
        own_steps(model, optimizer, range(4))
        return model.bagua_algorithm.outer_rounds
    model.bagua_ddp.close()
    return 0


@pytest.mark.parametrize(("how", "rounds"), [("sync", 1), ("again", 1), ("close", 0)])
def test_a_round_under_way_is_ended_first(ranks, how, rounds):
    assert ranks(2, end_in_flight, how) == [rounds] * 2


@training.with_group
def close_before_the_other_launches():
    """Rank 0 closes with a round under way, which rank 1 joins later than a lane is waited for."""
    model = layers()
    optimizer = adamw(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(interval=4, overlap_steps=2))
    late = dist.get_rank() == 1
    for step in range(6 if late else 4):
        if late and step == 3:
            time.sleep(2.5)
        own_step(model, optimizer, step)
    rounds = model.bagua_algorithm.outer_rounds
    model.bagua_ddp.close()
    return rounds


def test_a_rank_that_closes_answers_the_round_under_way(ranks):
    assert ranks(2, close_before_the_other_launches) == [0, 1]


def from_one(name):
    return 1


def negative(name):
    return -1


MISFITS = [
    (6, "no ModuleList or Sequential of that many layers with trained parameters, only of 4"),
    ([["0", "1"], ["2"]], "parameter '3.weight' is in no fragment"),
    ([["0", "1"], ["1", "2", "3"]], "parameter '1.weight' is in fragments [0, 1]"),
    ([["0", "1"], ["2", "3"], ["nothing"]], "fragment(s) [2] of 3 have no parameter"),
    (from_one, "fragment(s) [0] of 2 have no parameter"),
    (negative, "fragments('0.weight') is -1, not a number from 0"),
]


@training.with_group
def refused():
    errors = []
    for fragments, _ in MISFITS:
        model = layers()
        wrap = [adamw(model)], DiLoCoAlgorithm(interval=8, fragments=fragments)
        errors.append(training.error_of(lambda m=model, w=wrap: m.with_bagua(*w), ValueError))
    return errors


def test_fragments_that_do_not_fit_the_module_are_refused(ranks):
    (errors,) = ranks(1, refused)
    for error, (_, text) in zip(errors, MISFITS, strict=True):
        assert text in error
