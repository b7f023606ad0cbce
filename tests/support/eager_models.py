"""A model that flattening could get wrong, and what must stay as it was."""

import torch
from mlbench_core.aggregation.pytorch.aggregation import Aggregation
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
