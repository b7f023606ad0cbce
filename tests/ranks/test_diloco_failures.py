"""Local training in which a round fails, ranks die, weights become NaN, or anchors differ."""

import signal

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import OuterSGD
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
def nan_on_one_rank():
    """The warnings of a round with NaN in a weight of rank 1, in its buffers and its moments."""
    model, optimizer = wrapped(normalised(), interval=2, outer_optimizer=OuterSGD(0.7, 0.5))
    own_steps(model, optimizer, range(2))
    before = training.bits(outer_state(model).values())
    own_step(model, optimizer, 2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight[1, 2] = float("nan")
            model[1].running_var.fill_(float("inf"))
            for value in optimizer.state[model[0].weight].values():
                value.fill_(float("nan")) if value.dim() else None
    caught = training.warnings_of(lambda: optimizer.step())
    assert training.bits(outer_state(model).values()) == before
    stats = model.bagua_stats()["outer"]
    assert (stats["rounds"], stats["skipped_rounds"]) == (1, 1)
    if dist.get_rank() == 1:
        assert_weights_are_the_anchor(model)
        for state in optimizer.state.values():
            assert all(bool(value.isfinite().all()) for value in state.values())
    assert all(bool(b.isfinite().all()) for b in model.buffers())
    own_steps(model, optimizer, range(3, 5))
    assert_outer_state_agrees(model)
    assert_weights_are_the_anchor(model)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return caught


def test_nan_on_one_rank_leaves_the_anchor_and_that_rank_starts_from_it(ranks):
    for caught in ranks(3, nan_on_one_rank):
        (text,) = caught
        assert "the average of an outer round is not finite, and changes nothing" in text
        assert "The weights of rank(s) 1 hold NaN or infinity" in text


DIES = """
import os, signal, sys
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import DiLoCoAlgorithm

torch.manual_seed(0)
bagua.init_process_group()
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], DiLoCoAlgorithm(interval=3))
for step in range(20):
    if step == 4 and bagua.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    gradient, before = model.weight.grad.clone(), model.weight.detach().clone()
    state = model.bagua_algorithm.state_dict()
    try:
        optimizer.step()
    except bagua.BaguaError as error:
        after = model.bagua_algorithm.state_dict()
        kept = torch.allclose(model.weight, before - 0.1 * gradient)
        same = all(
            torch.equal(after[key], value)
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        )
        print(step, kept, same, after["outer_rounds"], error)
        sys.exit(7)
"""


def test_a_killed_rank_is_named_and_the_failed_round_changes_nothing(run_script):
    *survivors, killed = run_script(3, DIES, timeout=40.0)
    assert killed.returncode == -signal.SIGKILL
    for end in survivors:
        assert end.returncode == 7
        assert end.stdout.startswith("5 True True 1 "), "the weights keep the optimizer's own step"
        assert "rank 2" in end.stdout
