"""The anchor of local training between rounds: evaluated, protected, and joined on request."""

import torch
import torch.distributed as dist
from ranks.test_diloco import (
    assert_outer_state_agrees,
    assert_weights_are_the_anchor,
    outer_state,
    own_step,
    own_steps,
)
from ranks.test_diloco_situations import normalised, wrapped
from support import training


@training.with_group
def evaluate_between_rounds():
    """Evaluation on some ranks only, in every way, sends nothing and changes nothing."""
    model, optimizer = wrapped(normalised(), interval=3)
    twin, of_twin = wrapped(normalised(), interval=3)
    outputs = []
    data = training.batch(99, 0)[0]
    for step in range(5):
        own_step(model, optimizer, step)
        own_step(twin, of_twin, step)
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model(data)
            with model.bagua_algorithm.anchor():
                model(data)
            model(data).sum()
            model.train()
    before = training.bits(model.parameters())
    with model.bagua_algorithm.anchor():
        assert_weights_are_the_anchor(model)
        outputs.append(training.bits(model.parameters()))
    assert training.bits(model.parameters()) == before
    assert training.bits([*model.parameters(), *model.buffers()]) == training.bits(
        [*twin.parameters(), *twin.buffers()]
    )
    return outputs, before


def test_the_anchor_can_be_evaluated_and_leaves_no_trace(ranks):
    (anchor, own), (other_anchor, other) = ranks(2, evaluate_between_rounds)
    assert anchor == other_anchor
    assert own != other


@training.with_group
def inside_anchor():
    model, optimizer = wrapped(interval=3)
    own_step(model, optimizer, 0)
    own = training.bits(model.parameters())
    errors = []
    with model.bagua_algorithm.anchor():
        errors.append(training.error_of(lambda: model(training.batch(0, 0)[0])))
        errors.append(training.error_of(optimizer.step))
        errors.append(training.error_of(model.bagua_algorithm.sync))
        with model.bagua_algorithm.anchor():
            assert_weights_are_the_anchor(model)
        assert_weights_are_the_anchor(model)
    assert training.bits(model.parameters()) == own
    own_steps(model, optimizer, range(1, 3))
    assert model.bagua_algorithm.outer_rounds == 1
    return errors


def test_training_inside_anchor_is_refused_and_another_anchor_is_the_same(ranks):
    for errors in ranks(2, inside_anchor):
        for what, error in zip(
            ("a training forward", "optimizer.step()", "sync()"), errors, strict=True
        ):
            assert error.startswith("BaguaError")
            assert f"{what} inside anchor()" in error


@training.with_group
def sync_at_the_end():
    model, optimizer = wrapped(interval=10)
    own_steps(model, optimizer, range(4))
    model.bagua_algorithm.sync()
    assert_outer_state_agrees(model)
    assert_weights_are_the_anchor(model)
    before = training.bits(outer_state(model).values())
    model.bagua_algorithm.sync()  # nothing has been trained since
    assert training.bits(outer_state(model).values()) == before
    rounds = model.bagua_algorithm.outer_rounds
    own_steps(model, optimizer, range(10))
    return rounds, model.bagua_algorithm.outer_rounds


def test_sync_makes_a_round_now_and_none_where_nothing_was_trained(ranks):
    assert ranks(3, sync_at_the_end) == [(1, 2)] * 3
