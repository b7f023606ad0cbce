"""Uneven inputs: the rounds of ranks without further inputs in torch's ``Join`` context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from bagua._core.state.bagua_tensor import record_of
from bagua._sync.hooks import outside_graphs_lazily
from bagua.torch_api._session import Session

if TYPE_CHECKING:
    from bagua.torch_api.data_parallel.distributed import DistributedDataParallel


# Note [Uneven inputs]
# Before each round, that is before a forward with gradients and with none open, the ranks that have
# inputs do three things, which those that have none answer in the same order:
# 1. torch's notification: how many still have inputs (`Join`).
# 2. Who they are (`meet`): buffers come from the highest of them, and a mean over the initial
#    number of ranks is turned into one over theirs if that was asked for.
# 3. The round. Ranks without inputs contribute zeros (`shadow_round`). Its results are their
#    gradients until the end: ZeroRedundancyOptimizer in the same context steps with them.
# Forwards under no_sync() or no_grad() communicate nothing and need no answer. When all ranks are
# done, the last one to have had inputs gives its state to all, and `.grad` is on the others what it
# was after their last step.


@dataclass(frozen=True)
class RanksWithInputs:
    """Those of a round inside ``join()``, as ``Session.joining``, which is None outside.

    Attributes:
        buffers_source: the rank whose buffers all get.
        result_scale: for communicated gradients.
    """

    buffers_source: int = 0
    result_scale: float = 1.0


class Shadow(JoinHook):
    """Steps of one rank once it has no inputs left."""

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        torch_group(ddp)  # raises where there is none
        ddp.divide_by_initial_world_size = divide_by_initial_world_size
        self._ddp = ddp
        self._own_gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]] | None = None

    def main_hook(self) -> None:
        """Answer one round of the others."""
        ddp = self._ddp
        check_algorithm(ddp.bagua_ddp)
        self._keep_gradients()
        ddp.bagua_ddp.shadow_round(meet(ddp, has_inputs=False))
        self._hand_out_gradients()

    def _keep_gradients(self) -> None:
        if self._own_gradients is None:
            named = self._ddp.bagua_ddp.bagua_build_params()
            self._own_gradients = [
                (p, None if p.grad is None else p.grad.detach().clone()) for _, p in named
            ]

    @torch.no_grad()
    def _hand_out_gradients(self) -> None:
        """Make the results the gradients, where some rank has one."""
        inner = self._ddp.bagua_ddp
        may_be_unused = inner.find_unused_parameters or inner.static_graph
        for bucket in inner.bagua_buckets:
            for index, parameter in enumerate(bucket.tensors):
                rows = record_of(parameter).sparse
                result = bucket.view_of(index).clone() if rows is None else rows.result
                if result is None:
                    continue
                used = rows is not None or bool(result.any())
                if parameter.grad is not None or not may_be_unused or used:
                    parameter.grad = result

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks take over the state of the highest rank that had inputs to the end."""
        ddp = self._ddp
        source = max(_who(ddp, is_last_joiner))
        inner = ddp.bagua_ddp
        inner.joining = None
        inner.give_state(source, buffers=inner.broadcast_buffers)
        for parameter, gradient in self._own_gradients or ():
            parameter.grad = gradient
        ddp._join_config = ddp._join_config._replace(enable=False)  # from here on no rank answers


def check_algorithm(ddp: Session) -> None:
    algorithm = ddp.bagua_algorithm
    traits = algorithm.traits
    if traits.ranks_agree and not traits.steps_on_gradients:
        raise NotImplementedError(
            f"join() with {type(algorithm).__name__}: a rank without inputs makes no optimizer "
            "step, and would send momentum that is out of date. Give every rank the same number "
            "of inputs, or use gradient_allreduce, bytegrad, power_sgd or sparse."
        )
    if traits.remembers_gradients and ddp.scales_gradients:
        raise NotImplementedError(
            f"join() with {type(algorithm).__name__} and grad_scaler=: a rank without inputs does "
            "not know the loss scale, and would send its residual in the wrong unit. Give every "
            "rank the same number of inputs, use bfloat16 without a scaler, or gradient_allreduce "
            "or bytegrad."
        )
    if not traits.takes_uneven_inputs:
        raise NotImplementedError(
            "join() is for algorithms that communicate gradients: gradient_allreduce, bytegrad, "
            f"power_sgd and sparse; with {type(algorithm).__name__} give every rank the same "
            "number of inputs"
        )


def meet(ddp: DistributedDataParallel, has_inputs: bool) -> RanksWithInputs:
    """Find out who takes part in the next round: step 2 of Note [Uneven inputs]."""
    active = _who(ddp, has_inputs)
    inner = ddp.bagua_ddp
    means = getattr(inner.bagua_algorithm, "average", True)  # a sum is divided by nothing
    keep = ddp.divide_by_initial_world_size or not means
    scale = 1.0 if keep else inner.process_group.size / len(active)
    return RanksWithInputs(max(active), scale)


@outside_graphs_lazily
def announce(ddp: DistributedDataParallel) -> None:
    """Steps 1 and 2 of Note [Uneven inputs], before each forward on a rank that has inputs."""
    inner = ddp.bagua_ddp
    inner.joining = inner.joining or RanksWithInputs()
    if not inner.opens_round():
        return
    check_algorithm(inner)
    work = Join.notify_join_context(ddp)
    if work is not None:
        work.wait()
    inner.joining = meet(ddp, has_inputs=True)


def _who(ddp: DistributedDataParallel, this_one: bool) -> list[int]:
    group = ddp.bagua_ddp.process_group
    says = torch.zeros(group.size, device=ddp.join_device)
    says[group.rank] = float(this_one)
    dist.all_reduce(says, group=torch_group(ddp))
    return [rank for rank, said in enumerate(says.tolist()) if said]


def torch_group(ddp: Any) -> dist.ProcessGroup:
    """The torch group of the wrapped module, or an error: bagua's group has some of the ranks."""
    group = ddp.process_group
    if not isinstance(group, dist.ProcessGroup):
        raise NotImplementedError(
            "join() needs a torch process group: pass the one of torch.distributed.new_group() "
            "as process_group="
        )
    return group
