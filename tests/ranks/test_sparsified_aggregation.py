"""SparsifiedAggregation: the oracle's bits, equal ranks, bytes, awkward models."""

import pytest
import torch
import torch.distributed as dist
from bagua import _C, BaguaError
from mlbench_core.aggregation.pytorch.centralized import SparsifiedAggregation
from oracle import sparse as oracle
from ranks.test_power_aggregation import give_gradients, gradients
from support import training
from support.error_feedback import error_of, wide_network
from torch import nn

BY_LAYER = pytest.mark.parametrize("by_layer", [False, True], ids=["by-model", "by-layer"])
RATIO = 0.05
CALLS = 5


def groups_of(model, by_layer):
    """Names of parameters that are aggregated together."""
    names = [name for name, _ in model.named_parameters()]
    return [[name] for name in names] if by_layer else [names]


def flat_of(tensors, names):
    return torch.cat([tensors[name].reshape(-1) for name in names])


def expected(brought, errors):
    """As the class has it: (result, errors), or None where messages do not pay."""
    numel, ranks = brought[0].numel(), len(brought)
    wide = oracle.wide(brought[0].dtype)
    k = max(1, round(RATIO * numel))
    dense = numel * brought[0].element_size()
    if ranks * _C.sparse_message_bytes(numel, k, wide) >= 2 * dense:
        return None
    return oracle.top_k(brought, errors, k)


@training.with_group
def aggregate_and_compare(by_layer, dtype):
    model = wide_network(dtype=dtype)
    size = dist.get_world_size()
    aggregation = SparsifiedAggregation(model, ratio=RATIO)
    aggregate = aggregation.agg_grad(by_layer=by_layer)
    errors = {name: [torch.zeros_like(p)] * size for name, p in model.named_parameters()}
    errors = {name: [e.to(oracle.wide(dtype)) for e in each] for name, each in errors.items()}
    compared = 0
    for call in range(CALLS):
        give_gradients(model, call)
        brought = training.gather(gradients(model))
        places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        assert aggregate(model, "avg_world" if call % 2 else "avg") is None
        assert places == {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        after = training.gather(aggregation.state_dict())
        for names in groups_of(model, by_layer):
            own = [flat_of({n: errors[n][r] for n in names}, names) for r in range(size)]
            flats = [flat_of(brought[r], names) for r in range(size)]
            got = flat_of(gradients(model), names)
            for name in names:
                errors[name] = [error_of(after[r], r, name) for r in range(size)]
            owed = [flat_of({n: errors[n][r] for n in names}, names) for r in range(size)]
            wanted = expected(flats, own)
            if wanted is None:
                torch.testing.assert_close(got, sum(flats) / size, atol=1e-3, rtol=1e-3)
                assert not any(e.any() for e in owed)
                continue
            compared += 1
            assert torch.equal(got, wanted[0]), "in order of ranks"
            assert all(torch.equal(e, w) for e, w in zip(owed, wanted[1], strict=True))
        digests = training.gather(training.bits(gradients(model).values()))
        assert len(set(digests)) == 1
    return compared


@BY_LAYER
@pytest.mark.parametrize("n", [2, 3, 4], ids=lambda n: f"{n}-ranks")
def test_calls_follow_the_oracle_and_ranks_agree(ranks, n, by_layer):
    results = ranks(n, aggregate_and_compare, by_layer, torch.float32)
    assert len(set(results)) == 1
    assert results[0] % CALLS == 0
    if not by_layer:
        assert results[0] == CALLS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_follow_the_oracle(ranks, dtype):
    assert ranks(2, aggregate_and_compare, False, dtype) == [CALLS] * 2


@training.with_group
def count_bytes(ratio):
    model = nn.Linear(100, 50)
    aggregation = SparsifiedAggregation(model, ratio=ratio)
    counted = []
    for call in range(2):
        give_gradients(model, call)
        before = aggregation.traffic()["bytes_sent"]
        aggregation.agg_grad()(model, "avg")
        counted.append(aggregation.traffic()["bytes_sent"] - before)
    return counted[1] - 1024, int((model.weight.grad != 0).sum() + (model.bias.grad != 0).sum())


def test_bytes_are_those_of_the_messages(ranks):  # and 1 KiB is the agreement
    message = 32 + 416 + 192  # 100 values, 100 indices of 13 bits
    hundred = 100 / 5050
    for sent, changed in ranks(2, count_bytes, hundred):
        assert sent == message
        assert 100 <= changed <= 200
    dense = 4 * 101 * 50
    assert ranks(2, count_bytes, 1.0) == [(dense, 101 * 50)] * 2


class Awkward(nn.Module):
    """Frozen, unused on one rank, half precision beside single, channels last, empty, scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.unused = nn.Linear(5, 6, bias=False)
        self.conv = nn.Conv2d(3, 8, 3, bias=False).to(memory_format=torch.channels_last)
        self.half = nn.Linear(20, 20, bias=False).half()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.zeros(()))


@training.with_group
def aggregate_awkward(by_layer):
    """All inputs of the ranks have arrived or are in a residual."""
    model = Awkward()
    state = torch.get_rng_state()
    aggregation = SparsifiedAggregation(model, ratio=RATIO)
    size = dist.get_world_size()
    brought, sent = {}, {}
    for call in range(6):
        give_gradients(model, call)
        if call < 3 and dist.get_rank() == 1:
            model.unused.weight.grad = None
        true = training.gather(gradients(model))
        aggregation.agg_grad(by_layer)(model, "avg_world")
        assert model.frozen.weight.grad is None
        digests = training.gather(training.bits(gradients(model).values()))
        assert len(set(digests)) == 1
        for name, gradient in gradients(model).items():
            own = sum(g[name].float() for g in true if name in g) / size
            brought[name] = brought.get(name, 0) + own
            sent[name] = sent.get(name, 0) + gradient.float()
    states = training.gather(aggregation.state_dict())
    for name in sent:
        owed = sum(error_of(s, r, name) for r, s in enumerate(states) if name != "empty") / size
        near = 2e-2 if name.startswith("half") else 1e-5
        torch.testing.assert_close(sent[name] + owed, brought[name], atol=near, rtol=near)
    assert torch.equal(torch.get_rng_state(), state)
    return sorted(sent)


@BY_LAYER
def test_awkward_models_are_aggregated(ranks, by_layer):
    names = ["conv.weight", "empty", "half.weight", "scalar", "unused.weight"]
    assert ranks(3, aggregate_awkward, by_layer) == [names] * 3


@training.with_group
def wrong_use():
    model = wide_network()
    give_gradients(model, 0)
    before = training.bits(gradients(model).values())
    aggregation = SparsifiedAggregation(model)
    for op in ("avg_custom", "sum", "max", "nonsense"):
        with pytest.raises(NotImplementedError, match=op):
            aggregation.agg_grad()(model, op)
    with pytest.raises(NotImplementedError, match="AllReduceAggregation"):
        aggregation.agg_model()
    with pytest.raises(NotImplementedError, match="AllReduceAggregation"):
        aggregation._agg_weights_by_model(model, "avg")
    other = nn.Linear(2, 2)
    give_gradients(other, 0)
    with pytest.raises(ValueError, match="'weight' of shape"):
        aggregation.agg_grad()(other, "avg")
    mine = SparsifiedAggregation(model, ratio=(1 + dist.get_rank()) / 4)
    with pytest.raises(BaguaError, match=r"ratio 0.25.*ratio 0.5"):
        mine.agg_grad()(model, "avg")
    for ratio in (0.0, 2.0):
        with pytest.raises(ValueError, match="ratio"):
            SparsifiedAggregation(model, ratio=ratio)
    return before == training.bits(gradients(model).values())


def test_wrong_use_is_refused_and_changes_nothing(ranks):
    assert ranks(2, wrong_use) == [True] * 2
