"""Momenta in place of gradients: the bits of Adam's first moment, in the units of the gradients."""

import math

import torch
from bagua import _C
from oracle import q_adam as oracle
from support.cases import over
from support.threads.op_ranks import BAD_VALUES, per_dtype

SHAPES = [(), (3,), (5, 7), (2, 3, 4, 5), (0,), (1031,)]
BETAS = [0.9, 0.0, 0.5, 0.99, 0.9, 0.3]


def layout(shapes, gap=0):
    """Offsets and strides of tensors in one memory, and its size; `gap` behind each."""
    offsets, numel = [], 0
    for shape in shapes:
        offsets.append(numel)
        numel += torch.Size(shape).numel() + gap
    return offsets, [list(torch.empty(shape).stride()) for shape in shapes], numel


def make(memories, offsets, strides, betas=None):
    betas = torch.tensor(betas or BETAS[: len(memories)], dtype=torch.float64)
    return _C.UpdateMomentum(memories, offsets, strides, betas, _C.Scratch())


def values(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def flat_of(tensors, offsets, numel, fill=0.0):
    flat = torch.full((numel,), fill, dtype=tensors[0].dtype)
    for tensor, offset in zip(tensors, offsets, strict=True):
        flat[offset : offset + tensor.numel()] = tensor.reshape(-1)
    return flat


@per_dtype
def test_momenta_have_the_bits_of_the_oracle_and_memory_is_only_read(dtype):
    offsets, strides, numel = layout(SHAPES, gap=2)
    gradients, memories = values(SHAPES, dtype, 1), values(SHAPES, dtype, 2)
    before = [memory.clone() for memory in memories]
    flat = flat_of(gradients, offsets, numel, fill=7.0)
    make(memories, offsets, strides).run(flat)
    expected = [
        oracle.local_momentum(m, g, beta)
        for m, g, beta in zip(before, gradients, BETAS, strict=True)
    ]
    assert torch.equal(flat, flat_of(expected, offsets, numel, fill=7.0)), "gaps stay as they are"
    for memory, old in zip(memories, before, strict=True):
        assert torch.equal(memory, old)


@over(scale=[2.0**-3, 2.0, 65536.0, 3.7])
def test_a_scale_scales_to_the_bit_if_it_is_a_power_of_two(scale):
    offsets, strides, numel = layout(SHAPES)
    gradients, memories = values(SHAPES, seed=1), values(SHAPES, seed=2)
    plain = flat_of(gradients, offsets, numel)
    scaled = plain * scale
    op = make(memories, offsets, strides)
    op.run(plain)
    op.run(scaled, grad_scale=scale)
    if math.log2(scale).is_integer():
        assert torch.equal(scaled, plain * scale)
    else:
        torch.testing.assert_close(scaled, plain * scale)
    assert not torch.equal(scaled, plain)


def test_every_memory_meets_its_own_elements_whatever_its_strides():
    slot = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    [gradient], [memory] = values([slot.shape], seed=1), values([slot.shape], seed=2)
    expected = torch.lerp(memory, gradient, 0.5)
    for strided in (memory, memory.to(memory_format=torch.channels_last), memory.mT.clone().mT):
        for scale in (1.0, 4.0):
            flat = torch.zeros(slot.numel())
            view = flat.as_strided(slot.size(), slot.stride())
            view.copy_(gradient * scale)
            make([strided], [0], [list(slot.stride())], [0.5]).run(flat, grad_scale=scale)
            torch.testing.assert_close(view / scale, expected)


def test_betas_are_read_in_every_round():
    betas = torch.tensor([0.9], dtype=torch.float64)
    op = _C.UpdateMomentum([torch.ones(3)], [0], [[1]], betas, _C.Scratch())
    for beta in (0.9, 0.25):
        betas.fill_(beta)
        flat = torch.zeros(3)
        op.run(flat)
        torch.testing.assert_close(flat, torch.full((3,), beta))


@over(beta=[0.9, 0.3, 0.0], bad=BAD_VALUES.values())
def test_a_bad_gradient_gives_a_bad_momentum_and_only_there(bad, beta):
    flat = torch.ones(100)
    flat[41] = bad
    make([torch.ones(100)], [0], [[1]], [beta]).run(flat, grad_scale=8.0)
    assert [i for i in range(100) if not flat[i].isfinite()] == [41]
