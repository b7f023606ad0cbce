"""Islands of ranks, sharded or parallel inside, that train locally and meet in outer rounds."""

import copy
import logging

import bagua.torch_api as bagua_api
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    DiLoCoAlgorithm,
    OuterSGD,
    SparseLoCoAlgorithm,
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


INSIDE = {"fsdp": by_fsdp, "hsdp": by_hsdp, "tensor-parallel": by_tensor_parallelism}


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
def against_plain_islands(inside, codec):
    """The largest distance of weights from those of islands of plain copies; bytes of both."""
    bagua_api.init_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    rank, island = dist.get_rank(), dist.get_rank() // 2
    torch.manual_seed(island)  # the weights of the first island are given to the other
    model = network()
    twin = copy.deepcopy(model)
    model = INSIDE[inside](model, mesh["shard"])
    optimizer, of_twin = sgd(model), sgd(twin)
    arguments = {"interval": INTERVAL, "codec": codec}
    model.with_bagua([optimizer], DiLoCoAlgorithm(RULE, **arguments), mesh["island"])
    twin.with_bagua([of_twin], DiLoCoAlgorithm(RULE, **arguments), mesh["island"].get_group())
    # All ranks of a tensor-parallel island see the same inputs.
    data = island if inside == "tensor-parallel" else rank
    for begin in range(0, 4 * INTERVAL, INTERVAL):
        steps = range(begin, begin + INTERVAL)
        train(model, optimizer, steps, data)
        train(twin, of_twin, steps, data, mesh)
        assert agree_on(model.parameters(), mesh)
        model.eval()
        loss_of(model, 0, data)  # after which FSDP2 shows whole parameters
        model.train()
    assert model.bagua_algorithm.outer_rounds == 4
    distance = max(
        (full(p) - q.detach()).abs().max().item()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    sent = [m.bagua_stats()["total"]["bytes_sent"] for m in (model, twin)]
    return distance, sent


@pytest.mark.parametrize("inside", INSIDE)
def test_islands_train_as_plain_ones_and_send_their_shards(ranks, inside):
    for codec in (None, "int4_block"):
        for distance, (sent, of_plain) in ranks(4, against_plain_islands, inside, codec):
            if codec is None:
                assert distance < 1e-5
                if inside == "fsdp":
                    assert sent < 0.55 * of_plain, (sent, of_plain)


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
def refusals():
    """By attempt its error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    island = mesh["island"]

    def by_columns(p):
        return Shard(1) if p.shape == (23, 42) and dist.get_rank() > 1 else None

    def error_of(algorithm, group, **options):
        model = fully_shard(network(), mesh=mesh["shard"], **options)
        return training.error_of(lambda: model.with_bagua([sgd(model)], algorithm, group))

    return {
        "gradients": error_of(ByteGradAlgorithm(), island),
        "everyone": error_of(DiLoCoAlgorithm(), None),
        "warm-up": error_of(DiLoCoAlgorithm(warmup_steps=1), island),
        "elastic": error_of(DiLoCoAlgorithm(elastic=True), island),
        "placements": error_of(DiLoCoAlgorithm(), island, shard_placement_fn=by_columns),
    }


def test_what_islands_cannot_do_is_refused_with_the_remedy(ranks):
    for found in ranks(4, refusals):
        assert "'0.weight' is a DTensor" in found["gradients"]
        assert "bagua.fsdp.compress(model)" in found["gradients"]
        assert "parameter '0.weight' is a DTensor between ranks [" in found["everyone"]
        assert 'process_group=mesh["island"]' in found["everyone"]
        assert "leave warmup_steps= out" in found["warm-up"]
        assert "leave elastic= out" in found["elastic"]
        assert found["placements"].startswith("BaguaMismatchError")
        assert "rank 0 has [parameter 2.weight: (23, 42)" in found["placements"]
        assert "rank 1 has [parameter 2.weight: (23, 42)" in found["placements"]
        assert "Shard(dim=1) of a mesh (2,), shard (" in found["placements"]


@sharded.with_torch_group
def streaming():
    """Fragments in flight, few bits, and an optimizer that has state before the wrap."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    agree = {}
    for algorithm in (
        DiLoCoAlgorithm(interval=4, fragments=2, overlap_steps=1, codec="bit2_block"),
        SparseLoCoAlgorithm(interval=4),
        DiLoCoAlgorithm(lambda p: torch.optim.AdamW(p, lr=0.01), interval=4),
    ):
        model = by_fsdp(network(), mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, range(2), dist.get_rank())
        model.with_bagua([optimizer], algorithm, mesh["island"])
        moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        agree[type(algorithm).__name__, "moments"] = agree_on(moments, mesh)
        train(model, optimizer, range(8), dist.get_rank())
        model.bagua_algorithm.sync()
        agree[type(algorithm).__name__, "weights"] = agree_on(model.parameters(), mesh)
        with model.bagua_algorithm.anchor():
            loss_of(model.eval(), 0, 0)
        before = agree_on(model.parameters(), mesh)
        agree[type(algorithm).__name__, "anchor"] = before
        assert all(isinstance(p, DTensor) for p in moments)
    return agree


def test_shards_stream_in_few_bits_and_optimizers_keep_their_state(ranks):
    for agree in ranks(4, streaming):
        assert len(agree) == 6
        assert all(agree.values()), agree


def wrapped(mesh, seed=0):
    torch.manual_seed(seed)
    model = by_fsdp(network(), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    algorithm = DiLoCoAlgorithm(RULE, 4, overlap_steps=1, codec="int4_block")
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
    lines = logged(lambda: dcp.load(state, checkpoint_id=folder, planner=planner))
    outer, _ = full_outer_state(model)
    if shape != (2, 2):
        state = model.bagua_algorithm.state_dict()
        for name, p in model.named_parameters():
            assert torch.equal(shard_of(p), shard_of(state[f"anchor/{name}"]))
    train(model, optimizer, range(8, 17), dist.get_rank())
    assert shape == (2, 2) or model.bagua_algorithm.outer_rounds == 4
    return outer, training.bits(map(shard_of, model.parameters())), lines


def logged(call):
    """The library's warnings in its log."""
    log, handler, lines = logging.getLogger("bagua"), logging.Handler(logging.WARNING), []
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    try:
        call()
    finally:
        log.removeHandler(handler)
    return lines


def test_islands_go_on_to_the_bit_and_other_islands_from_the_anchor(ranks, tmp_path):
    saved = ranks(4, save_islands, str(tmp_path))
    for shape in ((2, 2), (3, 1), (1, 3)):
        found = ranks(shape[0] * shape[1], load_islands, str(tmp_path), shape)
        for rank, (outer, bits, lines) in enumerate(found):
            assert outer.keys() == saved[0][0].keys()
            assert all(torch.equal(outer[key], saved[0][0][key]) for key in outer)
            if shape == (2, 2):
                assert bits == saved[rank][1]
                assert not lines
            else:
                assert any("residuals of the codec begin at zero" in line for line in lines)
