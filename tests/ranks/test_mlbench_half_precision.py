"""FP16Optimizer on several ranks."""

import torch
import torch.distributed as dist
from mlbench_core.optim.pytorch.fp_optimizers import FP16Optimizer
from support.training import (
    assert_ranks_agree,
    batch,
    network,
    squared_error,
    whole_batch,
    with_group,
)

STEPS = 4


@with_group
def train_in_half_precision():
    rank, size = dist.get_rank(), dist.get_world_size()
    model = network(seed=rank).half()
    optimizer = FP16Optimizer(model, size, average_world=True, init_scale=4, scale_window=100)
    optimizer.set_optimizer(torch.optim.SGD([optimizer.fp32_params], lr=0.1))
    oracle = network(seed=0).half().float()
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    updated = []
    for step in range(STEPS):
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        optimizer.backward_loss(squared_error(model, (inputs.half(), targets.half())))
        overflows = step == 1
        if overflows and rank == size - 1:
            model[0].bias.grad.fill_(float("inf"))
        updated.append(optimizer.step())
        assert_ranks_agree(model)
        if not overflows:
            plain.zero_grad()
            squared_error(oracle, whole_batch(step, size)).backward()
            plain.step()
    expected = torch.cat([p.detach().flatten() for p in oracle.parameters()])
    torch.testing.assert_close(optimizer.fp32_params.detach(), expected, atol=3e-3, rtol=1e-2)
    return updated, optimizer.loss_scaler.loss_scale


def test_in_half_precision_an_overflow_of_one_rank_makes_all_skip(ranks):
    assert ranks(3, train_in_half_precision) == [([True, False, True, True], 2.0)] * 3
