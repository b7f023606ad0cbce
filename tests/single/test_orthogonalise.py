"""Columns become orthonormal whatever they were."""

import pytest
import torch
from bagua import _C

SHAPES = [(1, 1, 1), (3, 5, 5), (2, 100, 4), (1, 4096, 8)]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gram(columns):
    return columns.double().mT @ columns.double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_columns_are_orthonormal_and_span_the_same(shape):
    given = draw(*shape)
    columns = given.clone()
    vanished = _C.orthogonalise(columns)
    assert vanished.shape == (shape[0], 1, shape[2])
    assert not vanished.any()
    assert (gram(columns) - torch.eye(shape[2])).abs().max() < 1e-6
    back = columns.double() @ (columns.double().mT @ given.double())
    assert (back - given).abs().max() < 1e-5 * given.abs().max()


@pytest.mark.parametrize("condition", [1e4, 1e7])
def test_ill_conditioned_columns_are_orthonormal(condition):
    base = draw(1, 200, 1)
    columns = base + draw(1, 200, 4, seed=1) / condition
    _C.orthogonalise(columns)
    assert (gram(columns) - torch.eye(4)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_orthonormal_to_their_precision(dtype):
    columns = draw(2, 300, 3, dtype=dtype)
    _C.orthogonalise(columns)
    assert (gram(columns) - torch.eye(3)).abs().max() < 4 * torch.finfo(dtype).eps


def test_zero_and_dependent_columns_become_zero():
    columns = draw(2, 50, 4)
    columns[0, :, 1] = 0
    columns[0, :, 3] = 2 * columns[0, :, 0]
    columns[1] = 0
    vanished = _C.orthogonalise(columns)
    assert vanished[:, 0].tolist() == [[False, True, False, True], [True] * 4]
    assert (columns.abs().sum(1) == 0).tolist() == vanished[:, 0].tolist()
    assert torch.isfinite(columns).all()


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_columns_are_orthonormal(size):
    columns = draw(1, 64, 3) * size
    _C.orthogonalise(columns)
    assert (gram(columns) - torch.eye(3)).abs().max() < 1e-6
