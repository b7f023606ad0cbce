"""``DistributedDataParallel`` with the arguments and members of torch's, and Bagua's algorithms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua.torch_api._module_class import BaguaModule, plain_twin
from bagua.torch_api._outside_graphs import outside_graphs
from bagua.torch_api._wrap_arguments import check_optimizers_and_algorithm
from bagua.torch_api.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import _arguments, _join
from bagua.torch_api.data_parallel._inputs import to_device
from bagua.torch_api.data_parallel._torch_members import TorchMembers
from bagua.torch_api.distributed import BaguaDistributedDataParallel

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(TorchMembers, BaguaModule, torch.nn.Module):
    """Train ``module`` data-parallel, in place of torch's class of the same name.

    Every rank of the group constructs it, with the same module and arguments. Arguments up to
    ``forward_sync_buffers`` are torch's, in torch's order. ``state_dict()`` has the prefix
    ``module.`` as torch's has. Copies and unpickled copies do not communicate: wrap their
    ``.module``.

    Args:
        module: stays as it is, ``ddp.module``. Calling it directly communicates nothing.
        device_ids: None, or the one accelerator that the module is on: inputs are moved there.
        output_device: None, or the same device.
        dim: of the batch; for :meth:`scatter` and :meth:`gather` only.
        broadcast_buffers: give every rank the first rank's buffers before each training forward.
            None: as the algorithm has it. False: not at the wrap, either.
        init_sync: give every rank the first rank's state at the wrap. False: you have seen to it
            that they are equal.
        process_group: None for all ranks, a torch process group or a ``BaguaProcessGroup``.
            ``bagua.init_process_group()`` need not have been called if torch's was.
        bucket_cap_mb: MiB after which a bucket is closed; None: ``BAGUA_DEFAULT_BUCKET_SIZE``.
        find_unused_parameters: leave ``.grad`` of a parameter alone that no rank used.
        check_reduction: deprecated, does nothing.
        gradient_as_bucket_view: gradients are views of their buckets; False copies in and out.
        static_graph: a promise that nothing here needs.
        device_mesh: of one dimension, instead of ``process_group``.
        batched_grad_copy: gradients are copied without Python anyway; no effect.
        forward_sync_buffers: as ``broadcast_buffers``, but never about the wrap.
        optimizers: those used for the module, a list; their state is given to all ranks.
        algorithm: what is communicated and when (``bagua.torch_api.algorithms``); default exact
            all-reduce of gradients.

    Raises:
        NotImplementedError: delay_all_reduce_named_params, param_to_hook_all_reduce,
            mixed_precision, bucket_cap_mb_list; names the alternative.
        RuntimeError: no parameter needs a gradient, one is uninitialised, or there is no process
            group.
        ValueError: devices or sizes that do not fit.
        BaguaMismatchError: the ranks' modules or arguments differ; names the first difference.
    """

    _before_forward: Callable[..., None]
    _after_forward: Callable[..., None]

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: Algorithm | None = None,
    ) -> None:
        # Checks
        _arguments.refuse_unsupported(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )
        _arguments.warn_of_those_without_effect(check_reduction, skip_all_reduce_unused_params)
        algorithm = GradientAllReduceAlgorithm() if algorithm is None else algorithm
        check_optimizers_and_algorithm("DistributedDataParallel", optimizers, algorithm)
        parameters = _arguments.check_parameters(module)
        ids, output = _arguments.devices(parameters, device_ids, output_device)
        cap = _arguments.bucket_bytes(bucket_cap_mb)
        groups = _arguments.groups(process_group, device_mesh)
        buffers, state = _arguments.buffers_and_state(
            broadcast_buffers, forward_sync_buffers, init_sync
        )
        super().__init__()  # Joinable's, which calls nn.Module's
        self.module = module
        self.device = parameters[0].device
        self.device_type = self.device.type
        self.device_ids = ids
        self.output_device = output
        self.is_multi_device_module = len({p.device for p in parameters}) > 1
        self.dim = dim
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.divide_by_initial_world_size = True
        ddp = BaguaDistributedDataParallel(
            module,
            optimizers,
            algorithm,
            groups.bagua,
            getattr(module, "_bagua_module_name", None),
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=buffers,
            bucket_bytes=cap,
            initial_state=state,
            hook_module=False,
        )
        # Past nn.Module's __setattr__, and left out of copies: see __getstate__.
        self.__dict__.update(
            _bagua_ddp=ddp,
            _process_group=groups.shown,
            _before_forward=outside_graphs(ddp.before_forward),
            _after_forward=outside_graphs(ddp.after_forward),
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module(*inputs, **kwargs)``; in training, the backward through it communicates.

        Raises:
            RuntimeError: in training, on a copy.
        """
        if self.device_ids:
            inputs, kwargs = to_device((inputs, kwargs), self.device)
        if "_bagua_ddp" not in self.__dict__:
            if self.module.training and torch.is_grad_enabled():
                _ = self.bagua_ddp  # raises
            return self.module(*inputs, **kwargs)
        if self._join_config.enable and self._opens_round():
            _join.announce(self)
        self._before_forward(self.module, inputs)
        output = self.module(*inputs, **kwargs)
        self._after_forward(self.module, inputs, output)
        return output

    def _opens_round(self) -> bool:
        training = self.module.training and torch.is_grad_enabled()
        return training and self.require_backward_grad_sync and not self.bagua_ddp.synchronising

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Set training mode, of the module too."""
        super().train(mode)
        return self

    @property
    def inner(self) -> BaguaDistributedDataParallel:
        """Upstream's name of ``bagua_ddp``."""
        return self.bagua_ddp

    def with_bagua(self, *_: Any, **__: Any) -> torch.nn.Module:
        """Not on a wrapper.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "with_bagua: this is a DistributedDataParallel already; pass algorithm= to it, or call "
            "with_bagua on the module itself instead"
        )

    # Copies.

    def __getstate__(self) -> dict[str, Any]:
        live = ("_bagua_ddp", "_process_group", "_before_forward", "_after_forward")
        state = {name: value for name, value in self.__dict__.items() if name not in live}
        if "_bagua_ddp" in self.__dict__:
            module = plain_twin(self.module, type(self.module), self.bagua_ddp.hook_ids())
            state["_modules"] = {**self._modules, "module": module}
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self, protocol)
