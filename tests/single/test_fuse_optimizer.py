"""`fuse_optimizer` chooses torch's fused or foreach step."""

import bagua.torch_api as bagua
import pytest
import torch
from bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer, is_fused_optimizer
from support.options import StrangeSGD, strange_state

OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "fused"),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1), "fused"),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.1), "fused"),
    "adadelta": (lambda p: torch.optim.Adadelta(p, lr=1.0), "foreach"),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.1), "foreach"),
}


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def train(network, step, optimizer):
    for number in range(4):
        optimizer.zero_grad()
        network(torch.full((3, 5), 0.1 * number)).square().sum().backward()
        step()
    return [p.detach().clone() for p in network.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fused_step_trains_as_the_plain_one(name):
    make, way = OPTIMIZERS[name]
    plain, fused = model(), model()
    expected_by = make(plain.parameters())
    optimizer = make(fused.parameters())
    assert bagua.contrib.fuse_optimizer(optimizer) is optimizer
    for group in optimizer.param_groups:
        assert (group["fused"], group["foreach"]) == (way == "fused", way == "foreach")
    expected = train(plain, expected_by.step, expected_by)
    torch.testing.assert_close(train(fused, optimizer.fuse_step, optimizer), expected)


def test_step_and_closure_work_too():
    network = model()
    optimizer = fuse_optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    optimizer.step()

    def closure():
        return network(torch.ones(1, 5)).sum()

    assert optimizer.fuse_step(closure) == closure()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.fuse_step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_an_optimizer_with_state_is_not_fused_late():
    network = model()
    optimizer = torch.optim.Adam(network.parameters())
    train(network, optimizer.step, optimizer)
    fuse_optimizer(optimizer)
    assert optimizer.param_groups[0]["foreach"]
    train(network, optimizer.fuse_step, optimizer)


def test_copies_and_states_are_those_of_the_optimizer():
    optimizer = fuse_optimizer(torch.optim.SGD(model().parameters(), lr=0.1))
    fresh = torch.optim.SGD(model().parameters(), lr=0.2)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.1
    assert not is_fused_optimizer(fresh)


def test_a_second_time_is_refused():
    optimizer = fuse_optimizer(torch.optim.SGD(model().parameters(), lr=0.1))
    assert is_fused_optimizer(optimizer)
    with pytest.raises(RuntimeError, match="this SGD is fused already"):
        fuse_optimizer(optimizer)
    with pytest.raises(TypeError, match="not list"):
        fuse_optimizer([])


def test_an_optimizer_without_such_a_step_is_named():
    with pytest.warns(UserWarning, match=r"LBFGS has neither .* fuse_step\(\) is its step\(\)"):
        optimizer = fuse_optimizer(torch.optim.LBFGS(model().parameters()))
    assert optimizer.fuse_step(lambda: torch.zeros(())) == 0


def test_options_and_state_of_every_type_stay():
    for state, way in ((False, "fused"), (True, "foreach")):
        network = model()
        optimizer = StrangeSGD(network.parameters(), 2, state)
        fuse_optimizer(optimizer)
        assert optimizer.param_groups[0][way] is True
        expected = StrangeSGD(model().parameters(), 2, state)
        expected.param_groups[0].update(foreach=way == "foreach", fused=way == "fused")
        train(network, optimizer.fuse_step, optimizer)
        assert strange_state(optimizer) == strange_state(expected)
