"""Ideas that might bring strong compressors close to exact AdamW, emulated in one process.

    python benchmarks/adamw_compressors.py [--ideas exact "power_sgd rank 4" ...] [--steps 800]
        [--seeds 0 1 2] [--seconds 170]

Trains the byte-level transformer of curves.py with every idea. Two ranks are emulated: two batches
give two gradients per step, and a rule (emulated_rules.py) makes one step of them through a
compressor (emulated_compressors.py). What is done is kept in results/adamw_compressors.json; after
--seconds a run is put aside, and the next start goes on with it.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine
from curve_tasks import TASKS, Transformer, evaluate, loss_of
from emulated_compressors import RANKS, Exact, Largest, LowRank, Part
from emulated_rules import Differences, Gradients, Momenta, Residuals, Rule, Updates

TASK = TASKS["text"]
LEARNING_RATE = 1e-3

Parts = list[Part]


TABLES = frozenset({"symbol.weight", "place.weight", "head.weight"})  # embeddings and the output
COARSE_TABLES: dict[str, Any] = {"exact": TABLES, "codec": "int4_block"}


def vectors(parts: Parts) -> frozenset[str]:
    return frozenset(part.name for part in parts if len(part.shape) < 2)


def low_rank(parts: Parts, rank: int = 4, kept: float = 1.0, **options: Any) -> Residuals:
    return Residuals(LowRank(parts, rank, **options), kept)


def largest(parts: Parts, ratio: float = 0.01, kept: float = 1.0, **options: Any) -> Residuals:
    return Residuals(Largest(parts, ratio, **options), kept)


def by_parameter(parts: Parts, ratio: float = 0.01, **options: Any) -> Residuals:
    """The largest of each matrix, and all vectors."""
    return largest(parts, ratio, scope="parameter", exact=vectors(parts), **options)


def in_4_bits(parts: Parts, ratio: float = 0.02, **options: Any) -> Residuals:
    """More elements of fewer bits: the bytes of 1 %."""
    return by_parameter(parts, ratio, codec="int4_block", **options)


def in_2_bits(parts: Parts, ratio: float = 1 / 64, **options: Any) -> Residuals:
    """As sparse_loco: 64 of each chunk of 4096 elements."""
    return largest(parts, ratio, scope="chunk", codec="bit2_block", **options)


#: Name -> (parts of the model, steps) -> rule.
IDEAS: dict[str, Callable[[Parts, int], Rule]] = {
    "exact": lambda p, n: Gradients(Residuals(Exact(p))),
    # PowerSGD of rank 4.
    "power": lambda p, n: Gradients(low_rank(p)),
    "power, tables exact": lambda p, n: Gradients(low_rank(p, exact=TABLES)),
    "power, warm-up": lambda p, n: Gradients(low_rank(p), n // 10),
    "power, tables exact, warm-up": lambda p, n: Gradients(low_rank(p, exact=TABLES), n // 10),
    "power, tables in 4 bits": lambda p, n: Gradients(low_rank(p, **COARSE_TABLES)),
    "power, tables in 4 bits, warm-up": lambda p, n: Gradients(
        low_rank(p, **COARSE_TABLES), n // 10
    ),
    "power, updates, tables in 4 bits, warm-up": lambda p, n: Updates(
        low_rank(p, **COARSE_TABLES), n // 10
    ),
    "power, tables of rank 16": lambda p, n: Gradients(low_rank(p, wide=TABLES)),
    "power, rank 8": lambda p, n: Gradients(low_rank(p, 8)),
    "power, two iterations": lambda p, n: Gradients(low_rank(p, iterations=2)),
    "power, residuals decay": lambda p, n: Gradients(low_rank(p, kept=0.9)),
    "power, released over 5 steps": lambda p, n: Gradients(low_rank(p), release=0.2),
    "power, local squares": lambda p, n: Gradients(low_rank(p), squares="local"),
    "power, factored squares": lambda p, n: Gradients(low_rank(p), squares="factored"),
    "power, momenta": lambda p, n: Momenta(low_rank(p), n * 15 // 100),
    "power, momenta, warm-up 5 %": lambda p, n: Momenta(low_rank(p), n // 20),
    "momenta, exact": lambda p, n: Momenta(Residuals(Exact(p)), n * 15 // 100),
    "momenta, exact, warm-up 5 %": lambda p, n: Momenta(Residuals(Exact(p)), n // 20),
    "updates, exact": lambda p, n: Updates(Residuals(Exact(p))),
    "power, momenta, v refreshed": lambda p, n: Momenta(low_rank(p), n // 10, 20),
    "power, updates": lambda p, n: Updates(low_rank(p)),
    "power, differences": lambda p, n: Differences(LowRank(p, 4)),
    # Sparse, 1 %.
    "sparse": lambda p, n: Gradients(largest(p)),
    "sparse, by parameter": lambda p, n: Gradients(by_parameter(p)),
    "sparse, by parameter, warm-up": lambda p, n: Gradients(by_parameter(p), n // 10),
    "sparse, 4 bits": lambda p, n: Gradients(in_4_bits(p)),
    "sparse, ratio falls": lambda p, n: Gradients(by_parameter(p, falls=n // 5)),
    "sparse, residuals decay": lambda p, n: Gradients(by_parameter(p, kept=0.9)),
    "sparse, released over 10 steps": lambda p, n: Gradients(by_parameter(p), release=0.1),
    "sparse, local squares": lambda p, n: Gradients(by_parameter(p), squares="local"),
    "sparse, factored squares": lambda p, n: Gradients(by_parameter(p), squares="factored"),
    "sparse, momenta": lambda p, n: Momenta(by_parameter(p), n * 15 // 100),
    "sparse, momenta, 4 bits": lambda p, n: Momenta(in_4_bits(p), n * 15 // 100),
    "sparse, momenta of the model, 4 bits": lambda p, n: Momenta(
        largest(p, 0.02, codec="int4_block"), n * 15 // 100
    ),
    "sparse, momenta, v refreshed": lambda p, n: Momenta(by_parameter(p), n // 10, 20),
    "sparse, updates": lambda p, n: Updates(by_parameter(p)),
    "sparse, updates, warm-up": lambda p, n: Updates(by_parameter(p), n // 10),
    "sparse, updates, masked": lambda p, n: Updates(by_parameter(p), masked=True),
    "sparse, updates, 4 bits": lambda p, n: Updates(in_4_bits(p)),
    "sparse, updates of the model": lambda p, n: Updates(largest(p)),
    "sparse, updates of the model, 4 bits": lambda p, n: Updates(
        largest(p, 0.02, codec="int4_block")
    ),
    "sparse, updates of the model, 4 bits, warm-up": lambda p, n: Updates(
        largest(p, 0.02, codec="int4_block"), n // 10
    ),
    "sparse, updates in 2 bits": lambda p, n: Updates(in_2_bits(p)),
    "sparse, updates in 2 bits, 1/32": lambda p, n: Updates(in_2_bits(p, 1 / 32)),
    "sparse, updates of the model, 4 bits, v shared": lambda p, n: Updates(
        largest(p, 0.02, codec="int4_block"), share=10
    ),
    "sparse, updates of the model, 4 bits, 4 %": lambda p, n: Updates(
        largest(p, 0.04, codec="int4_block")
    ),
    "sparse, differences": lambda p, n: Differences(by_parameter(p).compressor),
}


class Training:
    """An idea with a seed, on the weights that all emulated ranks share."""

    def __init__(self, idea: str, seed: int, steps: int, small: bool) -> None:
        self.idea, self.seed, self.steps, self.done = idea, seed, steps, 0
        torch.manual_seed(seed)
        self.model = Transformer(64, 2) if small else TASK.make_model()
        parameters = dict(self.model.named_parameters())
        self.weights = torch.cat([p.detach().flatten() for p in parameters.values()])
        self.parts, start = [], 0
        for name, parameter in parameters.items():
            self.parts.append(Part(name, start, tuple(parameter.shape)))
            start += parameter.numel()
        self.gradients = [torch.zeros_like(self.weights) for _ in range(RANKS)]
        self.orders = [torch.Generator().manual_seed(1000 * seed + r) for r in range(RANKS)]
        self.rule = IDEAS[idea](self.parts, steps)
        self.sent, self.seconds, self.losses = 0.0, 0.0, {}

    def step(self, data: list[tuple[torch.Tensor, ...]]) -> None:
        began = time.perf_counter()
        parameters = list(self.model.parameters())
        for part, parameter in zip(self.parts, parameters, strict=True):
            parameter.data = self.weights[part.place].view(part.shape)
        for gradient, order, (inputs, targets, *_) in zip(
            self.gradients, self.orders, data, strict=True
        ):
            gradient.zero_()
            for part, parameter in zip(self.parts, parameters, strict=True):
                parameter.grad = gradient[part.place].view(part.shape)
            batch = torch.randint(len(targets), (TASK.batch,), generator=order)
            loss_of(self.model, inputs[batch], targets[batch]).backward()
        rate = LEARNING_RATE * (1 - 0.95 * self.done / self.steps)
        self.rule.step(self.weights, self.gradients, rate)
        self.done += 1
        self.sent += self.rule.bytes
        self.seconds += time.perf_counter() - began

    def measure(self, data: list[tuple[torch.Tensor, ...]]) -> None:
        loss, _ = evaluate(self.model, *data[0][2:])
        self.losses[self.done] = round(loss, 4)

    def result(self) -> dict[str, Any]:
        """Bytes are the mean over steps, as a part of the f32 weights'."""
        return {
            "loss": self.losses,
            "bytes": round(self.sent / self.done / (4 * self.weights.numel()), 4),
            "seconds": round(self.seconds, 1),
        }


def train(training: Training, data: Any, until: float, aside: Path) -> bool:
    """Whether the training has ended; if not, it is put aside."""
    while training.done < training.steps:
        if time.monotonic() > until:
            torch.save(training.__dict__, aside)
            return False
        training.step(data)
        if training.done in (training.steps // 2, training.steps):
            training.measure(data)
    aside.unlink(missing_ok=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ideas", nargs="+", default=list(IDEAS), choices=list(IDEAS))
    parser.add_argument("--steps", type=int, default=TASK.steps)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--small", action="store_true", help="2 layers of width 64, to screen")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=RESULTS / "adamw_compressors.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + arguments.seconds
    data = [TASK.data(rank, RANKS) for rank in range(RANKS)]
    for seed in arguments.seeds:
        for idea in arguments.ideas:
            kept = {"machine": machine(), "runs": {}}
            if arguments.results.exists():
                kept = json.loads(arguments.results.read_text())
            size = "0.14 M" if arguments.small else "0.87 M"
            key = f"{idea} | {size} | {arguments.steps} steps | seed {seed}"
            if key in kept["runs"]:
                continue
            training = Training(idea, seed, arguments.steps, arguments.small)
            aside = arguments.results.with_suffix(".aside")
            if aside.exists():
                state = torch.load(aside, weights_only=False)
                if [state[k] for k in ("idea", "seed", "steps")] == [idea, seed, arguments.steps]:
                    training.__dict__.update(state)
            if not train(training, data, until, aside):
                print(f"{key}: {training.done} steps done, put aside", flush=True)
                return
            kept["runs"][key] = training.result()
            arguments.results.write_text(json.dumps(kept, indent=1) + "\n")
            print(key, kept["runs"][key], flush=True)
    print("all done", flush=True)


if __name__ == "__main__":
    main()
