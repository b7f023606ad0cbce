"""Accesses of libraries to torch's DistributedDataParallel, made to ours."""

import torch
import torch.distributed as dist
from bagua.torch_api.data_parallel import DistributedDataParallel
from ranks.test_ddp_class import backward_of, normalised
from support import training
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


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


@training.with_group
def listed():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    ddp = DistributedDataParallel(model, bucket_cap_mb_list=[0.02, 0.04])
    return [len(bucket.tensors) for bucket in ddp.bagua_buckets]


def test_each_bucket_may_have_a_limit_of_its_own(ranks):
    assert ranks(2, listed) == [[3, 4, 1]] * 2


@training.with_group
def nested():
    """The wrapper of a wrapper, of which both are trained in turn."""
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        inner = wrap(normalised(), static_graph=True)
        outer = wrap(inner, static_graph=True)
        optimizer = training.sgd(outer)
        for step in range(4):
            for ddp in (outer, inner):
                optimizer.zero_grad()
                backward_of(ddp, step)
                optimizer.step()
        results.append(list(outer.state_dict().items()))
    for (name, p), (their_name, q) in zip(*results, strict=True):
        assert name == their_name
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_wrapper_may_be_wrapped(ranks):
    ranks(2, nested)


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
