"""Training on ranks, the same training in one process on all ranks' data, and bits to compare.

What runs on ranks is decorated with `with_group`. Data is a function of step and rank, so that one
process can be given what all ranks saw. Models and data are on `device()`.
"""

import copy
import functools
import hashlib
import logging
import os
import warnings
from datetime import timedelta

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
)
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

FEATURES, OUTPUTS, ROWS = 5, 3, 4
TIMEOUT = timedelta(seconds=60)

# For `env=`: every parameter has a separate bucket, so that some run before backward is over.
SMALL_BUCKETS = {"BAGUA_DEFAULT_BUCKET_SIZE": "1"}


def on_device(name):
    """For `env=`: ranks that train on "cpu", on "cuda", where they may share a GPU, or on "nccl":
    each on a separate GPU."""
    if name == "cpu":
        return {}
    return {"TEST_DEVICE": "cuda", "BAGUA_COMM": "gloo" if name == "cuda" else name}


def device_type():
    """The type of the devices on which a test's ranks train; asks for no context."""
    return os.environ.get("TEST_DEVICE", "cpu")


def device():
    """Where this rank's models and data are. Ranks are dealt out to the GPUs there are, also those
    of nodes that are played."""
    if device_type() == "cpu":
        return torch.device("cpu")
    own = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def with_group(function):
    """Inside `function` bagua is initialised; afterwards it is not, whatever happened."""

    @functools.wraps(function)
    def run(*args):
        bagua.init_process_group()
        try:
            return function(*args)
        finally:
            bagua.destroy_process_group()

    return run


class Own(Algorithm):
    """Makes the given implementation, as upstream's algorithms do in `reify`."""

    def __init__(self, implementation, *arguments):
        self.implementation = implementation
        self.arguments = arguments

    def reify(self, process_group):
        return self.implementation(process_group, *self.arguments)


def algorithm(name, average=True):
    """`exact`, or a codec's name: ByteGrad with it, also inside a node."""
    if name == "exact":
        return GradientAllReduceAlgorithm()
    return ByteGradAlgorithm(hierarchical=False, average=average, codec=name)


def network(seed=0, outputs=OUTPUTS, hidden=7):
    """A perceptron with sizes that no number of ranks divides."""
    torch.manual_seed(seed)
    layers = nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    return nn.Sequential(*layers).to(device())


def wide_network(seed=0):
    """One whose bucket is large enough for up to 4 ranks to compress it."""
    return network(seed, hidden=61)


def batch(step, rank, rows=ROWS):
    """Inputs and targets that `rank` sees in `step`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    return inputs.to(device()), torch.randn(rows, OUTPUTS, generator=generator).to(device())


def whole_batch(step, size, rows=ROWS):
    """The batches of all ranks in `step`."""
    parts = [batch(step, rank, rows) for rank in range(size)]
    return tuple(torch.cat(side) for side in zip(*parts, strict=True))


def squared_error(model, data):
    inputs, targets = data
    return functional.mse_loss(model(inputs), targets)


def weights_after_steps(model, optimizer):
    """A table that holds, after each step, the weights as the optimizer has left them.

    Call it before with_bagua, whose own hooks on the optimizer come behind.
    """
    weights = {}

    def remember(*_):
        weights.update({name: p.detach().clone() for name, p in model.named_parameters()})

    optimizer.register_step_post_hook(remember)
    return weights


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(model, optimizers, data, loss=squared_error, set_to_none=True, after_step=None):
    """One step per element of `data`; `optimizers` may be one."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for part in data:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss(model, part).backward()
        for optimizer in optimizers:
            optimizer.step()
        if after_step is not None:
            after_step(model)
    return model


def train_on_ranks(model, optimizers, steps=3, loss=squared_error, set_to_none=True):
    """Train on this rank's data; ranks must hold the same bits after every step."""
    data = [batch(step, dist.get_rank()) for step in range(steps)]
    return train(model, optimizers, data, loss, set_to_none, assert_ranks_agree)


def train_alone(model, optimizers, steps=3, loss=squared_error, size=None):
    """The oracle: one process, the data of all ranks."""
    size = dist.get_world_size() if size is None else size
    return train(model, optimizers, [whole_batch(step, size) for step in range(steps)], loss)


def train_as_one_process(model, loss=squared_error, do_flatten=True):
    """Trains with exact gradients on ranks, compares with the oracle; returns the rounds."""
    alone = copy.deepcopy(model)
    optimizer = sgd(model)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm(), None, do_flatten)
    train_on_ranks(model, optimizer, loss=loss)
    assert_close(model, train_alone(alone, sgd(alone), loss=loss))
    return model.bagua_stats()["rounds"]


def bits(tensors):
    """A digest of the tensors' exact values."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def model_bits(model):
    """A digest of all parameters and gradients."""
    parameters = list(model.parameters())
    return bits(parameters + [p.grad for p in parameters if p.grad is not None])


def gather(value):
    """`value` of every rank, by rank; tensors in it come on this rank's device."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, value))
    here = device()
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(here), values)


def assert_ranks_agree(model):
    """Parameters and gradients are the same bits on every rank."""
    digests = gather(model_bits(model))
    assert len(set(digests)) == 1, f"ranks differ: {digests}"


def assert_close(model, expected, **tolerance):
    """Parameters equal the oracle's up to rounding."""
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            p.detach(), q.detach(), msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def mean_over_ranks(tensor):
    """The exact mean, by torch."""
    total = tensor.detach().cpu().clone().double()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).to(tensor)


def local_gradients(model, loss, data):
    """This rank's own gradients, from a copy: nothing is communicated."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    loss(twin, data).backward()
    return {name: p.grad for name, p in twin.named_parameters()}


def error_of(function, kind=Exception):
    """The message of the exception that `function` raises; fails if there is none."""
    try:
        function()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def warnings_of(function):
    """The messages of the warnings that `function` gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


def log_of(function, least=logging.INFO):
    """(level, message) of what the library logs in `function`, from the level `least` on."""
    log, handler, seen = logging.getLogger("bagua"), logging.Handler(least), []
    handler.emit = lambda record: seen.append((record.levelname, record.getMessage()))
    before = log.level
    log.addHandler(handler)
    log.setLevel(least)
    try:
        function()
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    return seen
