"""Compressed gradients under ``transformers.Trainer``: ``use(trainer, algorithm)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from bagua.integrations import accelerate as _accelerate
from bagua.integrations.accelerate import Hooks, load_hooks, save_hooks
from bagua.torch_api.algorithms import Algorithm

__all__ = ["TESTED", "use"]

#: The release of transformers that the tests of this module run with.
TESTED = "5.23.0"

#: Methods of ``Trainer`` that are extended: two with the folder of a checkpoint as their argument,
#: and one that searches for hyperparameters call, for a new ``Accelerator``.
_SAVE = "_save_optimizer_and_scheduler"
_LOAD = "_load_optimizer_and_scheduler"
_NEW_ACCELERATOR = "create_accelerator_and_postprocess"
_METHODS = (_SAVE, _LOAD, _NEW_ACCELERATOR)


def use(trainer: transformers.Trainer, algorithm: str | Algorithm) -> Hooks:
    """Have ``trainer`` reduce gradients by ``algorithm``. Call it on every rank::

        trainer = Trainer(model, arguments, train_dataset=data)
        hooks = use(trainer, ByteGradAlgorithm())
        trainer.train()

    Checkpoints of the trainer include what the algorithm remembers, one file per rank. ``train``
    raises RuntimeError where the trainer has left the module of several ranks without a hook.

    Args:
        algorithm: one that reduces gradients, as ``bagua.comm_hooks.register`` takes it.

    Returns:
        The hooks, for their statistics.

    Raises:
        TypeError: ``trainer`` or ``algorithm`` is something else.
        RuntimeError: training has begun, or ``use`` was called before; this release of transformers
            or Accelerate lacks a method that is needed.
        NotImplementedError: the trainer shards the model (FSDP, DeepSpeed, ...), or trains on
            several GPUs in one process.
        ValueError: the accelerator's handler has a communication hook of its own.
    """
    # Checks
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"use takes a transformers.Trainer, not a {type(trainer).__qualname__}")
    missing = [name for name in ("accelerator", *_METHODS) if not hasattr(trainer, name)]
    if missing:
        raise RuntimeError(
            f"use: the Trainer of transformers {transformers.__version__} has no "
            f"{' and no '.join(missing)}; transformers {TESTED} is known to work"
        )
    if trainer.args.n_gpu > 1:
        raise NotImplementedError(
            f"use: this trainer uses {trainer.args.n_gpu} GPUs in one process (DataParallel), "
            "where nothing is communicated; start a process per GPU with torchrun"
        )

    hooks = _accelerate.use(trainer.accelerator, algorithm)

    def load(folder: str | None) -> None:
        if folder is not None:
            load_hooks(hooks.handles[-1:], folder)

    _extend(trainer, _SAVE, lambda folder: save_hooks(hooks.handles[-1:], folder))
    _extend(trainer, _LOAD, load)
    _extend(
        trainer,
        _NEW_ACCELERATOR,
        lambda: _accelerate.install(trainer.accelerator, algorithm, hooks),
    )
    return hooks


def _extend(trainer: Any, name: str, after: Callable[..., None]) -> None:
    """Have ``trainer``'s method call ``after`` with the same arguments."""
    method = getattr(trainer, name)

    def extended(*arguments: Any) -> None:
        method(*arguments)
        after(*arguments)

    setattr(trainer, name, extended)
