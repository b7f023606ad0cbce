"""Both residuals of compressed means in communication hooks: over new buckets, and resumed."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm
from support import hooked, training
from support.error_feedback import owed

NAMES = [name for name, _ in hooked.network().named_parameters()]
STEPS = 3


def algorithm():
    return ByteGradAlgorithm(hierarchical=False, codec="int4_block", error_feedback=True)


def made():
    return hooked.made("small_buckets", algorithm())


def exact_mean(ddp, step):
    """By name, of this step's gradients of all ranks, without the hook."""
    twin = copy.deepcopy(ddp.module)
    twin.zero_grad()
    hooked.loss_of(twin, step, dist.get_rank()).backward()
    return {name: training.mean_over_ranks(p.grad.double()) for name, p in twin.named_parameters()}


def conserved(ddp, handle, steps, before):
    """Largest distance of exact means, and what was owed, from results and what is owed.

    The weights stay, so that the steps' gradients are the ranks' own.
    """
    total = {name: value.clone() for name, value in before.items()}
    for step in steps:
        for name, mean in exact_mean(ddp, step).items():
            total[name] += mean
        ddp.zero_grad()
        hooked.plain_step(ddp, step)
        for name, p in ddp.module.named_parameters():
            total[name] -= p.grad.double()
    after = owed(training.gather(handle.state_dict()), NAMES)
    assert all(value.any() for value in after.values())
    return max(float((total[name] - after[name]).abs().max()) for name in NAMES)


def nothing():
    return {name: torch.zeros_like(p).double() for name, p in hooked.network().named_parameters()}


@training.with_group
def over_new_buckets():
    ddp, handle, _ = made()
    return conserved(ddp, handle, range(STEPS), nothing())


@pytest.mark.parametrize("size", [2, 3], ids=lambda n: f"{n}-ranks")
def test_nothing_is_lost_when_torch_makes_its_buckets_anew(ranks, size):
    assert max(ranks(size, over_new_buckets)) < 1e-6


@training.with_group
def resumed():
    """Bits of a training that goes on, and of one that was resumed in buckets alike."""
    ddp, handle, optimizer = made()
    hooked.train("small_buckets", ddp, optimizer, STEPS)
    saved = handle.state_dict(), ddp.module.state_dict(), optimizer.state_dict()
    saved = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, saved)
    hooked.train("small_buckets", ddp, optimizer, STEPS)
    other, of_handle, of_other = made()
    hooked.train("small_buckets", other, of_other, 1)  # so that its buckets are made anew
    other.module.load_state_dict(saved[1])
    of_other.load_state_dict(saved[2])
    of_handle.load_state_dict(saved[0])
    hooked.train("small_buckets", other, of_other, STEPS)
    mine, theirs = handle.state_dict(), of_handle.state_dict()
    servers = [key for key in saved[0] if "/server/" in key and saved[0][key].any()]
    same = mine.keys() == theirs.keys() and all(
        torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key]))
        for key in mine
        if key != "ranks"
    )
    return same, len(servers) > 0, training.model_bits(ddp), training.model_bits(other)


def test_a_resumed_training_has_the_bits_of_one_that_went_on(ranks):
    for same, has_servers, went_on, other in ranks(3, resumed):
        assert same
        assert has_servers
        assert went_on == other


@training.with_group
def resumed_in_new_buckets():
    ddp, handle, _ = made()
    for step in range(STEPS):
        ddp.zero_grad()
        hooked.plain_step(ddp, step)
    state = handle.state_dict()
    other, of_other, _ = made()
    of_other.load_state_dict(state)
    assert of_other.state_dict().keys() == state.keys()
    before = owed(training.gather(state), NAMES)
    return conserved(other, of_other, range(STEPS, 2 * STEPS), before)


def test_a_state_goes_into_buckets_of_other_parts_without_a_loss(ranks):
    assert max(ranks(3, resumed_in_new_buckets)) < 1e-6


@training.with_group
def save():
    ddp, handle, _ = made()
    for step in range(STEPS):
        ddp.zero_grad()
        hooked.plain_step(ddp, step)
    return handle.state_dict()


@training.with_group
def load(merged, before):
    ddp, handle, _ = made()
    handle.load_state_dict(merged)
    return conserved(ddp, handle, range(STEPS), before)


def test_the_merged_state_of_other_ranks_owes_the_same(ranks):
    states = ranks(3, save)
    merged = {key: value for state in states for key, value in state.items()}
    assert max(ranks(2, load, merged, owed(states, NAMES))) < 1e-6
