"""bagua.fsdp.compress: gradients and weights of torch's FSDP2 through a codec."""

import bagua.fsdp
import pytest
import torch
import torch.distributed as dist
from bagua import _C
from bagua.fsdp._collectives import divisor_of
from oracle.sharded import all_gather
from support import sharded
from support.cases import over
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

DIVISORS = {
    "mean": lambda model: dist.get_world_size(),
    "divided_by_4": lambda model: model.set_gradient_divide_factor(4.0) or 4,
    "force_sum": lambda model: (
        model.set_force_sum_reduction_for_comms(True) or dist.get_world_size()
    ),
}


@sharded.with_torch_group
def gradients(codec, way):
    model, _ = sharded.compressed(codec)
    divisor = {DIVISORS[way](m) for m in model.modules() if isinstance(m, FSDPModule)}
    sharded.backward(model, 0)
    found = list(sharded.local_gradients(model).values())
    expected, _ = sharded.oracle_gradients(codec, 0, *divisor)
    return found, expected


@pytest.mark.parametrize("way", DIVISORS)
def test_gradients_have_the_bits_of_the_oracle(ranks, way):
    for found, expected in ranks(3, gradients, "block_uint8", way):
        assert all(map(torch.equal, found, expected))


@sharded.with_torch_group
def trained(options, policy=None):
    """(weights, bytes sent for gradients and for weights, elements reduced per step, loss)."""
    steps = 20
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Linear(256, 3)
    )
    model = sharded.sharded(model, **({"mp_policy": policy} if policy else {}))
    handle = None if options is None else bagua.fsdp.compress(model, **options)
    sharded.train(model, sharded.adam(model), steps)
    sent = {"gradients": 0, "weights": 0}
    for bucket in handle.stats()["buckets"] if handle else ():
        assert bucket["nonfinite_rounds"] == 0
        sent[bucket["name"].rsplit(".", 1)[1]] += bucket["bytes_sent"]
    numel = sum(p.numel() for p in model.parameters())
    loss = sum(sharded.loss_of(model, rank, 1000).item() for rank in range(2))
    return sharded.full_weights(model), sent, steps * numel, loss


def test_gradients_take_a_quarter_of_the_bytes_and_train_as_well(ranks):
    exact = ranks(2, trained, None)[0]
    for weights, sent, numel, loss in ranks(2, trained, {}):
        assert sent["gradients"] <= 0.27 * 4 * numel / 2
        assert sent["weights"] == 0
        assert loss < 1.1 * exact[3] + 0.01
        assert not torch.equal(weights, exact[0])


def test_weights_take_a_quarter_of_the_bytes(ranks):
    exact = ranks(2, trained, None)[0]
    first, second = ranks(2, trained, {"weights": True})
    assert torch.equal(first[0], second[0])
    for _, sent, numel, loss in (first, second):
        # Twice a step: for forward and, where they were given up, for backward; one loss more.
        assert 0.9 * 4 * numel / 8 < sent["weights"] <= 0.27 * 4 * numel * 2.2 / 2
        assert loss < 1.1 * exact[3] + 0.02


def test_weights_of_few_bits_train_in_mixed_precision(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact = ranks(2, trained, None, policy)[0]
    first, second = ranks(2, trained, {"weights": True}, policy)
    assert torch.equal(first[0], second[0])
    assert first[3] < 1.15 * exact[3] + 0.02


@sharded.with_torch_group
def gathered(codec):
    """(weights that forward sees, those of the oracle, the sum of the shards before and after)."""
    model, _ = sharded.compressed(codec, weights=True)
    before = sharded.full_weights(model)
    plain, ranks = sharded.plain(), dist.get_world_size()
    expected = []
    for layer in (0, 2, 4):
        cut = [sharded.chunks(p.detach(), ranks) for p in plain[layer].parameters()]
        shares = [torch.cat([shards[rank].flatten() for shards in cut]) for rank in range(ranks)]
        whole = all_gather(codec, shares).chunk(ranks)
        of_parameters = [[] for _ in cut]
        for share in whole:
            sizes = [shards[0].numel() for shards in cut]
            for pieces, piece in zip(of_parameters, share.split(sizes), strict=True):
                pieces.append(piece)
        for pieces, p in zip(of_parameters, plain[layer].parameters(), strict=True):
            expected.append(torch.cat(pieces)[: p.numel()].view_as(p))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    found = [p.detach().clone() for p in model.parameters()]
    return found, expected, before, sharded.full_weights(model)


@over(codec=_C.codec_names())
def test_gathered_weights_are_equal_on_all_ranks_and_shards_stay_exact(ranks, codec):
    results = ranks(3, gathered, codec)
    for found, expected, before, after in results:
        assert all(map(torch.equal, found, results[0][0]))
        assert all(map(torch.equal, found, expected))
        assert torch.equal(before, after)


def test_gradients_are_divided_as_torch_asks():
    assert divisor_of(dist.ReduceOp.SUM, 3) == 1
    assert divisor_of(dist.ReduceOp.AVG, 3) == 3
    assert divisor_of(dist._make_nccl_premul_sum(0.25), 3) == 4
    for other in (dist.ReduceOp.MAX, dist._make_nccl_premul_sum(-1.0)):
        with pytest.raises(NotImplementedError, match="set_force_sum_reduction_for_comms"):
            divisor_of(other, 3)
