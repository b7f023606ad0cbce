"""QAdam's state that is loaded before the wrap, or without the optimizer's."""

import pytest
import torch.distributed as dist
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm
from support import q_adam_training as q_adam
from support import training
from support.q_adam_training import WARM_UP

FURTHER = 6


def assert_goes_on(pairs, first):
    for step in range(first, first + FURTHER):
        for model, optimizer in pairs:
            q_adam.train_step(model, optimizer, step)
            q_adam.assert_ranks_agree(model, optimizer)
        bits = {q_adam.all_bits(*pair) for pair in pairs}
        assert len(bits) == 1, f"step {step}"
        assert [q_adam.compressing(model) for model, _ in pairs] == [step >= WARM_UP] * len(pairs)


@training.with_group
def resume_before_the_wrap(saved_after, everywhere):
    """State is loaded before with_bagua, perhaps on rank 0 alone: the wrap gives it to all."""
    model, optimizer = q_adam.wrapped()
    for step in range(saved_after):
        q_adam.train_step(model, optimizer, step)
    state = q_adam.saved(model, optimizer)
    again = training.network(seed=1 + dist.get_rank())
    its_optimizer = q_adam.optimizer_of(again)
    if everywhere or dist.get_rank() == 0:
        again.load_state_dict(state[0])
        its_optimizer.load_state_dict(state[1])
    chosen = QAdamAlgorithm(its_optimizer, hierarchical=False)
    again.with_bagua([its_optimizer], chosen)
    compressing = again.bagua_algorithm.compressing
    assert_goes_on([(model, optimizer), (again, its_optimizer)], saved_after)
    return compressing


@pytest.mark.parametrize(
    ("saved_after", "everywhere"), [(1, False), (WARM_UP, True), (WARM_UP + 2, False)]
)
def test_state_loaded_before_the_wrap_goes_on_in_its_phase(ranks, saved_after, everywhere):
    results = ranks(3, resume_before_the_wrap, saved_after, everywhere)
    assert results == [saved_after >= WARM_UP] * 3


@training.with_group
def load_alone():
    model, optimizer = q_adam.wrapped()
    for step in range(2):
        q_adam.train_step(model, optimizer, step)
    again, its_optimizer = q_adam.wrapped(seed=1, warmup_steps=50)
    state = q_adam.saved(model, optimizer)
    again.bagua_algorithm.load_state_dict(state[2])
    message = training.error_of(lambda: q_adam.train_step(again, its_optimizer, 2), ValueError)
    q_adam.load(again, its_optimizer, state)
    assert its_optimizer.warmup_steps == WARM_UP, "the checkpoint's"
    assert_goes_on([(model, optimizer), (again, its_optimizer)], 2)
    return message


def test_a_state_without_the_optimizers_is_refused_and_says_what_to_do(ranks):
    for message in ranks(2, load_alone):
        assert "saved after 2 steps, the optimizer has done 0. Load the optimizer's" in message
