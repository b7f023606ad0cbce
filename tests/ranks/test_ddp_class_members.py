"""Accesses of libraries to torch's DistributedDataParallel, made to ours."""

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


@training.with_group
def static(how):
    arguments = {
        "static_graph": {"static_graph": True},
        "skip": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    }
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        results.append(decayed(lambda m, w=wrap: w(m, **arguments[how])))
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["static_graph", "skip"])
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
