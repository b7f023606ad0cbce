"""Models and groups that bagua.fsdp.compress refuses, and unusual ones that it takes."""

import bagua.fsdp
import pytest
import torch
import torch.distributed as dist
from support import faults, sharded
from torch.distributed._composable.replicate_with_fsdp import replicate
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


def with_adapter(model):
    model.append(torch.nn.Linear(3, 3))
    return model


@sharded.with_torch_group
def plain_parameters_beside_shards():
    """Errors by situation: at compress(), or in the forward after the parameters have appeared."""
    errors = {}
    compress = bagua.fsdp.compress

    def refused(name, model, *change):
        """`change` comes after a step."""
        errors[name] = ""
        try:
            compress(model)
            for step, between in enumerate([*change, lambda: None]):
                sharded.backward(model, step)
                between()
            sharded.backward(model, 9)
        except bagua.BaguaError as error:
            errors[name] = str(error)

    refused("late", with_adapter(sharded.sharded()))
    replicated = with_adapter(replicate(sharded.plain()))
    refused("replicas", replicated)
    model = sharded.sharded()
    refused("later", model, lambda: with_adapter(model))
    lora = sharded.sharded()
    refused("lora", lora, lambda: with_adapter(lora.requires_grad_(False)))
    outside = torch.nn.Sequential(fully_shard(torch.nn.Linear(5, 3)), torch.nn.Linear(3, 3))
    refused("outside", outside)
    parts = torch.nn.ModuleDict({"part": sharded.sharded()})
    compress(parts)
    with_adapter(parts["part"])
    errors["part"] = faults.error_of(sharded.backward, parts["part"], 0)
    frozen = with_adapter(sharded.sharded())
    refused("frozen", frozen[-1].requires_grad_(False) and frozen)
    refused(
        "unfrozen",
        (f := with_adapter(sharded.sharded()))[-1].requires_grad_(False) and f,
        lambda: f[-1].requires_grad_(True),
    )
    user = with_adapter(sharded.plain())
    refused("ignored", fully_shard(user, ignored_params=set(user[-1].parameters())))
    named = with_adapter(sharded.sharded())
    named._bagua_params_and_buffers_to_ignore = ["5.weight", "5.bias"]
    refused("ignored by name", named)
    evaluated = sharded.sharded()
    evaluated(torch.ones(2, 5))  # torch shows whole parameters now
    refused("evaluated", evaluated)
    return errors


def test_plain_parameters_that_are_trained_beside_shards_are_refused_by_name(ranks):
    allowed = {"frozen", "ignored", "ignored by name", "evaluated"}
    for errors in ranks(2, plain_parameters_beside_shards):
        for name, error in errors.items():
            if name in allowed:
                assert error == "", name
                continue
            weight = {"outside": "1.weight", "part": "part.5.weight"}.get(name, "5.weight")
            assert f"parameters '{weight}', '{weight[:-6]}bias' are trainable and not" in error, (
                name
            )
            assert "ignored_params" in error


@sharded.with_torch_group
def on_a_part_of_a_mesh():
    """Two ranks of three shard; the third has a separate model."""
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
