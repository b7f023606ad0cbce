"""Transformers, fine-tuning, experts."""

import torch
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    loop,
    weights,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

#: The bias of attention keys has a gradient of rounding only, which Adam would make a step of.
EPSILON = 1e-2


class Transformer(nn.Module):
    """Embedding, one encoder layer, a head; returns loss and logits."""

    def __init__(self, checkpointed=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.checkpointed = checkpointed

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        if self.checkpointed is None:
            hidden = self.layer(hidden)
        else:
            hidden = checkpoint(self.layer, hidden, use_reentrant=self.checkpointed)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.view(-1, 11), labels.view(-1)), logits


def _text(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank + 500)
    return torch.randint(11, (2, 6), generator=generator)


def fine_tuning_with_groups_and_warm_up(wrap, rank, size):
    """No weight decay for biases and norms, another rate for the head, clipping, a schedule."""
    module = Transformer()
    decay = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}], lr=0.01, eps=EPSILON
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 3))
    model = wrap(module, optimizer)
    norms = []
    for step in range(3):
        for micro in range(2):
            with wrap.no_sync(model) if micro == 0 else torch.enable_grad():
                data = _text(2 * step + micro, rank)
                (model(data, data.roll(1, 1))[0] / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return weights(module) | {"norms": torch.stack(norms)}


def mixture_of_experts(wrap, rank, size):
    """Which experts have tokens depends on the rank and the step."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.gate = nn.Linear(5, 4)
            self.experts = nn.ModuleList([nn.Linear(5, 2) for _ in range(4)])

        def forward(self, inputs):
            gates = functional.softmax(self.gate(inputs), 1)
            best = gates.argmax(1)
            out = torch.zeros(len(inputs), 2)
            for k in best.unique().tolist():
                chosen = (best == k).nonzero().squeeze(1)
                part = self.experts[k](inputs[chosen]) * gates[chosen, k, None]
                out = out.index_add(0, chosen, part)
            return out

    module = Experts()
    return loop(
        wrap,
        rank,
        module,
        torch.optim.AdamW(module.parameters(), 0.1),
        lambda model, step: model(batch(step, rank)).square().mean(),
        find_unused_parameters=True,
    )


SITUATIONS = [
    row(fine_tuning_with_groups_and_warm_up),
    row(mixture_of_experts),
]
