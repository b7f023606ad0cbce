"""The wrapper that a strategy makes: its arguments, and the algorithm they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel

__all__ = ["Wrapping"]

#: The algorithm whose argument is known only when the optimizers are.
_NEEDS_OPTIMIZER = "qadam"


class Wrapping:
    """Arguments of a strategy.

    Args:
        algorithm: a registered name, or an object.
        arguments: of the algorithm, where it is given by name.
        wrapper: arguments of ``DistributedDataParallel``.

    Raises:
        TypeError: ``algorithm`` is something else, or does not take ``arguments``.
        ValueError: no algorithm has this name, or an argument is out of its range.
    """

    def __init__(
        self, algorithm: str | Algorithm, arguments: Mapping[str, Any], **wrapper: Any
    ) -> None:
        # Checks
        if isinstance(algorithm, Algorithm):
            if arguments:
                raise TypeError(
                    f"BaguaStrategy: {sorted(arguments)} are no arguments of the strategy; pass "
                    f"those of the algorithm to {type(algorithm).__name__} itself"
                )
        elif not isinstance(algorithm, str):
            raise TypeError(
                "BaguaStrategy: algorithm must be a name or an instance of "
                f"bagua.torch_api.algorithms.Algorithm, not {algorithm!r}"
            )
        else:
            _check_name(algorithm, arguments)

        self._algorithm = algorithm
        self._arguments = arguments
        self._wrapper = wrapper

    def wrap(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int] | None,
        optimizers: Sequence[torch.optim.Optimizer],
        grad_scaler: torch.amp.GradScaler | None,
        schedulers: int = 0,
    ) -> DistributedDataParallel:
        """Wrap ``module``. Every rank calls it, after its optimizers were made.

        Args:
            grad_scaler: that of the precision plugin, if it has one.
            schedulers: number of learning rate schedulers.

        Raises:
            ValueError: QAdam without exactly one ``QAdamOptimizer``, or with several schedulers.
            See ``DistributedDataParallel`` for others.
        """
        return DistributedDataParallel(
            module,
            device_ids,
            optimizers=optimizers,
            algorithm=self._reified(optimizers, schedulers),
            grad_scaler=grad_scaler,
            **self._wrapper,
        )

    def _reified(self, optimizers: Sequence[torch.optim.Optimizer], schedulers: int) -> Algorithm:
        if isinstance(self._algorithm, Algorithm):
            return self._algorithm
        if self._algorithm != _NEEDS_OPTIMIZER:
            return _init(self._algorithm, self._arguments)
        if len(optimizers) != 1 or not isinstance(optimizers[0], QAdamOptimizer):
            names = [type(optimizer).__name__ for optimizer in optimizers]
            raise ValueError(
                "BaguaStrategy(algorithm='qadam') needs exactly one optimizer, a QAdamOptimizer "
                f"(bagua.torch_api.algorithms.q_adam), not {names}"
            )
        if schedulers > 1:
            raise ValueError(
                "BaguaStrategy(algorithm='qadam') takes one learning rate scheduler, not "
                f"{schedulers}"
            )
        return _init(self._algorithm, {"q_adam_optimizer": optimizers[0], **self._arguments})


def _check_name(name: str, arguments: Mapping[str, Any]) -> None:
    try:
        GlobalAlgorithmRegistry.get(name)
    except KeyError as error:
        raise ValueError(f"BaguaStrategy: {error.args[0]}") from None
    if name != _NEEDS_OPTIMIZER:
        _init(name, arguments)


def _init(name: str, arguments: Mapping[str, Any]) -> Algorithm:
    try:
        return Algorithm.init(name, **arguments)
    except TypeError as error:
        raise TypeError(f"BaguaStrategy(algorithm={name!r}): {error}") from error
