"""mlbench_core.utils.pytorch.utils: flat copies and orthonormal columns."""

import pytest
import torch
from mlbench_core.utils.pytorch.utils import orthogonalize, pack_tensors, unpack_tensors

DTYPES = {
    "f16": (torch.float16, 2e-3),
    "bf16": (torch.bfloat16, 2e-2),
    "f32": (torch.float32, 2e-6),
    "f64": (torch.float64, 1e-14),
}
per_dtype = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.values(), ids=DTYPES)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def orthogonalized(matrix, **kwargs):
    result = matrix.clone()
    assert orthogonalize(result, **kwargs) is None
    return result


def gram(matrix):
    return matrix.double().T @ matrix.double()


def projection(matrix):
    return matrix.double() @ matrix.double().T


@per_dtype
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (64, 4), (33, 33)], ids=str)
def test_columns_become_orthonormal_and_keep_the_span_of_those_before(shape, dtype, tolerance):
    matrix = randn(*shape, dtype=dtype)
    q = orthogonalized(matrix)
    assert q.dtype == dtype
    identity = torch.eye(shape[1], dtype=torch.float64)
    torch.testing.assert_close(gram(q), identity, rtol=0, atol=2 * tolerance)
    # R = Q^T A is upper triangular with a positive diagonal: column i lies in the span of 0..i.
    r = q.double().T @ matrix.double()
    below = torch.tril(r, -1).abs().max().item()
    assert below <= 40 * tolerance
    assert (r.diagonal() > 0).all()


@per_dtype
def test_zero_and_dependent_columns_become_zero(dtype, tolerance):
    a, b = randn(50, 2, dtype=dtype).T
    q = orthogonalized(torch.stack([a, a, torch.zeros_like(a), 2 * a, b, -a], 1))
    for zero in (1, 2, 3, 5):
        assert torch.equal(q[:, zero], torch.zeros_like(a)), zero
    two = q[:, [0, 4]]
    torch.testing.assert_close(gram(two), torch.eye(2).double(), rtol=0, atol=2 * tolerance)


def test_a_zero_matrix_stays_zero_and_an_empty_one_empty():
    assert torch.equal(orthogonalized(torch.zeros(5, 3)), torch.zeros(5, 3))
    assert orthogonalized(torch.zeros(0, 3)).shape == (0, 3)
    assert orthogonalized(torch.zeros(3, 0)).shape == (3, 0)


def test_more_columns_than_rows_leave_the_rest_zero():
    q = orthogonalized(randn(3, 5))
    torch.testing.assert_close(projection(q), torch.eye(3).double(), rtol=0, atol=1e-6)
    assert torch.equal(q[:, 3:], torch.zeros(3, 2))


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_ill_conditioned_columns_become_orthogonal_to_rounding(condition):
    base = randn(200, 1)
    matrix = base + randn(200, 8, seed=1) / condition
    q = orthogonalized(matrix)
    torch.testing.assert_close(gram(q), torch.eye(8).double(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_squares_neither_underflow_nor_overflow(scale):
    matrix = randn(20, 3)
    q = orthogonalized(matrix * scale, eps=0.0)
    torch.testing.assert_close(q, orthogonalized(matrix), rtol=0, atol=1e-5)


def test_eps_says_what_counts_as_zero_as_a_number_or_a_tensor():
    matrix = torch.tensor([[1e-3, 0.0], [0.0, 1.0]])
    for eps in (1e-2, torch.tensor([1e-2])):
        assert torch.equal(orthogonalized(matrix, eps=eps), torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    assert torch.equal(orthogonalized(matrix), torch.eye(2))


def test_a_transposed_matrix_is_changed_in_its_own_memory():
    memory = randn(3, 20)
    pointer = memory.data_ptr()
    orthogonalize(memory.T)
    assert memory.data_ptr() == pointer
    torch.testing.assert_close(gram(memory.T), torch.eye(3).double(), rtol=0, atol=2e-6)


def test_bad_values_stay_visible():
    matrix = randn(5, 2)
    matrix[1, 0] = float("nan")
    assert orthogonalized(matrix).isnan().all()
    matrix[1, 0] = float("inf")
    assert orthogonalized(matrix).isnan().all()


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)], ids=str)
def test_arguments_that_are_no_matrix_are_refused(bad):
    with pytest.raises(ValueError, match="orthogonalize needs a matrix of floating-point"):
        orthogonalize(bad)


def test_packed_tensors_come_back_bit_for_bit():
    tensors = [
        randn(3, 4).T,
        randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(7.0),
        torch.zeros(0, 5),
        torch.tensor([float("nan"), -0.0, float("inf")]),
    ]
    flat, indices, sizes = pack_tensors(tensors)
    assert flat.shape == (12 + 120 + 1 + 0 + 3,)
    assert indices == [0, 12, 132, 133, 133, 136]
    assert sizes == [tensor.shape for tensor in tensors]
    for tensor, back in zip(tensors, unpack_tensors(flat, indices, sizes), strict=True):
        assert torch.equal(back.view(torch.int32), tensor.contiguous().view(torch.int32))


def test_the_flat_tensor_is_a_copy_and_the_unpacked_ones_are_views_of_it():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    flat, indices, sizes = pack_tensors([parameter])
    assert not flat.requires_grad
    flat.fill_(5)
    assert torch.equal(parameter.detach(), torch.ones(2, 2))
    unpack_tensors(flat, indices, sizes)[0][0, 0] = 9
    assert flat[0] == 9


def test_packing_refuses_mixed_dtypes_and_empty_lists():
    with pytest.raises(ValueError, match="at least one tensor"):
        pack_tensors([])
    with pytest.raises(ValueError, match=r"one dtype, not \[torch.float32, torch.float16\]"):
        pack_tensors([torch.ones(1), torch.ones(1, dtype=torch.float16)])


def test_unpacking_refuses_arguments_that_do_not_match():
    flat, sizes = torch.ones(6), [torch.Size([2]), torch.Size([2, 2])]
    with pytest.raises(ValueError, match="2 sizes need 3 indices, not 2"):
        unpack_tensors(flat, [0, 6], sizes)
    with pytest.raises(ValueError, match=r"end at 7, .* shape \[6\]"):
        unpack_tensors(flat, [0, 2, 7], sizes)
    with pytest.raises(ValueError, match=r"tensor 0 of shape \[2\] .* indices 0 and 3"):
        unpack_tensors(flat, [0, 3, 6], sizes)
    with pytest.raises(ValueError, match="shape"):
        unpack_tensors(flat.view(2, 3), [0, 2, 6], sizes)
