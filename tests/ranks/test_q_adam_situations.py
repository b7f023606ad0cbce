"""QAdam when steps are not plain: scaling, residuals, states that are loaded, misuse of .grad."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from support import q_adam_training as q_adam, training
from support.error_feedback import Means, residuals
from support.q_adam_training import STEPS, WARM_UP

FEEDBACK = {"codec": "bit2_block", "error_feedback": True}
FURTHER = 6


def residual_bits(model):
    return training.bits(residuals(model).values())


@training.with_group
def train_scaled(arguments, with_scaler):
    """With a loss scale that changes, and overflows on one rank now and then."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=with_scaler)
    model, optimizer = q_adam.wrapped(grad_scaler=scaler, **arguments)
    skipped = []
    for attempt in range(STEPS + 4):
        step = optimizer.completed_steps
        if step == STEPS:
            break
        before = q_adam.Before(
            model, optimizer, q_adam.local_gradients(model, step), scaler.get_scale()
        )
        bits = q_adam.moment_bits(model, optimizer), residual_bits(model)
        optimizer.zero_grad()
        loss = training.squared_error(model, q_adam.data_of(model, step, dist.get_rank()))
        overflow = with_scaler and attempt in (1, 5, 6, 9)
        if overflow and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step >= WARM_UP and not overflow and "error_feedback" not in arguments:
            averaged = before.averaged(model, Means(**arguments, error_feedback=False))
            assert all(torch.equal(p.grad, averaged[n]) for n, p in model.named_parameters())
        scaler.step(optimizer)
        scaler.update()
        q_adam.assert_ranks_agree(model, optimizer)
        if optimizer.completed_steps == step:
            skipped.append(attempt)
            unchanged = q_adam.moment_bits(model, optimizer), residual_bits(model)
            assert unchanged == bits, "no memory is touched"
    return skipped, q_adam.moment_bits(model, optimizer), scaler.get_scale()


@pytest.mark.parametrize("arguments", [{"codec": "block_uint8"}, {"codec": "bf16"}, FEEDBACK])
def test_an_overflow_on_one_rank_skips_all_and_leaves_no_trace(ranks, arguments):
    plain = ranks(3, train_scaled, arguments, False)
    assert plain == [([], plain[0][1], 1.0)] * 3
    for skipped, bits, last_scale in ranks(3, train_scaled, arguments, True):
        assert skipped == [1, 5, 6, 9], "before and after the switch"
        assert last_scale != 2.0**10, "the scale changed on the way"
        if arguments["codec"] == "bf16":  # others add 1e-7 to a range, which depends on the scale
            assert bits == plain[0][1], "memory is unscaled"


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
    """One branch is never used; the other, from the third step on, by rank 0 alone."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)
        self.network = training.network()
        self.sometimes = torch.nn.Linear(training.FEATURES, training.OUTPUTS)

    def forward(self, inputs, branch=True):
        output = self.network(inputs)
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
    "not_given": "the optimizer of QAdamAlgorithm is not among those given to bagua.wrap",
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
def forget_to_zero(how):
    model, optimizer = q_adam.wrapped(warmup_steps=1)
    if how == "gradients":  # before the switch that is accumulation over two rounds
        q_adam.backward_of(model, 0)
        q_adam.backward_of(model, 1)
        return None
    for step in range(2):
        q_adam.train_step(model, optimizer, step)
    if how != "after_step":
        optimizer.zero_grad()
        q_adam.backward_of(model, 2)
    expected = training.gather(training.model_bits(model))
    message = training.error_of(lambda: q_adam.backward_of(model, 3), bagua.BaguaError)
    assert training.gather(training.model_bits(model)) == expected, "nothing was added"
    for step in range(3, 5):  # zeroed, it goes on
        q_adam.train_step(model, optimizer, step)
        q_adam.assert_ranks_agree(model, optimizer)
    return message


@pytest.mark.parametrize("how", ["after_step", "without_step"])
def test_a_backward_onto_momentum_raises_and_says_what_to_do(ranks, how):
    for message in ranks(2, forget_to_zero, how):
        assert "BaguaError: module 'Sequential': a backward began while .grad of" in message
        assert "call zero_grad() before every backward" in message
        assert "no_sync()" in message
    assert ranks(2, forget_to_zero, "gradients") == [None] * 2


@training.with_group
def step_without_a_round(steps_before):
    model, optimizer = q_adam.wrapped(warmup_steps=1)
    for step in range(steps_before):
        q_adam.train_step(model, optimizer, step)
    if steps_before == 1:  # the first forward after the warm-up switches
        model(training.batch(1, dist.get_rank())[0])
    optimizer.zero_grad()
    with model.no_sync():
        q_adam.backward_of(model, 7)
    weights = training.bits(model.parameters())
    message = training.error_of(optimizer.step, bagua.BaguaError)
    assert training.bits(model.parameters()) == weights
    optimizer.zero_grad()
    for step in range(3, 5):
        q_adam.train_step(model, optimizer, step)
        q_adam.assert_ranks_agree(model, optimizer)
    return message


@pytest.mark.parametrize("steps_before", [1, 3], ids=["at-the-switch", "later"])
def test_a_step_with_gradients_of_this_rank_alone_is_refused(ranks, steps_before):
    for message in ranks(2, step_without_a_round, steps_before):
        assert "no backward was communicated since the last step" in message
        assert "outside of no_sync()" in message


# State that is loaded before the wrap, or without the optimizer's.


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
