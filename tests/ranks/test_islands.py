"""Islands of ranks, sharded or parallel inside, that train locally and meet in outer rounds."""

import copy
import functools
import logging
import warnings

import bagua.torch_api as bagua_api
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bagua.torch_api.algorithms import (
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    OuterSGD,
)
from bagua.torch_api.checkpoint import PerRank, save_checkpoint
from support import sharded, training
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

INTERVAL = 3
RULE = OuterSGD(0.7, 0.6)


def network():
    """Sizes that two do not divide; one rank has nothing of the last bias."""
    layers = [nn.Linear(5, 42), nn.Tanh(), nn.Linear(42, 23), nn.Tanh(), nn.Linear(23, 3)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(3, 1))


def by_fsdp(model, mesh):
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_tensor_parallelism(model, mesh):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def by_hsdp(model, mesh):
    names = ("island", "replicate", "shard")
    return by_fsdp(model, init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=names)[names[1:]])


def by_both(model, mesh):
    """FSDP2 of tensor-parallel layers: the shards of two dimensions of a mesh of three."""
    names = ("island", "shard", "tensor")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    return by_fsdp(by_tensor_parallelism(model, mesh["tensor"]), mesh["shard"])


INSIDE = {
    "fsdp": by_fsdp,
    "hsdp": by_hsdp,
    "tensor-parallel": by_tensor_parallelism,
    "fsdp of tensor-parallel": by_both,
}
EXACTLY = {
    "diloco, growing momentum": lambda: DiLoCoAlgorithm(interval=INTERVAL),
    "decentralized, one peer": lambda: DecentralizedAlgorithm(
        peer_selection_mode="shift_one", communication_interval=2
    ),
}
IN_FEW_BITS = {
    "diloco, 4 bits": lambda: DiLoCoAlgorithm(RULE, INTERVAL, codec="int4_block"),
    "low precision": LowPrecisionDecentralizedAlgorithm,
}


def loss_of(model, step, source):
    generator = torch.Generator().manual_seed(100 * step + source)
    inputs = torch.randn(8, 5, generator=generator)
    return (model(inputs) - inputs[:, :1].sin()).square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def shard_of(p):
    return p.detach().to_local() if isinstance(p, DTensor) else p.detach()


def full(p):
    return p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()


def agree_on(tensors, mesh):
    """Whether the ranks that hold the same shards have equal bits."""
    own = torch.tensor([int(training.bits(map(shard_of, tensors))[:15], 16)])
    group, everyone = mesh["island"].get_group(), [torch.zeros_like(own) for _ in range(2)]
    dist.all_gather(everyone, own, group=group)
    return bool(everyone[0] == everyone[1])


def train(model, optimizer, steps, source, mesh=None):
    """Steps on `source`'s data; with a mesh its gradients are averaged over an island first."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, source).backward()
        for p in model.parameters() if mesh is not None else ():
            dist.all_reduce(p.grad, group=mesh["shard"].get_group())
            p.grad /= mesh["shard"].size()
        optimizer.step()


@sharded.with_torch_group
def against_plain_islands(inside, name):
    """Distances of weights and of the last loss from those of islands of plain copies, and bytes
    of both; replicas of a shard are equal after each round of an outer loop."""
    bagua_api.init_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    rank, island = dist.get_rank(), dist.get_rank() // 2
    torch.manual_seed(island)  # the weights of the first island are given to the other
    make = (EXACTLY | IN_FEW_BITS)[name]
    model = network()
    twin = copy.deepcopy(model)
    model = INSIDE[inside](model, mesh["shard"])
    optimizer, of_twin = sgd(model), sgd(twin)
    model.with_bagua([optimizer], make(), mesh["island"])
    twin.with_bagua([of_twin], make(), mesh["island"].get_group())
    # All ranks of a tensor-parallel island see the same inputs.
    data = island if "tensor-parallel" in inside else rank
    for begin in range(0, 3 * INTERVAL, INTERVAL):
        steps = range(begin, begin + INTERVAL)
        train(model, optimizer, steps, data)
        train(twin, of_twin, steps, data, mesh)
        if isinstance(make(), DiLoCoAlgorithm):
            assert agree_on(model.parameters(), mesh)
            assert model.bagua_algorithm.outer_rounds == begin // INTERVAL + 1
        losses = [loss_of(m.eval(), 0, data).item() for m in (model, twin)]
        for m in (model, twin):
            m.train()  # FSDP2 shows whole parameters after that forward
    distance = max(
        (full(p) - q.detach()).abs().max().item()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    sent = [m.bagua_stats()["total"]["bytes_sent"] for m in (model, twin)]
    return distance, abs(losses[0] - losses[1]), sent


@pytest.mark.parametrize("inside", INSIDE)
def test_islands_train_as_plain_ones_and_send_their_shards(ranks, inside):
    every = (*EXACTLY, *IN_FEW_BITS)
    for name in every if inside == "fsdp" else ("diloco, growing momentum", "low precision"):
        for distance, loss, (sent, of_plain) in ranks(4, against_plain_islands, inside, name):
            assert distance < (1e-5 if name in EXACTLY else 0.1), name
            assert loss < 1e-5 or name in IN_FEW_BITS, name
            if inside == "fsdp":  # messages to say who is there are not halved
                most = 0.55 if name.startswith("diloco") and name in EXACTLY else 0.65
                assert sent < most * of_plain, (name, sent, of_plain)


@sharded.with_torch_group
def with_torchs_ddp_inside():
    """Whether all ranks agree after a round, and those of an island before it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "inner"))
    model = TorchDDP(network(), process_group=mesh["inner"].get_group())
    optimizer = sgd(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(RULE, INTERVAL), mesh["island"])
    versions = []
    for step in range(2 * INTERVAL):
        train(model, optimizer, [step], dist.get_rank())
        versions.append(len(set(training.gather(training.bits(model.parameters())))))
    other = TorchDDP(network())
    return versions, training.error_of(
        lambda: other.with_bagua([sgd(other)], DiLoCoAlgorithm(), mesh["island"])
    )


def test_torchs_ddp_averages_inside_of_islands(ranks):
    for versions, twice in ranks(4, with_torchs_ddp_inside):
        assert versions == [2, 2, 1] * 2
        assert "is averaged by torch's DistributedDataParallel" in twice


@sharded.with_torch_group
def averaging_in_the_background():
    """Shards that differ between islands after the wrap become their mean, also for FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    torch.manual_seed(0)
    model = by_fsdp(network(), mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=0), mesh["island"])
    expected = network().requires_grad_(False)
    with torch.no_grad():
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            q.copy_(full(p) + 0.5)
            shard_of(p).add_(dist.get_rank() // 2)  # outside of the gate
    for step in range(200):
        train(model, optimizer, [step], dist.get_rank())
        loss = loss_of(model.eval(), 0, 0).item()
        model.train()
        if all(training.gather(abs(loss - loss_of(expected, 0, 0).item()) < 1e-5)):
            break
    model.bagua_algorithm.abort(model)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max((full(p) - q).abs().max().item() for p, q in pairs)


def test_shards_are_averaged_in_the_background(ranks):
    assert max(ranks(4, averaging_in_the_background)) < 1e-5


@sharded.with_torch_group
def refusals():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    island = mesh["island"]

    def by_columns(p):
        return Shard(1) if p.shape == (23, 42) and dist.get_rank() > 1 else None

    def error_of(algorithm, group, **options):
        model = fully_shard(network(), mesh=mesh["shard"], **options)
        return training.error_of(lambda: model.with_bagua([sgd(model)], algorithm, group))

    def adapted(algorithm):
        model = fully_shard(network(), mesh=mesh["shard"]).append(nn.Linear(1, 1))
        return training.error_of(lambda: model.with_bagua([sgd(model)], algorithm, island))

    own = network()
    own = fully_shard(own, mesh=mesh["shard"], ignored_params={*own[6].parameters()})
    own.with_bagua([sgd(own)], DiLoCoAlgorithm(), island)
    model = fully_shard(network(), mesh=mesh["shard"])
    model.with_bagua([sgd(model)], DecentralizedAlgorithm(), island)
    return {
        "adapter": adapted(DiLoCoAlgorithm()),
        "adapter of averages": adapted(LowPrecisionDecentralizedAlgorithm()),
        "mean": training.error_of(lambda: bagua_api.average_weights(model)),
        "gradients": error_of(ByteGradAlgorithm(), island),
        "everyone": error_of(DiLoCoAlgorithm(), None),
        "warm-up": error_of(DiLoCoAlgorithm(warmup_steps=1), island),
        "elastic": error_of(DiLoCoAlgorithm(elastic=True), island),
        "warm-up of averages": error_of(AsyncModelAverageAlgorithm(warmup_steps=1), island),
        "copies": training.error_of(
            lambda: by_tensor_parallelism(network(), mesh["shard"]).with_bagua(
                [], AsyncModelAverageAlgorithm(), island
            )
        ),
        "placements": error_of(DiLoCoAlgorithm(), island, shard_placement_fn=by_columns),
    }


def test_what_islands_cannot_do_is_refused_with_the_remedy(ranks):
    for found in ranks(4, refusals):
        for adapted in ("adapter", "adapter of averages"):
            assert "parameters '7.weight', '7.bias' are trainable and not sharded" in found[adapted]
        assert "DTensors, such as '0.weight'" in found["mean"]
        assert "'0.weight' is a DTensor" in found["gradients"]
        assert "bagua.fsdp.compress(model)" in found["gradients"]
        assert "parameter '0.weight' is a DTensor between ranks [" in found["everyone"]
        assert 'process_group=mesh["island"]' in found["everyone"]
        assert "leave warmup_steps= out" in found["warm-up"]
        assert "leave elastic= out, or give it with process_group=conn" in found["elastic"]
        assert "leave warmup_steps= out" in found["warm-up of averages"]
        assert "hold all of parameter '2.bias'" in found["copies"]
        assert found["placements"].startswith("BaguaMismatchError")
        assert "rank 0 has [parameter 2.weight: (23, 42)" in found["placements"]
        assert "rank 1 has [parameter 2.weight: (23, 42)" in found["placements"]
        assert "Shard(dim=1) of a mesh (2,), shard (" in found["placements"]


@sharded.with_torch_group
def not_finite():
    """Rounds with a NaN in one shard of one island: counters, and weights that are finite."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    model = by_fsdp(network(), mesh["shard"])
    optimizer = sgd(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(RULE, 2), mesh["island"])
    train(model, optimizer, range(3), dist.get_rank())
    before = model.bagua_algorithm.state_dict()
    if dist.get_rank() == 3:
        shard_of(next(model.parameters())).view(-1)[0] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.bagua_algorithm.sync()
    told = sum("rank(s) 1 hold NaN" in str(w.message) for w in caught)
    outer = model.bagua_stats()["outer"]
    kept = [
        torch.equal(shard_of(p), shard_of(before[f"anchor/{name}"]))
        for name, p in model.named_parameters()
    ]
    return (all(kept), outer["rounds"], outer["skipped_rounds"]), told


def test_an_island_with_a_shard_of_nan_starts_again_as_a_whole(ranks):
    results, told = zip(*ranks(4, not_finite), strict=True)
    assert results == ((True, 1, 1),) * 4
    assert sum(told) == 1, told


@sharded.with_torch_group
def streaming():
    """Fragments in flight, few bits, and an optimizer that has state before the wrap."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    model = by_fsdp(network(), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2), dist.get_rank())
    algorithm = DiLoCoAlgorithm(interval=4, fragments=2, overlap_steps=1, codec="bit2_block")
    model.with_bagua([optimizer], algorithm, mesh["island"])
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    assert all(isinstance(p, DTensor) for p in moments)
    agree = {"moments": agree_on(moments, mesh)}
    train(model, optimizer, range(8), dist.get_rank())
    model.bagua_algorithm.sync()
    agree["weights"] = agree_on(model.parameters(), mesh)
    train(model, optimizer, range(8, 9), dist.get_rank())
    losses = [loss_of(model.eval(), 0, 0).item()]
    with model.bagua_algorithm.anchor(), torch.no_grad():
        agree["anchor"] = agree_on(model.parameters(), mesh)
        losses.append(loss_of(model, 0, 0).item())
    with torch.no_grad():  # FSDP2 has left whole parameters, those of the anchor
        losses.append(loss_of(model, 0, 0).item())
    assert losses[0] == losses[2] != losses[1]
    return agree


def test_shards_stream_in_few_bits_and_optimizers_keep_their_state(ranks):
    for agree in ranks(4, streaming):
        assert agree == {"moments": True, "weights": True, "anchor": True}


def wrapped(mesh, seed=0):
    torch.manual_seed(seed)
    model = by_fsdp(network(), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    algorithm = DiLoCoAlgorithm(interval=4, overlap_steps=1, codec="int4_block")
    return model.with_bagua([optimizer], algorithm, mesh["island"]), optimizer


def full_outer_state(model):
    """Anchors and momenta of the whole model, and how many of them are DTensors."""
    state = model.bagua_algorithm.state_dict()
    found = {k: v for k, v in state.items() if k.startswith(("anchor/", "momentum/"))}
    sharded_ones = sum(isinstance(value, DTensor) for value in found.values())
    return {key: full(value) for key, value in found.items()}, sharded_ones


@sharded.with_torch_group
def save_islands(folder):
    """Outer state at the save, and bits of this rank at the end, after as many steps more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    model, optimizer = wrapped(mesh)
    train(model, optimizer, range(8), dist.get_rank())  # with a round in flight
    state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
    dcp.save(state, checkpoint_id=folder)
    outer, sharded_ones = full_outer_state(model)
    assert sharded_ones == len(outer) == 16
    error = training.error_of(lambda: save_checkpoint(folder, {"m": model.bagua_algorithm}, 1))
    assert "is a DTensor" in error, error
    train(model, optimizer, range(8, 17), dist.get_rank())
    return outer, training.bits(map(shard_of, model.parameters()))


@sharded.with_torch_group
def load_islands(folder, shape):
    """Outer state after the load, bits after nine steps more, and what is logged."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("island", "shard"))
    model, optimizer = wrapped(mesh, seed=3)
    state = {"algorithm": model.bagua_algorithm}
    if shape == (2, 2):
        state = {"training": PerRank(model), **state}
    planner = DefaultLoadPlanner(allow_partial_load=shape != (2, 2))
    load = functools.partial(dcp.load, state, checkpoint_id=folder, planner=planner)
    lines = [line for _, line in training.log_of(load, logging.WARNING)]
    outer, _ = full_outer_state(model)
    if shape != (2, 2):
        state = model.bagua_algorithm.state_dict()
        for name, p in model.named_parameters():
            assert torch.equal(shard_of(p), shard_of(state[f"anchor/{name}"]))
    train(model, optimizer, range(8, 17), dist.get_rank())
    assert shape == (2, 2) or model.bagua_algorithm.outer_rounds == 4
    return outer, training.bits(map(shard_of, model.parameters())), lines


def test_islands_go_on_to_the_bit_and_other_islands_from_the_anchor(ranks, tmp_path):
    saved = ranks(4, save_islands, str(tmp_path))
    for shape in ((2, 2), (3, 1), (3, 2)):
        found = ranks(shape[0] * shape[1], load_islands, str(tmp_path), shape)
        for rank, (outer, bits, lines) in enumerate(found):
            assert outer.keys() == saved[0][0].keys()
            assert all(torch.equal(outer[key], saved[0][0][key]) for key in outer)
            if shape == (2, 2):
                assert bits == saved[rank][1]
                assert not lines
            else:
                assert any("residuals of the codec begin at zero" in line for line in lines)
