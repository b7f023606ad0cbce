"""What torch's DistributedDataParallel has besides its constructor and forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.data_parallel import _comm_hook, _join
from bagua.torch_api.data_parallel._inputs import to_device
from bagua.torch_api.distributed import BaguaDistributedDataParallel

__all__ = ["TorchMembers"]


class TorchMembers(Joinable):
    """The members of torch's class, on what communicates for the wrapped module."""

    module: torch.nn.Module
    device: torch.device
    device_type: str
    dim: int
    divide_by_initial_world_size: bool  # what join() was asked for

    @property
    def bagua_ddp(self) -> BaguaDistributedDataParallel:
        """What communicates.

        Raises:
            RuntimeError: this is a copy, for which nothing does.
        """
        ddp: BaguaDistributedDataParallel | None = self.__dict__.get("_bagua_ddp")
        if ddp is None:
            raise RuntimeError(
                "this DistributedDataParallel is a copy or was unpickled, and does not "
                "communicate: train DistributedDataParallel(copy.module), made on every rank, or "
                "call eval() or torch.no_grad()"
            )
        return ddp

    @property
    def process_group(self) -> Any:
        """Who communicates: a torch group where there is one, else the ``BaguaProcessGroup``."""
        group: dist.ProcessGroup | BaguaProcessGroup = self.__dict__["_process_group"]
        return group

    @property
    def broadcast_buffers(self) -> bool:
        """Whether training forwards give every rank the first rank's buffers."""
        return self.bagua_ddp.broadcast_buffers

    @property
    def forward_sync_buffers(self) -> bool:
        """torch's newer name of :attr:`broadcast_buffers`."""
        return self.broadcast_buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether the next training forward broadcasts buffers."""
        ignored = self.bagua_ddp.parameters_to_ignore
        some = any(name not in ignored for name, _ in self.module.named_buffers())
        return some and self.broadcast_buffers and self.require_backward_grad_sync

    @property
    def find_unused_parameters(self) -> bool:
        """Whether ranks exchange which parameters were used."""
        return self.bagua_ddp.find_unused_parameters

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward communicates; may be set, which is what ``no_sync`` does."""
        return self.bagua_ddp.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self.bagua_ddp.require_backward_grad_sync = enabled

    def register_comm_hook(self, state: Any, hook: _comm_hook.Hook) -> None:
        """Replace all communication by ``hook(state, bucket)``.

        Every rank calls it, before the first training forward. Hooks run one after another, in the
        order of the buckets, on a thread of their own. Gradients arrive as they are: the hook
        divides. What it raises is raised by ``backward()``, on all ranks.

        Args:
            state: handed to the hook.
            hook: takes ``state`` and a ``torch.distributed.GradBucket``, returns a
                ``torch.futures.Future`` of one tensor like ``bucket.buffer()``.

        Raises:
            TypeError: ``hook`` is no hook.
            RuntimeError: one is registered, training has begun, or the algorithm is another than
                GradientAllReduceAlgorithm.
        """
        _comm_hook.register(self.bagua_ddp, state, hook)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for ranks with different numbers of inputs.

        A rank that is through with its inputs answers the others' rounds with zero gradients. At
        the end all ranks hold the state of the last.

        Args:
            divide_by_initial_world_size: the mean is over all ranks; False: over those that still
                have inputs. A communication hook divides by itself.
            enable: False: nothing of this; inputs are even.
            throw_on_early_termination: raise RuntimeError on all ranks once one has no inputs.

        Raises:
            NotImplementedError: another algorithm than gradient_allreduce and bytegrad.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``Join``; takes ``divide_by_initial_world_size``."""
        return _join.Shadow(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """For ``Join``."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """For ``Join``."""
        return _join.join_group(self)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Cut inputs along ``dim``, one part per device."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Put the outputs of several devices together along ``dim``."""
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs and keyword arguments on a device, each in a tuple of one."""
        device = torch.device(self.device_type, device_id)
        return (to_device(inputs, device),), (to_device(kwargs, device),)
