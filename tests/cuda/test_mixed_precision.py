"""AMP: autocast, and a GradScaler whose skipped steps are all ranks'."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm
from support import training
from support.devices import each_device
from support.error_feedback import wide_network

STEPS, OVERFLOW = 6, 3
ALGORITHMS = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "power_sgd": {"rank": 2, "min_compression_rate": 1.0, "warmup_steps": 0},
    "sparse": {"ratio": 0.1},
}


@training.with_group
def train(name, dtype):
    """Whether each step changed the weights, the scale after it, and the last loss."""
    device = training.device()
    model = wide_network()
    optimizer = training.sgd(model, lr=0.05)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=1000)
    chosen = Algorithm.init(name, **ALGORITHMS[name])
    model.with_bagua([optimizer], chosen, grad_scaler=scaler)
    changed, scales = [], []
    for step in range(STEPS):
        before = training.bits(model.parameters())
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype):
            loss = training.squared_error(model, training.batch(step, dist.get_rank()))
        if step == OVERFLOW and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        training.assert_ranks_agree(model)
        changed.append(before != training.bits(model.parameters()))
        scales.append(scaler.get_scale())
    return (
        changed,
        scales,
        bool(torch.stack([p.isfinite().all() for p in model.parameters()]).all()),
    )


@each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_overflow_on_one_rank_is_a_skipped_step_on_all(ranks, name, dtype, device):
    for changed, scales, finite in ranks(3, train, name, dtype, env=training.on_device(device)):
        assert changed == [step != OVERFLOW for step in range(STEPS)]
        assert scales == [2.0**8] * OVERFLOW + [2.0**7] * (STEPS - OVERFLOW)
        assert finite
