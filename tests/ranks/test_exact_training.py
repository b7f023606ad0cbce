"""Exact gradients: training on ranks is training in one process on all ranks' data."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training
from torch import nn


def wrap(model, optimizers=None, **options):
    optimizers = [training.sgd(model)] if optimizers is None else optimizers
    average = options.pop("average", True)
    model = model.with_bagua(optimizers, GradientAllReduceAlgorithm(average=average), **options)
    return model, optimizers


@training.with_group
def train_and_compare_with_oracle_and_ddp(set_to_none, do_flatten):
    model = training.network()
    alone, for_ddp = copy.deepcopy(model), copy.deepcopy(model)
    model, optimizers = wrap(model, do_flatten=do_flatten)
    training.train_on_ranks(model, optimizers, set_to_none=set_to_none)
    training.assert_close(model, training.train_alone(alone, training.sgd(alone)))
    ddp = nn.parallel.DistributedDataParallel(for_ddp)
    training.train_on_ranks(ddp, training.sgd(ddp), set_to_none=set_to_none)
    training.assert_close(model, ddp, rtol=1e-6, atol=1e-7)
    return training.model_bits(model)


@pytest.mark.parametrize(
    ("n", "env"), [(2, {}), (3, {}), (4, training.SMALL_BUCKETS)], ids=["2", "3", "small-buckets"]
)
def test_training_equals_one_process_and_ddp_in_the_same_bits_each_time(ranks, n, env):
    arguments = [(True, True), (True, True), (True, False), (False, True)]
    bits = {
        digest
        for set_to_none, do_flatten in arguments
        for digest in ranks(
            n, train_and_compare_with_oracle_and_ddp, set_to_none, do_flatten, env=env
        )
    }
    assert len(bits) == 1


@training.with_group
def gradients_of_the_sum():
    model, _ = wrap(training.network(), [], average=False)
    data = training.batch(0, dist.get_rank())
    local = training.local_gradients(model, training.squared_error, data)
    training.squared_error(model, data).backward()
    training.assert_ranks_agree(model)
    for name, p in model.named_parameters():
        expected = training.mean_over_ranks(local[name]) * dist.get_world_size()
        torch.testing.assert_close(p.grad, expected)
    return True


def test_average_false_gives_the_sum(ranks):
    assert all(ranks(3, gradients_of_the_sum))


@training.with_group
def train_on_one_rank(do_flatten):
    model = training.network()
    alone = copy.deepcopy(model)
    model, optimizers = wrap(model, do_flatten=do_flatten)
    training.train_on_ranks(model, optimizers)
    training.train_alone(alone, training.sgd(alone))
    return training.model_bits(model) == training.model_bits(alone), model.bagua_stats()["total"]


def test_one_rank_trains_as_without_bagua_and_sends_nothing(ranks):
    for do_flatten in (True, False):
        ((equal, total),) = ranks(1, train_on_one_rank, do_flatten)
        assert equal
        assert total["bytes_sent"] == 0


@training.with_group
def run_a_model_without_gradients():
    model = training.network().requires_grad_(False)
    with torch.no_grad():
        model[0].weight += dist.get_rank()
    model, _ = wrap(model, [])
    output = model(torch.ones(1, training.FEATURES))
    training.assert_ranks_agree(model)
    return output.tolist(), model.bagua_buckets, model.bagua_stats()["rounds"]


def test_a_model_without_gradients_is_broadcast_and_runs(ranks):
    results = ranks(2, run_a_model_without_gradients)
    assert results[0] == results[1]
    assert results[0][1:] == ([], 0)
