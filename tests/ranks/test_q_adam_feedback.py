"""QAdam with error feedback: bits of the oracle, residuals that change with steps, checkpoints."""

import copy
import io
import itertools

import bagua.torch_api as bagua  # noqa: F401 - gives modules with_bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from oracle.compressed_all_reduce import parts, with_residuals
from oracle.q_adam import flatten, local_momentum
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training

WARM_UP = 2
STEPS = 8
ALIGNMENT = 16


def wrapped(seed=0, codec="bit2_block", error_feedback=True, hierarchical=False, **arguments):
    model = training.network(seed)
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=WARM_UP, eps=1e-4)
    chosen = QAdamAlgorithm(optimizer, hierarchical, codec=codec, error_feedback=error_feedback)
    return model.with_bagua([optimizer], chosen, **arguments), optimizer


def backward(model, optimizer, step, scale=1.0):
    optimizer.zero_grad()
    loss = training.squared_error(model, training.batch(step, dist.get_rank()))
    (loss * scale).backward()


def train_step(model, optimizer, step):
    backward(model, optimizer, step)
    optimizer.step()
    training.assert_ranks_agree(model)


def residuals(model):
    state = model.bagua_algorithm.state_dict()
    return {key: value for key, value in state.items() if "/error/" in key or "/server/" in key}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@training.with_group
def train_as_the_oracle(codec):
    size = dist.get_world_size()
    model, optimizer = wrapped(codec=codec)
    named = dict(model.named_parameters())
    errors, servers = {}, {}
    for step in range(WARM_UP + 3):  # the third compressed one has residuals of residuals
        by_rank = [
            training.local_gradients(model, training.squared_error, training.batch(step, rank))
            for rank in range(size)
        ]
        memories = {
            name: optimizer.state_of(parameter)["exp_avg"].clone()
            for name, parameter in named.items()
        }
        train_step(model, optimizer, step)
        if step < WARM_UP:
            assert residuals(model) == {}
            continue
        for bucket in model.bagua_buckets:
            names = [tensor.bagua_tensor_name for tensor in bucket.tensors]
            inputs = [
                flatten(
                    [local_momentum(memories[n], gradients[n], 0.9) for n in names],
                    ALIGNMENT * size,
                )
                for gradients in by_rank
            ]
            numel = inputs[0].numel()
            padding = numel - sum(memories[name].numel() for name in names)
            errors.setdefault(bucket.name, [torch.zeros(numel)] * size)
            servers.setdefault(bucket.name, [torch.zeros(n) for _, n in parts(numel, size)])
            expected, errors[bucket.name], servers[bucket.name] = with_residuals(
                codec, inputs, errors[bucket.name], servers[bucket.name], padding=padding
            )
            found = [optimizer.state[named[name]]["exp_avg"] for name in names]
            assert torch.equal(flatten(found, 1), expected[: numel - padding]), step
    return training.model_bits(model)


@pytest.mark.parametrize(
    ("size", "codec"), [(2, "int4_block"), (3, "bit2_block"), (4, "int4_block")]
)
def test_momenta_have_the_bits_of_the_oracle(ranks, size, codec):
    assert len(set(ranks(size, train_as_the_oracle, codec, env=training.SMALL_BUCKETS))) == 1


@training.with_group
def train_on_one_magnitude(compressed):
    """Gradients of +-1/8, which ranks share: a sign and a bfloat16 per block hold the momenta."""
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 6, bias=False)
    signs = torch.randn(128, 6).sign() / 8
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=WARM_UP, betas=(0.5, 0.9))
    codec = {"codec": "bit2_block", "error_feedback": True} if compressed else {}
    model = model.with_bagua(
        [optimizer], QAdamAlgorithm(optimizer, hierarchical=not compressed, **codec)
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(torch.eye(128)) * signs).sum().backward()
        optimizer.step()
    training.assert_ranks_agree(model)
    return training.model_bits(model), [bool(value.any()) for value in residuals(model).values()]


@pytest.mark.parametrize("size", [2, 3], ids=lambda n: f"{n}_ranks")
def test_a_codec_that_loses_nothing_gives_the_bits_of_exact_momenta(ranks, size):
    compressed = ranks(size, train_on_one_magnitude, True)
    exact = ranks(size, train_on_one_magnitude, False)
    assert {bits for bits, _ in compressed} == {bits for bits, _ in exact}
    assert {len(owed) for _, owed in exact} == {0}
    for _, owed in compressed:
        assert owed
        assert not any(owed)


@training.with_group
def a_round_without_step():
    model, optimizer = wrapped()
    for step in range(STEPS):
        train_step(model, optimizer, step)
    before = residuals(model)
    backward(model, optimizer, 100)
    unused = residuals(model)
    train_step(model, optimizer, 101)
    after = residuals(model)
    assert any(value.any() for value in before.values())
    return same(before, unused), same(before, after)


def test_residuals_change_with_the_step_that_uses_the_momentum(ranks):
    assert ranks(2, a_round_without_step) == [(True, False)] * 2


@training.with_group
def an_overflow():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    model, optimizer = wrapped(grad_scaler=scaler)
    seen = []
    for step in range(STEPS):
        before = residuals(model)
        optimizer.zero_grad()
        loss = training.squared_error(model, training.batch(step, dist.get_rank()))
        if step == 5 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        training.assert_ranks_agree(model)
        seen.append(same(before, residuals(model)))
    return seen


def test_an_overflow_changes_no_residual(ranks):
    expected = [step in (0, 1, 5) for step in range(STEPS)]  # two steps are the warm-up
    assert ranks(3, an_overflow, env=training.SMALL_BUCKETS) == [expected] * 3


def saved(model, optimizer):
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, model.bagua_algorithm)], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(model, optimizer, states):
    for part, state in zip((model, optimizer, model.bagua_algorithm), states, strict=True):
        part.load_state_dict(copy.deepcopy(state))


@training.with_group
def train_and_save():
    model, optimizer = wrapped()
    for step in range(STEPS):
        train_step(model, optimizer, step)
    return saved(model, optimizer)


@training.with_group
def load_and_train(states):
    model, optimizer = wrapped(seed=1)
    load(model, optimizer, states)
    for step in range(100, 103):
        train_step(model, optimizer, step)
    return training.model_bits(model), len(residuals(model))


def test_another_number_of_ranks_goes_on_from_the_merged_dicts(ranks):
    states = ranks(3, train_and_save)
    merged = dict(itertools.chain.from_iterable(state[2].items() for state in states))
    results = ranks(2, load_and_train, [*states[0][:2], merged])
    assert len({bits for bits, _ in results}) == 1
    assert all(count > 0 for _, count in results)
    with pytest.raises(Exception, match=r"rank1/error/.*merge what all ranks saved"):
        ranks(2, load_and_train, states[0])


@training.with_group
def load_without_feedback(state):
    model, _ = wrapped(error_feedback=False)
    model.bagua_algorithm.load_state_dict(state)


def test_residuals_are_refused_without_error_feedback(ranks):
    states = ranks(2, train_and_save)
    with pytest.raises(Exception, match="the checkpoint is of another algorithm"):
        ranks(2, load_without_feedback, states[0][2])


@training.with_group
def train_over_nodes():
    model, optimizer = wrapped(hierarchical=True)
    for step in range(STEPS):
        train_step(model, optimizer, step)
    return len(residuals(model)) > 0


def test_between_nodes_only_leaders_remember(ranks):
    results = ranks(4, train_over_nodes, env=environment_of_nodes([2, 2]))
    assert results == [True, False, True, False]
