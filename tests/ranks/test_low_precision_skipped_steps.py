"""Low-precision decentralized SGD when steps are skipped: a round that is due runs all the same."""

import pytest
import torch
import torch.distributed as dist
from ranks.test_low_precision_decentralized import (
    STEPS,
    assert_ring,
    oracle_of,
    oracle_step,
    weight_bits,
    wrapped,
)
from support import training

SKIPPING = {1: (1,), 2: (0, 1, 2), 3: (0, 2)}  # the ranks whose step is skipped, by step


def scaled_step(model, optimizer, scaler, step, overflow):
    optimizer.zero_grad()
    scaler.scale(training.squared_error(model, training.batch(step, dist.get_rank()))).backward()
    if overflow:
        model[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()


@training.with_group
def train_with_scaler(do_flatten, ask):
    """ask: run what is due after each step, as a loop with collectives of its own must."""
    model = training.network()
    expected = oracle_of(model)
    (optimizer,) = wrapped(model, do_flatten=do_flatten)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    rank = dist.get_rank()
    for step in range(STEPS):
        skipping = SKIPPING.get(step, ())
        scaled_step(model, optimizer, scaler, step, rank in skipping)
        result = oracle_step(expected, step, skipping)
        if ask:
            model.bagua_algorithm.run_pending()
            assert_ring(model)
        if ask or rank not in skipping:
            assert weight_bits(model) == weight_bits(result), f"step {step}"
    assert_ring(model)
    return scaler.get_scale(), model.bagua_stats()["rounds"]


@pytest.mark.parametrize(
    ("ask", "do_flatten"),
    [(False, True), (True, False)],
    ids=["next-forward", "asked-for-copied"],
)
def test_a_step_that_a_scaler_skips_on_some_ranks_is_a_round_like_any_other(ranks, ask, do_flatten):
    for rank, (scale, rounds) in enumerate(ranks(3, train_with_scaler, do_flatten, ask)):
        skipped = sum(rank in of_ranks for of_ranks in SKIPPING.values())
        assert scale == 2.0 ** (12 - skipped)
        assert rounds == STEPS


@training.with_group
def skip_the_last_step(ending):
    """The weights after a step that rank 1 leaves out, its last deed; the oracle's too."""
    model = training.network()
    expected = oracle_of(model)
    (optimizer,) = wrapped(model)
    optimizer.zero_grad()
    training.squared_error(model, training.batch(0, dist.get_rank())).backward()
    if dist.get_rank() != 1:
        optimizer.step()
    result = oracle_step(expected, 0, (1,))
    if ending == "close":
        model.bagua_ddp.close()
        assert not model.bagua_algorithm.mark_pending(model.bagua_ddp)
    elif ending == "state_dict":
        model.bagua_algorithm.state_dict()
    else:
        before = weight_bits(model)
        with model.no_sync():
            model(training.batch(1, 0)[0])
        assert dist.get_rank() != 1 or weight_bits(model) != before
    return weight_bits(model) == weight_bits(result)


@pytest.mark.parametrize("ending", ["close", "state_dict", "no_sync"])
def test_a_round_that_is_due_runs_when_nothing_else_follows(ranks, ending):
    assert ranks(3, skip_the_last_step, ending) == [True] * 3


SCRIPT = """
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import LowPrecisionDecentralizedAlgorithm

bagua.init_process_group()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], LowPrecisionDecentralizedAlgorithm(False))
for step in range(3):
    model(torch.randn(4, 64)).sum().backward()
    if step < 2 or bagua.get_rank() != 1:
        optimizer.step()
print("trained", model.bagua_stats()["rounds"])
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(7)"], ids=["returns", "exits"])
def test_a_process_that_ends_with_a_round_due_lets_the_others_end(run_script, end):
    for done in run_script(3, SCRIPT.format(end=end), timeout=40.0):
        assert done.returncode == (7 if end else 0), done.stderr
        assert "trained 3" in done.stdout
