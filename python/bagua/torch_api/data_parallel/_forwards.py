"""Steps before and after each forward of the class, outside of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

from bagua._sync.hooks import tensors_in
from bagua._sync.outside_graphs import outside_graphs_lazily
from bagua.torch_api._wrapper import BaguaDistributedDataParallel

__all__ = ["BufferHook", "Forwards", "Location", "refuse_backward"]

IS_A_COPY = (
    "this DistributedDataParallel is a copy or was unpickled, and communicates from its first "
    "forward in training mode on: call train() before it, or wrap copy.module on every rank"
)


@dataclass(frozen=True)
class BufferHook:
    """A user's function that synchronises the buffers in place of the broadcast.

    Attributes have torch's names: ``ddp.buffer_hook`` is one of these.
    """

    buffer_comm_hook: Callable[[Any, dict[str, torch.Tensor]], Any]
    buffer_comm_hook_state: Any
    buffer_comm_hook_location: Location

    @torch.no_grad()
    def run(self, buffers: dict[str, torch.Tensor]) -> None:
        """Call it if there are buffers, and wait for the futures that it may have returned."""
        if not buffers:
            return
        futures = self.buffer_comm_hook(self.buffer_comm_hook_state, buffers)
        for future in futures or ():
            future.wait()


class Forwards:
    """The steps before and after a wrapped module's forward.

    Attributes:
        buffer_hook: None: buffers are broadcast.
    """

    def __init__(self, ddp: BaguaDistributedDataParallel) -> None:
        self._ddp = ddp
        self._broadcast_buffers = ddp.broadcast_buffers
        self.buffer_hook: BufferHook | None = None
        self._hook_is_due = False

    @property
    def buffers_due(self) -> bool:
        """Whether the forward before communicated, after which buffers are synchronised."""
        return self._ddp.opening.buffers_due

    @buffers_due.setter
    def buffers_due(self, due: bool) -> None:
        self._ddp.opening.buffers_due = due

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are synchronised at all; may be set, on every rank."""
        return self._broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, enabled: bool) -> None:
        self._broadcast_buffers = enabled
        self._tell_core()

    def register_buffer_hook(self, hook: BufferHook) -> None:
        """Replace the broadcast of buffers by ``hook``."""
        self.buffer_hook = hook
        self._tell_core()

    def _tell_core(self) -> None:
        enabled = self._broadcast_buffers and self.buffer_hook is None
        self._ddp.broadcast_buffers = enabled
        self._ddp._shared._with_buffers = enabled

    def before(self, module: torch.nn.Module, inputs: Any) -> None:
        """Synchronise buffers and open the round, where the forward is one that communicates."""
        if self.buffer_hook is not None:
            self._hook_is_due = self._synchronises()
            self._run_hook(self.buffer_hook, Location.PRE_FORWARD)
        self._ddp.before_forward(module, inputs)

    def after(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Have the backward through ``output`` end the round."""
        if self.buffer_hook is not None:
            self._run_hook(self.buffer_hook, Location.POST_FORWARD)
        self._ddp.after_forward(module, inputs, output)

    def before_inner_backward(self, loss: torch.Tensor) -> None:
        """Have a backward from ``loss`` inside the module's forward communicate, or not.

        :meth:`no_sync` around this call decides. Without the call the outer forward decides, and
        algorithms that average weights do not notice such a backward. They begin another round here
        if an earlier backward has ended the forward's.
        """
        ddp = self._ddp
        if (rounds := ddp._rounds) is None:
            return
        communicates = ddp.require_backward_grad_sync and ddp._snapshot.trains(ddp.module)
        if not ddp.bagua_algorithm.opens_at_forward:
            rounds.begin_forward(communicates)
            return
        if ddp.synchronising:
            rounds.begin_forward(communicates)
        else:
            ddp.before_forward(ddp.module, ())
        if communicates:
            rounds.watch(tensors_in(loss))

    def _synchronises(self) -> bool:
        """Whether this forward does. Inside ``join()`` only one that opens a round is answered."""
        if not self._broadcast_buffers:
            return False
        return self.opens_round() if self._ddp.opening.eager else self._ddp.opening.buffers_due

    def opens_round(self) -> bool:
        """Whether a forward now would open a round."""
        ddp = self._ddp
        syncs = torch.is_grad_enabled() and ddp.require_backward_grad_sync
        return syncs and not ddp.synchronising and ddp._snapshot.trains(ddp.module)

    def _run_hook(self, hook: BufferHook, location: Location) -> None:
        if self._hook_is_due and hook.buffer_comm_hook_location == location:
            hook.run(self.named_buffers())

    def answer_hook(self) -> None:
        """Run the hook on a rank without inputs."""
        if self.buffer_hook is not None and self._broadcast_buffers:
            self.buffer_hook.run(self.named_buffers())

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that are not ignored."""
        ignored = self._ddp.parameters_to_ignore
        named = self._ddp.module.named_buffers()
        return {name: buffer for name, buffer in named if name not in ignored}


@outside_graphs_lazily
def refuse_backward(module: torch.nn.Module, output: Any) -> None:
    """Have a backward from ``output`` to a parameter of ``module`` raise: this is a copy."""
    nodes = [get_gradient_edge(p).node for p in module.parameters() if p.requires_grad]

    def refuse(gradient: torch.Tensor) -> None:
        if any(map(torch._C._will_engine_execute_node, nodes)):
            raise RuntimeError(IS_A_COPY)

    for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
        if tensor.grad_fn is not None:
            tensor.register_hook(refuse)
