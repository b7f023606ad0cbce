"""The three ways to wrap a module that situations are run under, with one face.

A house is called as torch's DistributedDataParallel is: `wrap(module, optimizer, **arguments)`. It
gives a callable model. What the wrapped module itself is, how a model is told not to synchronise,
and how ranks join differs between houses; a situation asks the house.
"""

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel


class NotApplicableError(Exception):
    """The house has no such argument or method, by its documentation."""


class TorchHouse:
    """torch.nn.parallel.DistributedDataParallel."""

    name = "torch"
    wrapper = torch.nn.parallel.DistributedDataParallel

    def __call__(self, module, optimizer=None, **arguments):
        return self.wrapper(module, **arguments)

    def inner(self, model):
        """The module that was wrapped."""
        return model.module

    def join(self, model, **arguments):
        """The context of uneven inputs."""
        return model.join(**arguments)

    def need_class(self):
        """For situations that use members of the class."""


class ClassHouse(TorchHouse):
    """bagua.torch_api.data_parallel.DistributedDataParallel, with its defaults."""

    name = "class"
    wrapper = DistributedDataParallel

    def __call__(self, module, optimizer=None, **arguments):
        return self.wrapper(module, optimizers=as_list(optimizer), **arguments)


#: Arguments of torch's class that with_bagua has, and the one that it needs not have.
RENAMED = {
    "find_unused_parameters": "find_unused_parameters",
    "broadcast_buffers": "broadcast_buffers",
    "forward_sync_buffers": "broadcast_buffers",
    "gradient_as_bucket_view": "do_flatten",
    "process_group": "process_group",
}
DROPPED = {"bucket_cap_mb"}


class MethodHouse(TorchHouse):
    """`module.with_bagua([optimizer], GradientAllReduceAlgorithm())`, with its defaults."""

    name = "with_bagua"

    def __call__(self, module, optimizer=None, **arguments):
        if not bagua.communication.is_initialized():
            bagua.init_process_group()
        unknown = set(arguments) - set(RENAMED) - DROPPED
        if unknown:
            raise NotApplicableError(f"bagua.wrap has no {sorted(unknown)}")
        ours = {RENAMED[name]: v for name, v in arguments.items() if name in RENAMED}
        return module.with_bagua(as_list(optimizer), GradientAllReduceAlgorithm(), **ours)

    def inner(self, model):
        return model

    def join(self, model, **arguments):
        raise NotApplicableError("bagua.wrap has no join")

    def need_class(self):
        raise NotApplicableError("bagua.wrap has no such member")


def as_list(optimizer):
    """No optimizer, one or several, as a list."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


HOUSES = {house.name: house for house in (TorchHouse(), ClassHouse(), MethodHouse())}
OURS = ("class", "with_bagua")
