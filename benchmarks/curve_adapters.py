"""Loss of LoRA adapters that are trained in rounds of DiLoCo, above that of exact gradients.

    python benchmarks/curve_adapters.py [--ranks 2 4] [--seeds 0 1 2] [--steps 500]

A Llama of 0.14 million parameters learns bytes of Python's standard library in this process, then
adapters of it learn bytes of this repository's C++ sources, on ranks that see different files.
Needs `make integrations`. Prints JSON and keeps it under build/benchmarks/.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

import torch
from bagua.torch_api.algorithms import Algorithm, DiLoCoAlgorithm
from common import machine, write_results
from curve_runs import Training, curve
from curve_tasks import TASKS, WINDOW, evaluate, loss_of, text_data
from rank_processes import figures_of
from torch import nn

SOURCES = Path(__file__).resolve().parents[1] / "csrc"
BASE_STEPS, BATCH, LEARNING_RATE = 1000, 8, 2e-3
HELD_OUT = 1000  # windows
ARMS = {
    "exact": lambda: Algorithm.init("gradient_allreduce"),
    "100 steps, 4 bits": lambda: DiLoCoAlgorithm(codec="int4_block"),
    "50 steps, 4 bits": lambda: DiLoCoAlgorithm(interval=50, codec="int4_block"),
    "20 steps, 4 bits": lambda: DiLoCoAlgorithm(interval=20, codec="int4_block"),
    "10 steps, 4 bits": lambda: DiLoCoAlgorithm(interval=10, codec="int4_block"),
}


class Llama(nn.Module):
    """Logits of the next byte."""

    def __init__(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        size = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        self.inner = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size, **heads))

    def forward(self, codes):
        return self.inner(input_ids=codes).logits


def adapted(path):
    """The pretrained model, of which adapters are trained."""
    import peft

    model = Llama()
    model.load_state_dict(torch.load(path, weights_only=True))
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model.inner = peft.get_peft_model(model.inner, lora)
    return model


def sources(rank, ranks):
    """As text_data, of C++: whole files of a rank, in an order of their names' digests."""
    files = sorted(SOURCES.rglob("*.cpp")) + sorted(SOURCES.rglob("*.h"))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))
    text = b"".join(files[i].read_bytes() for i in order.tolist())
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = codes[: codes.numel() // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    train, test = windows[:-HELD_OUT], windows[-HELD_OUT:]
    share = train.chunk(ranks)[rank]
    return share[:, :-1], share[:, 1:], test[:, :-1], test[:, 1:]


def pretrain(path):
    """Saves the base model; returns its loss on held-out bytes of both texts."""
    inputs, targets, *held_out = text_data(0, 1)
    torch.manual_seed(0)
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, BASE_STEPS)
    for _ in range(BASE_STEPS):
        batch = torch.randint(len(targets), (2 * BATCH,))
        optimizer.zero_grad()
        loss_of(model, inputs[batch], targets[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    torch.save(model.state_dict(), path)
    return evaluate(model, *held_out)[0], evaluate(model, *sources(0, 1)[2:])[0]


class OfAdapters(Training):
    """A training of the adapters alone."""

    def wrap(self):
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = self.task.optimizer(trained)
        self.model.with_bagua([optimizer], ARMS[self.arm]())
        return optimizer


def run_rank(arguments):
    """Program of each rank: the last loss by arm and seed, and bytes of a step."""
    import bagua.torch_api as bagua

    torch.set_num_threads(1)
    bagua.init_process_group(backend="gloo")
    task = dataclasses.replace(
        TASKS["text"],
        make_model=lambda: adapted(arguments.base),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        batch=BATCH,
    )
    data = sources(bagua.get_rank(), bagua.get_world_size())
    figures = {}
    for arm in arguments.arms:
        runs = [
            curve(task, arm, seed, data, arguments.steps, 1, OfAdapters) for seed in arguments.seeds
        ]
        losses = [run["loss"][-1] for run in runs]
        figures[arm] = {"losses": losses, "bytes_per_step": runs[0]["bytes"][-1] / arguments.steps}
        if bagua.get_rank() == 0:
            exact = figures.get("exact", figures[arm])["losses"]
            gaps = [own - other for own, other in zip(losses, exact, strict=True)]
            figures[arm] |= {"loss": statistics.mean(losses), "above": statistics.mean(gaps)}
            print(bagua.get_world_size(), arm, figures[arm], flush=True)
            arguments.rank_output.write_text(json.dumps(figures))
    bagua.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_output:
        return run_rank(arguments)
    torch.set_num_threads(1)
    result = {"machine": machine(), "steps": arguments.steps, "ranks": {}}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.pt"
        result["base"] = pretrain(base)
        for ranks in arguments.ranks:
            options = ["--base", base, "--steps", arguments.steps]
            options += ["--seeds", *arguments.seeds, "--arms", *arguments.arms]
            result["ranks"][ranks] = figures_of("none", __file__, options, ranks)
    print(json.dumps(result, indent=2))
    write_results("curve_adapters", result)
    return None


if __name__ == "__main__":
    main()
