"""``comm_hooks.everywhere`` around ignite's auto_model, which makes DistributedDataParallel."""

import contextlib

from bagua import comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm
from support import hooked, training

ALGORITHMS = {
    "exact": lambda: "gradient_allreduce",
    "bytegrad": lambda: ByteGradAlgorithm(hierarchical=False),
}


def made(algorithm):
    """A model and an optimizer of ignite's, and the handle if there is an algorithm."""
    import torch
    from ignite import distributed as idist

    torch.manual_seed(0)
    context = comm_hooks.everywhere(algorithm) if algorithm else contextlib.nullcontext([])
    network = hooked.network()
    with context as handles:
        model = idist.auto_model(network)
    return model, idist.auto_optim(training.sgd(model)), *handles


@training.with_group
def by_ignite(name):
    """Digests of a training step by step, by ignite's Engine, and bytes sent."""
    from ignite.engine import Engine

    model, optimizer, *handles = made(ALGORITHMS[name]() if name else None)
    digests = []

    def step(engine, number):
        optimizer.zero_grad()
        hooked.plain_step(model, number)
        digests.append(training.model_bits(model))
        optimizer.step()

    Engine(step).run(range(hooked.STEPS), max_epochs=1)
    return digests, [handle.stats()["total"]["bytes_sent"] for handle in handles]


def test_everywhere_reaches_the_wrapper_that_ignite_makes(ranks):
    own, exact, compressed = (ranks(2, by_ignite, name) for name in (None, *ALGORITHMS))
    assert own[0] == own[1]
    assert [digests for digests, _ in exact] == [digests for digests, _ in own]
    assert compressed[0][0] == compressed[1][0] != own[0][0]
    for (_, (sent,)), (_, (less,)) in zip(exact, compressed, strict=True):
        assert 0 < less < 0.35 * sent
