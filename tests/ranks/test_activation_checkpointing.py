"""Activation checkpointing, both kinds: reentrant ends inner graph tasks before backward ends."""

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
    """Three blocks, recomputed in backward; `shared`: the last one is the first one again."""

    def __init__(self, reentrant, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(training.FEATURES, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2 if shared else 3))
        self.head = nn.Linear(7, training.OUTPUTS)
        self.reentrant = reentrant
        self.order = [0, 1, 0] if shared else [0, 1, 2]

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        for index in self.order:
            x = checkpoint(self._block, index, x, use_reentrant=self.reentrant)
        return self.head(x)

    def _block(self, index, x):
        return torch.tanh(self.blocks[index](x))


@training.with_group
def train_checkpointed(reentrant, shared, do_flatten):
    model = Checkpointed(reentrant, shared)
    return training.train_as_one_process(model, do_flatten=do_flatten)


@KIND
@pytest.mark.parametrize("do_flatten", [True, False], ids=["flattened", "copied"])
def test_checkpointed_blocks_train_as_one_process_does(ranks, reentrant, do_flatten):
    assert ranks(3, train_checkpointed, reentrant, False, do_flatten) == [3, 3, 3]


@training.with_group
def train_in_one_checkpoint():
    """The wrapped module itself is called again in backward."""

    def loss(module, data):
        outputs = checkpoint(module, data[0], use_reentrant=False)
        return nn.functional.mse_loss(outputs, data[1])

    return training.train_as_one_process(training.network(), loss)


def test_a_wrapped_module_that_is_recomputed_trains_as_one_process_does(ranks):
    assert ranks(2, train_in_one_checkpoint) == [3, 3]


def test_a_block_used_twice_trains_under_checkpoints_that_are_not_reentrant(ranks):
    assert ranks(3, train_checkpointed, False, True, True) == [3, 3, 3]


@training.with_group
def use_a_block_twice_under_reentrant_checkpoints():
    model = Checkpointed(reentrant=True, shared=True)
    model.with_bagua([], GradientAllReduceAlgorithm())
    loss = training.squared_error(model, training.batch(0, dist.get_rank()))
    return training.error_of(loss.backward)


def test_a_block_used_twice_under_reentrant_checkpoints_is_named_with_the_remedy(ranks):
    for message in ranks(2, use_a_block_twice_under_reentrant_checkpoints):
        assert "'blocks.0." in message
        assert "received a gradient twice in one backward" in message
        assert "use_reentrant=False" in message


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
