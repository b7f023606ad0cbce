"""Local training against exact data-parallel training: a small language model, two ranks.

A byte-level transformer learns the standard library's sources. Each rank has a share of its own;
the validation loss is of a share that no rank trains on, of the anchor where there is one. Bytes
are those that a rank has sent, agreements included.

    python benchmarks/bench_local.py --steps 800

Every arm trains for the same steps, from the same weights, on the same batches.
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import bagua.torch_api as bagua
import torch
import torch.nn.functional as F
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    OuterSGD,
)
from common import machine, write_results
from rank_processes import figures_of
from torch import nn

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 8
TRAINED, HELD_OUT = 3_000_000, 100_000  # bytes
RANKS = 2
LOCAL_SGD, OUTER = OuterSGD(1.0, 0.0), OuterSGD(0.7, 0.8)


def arms(interval):
    """Algorithms by name."""
    return {
        "exact gradients": GradientAllReduceAlgorithm(),
        "bytegrad": ByteGradAlgorithm(hierarchical=False),
        "local SGD": DiLoCoAlgorithm(LOCAL_SGD, interval),
        "DiLoCo": DiLoCoAlgorithm(OUTER, interval),
        "DiLoCo, int4": DiLoCoAlgorithm(OUTER, interval, codec="int4_block"),
        "DiLoCo, 2 bits": DiLoCoAlgorithm(OUTER, interval, codec="bit2_block"),
        "DiLoCo, 2 bits without error feedback": DiLoCoAlgorithm(
            OUTER, interval, codec="bit2_block", error_feedback=False
        ),
        "DiLoCo, 2 fragments, overlap": DiLoCoAlgorithm(
            OUTER,
            interval,
            fragments=[["blocks.0", "embed", "place"], ["blocks.1", "norm", "head"]],
            overlap_steps=interval // 4,
        ),
    }


def sources():
    """(bytes to train on, bytes held out) of the standard library, in an order of its own."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    text = b"".join(files[i].read_bytes() for i in order)[: TRAINED + HELD_OUT]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[:TRAINED], data[TRAINED:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        parts = self.mix(self.before(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, data, offsets):
    windows = data[offsets[:, None] + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def validation(model, held_out):
    """The loss of the anchor, or of weights that all ranks share, on all of the held-out bytes."""
    offsets = torch.arange(0, len(held_out) - CONTEXT - 1, CONTEXT)
    with model.bagua_algorithm.anchor(), torch.no_grad():
        losses = [loss_of(model, held_out, part) for part in offsets.split(256)]
    return torch.stack(losses).mean().item()


def bytes_sent(model):
    stats = model.bagua_stats()
    return stats["total"]["bytes_sent"] + stats["control"]["bytes_sent"]


def train(algorithm, steps):
    """Figures of one arm."""
    trained, held_out = sources()
    rank, size = bagua.get_rank(), bagua.get_world_size()
    share = trained[rank * len(trained) // size : (rank + 1) * len(trained) // size]
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, (t + 1) / 50) * 0.5 * (1 + math.cos(math.pi * t / steps))
    )
    model.with_bagua([optimizer], algorithm)
    generator = torch.Generator().manual_seed(1 + rank)
    start, curve = time.perf_counter(), {}
    for step in range(1, steps + 1):
        offsets = torch.randint(len(share) - CONTEXT - 1, (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss_of(model, share, offsets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step == steps // 2:
            curve[step] = round(validation(model, held_out), 4)
    if isinstance(algorithm, DiLoCoAlgorithm):
        model.bagua_algorithm.sync()
    curve[steps] = round(validation(model, held_out), 4)
    return {
        "validation_loss": curve,
        "bytes_sent": bytes_sent(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.perf_counter() - start, 1),
    }


def run_rank(arguments):
    """Program of each rank; its place in the group is in its environment."""
    torch.set_num_threads(1)
    bagua.init_process_group()
    results = {}
    for name, algorithm in arms(arguments.interval).items():
        if arguments.arm in (None, name):
            results[name] = train(algorithm, arguments.steps)
    if bagua.get_rank() == 0:
        Path(arguments.rank_output).write_text(json.dumps(results))
    bagua.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--interval", type=int, default=20, help="steps from round to round")
    parser.add_argument("--arm", help="only this one")
    parser.add_argument("--dry", action="store_true", help="leave build/benchmarks alone")
    parser.add_argument("--rank-output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_output:
        return run_rank(arguments)
    options = ["--steps", arguments.steps, "--interval", arguments.interval]
    options += ["--arm", arguments.arm] if arguments.arm else []
    result = {
        "machine": machine(),
        "ranks": RANKS,
        "steps": arguments.steps,
        "interval": arguments.interval,
        "arms": figures_of("none", __file__, options, RANKS),
    }
    print(json.dumps(result, indent=2))
    if not arguments.dry:
        print(write_results("bench_local", result))


if __name__ == "__main__":
    main()
