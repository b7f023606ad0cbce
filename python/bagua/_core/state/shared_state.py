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
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.initial_state import (
    InitialState,
    broadcast_state,
    broadcast_tensors,
)
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
        with_buffers: whether forwards give every rank the first rank's buffers.
        traffic: counted since :meth:`restart_counting`.
    """

    def __init__(
        self,
        snapshot: ModuleSnapshot,
        optimizers: Sequence[torch.optim.Optimizer],
        group: BaguaProcessGroup,
        module_name: str,
        *,
        with_buffers: bool,
        ranks_agree: bool | None,
        initial_state: InitialState,
    ) -> None:
        self._snapshot = snapshot
        self._optimizers = optimizers
        self._group = group
        self.with_buffers = with_buffers
        self._initial_state = initial_state
        self._description: list[str] = []
        every = 0 if ranks_agree is False else env.get_check_weights_every()
        self._check = WeightsCheck(every or 0, module_name, group.connections)
        self.traffic = MainThreadTraffic(group.connections)

    @property
    def _connections(self) -> Connections:
        return self._group.connections

    def describe(self, module: torch.nn.Module, arguments: dict[str, Any]) -> SharedState:
        """Note lines that are equal on all ranks where module, arguments and environment are."""
        every = env.get_check_weights_every()
        self._description = [
            f"bagua {__version__}",
            *(f"{name}{value}" for name, value in arguments.items()),
            f"initial state {self._initial_state}",
            f"BAGUA_CHECK_WEIGHTS_EVERY={'unset' if every is None else every}",
            f"BAGUA_CHECKSUM={int(env.get_checksum())}",
            *self._snapshot.describe(module),
        ]
        return self

    def agree(self) -> None:
        """Check that all ranks have described the same. All ranks call it.

        Raises:
            BaguaMismatchError: on all ranks, naming the first difference.
        """
        self._connections.agree("the model or the arguments of with_bagua", self._description)

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

    def give_initial(self, module: torch.nn.Module) -> None:
        """Give every rank the first rank's state, as far as the wrap asks for it."""
        if self._initial_state != "nothing":
            self.give(module, 0, buffers=self._initial_state == "all")

    def welcome(self, module: torch.nn.Module) -> None:
        """Do what ranks that join do in their wraps; one rank gives them its state."""
        self.agree()
        if self._group.admission is not None:
            self.give_initial(module)

    def give(self, module: torch.nn.Module, source: int, buffers: bool) -> None:
        """Give every rank the parameters, optimizer state and perhaps buffers of ``source``.

        While ranks join a group at work, every rank is the giver, 0, and those that join.
        """
        tensors = self._snapshot.state(module)
        tensors += self._snapshot.buffers(module) if buffers else []
        connections = self._group.admission or self._connections
        broadcast_state(tensors, self._optimizers, connections, source)

    def give_buffers(self, module: torch.nn.Module, plan: RoundOwner, inputs: UnevenInputs) -> None:
        """Give every rank the buffers of one, as a part of the open round or the next."""
        buffers = self._snapshot.buffers(module) if self.with_buffers else []
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
        named = self._snapshot.equal_everywhere(module, with_buffers and self.with_buffers)
        with self.traffic.counted("check"), plan.part_of_the_round():
            self._check.compare(named, step)
