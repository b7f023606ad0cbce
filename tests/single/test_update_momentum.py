"""Momenta in place of gradients: the bits of Adam's first moment, in the units of the gradients."""

import pytest
import torch
from bagua import _C
from oracle import q_adam as oracle
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


@pytest.mark.parametrize("scale", [2.0**-3, 2.0, 65536.0])
def test_a_scale_that_is_a_power_of_two_only_scales(scale):
    offsets, strides, numel = layout(SHAPES)
    gradients, memories = values(SHAPES, seed=1), values(SHAPES, seed=2)
    plain = flat_of(gradients, offsets, numel)
    scaled = plain * scale
    op = make(memories, offsets, strides)
    op.run(plain)
    op.run(scaled, grad_scale=scale)
    assert torch.equal(scaled, plain * scale)
    assert not torch.equal(scaled, plain)


def test_any_other_scale_scales_up_to_rounding():
    offsets, strides, _ = layout([(1000,)])
    [gradient], [memory] = values([(1000,)], seed=1), values([(1000,)], seed=2)
    flat = gradient * 3.7
    make([memory], offsets, strides).run(flat, grad_scale=3.7)
    torch.testing.assert_close(flat, 3.7 * (0.9 * memory + 0.1 * gradient))


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


@pytest.mark.parametrize("beta", [0.9, 0.3, 0.0])
@pytest.mark.parametrize("bad", BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_bad_gradient_gives_a_bad_momentum_and_only_there(bad, beta):
    flat = torch.ones(100)
    flat[41] = bad
    make([torch.ones(100)], [0], [[1]], [beta]).run(flat, grad_scale=8.0)
    assert [i for i in range(100) if not flat[i].isfinite()] == [41]


def test_invalid_arguments_are_refused_and_named():
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="betas must be 1 contiguous float64"):
        _C.UpdateMomentum([torch.zeros(3)], [0], [[1]], torch.ones(1), _C.Scratch())
    with pytest.raises(ValueError, match="betas must be 2 contiguous"):
        _C.UpdateMomentum([torch.zeros(3)] * 2, [0, 3], [[1], [1]], one, _C.Scratch())
    with pytest.raises(ValueError, match="one memory, offset and strides per slot"):
        _C.UpdateMomentum([torch.zeros(3)], [0, 1], [[1]], one, _C.Scratch())
    with pytest.raises(ValueError, match="at least one slot"):
        _C.UpdateMomentum([], [], [], torch.ones(0, dtype=torch.float64), _C.Scratch())
    with pytest.raises(ValueError, match="without autograd"):
        _C.UpdateMomentum([torch.zeros(3, requires_grad=True)], [0], [[1]], one, _C.Scratch())
    flat = torch.zeros(3)
    for memory in (torch.zeros(4), torch.zeros(3, dtype=torch.float16), flat):
        with pytest.raises(ValueError, match=r"'eager': the momentum of its slot 0 .* of its own"):
            make([memory], [0], [[1]]).run(flat)
    assert make([torch.zeros(3)], [0], [[1]]).describe() == "UpdateMomentum(1 slots)"
