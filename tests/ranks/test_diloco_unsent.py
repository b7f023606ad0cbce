"""Error feedback of local training that stays in the weights."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from ranks.test_diloco import assert_outer_state_agrees, outer_state, own_step
from ranks.test_diloco_feedback import residuals
from support import training
from torch import nn

PLAIN = OuterSGD(1.0, 0.0)


def wrapped(codec, rule=PLAIN, **arguments):
    """A network, its optimizer, and the sum of this rank's steps, by name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(training.FEATURES, 61), nn.Tanh(), nn.Linear(61, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums = {name: torch.zeros_like(p).double() for name, p in model.named_parameters()}

    def add(*_):
        for name, p in model.named_parameters():
            sums[name] += before[name] - p.detach()

    before = {}
    optimizer.register_step_pre_hook(
        lambda *_: before.update({n: p.detach().double() for n, p in model.named_parameters()})
    )
    optimizer.register_step_post_hook(add)  # before the one that makes rounds
    arguments = {"interval": 2, "error_feedback": "weights"} | arguments
    model.with_bagua([optimizer], DiLoCoAlgorithm(rule, codec=codec, **arguments))
    return model, optimizer, sums


@training.with_group
def conserved(codec, arguments, rounds):
    """Largest distance of the mean of all steps from what anchor, weights and servers have."""
    model, optimizer, sums = wrapped(codec, **arguments)
    start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    kept = 0.0
    for step in range(2 * rounds + 1):  # at the end nothing is in flight
        own_step(model, optimizer, step)
        if model.bagua_algorithm._outer.counters["in_flight"] == 0:
            assert_outer_state_agrees(model)
            errors = [value for key, value in residuals(model).items() if "/error/" in key]
            assert not any(value.any() for value in errors), "it is in the weights"
    worst = 0.0
    anchors = outer_state(model)
    servers = [
        (key.split("/")[2:], value)
        for state in training.gather(residuals(model))
        for key, value in state.items()
        if "/server/" in key
    ]
    for name, p in model.named_parameters():
        anchor = anchors[f"anchor/{name}"].double()
        missing = training.mean_over_ranks(anchor - p.detach().double())
        kept = max(kept, float(missing.abs().max()))
        found = start[name] - anchor + missing
        for (first, other), value in servers:
            if other == name:
                found.view(-1)[int(first) : int(first) + value.numel()] += value
        worst = max(worst, float((found - training.mean_over_ranks(sums[name])).abs().max()))
    return worst, kept


@pytest.mark.parametrize("codec", ["int4_block", "bit1_block"])
@pytest.mark.parametrize("arguments", [{}, {"overlap_steps": 1}], ids=["at-once", "overlapped"])
def test_nothing_that_ranks_have_learnt_is_lost(ranks, codec, arguments):
    rounds = 100 if not arguments else 20
    for worst, kept in ranks(3, conserved, codec, arguments, rounds):
        assert worst < 2e-6
        assert kept > 1e-4


@training.with_group
def with_a_codec_that_loses_nothing(codec, feedback):
    """Bits of the weights: every pseudo-gradient is a small multiple of a power of two."""
    model = nn.ParameterDict({"x": nn.Parameter(torch.zeros(300))})
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    rule = OuterSGD(0.5, 0.5)
    algorithm = DiLoCoAlgorithm(rule, 2, codec=codec, error_feedback=feedback)
    model.with_bagua([optimizer], algorithm)
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model["x"].grad = torch.randint(-4, 5, (300,), generator=generator).float()
        optimizer.step()
    return training.bits(model.parameters())


@pytest.mark.filterwarnings("ignore:DiLoCoAlgorithm. error_feedback")
def test_with_a_codec_that_loses_nothing_it_is_diloco(ranks):
    found = ranks(2, with_a_codec_that_loses_nothing, "fp16", "weights")
    assert found == ranks(2, with_a_codec_that_loses_nothing, None, None)


@training.with_group
def synced():
    model, optimizer, _ = wrapped("bit2_block")
    for step in range(5):
        own_step(model, optimizer, step)
    model.bagua_algorithm.sync()
    digests = training.gather(training.bits(model.parameters()))
    errors = [value for key, value in residuals(model).items() if "/error/" in key]
    for step in range(5, 8):
        own_step(model, optimizer, step)
    return len(set(digests)), any(value.any() for value in errors)


def test_after_sync_weights_are_the_anchor_and_residuals_have_the_rest(ranks):
    assert ranks(2, synced) == [(1, True)] * 2


@training.with_group
def narrow():
    model = training.network().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = DiLoCoAlgorithm(codec="int4_block", error_feedback="weights")
    return training.error_of(lambda: model.with_bagua([optimizer], algorithm))


def test_what_weights_cannot_keep_is_refused(ranks):
    for error in ranks(2, narrow):
        assert "parameter '0.weight' is torch.bfloat16, in which rounding loses" in error
    for more in ({"hierarchical": True}, {"elastic": True}, {"inner": "node"}):
        with pytest.raises(ValueError, match=r'error_feedback="weights" has no form for'):
            DiLoCoAlgorithm(codec="int4_block", error_feedback="weights", **more)
    with pytest.raises(ValueError, match=r'takes merge="keep", not 0.5'):
        DiLoCoAlgorithm(codec="int4_block", error_feedback="weights", merge=0.5)
    with pytest.raises(ValueError, match="error_feedback='x' must be"):
        DiLoCoAlgorithm(codec="int4_block", error_feedback="x")
