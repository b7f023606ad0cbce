"""Embeddings with sparse gradients: exact gradients, equal to torch's DistributedDataParallel."""

import copy

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from support.cases import over
from support.sparse_embeddings import Both, Words, agree, loss, same, words, wrapped
from torch.nn.parallel import DistributedDataParallel as TorchDDP

STEPS = 4

both_ways = over(way=["with_bagua", "class"])


@training.with_group
def train_beside_torch(way, sparse_adam, zero, options, dtype=torch.float32):
    plain = Words(dtype)
    mine, theirs = copy.deepcopy(plain), TorchDDP(plain)
    ours = Both(mine, sparse_adam)
    model, their_optimizer = wrapped(mine, way, ours.all, **options), Both(plain, sparse_adam)
    for step in range(STEPS):
        for module, optimizer in ((model, ours), (theirs, their_optimizer)):
            optimizer.zero_grad(set_to_none=zero)
            loss(module, words(step, dist.get_rank())).backward()
        assert mine.word.weight.grad.is_sparse
        same(mine, plain, exact=step == 0)
        for optimizer in (ours, their_optimizer):
            optimizer.step()
        same(mine, plain)
        agree(mine)
    return model.bagua_ddp.stats()["total"]["nonfinite_rounds"]


@over(way=["with_bagua", "class"], sparse_adam=[True, False], zero=[True, False])
def test_training_equals_ddp(ranks, way, sparse_adam, zero):
    assert ranks(3, train_beside_torch, way, sparse_adam, zero, {}) == [0] * 3


@over(dtype=[torch.float64, torch.bfloat16])
def test_training_of_other_types_equals_ddp(ranks, dtype):
    assert ranks(2, train_beside_torch, "with_bagua", False, True, {}, dtype) == [0] * 2


@over(lanes=["1", "3"])
def test_training_in_small_buckets_and_lanes_equals_ddp(ranks, lanes):
    env = training.SMALL_BUCKETS | {"BAGUA_LANES": lanes}
    arguments = ("with_bagua", True, True, {"do_flatten": False})
    assert ranks(3, train_beside_torch, *arguments, env=env) == [0] * 3


def test_training_through_two_nodes_equals_ddp(ranks):
    options = {"algorithm": GradientAllReduceAlgorithm(hierarchical=True)}
    arguments = ("with_bagua", True, True, options)
    assert ranks(3, train_beside_torch, *arguments, env=environment_of_nodes((2, 1))) == [0] * 3


def test_with_the_weights_check_training_equals_ddp(ranks):
    arguments = ("class", True, True, {})
    env = {"BAGUA_CHECK_WEIGHTS_EVERY": "1"}
    assert ranks(2, train_beside_torch, *arguments, env=env) == [0] * 2


@training.with_group
def on_one_rank():
    plain = Words()
    mine = copy.deepcopy(plain)
    model = wrapped(mine, "with_bagua")
    for module in (model, plain):
        loss(module, words(0, 1)).backward()
    same(mine, plain)
    return model.bagua_stats()["total"]["bytes_sent"]


def test_one_rank_alone_sends_nothing(ranks):
    assert ranks(1, on_one_rank) == [0]


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
def accumulate(way):
    plain = Words()
    mine, theirs = copy.deepcopy(plain), TorchDDP(plain)
    model = wrapped(mine, way)
    for module in (model, theirs):
        with module.no_sync():
            loss(module, words(0, dist.get_rank())).backward()
            loss(module, words(1, dist.get_rank())).backward()
        loss(module, words(2, dist.get_rank())).backward()
    same(mine, plain)
    agree(mine)
    for module in (model, theirs):  # on top of what has been communicated
        loss(module, words(3, dist.get_rank())).backward()
    same(mine, plain)
    agree(mine)
    return True


@both_ways
def test_accumulation_equals_ddp(ranks, way):
    assert all(ranks(3, accumulate, way))


@training.with_group
def scale(way):
    plain = Words()
    mine, theirs = copy.deepcopy(plain), TorchDDP(plain)
    ours, their_optimizer = Both(mine, True), Both(plain, True)
    model = wrapped(mine, way, ours.all)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    steps = []
    for step in range(3):
        for module, both, scaler in zip(
            (model, theirs), (ours, their_optimizer), scalers, strict=True
        ):
            both.zero_grad()
            value = loss(module, words(step, dist.get_rank()))
            scaler.scale(value * float("inf") if step == 1 else value).backward()
            for optimizer in both.all:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
        if step != 1:
            same(mine, plain)
        agree(mine)
        steps.append(scalers[0].get_scale() == scalers[1].get_scale())
    return steps


@both_ways
def test_a_grad_scaler_unscales_and_skips_as_with_ddp(ranks, way):
    assert ranks(2, scale, way) == [[True] * 3] * 2


@training.with_group
def run_backward_twice(way, at_once):
    """Each backward is a round of its own."""
    mine = Words()
    data = [words(step, dist.get_rank()) for step in range(2)]
    local = [training.local_gradients(mine, loss, d)["word.weight"].to_dense() for d in data]
    expected = sum(sum(training.gather(g)) / 2 for g in local)
    model = wrapped(mine, way)
    if at_once:
        losses = [loss(model, d) for d in data]
        for value in losses:
            value.backward()
    else:
        for d in data:
            loss(model, d).backward()
    torch.testing.assert_close(mine.word.weight.grad.to_dense(), expected)
    agree(mine)
    return True


@over(way=["with_bagua", "class"], at_once=[True, False])
def test_two_backwards_add_two_means(ranks, way, at_once):
    assert all(ranks(2, run_backward_twice, way, at_once))
