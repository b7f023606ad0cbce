"""Local training with an outer optimizer, all ranks in one process, from the formulas.

A fragment's round begins with `x_i` as the ranks have trained them and ends some steps later:

D_i = s(a) - x_i                              s: rounded to the weights' dtype and widened
D   = mean of the D_i, weighted by samples if they are given
mu, eta: given, or GROWING: mu <- mu + 0.2 (c - 0.2), from 0 to 0.8; eta = 1 - 0.375 mu;
                                              c = cos(D, m), a multiple of 1/256
m  <- mu m + D;   u = D + mu m or m;   a <- a - eta u;   weights <- weights + s(a) - x_i
"""

import torch


class Ranks:
    """`models[rank]` and the outer state, by name of the parameter.

    Fragment f of layers `number % fragments == f` begins its round after each (f + 1)-th part of
    `interval` steps, which are counted from the end of the warm-up on.
    """

    def __init__(
        self,
        models,
        optimizer_of,
        samples,
        outer_optimizer,
        interval,
        fragments,
        overlap_steps,
        warmup_steps,
    ):
        self.models = models
        self.optimizers = [optimizer_of(model) for model in models]
        self.shares = torch.tensor(samples or [1] * len(models)).double()
        self.rule = outer_optimizer  # with lr, momentum and nesterov; None: GROWING
        self.grown = [0.0] * fragments
        self.interval, self.fragments = interval, fragments
        self.overlap, self.warmup = overlap_steps, warmup_steps
        self.steps = self.rounds = 0
        self.begun = []  # (step of the end, fragment, {name: the x_i})
        self.momentum = None  # of the last round
        self._take_anchors()

    def _take_anchors(self):
        self.anchors = {
            name: p.detach()
            .to(torch.float64 if p.dtype == torch.float64 else torch.float32)
            .clone()
            for name, p in self.models[0].named_parameters()
        }
        self.momenta = {name: torch.zeros_like(a) for name, a in self.anchors.items()}

    def step(self, loss, batches):
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            loss(model, batch).backward()
        self.steps += 1
        if self.steps <= self.warmup:
            self._average_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.steps <= self.warmup:
            self._take_anchors()
            return
        part, rest = divmod(self.steps - self.warmup, self.interval // self.fragments)
        if rest == 0:
            self.begin_round((part - 1) % self.fragments)
        while self.begun and self.begun[0][0] <= self.steps:
            self.end_round()

    @torch.no_grad()
    def _average_gradients(self):
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            gradients = torch.stack([p.grad.double() for p in parameters])
            mean = torch.tensordot(self.shares, gradients, 1) / self.shares.sum()
            for p in parameters:
                p.grad.copy_(mean)

    def begin_round(self, fragment):
        names = [n for n in self.anchors if int(n.split(".")[0]) % self.fragments == fragment]
        weights = [dict(model.named_parameters()) for model in self.models]
        trained = {name: [own[name].detach().clone() for own in weights] for name in names}
        self.begun.append((self.steps + self.overlap, fragment, trained))

    @torch.no_grad()
    def end_round(self):
        _, fragment, trained = self.begun.pop(0)
        self.rounds += 1
        means = {name: self._mean(self.anchors[name], own) for name, own in trained.items()}
        lr, momentum, nesterov = self.rates(fragment, means)
        self.momentum = momentum
        for name, mean in means.items():
            a, m = self.anchors[name], self.momenta[name]
            m.mul_(momentum).add_(mean)
            u = mean + m * momentum if nesterov else m.clone()
            a.sub_(u * lr)
            for model, x in zip(self.models, trained[name], strict=True):
                p = model.get_parameter(name)
                p.copy_(p.to(a.dtype) - x.to(a.dtype) + a)

    def _mean(self, anchor, trained):
        """Summed as ranks do: in f64, then rounded once."""
        rounded = anchor.to(trained[0].dtype).to(anchor.dtype)
        deltas = torch.stack([(rounded - x.to(anchor.dtype)).double() for x in trained])
        mean = torch.tensordot(self.shares, deltas, 1) / self.shares.sum()
        return mean.to(anchor.dtype)

    def rates(self, fragment, means):
        if self.rule is not None:
            return self.rule.lr, self.rule.momentum, self.rule.nesterov
        d, m = (
            torch.cat([values[name].double().flatten() for name in means])
            for values in (means, self.momenta)
        )
        momentum = self.grown[fragment]
        if m.any() and d.any():
            cosine = round(256 * float(d @ m / (d.norm() * m.norm()))) / 256
            momentum = min(max(momentum + 0.2 * (cosine - 0.2), 0.0), 0.8)
        self.grown[fragment] = momentum
        return 1 - 0.375 * momentum, momentum, True
