"""A backward through the output of the wrapped module's forward ends a step."""

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training
from support.cases import over
from torch import nn
from torch.utils.checkpoint import checkpoint


class KeepsItsLoss(nn.Module):
    """Computes the loss inside; what it returns is up to `returned`."""

    def __init__(self, returned):
        super().__init__()
        torch.manual_seed(0)
        self.network = training.network()
        self.side = nn.Linear(training.FEATURES, 1)
        self.returned = returned

    def forward(self, data):
        self.loss = training.squared_error(self.network, data) + self.side(data[0]).square().mean()
        return {
            "nothing": None,
            "detached": self.loss.detach(),
            "side": self.side(data[0]),
            "a parameter": self.side.bias,
        }[self.returned]


def keep_loss(model, data):
    model(data)
    return model.loss


@training.with_group
def train_with_a_kept_loss(returned):
    return training.train_as_one_process(KeepsItsLoss(returned), keep_loss)


@over(returned=["nothing", "detached", "side", "a parameter"])
def test_a_backward_past_what_the_module_returns_is_synchronised(ranks, returned):
    assert ranks(3, train_with_a_kept_loss, returned) == [3, 3, 3]


@training.with_group
def miss_the_output():
    model = KeepsItsLoss("side")
    model.with_bagua([], GradientAllReduceAlgorithm())
    data = training.batch(0, dist.get_rank())
    model(data)
    training.squared_error(model.network, data).backward()
    return training.error_of(lambda: keep_loss(model, data).backward())


def test_a_backward_that_misses_the_output_and_a_parameter_is_found_by_the_next_forward(ranks):
    for message in ranks(2, miss_the_output):
        assert "BaguaError" in message
        assert "round 1: parameters received gradients" in message
        assert "reached only 4 of 6 parameters" in message
        assert "Compute the loss from the module's output" in message


@training.with_group
def penalise_weights(how):
    def loss(m, data):
        error = training.squared_error(m, data)
        weights = list(m.parameters())[1:] if how == "separate, not all" else m.parameters()
        penalty = sum(p.square().sum() for p in weights)
        if how == "joined":
            return error + penalty
        penalty.backward()
        return error

    return training.train_as_one_process(training.network(), loss)


@over(case=[("joined", 3), ("separate, not all", 3), ("separate", 6)])
def test_a_penalty_is_part_of_the_step_or_a_round_if_its_backward_reaches_all_weights(ranks, case):
    how, rounds = case
    assert ranks(3, penalise_weights, how) == [rounds] * 3


@training.with_group
def use_a_parameter_in_the_loss_only():
    def loss(m, data):
        return training.squared_error(m, data) + (m.token * data[0]).square().mean()

    model = training.network()
    model.token = nn.Parameter(torch.ones(5))
    return training.train_as_one_process(model, loss)


def test_a_parameter_that_only_the_loss_uses_is_synchronised(ranks):
    assert ranks(3, use_a_parameter_in_the_loss_only) == [3, 3, 3]


@training.with_group
def train_in_one_checkpoint():
    """The wrapped module itself is called again in backward."""

    def loss(module, data):
        outputs = checkpoint(module, data[0], use_reentrant=False)
        return nn.functional.mse_loss(outputs, data[1])

    model = training.network()
    return training.train_as_one_process(model, loss), model.bagua_train_step_counter


def test_a_wrapped_module_that_is_recomputed_trains_as_one_process_does(ranks):
    assert ranks(2, train_in_one_checkpoint) == [(3, 3)] * 2
