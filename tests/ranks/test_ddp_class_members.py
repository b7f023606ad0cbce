"""Accesses of libraries to torch's DistributedDataParallel, made to ours."""

import warnings

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def normalised(seed=0):
    torch.manual_seed(seed + dist.get_rank())
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def backward_of(model, step=0):
    training.squared_error(model, training.batch(step, dist.get_rank())).backward()


@training.with_group
def unwrapped():
    ddp = DistributedDataParallel(normalised())
    assert isinstance(ddp, TorchDDP)
    return type(ddp.module if isinstance(ddp, TorchDDP) else ddp).__name__


def test_libraries_that_ask_for_torchs_class_unwrap_ours(ranks):
    assert ranks(2, unwrapped) == ["Sequential"] * 2


@training.with_group
def checkpointed():
    keys = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(normalised())
        optimizer = torch.optim.AdamW(ddp.parameters())
        backward_of(ddp)
        optimizer.step()
        model_state = dcp.get_model_state_dict(ddp)
        optimizer_state = dcp.get_optimizer_state_dict(ddp, optimizer)
        keys.append((list(model_state), list(optimizer_state["state"])))
        fresh = wrap(normalised(seed=7))
        other = torch.optim.AdamW(fresh.parameters())
        dcp.set_model_state_dict(fresh, model_state)
        dcp.set_optimizer_state_dict(fresh, other, optimizer_state)
        for p, q in zip(ddp.state_dict().values(), fresh.state_dict().values(), strict=True):
            assert torch.equal(p, q)
        moments = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]
        restored = [entry["exp_avg"] for entry in other.state_dict()["state"].values()]
        assert all(map(torch.equal, moments, restored))
    assert keys[0] == keys[1]
    return any(key.startswith("module.") for key in keys[0][0] + keys[0][1])


def test_checkpoint_keys_have_no_prefix(ranks):
    assert ranks(2, checkpointed) == [False] * 2


SHARED_KEYS = [
    "world_size",
    "rank",
    "module_name",
    "backend_name",
    "device_ids",
    "output_device",
    "is_multi_device_module",
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "has_sync_bn",
    "bucket_cap_bytes",
    "bucket_sizes",
    "dtypes",
    "num_parameter_tensors",
    "total_parameter_size_bytes",
    "master_addr",
    "has_rebuilt_buckets",
    "rebuilt_bucket_sizes",
    "num_buckets_reduced",
    "torch_distributed_debug",
]


@training.with_group
def logged():
    answers = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(normalised(), bucket_cap_mb=25)
        for step in range(3):
            backward_of(ddp, step)
        ddp._set_ddp_runtime_logging_sample_rate(2)
        with pytest.raises(ValueError, match="should be equal or greater than 1"):
            ddp._set_ddp_runtime_logging_sample_rate(0)
        data = ddp._get_ddp_logging_data()
        assert "comm_hook" not in data
        answers.append({key: data[key] for key in SHARED_KEYS})
        ddp._check_reducer_finalized()
    for key in SHARED_KEYS:
        assert answers[0][key] == answers[1][key], (key, answers[0][key], answers[1][key])
    ddp = DistributedDataParallel(normalised())
    with pytest.raises(TypeError, match="must be callable"):
        ddp.register_comm_hook({}, {})
    data = ddp._get_ddp_logging_data()
    assert data["has_error"] == 1
    assert "must be callable" in data["error"]


def test_logging_data_is_torchs_where_it_is_known(ranks):
    ranks(2, logged)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.unused = nn.Linear(5, 3)

    def forward(self, x):
        return self.used(x)


def decayed(make):
    torch.manual_seed(0)
    ddp = make(Branches())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        backward_of(ddp, step)
        assert ddp.module.unused.weight.grad is None
        optimizer.step()
    return list(ddp.parameters())


def late_static(wrap):
    def make(model):
        ddp = wrap(model)
        ddp._set_static_graph()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp._set_static_graph()
        assert "no need to set it again" in str(caught[0].message)
        return ddp

    return make


@training.with_group
def static(how):
    arguments = {
        "static_graph": {"static_graph": True},
        "skip": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    }
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        make = late_static(wrap) if how == "late" else lambda m, w=wrap: w(m, **arguments[how])
        results.append(decayed(make))
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    backward_of(ddp)
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        ddp._set_static_graph()


@pytest.mark.parametrize("how", ["static_graph", "late", "skip"])
def test_unused_parameters_of_a_static_graph_are_left_alone(ranks, how):
    ranks(2, static, how)


@training.with_group
def sharded():
    """Embeddings of which each rank has rows, and names, of its own."""
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        torch.manual_seed(0)
        rank = dist.get_rank()
        model = nn.ModuleDict({"dense": nn.Linear(3, 2)})
        model[f"shard{rank}"] = nn.Embedding(4 + rank, 3)
        names = [f"shard{rank}.weight"]
        wrap._set_params_and_buffers_to_ignore_for_model(model, names)
        model.forward = lambda i, m=model, r=rank: m["dense"](m[f"shard{r}"](i))
        ddp = wrap(model)
        ddp(torch.tensor([0, 1])).square().sum().backward()
        results.append([p.grad for p in ddp.parameters()])
        assert len(list(wrap._get_data_parallel_params(ddp))) == 2
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q)
    return tuple(results[0][2].shape)


def test_ignored_parameters_may_differ_between_ranks(ranks):
    assert ranks(2, sharded) == [(4, 3), (5, 3)]


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
    assert ddp.bucket_bytes_cap_list == [20971, 41943]
    assert ddp.bucket_bytes_cap == 41943
    return [len(bucket.tensors) for bucket in ddp.bagua_buckets]


def test_each_bucket_may_have_a_limit_of_its_own(ranks):
    assert ranks(2, listed) == [[3, 4, 1]] * 2


@training.with_group
def functional():
    """Weights passed in get gradients, the module's own do not."""
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(normalised(), broadcast_buffers=False)
        weights = {name: p.detach().clone() for name, p in ddp.named_parameters()}
        passed = {name: p.requires_grad_() for name, p in weights.items()}
        inputs, targets = training.batch(0, dist.get_rank())
        output = functional_call(ddp, passed, (inputs,))
        nn.functional.mse_loss(output, targets).backward()
        assert all(p.grad is None for p in ddp.parameters())
        # Functions of the parameters, as in MAML: gradients reach the module's own.
        again = wrap(normalised(), broadcast_buffers=False)
        fast = {name: 2 * p for name, p in again.named_parameters()}
        nn.functional.mse_loss(functional_call(again, fast, (inputs,)), targets).backward()
        results.append([p.grad for p in passed.values()] + [p.grad for p in again.parameters()])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_functional_call_on_the_wrapper(ranks):
    ranks(2, functional)


@training.with_group
def removed():
    ddp = DistributedDataParallel(normalised())
    backward_of(ddp)
    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    backward_of(ddp)
    local = len(set(training.gather(training.bits(p.grad for p in ddp.parameters()))))
    again = DistributedDataParallel(ddp.module)
    again.zero_grad()
    backward_of(again)
    return local, len(set(training.gather(training.bits(p.grad for p in again.parameters()))))


def test_a_wrapper_that_was_taken_off_leaves_the_module(ranks):
    assert ranks(2, removed) == [(2, 1)] * 2


@training.with_group
def fused():
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(normalised())
        ddp._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9)
        for step in range(4):
            ddp.zero_grad()
            backward_of(ddp, step)
        results.append(list(ddp.parameters()))
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_fused_optimizers_step_in_backward(ranks):
    ranks(2, fused)


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
