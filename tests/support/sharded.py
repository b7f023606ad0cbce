"""Models sharded by torch's FSDP2, and gradients of plain copies."""

import functools

import bagua.fsdp
import bagua.torch_api as bagua_api
import torch
import torch.distributed as dist
from oracle.sharded import reduce_scatter
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional

ROWS = 8
GROUPS = {"0": [0], "2": [2], "FSDPSequential": [4]}  # layers of plain() by module of FSDP


def with_torch_group(function):
    """Bagua begins inside `function`, over the group of the ranks, and ends with it."""

    @functools.wraps(function)
    def run(*args):
        try:
            return function(*args)
        finally:
            if bagua_api.communication.is_initialized():
                bagua_api.destroy_process_group()

    return run


def plain():
    """Three layers whose sizes no number of ranks divides, equal on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 41), nn.Tanh(), nn.Linear(41, 61), nn.Tanh(), nn.Linear(61, 3)]
    return nn.Sequential(*layers)


def sharded(model=None, **options):
    """`model` (default: plain()) with its outer layers in modules of their own."""
    model = plain() if model is None else model
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def compressed(codec="block_uint8", **options):
    model = sharded()
    return model, bagua.fsdp.compress(model, codec, **options)


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(ROWS, 5, generator=generator)
    return functional.mse_loss(model(inputs).float(), inputs[:, :3].sin())


def backward(model, step, factor=1.0):
    (loss_of(model, dist.get_rank(), step) * factor).backward()


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def full_weights(model):
    """All parameters, gathered exactly, as one tensor."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the outermost one does not by itself after a forward
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])


def local_gradients(model):
    """The shards of all gradients of this rank, by name."""
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters()}


def chunks(tensor, ranks):
    """The shards of a parameter as torch cuts it: rows by rank, the last shards padded."""
    rows = -(-tensor.shape[0] // ranks)
    padded = torch.zeros(rows * ranks, *tensor.shape[1:], dtype=tensor.dtype)
    padded[: tensor.shape[0]] = tensor
    return padded.chunk(ranks)


def flat_gradients(modules, ranks):
    """Input of an FSDP reduction: for each rank's shard in turn the shards of all parameters."""
    parameters = [p for module in modules for p in module.parameters()]
    shards = [chunks(p.grad, ranks) for p in parameters]
    return torch.cat([shard[rank].flatten() for rank in range(ranks) for shard in shards])


def cut_back(flat, modules, rank, ranks):
    """A rank's shards, without padding, of the parameters whose shards are `flat`."""
    found, start = [], 0
    for parameter in (p for module in modules for p in module.parameters()):
        own = chunks(parameter.detach(), ranks)[rank]
        rows = -(-parameter.shape[0] // ranks)
        kept = max(0, min(rows, parameter.shape[0] - rank * rows))
        found.append(flat[start : start + own.numel()].view_as(own)[:kept])
        start += own.numel()
    return found


def plain_copies(step, factor=1.0):
    """For each rank a plain model with its gradients of a step."""
    copies = []
    for rank in range(dist.get_world_size()):
        copies.append(plain())
        (loss_of(copies[-1], rank, step) * factor).backward()
    return copies


def oracle_gradients(codec, step, divisor, errors=None, factor=1.0):
    """This rank's shards of all gradients, in order, and the residuals by module of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    copies = plain_copies(step, factor)
    shards, residuals = [], {}
    for name, layers in GROUPS.items():
        of_ranks = [flat_gradients([c[i] for i in layers], ranks) for c in copies]
        before = None if errors is None else errors[name]
        results, residuals[name] = reduce_scatter(codec, of_ranks, divisor, before, factor)
        modules = [copies[rank][i] for i in layers]
        shards += cut_back(results[rank], modules, rank, ranks)
    return shards, residuals
