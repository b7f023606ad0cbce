"""Communication hooks for torch's DistributedDataParallel, beside the class without a hook."""

import copy
import io
import warnings

import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm, SparseAlgorithm
from ranks.test_groups_and_nodes import environment_of_nodes
from support import hooked, training
from support.cases import over
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@training.with_group
def beside_plain(situation):
    ddp, handle, optimizer = hooked.made(situation, "gradient_allreduce")
    plain, _, plain_optimizer = hooked.made(situation)
    mine, theirs = (
        hooked.train(situation, ddp, optimizer),
        hooked.train(situation, plain, plain_optimizer),
    )
    assert mine == theirs
    return handle.stats()


@over(n=[2, 3], situation=hooked.SITUATIONS)
def test_the_exact_hook_gives_the_bits_of_the_class_without_a_hook(ranks, n, situation):
    for stats in ranks(n, beside_plain, situation):
        assert stats["rounds"] == hooked.STEPS
        assert stats["total"]["bytes_sent"] > 0


@training.with_group
def uneven(algorithm):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(hooked.network(), **hooked.SMALL)
    comm_hooks.register(ddp, algorithm)
    optimizer = training.sgd(ddp)
    with ddp.join():
        for step in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            hooked.plain_step(ddp, step)
            optimizer.step()
    return training.bits(ddp.parameters())


@over(name=["gradient_allreduce", *hooked.ALGORITHMS])
def test_join_works(ranks, name):
    algorithm = hooked.ALGORITHMS[name]() if name in hooked.ALGORITHMS else name
    first, second = ranks(2, uneven, algorithm)
    assert first == second


@training.with_group
def statistics():
    ddp, handle, optimizer = hooked.made("small_buckets", ByteGradAlgorithm(hierarchical=False))
    hooked.train("small_buckets", ddp, optimizer)
    logged = ddp._get_ddp_logging_data().get("comm_hook")
    return handle.stats(), logged


def test_statistics_are_those_of_a_wrapped_module_without_the_overlap(ranks):
    for stats, logged in ranks(2, statistics):
        assert stats["rounds"] == hooked.STEPS
        assert set(stats) == {"buckets", "total", "communicators", "control", "rounds", "busy_ns"}
        assert len(stats["buckets"]) > 1
        for bucket in stats["buckets"]:
            assert 0 < bucket["wire_ns"] < bucket["busy_ns"]
            assert bucket["nonfinite_rounds"] == 0
            assert "block_uint8" in str(bucket["ops"])
        assert stats["communicators"]["all"]["bytes_sent"] == stats["total"]["bytes_sent"]
        assert stats["total"]["bytes_sent"] < stats["total"]["bytes"] * hooked.STEPS / 2
        assert logged == "bagua.ByteGradAlgorithm"


def without_bagua_group():
    """torch.distributed alone is initialised."""
    ddp, _, optimizer = hooked.made("default", ByteGradAlgorithm(hierarchical=False))
    return hooked.train("default", ddp, optimizer)


def test_bagua_need_not_be_initialised(ranks):
    first, second = ranks(2, without_bagua_group)
    assert first == second


@training.with_group
def in_a_subgroup():
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[dist.get_rank() % 2]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(hooked.network(), process_group=mine)
    handle = comm_hooks.register(ddp, ByteGradAlgorithm(hierarchical=False))
    optimizer = training.sgd(ddp)
    hooked.train("default", ddp, optimizer)
    return training.bits(ddp.parameters()), handle.stats()["total"]["bytes_sent"]


def test_the_hook_uses_the_process_group_of_the_class(ranks):
    first, alone, third = ranks(3, in_a_subgroup)
    assert first[0] == third[0] != alone[0]
    assert first[1] > 0
    assert alone[1] == 0


@training.with_group
def by_name():
    """Bagua's default, which compresses between nodes."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(hooked.network())
    handles = []
    said = training.warnings_of(lambda: handles.append(comm_hooks.register(ddp, "bytegrad")))
    optimizer = training.sgd(ddp)
    hooked.train("default", ddp, optimizer)
    return training.bits(ddp.parameters()), said, str(handles[0].stats()["buckets"])


@over(sizes=[(3,), (2, 1)])
def test_hierarchical_hooks_compress_between_nodes(ranks, sizes):
    results = ranks(sum(sizes), by_name, env=environment_of_nodes(sizes))
    assert len({bits for bits, _, _ in results}) == 1
    for _, said, _ in results:
        assert said == []
        assert ("Hierarchical" in results[0][2]) == (len(sizes) == 2)
    assert "block_uint8" in results[0][2]


@training.with_group
def compiled():
    ddp, handle, optimizer = hooked.made("default", ByteGradAlgorithm(hierarchical=False))
    model = torch.compile(ddp, backend="eager")
    for step in range(hooked.STEPS):
        optimizer.zero_grad()
        hooked.plain_step(model, step)
        optimizer.step()
    return training.bits(ddp.parameters()), handle.stats()["rounds"]


def test_compiled_models_communicate_through_the_hook(ranks):
    first, second = ranks(2, compiled)
    assert first == second
    assert first[1] == hooked.STEPS


@training.with_group
def copied():
    ddp, _, optimizer = hooked.made("default", ByteGradAlgorithm(hierarchical=False))
    hooked.train("default", ddp, optimizer)
    copied_to = []
    said = training.warnings_of(lambda: copied_to.append(copy.deepcopy(ddp)))
    twin = copied_to[0]
    again = comm_hooks.register(twin, "gradient_allreduce")
    hooked.train("default", twin, training.sgd(twin), 2)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(ddp, file)
    return said, again.stats()["rounds"], b"bagua.comm_hooks" in file.getvalue()


def test_a_copy_says_that_it_has_no_hook_and_takes_another(ranks):
    for said, rounds, in_file in ranks(2, copied):
        assert len(said) == 1
        assert "has no communication hook" in said[0]
        assert rounds == 2
        assert not in_file


@training.with_group
def half_precision(scaled):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(hooked.network().half())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    algorithm = SparseAlgorithm(0.1)
    handle = comm_hooks.register(ddp, algorithm, grad_scaler=scaler if scaled else None)
    sent, mean = {}, {}
    for step in range(4):
        inputs, targets = training.batch(step, dist.get_rank())
        local = training.local_gradients(
            ddp.module,
            lambda m, d: nn.functional.mse_loss(m(d[0]), d[1]),
            (inputs.half(), targets.half()),
        )
        ddp.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(nn.functional.mse_loss(ddp(inputs.half()), targets.half())).backward()
        for name, parameter in ddp.module.named_parameters():
            sent[name] = sent.get(name, 0) + parameter.grad.float() / scale
            mean[name] = mean.get(name, 0) + training.mean_over_ranks(local[name].float())
        scaler._scale = scaler._scale * 2
    state = handle.state_dict()
    rank = dist.get_rank()
    return max(
        float(
            (sent[name] + training.mean_over_ranks(state[f"rank{rank}/error/{name}"]) - mean[name])
            .abs()
            .max()
        )
        for name in sent
    )


def test_residuals_are_in_unscaled_units(ranks):
    assert max(ranks(2, half_precision, True)) < 2e-3
    assert min(ranks(2, half_precision, False)) > 1
