"""State that synchronous ranks share besides gradients: weights, optimizer state, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bagua import _C, __version__
from bagua._core.group import environment as env
from bagua._core.group.connections import Connections
from bagua._core.state.initial_state import broadcast_state, broadcast_tensors
from bagua._core.state.snapshot import ModuleSnapshot
from bagua._core.state.statistics import MainThreadTraffic
from bagua._core.state.weights_check import WeightsCheck, sample

__all__ = ["SharedState", "UnevenInputs"]


class RoundOwner(Protocol):
    """The synchronizer that has opened the round."""

    def await_agreement(self) -> None:
        """Block until all ranks are in it."""

    def part_of_the_round(self) -> AbstractContextManager[None]:
        """A failure inside fails the round."""


@dataclass(frozen=True)
class UnevenInputs:
    """Differences of a round in which some ranks may have run out of inputs.

    Attributes:
        source: the rank whose buffers all ranks get: one that still has inputs.
        result_scale: factor for the communicated gradients.
        complete: whether all ranks still have inputs.
    """

    source: int = 0
    result_scale: float = 1.0
    complete: bool = True


class SharedState:
    """Gives the ranks the same state at the wrap, and keeps and checks it before rounds.

    Attributes:
        traffic: counted since :meth:`restart_counting`.
    """

    def __init__(
        self,
        snapshot: ModuleSnapshot,
        optimizers: Sequence[torch.optim.Optimizer],
        connections: Connections,
        module_name: str,
        *,
        with_buffers: bool,
        ranks_agree: bool | None,
    ) -> None:
        self._snapshot = snapshot
        self._optimizers = optimizers
        self._connections = connections
        self._with_buffers = with_buffers
        every = 0 if ranks_agree is False else env.get_check_weights_every()
        self._check = WeightsCheck(every or 0, module_name, connections)
        self.traffic = MainThreadTraffic(connections)

    def describe(self, module: torch.nn.Module, arguments: dict[str, Any]) -> list[str]:
        """Lines that are equal on all ranks where module, arguments and environment are."""
        every = env.get_check_weights_every()
        return [
            f"bagua {__version__}",
            *(f"{name}{value}" for name, value in arguments.items()),
            f"BAGUA_CHECK_WEIGHTS_EVERY={'unset' if every is None else every}",
            f"BAGUA_CHECKSUM={int(env.get_checksum())}",
            *self._snapshot.describe(module),
        ]

    def weights_sample(
        self, module: torch.nn.Module, ranks_agree: bool | None
    ) -> _C.WeightsSample | None:
        """The part of the weights that each round compares; None: nothing."""
        if (
            self._connections.size == 1
            or not ranks_agree
            or env.get_check_weights_every() is not None
        ):
            return None
        return sample(self._snapshot.common_parameters(module))

    def restart_counting(self) -> None:
        """From now on :attr:`traffic` counts from zero."""
        self.traffic = MainThreadTraffic(self._connections)

    def give(self, module: torch.nn.Module, source: int, buffers: bool) -> None:
        """Give every rank the parameters, optimizer state and perhaps buffers of ``source``."""
        tensors = self._snapshot.state(module)
        tensors += self._snapshot.buffers(module) if buffers else []
        broadcast_state(tensors, self._optimizers, self._connections, source)

    def give_buffers(self, module: torch.nn.Module, plan: RoundOwner, inputs: UnevenInputs) -> None:
        """Give every rank the buffers of one, as a part of the open round or the next."""
        buffers = self._snapshot.buffers(module) if self._with_buffers else []
        if self._connections.size == 1 or not buffers:
            return
        plan.await_agreement()
        with self.traffic.counted("buffers"), plan.part_of_the_round():
            broadcast_tensors(buffers, self._connections, inputs.source)

    def check_weights(
        self,
        module: torch.nn.Module,
        plan: RoundOwner,
        inputs: UnevenInputs,
        step: int,
        *,
        with_buffers: bool,
    ) -> None:
        """Compare the weights if that is due. Called at the beginning of a round.

        Args:
            with_buffers: compare buffers too: they have just been given.

        Raises:
            BaguaMismatchError: the check found a difference.
        """
        # Ranks without inputs make no optimizer steps: their weights are not the others'.
        if self._connections.size == 1 or not inputs.complete or not self._check.due():
            return
        plan.await_agreement()
        named = self._snapshot.equal_everywhere(module, with_buffers and self._with_buffers)
        with self.traffic.counted("check"), plan.part_of_the_round():
            self._check.compare(named, step)
