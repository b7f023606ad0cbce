"""The opening of a wrapped module's rounds: the loss scale, buffers that are given, weights."""

from __future__ import annotations

import torch

from bagua import BaguaError
from bagua._core.state.shared_state import SharedState, UnevenInputs
from bagua._sync.engine_synchronizer import EngineSynchronizer
from bagua._sync.synchronizer import Synchronizer
from bagua.torch_api._wrapping.owner import Owner, WorkingAlgorithm

__all__ = ["RoundOpening", "scales_gradients"]


def scales_gradients(grad_scaler: torch.amp.GradScaler | None) -> bool:
    """Whether there is a scaler that multiplies the loss."""
    return grad_scaler is not None and grad_scaler.is_enabled()


class RoundOpening:
    """Opens rounds, and decides on the state that a round gives or checks.

    Attributes:
        buffers_due: whether the next forward gets the first rank's buffers: it is the first, or the
            forward before communicated.
        eager: open rounds at the forward in ``eval()`` too, and once per round only (``join()``).
        uneven_inputs: differences of the next round in which ranks may have run out of inputs.
    """

    def __init__(self, shared: SharedState, grad_scaler: torch.amp.GradScaler | None) -> None:
        self.buffers_due = True
        self.eager = False
        self.uneven_inputs = UnevenInputs()
        self._shared = shared
        self._grad_scaler = grad_scaler

    @property
    def scales_gradients(self) -> bool:
        """Whether the wrap was given a scaler that multiplies the loss."""
        return scales_gradients(self._grad_scaler)

    def at_forward(self, owner: Owner, running: Synchronizer, *, syncs: bool, opens: bool) -> None:
        """Open a round or continue the open one, if the forward ``opens``; share buffers.

        ``syncs``: whether the forward's backward would communicate.
        """
        first = opens and self._begin(owner.bagua_algorithm, running)
        gives = self._share_buffers(owner, running.rounds, syncs, opens)
        if first and running.rounds is not None:
            self._check(owner, running.rounds, with_buffers=gives)

    def refuse_in_backward(self, owner: Owner) -> None:
        """Raise BaguaError where a backward cannot open the round of its own."""
        if self.eager or owner.bagua_algorithm.opens_at_forward:
            where = "Inside join()"
            if not self.eager:
                where = f"With {type(owner.bagua_algorithm).__name__}"
            raise BaguaError(
                f"module '{owner.bagua_module_name}': a second backward through one forward, or "
                f"through a forward of an earlier step. {where} every forward has one "
                "backward: add the losses, or run the forward again."
            )

    def in_backward(self, owner: Owner, running: Synchronizer) -> None:
        """Open the round of a backward whose forward has not opened it."""
        first = self._begin(owner.bagua_algorithm, running)
        if first and running.rounds is not None:
            self._check(owner, running.rounds, with_buffers=False)

    def without_inputs(self, owner: Owner, rounds: EngineSynchronizer) -> None:
        """Open a round of the ranks that still have inputs, on one that has none."""
        rounds.engine.begin_round(check_weights=False)  # no inputs, no optimizer's step
        rounds.step_begins(1.0, self.uneven_inputs.result_scale)
        self._shared.give_buffers(owner.module, rounds, self.uneven_inputs)
        self._check(owner, rounds, with_buffers=True)

    def _begin(self, algorithm: WorkingAlgorithm, running: Synchronizer) -> bool:
        """Open a round, or continue the open one; return whether it has just begun."""
        scale = 1.0
        if self._grad_scaler is not None and algorithm.reads_grad_scale:
            scale = self._grad_scaler.get_scale()
        return running.step_begins(scale, self.uneven_inputs.result_scale)

    def _share_buffers(
        self, owner: Owner, rounds: EngineSynchronizer | None, syncs: bool, opens: bool
    ) -> bool:
        """Give every rank the first rank's buffers at the moments of torch's DDP, or return False.

        A forward gets them if it is the first, or the forward before communicated.
        """
        due = opens if self.eager else self.buffers_due
        self.buffers_due = syncs
        if not due or rounds is None:
            return False
        self._shared.give_buffers(owner.module, rounds, self.uneven_inputs)
        return True

    def _check(self, owner: Owner, rounds: EngineSynchronizer, *, with_buffers: bool) -> None:
        """Compare the weights, and what the guard has sampled, where that is due."""
        step = owner.bagua_train_step_counter
        self._shared.check_weights(
            owner.module, rounds, self.uneven_inputs, step, with_buffers=with_buffers
        )
        if owner.guard is not None:
            owner.guard.begin_round(rounds, self._shared.traffic)
