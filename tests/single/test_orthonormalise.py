"""Vectors become orthonormal whatever they were."""

import torch
from bagua import _C
from support.cases import over

SHAPES = [(1, 1, 1), (3, 5, 5), (2, 4, 100), (1, 8, 4096)]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gram(vectors):
    return vectors.double() @ vectors.double().mT


@over(shape=SHAPES, size=[1.0, 1e-30, 1e30])
def test_vectors_are_orthonormal_and_span_the_same(shape, size):
    given = draw(*shape) * size
    vectors = given.clone()
    vanished = _C.orthonormalise(vectors)
    assert vanished.shape == (shape[0], shape[1], 1)
    assert not vanished.any()
    assert (gram(vectors) - torch.eye(shape[1])).abs().max() < 1e-6
    back = given.double() @ vectors.double().mT @ vectors.double()
    assert (back - given).abs().max() < 1e-5 * given.abs().max()


@over(condition=[1e4, 1e7])
def test_ill_conditioned_vectors_are_orthonormal(condition):
    vectors = draw(1, 1, 200) + draw(1, 4, 200, seed=1) / condition
    _C.orthonormalise(vectors)
    assert (gram(vectors) - torch.eye(4)).abs().max() < 1e-6


@over(dtype=[torch.float16, torch.bfloat16])
def test_half_types_are_orthonormal_to_their_precision(dtype):
    vectors = draw(2, 3, 300, dtype=dtype)
    _C.orthonormalise(vectors)
    assert (gram(vectors) - torch.eye(3)).abs().max() < 4 * torch.finfo(dtype).eps


def test_zero_and_dependent_vectors_become_zero():
    vectors = draw(2, 4, 50)
    vectors[0, 1] = 0
    vectors[0, 3] = 2 * vectors[0, 0]
    vectors[1] = 0
    vanished = _C.orthonormalise(vectors)
    assert vanished[:, :, 0].tolist() == [[False, True, False, True], [True] * 4]
    assert (vectors.abs().sum(2) == 0).tolist() == vanished[:, :, 0].tolist()
    assert torch.isfinite(vectors).all()
