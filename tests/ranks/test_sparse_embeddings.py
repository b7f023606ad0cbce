"""Embeddings with sparse gradients: exact gradients, equal to torch's DistributedDataParallel."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from ranks.test_groups_and_nodes import environment_of_nodes
from support import every_algorithm, faults, training
from support.cases import over
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

STEPS = 4
WORDS, WIDTH = 37, 5


class Words(nn.Module):
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


def same(mine, theirs):
    """Gradients of the same layout, rows and values, and the same parameters."""
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is None:
            continue
        assert p.grad.layout == q.grad.layout, name
        if p.grad.is_sparse:
            assert p.grad.is_coalesced()
            assert torch.equal(p.grad.indices(), q.grad.coalesce().indices()), name
            torch.testing.assert_close(
                p.grad.values(), q.grad.coalesce().values(), **rounding(p.dtype)
            )
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


@training.with_group
def train_beside_torch(way, sparse_adam, zero, dtype, options):
    """Every other step accumulates: under no_sync(), and on top of what has been communicated."""
    plain = Words(dtype)
    mine, theirs = copy.deepcopy(plain), TorchDDP(plain)
    ours = Both(mine, sparse_adam)
    model, their_optimizer = wrapped(mine, way, ours.all, **options), Both(plain, sparse_adam)
    for step in range(STEPS):
        for module, optimizer in ((model, ours), (theirs, their_optimizer)):
            optimizer.zero_grad(set_to_none=zero)
            if step % 2 == 1:
                with module.no_sync():
                    loss(module, words(10 + step, dist.get_rank())).backward()
                loss(module, words(20 + step, dist.get_rank())).backward()
            loss(module, words(step, dist.get_rank())).backward()
        assert mine.word.weight.grad.is_sparse
        same(mine, plain)
        for optimizer in (ours, their_optimizer):
            optimizer.step()
        same(mine, plain)
        agree(mine)
    return model.bagua_ddp.stats()["total"]["nonfinite_rounds"]


SMALL = training.SMALL_BUCKETS | {"BAGUA_LANES": "3"}
NODES = {"algorithm": GradientAllReduceAlgorithm(hierarchical=True)}


@pytest.mark.parametrize(
    ("way", "sparse_adam", "zero", "dtype", "options", "env"),
    [
        ("with_bagua", True, True, torch.float32, {}, {}),
        ("class", False, False, torch.float32, {}, {}),
        ("with_bagua", False, True, torch.float64, {}, {}),
        ("with_bagua", False, True, torch.bfloat16, {}, {}),
        ("with_bagua", True, True, torch.float32, {"do_flatten": False}, SMALL),
        ("with_bagua", True, True, torch.float32, NODES, environment_of_nodes((2, 1))),
    ],
    ids=["SparseAdam", "SGD", "f64", "bf16", "small buckets", "two nodes"],
)
def test_training_equals_ddp(ranks, way, sparse_adam, zero, dtype, options, env):
    n = 3 if dtype == torch.float32 else 2
    arguments = (way, sparse_adam, zero, dtype, options)
    assert ranks(n, train_beside_torch, *arguments, env=env) == [0] * n


@training.with_group
def sum_of_gradients():
    mine = Words()
    local = training.local_gradients(mine, loss, words(0, dist.get_rank()))
    model = wrapped(mine, "with_bagua", algorithm=GradientAllReduceAlgorithm(average=False))
    loss(model, words(0, dist.get_rank())).backward()
    total = sum(training.gather(local["word.weight"].to_dense()))
    torch.testing.assert_close(mine.word.weight.grad.to_dense(), total)
    return True


def test_average_false_gives_the_sum(ranks):
    assert all(ranks(3, sum_of_gradients))


@training.with_group
def use_on_some_ranks(way, users):
    """The bag is used by the ranks `users` only; torch's class fails here."""
    mine = Words()
    length = 4 if dist.get_rank() in users else 1
    data = words(0, dist.get_rank(), length)
    local = training.local_gradients(mine, loss, data)["bag.weight"]
    zeros = torch.zeros_like(mine.bag.weight)
    model = wrapped(mine, way, find_unused_parameters=True)
    loss(model, data).backward()
    grad = mine.bag.weight.grad
    if not users:
        return grad is None
    mean = sum(training.gather(zeros if local is None else local.to_dense())) / 3
    torch.testing.assert_close(grad.to_dense(), mean)
    agree(mine)
    kept = grad.to_dense()
    loss(model, words(1, dist.get_rank(), 1)).backward()  # by nobody: what is there stays
    torch.testing.assert_close(mine.bag.weight.grad.to_dense(), kept)
    return grad.is_sparse


@over(users=[(), (0,), (2,), (0, 1)])
def test_an_embedding_that_some_ranks_use(ranks, users):
    assert all(ranks(3, use_on_some_ranks, "class" if 0 in users else "with_bagua", users))


@training.with_group
def leave_out_without_find_unused():
    """Two steps leave a table and a dense layer out."""
    mine = Words()
    mine.nobody = nn.Linear(2, 2)
    model = wrapped(mine, "with_bagua")
    data = words(0, 0, 1)
    caught = [training.warnings_of(lambda: loss(model, data).backward()) for _ in range(2)]
    return caught, mine.bag.weight.grad._nnz(), mine.nobody.weight.grad.any().item()


def test_unused_parameters_are_named_once_and_get_zeros_or_no_rows(ranks):
    found = ranks(2, leave_out_without_find_unused)
    (text,) = (text for (first, _), *_ in found for text in first)  # once per job
    for part in ("Words", "bag.weight", "nobody.bias", "zeros", "find_unused_parameters"):
        assert part in text
    assert "head" not in text
    for (_, second), rows, any_value in found:
        assert second == []
        assert rows == 0
        assert not any_value


@training.with_group
def uneven_inputs(inputs, initial):
    """Beside the same model with dense gradients: torch's join() fails with sparse ones."""
    mine, plain = Words(), Words()
    plain.word.sparse = plain.bag.sparse = False
    model, theirs = wrapped(mine, "class"), TorchDDP(plain)
    for module in (model, theirs):
        optimizer = Both(module, False)
        with module.join(divide_by_initial_world_size=initial):
            for step in range(inputs[dist.get_rank()]):
                optimizer.zero_grad()
                loss(module, words(step, dist.get_rank())).backward()
                optimizer.step()
    for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    return training.bits(mine.parameters())


@over(initial=[True, False])
def test_uneven_inputs_train_as_in_torch(ranks, initial):
    assert len(set(ranks(3, uneven_inputs, (1, 3, 2), initial))) == 1


class Tied(nn.Module):
    """The table is the last layer's weight too: its gradients are dense."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.word = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.word.weight

    def forward(self, data):
        return self.decoder(self.word(data).mean(1))


@training.with_group
def tie():
    mine = Tied()
    alone = copy.deepcopy(mine)
    model = wrapped(mine, "with_bagua")
    loss(model, words(0, dist.get_rank())).backward()
    assert not mine.word.weight.grad.is_sparse
    for rank in range(2):
        (loss(alone, words(0, rank)) / 2).backward()
    torch.testing.assert_close(mine.word.weight.grad, alone.word.weight.grad)
    return True


def test_a_tied_table_has_dense_gradients(ranks):
    assert all(ranks(2, tie))


@training.with_group
def add_a_penalty(penalty):
    mine = Words()
    model = wrapped(mine, "with_bagua")
    data = words(0, dist.get_rank())
    return training.error_of(lambda: (loss(model, data) + penalty(mine)).backward())


def of_the_table(model):
    return model.word.weight.square().sum()


def of_the_table_of_one(model):
    return of_the_table(model) if faults.is_last() else 0.0


@over(penalty=[of_the_table, of_the_table_of_one])
def test_a_dense_gradient_of_a_sparse_table_is_refused_by_name_on_every_rank(ranks, penalty):
    for error in ranks(3, add_a_penalty, penalty):
        assert error.startswith("BaguaError")
        assert "the gradient of 'word.weight' is dense" in error
        assert "sparse=False" in error


@training.with_group
def wrap_frozen():
    model = nn.Sequential(
        nn.Embedding.from_pretrained(torch.ones(4, 2), sparse=True), nn.Linear(2, 1)
    )
    every_algorithm.wrapped("bytegrad", model)
    model(torch.tensor([1, 2])).sum().backward()
    return model[0].weight.grad


def test_a_frozen_sparse_table_is_no_reason_to_refuse(ranks):
    assert ranks(2, wrap_frozen) == [None, None]


#: Those that cannot; auto takes exact gradients for them.
OTHERS = sorted(set(every_algorithm.ALGORITHMS) - {"gradient_allreduce", "auto"})


@training.with_group
def refuse():
    return {
        name: training.error_of(lambda n=name: every_algorithm.wrapped(n, Words()))
        for name in OTHERS
    }


def test_other_algorithms_refuse_them_at_the_wrap(ranks):
    for errors in ranks(2, refuse):
        for name, error in errors.items():
            assert error.startswith("NotImplementedError: 'word.weight' has sparse gradients"), name
            assert "use GradientAllReduceAlgorithm" in error, name


@training.with_group
def register_a_hook():
    model = wrapped(Words(), "class")
    error = training.error_of(lambda: model.register_comm_hook(None, lambda state, bucket: None))
    loss(model, words(0, dist.get_rank())).backward()  # as before
    agree(model)
    return error


def test_a_communication_hook_is_refused_by_name(ranks):
    for error in ranks(2, register_a_hook):
        assert error.startswith("NotImplementedError: 'word.weight' has sparse gradients")


@training.with_group
def differ():
    model = nn.Embedding(3, 2, sparse=dist.get_rank() == 0)
    return training.error_of(lambda: wrapped(model, "with_bagua"))


def test_ranks_with_another_setting_get_an_error(ranks):
    for error in ranks(2, differ):
        assert "rank 0 has [parameter weight: (3, 2) torch.float32 cpu sparse]" in error


@training.with_group
def keep_gradients():
    mine = Words()
    model = wrapped(mine, "with_bagua")
    loss(model, words(0, dist.get_rank())).backward()
    kept, of_frozen = mine.word.weight.grad, mine.bag.weight.grad
    before = kept.values().clone()
    mine.word.weight.grad = None
    mine.bag.weight.requires_grad_(False)
    loss(model, words(1, dist.get_rank())).backward()
    agree(mine)
    return torch.equal(kept.values(), before), mine.bag.weight.grad is of_frozen


def test_gradients_that_are_kept_and_those_of_frozen_tables_stay_as_they_were(ranks):
    assert ranks(2, keep_gradients) == [(True, True)] * 2
