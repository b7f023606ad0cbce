"""PowerSGD and CentralizedSparsifiedSGD on several ranks: what is held back is not lost."""

import copy

import pytest
import torch
import torch.distributed as dist
from mlbench_core.optim.pytorch import CentralizedSparsifiedSGD, PowerSGD
from support.training import (
    FEATURES,
    OUTPUTS,
    assert_close,
    assert_ranks_agree,
    batch,
    bits,
    error_of,
    gather,
    local_gradients,
    mean_over_ranks,
    squared_error,
    train,
    train_alone,
    with_group,
)
from torch import nn

STEPS = 5
RATE = 0.1
K = 3


def network(seed=0):
    """Matrices so large that few coordinates of them take fewer bytes than all."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, OUTPUTS))


def power(model, **options):
    return PowerSGD(model, lr=RATE, world_size=dist.get_world_size(), **options)


def sparse(model, **options):
    size = dist.get_world_size()
    options = {"sparse_grad_size": K, "world_size": size} | options
    return CentralizedSparsifiedSGD(model.parameters(), lr=RATE, **options)


KINDS = {
    "power": (power, {}),
    "power_warm": (power, {"reuse_query": True}),
    "power_by_layer": (power, {"by_layer": True}),
    "largest": (sparse, {}),
    "random": (sparse, {"random_sparse": True}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def held_back(model, optimizer):
    """The mean over ranks of what they hold back, by parameter, in units of weights."""
    memory = optimizer.state_dict()["aggregation"]
    scale = RATE if isinstance(optimizer, PowerSGD) else 1.0
    found = {}
    for number, (name, p) in enumerate(model.named_parameters()):
        called = name if isinstance(optimizer, PowerSGD) else number
        error = memory.get(f"rank{dist.get_rank()}/error/{called}", torch.zeros_like(p))
        found[name] = scale * mean_over_ranks(error)
    return found


def train_and_check_agreement(model, optimizer, steps):
    for step in steps:
        train(model, optimizer, [batch(step, dist.get_rank())])
        digests = gather(bits(model.parameters()))
        assert len(set(digests)) == 1, digests


@with_group
def nothing_is_lost(kind):
    make, options = KINDS[kind]
    model = network(seed=dist.get_rank())
    optimizer = make(model, **options)
    assert bits(model.parameters()) == bits(network(seed=0).parameters())
    begin = {name: p.detach().clone() for name, p in model.named_parameters()}
    steps = {name: torch.zeros_like(p) for name, p in begin.items()}
    for step in range(STEPS):
        data = batch(step, dist.get_rank())
        for name, gradient in local_gradients(model, squared_error, data).items():
            steps[name] += RATE * mean_over_ranks(gradient)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        train_and_check_agreement(model, optimizer, [step])
        if make is sparse:
            changed = {name: (p != before[name]).sum() for name, p in model.named_parameters()}
            most = K if options else K * dist.get_world_size()  # random ones are the same on all
            assert 0 < max(changed["0.weight"], changed["2.weight"]) <= most
    lost = held_back(model, optimizer)
    assert any(error.abs().max() > 1e-4 for error in lost.values())
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            begin[name] - p.detach() + lost[name], steps[name], rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("n", [2, 3])
@every_kind
def test_weights_and_memory_together_move_as_by_sgd(ranks, n, kind):
    ranks(n, nothing_is_lost, kind)


@with_group
def goes_on(kind):
    make, options = KINDS[kind]
    model = network()
    optimizer = make(model, **options)
    train_and_check_agreement(model, optimizer, range(STEPS))
    saved = copy.deepcopy(optimizer.state_dict())
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    other = copy.deepcopy(model)
    restored = make(other, **options)
    restored.load_state_dict(saved)
    pairs = ((model, optimizer), (twin, twin_optimizer), (other, restored))
    for trained, own in pairs:
        train_and_check_agreement(trained, own, range(STEPS, 2 * STEPS))
    assert len({bits(trained.parameters()) for trained, _ in pairs}) == 1
    del saved["aggregation"]
    return error_of(lambda: restored.load_state_dict(saved))


@every_kind
def test_a_copy_and_a_restored_one_go_on_to_the_bit(ranks, kind):
    for message in ranks(2, goes_on, kind):
        assert "has no entry 'aggregation'" in message


@with_group
def save(kind):
    make, options = KINDS[kind]
    model = network()
    optimizer = make(model, **options)
    train_and_check_agreement(model, optimizer, range(STEPS))
    return model.state_dict(), optimizer.state_dict(), held_back(model, optimizer)


@with_group
def load(kind, weights, state):
    make, options = KINDS[kind]
    model = network()
    optimizer = make(model, **options)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    held = held_back(model, optimizer)
    train_and_check_agreement(model, optimizer, range(STEPS))
    return held


@pytest.mark.parametrize("kind", ["power_warm", "largest"])
def test_another_number_of_ranks_continues_from_the_mean_residual(ranks, kind):
    (weights, state, held), (_, other, _) = ranks(2, save, kind)
    state["aggregation"] |= other["aggregation"]
    for found in ranks(3, load, kind, weights, state):
        for name, expected in held.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7)


@with_group
def without_compression(kind):
    model, oracle = network(), network()
    options = {"rank": 100, "momentum": 0.9} if kind == "power" else {"sparse_grad_size": 1000}
    make, _ = KINDS[kind]
    optimizer = make(model, weight_decay=0.05, **options)
    train_and_check_agreement(model, optimizer, range(STEPS))
    momentum = options.get("momentum", 0)
    plain = torch.optim.SGD(oracle.parameters(), lr=RATE, momentum=momentum, weight_decay=0.05)
    train_alone(oracle, plain, STEPS)
    assert_close(model, oracle)


@pytest.mark.parametrize("kind", ["power", "largest"])
def test_where_everything_is_sent_it_is_sgd_on_all_data(ranks, kind):
    ranks(3, without_compression, kind)


@with_group
def wrong_sizes():
    model = network()
    return [
        error_of(lambda: PowerSGD(model, lr=RATE)),
        error_of(lambda: CentralizedSparsifiedSGD(model.parameters(), lr=RATE)),
        error_of(lambda: PowerSGD(model, lr=RATE, average_world=False)),
    ]


def test_forgetting_the_number_of_ranks_is_an_error_and_not_training_apart(ranks):
    for forgotten, also, average in ranks(2, wrong_sizes):
        assert forgotten.startswith("ValueError: PowerSGD was made with world_size=1")
        assert also.startswith("ValueError: CentralizedSparsifiedSGD was made with world_size=1")
        assert "average_world" in average


@with_group
def sums():
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.zero_()
    optimizer = sparse(model, sparse_grad_size=2, average_world=False)
    model.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert_ranks_agree(nn.ParameterList([nn.Parameter(model.weight.detach())]))
    return model.weight.tolist(), model.weight.grad.tolist()


def test_sums_may_be_asked_for_and_gradients_stay(ranks):
    for weight, gradient in ranks(3, sums):
        assert weight == [[pytest.approx(-0.3)] * 2]
        assert gradient == [[1.0, 1.0]]
