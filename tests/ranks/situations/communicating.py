"""Communication hooks, groups, and the user's own collectives."""

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from ranks.situations.rows import refused, row
from ranks.situations.values import batch, everything, grads, linear, perceptron, trained, x
from torch import nn


def zero_redundancy_optimizer_that_was_loaded(wrap, rank, size):
    """A resumed training: each rank has the state of its own share, which no wrap overwrites."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def sharded(module):
        return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.01)

    first = perceptron()
    optimizer = sharded(first)
    for step in range(2):
        optimizer.zero_grad()
        first(batch(step, 0)).square().mean().backward()  # the same on all ranks
        optimizer.step()
    for owner in range(size):
        optimizer.consolidate_state_dict(to=owner)
        if rank == owner:
            saved = optimizer.state_dict()
    module = perceptron()
    module.load_state_dict(first.state_dict())
    resumed = sharded(module)
    resumed.load_state_dict(saved)
    model = wrap(module, resumed)
    for step in range(2, 5):
        resumed.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        resumed.step()
    return everything(module)


def a_group_of_some_ranks(wrap, rank, size):
    """The last rank is alone in a separate group."""
    groups = [dist.new_group(list(range(size - 1))), dist.new_group([size - 1])]
    module = perceptron()
    trained(wrap, rank, module, process_group=groups[rank == size - 1])
    return everything(module)


def collectives_of_the_user_inside_the_forward(wrap, rank, size):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, inputs):
            count = torch.tensor(float(len(inputs)))
            dist.all_reduce(count)
            return self.layer(inputs) / count

    module = Counting()
    model = wrap(module)
    model(x(rank)).sum().backward()
    return grads(module)


def _again(label):
    store = dist.PrefixStore(label, dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


_KEPT = []  # torch's own destructors hang on a group that was destroyed before its wrapper


def a_group_made_anew_before_the_wrap(wrap, rank, size):
    module = linear()
    model = wrap(module)
    _KEPT.append(model)
    model(x(rank)).sum().backward()
    _again(f"again-{wrap.name}")
    module = linear()
    model = wrap(module)
    model(x(rank)).sum().backward()
    return grads(module)


def training_after_the_group_was_destroyed(wrap, rank, size):
    module = linear()
    model = wrap(module)
    _KEPT.append(model)
    model(x(rank)).sum().backward()
    module.zero_grad()
    _again(f"destroyed-{wrap.name}")
    model(x(rank)).sum().backward()
    return grads(module)


def training_of_an_old_model_after_a_wrap_in_a_new_group(wrap, rank, size):
    """bagua's own group, which the first wrap made, is made anew by the second."""
    module = linear()
    model = wrap(module)
    _KEPT.append(model)
    model(x(rank)).sum().backward()
    _again(f"old-{wrap.name}")
    if bagua.communication.is_initialized():
        bagua.destroy_process_group()
    _KEPT.append(wrap(linear()))
    module.zero_grad()
    model(x(rank)).sum().backward()
    return grads(module)


def evaluation_after_the_group_was_destroyed(wrap, rank, size):
    module = linear()
    model = wrap(module)
    _KEPT.append(model)
    model(x(rank)).sum().backward()
    dist.destroy_process_group()
    with torch.no_grad():
        output = model(x(rank))
    return {"output": output}


EXCEPTIONS = [
    row(a_group_made_anew_before_the_wrap, alone=True),
    row(training_after_the_group_was_destroyed, alone=True),
    row(
        training_of_an_old_model_after_a_wrap_in_a_new_group,
        both=refused("process group.*destroyed", "its connections ended with the old group"),
        alone=True,
    ),
    row(evaluation_after_the_group_was_destroyed, alone=True),
]
