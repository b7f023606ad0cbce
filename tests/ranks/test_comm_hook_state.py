"""State of communication hooks: saved, loaded, in new buckets, of skipped ones, refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm, PowerSGDAlgorithm, SparseAlgorithm
from support import hooked, training
from support.error_feedback import owed

STEPS = 3
REMEMBERING = {
    "power_sgd": lambda **more: PowerSGDAlgorithm(
        2, **{"min_compression_rate": 1.0, "warmup_steps": 0} | more
    ),
    "sparse": lambda **more: SparseAlgorithm(0.05, **more),
}
algorithms = pytest.mark.parametrize("name", REMEMBERING)
NAMES = [name for name, _ in hooked.network().named_parameters()]


def two_residuals(**_):
    return ByteGradAlgorithm(hierarchical=False, codec="int4_block", error_feedback=True)


def steps(ddp, optimizer, first, count):
    for step in range(first, first + count):
        optimizer.zero_grad()
        hooked.plain_step(ddp, step)
        optimizer.step()


@training.with_group
def resumed(name, warmup):
    def fresh():
        make = REMEMBERING.get(name, two_residuals)
        return hooked.made("small_buckets", make(warmup_steps=warmup))

    ddp, handle, optimizer = fresh()
    steps(ddp, optimizer, 0, STEPS)
    saved = handle.state_dict(), ddp.module.state_dict(), optimizer.state_dict()
    saved = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, saved)
    steps(ddp, optimizer, STEPS, STEPS)
    other, other_handle, other_optimizer = fresh()
    steps(other, other_optimizer, 40, 2)  # something else, to be forgotten, in the new buckets
    other.module.load_state_dict(saved[1])
    other_optimizer.load_state_dict(saved[2])
    other_handle.load_state_dict(saved[0])
    # The copy has been through the rebuild that the original has been through as well.
    steps(other, other_optimizer, STEPS, STEPS)
    mine, theirs = handle.state_dict(), other_handle.state_dict()
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert (
            torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key]))
            if not isinstance(value, str)
            else value == theirs[key]
        ), key
    return training.model_bits(ddp) == training.model_bits(other), mine["rounds"]


@pytest.mark.parametrize(
    ("name", "warmup"),
    [("power_sgd", 0), ("power_sgd", 4), ("sparse", 2), ("two residuals", 0)],
)
def test_training_goes_on_from_a_state_bit_by_bit(ranks, name, warmup):
    assert ranks(3, resumed, name, warmup) == [(True, 2 * STEPS)] * 3


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
    ddp, handle, _ = hooked.made("small_buckets", two_residuals())
    return conserved(ddp, handle, range(STEPS), nothing())


@pytest.mark.parametrize("size", [2, 3], ids=lambda n: f"{n}-ranks")
def test_nothing_is_lost_when_torch_makes_its_buckets_anew(ranks, size):
    assert max(ranks(size, over_new_buckets)) < 1e-6


@training.with_group
def resumed_in_new_buckets():
    ddp, handle, _ = hooked.made("small_buckets", two_residuals())
    for step in range(STEPS):
        ddp.zero_grad()
        hooked.plain_step(ddp, step)
    state = handle.state_dict()
    other, of_other, _ = hooked.made("small_buckets", two_residuals())
    of_other.load_state_dict(state)
    assert of_other.state_dict().keys() == state.keys()
    before = owed(training.gather(state), NAMES)
    return conserved(other, of_other, range(STEPS, 2 * STEPS), before)


def test_a_state_goes_into_buckets_of_other_parts_without_a_loss(ranks):
    assert max(ranks(3, resumed_in_new_buckets)) < 1e-6


@training.with_group
def save_two_residuals():
    ddp, handle, _ = hooked.made("small_buckets", two_residuals())
    for step in range(STEPS):
        ddp.zero_grad()
        hooked.plain_step(ddp, step)
    return handle.state_dict()


@training.with_group
def load_two_residuals(merged, before):
    ddp, handle, _ = hooked.made("small_buckets", two_residuals())
    handle.load_state_dict(merged)
    return conserved(ddp, handle, range(STEPS), before)


def test_the_merged_state_of_other_ranks_owes_the_same(ranks):
    states = ranks(3, save_two_residuals)
    merged = {key: value for state in states for key, value in state.items()}
    assert max(ranks(2, load_two_residuals, merged, owed(states, NAMES))) < 1e-6


@training.with_group
def from_with_bagua(name):
    """A state of the wrapped module fits the hook, and the other way round."""
    model = hooked.network()
    optimizer = training.sgd(model)
    model = model.with_bagua([optimizer], REMEMBERING[name]())
    steps(model, optimizer, 0, STEPS)
    state = model.bagua_algorithm.state_dict()
    ddp, handle, own = hooked.made("small_buckets", REMEMBERING[name]())
    handle.load_state_dict(state)
    assert handle.state_dict().keys() == state.keys()
    steps(ddp, own, 0, 1)
    back = handle.state_dict()
    assert back.keys() == state.keys()
    model.bagua_algorithm.load_state_dict(back)
    return back["rounds"]


@algorithms
def test_states_of_wrapped_modules_and_of_hooks_are_alike(ranks, name):
    assert ranks(2, from_with_bagua, name) == [STEPS + 1] * 2


@training.with_group
def warm_up():
    ddp, handle, optimizer = hooked.made("small_buckets", REMEMBERING["sparse"](warmup_steps=2))
    plain, _, plain_optimizer = hooked.made("small_buckets")
    alike, operations = [], []
    for step in range(4):
        steps(ddp, optimizer, step, 1)
        steps(plain, plain_optimizer, step, 1)
        alike.append(training.model_bits(ddp) == training.model_bits(plain))
        operations.append("Sparse" in str(handle.stats()["buckets"]))
    return alike, operations


def test_the_warm_up_is_exact(ranks):
    for alike, operations in ranks(2, warm_up):
        assert alike == [True, True, False, False]
        assert operations == [False, False, True, True]


@training.with_group
def skipped(name):
    """Every step uses one of two branches; buckets of the other are not called at all."""
    ddp, handle, optimizer = hooked.made("unused_and_skipped", REMEMBERING[name]())
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        hooked.one_way(ddp, step)
        optimizer.step()
        state = handle.state_dict()
        rank = dist.get_rank()
        seen.append(
            [
                training.bits([state[f"rank{rank}/error/{side}.weight"]])
                for side in ("left", "right")
                if f"rank{rank}/error/{side}.weight" in state
            ]
        )
    return seen, {bucket["rounds"] for bucket in handle.stats()["buckets"]}


@algorithms
def test_memory_of_a_bucket_that_is_not_called_stays(ranks, name):
    for seen, rounds in ranks(2, skipped, name):
        assert rounds == {3, 6}
        for step in range(2, 6):
            used = step % 2
            assert seen[step][used] != seen[step - 1][used]
            assert seen[step][1 - used] == seen[step - 1][1 - used]


@training.with_group
def overflow(name):
    """A round with infinity in one bucket leaves the memory of all as it was."""
    ddp, handle, optimizer = hooked.made("small_buckets", REMEMBERING[name]())
    steps(ddp, optimizer, 0, 3)
    before = handle.state_dict()
    ddp.zero_grad()
    loss = hooked.loss_of(ddp, 3, dist.get_rank())
    (loss + ddp.module[4].bias.sum() * float("inf")).backward()
    after = handle.state_dict()
    assert any(not p.grad.isfinite().all() for p in ddp.parameters())
    assert after["rounds"] == before["rounds"] + 1
    return [
        key
        for key, value in before.items()
        if isinstance(value, torch.Tensor) and not torch.equal(value, after[key])
    ]


@algorithms
def test_a_round_that_overflows_changes_no_memory(ranks, name):
    assert ranks(2, overflow, name) == [[], []]


@training.with_group
def wrong_states():
    ddp, handle, optimizer = hooked.made("small_buckets", REMEMBERING["power_sgd"]())
    steps(ddp, optimizer, 0, 2)
    state = handle.state_dict()
    _, stateless, _ = hooked.made("small_buckets", "gradient_allreduce")
    assert stateless.state_dict() == {}
    stateless.load_state_dict({})
    missing = {key: value for key, value in state.items() if key != "query/2.weight"}
    shape = state | {"query/2.weight": torch.zeros(1, 1)}
    said = [
        training.error_of(lambda wrong=wrong, of=of: of.load_state_dict(wrong))
        for wrong, of in (
            (missing, handle),
            (shape, handle),
            ({"something": 1}, handle),
            (state | {"ranks": "0 1 2"}, handle),
            (state, stateless),
        )
    ]
    steps(ddp, optimizer, 2, 1)  # nothing has changed
    assert handle.state_dict()["rounds"] == 3
    return said


def test_wrong_states_are_refused(ranks):
    for missing, shape, other, ranks_differ, stateless in ranks(2, wrong_states):
        assert missing.startswith("ValueError: the state has no 'query/2.weight'")
        assert shape.startswith("ValueError: 'query/2.weight' is (1, 1) in the state")
        assert "has no 'rounds'" in other
        assert "was saved by ranks 0 1 2 and is loaded by 0 1: merge" in ranks_differ
        assert "remembers nothing" in stateless
