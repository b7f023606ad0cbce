"""Models and groups that bagua.fsdp.compress refuses, and unusual ones that it takes."""

import bagua.fsdp
import pytest
import torch
import torch.distributed as dist
from support import faults, sharded
from torch.distributed.fsdp import FSDPModule, fully_shard


@sharded.with_torch_group
def refusals():
    errors = {}
    compress = bagua.fsdp.compress
    errors["plain"] = faults.error_of(compress, sharded.plain())
    errors["none"] = faults.error_of(compress, None)
    errors["codec"] = faults.error_of(compress, sharded.sharded(), "uint9")
    model, _ = sharded.compressed()
    errors["twice"] = faults.error_of(compress, model)
    model = sharded.sharded()
    errors["different"] = faults.error_of(compress, model, weights=dist.get_rank() == 1)
    return errors


def test_what_cannot_be_compressed_is_refused_with_the_reason(ranks):
    for errors in ranks(2, refusals):
        assert "ValueError: bagua.fsdp.compress: no module of 'Sequential' is" in errors["plain"]
        assert "TypeError" in errors["none"]
        assert "uint9" in errors["codec"]
        assert "block_uint8" in errors["codec"]
        assert "compressed already" in errors["twice"]
        assert errors["different"].startswith("BaguaMismatchError"), errors["different"]
        assert "weights=True" in errors["different"]


def test_a_torch_without_the_interface_is_named(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(NotImplementedError, match=r"set_custom_reduce_scatter.*torch 2\.11 to"):
        bagua.fsdp.compress(sharded.plain())


@sharded.with_torch_group
def on_a_part_of_a_mesh():
    """Two ranks of three shard; the third has a model of its own."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    model = sharded.sharded(mesh=DeviceMesh.from_group(group, "cpu"))
    handle = bagua.fsdp.compress(model)
    sharded.train(model, sharded.adam(model), 3)
    return sharded.full_weights(model), handle.stats()["rounds"]


def test_a_group_of_some_ranks_trains(ranks):
    first, _, second = ranks(3, on_a_part_of_a_mesh)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == 3


@sharded.with_torch_group
def alone():
    model, handle = sharded.compressed(weights=True, error_feedback=True)
    sharded.train(model, sharded.adam(model), 3)
    plain = sharded.plain()
    sharded.train(plain, sharded.adam(plain), 3)
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    return sharded.full_weights(model), expected, handle.stats()["total"]["bytes_sent"]


def test_one_rank_trains_exactly_and_sends_nothing(ranks):
    ((weights, expected, sent),) = ranks(1, alone)
    assert torch.equal(weights, expected)
    assert sent == 0


@sharded.with_torch_group
def sharded_together():
    """Two layers that torch gathers and reduces at once, as one module."""
    model = sharded.plain()
    fully_shard([model[0], model[2]])
    fully_shard(model)
    handle = bagua.fsdp.compress(model, "int4_block", error_feedback=True)
    sharded.train(model, sharded.adam(model), 3)
    return sharded.full_weights(model), sorted(handle.state_dict())


def test_modules_that_are_sharded_together_have_one_residual(ranks):
    (first, keys), (second, _) = ranks(2, sharded_together)
    assert torch.equal(first, second)
    assert keys == ["communications", "rank0/error/0", "rank0/error/FSDPSequential", "ranks"]


@sharded.with_torch_group
def inferring():
    model, _ = sharded.compressed(weights=True)
    sharded.train(model, sharded.adam(model), 2)
    with torch.no_grad():
        before = model(torch.ones(2, 5))
    with torch.inference_mode():
        return before, model(torch.ones(2, 5))


def test_inference_sees_equal_weights(ranks):
    (first, inferred), others = ranks(2, inferring)
    assert torch.equal(first, inferred)
    assert torch.equal(first, others[0])
    assert torch.equal(first, others[1])
