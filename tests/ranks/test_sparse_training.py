"""Sparse gradients in training: the oracle's bits, equal ranks, warm-up, overflow, nodes, bytes."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua import _C
from bagua.torch_api.algorithms.sparse import SparseAlgorithm
from oracle import sparse as oracle
from ranks import training
from ranks.error_feedback import (
    all_bits,
    gathered_gradients,
    train_step,
    wide_network,
    wrapped,
)
from ranks.test_groups_and_nodes import environment_of_nodes

STEPS = 8
SEED = 5
ELEMENTS = sum(p.numel() for p in wide_network().parameters())
per_kind = pytest.mark.parametrize("kind", ["largest", "random"])


def sparse(kind="largest", **arguments):
    drawn = {"random_sparse": kind == "random", "seed": SEED}
    return SparseAlgorithm(**({"ratio": 0.05} | drawn | arguments))


def ops_of(model):
    return [bucket["ops"][0].split("(")[0] for bucket in model.bagua_stats()["buckets"]]


def flat_of(tensors, names):
    return torch.cat([tensors[name].reshape(-1) for name in names])


def expected(kind, brought, errors, communications):
    numel = brought[0].numel()
    k = max(1, round(0.05 * numel))
    if kind == "random":
        elements = oracle.elements_of_round(
            lambda number: _C.random_order(numel, SEED, number), numel, k, communications
        )
        return oracle.random_k(brought, errors, elements)
    return oracle.top_k(brought, errors, k)


@training.with_group
def train_and_compare(kind, dtype):
    """Every round against the oracle, bucket by bucket, from what was owed before it."""
    model, optimizer = wrapped(sparse(kind), dtype=dtype)
    size = dist.get_world_size()
    for step in range(STEPS):
        states = training.gather(model.bagua_algorithm.state_dict())
        gradients = gathered_gradients(model, step)
        train_step(model, optimizer, step)
        training.assert_ranks_agree(model)
        after = training.gather(model.bagua_algorithm.state_dict())
        got = {name: p.grad for name, p in model.named_parameters()}
        for bucket, op in zip(model.bagua_buckets, ops_of(model), strict=True):
            names = [tensor.bagua_tensor_name for tensor in bucket.tensors]
            brought = [flat_of(gradients[r], names) for r in range(size)]
            owed = [{n: s[f"rank{r}/error/{n}"] for n in names} for r, s in enumerate(after)]
            if op == "SettledAllReduce":
                mean = sum(brought) / size
                torch.testing.assert_close(flat_of(got, names), mean, rtol=1e-2, atol=1e-3)
                assert not flat_of(owed[0], names).any()
                continue
            errors = [
                flat_of({n: s[f"rank{r}/error/{n}"] for n in names}, names)
                for r, s in enumerate(states)
            ]
            done = int(states[0]["communications"])
            result, errors = expected(kind, brought, errors, done)
            if kind == "largest":
                assert torch.equal(flat_of(got, names), result), "gloo adds in an order of its own"
            else:
                torch.testing.assert_close(flat_of(got, names), result)
            for rank in range(size):
                assert torch.equal(flat_of(owed[rank], names), errors[rank])
    return sorted(set(ops_of(model)))


@per_kind
@pytest.mark.parametrize("n", [2, 3, 4], ids=lambda n: f"{n}-ranks")
def test_training_follows_the_oracle_and_ranks_agree(ranks, n, kind):
    op = "Sparse" if kind == "largest" else "RandomSparse"
    assert ranks(n, train_and_compare, kind, torch.float32) == [[op]] * n


@per_kind
def test_buckets_for_which_sparse_messages_do_not_pay_are_averaged_exactly(ranks, kind):
    results = ranks(2, train_and_compare, kind, torch.float32, env=training.SMALL_BUCKETS)
    if kind == "largest":
        assert results == [["SettledAllReduce", "Sparse"]] * 2
    else:
        assert results == [["RandomSparse"]] * 2  # of three elements it sends one and a flag


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@per_kind
def test_other_dtypes_follow_the_oracle(ranks, dtype, kind):
    op = "Sparse" if kind == "largest" else "RandomSparse"
    assert ranks(2, train_and_compare, kind, dtype) == [[op]] * 2


@training.with_group
def count_bytes(kind, ratio):
    model, optimizer = wrapped(sparse(kind, ratio=ratio))
    for step in range(3):
        train_step(model, optimizer, step)
    before = model.bagua_stats()["buckets"][0]["bytes_sent"]
    train_step(model, optimizer, 3)
    return model.bagua_stats()["buckets"][0]["bytes_sent"] - before, ops_of(model)


def test_bytes_are_those_of_the_messages(ranks):
    k = round(0.05 * ELEMENTS)
    message = 32 + -(-4 * k // 32) * 32 + 32  # a frame, values, indices of 8 bits
    assert ranks(3, count_bytes, "largest", 0.05)[0] == (2 * message, ["Sparse"])
    ring = 2 * 4 * (k + 1) * 2 // 3
    sent, ops = ranks(3, count_bytes, "random", 0.05)[0]
    assert (abs(sent - ring) <= 8, ops) == (True, ["RandomSparse"])
    for kind in ("largest", "random"):
        assert ranks(2, count_bytes, kind, 1.0)[0] == (4 * ELEMENTS, ["SettledAllReduce"])


@training.with_group
def warm_up(kind, steps):
    """Bits after every step, with sparse rounds after `steps` exact ones, and without."""
    pairs = [
        wrapped(sparse(kind, warmup_steps=steps)),
        wrapped(bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()),
    ]
    same = []
    for step in range(STEPS):
        for model, optimizer in pairs:
            train_step(model, optimizer, step)
            training.assert_ranks_agree(model)
        same.append(training.model_bits(pairs[0][0]) == training.model_bits(pairs[1][0]))
    return same, int(pairs[0][0].bagua_algorithm.state_dict()["communications"])


@per_kind
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_first_rounds_are_exact(ranks, kind, steps):
    same = [step < steps for step in range(STEPS)]
    assert ranks(2, warm_up, kind, steps) == [(same, STEPS - steps)] * 2


@training.with_group
def overflow(kind):
    """An overflow on one rank at the third step; what is remembered before and after it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    model, optimizer = wrapped(sparse(kind), grad_scaler=scaler)
    seen = []
    for step in range(STEPS):
        before = all_bits(model.bagua_algorithm.state_dict(), but="rounds")
        weights = training.bits(model.parameters())
        train_step(model, optimizer, step, scaler, overflow=step == 3 and dist.get_rank() == 1)
        training.assert_ranks_agree(model)
        after = all_bits(model.bagua_algorithm.state_dict(), but="rounds")
        seen.append((before == after, weights == training.bits(model.parameters())))
    return seen, len(model.bagua_buckets)


@per_kind
@pytest.mark.parametrize(
    "env",
    [{}, training.SMALL_BUCKETS, {"BAGUA_LANES": "2", **training.SMALL_BUCKETS}],
    ids=["one-bucket", "buckets", "two-lanes"],
)
def test_an_overflow_leaves_the_memory_of_every_bucket(ranks, kind, env):
    expected = [(step == 3, step == 3) for step in range(STEPS)]
    for seen, buckets in ranks(3, overflow, kind, env=env):
        assert seen == expected
        assert (buckets > 1) == bool(env)


@training.with_group
def overflow_in_one_parameter(kind):
    """The last layer's bias alone is not finite: other buckets' own values are."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    model, optimizer = wrapped(sparse(kind), grad_scaler=scaler)
    train_step(model, optimizer, 0, scaler)
    before = all_bits(model.bagua_algorithm.state_dict(), but="rounds")
    bad = float("nan") if dist.get_rank() == 1 else 1.0
    handle = model[5].bias.register_hook(lambda gradient: gradient * bad)
    train_step(model, optimizer, 1, scaler)
    handle.remove()
    after = all_bits(model.bagua_algorithm.state_dict(), but="rounds")
    others = [p.grad.isfinite().all() for n, p in model.named_parameters() if n != "5.bias"]
    return before == after, bool(all(others)), bool(model[5].bias.grad.isfinite().all())


@per_kind
def test_a_bad_bucket_leaves_the_memory_of_finite_ones(ranks, kind):
    results = ranks(2, overflow_in_one_parameter, kind, env=training.SMALL_BUCKETS)
    assert results == [(True, True, False)] * 2


@training.with_group
def train_scaled(kind, with_scaler):
    """Weights after training with a loss scale, a power of two, or without."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=with_scaler)
    model, optimizer = wrapped(sparse(kind), grad_scaler=scaler)
    for step in range(STEPS):
        train_step(model, optimizer, step, scaler)
    errors = {k: v for k, v in model.bagua_algorithm.state_dict().items() if "error/" in k}
    return training.bits(model.parameters()), all_bits(errors)


@per_kind
def test_memory_is_in_unscaled_units(ranks, kind):
    assert ranks(2, train_scaled, kind, True) == ranks(2, train_scaled, kind, False)


@training.with_group
def train_over_nodes(kind):
    model, optimizer = wrapped(sparse(kind, hierarchical=True))
    for step in range(STEPS):
        train_step(model, optimizer, step)
        training.assert_ranks_agree(model)
    state = model.bagua_algorithm.state_dict()
    return state["ranks"], sum(int(v.any()) for k, v in state.items() if "error/" in k)


@per_kind
@pytest.mark.parametrize("nodes", [[2, 2], [3, 1]], ids=str)
def test_between_nodes_only_leaders_remember(ranks, kind, nodes):
    leaders = [0, nodes[0]]
    results = ranks(4, train_over_nodes, kind, env=environment_of_nodes(nodes))
    tensors = len(list(wide_network().parameters()))
    assert [said for said, _ in results] == [" ".join(map(str, leaders))] * 4
    assert [owed for _, owed in results] == [tensors * (rank in leaders) for rank in range(4)]


@training.with_group
def one_node():
    wrapped_model = []
    said = training.warnings_of(lambda: wrapped_model.append(wrapped(sparse(hierarchical=True))))
    [(model, optimizer)] = wrapped_model
    train_step(model, optimizer, 0)
    training.assert_ranks_agree(model)
    return [text for text in said if "all ranks share one node" in text]


def test_one_node_is_exact_and_said_once(ranks):
    for said in ranks(2, one_node):
        assert len(said) == 1
        assert "nothing is compressed. Pass hierarchical=False" in said[0]


@training.with_group
def wrong_arguments():
    said = []
    for name, value in (("ratio", 0.0), ("ratio", 1.5), ("ratio", torch.nan), ("warmup_steps", -1)):
        with pytest.raises(ValueError, match=name) as caught:
            sparse(**{name: value})
        said.append(str(caught.value))
    own = sparse(ratio=0.1 + dist.get_rank() / 10)
    with pytest.raises(bagua.BaguaMismatchError, match=r"'ratio': 0\.1"):
        wrapped(own)
    return len(said)


def test_wrong_arguments_and_ranks_that_differ_are_refused(ranks):
    assert ranks(2, wrong_arguments) == [4, 4]
