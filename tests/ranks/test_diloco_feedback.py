"""DiLoCoAlgorithm with error feedback: bits of the oracle, failures, checkpoints, refusals."""

import warnings

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    DiLoCoAlgorithm,
    OuterSGD,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from ranks.test_diloco import adamw, assert_outer_state_agrees, own_step, own_steps
from support import training
from support.error_feedback import Means, owed, residuals
from torch import nn

ROUNDS = 3  # the third has residuals of residuals
INTERVAL = 2


def wrapped(**arguments):
    """A network, its optimizer, and its weights as they were when it last had stepped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(training.FEATURES, 61), nn.Tanh())
    model.append(nn.Linear(61, training.OUTPUTS))
    optimizer = adamw(model)
    trained = training.weights_after_steps(model, optimizer)
    model.with_bagua([optimizer], DiLoCoAlgorithm(OuterSGD(1.0, 0.0), INTERVAL, **arguments))
    return model, optimizer, trained


@training.with_group
def train_as_the_oracle(codec):
    model, optimizer, trained = wrapped(codec=codec)
    means = Means(codec)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(ROUNDS * INTERVAL):
        own_step(model, optimizer, step)
        if (step + 1) % INTERVAL:
            continue
        assert_outer_state_agrees(model)
        by_rank = training.gather({name: before[name] - x for name, x in trained.items()})
        for bucket in model.bagua_buckets:
            for name, mean in means.of(bucket, by_rank).items():
                assert torch.equal(model.get_parameter(name), before[name] - mean), (step, name)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
    return training.bits(model.parameters()), model.bagua_stats()["buckets"][0]["ops"]


@pytest.mark.parametrize(
    ("size", "codec"), [(2, "bit2_block"), (3, "int4_block"), (4, "block_uint8")]
)
def test_anchors_have_the_bits_of_the_oracle(ranks, size, codec):
    results = ranks(size, train_as_the_oracle, codec, env=training.SMALL_BUCKETS)
    assert len({bits for bits, _ in results}) == 1
    assert all("error feedback" in ops[0] for _, ops in results)


@training.with_group
def nan_in_a_fragment():
    """Residuals before and after a cycle in which rank 1 has NaN in the first of two fragments."""
    model, optimizer, _ = wrapped(codec="bit2_block", fragments=[["0"], ["2"]])
    own_steps(model, optimizer, range(2))
    before = residuals(model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].bias[0] = float("nan")
        optimizer.zero_grad()  # the other fragment stays finite
        optimizer.step()
    else:
        own_step(model, optimizer, 2)
    with_nan = residuals(model)
    own_steps(model, optimizer, range(3, 6))
    assert_outer_state_agrees(model)
    assert all(bool(value.isfinite().all()) for value in residuals(model).values())
    first = all(torch.equal(before[key], with_nan[key]) for key in before if "/0." in key)
    own_step(model, optimizer, 6)
    after = residuals(model)
    return first, any(not torch.equal(before[key], after[key]) for key in before if "/0." in key)


@pytest.mark.filterwarnings("ignore:.*outer round is not finite")
def test_a_fragment_that_is_not_finite_keeps_its_residuals(ranks):
    assert ranks(2, nan_in_a_fragment) == [(True, True)] * 2


@training.with_group
def save(overlap):
    model, optimizer, _ = wrapped(codec="bit2_block", overlap_steps=overlap)
    own_steps(model, optimizer, range(2 * INTERVAL))
    return model.bagua_algorithm.state_dict()


@training.with_group
def load(merged):
    model, optimizer, _ = wrapped(codec="bit2_block", overlap_steps=merged["overlap"])
    model.bagua_algorithm.load_state_dict({k: v for k, v in merged.items() if k != "overlap"})
    state = model.bagua_algorithm.state_dict()
    own_steps(model, optimizer, range(2 * INTERVAL))
    assert_outer_state_agrees(model)
    return state


@pytest.mark.parametrize("overlap", [0, 1], ids=["between-rounds", "in-flight"])
def test_what_is_owed_is_the_same_on_another_number_of_ranks(ranks, overlap):
    states = ranks(3, save, overlap)
    names = [key.removeprefix("anchor/") for key in states[0] if key.startswith("anchor/")]
    expected = owed(states, names)
    assert all(value.any() for value in expected.values())
    merged = {key: value for state in states for key, value in state.items()}
    for size in (1, 4):
        loaded = ranks(size, load, merged | {"overlap": overlap})
        found = owed(loaded, names)
        for name in names:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-9)
    with pytest.raises(Exception, match=r"rank1/error/.*merge what all ranks saved"):
        ranks(2, load, states[0] | {"overlap": overlap})


def test_residuals_belong_to_codecs_of_few_bits():
    assert DiLoCoAlgorithm(codec="int4_block").error_feedback
    assert not DiLoCoAlgorithm(codec="int4_block", error_feedback=False).error_feedback
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not DiLoCoAlgorithm(codec="bf16").error_feedback
        assert not DiLoCoAlgorithm().error_feedback
    with pytest.warns(UserWarning, match=r"DiLoCoAlgorithm: .* without a codec: nothing is lost"):
        assert not DiLoCoAlgorithm(error_feedback=True).error_feedback


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_residuals_of_16_bit_codecs_are_warned_of(codec):
    optimizer = QAdamOptimizer(nn.Linear(2, 2).parameters())
    for make in (
        lambda: DiLoCoAlgorithm(codec=codec, error_feedback=True),
        lambda: ByteGradAlgorithm(codec=codec, error_feedback=True),
        lambda: QAdamAlgorithm(optimizer, codec=codec, error_feedback=True),
    ):
        with pytest.warns(UserWarning, match=f'error_feedback=True with codec="{codec}"'):
            make()
