"""bagua.fsdp.compress over shards, replicas (HSDP) and both, beside torch; replicate()."""

import functools

import bagua.fsdp
import pytest
import torch
import torch.distributed as dist
from oracle.compressed_all_reduce import compressed_all_reduce, parts, with_residuals
from oracle.sharded import reduce_scatter
from support import faults, sharded
from support.cases import over
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard


def size(shape):
    return shape[0] * shape[1]


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def hybrid(shape, model=None, **options):
    """On a mesh of replicas and shards, or where `shape` is a number sharded over all ranks."""
    mesh = None if isinstance(shape, int) else mesh_of(shape)
    return sharded.sharded(model, mesh=mesh, **options)


def oracle_gradients(codec, shape, step, compressed_shards=False):
    """This rank's shards of all gradients, in order: means over shards, then over replicas."""
    replicas, shards = shape
    copies = sharded.plain_copies(step)
    rank = dist.get_rank() % shards
    found = []
    for layers in sharded.GROUPS.values():
        flats = [sharded.flat_gradients([c[i] for i in layers], shards) for c in copies]
        means = []
        for replica in range(replicas):
            of_shards = flats[replica * shards : (replica + 1) * shards]
            if compressed_shards:
                means.append(reduce_scatter(codec, of_shards, shards)[0][rank])
            else:
                means.append((torch.stack(of_shards).sum(0) / shards).chunk(shards)[rank])
        mean = compressed_all_reduce(codec, means, average=True)
        modules = [copies[dist.get_rank()][i] for i in layers]
        found += sharded.cut_back(mean, modules, rank, shards)
    return found


@sharded.with_torch_group
def gradients(shape, codec, options):
    model = hybrid(shape)
    bagua.fsdp.compress(model, codec, **options)
    sharded.backward(model, 0)
    found = list(sharded.local_gradients(model).values())
    compressed_shards = options.get("reduce_scatter", False)
    exact = hybrid(shape)
    sharded.backward(exact, 0)
    expected = oracle_gradients(codec, shape, 0, compressed_shards)
    types = {type(p.grad.to_local()) for p in model.parameters()}
    return found, expected, list(sharded.local_gradients(exact).values()), types


@over(shape=[(2, 2), (3, 1), (1, 2), (2, 1)], codec=["block_uint8", "bf16"])
def test_gradients_have_the_bits_of_the_oracle(ranks, shape, codec):
    results = ranks(size(shape), gradients, shape, codec, {})
    for found, expected, exact, types in results:
        assert types == {torch.Tensor}
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, found, exact)) == (shape[0] == 1)


def test_the_reduce_scatter_is_compressed_on_request(ranks):
    options = {"reduce_scatter": True}
    for found, expected, _, _ in ranks(4, gradients, (2, 2), "block_uint8", options):
        assert all(map(torch.equal, found, expected))


def whole_numbers(model):
    """Parameters whose gradients have a few bits, which fp16 holds exactly."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.sign())
    return model


def whole_loss(model, step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randint(-2, 3, (4, 5), generator=generator).float()
    return model(inputs).sum()


def linear(width=7):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(5, width), torch.nn.Identity(), torch.nn.Linear(width, width)]
    return whole_numbers(
        torch.nn.Sequential(*layers, torch.nn.Identity(), torch.nn.Linear(width, 2))
    )


DIVISIONS = {
    "mean": lambda model: None,
    "divided_by_8": lambda model: model.set_gradient_divide_factor(8.0),
    "force_sum": lambda model: model.set_force_sum_reduction_for_comms(True),
}


@sharded.with_torch_group
def as_torch(shape, division, options, accumulate):
    """Gradients by an exact codec, with replicas by residuals as well, and by torch itself."""
    results = []
    for compressed in ({}, {"error_feedback": True}, None):
        if compressed and (isinstance(shape, int) or shape[0] == 3):
            continue  # a mean of three, which residuals are of, has many bits
        model = hybrid(shape, linear(), **options)
        if compressed is not None:
            bagua.fsdp.compress(model, "fp16", **compressed)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                DIVISIONS[division](module)
        for step in range(3):
            if accumulate == "all_reduce_once":
                model.set_requires_all_reduce(step == 2)
            if accumulate == "sync_once":
                model.set_requires_gradient_sync(step == 2)
            whole_loss(model, step).backward()
        results.append(list(sharded.local_gradients(model).values()))
    return results


def assert_as_torch(results):
    for *all_found, expected in results:
        assert any(gradient.any() for gradient in expected)
        for found in all_found:
            assert all(map(torch.equal, found, expected))


BF16, F16 = (
    {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    for dtype in (torch.bfloat16, torch.float16)
)
F64 = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}
OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


@pytest.mark.parametrize(
    ("shape", "division", "options", "accumulate"),
    [
        (2, "mean", {}, "always"),
        (2, "mean", BF16, "always"),
        (2, "mean", F16, "always"),
        (2, "mean", {}, "sync_once"),
        (2, "mean", OFFLOAD, "always"),
        ((2, 2), "mean", {}, "always"),
        ((2, 2), "mean", {}, "all_reduce_once"),
        ((2, 2), "mean", {}, "sync_once"),
        # gloo has no PREMUL_SUM, which torch's reduce-scatter takes for a factor.
        ((2, 2), "force_sum", {}, "always"),
        ((3, 1), "divided_by_8", {}, "always"),
        ((2, 1), "mean", BF16, "always"),
        ((2, 1), "mean", F16, "always"),
        ((2, 1), "mean", F64, "always"),
        ((2, 1), "mean", OFFLOAD, "always"),
    ],
)
def test_an_exact_codec_gives_the_bits_of_torch(ranks, shape, division, options, accumulate):
    n = shape if isinstance(shape, int) else size(shape)
    assert_as_torch(ranks(n, as_torch, shape, division, options, accumulate))


def oracle_with_residuals(shape, step, kept, scale):
    """This rank's shards of all gradients; `kept`, by module, gets residuals of replicas."""
    replicas, shards = shape
    copies = sharded.plain_copies(step, scale)
    rank = dist.get_rank() % shards
    found = []
    for name, layers in sharded.GROUPS.items():
        flats = [sharded.flat_gradients([c[i] for i in layers], shards) for c in copies]
        means = [
            (torch.stack(flats[first : first + shards]).sum(0) / shards).chunk(shards)[rank]
            for first in range(0, replicas * shards, shards)
        ]
        numel = means[0].numel()
        zeros = [torch.zeros(size) for _, size in parts(numel, replicas)]
        before = kept.get(name, ([torch.zeros(numel)] * replicas, zeros))
        mean, *kept[name] = with_residuals("int4_block", means, *before, scale)
        modules = [copies[dist.get_rank()][i] for i in layers]
        found += sharded.cut_back(mean, modules, rank, shards)
    return found


@sharded.with_torch_group
def residuals_of_replicas(shape, scale):
    model = hybrid(shape)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    handle = bagua.fsdp.compress(model, "int4_block", error_feedback=True, grad_scaler=scaler)
    rank = dist.get_rank()
    replica, shard = divmod(rank, shape[1])
    kept = {}
    for step in range(3):
        model.zero_grad()
        sharded.backward(model, step, scale)
        expected = oracle_with_residuals(shape, step, kept, scale)
        assert all(map(torch.equal, sharded.local_gradients(model).values(), expected)), step
        state = handle.state_dict()
        for module, (errors, servers) in kept.items():
            name = f"{module}.replicas/shard{shard}"
            first = parts(errors[0].numel(), shape[0])[replica][0]
            assert torch.equal(state[f"rank{rank}/error/{name}"], errors[replica]), (step, name)
            if servers[replica].numel():
                server = state[f"rank{rank}/server/{first}/{name}"]
                assert torch.equal(server, servers[replica]), (step, name)
        assert errors[replica].any()
    return True


def test_residuals_between_copies_are_those_of_the_oracle(ranks):
    for shape, scale in (((2, 2), 1024.0), ((3, 1), 1.0)):
        assert all(ranks(size(shape), residuals_of_replicas, shape, scale))


@sharded.with_torch_group
def overflowing_in_a_shard():
    """Whether gradients are finite, and residuals, after each step; the second overflows."""
    model = fully_shard(torch.nn.Linear(5, 2), mesh=mesh_of((2, 2)))
    handle = bagua.fsdp.compress(model, "int4_block", error_feedback=True)
    found = []
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).abs()
        factors = torch.tensor([factor if faults.is_last() else 1.0, dist.get_rank() + 1.0])
        (model(inputs) * factors).sum().backward()
        finite = all(g.isfinite().all() for g in sharded.local_gradients(model).values())
        found.append((bool(finite), handle.state_dict()))
        model.zero_grad()
    return found


def test_an_overflow_in_one_shard_leaves_the_residuals_of_all(ranks):
    results = ranks(4, overflowing_in_a_shard)
    assert [found[1][0] for found in results] == [False, True] * 2
    for (_, before), (_, overflowed), (finite, after) in results:
        assert finite
        assert before.keys() == overflowed.keys()
        del before["ranks"]
        for name, value in before.items():
            assert torch.equal(value, overflowed[name]), name
        assert any(not torch.equal(value, after[name]) for name, value in before.items())


@sharded.with_torch_group
def both_reductions():
    """Weights, and the modules of the residuals, where shards are reduced in 4 bits, too."""
    model = hybrid((2, 2))
    options = {"reduce_scatter": True, "error_feedback": True}
    handle = bagua.fsdp.compress(model, "int4_block", **options)
    sharded.train(model, sharded.adam(model), 3)
    state = handle.state_dict()
    handle.load_state_dict(state)
    kinds = {key.split("/")[1] for key in state if "/" in key}
    numel = sum(v.numel() for k, v in state.items() if "/error/" in k and "replicas" not in k)
    return sharded.full_weights(model), kinds, numel


def test_each_reduction_has_a_residual_where_both_are_compressed(ranks):
    results = ranks(4, both_reductions)
    for weights, kinds, numel in results:
        assert kinds == {"error", "server"}
        assert numel >= weights.numel()
        assert torch.equal(weights, results[0][0])


@sharded.with_torch_group
def with_a_hook():
    """Gradients of an exact codec and of torch, where a hook sums them over the shards again."""
    results = []
    for compressed in (True, False):
        mesh = mesh_of((2, 2))
        model = sharded.sharded(linear(), mesh=mesh)
        shards = mesh.get_group("shard")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda flat, g=shards: dist.all_reduce(flat, group=g))
        if compressed:
            bagua.fsdp.compress(model, "fp16")
        whole_loss(model, 0).backward()
        results.append(list(sharded.local_gradients(model).values()))
    return results


def test_all_reduces_of_a_hook_over_other_ranks_stay_torchs(ranks):
    assert_as_torch(ranks(4, with_a_hook))


@sharded.with_torch_group
def trained_in_few_bits():
    model = hybrid((2, 2))
    handle = bagua.fsdp.compress(model, weights=True)
    sharded.train(model, sharded.adam(model), 3)
    return sharded.full_weights(model), handle.stats()["rounds"]


def test_weights_go_through_the_codec_within_a_replica(ranks):
    results = ranks(4, trained_in_few_bits)
    assert all(torch.equal(weights, results[0][0]) for weights, _ in results)
    assert results[0][1] == 3


@sharded.with_torch_group
def replicated():
    """Gradients and bytes of a model after torch's replicate(), and those of torch."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    found = []
    for compressed in (True, False):
        model = linear(64)
        for layer in (model[0], model[2]):
            replicate(layer)
        replicate(model)
        handle = bagua.fsdp.compress(model, "fp16") if compressed else None
        whole_loss(model, 0).backward()
        found.append(list(sharded.local_gradients(model).values()))
        if handle:
            sent = handle.stats()["total"]["bytes_sent"]
    return (*found, sent, sum(p.numel() for p in model.parameters()))


def test_replicated_modules_are_reduced_through_the_codec(ranks):
    for found, expected, sent, numel in ranks(2, replicated):
        assert all(map(torch.equal, found, expected))
        assert 2 * numel <= sent < 2.2 * numel  # 4 for exact gradients


@sharded.with_torch_group
def two_models_and_a_group_of_shards():
    """Two hybrid models and one that is sharded over the ranks of one replica, side by side."""
    mesh = mesh_of((2, 2))
    models = [sharded.sharded(mesh=m) for m in (mesh["shard"], mesh, mesh)]
    handles = [bagua.fsdp.compress(model) for model in models]
    assert len(handles) == 3
    for step in range(2):
        for model in models:
            sharded.backward(model, step)
    return [list(sharded.local_gradients(model).values()) for model in models]


def test_models_over_the_same_groups_do_not_meet(ranks):
    for first, second, third in ranks(4, two_models_and_a_group_of_shards):
        assert all(map(torch.equal, second, third))
        assert not all(map(torch.equal, first, second))


@sharded.with_torch_group
def refusals():
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    compress = bagua.fsdp.compress
    errors = {}
    model = hybrid((2, 1))
    copy = replicate(sharded.plain())
    errors["weights"] = faults.error_of(functools.partial(compress, copy, weights=True))
    errors["shards"] = faults.error_of(functools.partial(compress, copy, reduce_scatter=True))
    flat = sharded.sharded()
    errors["nothing"] = faults.error_of(functools.partial(compress, flat, reduce_scatter=False))
    exact = functools.partial(compress, flat, weights=True, reduce_scatter=False)
    errors["residuals"] = faults.error_of(functools.partial(exact, error_feedback=True))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    parallel = parallelize_module(torch.nn.Linear(4, 4), mesh["tensor"], ColwiseParallel())
    fully_shard(parallel, mesh=mesh["shard"])
    errors["tensor"] = faults.error_of(compress, parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bagua.fsdp.all_reduce_can_be_replaced", lambda: False)
        errors["torch"] = faults.error_of(compress, model)
    return errors


def test_what_replicas_cannot_do_is_refused_with_the_reason(ranks):
    for errors in ranks(2, refusals):
        assert "ValueError: bagua.fsdp.compress: error_feedback=True, but" in errors["residuals"]
        assert "ValueError: bagua.fsdp.compress: weights=True, but no par" in errors["weights"]
        assert "ValueError: bagua.fsdp.compress: reduce_scatter=True" in errors["shards"]
        assert "ValueError" in errors["nothing"]
        assert "compresses nothing" in errors["nothing"]
        assert "tensor parallelism is not supported" in errors["tensor"]
        assert "does not honour __torch_function__" in errors["torch"]
