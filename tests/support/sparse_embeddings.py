"""Models with sparse embeddings, their data and optimizers, and what tests of them compare."""

import torch
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training
from torch import nn

WORDS, WIDTH = 37, 5


class Words(nn.Module):
    """Two embeddings, one of bags, and dense layers."""

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.word = nn.Embedding(WORDS, WIDTH, sparse=True, padding_idx=0, dtype=dtype)
        self.bag = nn.EmbeddingBag(11, WIDTH, sparse=True, mode="mean", dtype=dtype)
        self.head = nn.Linear(WIDTH, 3, dtype=dtype)

    def forward(self, words):
        hidden = self.word(words).mean(1)
        if words.shape[1] > 1:  # else the bag is not used
            hidden = hidden + self.bag(words % 11)
        return self.head(torch.tanh(hidden))


def words(step, rank, length=None):
    """Another number of words on every rank, some of them several times."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(WORDS, (2, length or 2 + rank), generator=generator)


def loss(model, data):
    return model(data).square().sum()


class Both:
    """SparseAdam for the embeddings and SGD for the rest, as one optimizer; or SGD for all."""

    def __init__(self, model, sparse_adam):
        module = getattr(model, "module", model)
        tables = [module.word.weight, module.bag.weight] if sparse_adam else []
        others = [p for p in module.parameters() if not any(p is table for table in tables)]
        self.all = [torch.optim.SGD(others, lr=0.1, momentum=0.0 if not sparse_adam else 0.9)]
        if tables:
            self.all.append(torch.optim.SparseAdam(tables, lr=0.05))

    def zero_grad(self, set_to_none=True):
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self):
        for optimizer in self.all:
            optimizer.step()


def wrapped(model, way, optimizers=(), **options):
    algorithm = options.pop("algorithm", GradientAllReduceAlgorithm())
    if way == "class":
        return DistributedDataParallel(
            model, optimizers=list(optimizers), algorithm=algorithm, **options
        )
    return model.with_bagua(list(optimizers), algorithm, **options)


def same(mine, theirs, exact=False):
    """Gradients of the same layout, rows and values, and the same parameters.

    exact: sparse gradients to the bit, where the dense layers behind them have not gone apart yet.
    """
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is None:
            continue
        assert p.grad.layout == q.grad.layout, name
        if p.grad.is_sparse:
            assert p.grad.is_coalesced()
            assert torch.equal(p.grad.indices(), q.grad.coalesce().indices()), name
            close = {"rtol": 0, "atol": 0} if exact else rounding(p.dtype)
            torch.testing.assert_close(p.grad.values(), q.grad.coalesce().values(), **close)
        else:
            torch.testing.assert_close(p.grad, q.grad, **rounding(p.dtype))
        torch.testing.assert_close(p.detach(), q.detach(), **rounding(p.dtype))


def rounding(dtype):
    """gloo adds a bucket's elements in orders that depend on the bucket."""
    return {"rtol": 20 * torch.finfo(dtype).eps, "atol": 5 * torch.finfo(dtype).eps}


def agree(model):
    """All ranks hold the same bits, gradients included."""
    tensors = [p.detach() for p in model.parameters()]
    for p in model.parameters():
        if p.grad is not None and p.grad.is_sparse:
            tensors += [p.grad.indices(), p.grad.values()]
        elif p.grad is not None:
            tensors.append(p.grad)
    assert len(set(training.gather(training.bits(tensors)))) == 1
