"""``with_bagua``: what communicates for one module."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bagua import _C, __version__
from bagua.torch_api import _plan, env
from bagua.torch_api._bucketing import split_by_bucket_size
from bagua.torch_api._initial_state import broadcast_optimizer, broadcast_tensors
from bagua.torch_api._module_class import BaguaModule, wrap_class
from bagua.torch_api._outputs import tensors_in
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup, as_bagua_group, close_at_exit
from bagua.torch_api.tensor import bagua_getter_closure, record_of

__all__ = ["BaguaDistributedDataParallel", "BaguaModule", "with_bagua"]

_log = logging.getLogger("bagua")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class BaguaDistributedDataParallel:
    """The hooks, buckets and engine of one wrapped module (``module.bagua_ddp``).

    Holds the module weakly: deleting the module frees threads, sockets and memory.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup,
        bagua_module_name: str | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.bagua_optimizers = list(optimizers)
        self.process_group = process_group
        self.bagua_module_name = bagua_module_name or type(module).__name__
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.parameters_to_ignore = _ignored_names(module)
        self.bagua_train_step_counter = 0
        self.bagua_buckets: list[BaguaBucket] = []
        self.bagua_algorithm: AlgorithmImpl = algorithm.reify(process_group)
        self.broadcast_buffers = (
            self.bagua_algorithm.broadcast_buffers
            if broadcast_buffers is None
            else broadcast_buffers
        )
        self._require_sync = True
        self._plan: _plan.Plan | None = None
        self._path: _C.GradientPath | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._parameter_handles: list[torch.utils.hooks.RemovableHandle] = []
        self._watching = False
        self._check_parameters()
        process_group.transport.agree(
            "the model or the arguments of with_bagua", self._describe(algorithm)
        )
        self._take_snapshot()
        self._initialise()
        self._install_module_hooks()
        close_at_exit(self)

    # What the module is.

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"module '{self.bagua_module_name}' has been deleted")
        return module

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """``(name, parameter)`` of all parameters that are trained, not ignored and no experts.

        Parameters shared between modules occur once, under their first name.
        """
        named = list(self.module.named_parameters(remove_duplicate=False))
        ignored = {id(p) for name, p in named if name in self.parameters_to_ignore}
        return [
            (name, p)
            for name, p in self.module.named_parameters()
            if p.requires_grad and id(p) not in ignored and not getattr(p, "expert", False)
        ]

    def _check_parameters(self) -> None:
        for name, module in self.module.named_modules():
            sparse = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            weight = f"{name}.weight" if name else "weight"
            if sparse and module.sparse and weight not in self.parameters_to_ignore:
                raise NotImplementedError(
                    f"'{weight}' has sparse gradients, buckets are dense: use sparse=False, or put "
                    "its name into _bagua_params_and_buffers_to_ignore"
                )
        for name, parameter in self.bagua_build_params():
            if parameter.dtype not in _DTYPES:
                raise TypeError(
                    f"parameter '{name}' is {parameter.dtype}; float16, bfloat16, float32 and "
                    "float64 can be communicated. Put its name into "
                    "_bagua_params_and_buffers_to_ignore."
                )

    def _describe(self, algorithm: Algorithm) -> list[str]:
        lines = [
            f"bagua {__version__}",
            f"algorithm {type(algorithm).__name__} {_plain_arguments(algorithm)}",
            f"optimizers {[type(o).__name__ for o in self.bagua_optimizers]}",
            f"do_flatten={self.gradient_as_bucket_view}, broadcast_buffers="
            f"{self.broadcast_buffers}, find_unused_parameters={self.find_unused_parameters}, "
            f"bucket size {env.get_default_bucket_size()}",
        ]
        lines += [
            f"parameter {name}: {tuple(p.shape)} {p.dtype} {p.device.type}"
            f"{'' if p.requires_grad else ' frozen'}"
            for name, p in self.module.named_parameters()
        ]
        lines += [
            f"buffer {name}: {tuple(b.shape)} {b.dtype} {b.device.type}"
            for name, b in self.module.named_buffers()
        ]
        return lines

    def _take_snapshot(self) -> None:
        """Note [Plan guard] in the C++ core."""
        names, self._guard_dicts = [], []
        for name, module in self.module.named_modules():
            names.append(name)
            self._guard_dicts += [module._parameters, module._modules]
        self._guard = _C.PlanGuard(names, self._guard_dicts)

    def _check_snapshot(self) -> None:
        difference = self._guard.difference(self._guard_dicts)
        if difference:
            raise _C.BaguaError(
                f"module '{self.bagua_module_name}': {difference} since with_bagua, so it would "
                "train unsynchronised. Call with_bagua again, on every rank, after such a change."
            )

    # Setting up.

    def _initialise(self) -> None:
        """Rank 0's state for everybody, then tensors, buckets, ops and an engine."""
        self._stop_engine()
        self._broadcast_state()
        algorithm = self.bagua_algorithm
        tensors = algorithm.init_tensors(self)
        groups = split_by_bucket_size(tensors, bagua_getter_closure, env.get_default_bucket_size())
        self.bagua_buckets = algorithm.tensors_to_buckets(groups, self.gradient_as_bucket_view)
        for bucket in self.bagua_buckets:
            algorithm.init_operations(self, bucket)
        if not self.bagua_buckets:
            return
        wrap = self.process_group.transport.next_wrap()
        self._plan = _plan.build(
            self.bagua_buckets, self.process_group, self.bagua_module_name, wrap
        )
        self._places = {
            record_of(tensor).name: (bucket, i)
            for bucket in self.bagua_buckets
            for i, tensor in enumerate(bucket.tensors)
        }
        for bucket in self.bagua_buckets:
            for tensor in bucket.tensors:
                record_of(tensor).marker = weakref.ref(self)
        self._install_gradient_path()

    def _broadcast_state(self) -> None:
        ignored = set(self.parameters_to_ignore)
        state = [p.data for name, p in self.module.named_parameters() if name not in ignored]
        broadcast_tensors(state + self._buffers(), self.process_group.transport)
        for optimizer in self.bagua_optimizers:
            broadcast_optimizer(optimizer, self.process_group.transport)

    def _buffers(self) -> list[torch.Tensor]:
        ignored = set(self.parameters_to_ignore)
        return [b for name, b in self.module.named_buffers() if name not in ignored]

    def _install_gradient_path(self) -> None:
        assert self._plan is not None
        implementation = type(self.bagua_algorithm)
        own_wait = implementation.init_post_backward_hook is not (
            AlgorithmImpl.init_post_backward_hook
        )
        own_hook = implementation.init_backward_hook is not AlgorithmImpl.init_backward_hook
        plain = all(bucket.gradients for bucket in self.bagua_buckets)
        this = weakref.ref(self)

        def after_backward() -> None:
            if (ddp := this()) is not None:
                ddp.bagua_algorithm.init_post_backward_hook(ddp)()

        def on_unused(names: list[str]) -> None:
            if (ddp := this()) is not None:
                ddp._warn_unused(names)

        self._path = _C.GradientPath(
            self._plan.engine,
            install_hooks=not own_hook,
            find_unused=self.find_unused_parameters,
            after_backward=None if plain and not own_wait else after_backward,
            on_unused=on_unused,
        )
        if own_hook:
            self._install_python_hooks()

    def _install_python_hooks(self) -> None:
        """A user's own backward hook runs in Python, once per parameter."""
        this = weakref.ref(self)
        for name, parameter in self.bagua_build_params():

            def hook(p: torch.Tensor, name: str = name) -> None:
                ddp = this()
                if ddp is not None and ddp._require_sync and ddp._round_open():
                    ddp.bagua_algorithm.init_backward_hook(ddp)(name, p)  # type: ignore[arg-type]

            handle = parameter.register_post_accumulate_grad_hook(hook)
            self._parameter_handles.append(handle)

    def _install_module_hooks(self) -> None:
        module = self.module
        self._handles = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
        ]
        for optimizer in self.bagua_optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def hook_ids(self) -> list[int]:
        """Ids of the hooks on the module, for copies that must not have them."""
        return [handle.id for handle in self._handles]

    # One step, in the order in which things happen.

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._check_snapshot()
        if self.bagua_algorithm.need_reset():
            self._initialise()
        self.bagua_train_step_counter += 1
        if self._path is None or self._plan is None or not self._require_sync:
            return
        engine = self._plan.engine
        first = not engine.round_open
        self._path.begin_round()
        self._watching = True
        if self.broadcast_buffers and first:
            self._synchronise_buffers()
        self.bagua_algorithm.init_forward_pre_hook(self)(inputs)

    def _synchronise_buffers(self) -> None:
        buffers = self._buffers()
        if not buffers or self.process_group.size == 1:
            return
        assert self._plan is not None
        self._plan.engine.await_agreement()
        broadcast_tensors(buffers, self.process_group.transport)

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._watching and self._path is not None:
            self._watching = False
            self._path.watch(tensors_in(output))

    def mark_tensor_ready(self, tensor: torch.Tensor) -> None:
        """Mark a registered tensor: what ``bagua_mark_communication_ready`` calls."""
        assert self._plan is not None
        assert self._path is not None
        name = record_of(tensor).name
        bucket, index = self._places[name]
        slot = self._plan.slots[name]
        if bucket.gradients:
            self._path.adopt(slot)
        else:
            bucket.copy_in(index)
        self._plan.engine.mark_ready(slot)

    def wait_pending_comm_ops(self) -> None:
        """Block until the buckets that were launched are done.

        Raises:
            BaguaError: something failed on this rank or another.
        """
        if self._plan is None:
            return
        self._plan.engine.wait()
        for bucket in self.bagua_buckets:
            if not bucket.gradients:
                bucket.copy_out()

    @property
    def _bagua_backend(self) -> BaguaDistributedDataParallel:
        """Upstream's spelling: ``bagua_ddp._bagua_backend.wait_pending_comm_ops()``."""
        return self

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.bagua_algorithm.init_post_optimizer_step_hook(self)(optimizer)

    def _round_open(self) -> bool:
        return self._plan is not None and self._plan.engine.round_open

    def _warn_unused(self, names: list[str]) -> None:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            f"module '{self.bagua_module_name}': no gradient in this step for {shown}; zeros were "
            "sent. Pass find_unused_parameters=True to leave .grad alone where no rank used a "
            "parameter.",
            stacklevel=2,
        )

    # Control.

    @property
    def require_backward_grad_sync(self) -> bool:
        """False inside :meth:`no_sync`."""
        return self._require_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: forward and backward go inside."""
        before = self._require_sync
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(before)

    def _set_sync(self, enabled: bool) -> None:
        self._require_sync = enabled
        if self._path is not None:
            self._path.set_sync(enabled)

    def stats(self) -> dict[str, Any]:
        """What was sent and how long it took, since the wrap.

        Returns:
            ``total`` and ``buckets`` (a list): bytes and messages sent and received, and
            nanoseconds busy, on the wire, waiting for the lane, and hidden behind backward;
            ``rounds``; ``exposed_ns``, the time backward waited; ``control``, the agreements.
        """
        if self._plan is None:
            return {"total": {"bytes_sent": 0, "bytes_received": 0}, "buckets": [], "rounds": 0}
        stats: dict[str, Any] = self._plan.engine.stats()
        numbers = [key for key, value in stats["buckets"][0].items() if isinstance(value, int)]
        stats["total"] = {
            key: sum(bucket[key] for bucket in stats["buckets"])
            for key in numbers
            if key != "rounds"
        }
        return stats

    def _stop_engine(self) -> None:
        for handle in self._parameter_handles:
            handle.remove()
        self._parameter_handles = []
        if self._path is not None:
            self._path.remove_hooks()
        self._path = None
        if self._plan is not None:
            self._plan.engine.stop()
        self._plan = None

    def close(self) -> None:
        """Remove all hooks and stop the threads. The module keeps its weights. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stop_engine()


def _ignored_names(module: torch.nn.Module) -> list[str]:
    names: list[str] = []
    for attribute in (
        "_bagua_params_and_buffers_to_ignore",
        "_ddp_params_and_buffers_to_ignore",
    ):
        names += list(getattr(module, attribute, []))
    return sorted(set(names))


def _plain_arguments(algorithm: Algorithm) -> dict[str, Any]:
    kinds = (bool, int, float, str, type(None))
    return {key: value for key, value in vars(algorithm).items() if isinstance(value, kinds)}


def with_bagua(
    self: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    process_group: Any = None,
    do_flatten: bool = True,
    *,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool | None = None,
) -> torch.nn.Module:
    """Train this module data-parallel.

    Every rank of the group calls it, with the same model and arguments. Parameters, buffers and
    optimizer state of the group's first rank are given to all. Calling it again switches to another
    algorithm.

    Args:
        optimizers: the optimizers used for the module (a list).
        algorithm: what is communicated and when (``bagua.torch_api.algorithms``).
        process_group: who communicates: None for all ranks, a torch process group, or a
            ``BaguaProcessGroup``.
        do_flatten: make gradients views of their buckets; False copies them in and out.
        find_unused_parameters: ranks exchange which parameters were used, and one that no rank
            used keeps its ``.grad``. Unused parameters never hang, with or without it.
        broadcast_buffers: give every rank the first rank's buffers before a training forward.
            None: as the algorithm has it.

    Returns:
        The module itself, now a :class:`BaguaModule`.

    Raises:
        RuntimeError: before ``init_process_group``.
        BaguaMismatchError: the ranks' models or arguments differ; names the first difference.
        TypeError, ValueError, NotImplementedError: bad arguments or parameters, by name.

    Note:
        To ignore parameters or buffers, assign the list of their names (as in ``state_dict()``) to
        ``module._bagua_params_and_buffers_to_ignore`` before the call.
    """
    _check_arguments(optimizers, algorithm)
    group = as_bagua_group(process_group)
    if isinstance(self, BaguaModule):
        self.bagua_ddp.close()
    ddp = BaguaDistributedDataParallel(
        self,
        optimizers,
        algorithm,
        group,
        getattr(self, "_bagua_module_name", None),
        gradient_as_bucket_view=do_flatten,
        find_unused_parameters=find_unused_parameters,
        broadcast_buffers=broadcast_buffers,
    )
    wrap_class(self)
    self.__dict__["_bagua_ddp"] = ddp
    return self


def _check_arguments(optimizers: Any, algorithm: Any) -> None:
    if isinstance(optimizers, torch.optim.Optimizer):
        raise TypeError("with_bagua takes a list of optimizers: with_bagua([optimizer], ...)")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"with_bagua: {type(optimizer).__name__} is not a torch.optim.Optimizer"
            )
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            "with_bagua: algorithm must be an instance of bagua.torch_api.algorithms.Algorithm, "
            f"such as GradientAllReduceAlgorithm(), not {algorithm!r}"
        )


