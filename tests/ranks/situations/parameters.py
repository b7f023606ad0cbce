"""Kinds of parameters: dtypes, sparse, lazy, ignored, of other shapes on other ranks."""

import warnings

import torch
from ranks.situations.rows import better, raises, row
from ranks.situations.values import batch, everything, perceptron, trained, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def no_trainable_parameter(wrap, rank, size):
    module = perceptron(seed=rank)
    module.requires_grad_(False)
    wrap(module)
    return weights(module)


def a_lazy_parameter(wrap, rank, size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.LazyLinear(3)
    wrap(module)
    return {}


def other_shapes_on_another_rank(wrap, rank, size):
    wrap(nn.Linear(3 + rank, 2))
    return {}


def parameters_in_another_order_on_another_rank(wrap, rank, size):
    module = nn.Module()
    torch.manual_seed(0)
    layers = {"a": nn.Linear(3, 2), "b": nn.Linear(2, 2)}
    for name in sorted(layers, reverse=rank == 1):
        setattr(module, name, layers[name])
    wrap(module)
    return {}


def half_precision_parameters(wrap, rank, size):
    module = perceptron().bfloat16()
    trained(wrap, rank, module, data=lambda s, r: batch(s, r).bfloat16())
    return everything(module)


def mixed_precision_parameters(wrap, rank, size):
    """Parameters of two dtypes."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(5, 4), nn.Linear(4, 2).double()

        def forward(self, inputs):
            return self.other(self.one(inputs).double())

    module = Mixed()
    trained(wrap, rank, module)
    return everything(module)


def _embedding(sparse):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 3, sparse=sparse), nn.Linear(3, 2))


def _tokens(step, rank):
    return torch.tensor([[(step + rank) % 7, (2 * step + rank) % 7, 0]])


def sparse_embedding(wrap, rank, size):
    module = _embedding(True)
    _model, _ = trained(wrap, rank, module, data=_tokens)
    return everything(module) | {"sparse": module[0].weight.grad.is_sparse}


def ignored_parameters_of_rank_specific_shape(wrap, rank, size):
    """A sharded embedding: each rank has rows of its own."""

    torch.manual_seed(0)
    dense = nn.Linear(3, 2)
    module = nn.Sequential(nn.Embedding(2 + rank, 3), dense)
    nn.init.ones_(module[0].weight)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    trained(wrap, rank, module, data=lambda step, r: torch.tensor([step % 2, r]))
    return everything(module)


NOTHING = better(
    lambda rank, size: weights(perceptron()),
    "there is nothing to communicate, which is not an error",
)


EXCEPTIONS = [
    row(no_trainable_parameter, klass=raises("parameter"), method=NOTHING),
    row(a_lazy_parameter, both=raises("uninitiali[sz]ed|not initialised|lazy|Lazy")),
    row(other_shapes_on_another_rank, both=raises("weight")),
    row(parameters_in_another_order_on_another_rank, both=raises("weight|order")),
]
