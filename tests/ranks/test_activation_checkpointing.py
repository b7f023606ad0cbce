"""Activation checkpoints of a whole module, and accumulated. More: situations/checkpointing.py."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training
from torch import nn
from torch.utils.checkpoint import checkpoint

KIND = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])


class Checkpointed(nn.Module):
    """Three blocks, recomputed in backward."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(training.FEATURES, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, training.OUTPUTS)
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return self.head(x)


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


@training.with_group
def accumulate_checkpointed(reentrant):
    model = Checkpointed(reentrant)
    alone = copy.deepcopy(model)
    model.with_bagua([], GradientAllReduceAlgorithm())
    size = dist.get_world_size()
    with model.no_sync():
        training.squared_error(model, training.batch(0, dist.get_rank())).backward()
    training.squared_error(model, training.batch(1, dist.get_rank())).backward()
    training.assert_ranks_agree(model)
    for step in range(2):
        training.squared_error(alone, training.whole_batch(step, size)).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    return model.bagua_stats()["rounds"]


@KIND
def test_checkpointed_blocks_accumulate_under_no_sync(ranks, reentrant):
    assert ranks(3, accumulate_checkpointed, reentrant) == [1, 1, 1]
