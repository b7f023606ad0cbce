"""Optimizers that step on a copy of the weights, which would undo every average."""

import threading
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

    def step(self, closure=None):
        self.update()

    @torch.no_grad()
    def update(self):
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


class EverySecond(Masters):
    """Steps once in two calls, as where gradients of several batches add up."""

    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 2 == 0:
            self.update()


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


class OfAThread(Masters):
    """Steps where torch's dispatcher does not tell this thread of it, as a kernel does."""

    def step(self, closure=None):
        thread = threading.Thread(target=self.update)
        thread.start()
        thread.join()


class LateMasters(Masters):
    """Steps on the weights at first."""

    @torch.no_grad()
    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 5:
            self.update()
        else:
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.02)


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


def warnings_of(name, make):
    errors = []
    texts = training.warnings_of(lambda: errors.append(train(name, make)))
    return texts + [error for error in errors if error]


@over(name=list(ALGORITHMS), make=[Masters, Offloaded, Behind, EverySecond])
def test_an_optimizer_that_steps_on_a_copy_is_refused_after_a_round(ranks, name, make):
    errors = ranks(2, train, name, make)
    assert all(errors), "a rank has trained to its end"
    error = next(e for e in errors if "steps on a copy of the weights that it keeps itself" in e)
    assert f"{make.__name__} steps" in error
    assert "the weights of 'weight' and 1 more" in error
    assert "compute in bfloat16 by torch.autocast" in error


@over(make=[OfAThread, LateMasters])
def test_rounds_that_are_undone_where_no_copy_is_seen_are_a_warning(ranks, make):
    """Not with a round after each step, which leaves none to compare with."""
    first, second = ranks(2, warnings_of, "diloco", make)
    warning = next(text for text in first + second if "seems to step on a copy" in text)
    assert f"{make.__name__} seems" in warning
    assert "were led back to those before by the step() after 5 rounds" in warning


@training.with_group
def wrapped_with_masters_alone(name):
    model = nn.Linear(8, 4)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    return training.error_of(lambda: model.with_bagua([optimizer], ALGORITHMS[name]()))


@over(name=["decentralized", "diloco", "async"])
def test_an_optimizer_of_copies_alone_is_refused_at_the_wrap(ranks, name):
    for error in ranks(2, wrapped_with_masters_alone, name):
        assert "module 'Linear': SGD has none of its parameters, but copies" in error
        assert "made of module.parameters()" in error


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


@training.with_group
def apart(name):
    """Warnings of steps in a constant direction, another one on each rank, as averages oppose."""

    def run():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model.with_bagua([optimizer], ALGORITHMS[name]())
        for _ in range(60 if name != "async" else 600):
            optimizer.zero_grad()
            (model(torch.ones(1, 4)).sum() * (1 - 2 * dist.get_rank())).backward()
            optimizer.step()

    return [text for text in training.warnings_of(run) if "seems to step on a copy" in text]


@over(name=["decentralized", "diloco", "async"])
def test_ranks_that_pull_apart_are_not_warned_of_a_copy(ranks, name):
    assert ranks(2, apart, name) == [[], []]
