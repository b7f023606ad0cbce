"""Residuals and weights of ranks over a failed round, and over a change of ranks."""

import signal

import pytest
import torch
import torch.distributed as dist
from bagua._outer.elastic import ElasticRanks
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from ranks.test_diloco import assert_outer_state_agrees, own_step, own_steps
from ranks.test_elastic_rounds import fail_round, wrapped
from support import training
from support.error_feedback import owed, residuals

PLAIN = OuterSGD(1.0, 0.0)
INTERVAL = 3


def shares_of(state, rank, size, names):
    """What a rank's residuals are in the mean of so many ranks, and its server residuals."""
    found = {}
    for name in names:
        found[name] = state[f"rank{rank}/error/{name}"].double() / size
        for key, value in state.items():
            if key.startswith(f"rank{rank}/server/") and key.endswith(f"/{name}"):
                first = int(key.split("/")[2])
                found[name].view(-1)[first : first + value.numel()] += value
    return found


def assert_owed(states, names, expected, atol):
    found = owed(states, names)
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol)


def watch_change(seen):
    """Appends what `seen` has room for when the plan has been replaced; call the result to end."""
    original = ElasticRanks.change

    def change(self, *arguments):
        original(self, *arguments)
        seen()

    ElasticRanks.change = change
    return lambda: setattr(ElasticRanks, "change", original)


def flat_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def compressed():
    return DiLoCoAlgorithm(PLAIN, INTERVAL, codec="bit2_block", elastic=True)


@training.with_group
def round_fails(method, victim):
    """Residuals around a failed second round: before, after it, and after the change of plans."""
    model, optimizer = wrapped(compressed())
    plain = DiLoCoAlgorithm(PLAIN, INTERVAL, codec="bit2_block")
    undisturbed, of_undisturbed = wrapped(plain)
    restore = fail_round(2, victim, method)
    after_change = []
    end = watch_change(lambda: after_change.append(model.bagua_algorithm.state_dict()))
    before = after = None
    try:
        step = 0
        while not after_change:
            own_step(model, optimizer, step)
            step += 1
            if step == INTERVAL:
                before = residuals(model)
            if step == 2 * INTERVAL and method == "confirm":
                after = residuals(model)
    finally:
        restore()
        end()
    while model.bagua_algorithm.outer_rounds < 4:
        own_step(model, optimizer, step)
        step += 1
    assert_outer_state_agrees(model)
    own_steps(undisturbed, of_undisturbed, range(2 * INTERVAL))
    same = after is not None and all(torch.equal(before[key], after[key]) for key in before)
    return before, same, after_change[0], undisturbed.bagua_algorithm.state_dict()


def names_of(state):
    return [key.removeprefix("anchor/") for key in state if key.startswith("anchor/")]


def test_a_failed_round_changes_no_residual(ranks):
    befores, sames, afters, _ = zip(*ranks(3, round_fails, "confirm", 1), strict=True)
    assert sames == (True,) * 3
    names = names_of(afters[0])
    expected = owed(befores, names)
    assert all(value.any() for value in expected.values())
    assert_owed(afters, names, expected, 1e-7)


def test_a_rank_that_missed_a_result_keeps_what_the_round_left(ranks):
    _, _, afters, expected = zip(*ranks(3, round_fails, "confirmed", 2), strict=True)
    names = names_of(afters[0])
    assert_owed(afters, names, owed(expected, names), 1e-7)


DIES = """
import datetime, os, signal, sys
import torch
import bagua.torch_api as bagua
from bagua._core.group import membership
from bagua._outer.elastic import ElasticRanks
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD

membership.SECONDS_OF_SILENCE = 2.0
torch.manual_seed(0)
bagua.init_process_group(timeout=datetime.timedelta(seconds=15), elastic=True)
rank = bagua.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(5, 61), torch.nn.Tanh(), torch.nn.Linear(61, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
algorithm = DiLoCoAlgorithm(OuterSGD(0.7, 0.5), interval=2, codec="bit2_block", elastic=True)
model.with_bagua([optimizer], algorithm)
outer = model.bagua_algorithm
original = ElasticRanks.change

def change(self, *arguments):
    original(self, *arguments)
    torch.save(outer.state_dict(), f"{sys.argv[1]}/after{rank}")

ElasticRanks.change = change
generator = torch.Generator().manual_seed(rank)
step = 0
while outer.outer_rounds < 5:
    optimizer.zero_grad()
    model(torch.randn(4, 5, generator=generator)).square().mean().backward()
    optimizer.step()
    step += 1
    if step == 4:
        torch.save(outer.state_dict(), f"{sys.argv[1]}/before{rank}")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
state = outer.state_dict()
shared = [value for key, value in state.items() if key.startswith(("anchor/", "momentum/"))]
print(torch.cat([value.flatten() for value in shared]).double().sum().item())
"""


@pytest.mark.timeout(60)
def test_survivors_keep_what_they_owe_when_a_rank_is_killed(run_script, tmp_path):
    first, killed, third = run_script(3, DIES, args=[tmp_path], timeout=40.0)
    assert killed.returncode == -signal.SIGKILL
    assert (first.returncode, third.returncode) == (0, 0), first.stderr + third.stderr
    assert first.stdout == third.stdout
    before = [torch.load(tmp_path / f"before{rank}") for rank in range(3)]
    after = [torch.load(tmp_path / f"after{rank}") for rank in (0, 2)]
    names = names_of(before[0])
    expected = owed(before, names)
    for name, lost in shares_of(before[1], 1, 3, names).items():
        expected[name] -= lost
    assert all(value.any() for value in expected.values())
    assert_owed(after, names, expected, 1e-7)
    assert not any(
        value.any() for state in after for key, value in state.items() if "/server/" in key
    )


#: By rank and step. Those of the last two steps alone have other ratios.
SAMPLES = [(1, 2, 3, 4), (9, 1, 1, 1), (2, 2, 7, 1)]


@training.with_group
def weighted_after_a_failed_round(dtype):
    """The anchor after a failed round and one that was made, and the mean by all samples."""
    model = training.network().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = []
    optimizer.register_step_post_hook(lambda *_: trained.append(flat_of(model)))  # before a round
    algorithm = DiLoCoAlgorithm(PLAIN, 2, weight="samples", elastic=True)
    model.with_bagua([optimizer], algorithm)
    samples = SAMPLES[dist.get_rank()]
    restore = fail_round(1, 1, "confirm")
    try:
        for step in range(4):
            own_step(model, optimizer, step, dtype, samples[step])
    finally:
        restore()
    assert model.bagua_algorithm.outer_rounds == 1
    assert_outer_state_agrees(model)
    shares = torch.tensor([float(sum(own)) for own in SAMPLES], dtype=dtype)
    everyone = torch.stack(training.gather(trained[-1]))
    return flat_of(model), (shares[:, None] * everyone).sum(0) / shares.sum()


def test_weights_by_samples_count_the_steps_of_a_failed_round(ranks):
    for found, expected in ranks(3, weighted_after_a_failed_round, torch.float64):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
