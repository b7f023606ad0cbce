"""Uneven inputs: what ranks that have run out of them do in torch's ``Join`` context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from bagua.torch_api._shared_state import UnevenInputs
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithmImpl
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from bagua.torch_api.data_parallel._comm_hook import CommHook

if TYPE_CHECKING:
    from bagua.torch_api.data_parallel._torch_members import TorchMembers

__all__ = ["Shadow", "announce", "join_group"]


# Note [Uneven inputs]
# Before each round, that is before a training forward with none open, the ranks that have inputs
# do three things, which those that have none answer in the same order:
# 1. torch's notification: how many still have inputs (`Join`).
# 2. Who they are (`meet`): buffers come from the highest of them, and a mean over the initial
#    number of ranks is turned into one over theirs if that was asked for.
# 3. The round. Ranks without inputs contribute zeros (`shadow_round`).
# Forwards under no_sync(), no_grad() or eval() communicate nothing and need no answer. When all
# ranks are done, the last one to have had inputs gives its state to all.


class Shadow(JoinHook):
    """What one rank does once it has no inputs left.

    Raises:
        NotImplementedError: the algorithm is no synchronous one of gradients.
    """

    def __init__(self, ddp: TorchMembers, divide_by_initial_world_size: bool) -> None:
        algorithm = ddp.bagua_ddp.bagua_algorithm
        if not isinstance(algorithm, (GradientAllReduceAlgorithmImpl, ByteGradAlgorithmImpl)):
            raise NotImplementedError(
                f"join() is for gradient_allreduce and bytegrad; with {type(algorithm).__name__} "
                "give every rank the same number of inputs"
            )
        join_group(ddp)  # raises where there is none
        ddp.divide_by_initial_world_size = divide_by_initial_world_size
        self._ddp = ddp

    def main_hook(self) -> None:
        """Answer one round of the others."""
        meet(self._ddp, has_inputs=False)
        self._ddp.bagua_ddp.shadow_round()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks take over the state of the highest rank that had inputs to the end."""
        ddp = self._ddp
        source = max(_who(ddp, is_last_joiner))
        inner = ddp.bagua_ddp
        inner.uneven_inputs = UnevenInputs()
        inner.give_state(source, buffers=inner.broadcast_buffers)
        ddp._join_config = ddp._join_config._replace(enable=False)  # from here on nobody answers


def meet(ddp: TorchMembers, has_inputs: bool) -> None:
    """Find out who takes part in the next round: step 2 of Note [Uneven inputs]."""
    active = _who(ddp, has_inputs)
    inner = ddp.bagua_ddp
    means = getattr(inner.bagua_algorithm, "average", True)
    # A hook divides by itself, a sum is divided by nothing.
    keep = ddp.divide_by_initial_world_size or not means
    keep = keep or isinstance(inner.bagua_algorithm, CommHook)
    scale = 1.0 if keep else inner.process_group.size / len(active)
    inner.uneven_inputs = UnevenInputs(
        max(active), scale, complete=len(active) == inner.process_group.size
    )


def announce(ddp: TorchMembers) -> None:
    """Steps 1 and 2 of Note [Uneven inputs] on a rank that has inputs."""
    work = Join.notify_join_context(ddp)
    if work is not None:
        work.wait()
    meet(ddp, has_inputs=True)


def _who(ddp: TorchMembers, this_one: bool) -> list[int]:
    """The ranks, as the bagua group numbers them, that say True."""
    group = ddp.bagua_ddp.process_group
    says = torch.zeros(group.size, device=ddp.join_device)
    says[group.rank] = float(this_one)
    dist.all_reduce(says, group=join_group(ddp))
    return [rank for rank, said in enumerate(says.tolist()) if said]


def join_group(ddp: TorchMembers) -> dist.ProcessGroup:
    """The torch group of the wrapped module.

    Raises:
        NotImplementedError: it was wrapped with a bagua group of some of the ranks.
    """
    group = ddp.process_group
    if not isinstance(group, dist.ProcessGroup):
        raise NotImplementedError(
            "join() needs a torch process group: pass the one of torch.distributed.new_group() "
            "as process_group="
        )
    return group
