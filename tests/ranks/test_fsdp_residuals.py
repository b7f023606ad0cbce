"""Error feedback of bagua.fsdp.compress, and checkpoints with it."""

import itertools

import bagua.fsdp
import pytest
import torch
import torch.distributed as dist
from support import faults, sharded
from support.cases import over
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


@sharded.with_torch_group
def with_residuals(scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale != 1.0 else None
    model, handle = sharded.compressed("int4_block", error_feedback=True, grad_scaler=scaler)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    memories = handle._memories.items()
    errors = {name: [torch.zeros_like(memory.value(0))] * ranks for (name, _), memory in memories}
    for step in range(3):
        model.zero_grad()
        sharded.backward(model, step, scale)
        expected, errors = sharded.oracle_gradients("int4_block", step, ranks, errors, scale)
        assert all(map(torch.equal, sharded.local_gradients(model).values(), expected)), step
        state = handle.state_dict()
        for name in sharded.GROUPS:
            assert torch.equal(state[f"rank{rank}/error/{name}"], errors[name][rank]), (step, name)
        assert errors["2"][rank].abs().max() > 0
    return True


@over(n=[2, 3], scale=[1.0, 1024.0])
def test_residuals_are_those_of_the_oracle_in_unscaled_units(ranks, n, scale):
    assert all(ranks(n, with_residuals, scale))


@sharded.with_torch_group
def overflowing():
    """Residuals before, after and one step after a backward that overflows on the last rank."""
    model, handle = sharded.compressed("int4_block", error_feedback=True)
    sharded.backward(model, 0)
    before = handle.state_dict()
    sharded.backward(model, 1, float("inf") if faults.is_last() else 1.0)
    overflowed = handle.state_dict()
    model.zero_grad()
    sharded.backward(model, 2)
    return before, overflowed, handle.state_dict()


def test_an_overflow_of_one_rank_leaves_the_residuals_of_all_ranks(ranks):
    for before, overflowed, after in ranks(3, overflowing):
        for name, value in before.items():
            if name == "ranks":
                continue
            assert torch.equal(value, overflowed[name])
            assert after[name].isfinite().all()
            assert not torch.equal(value, after[name])


def mesh_of(replicas):
    """One of replicas and shards, or None for 0 replicas."""
    if replicas == 0:
        return None
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


class Branches(torch.nn.Module):
    """A step may use the first or the second branch only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(5, 9), torch.nn.Linear(5, 9)
        self.head = torch.nn.Linear(9, 3)

    def forward(self, inputs, branch):
        return self.head(getattr(self, branch)(inputs).tanh())


@sharded.with_torch_group
def unused_parameters(own_modules, older_torch, replicas=0):
    mesh = mesh_of(replicas)
    model = Branches()
    if own_modules:
        for branch in (model.first, model.second):
            fully_shard(branch, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        if older_torch:
            patch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
        handle = bagua.fsdp.compress(model, "int4_block", error_feedback=True)
    seen = []
    for branch in ("first", "second", "first", "first"):
        model(torch.ones(4, 5), branch).square().sum().backward()
        seen.append(handle.state_dict())
    return seen


PARTS_OF_MODULES = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="this torch leaves out parameters without a gradient, which is an error",
)


@pytest.mark.parametrize(
    ("own_modules", "older_torch", "replicas"),
    [
        pytest.param(False, False, 0, marks=PARTS_OF_MODULES),
        (True, False, 0),
        (True, True, 0),
        pytest.param(False, False, 2, marks=PARTS_OF_MODULES),
        (True, True, 2),
    ],
)
def test_residuals_survive_steps_that_leave_out_parameters(
    ranks, own_modules, older_torch, replicas
):
    for states in ranks(2, unused_parameters, own_modules, older_torch, replicas):
        for state in states:
            assert all(v.isfinite().all() for k, v in state.items() if k != "ranks")
        for before, after in itertools.pairwise(states):
            assert any(not torch.equal(v, before[k]) for k, v in after.items() if k != "ranks")


def test_a_torch_that_leaves_out_parameters_is_an_error(ranks):
    errors = ranks(2, error_of_unused_parameters)
    for error in errors:
        assert error.startswith("RuntimeError: bagua.fsdp: the gradients of 'FSDPBranches'"), error
        assert "set_reduce_scatter_unused_params(True), where torch has it" in error


def error_of_unused_parameters():
    return faults.error_of(unused_parameters, False, True)


@sharded.with_torch_group
def frozen_later():
    model, _ = sharded.compressed(error_feedback=True)
    sharded.backward(model, 0)
    model[2].bias.requires_grad_(False)
    model.zero_grad()
    return faults.error_of(sharded.backward, model, 1)


def test_parameters_frozen_later_are_refused_with_residuals(ranks):
    for error in ranks(2, frozen_later):
        assert error.startswith("RuntimeError: bagua.fsdp: the gradients of '2' have"), error
        assert "residual" in error


@sharded.with_torch_group
def in_turns():
    """Rounds, and reads of the scale, where no module of a step is one of the step before."""
    parts = torch.nn.ModuleDict({"left": torch.nn.Linear(5, 3), "right": torch.nn.Linear(5, 3)})
    for part in parts.values():
        fully_shard(part)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales, scale = [], scaler.get_scale
    scaler.get_scale = lambda: scales.append(scale()) or scales[-1]
    handle = bagua.fsdp.compress(parts, error_feedback=True, grad_scaler=scaler)
    for part in ("left", "right", "left", "left", "right"):
        parts[part](torch.ones(2, 5)).sum().backward()
    return handle.rounds.number, len(scales)


class Recomputed(torch.nn.Sequential):
    """Each layer's backward is a graph task inside the backward."""

    def forward(self, inputs):
        for layer in self:
            inputs = torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=True)
        return inputs


@sharded.with_torch_group
def recomputed():
    model = Recomputed(*(fully_shard(torch.nn.Linear(5, 5)) for _ in range(3)))
    handle = bagua.fsdp.compress(fully_shard(model))
    for _ in range(3):
        model(torch.ones(2, 5, requires_grad=True)).sum().backward()
    return handle.rounds.number


def test_a_round_is_the_backward_of_whatever_modules(ranks):
    assert ranks(2, in_turns) == [(5, 5), (5, 5)]
    assert ranks(2, recomputed) == [3, 3]


# Checkpoints.


@sharded.with_torch_group
def resumed(folder, replicas):
    """(weights after ten steps, weights of the training that was saved after five and loaded)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def start():
        model = sharded.sharded(mesh=mesh_of(replicas))
        handle = bagua.fsdp.compress(model, "int4_block", error_feedback=True)
        return model, handle, sharded.adam(model)

    model, handle, optimizer = start()
    sharded.train(model, optimizer, 5)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "fsdp": handle}, checkpoint_id=folder)
    sharded.train(model, optimizer, 5, first=5)

    other, others_handle, others_optimizer = start()
    sharded.train(other, others_optimizer, 1, first=77)  # its residuals are of something else
    weights, moments = get_state_dict(other, others_optimizer)
    state = {"model": weights, "optimizer": moments, "fsdp": others_handle}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, others_optimizer, model_state_dict=weights, optim_state_dict=moments)
    sharded.train(other, others_optimizer, 5, first=5)
    return sharded.full_weights(model), sharded.full_weights(other)


def test_training_resumes_to_the_bit_through_dcp(ranks, tmp_path):
    for n, replicas in ((2, 0), (4, 2)):
        results = ranks(n, resumed, str(tmp_path / str(n)), replicas)
        for uninterrupted, continued in results:
            assert torch.equal(uninterrupted, continued)
            assert torch.equal(uninterrupted, results[0][0])


@sharded.with_torch_group
def bad_states():
    model, handle = sharded.compressed(error_feedback=True)
    sharded.backward(model, 0)
    good = handle.state_dict()
    key = f"rank{dist.get_rank()}/error/2"
    bad = [
        5,
        {},
        good | {"ranks": "0 1 2"},
        {k: v for k, v in good.items() if k != key},
        good | {key: good[key][:-1]},
    ]
    errors = [faults.error_of(handle.load_state_dict, state) for state in bad]
    assert all(torch.equal(handle.state_dict()[k], v) for k, v in good.items() if k != "ranks")
    _, without = sharded.compressed()
    without.load_state_dict(without.state_dict())
    return [*errors, faults.error_of(without.load_state_dict, good)]


def test_states_that_do_not_fit_are_refused(ranks):
    for errors in ranks(2, bad_states):
        assert all(error.startswith("ValueError") for error in errors)
        words = [
            "a state is a dict",
            "called with error_feedback=True",
            "number of ranks that saved",
            "has no 'rank",
        ]
        words += ["in the state", "without error_feedback"]
        for error, word in zip(errors, words, strict=True):
            assert word in error, errors
