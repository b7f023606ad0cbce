"""Samplers that balance the cost of a step over the ranks."""

import bagua.torch_api as bagua
import pytest
import torch
from bagua.torch_api.contrib import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from torch.utils.data import DataLoader, TensorDataset

COSTS = [7, 1, 12, 3, 9, 2, 11, 5, 8, 4, 10, 6, 13]


def samplers(ranks, costs=COSTS, **options):
    dataset = TensorDataset(torch.tensor(costs))
    return [
        LoadBalancingDistributedSampler(
            dataset, lambda item: int(item[0]), num_replicas=ranks, rank=rank, **options
        )
        for rank in range(ranks)
    ]


def test_it_is_where_bagua_has_it():
    assert bagua.contrib.LoadBalancingDistributedSampler is LoadBalancingDistributedSampler


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 13, 20])
def test_every_sample_is_dealt_and_every_rank_has_as_many(ranks):
    dealt = [list(sampler) for sampler in samplers(ranks)]
    assert {len(indices) for indices in dealt} == {-(-len(COSTS) // ranks)}
    assert {index for indices in dealt for index in indices} == set(range(len(COSTS)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_of_a_step_are_neighbours_by_cost(shuffle):
    ranks, order = 3, sorted(COSTS)
    dealt = [list(sampler) for sampler in samplers(ranks, shuffle=shuffle)]
    for step in zip(*dealt, strict=True):
        costs = sorted(COSTS[index] for index in step)
        wraps = costs[0] == order[0] and costs[-1] == order[-1]
        assert wraps or costs[-1] - costs[0] == ranks - 1
    if not shuffle:
        assert [COSTS[index] for index in dealt[0]] == order[::ranks]


def test_an_epoch_shuffles_in_the_same_way_on_all_ranks():
    first, second = samplers(2)
    orders = []
    for epoch in (0, 1, 0):
        for sampler in (first, second):
            sampler.set_epoch(epoch)
        assert first.shuffle_chunks() == second.shuffle_chunks()
        orders.append(list(first))
    assert orders[0] == orders[2] != orders[1]


def test_noise_mixes_the_costs_of_a_step():
    costs = list(range(100))
    quiet, noisy = (samplers(2, costs, random_level=level) for level in (0.0, 1.0))

    def spread(pair):
        return sum(abs(costs[a] - costs[b]) for a, b in zip(*map(list, pair), strict=True))

    assert spread(quiet) == 50 < spread(noisy)


def test_what_fills_no_step_is_dropped_if_told():
    dealt = [list(sampler) for sampler in samplers(4, drop_last=True, shuffle=False)]
    indices = [index for own in dealt for index in own]
    assert [len(own) for own in dealt] == [3] * 4
    assert len(set(indices)) == len(indices) == 12


def test_a_loader_takes_it():
    sampler = samplers(2, shuffle=False)[1]
    loader = DataLoader(sampler.dataset, batch_size=2, sampler=sampler)
    batches = [batch.tolist() for (batch,) in loader]
    assert [cost for batch in batches for cost in batch] == [COSTS[i] for i in sampler]
    assert len(loader) == 4


def by_budget(costs, budget):
    """Batches of consecutive samples whose costs do not exceed a budget together."""

    def batches(indices):
        found = [[]]
        for index in indices:
            if found[-1] and sum(costs[i] for i in found[-1]) + costs[index] > budget:
                found.append([])
            found[-1].append(index)
        return found

    return batches


@pytest.mark.parametrize("drop_last", [False, True])
def test_all_ranks_have_as_many_batches(drop_last):
    costs = [1] * 12 + [9] * 3
    ranks = samplers(3, costs, shuffle=False)
    for sampler in ranks:
        sampler.indices_of = lambda rank: list(range(12)) if rank == 0 else [12, 13, 14]
    own = [
        LoadBalancingDistributedBatchSampler(sampler, by_budget(costs, 9), drop_last)
        for sampler in ranks
    ]
    assert {len(batches) for batches in own} == {2 if drop_last else 3}
    first = list(own[0])
    assert first[:2] == [list(range(9)), [9, 10, 11]]
    assert first[2:] == ([] if drop_last else [list(range(9))]), "it begins again"
    assert list(own[1]) == [[12], [13], [14]][: len(own[1])]


def test_batches_follow_the_epoch():
    sampler = samplers(2)[0]
    batches = LoadBalancingDistributedBatchSampler(sampler, by_budget(COSTS, 20))
    before = list(batches)
    batches.set_epoch(3)
    assert list(batches) != before
    assert sampler.epoch == 3
    assert sorted(i for batch in batches for i in batch)[-1] <= 12


REFUSED = {
    "rank": (dict(num_replicas=2, rank=2), "rank 2 must be from 0 to 1"),
    "noise": (dict(num_replicas=1, rank=0, random_level=1.5), "random_level=1.5"),
    "too_few": (dict(num_replicas=14, rank=0, drop_last=True), "none of 13 sample"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        LoadBalancingDistributedSampler(list(COSTS), lambda item: item, **options)
    with pytest.raises(ValueError, match="must have a length, and a sample"):
        LoadBalancingDistributedSampler([], lambda item: item, num_replicas=1, rank=0)


def test_batches_need_the_sampler_that_balances():
    with pytest.raises(ValueError, match="not list"):
        LoadBalancingDistributedBatchSampler([1], list)
    with pytest.raises(ValueError, match="drop_last=False"):
        LoadBalancingDistributedBatchSampler(samplers(2, drop_last=True)[0], list)
    with pytest.raises(ValueError, match="at least one batch"):
        LoadBalancingDistributedBatchSampler(samplers(2)[0], lambda indices: [])
