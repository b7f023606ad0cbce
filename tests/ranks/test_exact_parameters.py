"""Parameters that are averaged exactly beside compressed ones: values, residuals, refusals."""

import pytest
import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import (
    PowerSGDAlgorithm,
    SparseAlgorithm,
)
from support import training
from support.error_feedback import (
    WITH_WARM_UP,
    gathered_gradients,
    make,
    train_step,
    wrapped,
)
from torch import nn

STEPS = 4
EXACT = ["0.*", "*.bias"]
CHOSEN = {"0.weight", "0.bias", "2.bias", "5.bias"}
per_kind = pytest.mark.parametrize("kind", WITH_WARM_UP)


def names_of_residuals(model):
    state = model.bagua_algorithm.state_dict()
    return {key.split("/", 2)[2] for key in state if "/error/" in key}


@training.with_group
def train(kind):
    model, optimizer = wrapped(make(kind, exact_parameters=EXACT))
    for step in range(STEPS):
        gradients = gathered_gradients(model, step)
        train_step(model, optimizer, step)
        training.assert_ranks_agree(model)
        differ = set()
        for name, parameter in model.named_parameters():
            mean = sum(g[name] for g in gradients) / len(gradients)
            if not torch.allclose(parameter.grad, mean, atol=1e-6):
                differ.add(name)
        assert not differ & CHOSEN, step
        assert differ, "the others are compressed"
    return names_of_residuals(model)


@pytest.mark.parametrize("env", [{}, training.SMALL_BUCKETS], ids=["one-bucket", "buckets"])
@per_kind
def test_chosen_parameters_get_the_exact_mean_and_no_residual(ranks, kind, env):
    assert ranks(3, train, kind, env=env) == [{"2.weight", "5.weight"}] * 3


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, codes):
        return self.head(self.body(self.table(codes)))


@training.with_group
def train_tied():
    model = Tied()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], SparseAlgorithm(0.1, exact_parameters=["head.*"]))
    model(torch.arange(4) + dist.get_rank()).square().mean().backward()
    optimizer.step()
    training.assert_ranks_agree(model)
    return names_of_residuals(model)


def test_a_shared_parameter_is_found_by_any_of_its_names(ranks):
    assert ranks(2, train_tied) == [{"body.weight", "body.bias"}] * 2


@training.with_group
def refusals():
    unknown = SparseAlgorithm(exact_parameters=["table*"])
    hooked = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    with_patterns = SparseAlgorithm(exact_parameters=["weight"])
    return [
        training.error_of(lambda: wrapped(unknown)),
        training.error_of(lambda: comm_hooks.register(hooked, with_patterns)),
    ]


def test_patterns_that_cannot_hold_are_refused(ranks):
    for unknown, hook in ranks(2, refusals):
        assert "exact_parameters: 'table*' matches no parameter" in unknown
        assert "SparseAlgorithm has exact_parameters=('weight',)" in hook


def test_one_string_is_refused():
    with pytest.raises(TypeError, match=r"give a list .* such as \['head\.\*'\]"):
        PowerSGDAlgorithm(exact_parameters="head.*")
