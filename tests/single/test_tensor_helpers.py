"""`bagua.torch_api.utils`."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import utils


def tensors():
    return [torch.arange(6.0).reshape(2, 3), torch.tensor(7.0), torch.arange(4.0).neg()]


def test_unflatten_is_the_inverse_of_flatten():
    flat = utils.flatten(tensors())
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 0, -1, -2, -3]
    for back, tensor in zip(utils.unflatten(flat, tensors()), tensors(), strict=True):
        assert torch.equal(back, tensor)
        assert back.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("count", [1, 3])
def test_a_flattened_tensor_is_a_copy_without_gradient(count):
    parts = [part.requires_grad_() for part in tensors()[:count]]
    flat = utils.get_flattened_tensor(parts)
    assert not flat.requires_grad
    flat.zero_()
    assert torch.equal(parts[0], tensors()[0])


def test_a_call_sees_all_elements_once_and_changes_every_tensor():
    parts, calls = tensors(), []
    utils.apply_flattened_call(
        parts, lambda flat, by: (calls.append(flat.numel()), flat.mul_(by)), [2]
    )
    assert calls == [11]
    for part, before in zip(parts, tensors(), strict=True):
        assert torch.equal(part, 2 * before)


def test_lists_of_several_dtypes_are_called_by_dtype():
    parts = [torch.ones(2), torch.ones(3, dtype=torch.int64), torch.ones(4)]
    calls = []
    utils.apply_flattened_call_all(parts, lambda flat: (calls.append(flat.numel()), flat.add_(1)))
    assert calls == [6, 3]
    assert all((part == 2).all() for part in parts)


def test_a_list_of_several_dtypes_is_refused_with_the_remedy():
    parts = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
    for function in (utils.get_flattened_tensor, lambda p: utils.apply_flattened_call(p, print)):
        with pytest.raises(
            ValueError, match=r"float32 on cpu and .*int64.*apply_flattened_call_all"
        ):
            function(parts)
    with pytest.raises(ValueError, match="is empty"):
        utils.get_flattened_tensor([])
    with pytest.raises(ValueError, match=r"averages over the ranks, which torch\.int64"):
        utils.apply_flattened_call(parts[1:], dist.all_reduce)


def test_neighbours_in_memory_are_found():
    flat = torch.zeros(10)
    assert utils.check_contiguous([flat[:3], flat[3:4], flat[4:]])
    assert not utils.check_contiguous([flat[:3], flat[4:]])
    assert not utils.check_contiguous([flat[3:], flat[:3]])
    assert utils.check_contiguous([flat])
    assert utils.check_contiguous([])


@pytest.mark.parametrize(
    ("size", "align", "expected"), [(0, 4, 0), (1, 4, 4), (8, 4, 8), (9, 4, 12)]
)
def test_sizes_are_rounded_up(size, align, expected):
    assert utils.align_size(size, align) == expected


def test_names_of_types_and_operations_are_baguas():
    names = {torch.float32: "f32", torch.float16: "f16", torch.uint8: "u8", torch.int64: "i64"}
    assert {dtype: utils.to_bagua_datatype(dtype) for dtype in names} == names
    with pytest.raises(ValueError, match=r"unsupported data type torch\.bfloat16"):
        utils.to_bagua_datatype(torch.bfloat16)
    assert utils.to_bagua_reduce_op(dist.ReduceOp.MAX) == 3
    assert utils.to_bagua_reduce_op(dist.ReduceOp.AVG) == 10
    with pytest.raises(ValueError, match="unsupported reduce op"):
        utils.to_bagua_reduce_op("sum")


def test_outliers_and_the_warm_up_do_not_count():
    scores = [900.0, 800.0, 700.0, 10.0, 11.0, 9.0, 10.0, 500.0, 10.0]
    mean, deviation, left = utils.average_by_removing_extreme_values(scores)
    assert 500.0 not in left
    assert mean == pytest.approx(sum(left) / len(left))
    assert 9.0 <= mean <= 11.0
    assert deviation < 1.0
    assert utils.average_by_removing_extreme_values([4.0]) == (4.0, 0.0, [4.0])
    assert utils.average_by_removing_extreme_values([2.0, 2.0, 2.0])[0] == 2.0
    with pytest.raises(ValueError, match="at least one measurement"):
        utils.average_by_removing_extreme_values([])
