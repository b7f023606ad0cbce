"""Private members of torch's class that are supported here.

Torch's class keeps a ``reducer`` and a ``logger``, which do not exist here. Each of its methods
that would use them is overridden; ``tests/single/test_ddp_members.py`` compares the lists.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from bagua.torch_api._wrapper import BaguaDistributedDataParallel
from bagua.torch_api.data_parallel import _comm_hook, _join
from bagua.torch_api.data_parallel._forwards import IS_A_COPY, BufferHook, Forwards, Location
from bagua.torch_api.data_parallel._logging_data import logging_data

__all__ = ["TorchInternals"]

_BUILTIN_HOOKS = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


def _nothing(*_: Any) -> None:
    """In place of the steps around a forward, when there are none."""


def _refused(name: str, remedy: str) -> Callable[..., Any]:
    """A method that raises NotImplementedError and says what to do instead."""

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"{name} needs the reducer of torch's class, which this class does not have; {remedy}"
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raises NotImplementedError: {remedy}."
    return refuse


_STEPS = "call the module as a whole: ddp(inputs)"
_JOINS = "use join()"
_WRAPS = "wrap the module again: DistributedDataParallel(ddp.module, ...)"
_CASTS = "use torch.autocast"


class TorchInternals:
    """Private members of torch's class."""

    module: torch.nn.Module
    process_group: Any
    static_graph: bool
    find_unused_parameters: bool
    last_error: str | None = None
    _authoritative_rank: int  # whose state join() gave to all

    # Constants of torch's class, of which some libraries ask.
    logger = None
    mixed_precision = None
    broadcast_bucket_size = 250 * 1024**2
    use_side_stream_for_tensor_copies = False
    _use_python_reducer = False
    _delay_grad_buffer = None
    _delay_all_reduce_all_params = False
    _ddp_sink_clone = True

    @property
    def bagua_ddp(self) -> BaguaDistributedDataParallel:
        """The wrapper that communicates.

        Raises:
            RuntimeError: this is a copy that has not been trained.
        """
        ddp: BaguaDistributedDataParallel | None = self.__dict__.get("_bagua_ddp")
        if ddp is None:
            raise RuntimeError(IS_A_COPY)
        return ddp

    @property
    def forwards(self) -> Forwards:
        """Steps before and after each forward.

        Raises:
            RuntimeError: this is a copy that has not been trained.
        """
        forwards: Forwards | None = self.__dict__.get("_forwards")
        if forwards is None:
            raise RuntimeError(IS_A_COPY)
        return forwards

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Register torch's all-reduce hook, exact or in half precision.

        Raises:
            ValueError: another type.
            RuntimeError, NotImplementedError: as ``register_comm_hook``; no torch process group.
        """
        if comm_hook_type not in _BUILTIN_HOOKS:
            raise ValueError(f"unknown built-in communication hook {comm_hook_type!r}")
        group = _join.torch_group(self, "_register_builtin_comm_hook")
        hook = _BUILTIN_HOOKS[comm_hook_type]
        with self._log_errors():
            _comm_hook.register(self.bagua_ddp, group, hook, str(comm_hook_type))

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: Location = Location.POST_FORWARD,
    ) -> None:
        """Have ``hook(state, {name: buffer})`` synchronise the buffers, not a broadcast.

        It is called before or after each forward that follows one which communicated. The futures
        that it may return are waited for at once.
        """
        if not callable(hook):
            raise TypeError(f"_register_buffer_comm_hook: {hook!r} is not callable")
        self.forwards.register_buffer_hook(BufferHook(hook, state, comm_hook_location))

    def _set_static_graph(self) -> None:
        """``static_graph=True``, after the constructor and before the first forward.

        Raises:
            RuntimeError: training has begun.
        """
        inner = self.bagua_ddp
        with self._log_errors():
            if inner.bagua_train_step_counter > 0:
                raise RuntimeError(
                    "_set_static_graph() should be called before training loop starts"
                )
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        self.static_graph = inner.static_graph = True
        _comm_hook.rebuild(inner, inner.bagua_algorithm, "_set_static_graph")

    @contextmanager
    def _log_errors(self) -> Iterator[None]:
        """The last error raised inside is in :meth:`_get_ddp_logging_data`."""
        try:
            yield
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"
            raise

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """A part of the keys that torch's class has; ``bagua_stats()`` says more."""
        algorithm = self.bagua_ddp.bagua_algorithm
        if isinstance(algorithm, _comm_hook.CommHook):
            return logging_data(self) | {"comm_hook": algorithm.name}
        return logging_data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Nothing: times are counted in every step."""
        if sample_rate < 1:
            raise ValueError(
                "DDP runtime logging sample rate should be equal or greater than 1, not "
                f"{sample_rate}"
            )

    def _remove_autograd_hooks(self) -> None:
        """Take the wrapper off its module, for good: forwards communicate no more."""
        self.bagua_ddp.pause()
        self.bagua_ddp.close()
        self.__dict__.update(_before_forward=_nothing, _after_forward=_nothing)

    def _check_reducer_finalized(self) -> None:
        """Check that the last backward has ended its round.

        Raises:
            RuntimeError: a forward still waits for its backward.
        """
        if self.bagua_ddp.synchronising:
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration: a forward waits for "
                "its backward"
            )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing: outputs are handed out as the module made them."""

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        hook = self.forwards.buffer_hook
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)  # type: ignore[attr-defined]
        else:
            hook.run(self.named_module_buffers)

    def _assign_modules_buffers(self) -> None:
        """Nothing: ``modules_buffers`` is always the current list."""

    def _lazy_init(self) -> None:
        """Nothing: all is set up in the constructor."""

    @property
    def _lazy_init_ran(self) -> bool:
        return True

    @property
    def buffer_hook(self) -> BufferHook:
        hook = self.forwards.buffer_hook
        if hook is None:
            raise AttributeError("no buffer hook is registered")
        return hook

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        return self.forwards.named_buffers()

    @property
    def require_forward_param_sync(self) -> bool:
        return self.forwards.buffers_due

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, due: bool) -> None:
        self.forwards.buffers_due = due

    @property
    def bucket_bytes_cap(self) -> int:
        caps = self.bagua_ddp._bucket_bytes
        return caps if isinstance(caps, int) else max(caps)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        caps = self.bagua_ddp._bucket_bytes
        return [] if isinstance(caps, int) else list(caps)

    @property
    def _module_parameters(self) -> list[torch.nn.Parameter]:
        ignored = self.bagua_ddp.parameters_to_ignore
        return [p for name, p in self.module.named_parameters() if name not in ignored]

    @property
    def _comm_hooks(self) -> list[tuple[_comm_hook.Hook, Any]]:
        algorithm = self.bagua_ddp.bagua_algorithm
        if not isinstance(algorithm, _comm_hook.CommHook):
            return []
        return [(algorithm.hook, algorithm.state)]

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Buckets never change after the wrap; what asks this wants to know when they no longer do,
        and expects the second step."""
        return self.bagua_ddp.bagua_train_step_counter > 1

    _check_global_requires_backward_grad_sync = _refused(
        "_check_global_requires_backward_grad_sync", _JOINS
    )
    _check_and_sync_module_buffers = _refused("_check_and_sync_module_buffers", _JOINS)
    _sync_final_model = _refused("_sync_final_model", _JOINS)
    _match_all_reduce_for_bwd_pass = _refused("_match_all_reduce_for_bwd_pass", _JOINS)
    _match_unused_params_allreduce = _refused("_match_unused_params_allreduce", _JOINS)

    _fire_reducer_autograd_hook = _refused("_fire_reducer_autograd_hook", _CASTS)
    _root_copy_hook = _refused("_root_copy_hook", _CASTS)
    _module_wait_for_copy_hook = _refused("_module_wait_for_copy_hook", _CASTS)

    _register_accum_grad_hook = _refused(
        "_register_accum_grad_hook", "compiled autograd is not supported"
    )
    _setup_in_backward_optimizers = _refused("_setup_in_backward_optimizers", _STEPS)
    _delayed_all_reduce_hook = _refused("_delayed_all_reduce_hook", _STEPS)
    _register_delay_all_reduce_hook = _refused(
        "_register_delay_all_reduce_hook", "pass delay_all_reduce_named_params to the constructor"
    )
    _ddp_init_helper = _refused("_ddp_init_helper", _WRAPS)
    _set_sparse_metadata = _refused(
        "_set_sparse_metadata", "sparse gradients are reduced without metadata"
    )
    _update_process_group = _refused(
        "_update_process_group", "wrap the module again, with process_group="
    )
