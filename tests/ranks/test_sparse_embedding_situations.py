"""Embeddings with sparse gradients where not every rank, layer or algorithm goes along."""

import copy

import torch
import torch.distributed as dist
from support import every_algorithm, faults, training
from support.cases import over
from support.sparse_embeddings import WIDTH, WORDS, Both, Words, agree, loss, same, words, wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

both_ways = over(way=["with_bagua", "class"])


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


@over(way=["with_bagua", "class"], users=[(), (0,), (2,), (0, 1)])
def test_an_embedding_that_some_ranks_use(ranks, way, users):
    assert all(ranks(3, use_on_some_ranks, way, users))


@training.with_group
def leave_out_without_find_unused():
    mine = Words()
    model = wrapped(mine, "with_bagua")
    caught = training.warnings_of(lambda: loss(model, words(0, 0, 1)).backward())
    return [text for text in caught if "bag.weight" in text], mine.bag.weight.grad._nnz()


def test_an_unused_embedding_gets_no_rows_and_a_warning(ranks):
    for caught, rows in ranks(2, leave_out_without_find_unused):
        assert len(caught) == 1
        assert rows == 0


@training.with_group
def count_bad_rounds():
    mine = Words()
    model = wrapped(mine, "with_bagua")
    table = [b.name for b in model.bagua_buckets if b.tensors[0] is mine.word.weight]
    counts = []
    for factor in (1.0, float("nan"), 1.0):
        model.zero_grad()
        (loss(model, words(0, 0)) * (factor if dist.get_rank() == 1 else 1.0)).backward()
        buckets = model.bagua_stats()["buckets"]
        counts += [b["nonfinite_rounds"] for b in buckets if b["name"] in table]
    return counts


def test_rounds_with_values_that_are_not_finite_are_counted(ranks):
    assert ranks(2, count_bad_rounds) == [[0, 1, 1]] * 2


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


@over(initial=[True, False], inputs=[(4, 2), (1, 3, 2)])
def test_uneven_inputs_train_as_in_torch(ranks, inputs, initial):
    assert len(set(ranks(len(inputs), uneven_inputs, inputs, initial))) == 1


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
def tie(way):
    mine = Tied()
    alone = copy.deepcopy(mine)
    model = wrapped(mine, way)
    loss(model, words(0, dist.get_rank())).backward()
    assert not mine.word.weight.grad.is_sparse
    for rank in range(2):
        (loss(alone, words(0, rank)) / 2).backward()
    torch.testing.assert_close(mine.word.weight.grad, alone.word.weight.grad)
    return True


@both_ways
def test_a_tied_table_has_dense_gradients(ranks, way):
    assert all(ranks(2, tie, way))


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


class Alone(nn.Module):
    """Nothing but a sparse table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.word = nn.Embedding(WORDS, WIDTH, sparse=True)

    def forward(self, data):
        return self.word(data).mean(1)


@training.with_group
def train_a_table_alone(way):
    plain = Alone()
    mine, theirs = copy.deepcopy(plain), TorchDDP(plain)
    model = wrapped(mine, way)
    for step in range(2):
        for module in (model, theirs):
            module.zero_grad()
            loss(module, words(step, dist.get_rank())).backward()
        same(mine, plain)
    return True


@both_ways
def test_a_model_of_one_table(ranks, way):
    assert all(ranks(2, train_a_table_alone, way))


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
def keep(way):
    """A gradient of the step before that somebody keeps stays as it was."""
    mine = Words()
    model = wrapped(mine, way)
    loss(model, words(0, dist.get_rank())).backward()
    kept = mine.word.weight.grad
    before = kept.values().clone()
    model.zero_grad()
    loss(model, words(1, dist.get_rank())).backward()
    loss(model, words(2, dist.get_rank())).backward()
    return torch.equal(kept.values(), before)


@both_ways
def test_a_gradient_that_is_kept_stays_as_it_was(ranks, way):
    assert all(ranks(2, keep, way))


@training.with_group
def freeze(way):
    """A table that is frozen since the wrap keeps what it has, also where others train it."""
    mine = Words()
    model = wrapped(mine, way)
    loss(model, words(0, dist.get_rank())).backward()
    kept = mine.bag.weight.grad
    mine.bag.weight.requires_grad_(False)
    loss(model, words(1, dist.get_rank())).backward()
    agree(mine)
    return mine.bag.weight.grad is kept


@both_ways
def test_a_table_that_is_frozen_after_the_wrap_keeps_its_gradient(ranks, way):
    assert all(ranks(2, freeze, way))
