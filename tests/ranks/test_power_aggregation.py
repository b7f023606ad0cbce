"""PowerAggregation: the oracle's values, equal ranks, awkward models, memory that can be saved."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua import BaguaError
from mlbench_core.aggregation.pytorch.centralized import PowerAggregation
from oracle import low_rank as oracle
from support import training
from support.error_feedback import all_bits, error_of, wide_network
from torch import nn

BY_LAYER = pytest.mark.parametrize("by_layer", [False, True], ids=["by-model", "by-layer"])
CALLS = 5


def give_gradients(model, call, scale=1.0):
    """Gradients of this rank, as tensors that stay the parameters'."""
    generator = torch.Generator().manual_seed(100 * call + dist.get_rank())
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        if parameter.requires_grad:
            parameter.grad = gradient.to(parameter)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def aggregate_and_compare(by_layer, reuse_query, dtype):
    model = wide_network(dtype=dtype)
    size, rank = dist.get_world_size(), dist.get_rank()
    aggregation = PowerAggregation(model, reuse_query=reuse_query, world_size=size, rank=2)
    aggregate = aggregation.agg_grad(by_layer=by_layer)
    matrices = 0
    for call in range(CALLS):
        states = training.gather(aggregation.state_dict())
        give_gradients(model, call)
        brought = training.gather(gradients(model))
        places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        assert aggregate(model, "avg_world" if call % 2 else "avg") is None
        assert places == {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        digests = training.gather(training.bits(gradients(model).values()))
        assert len(set(digests)) == 1
        after = aggregation.state_dict()
        for name, parameter in model.named_parameters():
            if f"query/{name}" not in after:
                mean = sum(g[name] for g in brought) / size
                torch.testing.assert_close(parameter.grad, mean)
            elif call > 0 and reuse_query:
                matrices += 1
                shape = (parameter.shape[0], -1)
                errors = [states[r][f"rank{r}/error/{name}"].reshape(shape) for r in range(size)]
                query = states[0][f"query/{name}"].T
                result, errors, query = oracle.power_step(
                    [g[name].reshape(shape) for g in brought], errors, query
                )
                near = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {}
                torch.testing.assert_close(parameter.grad.reshape(shape), result, **near)
                own = error_of(after, rank, name).reshape(shape)
                torch.testing.assert_close(own, errors[rank], **near)
            else:  # nothing is lost but what the errors hold
                owed = error_of(after, rank, name)
                before = states[rank].get(f"rank{rank}/error/{name}", torch.zeros_like(owed))
                whole = brought[rank][name] + before
                torch.testing.assert_close(parameter.grad + owed, whole, atol=1e-5, rtol=1e-5)
    return matrices


@pytest.mark.parametrize(
    ("n", "by_layer", "reuse_query"),
    [(2, False, True), (3, True, True), (4, False, True), (2, True, False), (3, False, False)],
)
def test_calls_follow_the_oracle_and_ranks_agree(ranks, n, by_layer, reuse_query):
    compared = ranks(n, aggregate_and_compare, by_layer, reuse_query, torch.float32)
    assert compared == [3 * (CALLS - 1) if reuse_query else 0] * n


def test_f64_follows_the_oracle(ranks):
    assert ranks(2, aggregate_and_compare, False, True, torch.float64) == [12] * 2


def count_messages(by_layer):
    model = wide_network()
    aggregation = PowerAggregation(model, world_size=2, reuse_query=True)
    counted = []
    for call in range(2):
        give_gradients(model, call)
        before = aggregation.traffic()
        aggregation.agg_grad(by_layer)(model, "avg")
        after = aggregation.traffic()
        counted.append({key: after[key] - before[key] for key in after})
    return counted[1]["messages_sent"], counted[1]["bytes_sent"]


def test_two_messages_a_call(ranks):
    # An all_reduce of two ranks is two messages; one more all_reduce, of 1 KiB, is the agreement.
    shapes = [(12, 5), (6, 9), (3, 24)]
    thin = sum(rows + columns for rows, columns in shapes)
    vectors = 12 + 6 + 3
    messages, sent = ranks(2, count_messages, False)[0]
    assert (messages, sent) == (2 * 2 + 2, 4 * (thin + vectors) + 1024)
    assert ranks(2, count_messages, True)[0][0] == 2 * (3 * 2 + 3) + 2


class Awkward(nn.Module):
    """Frozen, unused on one rank, without vectors, wide, half precision beside single."""

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


def aggregate_awkward(by_layer):
    model = Awkward()
    state = torch.get_rng_state()
    aggregation = PowerAggregation(model, reuse_query=True, world_size=3, rank=9)
    for call in range(3):
        give_gradients(model, call)
        if dist.get_rank() == 1:
            model.unused.weight.grad = None
        if call == 1:
            model.conv.weight.grad.zero_()
        true = training.gather(gradients(model))
        aggregation.agg_grad(by_layer)(model, "avg_world")
        assert model.frozen.weight.grad is None
        digests = training.gather(training.bits(gradients(model).values()))
        assert len(set(digests)) == 1
        for name, gradient in gradients(model).items():
            assert gradient.isfinite().all()
            assert gradient.dtype == dict(model.named_parameters())[name].dtype
        unused = (true[0]["unused.weight"] + true[2]["unused.weight"]) / 3
        torch.testing.assert_close(model.unused.weight.grad, unused)
        exact = sum(g["wide.weight"] for g in true) / 3
        torch.testing.assert_close(model.wide.weight.grad, exact)  # its factors would be larger
    assert torch.equal(torch.get_rng_state(), state)
    return sorted(key for key in aggregation.state_dict() if key.startswith("query/"))


@BY_LAYER
def test_awkward_models_are_aggregated(ranks, by_layer):
    assert ranks(3, aggregate_awkward, by_layer) == [["query/half.weight"]] * 3


def bad_gradient(by_layer, bad):
    model = wide_network()
    aggregation = PowerAggregation(model, reuse_query=True, world_size=2, rank=2)
    aggregate = aggregation.agg_grad(by_layer)
    for call in range(2):
        give_gradients(model, call)
        aggregate(model, "avg")
    before = aggregation.state_dict()
    give_gradients(model, 2)
    if dist.get_rank() == 1:
        model[2].weight.grad[1, 1, 1] = bad
    aggregate(model, "avg")
    after = aggregation.state_dict()
    assert not model[2].weight.grad.isfinite().any()
    kept = all_bits(before, but="calls") == all_bits(after, but="calls")
    give_gradients(model, 3)
    aggregate(model, "avg")
    return kept, all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("by_layer", "bad"), [(False, float("inf")), (True, float("nan"))])
def test_a_bad_value_on_one_rank_leaves_all_memory(ranks, by_layer, bad):
    assert ranks(2, bad_gradient, by_layer, bad) == [(True, True)] * 2


def save_and_go_on(by_layer):
    """Goes on to the bit from what was saved; by layer and by model share the memory."""
    model = wide_network()
    first = PowerAggregation(model, reuse_query=True, world_size=2, rank=2)
    for call in range(3):
        give_gradients(model, call)
        first.agg_grad(by_layer)(model, "avg")
    state = copy.deepcopy(first.state_dict())
    second = PowerAggregation(model, reuse_query=True, world_size=2, rank=2)
    second.load_state_dict(state)
    assert all_bits(second.state_dict()) == all_bits(state)
    for call in range(3, 9):
        results = []
        for aggregation in (first, second):
            give_gradients(model, call)
            aggregation.agg_grad(by_layer)(model, "avg")
            results.append((training.bits(gradients(model).values()), aggregation.state_dict()))
        assert results[0][0] == results[1][0]
        assert all_bits(results[0][1]) == all_bits(results[1][1])
    remembered = all_bits(first.state_dict(), but="calls")
    give_gradients(model, 9, scale=0.0)
    first.agg_grad(not by_layer)(model, "avg")  # pays from the same memory
    paid = max(p.grad.abs().max() for p in model.parameters())
    return remembered != all_bits(first.state_dict(), but="calls"), bool(paid > 1e-3)


@BY_LAYER
def test_a_saved_memory_goes_on_to_the_bit(ranks, by_layer):
    assert ranks(2, save_and_go_on, by_layer) == [(True, True)] * 2


def train_and_save():
    model = wide_network()
    aggregation = PowerAggregation(model, reuse_query=True, rank=2)
    for call in range(4):
        give_gradients(model, call)
        aggregation.agg_grad()(model, "avg")
    return aggregation.state_dict()


def load(state):
    model = wide_network()
    aggregation = PowerAggregation(model, reuse_query=True, rank=2)
    aggregation.load_state_dict(state)
    loaded = aggregation.state_dict()
    give_gradients(model, 9)
    aggregation.agg_grad()(model, "avg")
    assert len(set(training.gather(training.bits(gradients(model).values())))) == 1
    return loaded


def test_another_number_of_ranks_starts_from_the_mean(ranks):
    states = ranks(3, train_and_save)
    merged = {key: value for state in states for key, value in state.items()}
    loaded = ranks(2, load, merged)
    for name, _ in wide_network().named_parameters():
        mean = sum(error_of(states[r], r, name) for r in range(3)) / 3
        for rank in range(2):
            torch.testing.assert_close(error_of(loaded[rank], rank, name), mean)
    with pytest.raises(AssertionError, match="merge what all ranks saved"):
        ranks(2, load, states[0])


def wrong_use():
    model = wide_network()
    give_gradients(model, 0)
    before = training.bits(gradients(model).values())
    aggregation = PowerAggregation(model, world_size=2)
    for op in ("avg_custom", "sum", "max", "nonsense"):
        with pytest.raises(NotImplementedError, match=op):
            aggregation.agg_grad()(model, op)
    with pytest.raises(NotImplementedError, match="AllReduceAggregation"):
        aggregation.agg_model()
    with pytest.raises(NotImplementedError, match="AllReduceAggregation"):
        aggregation._agg_weights_by_layer(model, "avg")
    with pytest.raises(ValueError, match="world_size=3"):
        PowerAggregation(model, world_size=3).agg_grad()(model, "avg")
    other = nn.Linear(2, 2)
    give_gradients(other, 0)
    with pytest.raises(ValueError, match="without it"):
        aggregation.agg_grad()(other, "avg")
    mine = PowerAggregation(model, rank=1 + dist.get_rank())
    with pytest.raises(BaguaError, match=r"rank 1.*rank 2"):
        mine.agg_grad()(model, "avg")
    for arguments in ({"rank": 0}, {"world_size": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            PowerAggregation(model, **arguments)
    return before == training.bits(gradients(model).values())


def test_wrong_use_is_refused_and_changes_nothing(ranks):
    assert ranks(2, wrong_use) == [True] * 2
