"""Aggregations with residuals: the oracle's values, equal ranks, awkward models, saved memory."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua import _C, BaguaError
from mlbench_core.aggregation.pytorch.centralized import PowerAggregation, SparsifiedAggregation
from oracle import sparse
from support import training
from support.error_feedback import (
    all_bits,
    assert_low_rank_mean,
    assert_sparse_mean,
    flat_errors,
    flat_of,
    wide_network,
)
from torch import nn

BY_LAYER = pytest.mark.parametrize("by_layer", [False, True], ids=["by-model", "by-layer"])
BOTH = pytest.mark.parametrize("kind", ["power", "sparsified"])
RATIO = 0.05
CALLS = 5


def made(kind, model, **options):
    if kind == "sparsified":
        return SparsifiedAggregation(model, **{"ratio": RATIO} | options)
    return PowerAggregation(model, **{"reuse_query": True, "rank": 2} | options)


def give_gradients(model, call, scale=1.0):
    """Gradients of this rank, as tensors that stay the parameters'."""
    generator = torch.Generator().manual_seed(100 * call + dist.get_rank())
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        if parameter.requires_grad:
            parameter.grad = gradient.to(parameter)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_bits(model):
    """The digest of the gradients, which all ranks have."""
    digests = training.gather(training.bits(gradients(model).values()))
    assert len(set(digests)) == 1
    return digests[0]


# A call against the oracles.


def compare_sparse(model, brought, before, after, by_layer):
    """The number of messages for which the oracle has a value: else the mean is exact."""
    size, got = dist.get_world_size(), gradients(model)
    compared = 0
    for names in [[name] for name in got] if by_layer else [list(got)]:
        flat = flat_of(got, names)
        k = max(1, round(RATIO * flat.numel()))
        message = _C.sparse_message_bytes(flat.numel(), k, sparse.wide(flat.dtype))
        if size * message < 2 * flat.numel() * flat.element_size():
            compared += 1
            assert_sparse_mean(got, brought, before, after, names, RATIO)
            continue
        mean = sum(flat_of(each, names) for each in brought) / size
        torch.testing.assert_close(flat, mean, atol=1e-3, rtol=1e-3)
        assert not any(error.any() for error in flat_errors(after, names))
    return compared


@training.with_group
def aggregate_and_compare(kind, by_layer, dtype=torch.float32, reuse_query=True):
    model = wide_network(dtype=dtype)
    options = {} if kind == "sparsified" else {"reuse_query": reuse_query}
    aggregation = made(kind, model, **options)
    aggregate = aggregation.agg_grad(by_layer=by_layer)
    compared = 0
    for call in range(CALLS):
        before = training.gather(aggregation.state_dict())
        give_gradients(model, call)
        brought = training.gather(gradients(model))
        places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        assert aggregate(model, "avg_world" if call % 2 else "avg") is None
        assert places == {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        gradient_bits(model)
        after = training.gather(aggregation.state_dict())
        if kind == "power":
            own = after[dist.get_rank()]
            compared += len(assert_low_rank_mean(model, brought, before, own, reuse_query))
        else:
            compared += compare_sparse(model, brought, before, after, by_layer)
    return compared


@pytest.mark.parametrize(
    ("n", "by_layer", "reuse_query"),
    [(2, False, True), (3, True, True), (2, True, False), (3, False, False)],
)
def test_low_rank_calls_follow_the_oracle_and_ranks_agree(ranks, n, by_layer, reuse_query):
    compared = ranks(n, aggregate_and_compare, "power", by_layer, torch.float32, reuse_query)
    assert compared == [3 * (CALLS - 1) if reuse_query else 0] * n


@pytest.mark.parametrize(("n", "by_layer"), [(2, True), (3, False)])
def test_sparse_calls_follow_the_oracle_and_ranks_agree(ranks, n, by_layer):
    compared = ranks(n, aggregate_and_compare, "sparsified", by_layer)
    assert len(set(compared)) == 1
    assert compared[0] % CALLS == 0
    assert by_layer or compared[0] == CALLS


def test_other_dtypes_follow_the_oracle(ranks):
    assert ranks(2, aggregate_and_compare, "power", False, torch.float64) == [12] * 2
    for dtype in (torch.float64, torch.float16):
        assert ranks(2, aggregate_and_compare, "sparsified", False, dtype) == [CALLS] * 2, dtype


class Awkward(nn.Module):
    """Frozen, unused on one rank, wide, channels last, half beside single, empty, scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.unused = nn.Linear(5, 6, bias=False)
        self.wide = nn.Linear(40, 2, bias=False)
        self.conv = nn.Conv2d(3, 8, 3, bias=False).to(memory_format=torch.channels_last)
        self.half = nn.Linear(20, 20, bias=False).half()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.zeros(()))


@training.with_group
def aggregate_awkward(kind, by_layer):
    """All inputs of the ranks have arrived or are in a residual; the names of what has a query."""
    model, size = Awkward(), dist.get_world_size()
    state = torch.get_rng_state()
    aggregation = made(kind, model, **{"rank": 9} if kind == "power" else {})
    brought, sent = {}, {}
    for call in range(6):
        give_gradients(model, call)
        if call < 3 and dist.get_rank() == 1:
            model.unused.weight.grad = None
        if call == 1:
            model.conv.weight.grad.zero_()
        true = training.gather(gradients(model))
        aggregation.agg_grad(by_layer)(model, "avg_world")
        assert model.frozen.weight.grad is None
        gradient_bits(model)
        for name, gradient in gradients(model).items():
            assert gradient.isfinite().all()
            assert gradient.dtype == dict(model.named_parameters())[name].dtype
            own = sum(g[name].float() for g in true if name in g) / size
            if kind == "power" and name != "half.weight":
                torch.testing.assert_close(gradient, own)  # factors would be larger
            brought[name] = brought.get(name, 0) + own
            sent[name] = sent.get(name, 0) + gradient.float()
    states = training.gather(aggregation.state_dict())
    for name in sent:
        owed = sum(s.get(f"rank{r}/error/{name}", 0) for r, s in enumerate(states)) / size
        near = 2e-2 if name.startswith("half") else 1e-5
        torch.testing.assert_close(sent[name] + owed, brought[name], atol=near, rtol=near)
    assert torch.equal(torch.get_rng_state(), state)
    names = ["conv.weight", "empty", "half.weight", "scalar", "unused.weight", "wide.weight"]
    assert sorted(sent) == names
    return [key for key in states[0] if key.startswith("query/")]


@BOTH
@BY_LAYER
def test_awkward_models_are_aggregated(ranks, kind, by_layer):
    queries = ["query/half.weight"] if kind == "power" else []
    assert ranks(3, aggregate_awkward, kind, by_layer) == [queries] * 3


# Memory.


@training.with_group
def save_and_go_on(kind, by_layer):
    """Goes on to the bit from what was saved; by layer and by model share the memory."""
    model = wide_network()
    first, second = (made(kind, model, use_cuda=True) for _ in range(2))
    for call in range(3):
        give_gradients(model, call)
        if call == 1 and dist.get_rank() == 1:  # a call that does not count
            model[2].weight.grad[1, 1, 1] = torch.nan if by_layer else torch.inf
        before = all_bits(first.state_dict(), but="calls")
        first.agg_grad(by_layer)(model, "avg")
        finite = all(g.isfinite().all() for g in gradients(model).values())
        kept = call > 0 and before == all_bits(first.state_dict(), but="calls")
        assert (finite, kept) == (call != 1, call == 1)
    saved = copy.deepcopy(first.state_dict()).items()
    state = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in saved}
    second.agg_grad(by_layer)(model, "avg")  # something else, to be forgotten
    second.load_state_dict(state)
    assert all_bits(second.state_dict()) == all_bits(state)
    for call in range(3, 9):
        results = []
        for aggregation in (first, second):
            give_gradients(model, call)
            aggregation.agg_grad(by_layer)(model, "avg")
            results.append((gradient_bits(model), all_bits(aggregation.state_dict())))
        assert results[0] == results[1]
    assert int(first.state_dict()["communications"]) == 8
    remembered = all_bits(first.state_dict(), but="calls")
    give_gradients(model, 9, scale=0.0)
    first.agg_grad(not by_layer)(model, "avg")  # pays from the same memory
    paid = max(p.grad.abs().max() for p in model.parameters())
    return remembered != all_bits(first.state_dict(), but="calls"), bool(paid > 1e-3)


@BOTH
@BY_LAYER
def test_a_saved_memory_goes_on_to_the_bit(ranks, kind, by_layer):
    assert ranks(2, save_and_go_on, kind, by_layer) == [(True, True)] * 2


INVALID = {
    "power": [{"rank": 0}, {"world_size": 0}],
    "sparsified": [{"ratio": 0.0}, {"ratio": 2.0}],
}


@training.with_group
def wrong_use(kind):
    model = wide_network()
    give_gradients(model, 0)
    before = training.bits(gradients(model).values())
    aggregation = made(kind, model)
    for op in ("avg_custom", "sum", "max", "nonsense"):
        with pytest.raises(NotImplementedError, match=op):
            aggregation.agg_grad()(model, op)
    weights = (aggregation._agg_weights_by_model, aggregation._agg_weights_by_layer)
    for refused in (lambda *_: aggregation.agg_model(), *weights):
        with pytest.raises(NotImplementedError, match="AllReduceAggregation"):
            refused(model, "avg")
    other = nn.Linear(2, 2)
    give_gradients(other, 0)
    with pytest.raises(ValueError, match=r"without it, .* 'weight' of shape"):
        aggregation.agg_grad()(other, "avg")
    if kind == "power":
        with pytest.raises(ValueError, match="world_size=3"):
            made(kind, model, world_size=3).agg_grad()(model, "avg")
    own = {"rank": 1 + dist.get_rank()} if kind == "power" else {"ratio": (1 + dist.get_rank()) / 4}
    said = r"rank 1.*rank 2" if kind == "power" else r"ratio 0.25.*ratio 0.5"
    with pytest.raises(BaguaError, match=said):
        made(kind, model, **own).agg_grad()(model, "avg")
    for arguments in INVALID[kind]:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            made(kind, model, **arguments)
    return before == training.bits(gradients(model).values())


@BOTH
def test_wrong_use_is_refused_and_changes_nothing(ranks, kind):
    assert ranks(2, wrong_use, kind) == [True] * 2
