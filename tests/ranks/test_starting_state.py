"""All ranks start with rank 0's parameters, buffers and optimizer state, except ignored ones."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training
from torch import nn


class Normalised(nn.Module):
    """Trained and frozen parameters; buffers of two types, one of them not saved."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(training.FEATURES, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, training.OUTPUTS)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("hidden", torch.randint(100, (5,)), persistent=False)
        self.norm.running_mean += seed
        self.norm.num_batches_tracked += seed

    def forward(self, x):
        return self.head(self.norm(self.first(x)))


def state_bits(model):
    return training.bits([*model.parameters(), *model.buffers()])


@training.with_group
def wrap_different_models():
    model = Normalised(seed=dist.get_rank())
    expected = state_bits(Normalised(seed=0))
    before = training.gather(state_bits(model))
    model.with_bagua([], GradientAllReduceAlgorithm())
    return len(set(before)), state_bits(model) == expected


def test_parameters_buffers_and_frozen_parameters_of_rank_0_are_broadcast(ranks):
    assert ranks(3, wrap_different_models) == [(3, True)] * 3


def stepped_adam(model, lr):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5 + lr, 0.9), amsgrad=True)
    training.train(model, optimizer, [training.batch(step, 0) for step in range(2)])
    return optimizer


@training.with_group
def resume_with_adam(state_on_every_rank):
    rank = dist.get_rank()
    model = training.network(seed=rank)
    lr = 0.01 * (rank + 1)
    if rank == 0 or state_on_every_rank:
        optimizer = stepped_adam(model, lr)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, amsgrad=True)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    states = [optimizer.state[p] for p in model.parameters()]
    digests = [training.bits([state[key] for key in sorted(state)]) for state in states]
    steps = [(state["step"].item(), state["step"].device.type) for state in states]
    group = optimizer.param_groups[0]
    training.train_on_ranks(model, optimizer)
    return digests, steps, group["lr"], group["betas"]


@pytest.mark.parametrize("everywhere", [True, False], ids=["differing", "only_on_rank_0"])
def test_optimizer_state_and_hyperparameters_of_rank_0_are_broadcast(ranks, everywhere):
    results = ranks(3, resume_with_adam, everywhere)
    assert results[0] == results[1] == results[2]
    _, steps, lr, betas = results[0]
    assert steps == [(2.0, "cpu")] * 4
    assert lr == 0.01
    assert betas == (0.51, 0.9)


@training.with_group
def wrap_with_unknown_state(holders):
    model = training.network()
    optimizer = training.sgd(model)
    if dist.get_rank() in holders:
        optimizer.param_groups[0]["strange"] = {1, 2}
    return training.error_of(lambda: model.with_bagua([optimizer], GradientAllReduceAlgorithm()))


def test_optimizer_state_that_cannot_be_sent_is_named(ranks):
    for message in ranks(2, wrap_with_unknown_state, [0, 1]):
        assert "TypeError" in message
        assert "'strange' is a set" in message


def test_optimizer_state_that_only_the_first_rank_cannot_send_raises_everywhere(ranks):
    first, second = ranks(2, wrap_with_unknown_state, [0])
    assert "'strange' is a set" in first
    assert second.startswith("TypeError: an optimizer of rank 0 has an entry that cannot be sent")


@training.with_group
def share_lbfgs():
    model = training.network(seed=dist.get_rank())
    optimizer = torch.optim.LBFGS(model.parameters())
    if dist.get_rank() == 0:

        def closure():
            optimizer.zero_grad()
            loss = training.squared_error(model, training.batch(0, 0))
            loss.backward()
            return loss

        optimizer.step(closure)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    state = optimizer.state[next(model.parameters())]
    return {
        key: training.bits(value if isinstance(value, list) else [value])
        for key, value in state.items()
        if isinstance(value, (list, torch.Tensor)) and key != "al"
    }


def test_lists_of_tensors_in_an_optimizers_state_are_sent(ranks):
    first, second = ranks(2, share_lbfgs)
    assert first == second
    assert {"old_dirs", "prev_flat_grad"} <= set(first)


@training.with_group
def train_with_ignored(attribute):
    rank = dist.get_rank()
    model = Normalised(seed=rank)
    ignored = ["head.bias", "table", "norm.running_mean", "frozen"]
    setattr(model, attribute, ignored)
    own = [model.head.bias, model.table, model.frozen]
    before = training.bits(own)
    mean = model.norm.running_mean.clone()
    model.with_bagua([], GradientAllReduceAlgorithm())
    untouched = training.bits(own) == before and torch.equal(mean, model.norm.running_mean)
    training.squared_error(model, training.batch(0, rank)).backward()
    gradients = {name: training.gather(training.bits([p.grad])) for name, p in trained(model)}
    differing = [name for name, digests in gradients.items() if len(set(digests)) > 1]
    own_mean = len(set(training.gather(training.bits([model.norm.running_mean]))))
    return untouched, differing, own_mean, sorted(model.parameters_to_ignore)


def trained(model):
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    "attribute", ["_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore"]
)
def test_ignored_parameters_and_buffers_are_left_alone(ranks, attribute):
    for untouched, differing, own_means, ignored in ranks(3, train_with_ignored, attribute):
        assert untouched
        assert differing == ["head.bias"]
        assert own_means == 3
        assert ignored == ["frozen", "head.bias", "norm.running_mean", "table"]
