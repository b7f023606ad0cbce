"""Local training and what surrounds a step: scalers, buffers, evaluation, NaN, failures."""

import copy
import signal

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from bagua.torch_api.data_parallel import DistributedDataParallel
from ranks.test_diloco import (
    adamw,
    assert_outer_state_agrees,
    assert_weights_are_the_anchor,
    outer_state,
    own_step,
)
from support import training
from torch import nn

PLAIN = OuterSGD(1.0, 0.0)


def wrapped(model=None, interval=3, **arguments):
    model = training.network() if model is None else model
    optimizer = adamw(model)
    algorithm = DiLoCoAlgorithm(interval=interval, **arguments)
    return model.with_bagua([optimizer], algorithm), optimizer


@training.with_group
def skipped_steps():
    """Rank 1's second step overflows: its scaler skips it."""
    model, optimizer = wrapped(interval=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    rounds = []
    for step in range(6):
        optimizer.zero_grad()
        loss = training.squared_error(model, training.batch(step, dist.get_rank()))
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = training.bits(model.parameters())
        scaler.step(optimizer)
        if step == 1:
            assert (training.bits(model.parameters()) == before) == (dist.get_rank() == 1)
        scaler.update()
        rounds.append(model.bagua_algorithm.outer_rounds)
    assert_outer_state_agrees(model)
    assert_weights_are_the_anchor(model)
    return rounds


def test_a_step_that_the_scaler_skips_counts(ranks):
    assert ranks(2, skipped_steps) == [[0, 0, 1, 1, 1, 2]] * 2


@training.with_group
def accumulation(inside_no_sync):
    model, optimizer = wrapped(interval=2)
    twin = copy.deepcopy(model)
    of_twin = adamw(twin)
    twin.with_bagua([of_twin], DiLoCoAlgorithm(interval=2))
    rank = dist.get_rank()
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            loss = training.squared_error(model, training.batch(10 * step + part, rank))
            if inside_no_sync and part < 2:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        of_twin.zero_grad()
        sum(
            training.squared_error(twin, training.batch(10 * step + part, rank))
            for part in range(3)
        ).backward()
        of_twin.step()
    training.assert_close(model, twin)
    return model.bagua_algorithm.outer_rounds


@pytest.mark.parametrize("inside_no_sync", [False, True], ids=["plain", "no_sync"])
def test_accumulated_gradients_count_once(ranks, inside_no_sync):
    assert ranks(2, accumulation, inside_no_sync) == [2, 2]


@training.with_group
def last_of_two_optimizers():
    model = training.network()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model.with_bagua([first, second], DiLoCoAlgorithm(interval=2))
    for step in range(4):
        training.train(model, [first, second], [training.batch(step, dist.get_rank())])
    assert_weights_are_the_anchor(model)
    return model.bagua_algorithm.outer_rounds


def test_steps_of_the_last_optimizer_count(ranks):
    assert ranks(2, last_of_two_optimizers) == [2, 2]


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


@training.with_group
def buffers(average):
    model, optimizer = wrapped(normalised(), interval=2, average_buffers=average)
    seen = []
    for step in range(4):
        if step == 3 and dist.get_rank() == 1:
            model[1].num_batches_tracked += 5
            model(torch.randn(4, 5))
        own_step(model, optimizer, step)
        seen.append(training.bits(model.buffers()))
    return seen, [b.clone() for b in model.buffers()]


def test_floating_buffers_get_the_mean_and_others_the_first_ranks(ranks):
    (first, mine), (second, other) = ranks(2, buffers, True)
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, True, False, True]
    assert int(mine[2]) == int(other[2]) == 4
    (first, mine), (second, other) = ranks(2, buffers, False)
    assert [a == b for a, b in zip(first, second, strict=True)] == [False] * 4
    assert int(other[2]) == 10


@training.with_group
def mean_of_buffers():
    model, optimizer = wrapped(normalised(), interval=1)
    with torch.no_grad():
        model[1].running_mean.fill_(float(dist.get_rank()))
    model.eval()
    own_step(model, optimizer, 0)
    return model[1].running_mean.unique().tolist()


def test_the_mean_is_exact_and_without_momentum(ranks):
    assert ranks(4, mean_of_buffers) == [[1.5]] * 4


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
    errors = []
    with model.bagua_algorithm.anchor():
        errors.append(training.error_of(lambda: model(training.batch(0, 0)[0])))
        errors.append(training.error_of(optimizer.step))
        errors.append(training.error_of(model.bagua_algorithm.sync))
        errors.append(training.error_of(lambda: model.bagua_algorithm.anchor().__enter__()))
    for step in range(1, 3):
        own_step(model, optimizer, step)
    assert model.bagua_algorithm.outer_rounds == 1
    return errors


def test_training_inside_anchor_is_refused(ranks):
    for errors in ranks(2, inside_anchor):
        for what, error in zip(
            ("a training forward", "optimizer.step()", "sync()", "anchor()"), errors, strict=True
        ):
            assert error.startswith("BaguaError")
            assert f"{what} inside anchor()" in error


@training.with_group
def sync_at_the_end():
    model, optimizer = wrapped(interval=10)
    for step in range(4):
        own_step(model, optimizer, step)
    model.bagua_algorithm.sync()
    assert_outer_state_agrees(model)
    assert_weights_are_the_anchor(model)
    before = training.bits(outer_state(model).values())
    model.bagua_algorithm.sync()  # nothing has been trained since
    assert training.bits(outer_state(model).values()) == before
    rounds = model.bagua_algorithm.outer_rounds
    for step in range(10):
        own_step(model, optimizer, step)
    return rounds, model.bagua_algorithm.outer_rounds


def test_sync_makes_a_round_now_and_none_where_nothing_was_trained(ranks):
    assert ranks(3, sync_at_the_end) == [(1, 2)] * 3


@training.with_group
def nan_on_one_rank(where):
    model, optimizer = wrapped(normalised(), interval=2, outer_optimizer=OuterSGD(0.7, 0.5))
    for step in range(2):
        own_step(model, optimizer, step)
    before = training.bits(outer_state(model).values())
    own_step(model, optimizer, 2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight[1, 2] = float("nan")
            if where == "everywhere":
                model[1].running_var.fill_(float("inf"))
                for value in optimizer.state[model[0].weight].values():
                    value.fill_(float("nan")) if value.dim() else None
    kept = model[2].weight.detach().clone()
    caught = training.warnings_of(lambda: optimizer.step())
    assert training.bits(outer_state(model).values()) == before
    own = training.bits(model.parameters())
    (stats,) = [model.bagua_stats()["outer"]]
    assert (stats["rounds"], stats["skipped_rounds"]) == (1, 1)
    changed = not torch.equal(model[2].weight, kept)
    if dist.get_rank() == 1:
        assert_weights_are_the_anchor(model)
        for state in optimizer.state.values():
            assert all(bool(value.isfinite().all()) for value in state.values())
    assert all(bool(b.isfinite().all()) for b in model.buffers())
    for step in range(3, 5):
        own_step(model, optimizer, step)
    assert_outer_state_agrees(model)
    assert_weights_are_the_anchor(model)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return caught, own, changed


@pytest.mark.parametrize("where", ["a weight", "everywhere"])
def test_nan_on_one_rank_leaves_the_anchor_and_that_rank_starts_from_it(ranks, where):
    for caught, _, _ in ranks(3, nan_on_one_rank, where):
        (text,) = caught
        assert "the average of an outer round is not finite, and changes nothing" in text
        assert "The weights of rank(s) 1 hold NaN or infinity" in text


@training.with_group
def warmup():
    model, optimizer = wrapped(interval=2, warmup_steps=3)
    agree = []
    for step in range(7):
        own_step(model, optimizer, step)
        agree.append(len(set(training.gather(training.bits(model.parameters())))) == 1)
    return agree, model.bagua_algorithm.outer_rounds


def test_the_warm_up_is_exact_training(ranks):
    agree = [True, True, True, False, True, False, True]
    assert ranks(2, warmup) == [(agree, 2)] * 2


@training.with_group
def without_optimizer():
    return training.error_of(lambda: training.network().with_bagua([], DiLoCoAlgorithm()))


def test_a_wrap_without_optimizers_is_refused(ranks):
    for error in ranks(2, without_optimizer):
        assert error.startswith("ValueError")
        assert "counts the steps of the optimizers given to with_bagua" in error


@training.with_group
def with_the_class():
    module = training.network()
    optimizer = adamw(module)
    ddp = DistributedDataParallel(
        module, optimizers=[optimizer], algorithm=DiLoCoAlgorithm(PLAIN, interval=2)
    )
    for step in range(2):
        own_step(ddp, optimizer, step)
    return training.gather(training.bits(module.parameters()))


def test_the_class_of_torch_trains_by_it(ranks):
    for digests in ranks(2, with_the_class):
        assert len(set(digests)) == 1


@training.with_group
def compiled():
    model, optimizer = wrapped(interval=2)
    twin, of_twin = wrapped(interval=2)
    faster = torch.compile(model, backend="eager")
    for step in range(4):
        own_step(faster, optimizer, step)
        own_step(twin, of_twin, step)
    training.assert_close(model, twin)
    return model.bagua_algorithm.outer_rounds


def test_a_compiled_model_makes_the_same_rounds(ranks):
    assert ranks(2, compiled) == [2, 2]


@training.with_group
def mixed_dtypes():
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {
            "a": nn.Parameter(torch.randn(7)),
            "b": nn.Parameter(torch.randn(3, 5).bfloat16()),
            "c": nn.Parameter(torch.randn(2).double()),
            "d": nn.Parameter(torch.randn(4, 3).half()),
            "frozen": nn.Parameter(torch.randn(2), requires_grad=False),
        }
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.with_bagua([optimizer], DiLoCoAlgorithm(OuterSGD(0.7, 0.9), interval=2))
    frozen = model["frozen"].clone()
    for step in range(4):
        for name, p in model.items():
            if name != "frozen":
                p.grad = torch.full_like(p, float(step + dist.get_rank()))
        optimizer.step()
    assert_outer_state_agrees(model)
    for name in "abcd":
        assert torch.equal(
            model[name].detach(),
            outer_state(model)[f"anchor/{name}"].to(model[name].dtype),
        )
    assert torch.equal(frozen, model["frozen"])
    return {key: str(value.dtype) for key, value in outer_state(model).items()}


def test_weights_of_several_dtypes_are_trained_together(ranks):
    for dtypes in ranks(3, mixed_dtypes):
        assert dtypes["anchor/b"] == dtypes["anchor/d"] == dtypes["anchor/a"] == "torch.float32"
        assert dtypes["anchor/c"] == dtypes["momentum/c"] == "torch.float64"
        assert "anchor/frozen" not in dtypes


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


@training.with_group
def failed_round_is_made_up():
    """The pseudo-gradient after a round that was left out is that of both."""
    model, optimizer = wrapped(interval=100, outer_optimizer=PLAIN)
    outer = model.bagua_algorithm._outer
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(2):
        own_step(model, optimizer, step)
    weights = dict(model.named_parameters())
    outer.fragments[0].launch(weights)  # and nothing more: the round fails here
    for step in range(2, 4):
        own_step(model, optimizer, step)
    expected = {
        name: start[name] - training.mean_over_ranks(start[name] - p.detach())
        for name, p in model.named_parameters()
    }
    model.bagua_algorithm.sync()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-6, atol=1e-7)
    return True


def test_the_round_after_a_failed_one_has_the_steps_of_both(ranks):
    assert ranks(2, failed_round_is_made_up) == [True, True]


@training.with_group
def drifted_anchor():
    model, optimizer = wrapped(interval=1)
    if dist.get_rank() == 1:
        _, anchor = next(model.bagua_algorithm._outer.fragments[0].named_anchors())
        anchor.add_(1.0)
    return training.error_of(lambda: own_step(model, optimizer, 0))


def test_anchors_that_differ_are_found_by_the_check_of_weights(ranks):
    for error in ranks(2, drifted_anchor, env={"BAGUA_CHECK_WEIGHTS_EVERY": "1"}):
        assert error.startswith("BaguaMismatchError")
        assert "'0.weight' (rank 0 against rank 1)" in error


@training.with_group
def wrapped_again():
    model, optimizer = wrapped(interval=2)
    own_step(model, optimizer, 0)
    model.with_bagua([optimizer], DiLoCoAlgorithm(interval=2))
    assert len(set(training.gather(training.bits(model.parameters())))) == 1
    for step in range(2):
        own_step(model, optimizer, step)
    assert_weights_are_the_anchor(model)
    return model.bagua_algorithm.outer_rounds


def test_wrapping_again_starts_anew_from_the_first_ranks_weights(ranks):
    assert ranks(2, wrapped_again) == [1, 1]
