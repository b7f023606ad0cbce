"""Saving training whose ranks hold different weights, through torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua._core.state.checkpoint_tree import copied
from bagua._core.state.saved_values import check_state
from bagua.torch_api.distributed import BaguaModule

__all__ = ["PerRank"]


class PerRank:
    """Every rank's own weights and optimizer state, for ``torch.distributed.checkpoint``.

    That module keeps one rank's copy of equal keys, which is right where ranks hold the same bits
    and wrong for decentralized and asynchronous algorithms, and for their optimizers' momentum.
    Here every rank has keys of its own::

        state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
        dcp.save(state, checkpoint_id=path)

        model = model.with_bagua([optimizer], algorithm)  # first: it broadcasts rank 0's weights
        state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
        dcp.load(state, checkpoint_id=path)

    Save and load between two steps, on every rank, with the number of ranks that saved. Weights
    that are being averaged asynchronously are copied at one moment.

    Args:
        model: a module after ``with_bagua``.
        optimizers: default: those given to ``with_bagua``.

    Raises:
        TypeError: the module is not wrapped.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        if not isinstance(model, BaguaModule):
            raise TypeError("PerRank takes a module after with_bagua")
        self._ddp = model.bagua_ddp
        self._optimizers = tuple(model.bagua_optimizers if optimizers is None else optimizers)
        self._key = f"rank{self._ddp.process_group.connections.rank}"

    def state_dict(self) -> dict[str, Any]:
        """``{"rank<r>": {"model": ..., "optimizer": ...}}``, tensors copied."""
        # Not at the top: it takes a second, which every program would pay.
        from torch.distributed.checkpoint.state_dict import get_state_dict

        with self._ddp.exclusive():
            model, optimizer = get_state_dict(self._ddp.module, self._optimizers)
            return {self._key: copied({"model": model, "optimizer": optimizer})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give model and optimizers what :meth:`state_dict` had.

        Raises:
            ValueError: there is nothing of this rank in it, or something else.
        """
        check_state(state, "PerRank")
        if self._key not in state:
            raise ValueError(
                f"the checkpoint has nothing of {self._key}, only {sorted(state)}; load it with "
                "the number of ranks that saved it"
            )
        check_state(state[self._key], f"PerRank: {self._key}")
        if not {"model", "optimizer"} <= set(state[self._key]):
            raise ValueError(
                f"PerRank: {self._key} has {sorted(state[self._key])}, not 'model' and 'optimizer'"
            )
        from torch.distributed.checkpoint.state_dict import set_state_dict

        own = state[self._key]
        with self._ddp.exclusive():
            set_state_dict(
                self._ddp.module,
                self._optimizers,
                model_state_dict=own["model"],
                optim_state_dict=own["optimizer"],
            )
