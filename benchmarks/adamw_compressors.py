"""Ideas that might bring strong compressors close to exact AdamW, emulated in one process.

    python benchmarks/adamw_compressors.py [--ideas exact "power_sgd rank 4" ...] [--steps 800]
        [--seeds 0 1 2] [--rate 2] [--seconds 170]

Trains the byte-level transformer of curves.py with every idea of adamw_ideas.py. Two ranks are
emulated: two batches give two gradients per step, and a rule (emulated_rules.py and its siblings)
makes one step of them through a compressor (emulated_compressors.py). What is done is kept in
results/adamw_compressors.json; after --seconds a run is put aside, and the next start goes on with
it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from adamw_ideas import IDEAS
from common import RESULTS, machine
from curve_tasks import TASKS, Transformer, evaluate, loss_of
from emulated_compressors import RANKS, Part

TASK = TASKS["text"]
LEARNING_RATE = 1e-3


class Training:
    """An idea with a seed, on the weights that all emulated ranks share."""

    def __init__(self, idea: str, seed: int, steps: int, small: bool, rate: float) -> None:
        self.idea, self.seed, self.steps, self.done = idea, seed, steps, 0
        self.rate = rate  # as a multiple of LEARNING_RATE
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
        rate = self.rate * LEARNING_RATE * (1 - 0.95 * self.done / self.steps)
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
    parser.add_argument("--rate", type=float, default=1.0, help="multiple of the learning rate")
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
            if arguments.rate != 1:
                key += f" | rate x {arguments.rate:g}"
            if key in kept["runs"]:
                continue
            training = Training(idea, seed, arguments.steps, arguments.small, arguments.rate)
            aside = arguments.results.with_suffix(".aside")
            if aside.exists():
                state = torch.load(aside, weights_only=False)
                same = ("idea", "seed", "steps", "rate")
                if all(state.get(name) == getattr(training, name) for name in same):
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
