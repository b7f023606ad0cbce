"""Helpers for tests of compressed means, above all of those with error feedback."""

import bagua.torch_api as bagua  # noqa: F401 - gives modules with_bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.algorithms.power_sgd import PowerSGDAlgorithm
from bagua.torch_api.algorithms.sparse import SparseAlgorithm
from oracle import low_rank, sparse
from oracle.compressed_all_reduce import compressed_all_reduce, parts, with_residuals
from support import training
from torch import nn


def make(name, **arguments):
    def bytegrad():
        hierarchical = arguments.get("hierarchical", False)  # without a warm-up
        return ByteGradAlgorithm(hierarchical, codec="bit2_block", error_feedback=True)

    return {
        "bytegrad": bytegrad,
        "power_sgd": lambda: PowerSGDAlgorithm(
            2, **{"min_compression_rate": 1.0, "warmup_steps": 0} | arguments
        ),
        "sparse": lambda: SparseAlgorithm(0.05, **arguments),
    }[name]()


WITH_WARM_UP = ["power_sgd", "sparse"]
ALGORITHMS = pytest.mark.parametrize("name", ["bytegrad", *WITH_WARM_UP])


def wide_network(seed=0, dtype=torch.float32):
    """Matrices of three shapes, vectors, and a convolution's weight between them."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(training.FEATURES, 12),
        nn.Unflatten(1, (3, 4)),
        nn.Conv1d(3, 6, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, training.OUTPUTS),
    ).to(training.device(), dtype)


def wrapped(algorithm, seed=0, dtype=torch.float32, **arguments):
    """A network with ``algorithm`` and its optimizer."""
    model = wide_network(seed, dtype)
    optimizer = training.sgd(model, lr=0.05)
    return model.with_bagua([optimizer], algorithm, **arguments), optimizer


def loss_of(model, step, rank):
    inputs, targets = training.batch(step, rank)
    dtype = next(model.parameters()).dtype
    return training.squared_error(model, (inputs.to(dtype), targets.to(dtype)))


def train_step(model, optimizer, step, scaler=None, overflow=False):
    """One step on this rank's data; `overflow`: its loss is infinite."""
    optimizer.zero_grad()
    loss = loss_of(model, step, dist.get_rank())
    if overflow:
        loss = loss * float("inf")
    if scaler is None:
        loss.backward()
        return optimizer.step()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def gathered_gradients(model, step):
    """Every rank's own gradients in `step`, by name."""
    twin = wide_network(dtype=next(model.parameters()).dtype)
    twin.load_state_dict(model.state_dict())
    loss_of(twin, step, dist.get_rank()).backward()
    return training.gather({name: p.grad for name, p in twin.named_parameters()})


class Means:
    """What all ranks hold after each round of compressed means, by the oracle."""

    def __init__(self, codec, average=True, error_feedback=True):
        self.codec, self.average, self.error_feedback = codec, average, error_feedback
        self.residuals = {}  # by bucket: the ranks', and those of the parts

    def of(self, bucket, by_rank):
        """By name the mean of a bucket's tensors, of which each rank has brought its own."""
        names = [tensor.bagua_tensor_name for tensor in bucket.tensors]
        inputs = []
        for brought in by_rank:
            values = torch.cat([brought[name].reshape(-1) for name in names])
            inputs.append(torch.zeros_like(bucket.backend_tensor))  # padding included
            inputs[-1][: values.numel()] = values
        mean = self._of_flat(bucket.name, inputs, inputs[0].numel() - values.numel())
        shapes = [by_rank[0][name].shape for name in names]
        pieces = mean[: values.numel()].split([shape.numel() for shape in shapes])
        return {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}

    def _of_flat(self, name, inputs, padding):
        if not self.error_feedback:
            return compressed_all_reduce(self.codec, inputs, self.average)
        numel, size = inputs[0].numel(), len(inputs)
        zeros = [torch.zeros(numel)] * size, [torch.zeros(n) for _, n in parts(numel, size)]
        kept = self.residuals.get(name, zeros)
        mean, *self.residuals[name] = with_residuals(
            self.codec, inputs, *kept, average=self.average, padding=padding
        )
        return mean


def error_of(state, rank, name):
    return state[f"rank{rank}/error/{name}"]


def owed(states, names):
    """The mean of the ranks' residuals, and the server residuals side by side, by parameter."""
    found = {}
    for name in names:
        errors = [state[f"rank{rank}/error/{name}"] for rank, state in enumerate(states)]
        whole = torch.stack(errors).double().mean(0)
        for state in states:
            for key, value in state.items():
                if key.endswith(f"/{name}") and "/server/" in key:
                    first = int(key.split("/")[2])
                    whole.view(-1)[first : first + value.numel()] += value
        found[name] = whole
    return found


def flat_of(tensors, names):
    return torch.cat([tensors[name].reshape(-1) for name in names])


def flat_errors(states, names):
    """Every rank's residual of these parameters, one behind the other."""
    return [flat_of({n: error_of(s, r, n) for n in names}, names) for r, s in enumerate(states)]


def assert_sparse_mean(got, brought, before, after, names, ratio):
    """The result of a round and the residuals after it are the oracle's.

    brought, before, after: gradients and states by rank; at first there are no residuals.
    """
    flats = [flat_of(gradients, names) for gradients in brought]
    kept = flat_errors(after, names)
    known = f"rank0/error/{names[0]}" in before[0]
    errors = flat_errors(before, names) if known else [torch.zeros_like(error) for error in kept]
    k = max(1, round(ratio * flats[0].numel()))
    result, errors = sparse.top_k(flats, errors, k)
    assert torch.equal(flat_of(got, names), result), "in order of ranks"
    assert all(map(torch.equal, kept, errors))


#: Of elements, relative and absolute: exact means, and products of matrices.
_EXACT = {torch.float32: 1e-6, torch.float64: 1e-14}
_NEAR = {torch.float32: 1e-4, torch.float64: 1e-10}


def assert_low_rank_mean(model, brought, before, after, reuse_query=True):
    """Gradients, residuals and queries after a round are the oracle's; the names of its matrices.

    brought, before: gradients and states by rank; after: this rank's state. Without a query from
    before, which is none or zeros, what was lost is in the residual.
    """
    size, rank, compared = dist.get_world_size(), dist.get_rank(), []
    for name, p in model.named_parameters():
        exact = {"rtol": _EXACT[p.dtype], "atol": _EXACT[p.dtype]}
        near = {"rtol": _NEAR[p.dtype], "atol": _NEAR[p.dtype]}
        if f"query/{name}" not in after:
            mean = sum(gradients[name] for gradients in brought) / size
            torch.testing.assert_close(p.grad, mean, **exact)
        elif reuse_query and before[0].get(f"query/{name}", torch.zeros(())).any():
            compared.append(name)
            shape = (p.shape[0], -1)
            errors = [error_of(before[r], r, name).reshape(shape) for r in range(size)]
            matrices = [gradients[name].reshape(shape) for gradients in brought]
            query = before[0][f"query/{name}"].T
            result, errors, query = low_rank.power_step(matrices, errors, query)
            torch.testing.assert_close(p.grad.reshape(shape), result, **near)
            own = error_of(after, rank, name).reshape(shape)
            torch.testing.assert_close(own, errors[rank], **near)
            near = {key: 10 * value for key, value in near.items()}
            torch.testing.assert_close(after[f"query/{name}"].T, query, **near)
        else:
            whole = brought[rank][name] + before[rank].get(f"rank{rank}/error/{name}", 0)
            found = p.grad + error_of(after, rank, name)
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    return compared


def residuals(model):
    """Those of the ranks and of their parts, by key."""
    state = model.bagua_algorithm.state_dict()
    return {key: value for key, value in state.items() if "/error/" in key or "/server/" in key}


def all_bits(state, but=""):
    """A digest of all tensors of a state, and its numbers, without the key `but`."""
    tensors = [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    rest = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor) and k != but}
    return training.bits(tensors), rest
