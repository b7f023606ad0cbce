"""Parameters that backward did not reach: zeros are sent for them, and a warning names them."""

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training
from torch import nn


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(training.FEATURES, 7)
        self.left = nn.Linear(7, training.OUTPUTS)
        self.right = nn.Linear(7, training.OUTPUTS)
        self.nobody = nn.Linear(7, training.OUTPUTS)

    def forward(self, x):
        return self.left(torch.tanh(self.trunk(x)))


def step(model):
    model.zero_grad()
    training.squared_error(model, training.batch(0, dist.get_rank())).backward()
    training.assert_ranks_agree(model)


@training.with_group
def two_steps_without_a_branch():
    model = Branches()
    model.with_bagua([training.sgd(model)], GradientAllReduceAlgorithm())
    first = training.warnings_of(lambda: step(model))
    second = training.warnings_of(lambda: step(model))
    return first, second, {name: p.grad.abs().sum().item() for name, p in model.named_parameters()}


def test_unused_parameters_are_named_once_and_send_zeros(ranks):
    for first, second, sums in ranks(3, two_steps_without_a_branch):
        assert len(first) == 1
        for part in ("Branches", "right.weight", "nobody.bias", "zeros", "find_unused_parameters"):
            assert part in first[0]
        assert "left" not in first[0]
        assert second == []
        assert sums["left.weight"] > 0
        assert sums["right.weight"] == sums["nobody.weight"] == sums["nobody.bias"] == 0.0
