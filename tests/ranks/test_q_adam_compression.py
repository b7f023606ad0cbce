"""QAdam whose momentum is sparse or of low rank: the oracle's momenta, checkpoints, refusals.

"corrected": each rank has a momentum of its own (momentum_correction=True).
"""

import copy

import bagua.torch_api as bagua  # noqa: F401 - gives modules with_bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import Guard
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
CORRECTED = [f"{kind}-corrected" for kind in KINDS]
per_kind = pytest.mark.parametrize("kind", [*KINDS, *CORRECTED])
EVERYTHING = "everything-corrected"


def optimizer_of(model, **arguments):
    return QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=WARM_UP, eps=1e-4, **arguments)


def wrapped(kind, seed=0, weight_decay=0.0, **arguments):
    model = wide_network(seed)
    optimizer = optimizer_of(model, weight_decay=weight_decay)
    compression = SparseAlgorithm(1.0)
    if kind != EVERYTHING:
        compression = KINDS[kind.removesuffix("-corrected")]()
    chosen = QAdamAlgorithm(
        optimizer, compression=compression, momentum_correction=kind.endswith("corrected")
    )
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
    """Momenta after every compressed step, from the residuals and the momenta before it."""
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
        of_ranks = [
            {n: s.get(f"rank{r}/momentum/{n}", memories[n]) for n in named}
            for r, s in enumerate(states)
        ]
        momenta = [
            {n: local_momentum(m[n], g[n], 0.9) for n in named}
            for m, g in zip(of_ranks, by_rank, strict=True)
        ]
        train_step(model, optimizer, step)
        own = {key: value for key, value in state_of(model).items() if "/momentum/" in key}
        assert len(own) == (len(named) if kind in CORRECTED and step >= WARM_UP else 0)
        for key, value in own.items():
            assert torch.equal(value, momenta[dist.get_rank()][key.split("/")[2]]), (step, key)
        found = {name: optimizer.state[p]["exp_avg"] for name, p in named.items()}
        if step <= WARM_UP:
            continue
        for bucket in model.bagua_buckets:
            names = [tensor.bagua_tensor_name for tensor in bucket.tensors]
            errors = [{n: s[f"rank{r}/error/{n}"] for n in names} for r, s in enumerate(states)]
            if "low-rank" in kind:
                compressed += follow_low_rank(names, momenta, errors, states[0], found)
                continue
            k = max(1, round(RATIO * bucket.backend_tensor.numel()))
            expected, _ = sparse.top_k(
                [flat_of(bucket, momentum)[0] for momentum in momenta],
                [flat_of(bucket, error)[0] for error in errors],
                k,
                codec="int4_block" if "4-bits" in kind else None,
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
    assert ranks(n, train_as_the_oracle, kind) == [expected * (3 if "low-rank" in kind else 1)] * n


@training.with_group
def train_whole(weight_decay):
    """Beside exact gradients with the optimizer of QAdam, where nothing is left out."""
    model, optimizer = wrapped(EVERYTHING, weight_decay=weight_decay)
    exact = wide_network()
    its_optimizer = optimizer_of(exact)
    exact.with_bagua([its_optimizer], GradientAllReduceAlgorithm())
    for step in range(STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        train_step(model, optimizer, step)
        train_step(exact, its_optimizer, step)
        if not weight_decay:
            for p, q in zip(model.parameters(), exact.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
        elif step >= WARM_UP:
            for p, old in zip(model.parameters(), before, strict=True):
                found = optimizer.state[p]["exp_avg"]
                torch.testing.assert_close(found, p.grad + weight_decay * old)
    return model.bagua_stats()["buckets"][0]["ops"]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_corrected_momentum_that_is_sent_whole_is_that_of_adam(ranks, weight_decay):
    for ops in ranks(3, train_whole, weight_decay):
        assert ops[0].startswith("LocalMomentum(")


@training.with_group
def go_on(kind, saved_after, used_before):
    """`used_before`: steps that the model has done with other data before it loads."""
    model, optimizer = wrapped(kind)
    for step in range(saved_after):
        train_step(model, optimizer, step)
    parts = (model, optimizer, model.bagua_algorithm)
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    again, its_optimizer = wrapped(kind, seed=1)
    for step in range(used_before):
        train_step(again, its_optimizer, 50 + step)
    for part, state in zip((again, its_optimizer, again.bagua_algorithm), states, strict=True):
        part.load_state_dict(state)
    for step in range(saved_after, saved_after + 4):
        for pair in ((model, optimizer), (again, its_optimizer)):
            train_step(*pair, step)
        assert training.model_bits(model) == training.model_bits(again), step
        assert same(state_of(model), state_of(again)), step
    return sum("/error/" in key for key in state_of(model))


@pytest.mark.parametrize(
    "saved_after", [1, WARM_UP, 4], ids=["in-the-warm-up", "at-its-end", "after-it"]
)
@pytest.mark.parametrize("used_before", [0, 5], ids=lambda n: f"after-{n}-others")
@per_kind
def test_training_goes_on_to_the_bit(ranks, kind, saved_after, used_before):
    assert ranks(2, go_on, kind, saved_after, used_before) == [6, 6]


@training.with_group
def load_what_three_ranks_saved():
    """Momenta after loading, and the mean of those of the ranks before."""
    model, optimizer = wrapped("sparse-corrected")
    for step in range(4):
        train_step(model, optimizer, step)
    mine, rank = state_of(model), dist.get_rank()
    names = [name for name, _ in model.named_parameters()]
    merged = {key: value for key, value in mine.items() if not key.startswith("rank")}
    merged |= {"ranks": "0 1 2", "steps": optimizer.completed_steps}
    for r in range(3):
        for kind in ("momentum", "error"):
            for name in names:
                merged[f"rank{r}/{kind}/{name}"] = (r + 1) * mine[f"rank{rank}/{kind}/{name}"]
    merged = training.gather(merged)[0]
    model.bagua_algorithm.load_state_dict(merged)
    now = state_of(model)
    for kind in ("momentum", "error"):
        for name in names:
            mean = sum(merged[f"rank{r}/{kind}/{name}"] for r in range(3)) / 3
            torch.testing.assert_close(now[f"rank{rank}/{kind}/{name}"], mean)
    train_step(model, optimizer, 4)
    return len(names)


def test_other_ranks_get_the_mean_of_corrected_momenta(ranks):
    assert ranks(2, load_what_three_ranks_saved) == [6, 6]


@training.with_group
def under_a_guard():
    """A guard that finds every check too coarse: buckets are exact, momenta go on."""
    touchy = Guard(every=1, relative_error=1e-9, residual=1e-9, exact_rounds=2)
    model, optimizer = wrapped("4-bits-corrected", guard=touchy)
    seen = set()
    for step in range(12):
        train_step(model, optimizer, step)
        if step >= WARM_UP:
            seen.add(training.bits([v for k, v in state_of(model).items() if "/momentum/" in k]))
    return len(seen), len(model.bagua_stats()["guard"]["breaches"])


@pytest.mark.filterwarnings("ignore:.*guard:UserWarning")
def test_a_guard_makes_corrected_momenta_exact_and_loses_none(ranks):
    for momenta, breaches in ranks(2, under_a_guard):
        assert momenta == 12 - WARM_UP
        assert breaches > 0


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

    def correct(compression=None):
        return training.error_of(
            lambda: QAdamAlgorithm(optimizer, compression=compression, momentum_correction=True)
        )

    corrected = [
        correct(),
        correct(SparseAlgorithm(error_feedback=False)),
        correct(SparseAlgorithm(hierarchical=True)),
    ]
    return [wrap(other) for other in others], wrap(SparseAlgorithm(warmup_steps=3)), corrected


@training.with_group
def load_without_correction():
    model, optimizer = wrapped("sparse-corrected")
    for step in range(4):
        train_step(model, optimizer, step)
    state = model.bagua_algorithm.state_dict()
    plain, corrected = wrapped("sparse")[0], model.bagua_algorithm
    lost = training.error_of(lambda: plain.bagua_algorithm.load_state_dict(state))
    without = {key: value for key, value in state.items() if "/momentum/" not in key}
    return lost, training.error_of(lambda: corrected.load_state_dict(without))


def test_a_state_of_the_other_kind_is_refused(ranks):
    [(lost, missing)] = ranks(1, load_without_correction)
    assert "saved with momentum_correction=True, load it with that" in lost
    assert "the state has no 'rank0/momentum/" in missing
    assert "the same arguments of the algorithm" in missing


def test_what_compresses_no_gradients_is_refused_by_name(ranks):
    [(others, warm_up, corrected)] = ranks(1, refusals)
    for error in corrected[:2]:
        assert "a PowerSGDAlgorithm or a SparseAlgorithm with error feedback" in error
    assert (
        "momentum_correction=True has no form for a compression with hierarchical" in corrected[2]
    )
    for error in others:
        assert "compression is a PowerSGDAlgorithm or a SparseAlgorithm of gradients" in error
    assert "warmup_steps=3" in warm_up
    assert "give it there" in warm_up
