"""Bagua's algorithms under ``transformers.Trainer``: ``use(trainer, algorithm)``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import transformers

from bagua.integrations import accelerate as _accelerate
from bagua.integrations.accelerate import Hooks, Wrapped, load_hooks, save_hooks
from bagua.torch_api.algorithms import Algorithm

__all__ = ["TESTED", "use"]

#: The release of transformers that the tests of this module run with.
TESTED = "5.23.0"

#: Methods of ``Trainer`` that are extended: two with the folder of a checkpoint as their argument,
#: and one that searches for hyperparameters call, for a new ``Accelerator``.
_SAVE = "_save_optimizer_and_scheduler"
_LOAD = "_load_optimizer_and_scheduler"
_NEW_ACCELERATOR = "create_accelerator_and_postprocess"
#: Those at the end of local training, and those that evaluate or save the model.
_LOAD_BEST = "_load_best_model"
_TRAIN = "train"
_SHOWN = ("evaluate", "predict", "save_model")
#: A method that is called before each step, and the argument by which it gathers numbers of tokens;
#: older releases have neither.
_NEXT_BATCHES = "get_batch_samples"
_AVERAGES_TOKENS = "average_tokens_across_devices"
#: The forward and backward of a micro-batch; the trainer adds up the losses that it returns.
_STEP = "training_step"
_METHODS = (_SAVE, _LOAD, _NEW_ACCELERATOR, _LOAD_BEST, _TRAIN, _STEP, *_SHOWN)


def use(
    trainer: transformers.Trainer, algorithm: str | Algorithm, *, samples: bool = False
) -> Hooks:
    """Have ``trainer`` train by ``algorithm``. Call it on every rank::

        trainer = Trainer(model, arguments, train_dataset=data)
        hooks = use(trainer, ByteGradAlgorithm())
        trainer.train()

    Checkpoints of the trainer include what the algorithm remembers, one file per rank. ``train``
    raises RuntimeError where the trainer has left the module of several ranks without a hook.

    With an algorithm that does more than reduce gradients the model is given to ``bagua.wrap``,
    without ``DistributedDataParallel``. With ``diloco`` ``train`` evaluates and saves the
    anchor, and ends with an outer round, so that all ranks end with the same weights. Where ranks
    hold different weights ``average_tokens_across_devices`` is off.

    Args:
        algorithm: a registered name, or an object of ``bagua.torch_api.algorithms``.
        samples: ranks weigh in each step by their numbers of tokens, ``num_items_in_batch``, or of
            samples where the trainer counts no tokens. The trainer then gathers no numbers
            (``average_tokens_across_devices`` is off), which saves a wait in every step. The loss
            that it logs is that of all tokens; with rounds it is the mean of the ranks' losses.

    Returns:
        The hooks, for their statistics.

    Raises:
        TypeError: ``trainer`` or ``algorithm`` is something else.
        RuntimeError: training has begun, or ``use`` was called before; this release of transformers
            or Accelerate lacks a method that is needed.
        NotImplementedError: the trainer shards the model (FSDP1, DeepSpeed, ...; FSDP2 takes
            ``bytegrad``), or trains on several GPUs in one process.
        ValueError: the accelerator's handler has its own communication hook.
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
    _extend_rounds(trainer, hooks)
    if samples and not hasattr(trainer, _NEXT_BATCHES):
        raise RuntimeError(
            f"use(samples=True): the Trainer of transformers {transformers.__version__} has no "
            f"{_NEXT_BATCHES}; transformers {TESTED} is known to work"
        )
    _count_own_tokens(trainer, hooks, samples)
    return hooks


def _count_own_tokens(trainer: Any, hooks: Hooks, samples: bool) -> None:
    """Divide losses by this rank's tokens where ranks weigh by them, or train by themselves.

    Gathering the numbers of all ranks, ``average_tokens_across_devices``, is a wait in every step.
    The arguments, which may be another trainer's too, are copied.
    """

    @contextmanager
    def alone() -> Iterator[None]:
        own = (part.session.bagua_algorithm.traits.ranks_agree is False for part in _wrapped(hooks))
        if getattr(trainer.args, _AVERAGES_TOKENS, False) and (samples or any(own)):
            trainer.args = copy.copy(trainer.args)
            setattr(trainer.args, _AVERAGES_TOKENS, False)
        yield

    if not hasattr(trainer, _NEXT_BATCHES):
        return
    _surround(trainer, _NEXT_BATCHES, alone)
    next_batches = getattr(trainer, _NEXT_BATCHES)

    def say(*arguments: Any, **options: Any) -> Any:
        batches, tokens = next_batches(*arguments, **options)
        rows = (len(next(iter(batch.values()))) for batch in batches)
        hooks.bagua_samples(sum(rows) if tokens is None else tokens)
        return batches, tokens

    if samples:
        setattr(trainer, _NEXT_BATCHES, say)
        _weigh_losses(trainer, hooks)


def _weigh_losses(trainer: Any, hooks: Hooks) -> None:
    """Multiply losses that the trainer adds up by the rank's weight, as gradients are.

    The mean over the ranks, which it logs, is then the loss of all tokens. Ranks know their weights
    with the last backward of a window, so that the window's losses are returned there.
    """
    step = getattr(trainer, _STEP)
    held: list[torch.Tensor] = []

    def weighed(*arguments: Any, **options: Any) -> torch.Tensor:
        held.append(step(*arguments, **options))
        if not trainer.accelerator.sync_gradients:
            return torch.zeros_like(held[-1])
        loss, weight = torch.stack(held).sum(), hooks.weight
        held.clear()
        # A rank without tokens may have NaN.
        return loss * weight if weight else torch.zeros_like(loss)

    @contextmanager
    def window() -> Iterator[None]:
        held.clear()  # of a training that has ended inside one
        yield

    setattr(trainer, _STEP, weighed)
    _surround(trainer, _NEXT_BATCHES, window)


def _extend_rounds(trainer: Any, hooks: Hooks) -> None:
    """Evaluate and save the weights that ranks share while training, and end with them."""

    @contextmanager
    def shared() -> Iterator[None]:
        with ExitStack() as stack:
            for part in _wrapped(hooks) if trainer.is_in_train else ():
                stack.enter_context(part.session.bagua_algorithm.anchor())
            yield

    train, load_best_model = getattr(trainer, _TRAIN), getattr(trainer, _LOAD_BEST)
    ended = False

    def end() -> None:
        nonlocal ended
        for part in () if ended else _wrapped(hooks):
            part.session.pause()
            part.session.bagua_algorithm.sync()
        ended = True

    def train_to_the_end(*arguments: Any, **options: Any) -> Any:
        nonlocal ended
        ended = False
        result = train(*arguments, **options)
        end()
        return result

    def end_and_load_best_model() -> None:
        end()
        load_best_model()

    setattr(trainer, _TRAIN, train_to_the_end)
    setattr(trainer, _LOAD_BEST, end_and_load_best_model)
    for name in _SHOWN:
        _surround(trainer, name, shared)


def _wrapped(hooks: Hooks) -> list[Wrapped]:
    return [handle for handle in hooks.handles[-1:] if isinstance(handle, Wrapped)]


def _extend(trainer: Any, name: str, after: Callable[..., None]) -> None:
    method = getattr(trainer, name)

    def extended(*arguments: Any) -> None:
        method(*arguments)
        after(*arguments)

    setattr(trainer, name, extended)


def _surround(trainer: Any, name: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    method = getattr(trainer, name)

    def surrounded(*arguments: Any, **options: Any) -> Any:
        with context():
            return method(*arguments, **options)

    setattr(trainer, name, surrounded)
