"""QAdam whose momentum is sparse or of low rank: the oracle's momenta, checkpoints, refusals."""

import copy

import bagua.torch_api as bagua  # noqa: F401 - gives modules with_bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    SparseAlgorithm,
)
from oracle import low_rank, sparse
from oracle.q_adam import local_momentum
from ranks.test_bytegrad_feedback import flat_of
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from support.error_feedback import wide_network

WARM_UP, STEPS, RATIO = 2, 6, 0.1
KINDS = {
    "sparse": lambda **a: SparseAlgorithm(RATIO, **a),
    "4-bits": lambda **a: SparseAlgorithm(RATIO, codec="int4_block", **a),
    "low-rank": lambda **a: PowerSGDAlgorithm(2, min_compression_rate=1.0, **a),
}
per_kind = pytest.mark.parametrize("kind", KINDS)


def wrapped(kind, seed=0, **arguments):
    model = wide_network(seed)
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=WARM_UP, eps=1e-4)
    chosen = QAdamAlgorithm(optimizer, compression=KINDS[kind]())
    return model.with_bagua([optimizer], chosen, **arguments), optimizer


def train_step(model, optimizer, step, scaler=None, overflow=False):
    optimizer.zero_grad()
    loss = training.squared_error(model, training.batch(step, dist.get_rank()))
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss * float("inf") if overflow else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    training.assert_ranks_agree(model)


def state_of(model):
    return {k: v for k, v in model.bagua_algorithm.state_dict().items() if k != "steps"}


def same(first, second):
    tensors = [key for key, value in first.items() if isinstance(value, torch.Tensor)]
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in tensors)


@training.with_group
def train_as_the_oracle(kind):
    """Momenta after every compressed step, from the residuals and the momentum before it."""
    model, optimizer = wrapped(kind)
    size, named = dist.get_world_size(), dict(model.named_parameters())
    compressed = 0
    for step in range(STEPS):
        states = training.gather(state_of(model))
        memories = {n: optimizer.state_of(p)["exp_avg"].clone() for n, p in named.items()}
        by_rank = [
            training.local_gradients(model, training.squared_error, training.batch(step, rank))
            for rank in range(size)
        ]
        momenta = [{n: local_momentum(memories[n], g[n], 0.9) for n in named} for g in by_rank]
        train_step(model, optimizer, step)
        found = {name: optimizer.state[p]["exp_avg"] for name, p in named.items()}
        if step <= WARM_UP:
            continue
        for bucket in model.bagua_buckets:
            names = [tensor.bagua_tensor_name for tensor in bucket.tensors]
            errors = [{n: s[f"rank{r}/error/{n}"] for n in names} for r, s in enumerate(states)]
            if kind == "low-rank":
                compressed += follow_low_rank(names, momenta, errors, states[0], found)
                continue
            k = max(1, round(RATIO * bucket.backend_tensor.numel()))
            expected, _ = sparse.top_k(
                [flat_of(bucket, momentum)[0] for momentum in momenta],
                [flat_of(bucket, error)[0] for error in errors],
                k,
                codec="int4_block" if kind == "4-bits" else None,
            )
            assert torch.equal(flat_of(bucket, found)[0], expected), step
            compressed += 1
    return compressed


def follow_low_rank(names, momenta, errors, state, found):
    followed = 0
    for name in names:
        if f"query/{name}" not in state:
            continue
        rows = found[name].shape[0]
        brought = [momentum[name].reshape(rows, -1) for momentum in momenta]
        owed = [error[name].reshape(rows, -1) for error in errors]
        expected, _, _ = low_rank.power_step(brought, owed, state[f"query/{name}"].T)
        tolerance = 1e-4 * float(expected.abs().max())
        assert (found[name].reshape(rows, -1) - expected).abs().max() <= tolerance, name
        followed += 1
    return followed


@pytest.mark.parametrize("n", [2, 3], ids=lambda n: f"{n}-ranks")
@per_kind
def test_momenta_are_those_of_the_oracle_and_ranks_agree(ranks, kind, n):
    expected = STEPS - WARM_UP - 1  # the first compressed round draws the queries
    assert ranks(n, train_as_the_oracle, kind) == [expected * (3 if kind == "low-rank" else 1)] * n


@training.with_group
def go_on(kind, saved_after):
    model, optimizer = wrapped(kind)
    for step in range(saved_after):
        train_step(model, optimizer, step)
    parts = (model, optimizer, model.bagua_algorithm)
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    again, its_optimizer = wrapped(kind, seed=1)
    for part, state in zip((again, its_optimizer, again.bagua_algorithm), states, strict=True):
        part.load_state_dict(state)
    for step in range(saved_after, saved_after + 4):
        for pair in ((model, optimizer), (again, its_optimizer)):
            train_step(*pair, step)
        assert training.model_bits(model) == training.model_bits(again), step
        assert same(state_of(model), state_of(again)), step
    return sum("/error/" in key for key in state_of(model))


@pytest.mark.parametrize("saved_after", [1, 4], ids=["in-the-warm-up", "after-it"])
@per_kind
def test_training_goes_on_to_the_bit(ranks, kind, saved_after):
    assert ranks(2, go_on, kind, saved_after) == [6, 6]


@training.with_group
def an_overflow(kind):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    model, optimizer = wrapped(kind, grad_scaler=scaler)
    kept = []
    for step in range(STEPS):
        before = state_of(model)
        train_step(model, optimizer, step, scaler, overflow=step == 4 and dist.get_rank() == 1)
        kept.append(same(before, state_of(model)))
    return kept


@per_kind
def test_an_overflow_changes_no_residual(ranks, kind):
    expected = [step in (0, 4) for step in range(STEPS)]
    expected[1] = True  # the buckets change with the next forward
    assert ranks(2, an_overflow, kind, env=training.SMALL_BUCKETS) == [expected] * 2


@training.with_group
def train_over_nodes():
    """Whether this rank has residuals."""
    model = wide_network()
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=WARM_UP, eps=1e-4)
    chosen = QAdamAlgorithm(optimizer, compression=KINDS["low-rank"](hierarchical=True))
    model.with_bagua([optimizer], chosen)
    for step in range(4):
        train_step(model, optimizer, step)
    return any("/error/" in key for key in state_of(model))


def test_between_nodes_only_leaders_remember(ranks):
    env = environment_of_nodes([2, 1])
    assert ranks(3, train_over_nodes, env=env) == [True, False, True]


@training.with_group
def refusals():
    model = wide_network()
    optimizer = QAdamOptimizer(model.parameters())

    def wrap(compression):
        algorithm = QAdamAlgorithm(optimizer, compression=compression)
        return training.error_of(lambda: model.with_bagua([optimizer], algorithm))

    others = [
        GradientAllReduceAlgorithm(),
        ByteGradAlgorithm(False, codec="int4_block", error_feedback=True),
        SparseAlgorithm(of="updates"),
    ]
    return [wrap(other) for other in others], wrap(SparseAlgorithm(warmup_steps=3))


def test_what_compresses_no_gradients_is_refused_by_name(ranks):
    [(others, warm_up)] = ranks(1, refusals)
    for error in others:
        assert "compression is a PowerSGDAlgorithm or a SparseAlgorithm of gradients" in error
    assert "warmup_steps=3" in warm_up
    assert "give it there" in warm_up
