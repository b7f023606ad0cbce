"""GPT-2 small (124 million parameters) over a slow link: held-out loss over seconds and bytes.

    python benchmarks/bench_gpt2.py [--rate 200] [--minutes 10] [--arms ...]

Two ranks in network namespaces of so many Mbit/s, which need root and 16 GB of memory, train for so
many minutes; evaluations are not counted. The text is the standard library's, in byte pairs that
the package tokenizers (`make integrations`) finds. AdamW, one sequence of 256 tokens a rank and
step. Bytes are those that rank 0 has sent on its network device. Results are written to
build/benchmarks/bench_gpt2.json, where those of other arms stay.
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import RESULTS, keep_cases
from curve_runs import INTERVAL, Training, TrainingWithDdp
from curve_tasks import Task
from network import bytes_on_the_device
from rank_processes import figures_of
from torch import nn

RANKS = 2
WIDTH, LAYERS, HEADS, CONTEXT, SYMBOLS = 768, 12, 12, 1024, 50257
WINDOW = 256  # tokens of a sequence
TEXT_BYTES = 12_000_000
HELD_OUT = 16  # sequences
WARM_UP = 20  # steps of the learning rate
#: Name -> (training, name in ARMS of curve_runs.py, steps from one evaluation to the next).
ARMS = {
    "torch DDP": (TrainingWithDdp, "exact", 2),
    "bytegrad, 4 bits with error feedback": (
        Training,
        "bytegrad int4_block, error feedback",
        INTERVAL // 2,
    ),
    "diloco, 4 bits": (Training, "diloco int4_block, error feedback", INTERVAL),
}


class Gpt2(nn.Module):
    """Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019; no dropout."""

    def __init__(self):
        super().__init__()
        self.symbol, self.place = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS if deep else 1))

    def forward(self, codes):
        x = self.symbol(codes) + self.place.weight[: codes.shape[1]]
        return F.linear(self.layers(x, mask=self.mask, is_causal=True), self.symbol.weight)


def codes_of_the_text():
    """Token numbers of the standard library, kept for the next run."""
    path = RESULTS / "gpt2_text.pt"
    if not path.exists():
        from tokenizers import ByteLevelBPETokenizer

        files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
        text = b"\n".join(files[i].read_bytes() for i in order)[:TEXT_BYTES]
        pairs, text = ByteLevelBPETokenizer(), text.decode(errors="replace")
        pairs.train_from_iterator([text], vocab_size=SYMBOLS, show_progress=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.tensor(pairs.encode(text).ids), path)
    return torch.load(path, weights_only=True)


def data(rank, ranks):
    codes = codes_of_the_text()
    windows = codes[: codes.numel() // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    share, test = windows[:-HELD_OUT].chunk(ranks)[rank], windows[-HELD_OUT:]
    return share[:, :-1], share[:, 1:], test[:, :-1], test[:, 1:]


TASK = Task(
    "GPT-2 small",
    data,
    Gpt2,
    lambda parameters: torch.optim.AdamW(parameters, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1),
    qadam={},
    batch=1,
    steps=0,
    clip=1.0,
)


def measure(arm, minutes):
    """Rank 0's (step, seconds, bytes, loss) along a training of so many minutes."""
    bagua.init_process_group()
    kind, name, every = ARMS[arm]
    training = kind(TASK, name, 0, data(dist.get_rank(), RANKS))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        training.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP)
    )
    seconds, step, sent, points = torch.zeros(()), 0, 0, []
    while seconds < 60 * minutes:
        dist.barrier()
        before, begun = bytes_on_the_device(), time.perf_counter()
        for _ in range(every):
            training.step()
            schedule.step()
        dist.barrier()
        seconds += time.perf_counter() - begun
        sent += bytes_on_the_device() - before
        step += every
        dist.broadcast(seconds, 0)
        points.append((step, seconds.item(), sent, training.measure()[0]))
    return {"points": points}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="200", help="Mbit/s")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--quick", action="store_true", help="one evaluation, not kept")
    parser.add_argument("--rank-output", help=argparse.SUPPRESS)
    own = parser.parse_args()
    minutes = 0.01 if own.quick else own.minutes
    if own.rank_output:
        figures = measure(own.arms[0], own.minutes)
        if dist.get_rank() == 0:
            Path(own.rank_output).write_text(json.dumps(figures))
        return bagua.destroy_process_group()

    codes_of_the_text()
    for arm in own.arms:
        print(f"{arm}: trains for {minutes} minutes", flush=True)
        figures = figures_of(own.rate, __file__, ["--arms", arm, "--minutes", minutes], RANKS)
        step, seconds, sent, loss = figures["points"][-1]
        print(
            f"{own.rate} Mbit/s, {arm}: {step} steps in {seconds:.0f} s, "
            f"{sent / step / 1e6:.2f} MB a step, loss {loss:.3f}",
            flush=True,
        )
        if not own.quick:
            keep_cases("bench_gpt2", [{"rate": own.rate, "arm": arm, **figures}], ["rate", "arm"])


if __name__ == "__main__":
    main()
