"""Members of torch's DistributedDataParallel besides its constructor and forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from bagua._core.group.process_group import BaguaProcessGroup
from bagua.torch_api.data_parallel import _comm_hook, _join
from bagua.torch_api.data_parallel._inputs import to_device
from bagua.torch_api.data_parallel._torch_internals import TorchInternals

__all__ = ["TorchMembers"]


class TorchMembers(TorchInternals, Joinable):
    """The members of torch's class, on what communicates for the wrapped module."""

    module: torch.nn.Module
    device: torch.device
    device_type: str
    device_ids: list[int] | None
    output_device: int | None
    is_multi_device_module: bool
    dim: int
    divide_by_initial_world_size: bool  # what join() was asked for
    joined_uneven_inputs = False  # whether join() was ever called

    @property
    def process_group(self) -> Any:
        """The torch group where there is one, else the ``BaguaProcessGroup``."""
        group: dist.ProcessGroup | BaguaProcessGroup = self.__dict__["_process_group"]
        return group

    @property
    def broadcast_buffers(self) -> bool:
        """Whether forwards give every rank the first rank's buffers; may be set, on every rank."""
        return self.forwards.broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, enabled: bool) -> None:
        self.forwards.broadcast_buffers = enabled

    @property
    def forward_sync_buffers(self) -> bool:
        """torch's newer name of :attr:`broadcast_buffers`."""
        return self.broadcast_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, enabled: bool) -> None:
        self.broadcast_buffers = enabled

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronises buffers: the one before was communicated."""
        due = self.forwards.buffers_due and self.broadcast_buffers
        return due and len(self.modules_buffers) > 0

    def register_comm_hook(self, state: Any, hook: _comm_hook.Hook) -> None:
        """Replace all communication by ``hook(state, bucket)``.

        Every rank calls it, between two steps. Hooks run one after another, in the order of the
        buckets, on a thread of their own. Gradients arrive as they are: the hook divides. What it
        raises is raised by ``backward()``, on all ranks.

        Args:
            state: handed to the hook.
            hook: takes ``state`` and a ``torch.distributed.GradBucket``, returns a
                ``torch.futures.Future`` of one tensor like ``bucket.buffer()``.

        Raises:
            TypeError: ``hook`` is no hook.
            RuntimeError: one is registered, a forward waits for its backward, or the algorithm is
                another than GradientAllReduceAlgorithm.
        """
        with self._log_errors():
            _comm_hook.register(self.bagua_ddp, state, hook)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for ranks with different numbers of inputs.

        A rank that is through with its inputs answers the others' rounds with zero gradients. At
        the end all ranks hold the state of the last, and each the gradients of its own last step.

        Args:
            divide_by_initial_world_size: the mean is over all ranks; False: over those that still
                have inputs. A communication hook divides by itself.
            enable: False: nothing of this; inputs are even.
            throw_on_early_termination: raise RuntimeError on all ranks once one has no inputs.

        Raises:
            NotImplementedError: the algorithm communicates more than gradients.
        """
        if enable:
            _join.check_algorithm(self.bagua_ddp)
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
        return _join.torch_group(self, "join()")

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
