"""A rank's own momentum in place of its gradients: the oracle's bits, kept with finite rounds."""

import pytest
import torch
from bagua import _C
from oracle import q_adam as oracle
from support.threads.op_ranks import BAD_VALUES, per_dtype

#: First elements and betas of slots in a bucket of NUMEL; padding lies in between and behind.
OFFSETS, BETAS, NUMEL = [0, 10, 400, 1000], [0.9, 0.9, 0.5, 0.0], 1100


def values(seed, dtype=torch.float32, numel=NUMEL):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(start, offsets=OFFSETS, betas=BETAS, outcome=None):
    memory = _C.RoundMemory([start.clone()], outcome or _C.RoundOutcome())
    betas = torch.tensor(betas, dtype=torch.float64)
    return _C.LocalMomentum(offsets, betas, memory), memory, betas


def expected(momentum, gradient, offsets=OFFSETS, betas=BETAS):
    ends = [*offsets[1:], momentum.numel()]
    parts = [
        oracle.local_momentum(momentum[begin:end], gradient[begin:end], beta)
        for begin, end, beta in zip(offsets, ends, betas, strict=True)
    ]
    return torch.cat(parts)


@per_dtype
def test_momenta_of_several_rounds_have_the_bits_of_the_oracle(dtype):
    momentum = values(0, dtype)
    op, memory, _ = make(momentum)
    for step in range(1, 5):
        gradient = values(step, dtype)
        flat = gradient.clone()
        op.run(flat, step=step)
        momentum = expected(momentum, gradient)
        assert torch.equal(flat, momentum), step
        assert torch.equal(memory.value(0), momentum), step


@pytest.mark.parametrize("scale", [2.0**-3, 2.0, 65536.0])
def test_a_scale_of_the_gradients_is_not_one_of_the_momentum(scale):
    start, gradient = values(0), values(1)
    op, memory, _ = make(start)
    flat = gradient * scale
    op.run(flat, step=1, grad_scale=scale)
    momentum = expected(start, gradient)
    assert torch.equal(flat, momentum * scale)
    assert torch.equal(memory.value(0), momentum)


def test_betas_are_read_in_every_round_and_padding_stays_zero():
    op, memory, betas = make(torch.zeros(NUMEL), offsets=[0, 100], betas=[0.9, 0.3])
    for step, chosen in enumerate(([0.9, 0.3], [0.5, 0.5]), 1):
        betas.copy_(torch.tensor(chosen, dtype=torch.float64))
        before = memory.value(0).clone()
        flat = torch.ones(NUMEL)
        flat[150:] = 0
        op.run(flat, step=step)
        gradient = torch.ones(NUMEL)
        gradient[150:] = 0
        assert torch.equal(flat, expected(before, gradient, [0, 100], chosen))
        assert not flat[150:].any()


@pytest.mark.parametrize("unfinished", ["another bucket was not finite", "another one is missing"])
def test_a_round_that_does_not_count_changes_no_momentum(unfinished):
    outcome, start = _C.RoundOutcome(), values(0)
    op, memory, _ = make(start, outcome=outcome)
    other = _C.RoundMemory([], outcome)
    op.run(values(1), step=1)
    if "finite" in unfinished:
        other.leave(1, False)
    assert torch.equal(memory.value(0), start)
    flat = values(2)
    op.run(flat, step=2)
    other.leave(2, True)
    assert torch.equal(memory.value(0), expected(start, values(2)))
    assert torch.equal(flat, memory.value(0))


@pytest.mark.parametrize("bad", BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_bad_gradient_gives_a_bad_momentum_and_only_there(bad):
    op, _, _ = make(torch.ones(100), offsets=[0], betas=[0.9])
    flat = torch.ones(100)
    flat[41] = bad
    op.run(flat, step=1, grad_scale=8.0)
    assert [i for i in range(100) if not flat[i].isfinite()] == [41]


def test_invalid_arguments_are_refused_and_named():
    memory = _C.RoundMemory([torch.zeros(3)], _C.RoundOutcome())
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="betas must be 1 contiguous float64"):
        _C.LocalMomentum([0], torch.ones(1), memory)
    with pytest.raises(ValueError, match="betas must be 2 contiguous"):
        _C.LocalMomentum([0, 1], one, memory)
    with pytest.raises(ValueError, match="ascending order"):
        _C.LocalMomentum([1, 0], torch.ones(2, dtype=torch.float64), memory)
    with pytest.raises(ValueError, match="at least one slot"):
        _C.LocalMomentum([], torch.ones(0, dtype=torch.float64), memory)
    op = _C.LocalMomentum([0], one, memory)
    for flat in (torch.zeros(4), torch.zeros(3, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"'eager': the momentum .* must be like the bucket"):
            op.run(flat, step=1)
    assert op.describe() == "LocalMomentum(1 slots)"
