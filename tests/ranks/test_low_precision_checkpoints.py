"""The state of low-precision decentralized SGD: training goes on to the bit, or says why not."""

import copy

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms.decentralized import LowPrecisionDecentralizedAlgorithm
from bagua.torch_api.checkpoint import PerRank
from ranks.test_groups_and_nodes import environment_of_nodes
from ranks.test_low_precision_decentralized import Mixed, assert_ring, train_step, weight_bits
from support import training
from torch.distributed import checkpoint

SAVED_AFTER, GOES_ON = 3, 6


def make(interval, hierarchical=False, seed=0, dtypes=None):
    model = training.network(seed) if dtypes is None else Mixed(dtypes)
    optimizers = [training.sgd(model)]
    model.with_bagua(optimizers, LowPrecisionDecentralizedAlgorithm(hierarchical, interval))
    return model, optimizers


@training.with_group
def resume_with_a_round_due(path, algorithm_first):
    """Rank 1's last step before the save was skipped, and the saving itself runs the round."""
    model, optimizers = make(1)
    train_step(model, optimizers, 0)
    training.squared_error(model, training.batch(1, dist.get_rank())).backward()
    if dist.get_rank() != 1:
        optimizers[0].step()
    state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
    if algorithm_first:
        state = dict(reversed(state.items()))
    checkpoint.save(state, checkpoint_id=path)
    again, its_optimizers = make(1, seed=1)
    train_step(again, its_optimizers, 77)
    state = {"training": PerRank(again), "algorithm": again.bagua_algorithm}
    checkpoint.load(state, checkpoint_id=path)
    for step in range(2, 2 + GOES_ON):
        train_step(model, optimizers, step)
        train_step(again, its_optimizers, step)
        assert training.model_bits(model) == training.model_bits(again), f"step {step}"
        assert_ring(again)
    state = again.bagua_algorithm.state_dict()
    assert state[f"rank{dist.get_rank()}/left/2.bias"].shape == (3,)
    other_ring = state | {"ranks": "0 1 2 3"}
    error = training.error_of(lambda: again.bagua_algorithm.load_state_dict(other_ring), ValueError)
    assert "'ranks' is '0 1 2 3' in the state, '0 1 2' here: replicas would not be" in error
    return state["iterations"]


def test_one_checkpoint_holds_all_ranks_training(ranks, tmp_path):
    for first in (False, True):
        folder = str(tmp_path / str(first))
        assert ranks(3, resume_with_a_round_due, folder, first) == [2 + GOES_ON] * 3


@training.with_group
def average_with_a_round_due():
    model, optimizers = make(1)
    training.squared_error(model, training.batch(1, dist.get_rank())).backward()
    if dist.get_rank() == 0:
        optimizers[0].step()
    return training.bits(bagua.average_weights(model).parameters())


def test_a_round_that_is_due_runs_before_an_average(ranks):
    assert len(set(ranks(3, average_with_a_round_due))) == 1


@training.with_group
def resume_on_nodes():
    """Of parameters of two dtypes: every bucket has replicas of its own."""
    dtypes = [torch.bfloat16, torch.float64]
    model, optimizers = make(2, hierarchical=True, dtypes=dtypes)
    for step in range(SAVED_AFTER):
        train_step(model, optimizers, step)
    parts = (model, optimizers[0], model.bagua_algorithm)
    saved = copy.deepcopy([part.state_dict() for part in parts])
    # Another start, and steps that must not matter.
    again, its_optimizers = make(2, hierarchical=True, seed=1, dtypes=dtypes)
    train_step(again, its_optimizers, 77)
    for part, state in zip((again, its_optimizers[0], again.bagua_algorithm), saved, strict=True):
        part.load_state_dict(state)
    for step in range(SAVED_AFTER, SAVED_AFTER + GOES_ON):
        train_step(model, optimizers, step)
        train_step(again, its_optimizers, step)
        assert training.model_bits(model) == training.model_bits(again), f"step {step}"
    return again.bagua_algorithm.state_dict()["iterations"], weight_bits(again)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1)], ids=str)
def test_training_on_nodes_goes_on_to_the_bit(ranks, sizes):
    results = ranks(3, resume_on_nodes, env=environment_of_nodes(sizes))
    assert [iterations for iterations, _ in results] == [SAVED_AFTER + GOES_ON] * 3
    assert len({bits for _, bits in results}) == len(sizes)
