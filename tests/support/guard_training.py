"""A tiny byte-level transformer with AdamW, in which strong compression shows within seconds."""

import inspect
import string

import torch
import torch.distributed as dist
from support import training
from support.every_algorithm import made
from torch import nn
from torch.nn.functional import cross_entropy

WINDOW, BATCH, WIDTH = 24, 8, 32
STEPS = 200


def windows():
    """Windows of the source of one module of the standard library, (n, WINDOW + 1)."""
    text = inspect.getsource(inspect) + inspect.getsource(string)
    codes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long().clamp(max=127)
    return codes[: len(codes) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)


class TinyTransformer(nn.Module):
    """`outlier`: the unit of one parameter, whose gradient is as many times larger than others."""

    def __init__(self, outlier=1.0):
        super().__init__()
        self.symbol = nn.Embedding(128, WIDTH)
        self.place = nn.Embedding(WINDOW, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 128, bias=False)
        self.gain = nn.Parameter(torch.zeros(()))
        self.outlier = outlier
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW))

    def forward(self, codes):
        x = self.symbol(codes) + self.place.weight
        x = self.layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x) * (1 + self.outlier * self.gain)


def loss_of(model, rows):
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(wrap, steps=STEPS, outlier=1.0, seed=1):
    """Train what `wrap(model)` makes, (model, optimizer); (model, loss on held-out windows)."""
    torch.manual_seed(seed)
    model, optimizer = wrap(TinyTransformer(outlier))
    data = windows()
    held_out, share = data[::8], data[1::2]
    order = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, share[torch.randint(len(share), (BATCH,), generator=order)]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    training.assert_ranks_agree(model)
    with torch.no_grad():
        return model, float(loss_of(model.eval(), held_out))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def wrapped(name, model, **arguments_of_wrap):
    """`model` with the algorithm of that name, not qadam, and AdamW, which scales elements."""
    optimizer = adamw(model)
    return model.with_bagua([optimizer], made(name), **arguments_of_wrap), optimizer
