"""Local training with an outer optimizer, all ranks in one process, from the formulas.

D_i = s(a) - x_i                              s: rounded to the weights' dtype and widened
D   = mean of the D_i as the codec leaves it
m  <- mu m + D;   u = D + mu m or m;   a <- a - eta u;   x_i <- s(a)
"""

import torch


def exact_mean(deltas):
    """As ranks sum: in f64, then rounded once."""
    return torch.stack([d.double() for d in deltas]).mean(0).to(deltas[0].dtype)


class Ranks:
    """`models[rank]` and the outer state, by name of the parameter."""

    def __init__(self, models, optimizer_of, lr, momentum, nesterov, interval, mean=exact_mean):
        self.models = models
        self.optimizers = [optimizer_of(model) for model in models]
        self.rule = (lr, momentum, nesterov)
        self.interval = interval
        self.mean = mean
        self.steps = 0
        self.anchors = {
            name: p.detach()
            .to(torch.float64 if p.dtype == torch.float64 else torch.float32)
            .clone()
            for name, p in models[0].named_parameters()
        }
        self.momenta = {name: torch.zeros_like(a) for name, a in self.anchors.items()}

    def step(self, loss, batches):
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        self.steps += 1
        if self.steps % self.interval == 0:
            self.outer_step()

    @torch.no_grad()
    def outer_step(self):
        lr, momentum, nesterov = self.rule
        weights = [dict(model.named_parameters()) for model in self.models]
        for name, a in self.anchors.items():
            dtype = weights[0][name].dtype
            rounded = a.to(dtype).to(a.dtype)
            mean = self.mean([rounded - own[name].to(a.dtype) for own in weights])
            m = self.momenta[name]
            m.mul_(momentum).add_(mean)
            u = mean + m * momentum if nesterov else m.clone()
            a.sub_(u * lr)
            for own in weights:
                own[name].copy_(a)
