"""State of communication hooks: saved, loaded, in new buckets, of skipped ones, refused."""

import copy

import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm, PowerSGDAlgorithm, SparseAlgorithm
from support import hooked, training
from support.cases import over
from support.error_feedback import all_bits, owed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 3
REMEMBERING = {
    "power_sgd": lambda **more: PowerSGDAlgorithm(
        2, **{"min_compression_rate": 1.0, "warmup_steps": 0} | more
    ),
    "sparse": lambda **more: SparseAlgorithm(0.05, **more),
    "two residuals": lambda: ByteGradAlgorithm(False, codec="int4_block", error_feedback=True),
}
algorithms = over(name=["power_sgd", "sparse"])


def made(name, situation="small_buckets", **more):
    return hooked.made(situation, REMEMBERING[name](**more))


def steps(ddp, optimizer, first, count):
    for step in range(first, first + count):
        optimizer.zero_grad()
        hooked.plain_step(ddp, step)
        optimizer.step()


@training.with_group
def resumed(name, arguments):
    ddp, handle, optimizer = made(name, **arguments)
    steps(ddp, optimizer, 0, STEPS)
    saved = copy.deepcopy((handle.state_dict(), ddp.state_dict(), optimizer.state_dict()))
    steps(ddp, optimizer, STEPS, STEPS)
    other, other_handle, other_optimizer = made(name, **arguments)
    steps(other, other_optimizer, 40, 2)  # something else, to be forgotten, in the new buckets
    for part, state in zip((other_handle, other, other_optimizer), saved, strict=True):
        part.load_state_dict(state)
    steps(other, other_optimizer, STEPS, STEPS)
    mine, theirs = handle.state_dict(), other_handle.state_dict()
    assert all_bits(mine) == all_bits(theirs)
    return training.model_bits(ddp) == training.model_bits(other), mine["rounds"]


CASES = [
    ("power_sgd", {}),
    ("power_sgd", {"warmup_steps": 4}),
    ("sparse", {"warmup_steps": 2}),
    ("two residuals", {}),
]


@over(case=CASES)
def test_training_goes_on_from_a_state_bit_by_bit(ranks, case):
    assert ranks(3, resumed, *case) == [(True, 2 * STEPS)] * 3


def conserved(situation, ddp, handle, optimizer, steps):
    """Largest distance of exact means from results and what is owed."""
    parameters = dict(ddp.module.named_parameters())
    total = {name: torch.zeros_like(p).double() for name, p in parameters.items()}
    for step in steps:
        optimizer.zero_grad()
        twin = copy.deepcopy(ddp.module)
        for model in (twin, ddp):
            hooked.SITUATIONS[situation][2](model, step)
        for name, own in twin.named_parameters():
            local = torch.zeros_like(own) if own.grad is None else own.grad
            got = 0 if parameters[name].grad is None else parameters[name].grad.double()
            total[name] += training.mean_over_ranks(local.double()) - got
        optimizer.step()
    training.assert_ranks_agree(ddp)
    after = owed(training.gather(handle.state_dict()), parameters)
    assert any(value.any() for value in after.values())
    return max(float((value - after[name]).abs().max()) for name, value in total.items())


@training.with_group
def over_new_buckets(name, situation):
    return conserved(situation, *made(name, situation), range(2 * STEPS))


SITUATIONS = [
    *("default", "small_buckets", "bucket_view", "static_graph"),
    *("channels_last", "unused_by_some"),
]


@over(name=["power_sgd", "sparse"], situation=SITUATIONS)
def test_nothing_is_lost_when_torch_makes_its_buckets_anew(ranks, name, situation):
    assert max(ranks(2, over_new_buckets, name, situation)) < 1e-5


@over(n=[2, 3])
def test_nothing_is_lost_of_two_residuals_in_new_buckets(ranks, n):
    assert max(ranks(n, over_new_buckets, "two residuals", "small_buckets")) < 1e-6


@training.with_group
def beside_with_bagua(name):
    """A state of the wrapped module fits the hook, and the other way round."""
    model = hooked.network()
    optimizer = training.sgd(model)
    model = model.with_bagua([optimizer], REMEMBERING[name]())
    algorithm = model.bagua_algorithm
    steps(model, optimizer, 0, STEPS)
    ddp, handle, own = made(name)
    for part, other in ((ddp.module, model), (own, optimizer), (handle, algorithm)):
        part.load_state_dict(copy.deepcopy(other.state_dict()))
    steps(ddp, own, STEPS, STEPS)
    if name == "power_sgd":  # what it sends does not depend on the buckets
        steps(model, optimizer, STEPS, STEPS)
        training.assert_close(ddp.module, model)
    back = handle.state_dict()
    assert back.keys() == algorithm.state_dict().keys()
    algorithm.load_state_dict(back)
    assert all_bits(algorithm.state_dict()) == all_bits(back)
    return back["rounds"]


@algorithms
def test_states_of_wrapped_modules_and_of_hooks_are_alike(ranks, name):
    assert ranks(2, beside_with_bagua, name) == [2 * STEPS] * 2


@training.with_group
def warm_up():
    ddp, handle, optimizer = made("sparse", warmup_steps=2)
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
    ddp, handle, optimizer = made(name, "unused_and_skipped")
    residuals = [f"rank{dist.get_rank()}/error/{side}.weight" for side in ("left", "right")]
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        hooked.one_way(ddp, step)
        optimizer.step()
        state = handle.state_dict()
        seen.append([training.bits([state[key]]) for key in residuals if key in state])
    return seen, {bucket["rounds"] for bucket in handle.stats()["buckets"]}


@algorithms
def test_memory_of_a_bucket_that_is_not_called_stays(ranks, name):
    for seen, rounds in ranks(2, skipped, name):
        assert rounds == {3, 6}
        for step in range(2, 6):
            used = step % 2
            assert seen[step][used] != seen[step - 1][used]
            assert seen[step][1 - used] == seen[step - 1][1 - used]


class Turns(torch.nn.Module):
    """Two layers that share no parameter, of which a step uses one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)

    def forward(self, inputs, part):
        return getattr(self, part)(inputs)


@training.with_group
def in_turns():
    """Torch numbers its buckets from the last layer on: the second step's are above the first's."""
    arguments = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = DistributedDataParallel(Turns(), **arguments, **hooked.ALONE)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    rounds, scales, scale = [], [], scaler.get_scale
    scaler.get_scale = lambda: scales.append(scale()) or scales[-1]
    handle = comm_hooks.register(ddp, SparseAlgorithm(0.5), grad_scaler=scaler)
    for part in ("last", "first", "last", "first", "first", "last"):
        ddp(torch.ones(2, 5), part).sum().backward()
        rounds.append(handle.stats()["rounds"])
    return rounds, len(scales)


def test_a_round_may_begin_with_any_bucket(ranks):
    for rounds, scales in ranks(2, in_turns):
        assert rounds == [1, 2, 3, 4, 5, 6]
        assert scales == 6


class Recomputed(torch.nn.Sequential):
    """Each layer's backward is a graph task inside the backward."""

    def forward(self, inputs):
        for layer in self:
            inputs = checkpoint(layer, inputs, use_reentrant=True)
        return inputs


@training.with_group
def recomputed():
    layers = Recomputed(*(torch.nn.Linear(5, 5) for _ in range(3)))
    ddp = DistributedDataParallel(layers, **hooked.ALONE)
    handle = comm_hooks.register(ddp, SparseAlgorithm(0.5))
    for _ in range(3):
        ddp(torch.ones(2, 5, requires_grad=True)).sum().backward()
    return handle.stats()["rounds"]


def test_a_backward_of_several_graph_tasks_is_one_round(ranks):
    assert ranks(2, recomputed) == [3, 3]


@training.with_group
def overflow(name):
    """A round with infinity in one bucket leaves the memory of all as it was."""
    ddp, handle, optimizer = made(name)
    steps(ddp, optimizer, 0, 3)
    before = handle.state_dict()
    ddp.zero_grad()
    loss = hooked.loss_of(ddp, 3, dist.get_rank())
    (loss + ddp.module[4].bias.sum() * float("inf")).backward()
    after = handle.state_dict()
    assert any(not p.grad.isfinite().all() for p in ddp.parameters())
    assert after["rounds"] == before["rounds"] + 1
    return all_bits(after, but="rounds") == all_bits(before, but="rounds")


@algorithms
def test_a_round_that_overflows_changes_no_memory(ranks, name):
    assert ranks(2, overflow, name) == [True, True]


@training.with_group
def wrong_states():
    ddp, handle, optimizer = made("power_sgd")
    steps(ddp, optimizer, 0, 2)
    state = handle.state_dict()
    _, stateless, _ = hooked.made("small_buckets", "gradient_allreduce")
    assert stateless.state_dict() == {}
    stateless.load_state_dict({})
    missing = {key: value for key, value in state.items() if key != "query/2.weight"}
    said = [
        training.error_of(lambda: handle.load_state_dict(missing)),
        training.error_of(lambda: stateless.load_state_dict(state)),
    ]
    steps(ddp, optimizer, 2, 1)  # nothing has changed
    assert handle.state_dict()["rounds"] == 3
    return said


def test_wrong_states_are_refused(ranks):
    for missing, stateless in ranks(2, wrong_states):
        assert missing.startswith("ValueError: the state has no 'query/2.weight'")
        assert "remembers nothing" in stateless
