"""Compressed updates on ranks: the oracle's weights, equal ranks, checkpoints, refusals."""

import pytest
import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import SparseAlgorithm
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from oracle import sparse
from ranks.test_bytegrad_feedback import flat_of
from ranks.test_diloco import adamw, own_step
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from torch import nn

STEPS = 5
RATIO = 0.05
KINDS = {
    "sparse": lambda **a: SparseAlgorithm(RATIO, of="updates", **a),
    "4-bits": lambda **a: SparseAlgorithm(RATIO, of="updates", codec="int4_block", **a),
    "random": lambda **a: SparseAlgorithm(RATIO, of="updates", random_sparse=True, **a),
}
per_kind = pytest.mark.parametrize("kind", KINDS)


def wrapped(kind, seed=0, **arguments):
    """A network, its optimizer, and the weights that its own last step left."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(training.FEATURES, 70), nn.Tanh())
    model.append(nn.Linear(70, training.OUTPUTS))
    optimizer = adamw(model)
    stepped = training.weights_after_steps(model, optimizer)
    model.with_bagua([optimizer], KINDS[kind](**arguments))
    return model, optimizer, stepped


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_weights_agree(model):
    assert len(set(training.gather(training.bits(model.parameters())))) == 1


def errors_of(states, name):
    return [state[f"rank{rank}/error/{name}"] for rank, state in enumerate(states)]


@training.with_group
def train_sparse(kind):
    """Every step to the bit, from the residuals before it."""
    model, optimizer, stepped = wrapped(kind)
    size = dist.get_world_size()
    for step in range(STEPS):
        before = weights_of(model)
        states = training.gather(model.bagua_algorithm.state_dict())
        own_step(model, optimizer, step)
        assert_weights_agree(model)
        updates = training.gather({name: before[name] - x for name, x in stepped.items()})
        for bucket in model.bagua_buckets:
            k = max(1, round(RATIO * bucket.backend_tensor.numel()))
            brought = [flat_of(bucket, update)[0] for update in updates]
            named = [t.bagua_tensor_name for t in bucket.tensors]
            errors = [
                flat_of(bucket, {name: errors_of(states, name)[rank] for name in named})[0]
                for rank in range(size)
            ]
            codec = "int4_block" if kind == "4-bits" else None
            mean, _ = sparse.top_k(brought, errors, k, codec=codec)
            expected = flat_of(bucket, before)[0] - mean
            assert torch.equal(flat_of(bucket, weights_of(model))[0], expected), step
    return len(set(training.gather(training.bits(stepped.values()))))


@pytest.mark.parametrize("n", [2, 3], ids=lambda n: f"{n}-ranks")
@pytest.mark.parametrize("kind", ["sparse", "4-bits"])
def test_weights_have_the_bits_of_the_oracle_and_ranks_agree(ranks, n, kind):
    assert ranks(n, train_sparse, kind) == [n] * n, "the ranks' own steps differ"


@training.with_group
def go_on(folder, kind, before):
    model, optimizer, _ = wrapped(kind, warmup_steps=2)
    named = {"model": model, "optimizer": optimizer, "algorithm": model.bagua_algorithm}
    for step in range(before):
        own_step(model, optimizer, step)
    save_checkpoint(folder, named, before)
    loaded, its_optimizer, _ = wrapped(kind, warmup_steps=2, seed=1)
    again = {"model": loaded, "optimizer": its_optimizer, "algorithm": loaded.bagua_algorithm}
    assert load_latest(folder, again) == before
    for step in range(before, before + 4):
        own_step(model, optimizer, step)
        own_step(loaded, its_optimizer, step)
        assert_weights_agree(loaded)
    return bits(model), bits(loaded)


def bits(model):
    state = model.bagua_algorithm.state_dict()
    tensors = [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return training.bits([*model.parameters(), *tensors])


@pytest.mark.parametrize("before", [1, 4], ids=["in-the-warm-up", "after-it"])
@per_kind
def test_training_goes_on_to_the_bit(ranks, tmp_path, kind, before):
    for uninterrupted, loaded in ranks(2, go_on, str(tmp_path), kind, before):
        assert loaded == uninterrupted


@training.with_group
def follow_exact_training(kind):
    """In the warm-up gradients are averaged exactly, and optimizers agree."""
    model, optimizer, _ = wrapped(kind, warmup_steps=STEPS)
    twin = training.gather(weights_of(model))[0]
    for step in range(STEPS):
        own_step(model, optimizer, step)
        assert_weights_agree(model)
    moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
    assert any(not torch.equal(twin[name], p) for name, p in model.named_parameters())
    return len(set(training.gather(training.bits(moments))))


@per_kind
def test_in_the_warm_up_the_optimizers_of_all_ranks_agree(ranks, kind):
    assert ranks(2, follow_exact_training, kind) == [1, 1]


@training.with_group
def count_bytes():
    model = nn.Linear(1000, 500)
    optimizer = adamw(model)
    model.with_bagua([optimizer], SparseAlgorithm(0.01, of="updates"))
    model(torch.randn(2, 1000)).square().mean().backward()
    assert model.bagua_stats()["total"]["bytes_sent"] == 0, "gradients stay on their rank"
    optimizer.step()
    return model.bagua_stats()["total"]["bytes_sent"] / (4 * 500_500)


def test_bytes_are_those_of_sparse_gradients(ranks):
    for sent in ranks(2, count_bytes):
        assert 0.014 < sent < 0.018


@training.with_group
def train_over_nodes():
    """Whether this rank has residuals."""
    model, optimizer, _ = wrapped("sparse", hierarchical=True)
    for step in range(3):
        own_step(model, optimizer, step)
        assert_weights_agree(model)
    return any("/error/" in key for key in model.bagua_algorithm.state_dict())


def test_between_nodes_only_leaders_remember(ranks):
    env = environment_of_nodes([2, 1])
    assert ranks(3, train_over_nodes, env=env) == [True, False, True]


@training.with_group
def register_hook():
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    return training.error_of(lambda: comm_hooks.register(model, KINDS["sparse"]()))


def test_a_hook_of_torch_refuses_updates(ranks):
    for error in ranks(2, register_hook):
        assert "SparseAlgorithm does more than reduce the gradients of one bucket" in error


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"of='weights' must be \"gradients\" or \"updates\""):
        SparseAlgorithm(of="weights")


@training.with_group
def train_with_batch_norm():
    """After each forward: whether all ranks began it with the same running mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(training.FEATURES, 8), nn.BatchNorm1d(8))
    model.append(nn.Linear(8, training.OUTPUTS))
    optimizer = adamw(model)
    model.with_bagua([optimizer], SparseAlgorithm(RATIO, of="updates"))
    seen = []

    def remember(module, _):
        seen.append(len(set(training.gather(training.bits([module.running_mean])))))

    model[1].register_forward_pre_hook(remember)
    for step in range(3):
        own_step(model, optimizer, step)
        assert_weights_agree(model)
    return seen


def test_buffers_are_equal_on_all_ranks(ranks):
    assert ranks(2, train_with_batch_norm) == [[1, 1, 1]] * 2
