"""Times the arms of step_arms.py for bench_step.py, and evaluates the figures."""

import statistics

import torch
import torch.distributed as dist
from step_arms import ARMS, WARM_UP, Arm, make_model, now, started_together


def seconds_of_bulk_all_reduce(numel, device):
    """The least time that the network needs to all_reduce the model in one piece."""
    tensor = torch.zeros(numel, device=device)
    start = started_together(device)
    dist.all_reduce(tensor)
    return now(device) - start


def measure(names, pairs, steps, device, width, pause=0.0):
    """Times all arms in turn, ``pairs`` times, in alternating order; returns rank 0's figures.

    Ratios are medians over the rounds of the ratio within a round, so that a machine that is slower
    for a while slows both sides.
    """
    torch.manual_seed(0)
    model = make_model(width).to(device)
    numel = sum(parameter.numel() for parameter in model.parameters())
    arms = {name: Arm(name, model, pause) for name in names}
    for arm in arms.values():
        arm.seconds_per_step(WARM_UP)  # buckets are laid out anew after the first step
        if arm.name == "qadam":
            arm.step()  # the first compressed one connects anew
    before = {name: (arm.bytes_sent(), arm.steps) for name, arm in arms.items()}

    seconds = {name: [] for name in names}
    bulk = []
    for pair in range(pairs):
        for name in names if pair % 2 == 0 else reversed(names):
            seconds[name].append(arms[name].seconds_per_step(steps))
        bulk.append(seconds_of_bulk_all_reduce(numel, device))
    for arm in arms.values():
        arm.check(arms)

    dense = 2 * 4 * numel * (dist.get_world_size() - 1) / dist.get_world_size()
    sent = {"compute": 0, "ddp": dense, "ddp_adam": dense, "ddp_fp16": dense / 2}
    for name, (bytes_before, steps_before) in before.items():
        if bytes_before is not None:
            arm = arms[name]
            sent[name] = (arm.bytes_sent() - bytes_before) / (arm.steps - steps_before)
    figures = {
        "parameters": numel,
        "pairs": pairs,
        "steps_per_measurement": steps,
        "bulk_all_reduce_seconds": statistics.median(bulk),
        "goodput_bytes_per_second": dense / statistics.median(bulk),
        "arms": {name: summarise(name, seconds, bulk, sent[name] / dense) for name in names},
        "bytes_sent_per_step": {name: sent[name] for name in names},
    }
    if "async" in arms:
        figures["arms"]["async"] |= averaging(arms["async"], statistics.median(bulk))
    return figures


def summarise(name, seconds, bulk, share_of_dense):
    """``to_bound`` is the time over the least possible: max(compute, bytes sent / bulk goodput)."""
    figures = {
        "median_seconds": statistics.median(seconds[name]),
        "min_seconds": min(seconds[name]),
    }
    peer = ARMS[name].peer
    if peer in seconds:
        figures[f"speed_over_{peer}"] = median_ratio(seconds[peer], seconds[name])
    if "compute" in seconds:
        figures["to_compute"] = median_ratio(seconds[name], seconds["compute"])
        bounds = [max(c, b * share_of_dense) for c, b in zip(seconds["compute"], bulk, strict=True)]
        figures["to_bound"] = median_ratio(seconds[name], bounds)
    return figures


def averaging(arm, wire_seconds):
    """Averages applied, and their share of those that interval and wire leave time for."""
    seconds = sum(s for s, _ in arm.averages)
    applied = sum(count for _, count in arm.averages)
    possible = seconds / (0.5 + wire_seconds)
    return {"averages": applied, "averages_of_possible": applied / possible}


def median_ratio(above, below):
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
