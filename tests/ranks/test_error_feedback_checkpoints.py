"""Error feedback goes on from what was saved: to the bit, and by its mean with other ranks."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import training
from support.error_feedback import (
    ALGORITHMS,
    WITH_WARM_UP,
    all_bits,
    gathered_gradients,
    load,
    make,
    owed,
    saved,
    train_step,
    wrapped,
)

FURTHER = 20
WARM_UP = 3


@training.with_group
def resume(name, saved_after, used_before):
    """`used_before`: steps that the model has done with other data before it loads."""
    model, optimizer = wrapped(make(name, warmup_steps=WARM_UP))
    for step in range(saved_after):
        train_step(model, optimizer, step)
    state = saved(model, optimizer)
    again, its_optimizer = wrapped(make(name, warmup_steps=WARM_UP), seed=1)
    for step in range(used_before):
        train_step(again, its_optimizer, 50 + step)
    load(again, its_optimizer, state)
    for step in range(saved_after, saved_after + FURTHER):
        digests = set()
        for pair in ((model, optimizer), (again, its_optimizer)):
            train_step(*pair, step)
            training.assert_ranks_agree(pair[0])
            remembered = all_bits(pair[0].bagua_algorithm.state_dict())
            digests.add((training.model_bits(pair[0]), str(remembered)))
        assert len(digests) == 1, f"step {step}"
    return state[2]["rounds"]


@ALGORITHMS
@pytest.mark.parametrize("used_before", [0, WARM_UP + 2], ids=lambda n: f"after-{n}-others")
@pytest.mark.parametrize("saved_after", [1, WARM_UP, WARM_UP + 1, 8])
def test_training_goes_on_to_the_bit(ranks, name, saved_after, used_before):
    assert ranks(2, resume, name, saved_after, used_before) == [saved_after] * 2


@training.with_group
def resume_before_the_warm_up_ends(name, used_before):
    """Residuals of a warm-up that is over, in a training whose warm-up is longer."""
    model, optimizer = wrapped(make(name))
    for step in range(4):
        train_step(model, optimizer, step)
    state = saved(model, optimizer)
    again, its_optimizer = wrapped(make(name, warmup_steps=6), seed=1)
    for step in range(used_before):
        train_step(again, its_optimizer, 50 + step)
    load(again, its_optimizer, state)
    for step in (4, 5):
        assert all_bits(again.bagua_algorithm.state_dict(), "rounds")[0] == all_bits(state[2])[0]
        train_step(again, its_optimizer, step)
    names = [name for name, _ in again.named_parameters()]
    due = owed(training.gather(again.bagua_algorithm.state_dict()), names)
    assert any(value.any() for value in due.values())
    for gradients in (everyone := gathered_gradients(again, 6)):
        for name, gradient in gradients.items():
            due[name] += gradient / len(everyone)
    train_step(again, its_optimizer, 6)
    left = owed(training.gather(again.bagua_algorithm.state_dict()), names)
    return max(float((p.grad + left[n] - due[n]).abs().max()) for n, p in again.named_parameters())


@pytest.mark.parametrize("name", WITH_WARM_UP)
def test_residuals_that_are_loaded_before_the_warm_up_ends_wait_for_it(ranks, name):
    for used_before in (0, 2, 8):
        assert max(ranks(2, resume_before_the_warm_up_ends, name, used_before)) < 1e-5


@training.with_group
def train_and_save(name, steps):
    model, optimizer = wrapped(make(name))
    for step in range(steps):
        train_step(model, optimizer, step)
    return saved(model, optimizer)


@training.with_group
def load_and_train(name, state):
    """The memory as loaded, and after it training that keeps the ranks equal."""
    model, optimizer = wrapped(make(name), seed=1)
    load(model, optimizer, state)
    loaded = model.bagua_algorithm.state_dict()
    for step in range(5):
        train_step(model, optimizer, 100 + step)
        training.assert_ranks_agree(model)
    return loaded


def merged(states):
    model, optimizer, algorithm = copy.deepcopy(states[0])
    for state in states[1:]:
        algorithm |= state[2]
    return model, optimizer, algorithm


@ALGORITHMS
def test_what_is_owed_outlives_a_change_of_ranks(ranks, name):
    for before, after in ((3, 2), (1, 3)):
        states = ranks(before, train_and_save, name, 6)
        loaded = ranks(after, load_and_train, name, merged(states))
        names = [key.split("/", 2)[2] for key in states[0][2] if key.startswith("rank0/error/")]
        assert len(names) == 6
        expected = owed([state[2] for state in states], names)
        found = owed(loaded, names)
        assert before == 1 or any(value.abs().max() > 1e-3 for value in expected.values())
        for parameter, value in expected.items():
            torch.testing.assert_close(found[parameter], value, rtol=1e-6, atol=1e-8)


@training.with_group
def resume_from_dcp(name, folder):
    model, optimizer = wrapped(make(name))
    for step in range(4):
        train_step(model, optimizer, step)
    dcp.save({"model": model, "algorithm": model.bagua_algorithm}, checkpoint_id=folder)
    expected = all_bits(model.bagua_algorithm.state_dict())
    again, its_optimizer = wrapped(make(name), seed=1)
    train_step(again, its_optimizer, 50)
    dcp.load({"model": again, "algorithm": again.bagua_algorithm}, checkpoint_id=folder)
    assert training.bits(again.parameters()) == training.bits(model.parameters())
    return all_bits(again.bagua_algorithm.state_dict()) == expected


@ALGORITHMS
def test_distributed_checkpoints_keep_every_ranks_memory(ranks, name, tmp_path):
    assert ranks(2, resume_from_dcp, name, str(tmp_path)) == [True] * 2
