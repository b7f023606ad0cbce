"""Sparse gradients in training: the oracle's bits, equal ranks, dtypes, wrong arguments."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms.sparse import SparseAlgorithm
from support import training
from support.error_feedback import (
    assert_sparse_mean,
    flat_errors,
    flat_of,
    gathered_gradients,
    train_step,
    wrapped,
)

STEPS = 8


def sparse(ratio=0.05, **arguments):
    return SparseAlgorithm(ratio, **arguments)


def ops_of(model):
    return [bucket["ops"][0].split("(")[0] for bucket in model.bagua_stats()["buckets"]]


@training.with_group
def train_and_compare(dtype, ratio=0.05):
    """Every round against the oracle, bucket by bucket, from the residual before it."""
    model, optimizer = wrapped(sparse(ratio), dtype=dtype)
    size = dist.get_world_size()
    for step in range(STEPS):
        states = training.gather(model.bagua_algorithm.state_dict())
        gradients = gathered_gradients(model, step)
        train_step(model, optimizer, step)
        training.assert_ranks_agree(model)
        after = training.gather(model.bagua_algorithm.state_dict())
        got = {name: p.grad for name, p in model.named_parameters()}
        for bucket, op in zip(model.bagua_buckets, ops_of(model), strict=True):
            names = [tensor.bagua_tensor_name for tensor in bucket.tensors]
            if op != "ErrorFeedbackAllReduce":
                assert_sparse_mean(got, gradients, states, after, names, ratio)
                continue
            mean = sum(flat_of(each, names) for each in gradients) / size
            torch.testing.assert_close(flat_of(got, names), mean, rtol=1e-2, atol=1e-3)
            assert not flat_errors(after, names)[0].any()
    return sorted(set(ops_of(model)))


@pytest.mark.parametrize("n", [2, 3], ids=lambda n: f"{n}-ranks")
def test_training_follows_the_oracle_and_ranks_agree(ranks, n):
    assert ranks(n, train_and_compare, torch.float32) == [["Sparse"]] * n


def test_buckets_for_which_sparse_messages_do_not_pay_are_averaged_exactly(ranks):
    results = ranks(2, train_and_compare, torch.float32, env=training.SMALL_BUCKETS)
    assert results == [["ErrorFeedbackAllReduce", "Sparse"]] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes_follow_the_oracle(ranks, dtype):
    assert ranks(2, train_and_compare, dtype) == [["Sparse"]] * 2


def test_a_small_ratio_sends_one_element(ranks):
    assert ranks(2, train_and_compare, torch.float32, 0.001) == [["Sparse"]] * 2


@training.with_group
def wrong_arguments():
    said = []
    for name, value in (("ratio", 0.0), ("ratio", 1.5), ("ratio", torch.nan), ("warmup_steps", -1)):
        with pytest.raises(ValueError, match=name) as caught:
            sparse(**{name: value})
        said.append(str(caught.value))
    own = sparse(ratio=0.1 + dist.get_rank() / 10)
    with pytest.raises(bagua.BaguaMismatchError, match=r"'ratio': 0\.1"):
        wrapped(own)
    return len(said)


def test_wrong_arguments_and_ranks_that_differ_are_refused(ranks):
    assert ranks(2, wrong_arguments) == [4, 4]
