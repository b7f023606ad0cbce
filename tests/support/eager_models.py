"""A model that flattening could get wrong, and what must stay as it was."""

import torch
import torch.distributed as dist
from mlbench_core.aggregation.pytorch.aggregation import Aggregation
from support import training
from torch import nn


class Doubled(Aggregation):
    """A user's own: what it is given, and twice as much."""

    def __init__(self, use_cuda=False):
        super().__init__(use_cuda=use_cuda)
        self.seen = []

    def _agg(self, data, op, denom=None):
        self.seen.append((data.shape, data.dtype, op, denom))
        return 2 * data


class Mixed(nn.Module):
    """Dtypes, layouts and shapes that a flat buffer could get wrong."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def parameter(*shape, dtype=torch.float32):
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(values.to(dtype))

        self.f16 = parameter(3, 5, dtype=torch.float16)
        self.conv = nn.Parameter(parameter(4, 3, 2, 2).data.to(memory_format=torch.channels_last))
        self.scalar = parameter()
        self.turned = nn.Parameter(parameter(6, 4).data.T)
        self.f64 = parameter(7, dtype=torch.float64)
        self.empty = parameter(0, 3)
        self.strided = nn.Parameter(parameter(8, 2).data[:, 0])
        self.tied = self.turned
        self.odd = nn.Parameter(torch.tensor([float("nan"), -0.0, 1e-42, float("inf")]))


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def with_gradients(model):
    for p in model.parameters():
        p.grad = p.detach() * 3
    return model


def snapshot(model):
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [(t.data_ptr(), t.stride(), bits(t).clone()) for t in tensors]


def assert_unchanged(model, before):
    for now, then in zip(snapshot(model), before, strict=True):
        assert now[:2] == then[:2]
        assert torch.equal(now[2], then[2])


def by_layer_and_by_model(get):
    return [get(by_layer=False), get(by_layer=True)]


def of_rank(rank):
    """A model of one dtype after the other, with values and gradients of the rank's own."""
    model = Mixed()
    del model.odd
    generator = torch.Generator().manual_seed(rank)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        p.grad = (p.detach() * 2).clone()
    return model


def tensors_of(model, kind):
    return [p.detach() if kind == "weight" else p.grad for p in model.parameters()]


def places_of(model):
    tensors = tensors_of(model, "weight") + tensors_of(model, "gradient")
    return [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]


def assert_aggregates(aggregation, by_layer, op, denom, expected, tolerance):
    """On ranks: gradients and weights become `expected` of all ranks' values, where they are.

    tolerance: by dtype. Returns a digest of them.
    """
    model = of_rank(dist.get_rank())
    twins = [of_rank(other) for other in range(dist.get_world_size())]
    places = places_of(model)
    for kind, get in (("gradient", aggregation.agg_grad), ("weight", aggregation.agg_model)):
        assert get(by_layer)(model, op, denom) is None
        everyone = zip(*(tensors_of(twin, kind) for twin in twins), strict=True)
        for mine, values in zip(tensors_of(model, kind), everyone, strict=True):
            wanted = expected(values)
            error = (mine.double() - wanted).abs()
            assert (error <= tolerance[mine.dtype] * (1 + wanted.abs())).all(), (kind, mine.dtype)
    assert places == places_of(model)
    return training.model_bits(model)
