"""Random rounds: every element once per epoch, orders without a pattern, own generator."""

import math

import pytest
import torch
from bagua import _C
from support.threads.sparse_ranks import bring, run_rounds


@pytest.mark.parametrize(("numel", "k"), [(100, 7), (31, 1), (64, 64), (5003, 150)])
def test_random_rounds_send_every_element_once_per_epoch(numel, k):
    rounds = -(-numel // k)
    ones = [[torch.ones(numel)] * 2] * (3 * rounds)
    seen = run_rounds(2, "random", k, ones, remembers=False)[0]
    orders = []
    for epoch in range(3):
        flats = [flat for flat, _ in seen[epoch * rounds : (epoch + 1) * rounds]]
        assert torch.equal(sum(flats), torch.ones(numel)), "each once, the tail too"
        assert all(int(flat.sum()) <= k for flat in flats)
        orders.append([flat.nonzero().flatten().tolist() for flat in flats])
    if rounds > 1:
        assert orders[0] != orders[1], "another order in another epoch"


def test_random_orders_are_permutations_that_seed_and_number_decide():
    for n in (1, 2, 3, 100, 1024, 4097):
        order = _C.random_order(n, 5, 0)
        assert torch.equal(order.sort().values, torch.arange(n))
    assert torch.equal(_C.random_order(1000, 5, 7), _C.random_order(1000, 5, 7))
    others = [_C.random_order(1000, 5, 8), _C.random_order(1000, 6, 7)]
    for other in others:
        same = (other == _C.random_order(1000, 5, 7)).sum()
        assert same < 12, "about one in a thousand places by chance"


def test_random_orders_have_no_pattern():
    """The frequency of a value in the first tenth of an order is distributed as by chance."""
    n, orders = 500, 400
    counts = torch.zeros(n)
    for number in range(orders):
        counts[_C.random_order(n, 1, number)[: n // 10]] += 1
    mean, sigma = orders / 10, math.sqrt(orders * 0.1 * 0.9)
    assert counts.mean() == mean
    assert 0.8 * sigma < counts.std() < 1.2 * sigma
    assert (counts - mean).abs().max() < 5 * sigma


def test_global_random_generators_are_not_touched():
    before = torch.get_rng_state()
    run_rounds(2, "random", 5, bring(2, 100, torch.float32))
    assert torch.equal(torch.get_rng_state(), before)
