"""DistributedDataParallel's own members, groups and buckets. Beside torch's: situations/."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm, DecentralizedAlgorithm
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import sharded, training
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def normalised(seed=0, hidden=7):
    """A model with buffers; each rank starts from weights of its own."""
    torch.manual_seed(seed + dist.get_rank())
    return nn.Sequential(
        nn.Linear(5, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 3)
    )


def backward_of(model, step=0):
    training.squared_error(model, training.batch(step, dist.get_rank())).backward()


@sharded.with_torch_group
def small_buckets():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    listed = DistributedDataParallel(model, bucket_cap_mb_list=[0.02, 0.04])
    with pytest.raises(ValueError, match="bucket_cap_mb=0 must be a positive number of MiB"):
        DistributedDataParallel(model, bucket_cap_mb=0)
    sizes = [bucket.bytes() for bucket in ddp.bagua_buckets]
    return sizes, [len(bucket.tensors) for bucket in listed.bagua_buckets]


def test_bucket_cap_mb_is_in_mebibytes_and_each_bucket_may_have_one(ranks):
    (sizes, listed), _ = ranks(2, small_buckets)
    assert len(sizes) > 2
    assert all(size <= 0.02 * 1024**2 for size in sizes)
    assert sum(sizes) == 4 * (64 * 64 + 64) * 4
    assert listed == [3, 4, 1]


@sharded.with_torch_group
def groups():
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = halves[0] if dist.get_rank() < 2 else halves[1]
    ddp = DistributedDataParallel(normalised(), process_group=mine)
    assert ddp.process_group is mine
    assert ddp.bagua_ddp.process_group.ranks == ([0, 1] if dist.get_rank() < 2 else [2])
    bits = training.gather(training.bits(ddp.parameters()))
    ours = bagua.communication.new_group([0, 1, 2])
    whole = DistributedDataParallel(normalised(), process_group=ours)
    assert whole.process_group is dist.group.WORLD
    assert whole.bagua_ddp.process_group is ours
    alone = bagua.communication.new_group([dist.get_rank()])
    for group in [bagua.communication.new_group([r]) for r in range(3)]:
        if group.ranks == [dist.get_rank()]:
            alone = group
    single = DistributedDataParallel(normalised(), process_group=alone)
    assert isinstance(single.process_group, BaguaProcessGroup)
    with pytest.raises(NotImplementedError, match=r"needs a torch process group: pass the one of"):
        single.join()
    with pytest.raises(TypeError, match="process_group must be None, a torch"):
        DistributedDataParallel(normalised(), process_group="all")
    mesh = dist.init_device_mesh("cpu", (3,))
    meshed = DistributedDataParallel(normalised(), device_mesh=mesh)
    assert meshed.bagua_ddp.process_group.size == 3
    assert meshed.device_mesh is mesh
    assert whole.device_mesh is None
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
        DistributedDataParallel(normalised(), process_group=mine, device_mesh=mesh)
    return bits


def test_process_group_may_be_torchs_or_baguas_or_a_mesh(ranks):
    for bits in ranks(3, groups):
        assert bits[0] == bits[1] != bits[2]


@training.with_group
def keeps_the_algorithm():
    model = normalised(hidden=61)
    optimizer = training.sgd(model)
    ddp = DistributedDataParallel(
        model, optimizers=[optimizer], algorithm=ByteGradAlgorithm(hierarchical=False)
    )
    training.train_on_ranks(ddp, optimizer)
    assert ddp.bagua_optimizers == [optimizer]
    assert type(ddp.bagua_algorithm).__name__ == "ByteGradAlgorithmImpl"
    assert ddp.inner is ddp.bagua_ddp
    assert isinstance(ddp, bagua.BaguaModule)
    assert ddp.bagua_train_step_counter == 3
    assert next(name for name, _ in ddp.bagua_build_params()) == "0.weight"
    return ddp.bagua_buckets[0].ops[0].arguments["codec"]


def test_the_algorithm_is_never_dropped(ranks):
    assert ranks(2, keeps_the_algorithm) == ["block_uint8"] * 2


@training.with_group
def attributes():
    model = normalised()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["3.bias", "1.running_mean"])
    ddp = DistributedDataParallel(model, static_graph=True, find_unused_parameters=True)
    assert ddp.static_graph
    assert ddp.find_unused_parameters
    assert ddp.will_sync_module_buffers()
    assert ddp.parameters_to_ignore == {"1.running_mean", "3.bias"}
    decentral = DistributedDataParallel(
        normalised(), algorithm=DecentralizedAlgorithm(hierarchical=False)
    )
    assert not decentral.broadcast_buffers, "as the algorithm has it"


def test_attributes_say_what_was_asked_for(ranks):
    ranks(2, attributes)


@training.with_group
def delayed():
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        model = normalised()
        late = [("3.weight", model[3].weight), ("3.bias", model[3].bias)]
        ddp = wrap(
            model,
            delay_all_reduce_named_params=late,
            param_to_hook_all_reduce=model[0].weight,
        )
        backward_of(ddp)
        dist.barrier()
        results.append([p.grad.clone() for p in ddp.parameters()])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_delayed_parameters_get_the_same_gradients(ranks):
    ranks(2, delayed)


PRIVATE = {
    "reducer": "require_backward_grad_sync = True",
    "logger": "bagua_stats()",
    "_get_ddp_logging_data": "bagua_stats()",
    "_set_static_graph": "static_graph=True of the constructor",
    "_register_builtin_comm_hook": "register_comm_hook()",
    "_register_buffer_comm_hook": "broadcast_buffers",
    "_sync_buffers": "broadcast_buffers",
    "_distributed_rank": "its public members",
    "temperature": "attributes of the wrapped module are those of .module",
}


@training.with_group
def private():
    ddp = DistributedDataParallel(normalised())
    return {name: training.error_of(lambda n=name: getattr(ddp, n)) for name in PRIVATE}


def test_private_members_of_torchs_class_are_not_there_and_the_alternative_is_named(ranks):
    (errors,) = ranks(1, private)
    for name, alternative in PRIVATE.items():
        assert f"AttributeError: this DistributedDataParallel has no '{name}'" in errors[name]
        assert alternative in errors[name]
