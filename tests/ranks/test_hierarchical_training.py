"""Training over emulated nodes: against one process, and against the formula bit for bit."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, ByteGradAlgorithm, GradientAllReduceAlgorithm
from oracle.compressed_all_reduce import compressed_all_reduce
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from support.cases import over
from torch import nn

NODES = [(2, 2), (3, 1), (1, 1, 1), (3,)]
NUMELS = (1001, 37)


def algorithm(kind, way, average):
    if kind == "exact":
        return GradientAllReduceAlgorithm(hierarchical=way, average=average)
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
def communicated(kind, way, average=True):
    """The bucket, padding included, before and after, its op, and bytes sent between the nodes."""
    model = Weighted()
    chosen = algorithm(kind, way, average)
    assert training.warnings_of(lambda: model.with_bagua([], chosen)) == []
    (bucket,) = model.bagua_buckets
    model(gradients_of(dist.get_rank())).backward()
    own = torch.cat(gradients_of(dist.get_rank())[::-1])  # the last parameter comes first
    own = torch.cat([own, torch.zeros(bucket.backend_tensor.numel() - own.numel())])
    stats = model.bagua_stats()
    between = stats["communicators"].get("leaders", {"bytes_sent": 0})
    (op,) = stats["buckets"][0]["ops"]
    return own, bucket.backend_tensor, op, between["bytes_sent"]


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


@pytest.mark.parametrize("way", [True, "sharded"], ids=["leaders", "sharded"])
@pytest.mark.parametrize("kind", ["exact", "sum", "block_uint8"])
@over(sizes=NODES)
def test_hierarchical_results_are_the_formula_bit_for_bit(ranks, kind, way, sizes):
    kind, average = ("exact", False) if kind == "sum" else (kind, True)
    env = environment_of_nodes(sizes)
    results = ranks(sum(sizes), communicated, kind, way, average, env=env)
    brought = [own for own, *_ in results]
    factor = 1 if average else sum(sizes)
    right = expected(kind, sizes, brought, way) * factor
    for _, flat, op, _ in results:
        assert training.bits([flat]) == training.bits([right])
        named = op.startswith(f"Hierarchical({len(sizes)} nodes")
        assert named or way == "sharded" or len(sizes) == 1
    assert f"ranks {len(sizes)}" in results[0][2] or way == "sharded" or len(sizes) == 1
    exact = torch.stack(brought).mean(0) * factor
    assert torch.equal(right, exact) == (kind == "exact" or len(sizes) == 1)


@pytest.mark.parametrize("kind", ["exact", "block_uint8"])
def test_shares_divide_the_bytes_between_nodes_among_the_ranks_of_a_node(ranks, kind):
    sent = {}
    for way in (True, "sharded"):
        results = ranks(4, communicated, kind, way, env=environment_of_nodes((2, 2)))
        sent[way] = [between for *_, between in results]
    leader = sent[True][0]
    assert sent[True] == [leader, 0, leader, 0]
    frames = 0 if kind == "exact" else 200  # of 32 bytes per message, and parts of blocks
    for node in (sent["sharded"][:2], sent["sharded"][2:]):
        assert leader <= sum(node) <= leader + frames
        assert max(node) <= leader / 2 + 64 + frames / 2  # shares are multiples of 64 bytes


#: Algorithms that refuse at the wrap what their bucket would at the end of the warm-up.
WITH_RESIDUALS = {"power_sgd": "PowerSGDAlgorithmImpl", "sparse": "SparseAlgorithmImpl"}


KNOWN = {
    "gradient_allreduce": "True, False or 'sharded'",
    "bytegrad": "True, False or 'sharded'",
    "decentralized": "True or False",
    "low_precision_decentralized": "True or False",
    "power_sgd": "True or False",
    "sparse": "True or False",
}


@training.with_group
def refused():
    errors = {}
    for name, known in KNOWN.items():
        model = training.network()
        value = "sharded" if known == "True or False" else "shared"
        wrap = [training.sgd(model)], Algorithm.init(name, hierarchical=value)
        errors[name] = value, training.error_of(lambda m=model, w=wrap: m.with_bagua(*w))
    return errors


def test_other_values_are_refused_by_name(ranks):
    for errors in ranks(2, refused):
        for name, (value, error) in errors.items():
            owner = WITH_RESIDUALS.get(name, "bucket '0'")
            assert error.startswith(f"ValueError: {owner}: ")
            assert f"hierarchical='{value}' must be {KNOWN[name]} for" in error
