"""Layers whose buffers forwards change."""

import torch
from ranks.situations.rows import ONLY_CLASS, better, raises, row
from ranks.situations.values import (
    alone,
    batch,
    buffers,
    everything,
    normalised,
    sgd,
    square_losses,
    train,
    trained,
    weights,
)
from torch import nn


def _train(wrap, rank, between=lambda model: []):
    """What `between(model)` gives after each step is recorded, too."""
    module = normalised()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    outputs = []
    for step in range(4):
        train(model, optimizer, rank, [step])
        outputs += between(model)
    return everything(module) | {"outputs": outputs}


def batch_norm_training(wrap, rank, size):
    """Each rank keeps its own statistics of the last forward."""
    return _train(wrap, rank)


def batch_norm_validation_on_several_batches(wrap, rank, size):
    def between(model):
        model.eval()
        with torch.no_grad():
            outputs = [model(batch(number, 0)).sum() for number in (70, 71, 72)]
        model.train()
        return outputs

    return _train(wrap, rank, between)


def batch_norm_validation_of_the_inner_module(wrap, rank, size):
    """Each rank with its own statistics, if it asks the module; rank 0 saves its own."""

    wrap.need_class()

    def between(model):
        inner = wrap.inner(model)
        inner.eval()
        with torch.no_grad():
            output = inner(batch(70, 0)).sum()
        inner.train()
        return [output]

    return _train(wrap, rank, between)


def batch_norm_evaluation_with_backward(wrap, rank, size):
    """Test-time adaptation: gradients are computed in eval between training steps."""

    def between(model):
        model.eval()
        output = model(batch(77, rank)).square().mean()
        output.backward()
        model.train()
        return [wrap.inner(model)[1].running_mean.clone()]

    return _train(wrap, rank, between)


def batch_norm_recalibrated(wrap, rank, size):
    """Statistics are reset and made anew by forwards in train mode without gradients."""
    module = normalised()
    model, _ = trained(wrap, rank, module, range(2))
    module[1].reset_running_stats()
    with torch.no_grad():
        for step in range(3):
            model(batch(step + 20, rank))
    after = buffers(module, "recalibrated")
    model(batch(9, rank)).square().mean().backward()
    return after | buffers(module)


def spectral_norm_parametrization(wrap, rank, size):
    """Power iteration changes buffers in every training forward."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3))
    module = nn.Sequential(layer)
    trained(wrap, rank, module)
    return everything(module)


def observers_of_quantization(wrap, rank, size):
    """Fake quantisation: ranges are buffers that forwards change."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(5, 4), FakeQuantize(MovingAverageMinMaxObserver), nn.Linear(4, 2)
    )
    trained(wrap, rank, module)
    return everything(module)


def sync_batch_norm_on_cpu(wrap, rank, size):
    """Its training forward is made for accelerators."""
    model = wrap(nn.SyncBatchNorm.convert_sync_batchnorm(normalised()))
    model(batch(0, rank)).square().mean().backward()
    return everything(wrap.inner(model))


def _one_rank_evaluates(wrap, rank, who, after):
    """A rank alone evaluates through the wrapper, without gradients, after some steps."""
    module = normalised()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        if step in after and rank == who:
            model.eval()
            with torch.no_grad():
                model(batch(9, rank))
                model(batch(10, rank))
            model.train()
        train(model, optimizer, rank, [step])
    return weights(module)


def rank_0_evaluates_before_training(wrap, rank, size):
    return _one_rank_evaluates(wrap, rank, 0, [0])


def rank_0_evaluates_between_steps(wrap, rank, size):
    return _one_rank_evaluates(wrap, rank, 0, [1, 2])


def rank_1_evaluates_before_training(wrap, rank, size):
    return _one_rank_evaluates(wrap, rank, 1, [0])


def rank_1_evaluates_between_steps(wrap, rank, size):
    return _one_rank_evaluates(wrap, rank, 1, [1, 2])


def _by_all_ranks(rank, size):
    """Batches are normalised apart, as on ranks."""
    module = normalised()
    return weights(alone(module, sgd(module), square_losses(module, size), 3))


ALONE = better(_by_all_ranks, "torch mixes up its collectives, and fails or hangs")

SITUATIONS = [
    row(batch_norm_training),
    row(rank_0_evaluates_before_training, limit=10.0),
    row(rank_0_evaluates_between_steps, both=ALONE, limit=10.0),
    row(rank_1_evaluates_before_training, limit=10.0),
    row(rank_1_evaluates_between_steps, both=ALONE, limit=10.0),
    row(batch_norm_validation_on_several_batches),
    row(batch_norm_validation_of_the_inner_module, method=ONLY_CLASS),
    row(batch_norm_evaluation_with_backward),
    row(batch_norm_recalibrated),
    row(spectral_norm_parametrization),
    row(observers_of_quantization),
    row(sync_batch_norm_on_cpu, both=raises("SyncBatchNorm")),
]
