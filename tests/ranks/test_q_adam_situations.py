"""QAdam when steps are not plain: accumulation, scaling, unused parameters, residuals, misuse."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from ranks.test_groups_and_nodes import environment_of_nodes
from support import q_adam_training as q_adam
from support import training
from support.error_feedback import Means, residuals
from support.q_adam_training import STEPS, WARM_UP


@training.with_group
def accumulate(set_to_none):
    """Two forwards a step, the first under no_sync(), before, at and after the switch."""
    model, optimizer = q_adam.wrapped()
    for step in range(STEPS):
        first = q_adam.local_gradients(model, 100 + step)
        second = q_adam.local_gradients(model, step)
        total = [
            {name: a[name] + b[name] for name in a} for a, b in zip(first, second, strict=True)
        ]
        before = q_adam.Before(model, optimizer, total)
        optimizer.zero_grad(set_to_none=set_to_none)
        with model.no_sync():
            q_adam.backward_of(model, 100 + step)
        q_adam.backward_of(model, step)
        optimizer.step()
        q_adam.assert_ranks_agree(model, optimizer)
        assert q_adam.compressing(model) == (step >= WARM_UP)
        if step >= WARM_UP:
            before.assert_compressed_step(model)
        else:
            for name, p in model.named_parameters():
                mean = training.mean_over_ranks(total[dist.get_rank()][name])
                torch.testing.assert_close(p.grad, mean)
    return optimizer.compressed_steps


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
def test_gradients_accumulated_under_no_sync_are_part_of_the_momentum(ranks, set_to_none):
    assert ranks(3, accumulate, set_to_none) == [STEPS - WARM_UP] * 3


@training.with_group
def train_scaled(codec, with_scaler):
    """With a loss scale that changes, and overflows on one rank now and then."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=with_scaler)
    model, optimizer = q_adam.wrapped(grad_scaler=scaler, codec=codec)
    skipped = []
    for attempt in range(STEPS + 4):
        step = optimizer.completed_steps
        if step == STEPS:
            break
        before = q_adam.Before(
            model, optimizer, q_adam.local_gradients(model, step), scaler.get_scale()
        )
        bits = q_adam.moment_bits(model, optimizer)
        optimizer.zero_grad()
        loss = training.squared_error(model, q_adam.data_of(model, step, dist.get_rank()))
        overflow = with_scaler and attempt in (1, 5, 6, 9)
        if overflow and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step >= WARM_UP and not overflow:
            averaged = before.averaged(model, Means(codec, error_feedback=False))
            assert all(torch.equal(p.grad, averaged[n]) for n, p in model.named_parameters())
        scaler.step(optimizer)
        scaler.update()
        q_adam.assert_ranks_agree(model, optimizer)
        if optimizer.completed_steps == step:
            skipped.append(attempt)
            assert q_adam.moment_bits(model, optimizer) == bits, "no memory is touched"
    return skipped, q_adam.moment_bits(model, optimizer), scaler.get_scale()


@pytest.mark.parametrize("codec", ["block_uint8", "bf16"])
def test_an_overflow_on_one_rank_skips_all_and_leaves_no_trace(ranks, codec):
    plain = ranks(3, train_scaled, codec, False)
    assert plain == [([], plain[0][1], 1.0)] * 3
    for skipped, bits, last_scale in ranks(3, train_scaled, codec, True):
        assert skipped == [1, 5, 6, 9], "before and after the switch"
        assert last_scale != 2.0**10, "the scale changed on the way"
        # The 8-bit codecs add 1e-7 to a range, so only a cast gives the same bits at any scale.
        assert (bits == plain[0][1]) == (codec == "bf16"), "memory is unscaled"


@training.with_group
def clip_scaled():
    """unscale_() gives the momentum in its own units; what is clipped is what step() takes."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    model, optimizer = q_adam.wrapped(grad_scaler=scaler, warmup_steps=1)
    for step in range(3):
        optimizer.zero_grad()
        q_adam.backward_of(model, step, scaler)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    memory = optimizer.state[model[2].bias]["exp_avg"]
    assert torch.equal(memory, model[2].bias.grad)
    q_adam.assert_ranks_agree(model, optimizer)
    return norm.item()


def test_clipping_after_unscaling_sees_the_momentum(ranks):
    for norm in ranks(2, clip_scaled):
        assert 0.01 < norm < 10


class Branches(torch.nn.Module):
    """One branch is never used; the other, from the third step on, by rank 0 alone.

    One parameter has no elements.
    """

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)
        self.network = training.network()
        self.sometimes = torch.nn.Linear(training.FEATURES, training.OUTPUTS)
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs, branch=True):
        output = self.network(inputs) + self.empty.sum()
        return output + self.sometimes(inputs) if branch else output


@training.with_group
def train_with_unused(find_unused):
    model = Branches()
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    chosen = QAdamAlgorithm(optimizer, hierarchical=False)
    model.with_bagua([optimizer], chosen, find_unused_parameters=find_unused)
    unused = training.bits(model.unused.parameters())
    for step in range(6):
        inputs, targets = training.batch(step, dist.get_rank())
        sometimes = training.bits(model.sometimes.parameters())
        optimizer.zero_grad()
        output = model(inputs, step < 2 or dist.get_rank() == 0)
        (output - targets).pow(2).mean().backward()
        optimizer.step()
        q_adam.assert_ranks_agree(model, optimizer)
        assert training.bits(model.sometimes.parameters()) != sometimes
    assert training.bits(model.unused.parameters()) == unused
    return optimizer.compressed_steps, model.unused.weight.grad is None


def test_unused_parameters_stay(ranks):
    for find_unused in (True, False):
        for steps, none in ranks(3, train_with_unused, find_unused):
            assert steps == 4
            assert none == find_unused


@training.with_group
def wrap_wrongly():
    """By what is wrong with the optimizer its error."""
    errors = {}
    for how in WRONG:
        model = training.network()
        given = list(model.parameters())
        if how == "foreign":
            given.append(torch.nn.Parameter(torch.zeros(2, 3)))
        if how == "frozen":
            model[0].bias.requires_grad_(False)
        if how == "ignored":
            model._bagua_params_and_buffers_to_ignore = ["2.weight"]
        optimizer = QAdamOptimizer(given[1:] if how == "missing" else given)
        wrap = [training.sgd(model) if how == "not_given" else optimizer], QAdamAlgorithm(optimizer)
        errors[how] = training.error_of(lambda m=model, w=wrap: m.with_bagua(*w), ValueError)
    return errors


WRONG = {
    "foreign": r"parameter 4 of group 0, of shape (2, 3), of the QAdamOptimizer is not trained",
    "frozen": "parameter 0.bias of the QAdamOptimizer is not trained",
    "ignored": "parameter 2.weight of the QAdamOptimizer is not trained",
    "missing": "parameter 0.weight is trained, but the QAdamOptimizer does not have it",
    "not_given": "the optimizer of QAdamAlgorithm is not among those given to with_bagua",
}


def test_an_optimizer_that_does_not_fit_the_module_is_refused_by_name(ranks):
    for errors in ranks(2, wrap_wrongly):
        for how, message in WRONG.items():
            assert "module 'Sequential'" in errors[how]
            assert message in errors[how]


def test_arguments_that_make_no_sense_are_refused():
    model = training.network()
    with pytest.raises(TypeError, match=r"takes a QAdamOptimizer .* not SGD"):
        QAdamAlgorithm(training.sgd(model))
    with pytest.raises(ValueError, match="codec"):
        QAdamAlgorithm(q_adam.optimizer_of(model), codec="zip")
    made = Algorithm.init("qadam", q_adam_optimizer=q_adam.optimizer_of(model))
    assert isinstance(made, QAdamAlgorithm)


@training.with_group
def one_rank_is_in_another_phase():
    model, optimizer = q_adam.wrapped(warmup_steps=2)
    q_adam.train_step(model, optimizer, 0)
    if dist.get_rank() == 1:
        for p in model.parameters():
            optimizer.state[p]["step"] += 1
    return training.error_of(lambda: q_adam.train_step(model, optimizer, 1), bagua.BaguaError)


def test_a_rank_that_switches_alone_is_an_error_on_all(ranks):
    first, second = ranks(2, one_rank_is_in_another_phase, timeout=90.0)
    assert "rank 1" in first
    assert second


FEEDBACK = {"codec": "bit2_block", "error_feedback": True}


def residual_bits(model):
    return training.bits(residuals(model).values())


@training.with_group
def a_round_without_step():
    """The residuals before it, after it, and after one that is used; an error of loading them."""
    model, optimizer = q_adam.wrapped(**FEEDBACK)
    for step in range(STEPS):
        q_adam.train_step(model, optimizer, step)
    seen = [residual_bits(model)]
    optimizer.zero_grad()
    q_adam.backward_of(model, 100)
    seen.append(residual_bits(model))
    q_adam.train_step(model, optimizer, 101)
    seen.append(residual_bits(model))
    other, _ = q_adam.wrapped()
    state = model.bagua_algorithm.state_dict()
    return seen, training.error_of(lambda: other.bagua_algorithm.load_state_dict(state))


def test_residuals_change_with_the_step_that_uses_the_momentum(ranks):
    for (before, unused, used), error in ranks(2, a_round_without_step):
        assert before == unused != used
        assert "the checkpoint is of another algorithm" in error, "it has no error feedback"


@training.with_group
def an_overflow():
    """By step, whether residuals stay as they were."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    model, optimizer = q_adam.wrapped(grad_scaler=scaler, **FEEDBACK)
    same = []
    for step in range(STEPS):
        before = residual_bits(model)
        optimizer.zero_grad()
        loss = training.squared_error(model, training.batch(step, dist.get_rank()))
        if step == 5 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        q_adam.assert_ranks_agree(model, optimizer)
        same.append(before == residual_bits(model))
    return same


def test_an_overflow_changes_no_residual(ranks):
    expected = [step < WARM_UP or step == 5 for step in range(STEPS)]
    assert ranks(3, an_overflow, env=training.SMALL_BUCKETS) == [expected] * 3


@training.with_group
def train_over_nodes():
    model, optimizer = q_adam.wrapped(hierarchical=True, **FEEDBACK)
    for step in range(STEPS):
        q_adam.train_step(model, optimizer, step)
        q_adam.assert_ranks_agree(model, optimizer)
    return len(residuals(model)) > 0


def test_between_nodes_only_leaders_have_residuals(ranks):
    results = ranks(4, train_over_nodes, env=environment_of_nodes([2, 2]))
    assert results == [True, False, True, False]
