"""Members of torch's class: none is inherited that would need torch's reducer."""

import inspect

import pytest
from bagua.torch_api.data_parallel import DistributedDataParallel, DistributedDataParallel_V1_9_0
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

# What is inherited: each of these was read, and works on the attributes that our class has.
INHERITED = set(
    [
        "_active_ddp_module",
        "_build_debug_param_to_name_mapping",
        "_build_params_for_reducer",
        "_check_comm_hook",
        "_check_default_group",
        "_check_sync_bufs_post_fwd",
        "_check_sync_bufs_pre_fwd",
        "_clear_grad_buffer",
        "_default_broadcast_coalesced",
        "_distributed_broadcast_coalesced",
        "_distributed_rank",
        "_find_common_rank",
        "_get_active_ddp_module",
        "_get_data_parallel_params",
        "_get_parameters",
        "_inside_ddp_forward",
        "_log_and_throw",
        "_passing_sync_batchnorm_handle",
        "_register_fused_optim",
        "_set_params_and_buffers_to_ignore_for_model",
        "_sync_buffers",
    ]
)

REFUSED = set(
    [
        "_check_and_sync_module_buffers",
        "_check_global_requires_backward_grad_sync",
        "_ddp_init_helper",
        "_delayed_all_reduce_hook",
        "_fire_reducer_autograd_hook",
        "_match_all_reduce_for_bwd_pass",
        "_match_unused_params_allreduce",
        "_module_wait_for_copy_hook",
        "_register_accum_grad_hook",
        "_register_delay_all_reduce_hook",
        "_root_copy_hook",
        "_set_sparse_metadata",
        "_setup_in_backward_optimizers",
        "_sync_final_model",
        "_update_process_group",
    ]
)

PYTHONS_OWN = {"__module__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl"}


def owner_of(name):
    return next(cls for cls in DistributedDataParallel.__mro__ if name in vars(cls))


def test_each_member_of_torchs_class_was_decided_on():
    theirs = set(vars(TorchDDP)) - PYTHONS_OWN
    left_to_torch = {name for name in theirs if owner_of(name) is TorchDDP}
    assert left_to_torch <= INHERITED, "of the installed torch, which may have fewer"


def test_no_inherited_member_asks_for_the_reducer():
    for name in INHERITED & set(vars(TorchDDP)):
        member = inspect.unwrap(getattr(vars(TorchDDP)[name], "__func__", vars(TorchDDP)[name]))
        member = member.fget if isinstance(member, property) else member
        assert "reducer" not in getattr(getattr(member, "__code__", None), "co_names", ()), name


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_members_of_the_reducer_raise_with_the_alternative(name):
    with pytest.raises(NotImplementedError, match=f"{name} needs the reducer .*; .+"):
        getattr(DistributedDataParallel, name)(object())


def test_baguas_own_name_is_there():
    assert DistributedDataParallel_V1_9_0 is DistributedDataParallel
    assert issubclass(DistributedDataParallel, TorchDDP)
    assert issubclass(DistributedDataParallel, nn.Module)
