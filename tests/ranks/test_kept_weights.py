"""Optimizers that step on a copy of the weights, which would undo every average."""

import time

import torch
import torch.distributed as dist
from bagua import BaguaError
from bagua.torch_api.algorithms import (
    AsyncModelAverageAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from support import training
from support.cases import over
from torch import nn

ALGORITHMS = {
    "decentralized": lambda: DecentralizedAlgorithm(hierarchical=False),
    "low precision": lambda: LowPrecisionDecentralizedAlgorithm(hierarchical=False),
    "diloco": lambda: DiLoCoAlgorithm(interval=4),
    "overlapping": lambda: DiLoCoAlgorithm(interval=4, overlap_steps=2),
    "async": lambda: AsyncModelAverageAlgorithm(sync_interval_ms=1),
}
STEPS = 40
STEPS_BESIDE_AVERAGES = 4_000  # of which the first may be late


class Masters(torch.optim.Optimizer):
    """Steps on copies in float64, which it makes in its first step."""

    def __init__(self, params):
        super().__init__(list(params), {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.detach().double().clone())
            master.add_(p.grad, alpha=-0.02)
            p.copy_(master)


class Offloaded(torch.optim.Optimizer):
    """Another optimizer steps on one flat copy, made before the wrap."""

    def __init__(self, params):
        super().__init__(list(params), {})
        self.flat = nn.utils.parameters_to_vector(self.param_groups[0]["params"]).detach()
        self.inner = torch.optim.Adam([self.flat.requires_grad_()], lr=0.02)

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        self.flat.grad = torch.cat([p.grad.flatten() for p in params])
        self.inner.step()
        for p, part in zip(params, self.flat.split([p.numel() for p in params]), strict=True):
            p.data = part.view_as(p).clone()


class Behind(torch.optim.SGD):
    """Steps on copies behind the step of the class that it inherits."""

    def __init__(self, params):
        super().__init__(params, lr=0.02)

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.detach().double().clone())
            p.copy_(master.add_(p.grad, alpha=-0.02))


class Lookahead(torch.optim.SGD):
    """Every third step goes half the way from weights that it keeps."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            slow = state.setdefault("slow", p.clone())
            state["count"] = state.get("count", 0) + 1
            if state["count"] % 3 == 0:
                p.copy_(slow.lerp_(p, 0.5))


class Hidden(torch.optim.Optimizer):
    """Computes outside of torch's operators, and copies the result."""

    def __init__(self, params):
        super().__init__(list(params), {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            pairs = zip(p.view(-1).tolist(), p.grad.view(-1).tolist(), strict=True)
            rows = [weight - 0.02 * gradient for weight, gradient in pairs]
            p.copy_(torch.tensor(rows).view(p.shape))


@training.with_group
def train(name, make):
    """The error of the training, of which each rank pulls to another place; None: there is none."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = make(model.parameters())
    model.with_bagua([optimizer], ALGORITHMS[name]())
    place = 1 + 4 * dist.get_rank()
    store = dist.distributed_c10d._get_default_store()

    try:
        for _ in range(STEPS_BESIDE_AVERAGES if name == "async" else STEPS):
            if name == "async" and store.check(["refused"]):
                return "the other rank is refused"
            optimizer.zero_grad()
            (model(torch.randn(16, 8)) - place).square().mean().backward()
            optimizer.step()
            time.sleep(0.005 if name == "async" else 0)
    except BaguaError as error:
        store.set("refused", "")
        return str(error)
    return None


@over(name=list(ALGORITHMS), make=[Masters, Offloaded, Behind])
def test_an_optimizer_that_steps_on_a_copy_is_refused_after_a_round(ranks, name, make):
    errors = ranks(2, train, name, make)
    assert all(errors), "a rank has trained to its end"
    error = next(e for e in errors if "steps on a copy of the weights that it keeps itself" in e)
    assert f"{make.__name__} steps" in error
    assert "the weights of 'weight' and 1 more" in error
    assert "compute in bfloat16 by torch.autocast" in error


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def still(params):
    return torch.optim.SGD(params, lr=0.0)


def averaged(params):
    return torch.optim.ASGD(params, lr=0.05)


def lookahead(params):
    return Lookahead(params, lr=0.1)


@over(case=[("decentralized", m) for m in (sgd, still, averaged, lookahead)] + [("diloco", Hidden)])
def test_an_optimizer_that_steps_on_the_weights_is_not(ranks, case):
    assert ranks(2, train, *case) == [None, None]
