"""Training over emulated nodes: against one process, and against the formula bit for bit."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, ByteGradAlgorithm, GradientAllReduceAlgorithm
from oracle.compressed_all_reduce import compressed_all_reduce
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from torch import nn

NODES = pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=str)
WAYS = pytest.mark.parametrize("way", [True, "sharded"], ids=["leaders", "sharded"])
NUMELS = (1001, 37)


def algorithm(kind, way):
    if kind == "exact":
        return GradientAllReduceAlgorithm(hierarchical=way)
    return ByteGradAlgorithm(hierarchical=way, codec=kind)


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
def communicated(kind, way):
    """The bucket, padding included, before and after, and bytes sent between the nodes."""
    model = Weighted()
    model.with_bagua([], algorithm(kind, way))
    (bucket,) = model.bagua_buckets
    model(gradients_of(dist.get_rank())).backward()
    own = torch.cat(gradients_of(dist.get_rank())[::-1])  # the last parameter comes first
    own = torch.cat([own, torch.zeros(bucket.backend_tensor.numel() - own.numel())])
    between = model.bagua_stats()["communicators"].get("leaders", {"bytes_sent": 0})
    return own, bucket.backend_tensor, between["bytes_sent"]


def expected(kind, sizes, brought, way):
    """1. The mean of each node, times its share. 2. Their mean, through the codec."""
    leaders, first = [], 0
    for size in sizes:
        node = torch.stack(brought[first : first + size]).mean(0)
        leaders.append(node * size * len(sizes) / sum(sizes))
        first += size
    if kind == "exact":
        return torch.stack(leaders).mean(0)
    stride = len(leaders[0])
    if way == "sharded":
        stride = (-(-stride // max(sizes)) + 15) // 16 * 16
    shares = zip(*(leader.split(stride) for leader in leaders), strict=True)
    return torch.cat([compressed_all_reduce(kind, list(share), average=True) for share in shares])


@WAYS
@NODES
@pytest.mark.parametrize("kind", ["exact", "block_uint8", "minmax_uint8"])
def test_hierarchical_results_are_the_formula_bit_for_bit(ranks, sizes, kind, way):
    results = ranks(sum(sizes), communicated, kind, way, env=environment_of_nodes(sizes))
    brought = [own for own, _, _ in results]
    right = expected(kind, sizes, brought, way)
    for _, flat, _ in results:
        assert training.bits([flat]) == training.bits([right])
    exact = torch.stack(brought).mean(0)
    assert torch.equal(right, exact) == (kind == "exact")


@pytest.mark.parametrize("kind", ["exact", "block_uint8"])
def test_shares_divide_the_bytes_between_nodes_among_the_ranks_of_a_node(ranks, kind):
    sent = {}
    for way in (True, "sharded"):
        results = ranks(4, communicated, kind, way, env=environment_of_nodes((2, 2)))
        sent[way] = [between for _, _, between in results]
    leader = sent[True][0]
    assert sent[True] == [leader, 0, leader, 0]
    frames = 0 if kind == "exact" else 200  # of 32 bytes per message, and parts of blocks
    for node in (sent["sharded"][:2], sent["sharded"][2:]):
        assert leader <= sum(node) <= leader + frames
        assert max(node) <= leader / 2 + 64 + frames / 2  # shares are multiples of 64 bytes


#: Algorithms that refuse at the wrap what their bucket would at the end of the warm-up.
WITH_RESIDUALS = {"power_sgd": "PowerSGDAlgorithmImpl", "sparse": "SparseAlgorithmImpl"}


@training.with_group
def refused(name, hierarchical):
    model = training.network()
    optimizer = training.sgd(model)
    chosen = Algorithm.init(name, hierarchical=hierarchical)
    return training.error_of(lambda: model.with_bagua([optimizer], chosen))


@pytest.mark.parametrize(
    ("name", "known"),
    {
        "gradient_allreduce": "True, False or 'sharded'",
        "bytegrad": "True, False or 'sharded'",
        "decentralized": "True or False",
        "low_precision_decentralized": "True or False",
        "power_sgd": "True or False",
        "sparse": "True or False",
    }.items(),
)
def test_other_values_are_refused_by_name(ranks, name, known):
    value = "sharded" if known == "True or False" else "shared"
    for error in ranks(2, refused, name, value):
        owner = WITH_RESIDUALS.get(name, "bucket '0'")
        assert error.startswith(f"ValueError: {owner}: ")
        assert f"hierarchical='{value}' must be {known} for" in error
