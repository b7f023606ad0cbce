"""Training over emulated nodes: against one process, and against the formula bit for bit."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from oracle.compressed_all_reduce import compressed_all_reduce
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from torch import nn

NODES = pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=str)
NUMELS = (1001, 37)


def algorithm(kind):
    if kind == "exact":
        return GradientAllReduceAlgorithm(hierarchical=True)
    return ByteGradAlgorithm(hierarchical=True, codec=kind)


@training.with_group
def train_over_nodes():
    model = training.network(seed=dist.get_rank())
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], algorithm("exact"))
    training.train_on_ranks(model, optimizer, steps=8)
    alone = training.network(seed=0)
    training.train_alone(alone, training.sgd(alone), steps=8)
    training.assert_close(model, alone)
    return training.model_bits(model)


@NODES
def test_training_over_nodes_is_training_on_all_data(ranks, sizes):
    assert len(set(ranks(sum(sizes), train_over_nodes, env=environment_of_nodes(sizes)))) == 1


class Weighted(nn.Module):
    """Its gradients are the inputs."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(numel) for numel in NUMELS)

    def forward(self, gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def gradients_of(rank):
    """Multiples of 12: means over 2, 3 and 4 of them are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return [12.0 * torch.randint(-500, 500, (numel,), generator=generator) for numel in NUMELS]


@training.with_group
def communicated(kind):
    """The bucket, padding included, before and after: one pair per parameter."""
    model = Weighted()
    model.with_bagua([], algorithm(kind))
    (bucket,) = model.bagua_buckets
    model(gradients_of(dist.get_rank())).backward()
    own = torch.cat(gradients_of(dist.get_rank())[::-1])  # the last parameter comes first
    own = torch.cat([own, torch.zeros(bucket.backend_tensor.numel() - own.numel())])
    return own, bucket.backend_tensor


def expected(kind, sizes, brought):
    """1. The mean of each node, times its share. 2. Their mean, through the codec."""
    leaders, first = [], 0
    for size in sizes:
        node = torch.stack(brought[first : first + size]).mean(0)
        leaders.append(node * size * len(sizes) / sum(sizes))
        first += size
    if kind == "exact":
        return torch.stack(leaders).mean(0)
    return compressed_all_reduce(kind, leaders, average=True)


@NODES
@pytest.mark.parametrize("kind", ["exact", "block_uint8", "minmax_uint8"])
def test_hierarchical_results_are_the_formula_bit_for_bit(ranks, sizes, kind):
    results = ranks(sum(sizes), communicated, kind, env=environment_of_nodes(sizes))
    brought = [own for own, _ in results]
    right = expected(kind, sizes, brought)
    for _, flat in results:
        assert training.bits([flat]) == training.bits([right])
    exact = torch.stack(brought).mean(0)
    assert torch.equal(right, exact) == (kind == "exact")
