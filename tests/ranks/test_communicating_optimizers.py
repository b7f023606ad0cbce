"""Optimizers that communicate, by whatever function, where ranks step on gradients of their own."""

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support import every_algorithm, training
from support.cases import over


def all_to_all(tensor):
    dist.all_to_all_single(torch.empty(2), torch.ones(2))


def between_two(tensor):
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0)


def batched(tensor):
    peer, other = 1 - dist.get_rank(), torch.empty_like(tensor)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, other, peer)]
    ):
        work.wait()


def objects(tensor):
    dist.all_gather_object([None, None], dist.get_rank())


def functional_ones(tensor):
    functional.all_reduce(tensor, "sum", dist.group.WORLD) + 0


def in_a_new_group(tensor):
    dist.broadcast(tensor, 0, group=GROUPS[-1])


def later(tensor):
    global CALLS
    CALLS += 1
    if CALLS == 3:
        dist.broadcast(tensor, 0)


def eager(tensor):
    bagua.broadcast(tensor)


def eager_between_two(tensor):
    (bagua.recv if dist.get_rank() else bagua.send)(tensor, 1 - dist.get_rank())


WAYS = [
    *(all_to_all, between_two, batched, objects, functional_ones),
    *(in_a_new_group, later, eager, eager_between_two),
]
GROUPS, CALLS = [], 0


class Exchanging(torch.optim.SGD):
    """Its class names no collective: another object calls one."""

    exchange = None

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        self.exchange.__func__(self.param_groups[0]["params"][0].detach())
        return loss


class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


def errors_of(name, way, *, around=False):
    global CALLS
    CALLS = 0
    model = training.network()
    optimizer = Exchanging(model.parameters(), lr=0.01)
    optimizer.exchange = staticmethod(way)
    optimizer = Around(optimizer) if around else optimizer
    model.with_bagua([optimizer], every_algorithm.made(name))
    try:
        training.train(model, optimizer, [training.batch(s, dist.get_rank()) for s in range(4)])
    except NotImplementedError as error:
        return str(error)
    finally:
        model.bagua_ddp.close()
    return ""


@training.with_group
def steps_that_send(name):
    GROUPS.append(dist.new_group([0, 1]))
    return [errors_of(name, way, around=way is objects) for way in WAYS]


@over(name=["diloco", "decentralized-all", "low_precision_decentralized", "async"])
def test_a_step_that_sends_is_refused_on_every_rank(ranks, name):
    for errors in ranks(2, steps_that_send, name):
        for way, error in zip(WAYS, errors, strict=True):
            assert "communicates in its step(), and with" in error, way.__name__
            assert "Use a plain optimizer of all parameters" in error


def alone(tensor):
    dist.all_reduce(tensor.clone(), group=GROUPS[dist.get_rank()])


def barrier(tensor):
    dist.barrier()
    bagua.barrier()


@training.with_group
def steps_that_share_no_gradients(name):
    """A group of this rank alone, a barrier; and the user's closure and hooks, which may send."""
    GROUPS[:] = [dist.new_group([rank]) for rank in range(2)]
    errors = [errors_of(name, way) for way in (alone, barrier)]
    model, optimizer = every_algorithm.wrapped(name, training.network())
    optimizer.register_step_post_hook(lambda *_: dist.all_reduce(torch.ones(1)))

    def closure():
        optimizer.zero_grad()
        loss = training.squared_error(model, training.batch(0, dist.get_rank()))
        loss.backward()
        dist.all_reduce(loss.detach())
        bagua.allreduce_inplace(loss.detach())
        return loss

    optimizer.step(closure)
    optimizer.step(closure=closure)
    optimizer.zero_grad()
    training.train(model, optimizer, [training.batch(s, dist.get_rank()) for s in range(4)])
    model.bagua_ddp.close()
    return errors


@over(name=["diloco", "diloco-streaming"])
def test_what_else_sends_during_a_step_is_not_refused(ranks, name):
    assert ranks(2, steps_that_share_no_gradients, name) == [["", ""]] * 2
