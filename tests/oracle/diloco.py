"""Local training with an outer optimizer, all ranks in one process, from the formulas.

D_i = s(a) - x_i                              s: rounded to the weights' dtype and widened
D   = mean of the D_i as the codec leaves it
mu, eta: given, or GROWING: mu <- mu + 0.2 (c - 0.2), from 0 to 0.8; eta = 1 - 0.375 mu;
                                              c = cos(D, m), a multiple of 1/256
m  <- mu m + D;   u = D + mu m or m;   a <- a - eta u;   x_i <- s(a)
"""

import torch

GROWING = (None, None, True)  # (lr, momentum, nesterov)


def exact_mean(deltas):
    """As ranks sum: in f64, then rounded once."""
    return torch.stack([d.double() for d in deltas]).mean(0).to(deltas[0].dtype)


class Ranks:
    """`models[rank]` and the outer state, by name of the parameter."""

    def __init__(self, models, optimizer_of, lr, momentum, nesterov, interval, mean=exact_mean):
        self.models = models
        self.optimizers = [optimizer_of(model) for model in models]
        self.rule = (lr, momentum, nesterov)
        self.momentum = momentum or 0.0  # of the last outer step
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
        weights = [dict(model.named_parameters()) for model in self.models]
        means = {}
        for name, a in self.anchors.items():
            dtype = weights[0][name].dtype
            rounded = a.to(dtype).to(a.dtype)
            means[name] = self.mean([rounded - own[name].to(a.dtype) for own in weights])
        lr, momentum, nesterov = self.rates(means)
        for name, a in self.anchors.items():
            mean, m = means[name], self.momenta[name]
            m.mul_(momentum).add_(mean)
            u = mean + m * momentum if nesterov else m.clone()
            a.sub_(u * lr)
            for own in weights:
                own[name].copy_(a)

    def rates(self, means):
        lr, momentum, nesterov = self.rule
        if momentum is not None:
            return lr, momentum, nesterov
        d, m = (
            torch.cat([x.double().flatten() for x in values.values()])
            for values in (means, self.momenta)
        )
        if m.any() and d.any():
            cosine = round(256 * float(d @ m / (d.norm() * m.norm()))) / 256
            self.momentum = min(max(self.momentum + 0.2 * (cosine - 0.2), 0.0), 0.8)
        return 1 - 0.375 * self.momentum, self.momentum, nesterov
