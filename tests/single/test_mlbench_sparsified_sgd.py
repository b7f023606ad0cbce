"""SparsifiedSGD and SignSGD: updates of few coordinates, and of signs."""

import copy

import pytest
import torch
from mlbench_core.optim.pytorch import SignSGD, SparsifiedSGD
from support.training import batch, bits, network, train
from torch import nn

DATA = [batch(step, 0) for step in range(4)]


def sparse_model():
    """Shapes on which mlbench-core's failed: a bias, several rows, a convolution, few elements."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 5), nn.Linear(5, 1))


def sparse_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


@pytest.mark.parametrize("random_sparse", [False, True])
def test_elements_that_are_not_subtracted_stay_in_the_memory(random_sparse):
    model = sparse_model()
    begin = [p.detach().clone() for p in model.parameters()]
    optimizer = SparsifiedSGD(
        model.parameters(), lr=0.1, sparse_grad_size=3, random_sparse=random_sparse
    )
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), begin, strict=True))
    total = [torch.zeros_like(p) for p in begin]
    for step in range(30):
        sparse_gradients(model, step)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        for p, old, sum_of_steps in zip(model.parameters(), before, total, strict=True):
            assert 0 < (p != old).sum() <= 3
            sum_of_steps += 0.1 * p.grad
    for p, first, sum_of_steps in zip(model.parameters(), begin, total, strict=True):
        memory = optimizer.state[p]["memory"]
        torch.testing.assert_close(first - p.detach() + memory, sum_of_steps)


def test_the_largest_entries_are_taken():
    weight = nn.Parameter(torch.zeros(2, 3))
    weight.grad = torch.tensor([[1.0, -5.0, 2.0], [4.0, 0.0, -3.0]])
    SparsifiedSGD([weight], lr=0.5, sparse_grad_size=2).step()
    assert weight.tolist() == [[0.0, 2.5, 0.0], [-2.0, 0.0, 0.0]]


@pytest.mark.parametrize("random_sparse", [False, True])
def test_every_coordinate_is_taken_in_the_end(random_sparse):
    weight = nn.Parameter(torch.zeros(10))  # 10 is no multiple of 3
    optimizer = SparsifiedSGD([weight], lr=1.0, sparse_grad_size=3, random_sparse=random_sparse)
    for _ in range(60):
        weight.grad = torch.ones(10)
        optimizer.step()
    assert (weight < 0).all()
    assert optimizer.state[weight]["memory"].max() < 40


def test_taking_all_coordinates_is_sgd_with_its_weight_decay_and_learning_rate():
    model, oracle = network(), network()
    optimizer = SparsifiedSGD(model.parameters(), lr=0.05, weight_decay=0.1, sparse_grad_size=1000)
    train(model, optimizer, DATA)
    train(oracle, torch.optim.SGD(oracle.parameters(), lr=0.05, weight_decay=0.1), DATA)
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("random_sparse", [False, True])
def test_a_restored_memory_goes_on_to_the_bit(dtype, random_sparse):
    def make(model):
        return SparsifiedSGD(
            model.parameters(), lr=0.1, sparse_grad_size=3, random_sparse=random_sparse
        )

    def steps(model, optimizer, numbers):
        for step in numbers:
            sparse_gradients(model, step)
            optimizer.step()
        return bits(model.parameters())

    model = sparse_model().to(dtype)
    optimizer = make(model)
    steps(model, optimizer, range(5))
    other = sparse_model().to(dtype)
    other.load_state_dict(model.state_dict())
    restored = make(other)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    expected = steps(model, optimizer, range(5, 10))
    assert steps(other, restored, range(5, 10)) == expected
    assert steps(twin, twin_optimizer, range(5, 10)) == expected


def test_random_coordinates_leave_the_global_generator_alone():
    weight = nn.Parameter(torch.zeros(100))
    optimizer = SparsifiedSGD([weight], lr=1.0, random_sparse=True)
    weight.grad = torch.ones(100)
    state = torch.get_rng_state()
    optimizer.step()
    first = weight.detach().clone()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert first.count_nonzero() == 10
    assert not torch.equal(weight.detach() - first != 0, first != 0)  # others each step


def test_estimated_weights_are_the_average_weighted_by_squares():
    weight = nn.Parameter(torch.zeros(6))
    optimizer = SparsifiedSGD([weight], lr=1.0)
    assert optimizer.get_estimated_weights()[0].tolist() == [0.0] * 6
    tau, total, weights = 6 / 4, 0.0, 0.0
    for t in range(5):
        weight.data.fill_(float(t * t + 1))
        optimizer.update_estimated_weights(t, 4)
        total += (t + tau) ** 2 * (t * t + 1)
        weights += (t + tau) ** 2
        expected = torch.full((6,), total / weights)
        torch.testing.assert_close(optimizer.get_estimated_weights()[0], expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sign_sgd_takes_the_sign_of_torchs_direction(nesterov):
    options = {"lr": 0.25, "momentum": 0.9, "weight_decay": 0.5, "nesterov": nesterov}
    weight, oracle = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    signed, plain = SignSGD([weight], **options), torch.optim.SGD([oracle], **options)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        gradient = torch.randn(7, generator=generator)
        before = weight.detach().clone()
        oracle.data.copy_(before)
        weight.grad, oracle.grad = gradient.clone(), gradient.clone()
        signed.step()
        plain.step()
        expected = before - 0.25 * torch.sign(before - oracle.detach())
        torch.testing.assert_close(weight.detach(), expected)
