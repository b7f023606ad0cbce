"""``DistributedDataParallel`` with the arguments and members of torch's, and Bagua's algorithms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from bagua._core.group.process_group import BaguaProcessGroup
from bagua._sync.hooks import outside_graphs, outside_graphs_lazily, tensors_in
from bagua.torch_api._session import Session
from bagua.torch_api.algorithms import (
    Algorithm,
    GradientAllReduceAlgorithm,
)
from bagua.torch_api.algorithms.base import as_algorithm, as_optimizers, check_arguments
from bagua.torch_api.data_parallel import _arguments, _comm_hook, _join
from bagua.torch_api.distributed import BaguaModule, plain_twin
from bagua.torch_api.guard import Guard

__all__ = ["DistributedDataParallel", "DistributedDataParallel_V1_9_0"]

T = TypeVar("T")

#: Attributes that copies and pickles do not have.
_LIVE = (
    "_bagua_ddp",
    "_process_group",
    "_before_forward",
    "_after_forward",
)


@dataclass(frozen=True)
class _Wrap:
    """State that a copy needs besides the public attributes to communicate."""

    algorithm: Algorithm
    guard: Guard | None
    broadcast_buffers: bool | None
    bucket_bytes: Any  # as _arguments.bucket_bytes returns it
    default_group: bool
    needs_scaler: bool = False  # its algorithm remembers gradients, which are scaled


# Note [Torch's class]
# Libraries ask isinstance(model, torch.nn.parallel.DistributedDataParallel) before they unwrap a
# model, so this is a subclass. Torch's constructor never runs: nothing of torch's reducer exists.
# Public members of torch's class work. Its private methods are hidden by _NotHere; they, and what
# the constructor would have set, end in __getattr__, which names the alternative.

_IS_A_COPY = (
    "this DistributedDataParallel is a copy or was unpickled, and communicates from its first "
    "forward in training mode on: call train() before it, or wrap copy.module on every rank"
)

#: Words in names of torch's private members, and what to use in their place.
_ALTERNATIVES = {
    "logg": "bagua_stats()",
    "static_graph": "static_graph=True of the constructor",
    "buffer": "broadcast_buffers and will_sync_module_buffers()",
    "comm_hook": "register_comm_hook()",
    "optim": "torch.distributed.optim._apply_optimizer_in_backward()",
    "reducer": "no_sync() or require_backward_grad_sync = True: a forward outside of no_sync() has "
    "every backward through it communicate",
}


class _NotHere:
    """Hides a method of torch's class, on instances."""

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        raise AttributeError


class DistributedDataParallel(BaguaModule, TorchDDP):  # type: ignore[override]
    """Train ``module`` data-parallel, in place of torch's class of the same name.

    It is a subclass of torch's. Every rank of the group constructs it, with the same module and
    arguments. Arguments up to ``lazy_bucket_allocation`` are torch's, in torch's order; those that
    are not below have no effect.
    ``state_dict()`` has the prefix ``module.`` as torch's has. Copies and unpickled copies
    communicate from their first training forward on, which every rank makes: over the default
    group, without ``optimizers``, ``grad_scaler`` and hooks.

    Args:
        module: is unchanged, ``ddp.module``. Calling it directly communicates nothing.
        device_ids: None, or the one accelerator that the module is on: inputs are moved there.
        output_device: None, or the same device.
        dim: of the batch; for :meth:`scatter` and :meth:`gather` only.
        broadcast_buffers: give every rank the first rank's buffers before a forward, if the one
            before was communicated. None: as the algorithm has it. False: not at the wrap, either.
        init_sync: give every rank the first rank's state at the wrap. False: you have seen to it
            that they are equal.
        process_group: None for all ranks, a torch process group, a ``DeviceMesh`` of one dimension
            or a ``BaguaProcessGroup``. ``bagua.init_process_group()`` need not have been called if
            torch's was.
        bucket_cap_mb: MiB after which a bucket is closed; None: ``BAGUA_DEFAULT_BUCKET_SIZE``.
        find_unused_parameters: leave ``.grad`` of a parameter alone that no rank used.
        gradient_as_bucket_view: gradients are views of their buckets; False copies in and out.
        static_graph: every step uses the same parameters, in the same way: ``.grad`` of those that
            none uses is left alone.
        delay_all_reduce_named_params: these parameters are reduced with all others, which gives
            the same gradients.
        skip_all_reduce_unused_params: as ``find_unused_parameters``.
        bucket_cap_mb_list: a limit for each bucket, in the order in which they are sent; the last
            holds for all that follow.
        device_mesh: of one dimension, instead of ``process_group``.
        forward_sync_buffers: as ``broadcast_buffers``, but never about the wrap.
        optimizers: those used for the module, one or several; their state is given to all ranks.
        algorithm: decides messages and their time (``bagua.torch_api.algorithms``), or its name;
            default exact all-reduce of gradients.
        grad_scaler: the scaler that the loss is multiplied with, for an algorithm that remembers
            something of the gradients (QAdam, PowerSGD, Sparse): its memory is unscaled.
        guard: measures during training what the algorithm loses, and warns if it is too much
            (``bagua.torch_api.Guard``); None: as the algorithm has it.

    Raises:
        NotImplementedError: mixed_precision; names the alternative.
        RuntimeError: no parameter needs a gradient, one is uninitialised, or there is no process
            group.
        ValueError: devices, sizes or delayed parameters that do not fit, or an algorithm that
            cannot be guarded.
        BaguaMismatchError: the ranks' modules or arguments differ; names the first difference.

    Example::

        ddp = DistributedDataParallel(model, algorithm=ByteGradAlgorithm(), optimizers=[optimizer])
        loss_function(ddp(inputs), targets).backward()
        optimizer.step()
    """

    device: torch.device
    find_unused_parameters: bool = False
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
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        algorithm: Algorithm | str | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        guard: Guard | None = None,
    ) -> None:
        # Checks
        _arguments.refuse_mixed_precision(mixed_precision)
        _arguments.warn_of_check_reduction(check_reduction)
        name = "DistributedDataParallel"
        optimizers = as_optimizers(name, optimizers)
        algorithm = GradientAllReduceAlgorithm() if algorithm is None else algorithm
        algorithm = as_algorithm(name, algorithm, optimizers)
        check_arguments(name, grad_scaler, guard)
        parameters = _arguments.check_parameters(module)
        _arguments.check_delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        ids, output = _arguments.devices(parameters, device_ids, output_device)
        caps = _arguments.bucket_bytes(bucket_cap_mb, bucket_cap_mb_list)
        groups = _arguments.groups(process_group, device_mesh)
        buffers, state = _arguments.buffers_and_state(
            broadcast_buffers, forward_sync_buffers, init_sync
        )
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        self.module = module
        self.device = parameters[0].device
        self.device_type = self.device.type
        self.device_ids = ids
        self.output_device = output
        self.device_mesh = device_mesh
        self.is_multi_device_module = len({p.device for p in parameters}) > 1
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.divide_by_initial_world_size = True
        self._wrap = _Wrap(algorithm, guard, buffers, caps, groups.default)
        self._start(groups, optimizers, state, grad_scaler)
        inner = self.bagua_ddp
        needs_scaler = inner.bagua_algorithm.traits.remembers_gradients and inner.scales_gradients
        self._wrap = replace(self._wrap, needs_scaler=needs_scaler)

    def _start(
        self,
        groups: _arguments.Groups,
        optimizers: Sequence[torch.optim.Optimizer],
        state: Any,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        unused = self.find_unused_parameters or self.skip_all_reduce_unused_params
        ddp = Session(
            self.module,
            optimizers,
            self._wrap.algorithm,
            groups.bagua,
            getattr(self.module, "_bagua_module_name", None),
            gradient_as_bucket_view=self.gradient_as_bucket_view or None,
            find_unused_parameters=unused,
            static_graph=self.static_graph,
            broadcast_buffers=self._wrap.broadcast_buffers,
            bucket_bytes=self._wrap.bucket_bytes,
            initial_state=state,
            hook_module=False,
            grad_scaler=grad_scaler,
            guard=self._wrap.guard,
        )
        # Past nn.Module's __setattr__, and left out of copies: see __getstate__.
        self.__dict__.update(
            _process_group=groups.shown,
            _before_forward=outside_graphs(ddp.before_forward),
            _after_forward=outside_graphs(ddp.after_forward),
        )
        self._attach(ddp)

    @outside_graphs_lazily
    def _start_copy(self) -> None:
        if not self._wrap.default_group:
            raise RuntimeError(
                "this DistributedDataParallel is a copy or was unpickled, and its process group "
                "was not the default one: train DistributedDataParallel(copy.module, "
                "process_group=...), made on every rank"
            )
        if self._wrap.needs_scaler:
            raise RuntimeError(
                "this DistributedDataParallel is a copy or was unpickled, and its algorithm needs "
                "the scaler that the original had: train DistributedDataParallel(copy.module, "
                "grad_scaler=...), made on every rank"
            )
        self.device = _arguments.check_parameters(self.module)[0].device
        self.device_type = self.device.type
        if self.device_ids:
            self.device_ids = [self.device.index]
            self.output_device = self.device.index
        self._start(_arguments.groups(None, None), (), "nothing")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module(*inputs, **kwargs)``; the backward through it communicates.

        Under ``torch.no_grad()`` and :meth:`no_sync` nothing communicates. Training or evaluation
        mode makes no difference.
        """
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        communicates = torch.is_grad_enabled() and self.require_backward_grad_sync
        if "_bagua_ddp" not in self.__dict__ and communicates and self.module.training:
            self._start_copy()
        if self.device_ids:
            inputs, kwargs = _to_device((inputs, kwargs), self.device)
        if "_bagua_ddp" in self.__dict__:
            if self._join_config.enable:
                _join.announce(self)
            self._before_forward(self.module, inputs)
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        if "_bagua_ddp" in self.__dict__:
            self._after_forward(self.module, (), output)
        elif self.require_backward_grad_sync:
            _refuse_backward(self.module, output)
        return output

    def train(self, mode: bool = True) -> DistributedDataParallel:
        super().train(mode)
        return self

    @property
    def process_group(self) -> Any:  # type: ignore[override]
        """The torch group where there is one, else the ``BaguaProcessGroup``."""
        group: dist.ProcessGroup | BaguaProcessGroup = self.__dict__["_process_group"]
        return group

    @property
    def broadcast_buffers(self) -> bool:
        """Whether forwards give every rank the first rank's buffers; may be set, on every rank."""
        return self.bagua_ddp.broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, enabled: bool) -> None:
        self.bagua_ddp.broadcast_buffers = enabled

    @property
    def forward_sync_buffers(self) -> bool:
        """torch's newer name of :attr:`broadcast_buffers`."""
        return self.broadcast_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, enabled: bool) -> None:
        self.broadcast_buffers = enabled

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronises buffers: the one before was communicated."""
        due = self.require_forward_param_sync and self.broadcast_buffers
        ignored = self.parameters_to_ignore
        return due and any(name not in ignored for name, _ in self.module.named_buffers())

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the forward before communicated, after which buffers are synchronised."""
        return self.bagua_ddp.buffers_due

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, due: bool) -> None:
        self.bagua_ddp.buffers_due = due

    def register_comm_hook(self, state: Any, hook: _comm_hook.Hook) -> None:
        """Replace all communication by ``hook(state, bucket)``.

        Every rank calls it, between two steps. Hooks run one after another, in the order of the
        buckets, on a separate thread. Gradients arrive undivided: the hook divides. What it
        raises is raised by ``backward()``, on all ranks.

        Args:
            state: handed to the hook.
            hook: takes ``state`` and a ``torch.distributed.GradBucket``, returns a
                ``torch.futures.Future`` of one tensor like ``bucket.buffer()``.

        Raises:
            TypeError, ValueError: ``hook`` is not a hook.
            RuntimeError: one is registered, a forward waits for its backward, or the algorithm is
                another than GradientAllReduceAlgorithm.
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
        return _join.Shadow(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return _join.torch_group(self)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Cut inputs along ``dim``, one part per device."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Put the outputs of several devices together along ``dim``."""
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs and keyword arguments on a device, each in a tuple of one."""
        device = torch.device(self.device_type, device_id)
        return (_to_device(inputs, device),), (_to_device(kwargs, device),)

    @property
    def bagua_ddp(self) -> Session:
        ddp: Session | None = self.__dict__.get("_bagua_ddp")
        if ddp is None:
            raise RuntimeError(_IS_A_COPY)
        return ddp

    @property
    def inner(self) -> Session:
        """Upstream's name of ``bagua_ddp``."""
        return self.bagua_ddp

    def with_bagua(self, *_: Any, **__: Any) -> torch.nn.Module:
        raise RuntimeError(
            "bagua.wrap: this is a DistributedDataParallel already; pass algorithm= to it, or call "
            "bagua.wrap on the module itself instead"
        )

    def __getattr__(self, name: str) -> Any:
        """Parameters, buffers and modules; for others an error that names the alternative."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            use = [text for word, text in _ALTERNATIVES.items() if word in name]
            raise AttributeError(
                f"this DistributedDataParallel has no '{name}': private members of torch's class "
                "and its reducer do not exist here. "
                f"Use {use[0] if use else 'its public members'}; attributes of the wrapped module "
                "are those of .module"
            ) from None

    # Copies.

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _LIVE}
        state["device_mesh"] = None
        if "_bagua_ddp" in self.__dict__:
            module = plain_twin(self.module, type(self.module), self.bagua_ddp.hook_ids())
            state["_modules"] = {**self._modules, "module": module}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self, protocol)


for _name, _member in vars(TorchDDP).items():
    if _name in vars(DistributedDataParallel) or _name.endswith("__"):
        continue
    if _name.startswith("_") and isinstance(_member, (FunctionType, property)):
        setattr(DistributedDataParallel, _name, _NotHere())


def _to_device(value: T, device: torch.device) -> T:
    """``value`` with all tensors in nested tuples, named tuples, lists and dicts on ``device``."""
    moved: Any = value
    if isinstance(value, torch.Tensor):
        moved = value.to(device, non_blocking=True)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        moved = type(value)(*(_to_device(item, device) for item in value))
    elif isinstance(value, (tuple, list)):
        moved = type(value)(_to_device(item, device) for item in value)
    elif isinstance(value, dict):
        moved = {key: _to_device(item, device) for key, item in value.items()}
        moved = moved if type(value) is dict else type(value)(moved)
    return moved  # type: ignore[no-any-return]


@outside_graphs_lazily
def _refuse_backward(module: torch.nn.Module, output: Any) -> None:
    """Have a backward from ``output`` to a parameter of ``module`` raise: this is a copy."""
    nodes = [get_gradient_edge(p).node for p in module.parameters() if p.requires_grad]

    def refuse(gradient: torch.Tensor) -> None:
        if any(map(torch._C._will_engine_execute_node, nodes)):
            raise RuntimeError(_IS_A_COPY)

    for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
        if tensor.grad_fn is not None:
            tensor.register_hook(refuse)


#: The name of the class in Bagua.
DistributedDataParallel_V1_9_0 = DistributedDataParallel
