"""Every algorithm for 20 steps on GPUs, beside the same run on CPU.

On a GPU that ranks share they talk through host memory (BAGUA_COMM=gloo). With several GPUs these
ranks are dealt out to them, and as many ranks as there are GPUs train over NCCL.
"""

import torch
import torch.distributed as dist
from support import training
from support.async_training import train_until, weights_of
from support.devices import cases_on_each, each_place, ranks_on
from support.error_feedback import wide_network
from support.every_algorithm import CODECS, OWN_WEIGHTS, SYNCHRONOUS, WARM_UP, wrapped

STEPS = 20
ONE_BUCKET = {}
TWO_LANES = {"BAGUA_LANES": "2", **training.SMALL_BUCKETS}
# Of weights, after 20 steps of 0.05 with momentum 0.9.
# Exact algorithms: sums of at most 24 products differ in the last bits only (2**-23 each), and the
# loss, smooth and bounded, hardly amplifies that in 20 steps.
# 8 bits: such a bit may move a code to the next level, 1/255 of a range of about 2; it counts 0.05
# times 1 / (1 - 0.9) in the weight: 4e-3. Few of the 20 x 300 elements are that near to an edge,
# so that one weight is hit twice at most, and what it does to the others is smaller.
# Top-k: two elements that are equal up to that bit may be sent one round later: the same size.
TOLERANCE = {"gradient_allreduce": 1e-5, "decentralized-all": 1e-5, "decentralized-shift-one": 1e-5}
COARSE = 1e-2


@training.with_group
def train(name):
    """The weights of this rank, on CPU, before and after; what its buckets did."""
    model, optimizer = wrapped(name, wide_network())
    start = weights_of(model).cpu()
    for step in range(STEPS):
        training.train(model, optimizer, [training.batch(step, dist.get_rank())])
        if name not in OWN_WEIGHTS:
            training.assert_ranks_agree(model)
    assert {p.device for p in model.parameters()} == {training.device()}
    assert {b.backend_tensor.device for b in model.bagua_buckets} == {training.device()}
    return start, weights_of(model).cpu(), model.bagua_stats()["rounds"]


@cases_on_each("place", name=[*CODECS, *SYNCHRONOUS], env=[ONE_BUCKET, TWO_LANES])
def test_twenty_steps_are_those_of_the_cpu(ranks, name, env, place):
    n = ranks_on(place)
    results = ranks(n, train, name, env=env | training.on_device(place), timeout=60)
    expected = ranks(n, train, name, env=env, timeout=60)
    tolerance = TOLERANCE.get(name, COARSE)
    for (start, weights, rounds), (_, on_cpu, rounds_on_cpu) in zip(results, expected, strict=True):
        assert rounds == rounds_on_cpu > 0
        assert (weights - on_cpu).abs().max() <= tolerance
        # Or else a tolerance proves nothing.
        assert (weights - start).abs().max() > 5 * tolerance


@training.with_group
def average_asynchronously():
    """Whether ranks agree in the warm-up and after the mean of what averaging left."""
    model, optimizer = wrapped("async", training.network())
    for step in range(WARM_UP):
        training.train(model, optimizer, [training.batch(step, dist.get_rank())])
        training.assert_ranks_agree(model)
    for step in range(STEPS):
        training.train(model, optimizer, [training.batch(step, dist.get_rank())])
    # Without learning, averages bring the ranks together: to the mean of what they hold.
    optimizer.param_groups[0]["lr"] = 0.0
    averages = model.bagua_stats()["rounds"]
    train_until(model, optimizer, averages + 5)
    model.bagua_algorithm.abort(model)
    everyone = training.gather(weights_of(model))
    spread = max((weights.to(everyone[0]) - everyone[0]).abs().max().item() for weights in everyone)
    return averages, spread, bool(torch.stack(everyone).isfinite().all())


@each_place
def test_asynchronous_averages_bring_ranks_together(ranks, place):
    env = training.on_device(place)
    for _, spread, finite in ranks(ranks_on(place), average_asynchronously, env=env):
        assert finite
        # w + (mean - snapshot) rounds at the size of the weights, once for each average.
        assert spread <= 1e-5
