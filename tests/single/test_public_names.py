"""Every public name of Bagua's documentation is where it was."""

import importlib
import subprocess
import sys

import bagua.fsdp
import bagua.torch_api
import pytest
import torch
from bagua.comm_hooks import Handle
from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.distributed import BaguaDistributedDataParallel, BaguaModule

COLLECTIVES = """
    send recv allgather allgather_inplace allreduce allreduce_inplace alltoall alltoall_inplace
    alltoall_v alltoall_v_inplace barrier broadcast gather gather_inplace reduce reduce_inplace
    reduce_scatter reduce_scatter_inplace scatter scatter_inplace
"""
MODULES = {
    "bagua": "__version__",
    "bagua.comm_hooks": "Handle everywhere register",
    "bagua.fsdp": "Handle compress",
    "bagua.torch_api": COLLECTIVES
    + """
    get_backend init_process_group ReduceOp BaguaModule BaguaTensor get_local_rank get_local_size
    get_rank get_world_size communication algorithms data_parallel contrib write_stats serve_metrics
    leave
    """,
    "bagua.torch_api.communication": COLLECTIVES
    + """
    init_process_group new_group from_torch_group is_initialized broadcast_object
    broadcast_coalesced allreduce_coalesced_inplace get_communicator BaguaProcessGroup CommMember
    comm ReduceOp get_backend
    """,
    "bagua.torch_api.env": """
    get_world_size get_rank get_local_rank get_local_size get_node_rank get_default_bucket_size
    get_master_addr find_free_network_port
    """,
    "bagua.torch_api.ddp_compatible": "DistributedDataParallel",
    "bagua.torch_api.data_parallel": "DistributedDataParallel functional",
    "bagua.torch_api.data_parallel.distributed": "DistributedDataParallel",
    "bagua.torch_api.data_parallel.functional": "all_reduce ReduceOp",
    "bagua.torch_api.distributed": "BaguaModule BaguaDistributedDataParallel",
    "bagua.torch_api.tensor": "BaguaTensor",
    "bagua.torch_api.bucket": "BaguaBucket",
    "bagua.torch_api.contrib": "fuse_optimizer",
    "bagua.torch_api.contrib.fuse.optimizer": "fuse_optimizer is_fused_optimizer",
    "bagua.torch_api.contrib.sync_batchnorm": "SyncBatchNorm",
    "bagua.distributed.run": "main",
    "bagua.distributed.launch": "main",
    "bagua.torch_api.algorithms": "Algorithm AlgorithmImpl GlobalAlgorithmRegistry",
    "bagua.torch_api.algorithms.gradient_allreduce": """
    GradientAllReduceAlgorithm GradientAllReduceAlgorithmImpl
    """,
    "bagua.torch_api.algorithms.bytegrad": "ByteGradAlgorithm ByteGradAlgorithmImpl",
    "bagua.torch_api.algorithms.decentralized": """
    DecentralizedAlgorithm DecentralizedAlgorithmImpl
    LowPrecisionDecentralizedAlgorithm LowPrecisionDecentralizedAlgorithmImpl
    """,
    "bagua.torch_api.algorithms.async_model_average": """
    AsyncModelAverageAlgorithm AsyncModelAverageAlgorithmImpl
    """,
    "bagua.torch_api.algorithms.q_adam": "QAdamOptimizer QAdamAlgorithm QAdamAlgorithmImpl",
}
CLASSES = {
    torch.Tensor: """
    is_bagua_tensor ensure_bagua_tensor to_bagua_tensor bagua_getter_closure bagua_setter_closure
    bagua_backend_tensor bagua_ensure_grad bagua_mark_communication_ready
    bagua_mark_communication_ready_without_synchronization bagua_set_storage bagua_tensor_name
    bagua_module_name
    """,
    BaguaBucket: """
    flattened_tensor check_flatten append_python_op append_centralized_synchronous_op
    append_decentralized_synchronous_op append_low_precision_decentralized_synchronous_op
    append_asynchronous_model_average_op clear_ops bytes bagua_module_name
    """,
    torch.nn.Module: "with_bagua",
    BaguaModule: """
    bagua_module_name bagua_algorithm bagua_optimizers bagua_buckets bagua_ddp process_group
    parameters_to_ignore bagua_train_step_counter bagua_build_params no_sync
    """,
    BaguaDistributedDataParallel: "bagua_build_params parameters_to_ignore module",
    bagua.torch_api.data_parallel.DistributedDataParallel: """
    forward no_sync require_backward_grad_sync parameters_to_ignore bagua_algorithm bagua_optimizers
    bagua_buckets inner broadcast_buffers find_unused_parameters join register_comm_hook scatter
    gather to_kwargs will_sync_module_buffers bagua_build_params bagua_ddp
    """,
    torch.distributed.ProcessGroup: """
    bagua_patch bagua_pg bagua_get_global_communicator bagua_get_inter_node_communicator
    bagua_get_intra_node_communicator
    """,
    BaguaProcessGroup: """
    get_global_communicator get_inter_node_communicator get_intra_node_communicator
    """,
    AlgorithmImpl: """
    need_reset init_tensors tensors_to_buckets init_operations init_forward_pre_hook
    init_backward_hook init_post_backward_hook init_post_optimizer_step_hook
    """,
    bagua.torch_api.algorithms.Algorithm: "reify init",
    Handle: "stats state_dict load_state_dict close",
    bagua.fsdp.Handle: "stats state_dict load_state_dict close",
    type(bagua.torch_api.algorithms.GlobalAlgorithmRegistry): "register get available_algorithms",
}
REGISTERED = "gradient_allreduce bytegrad decentralized low_precision_decentralized async qadam"
REDUCE_OPS = {
    "SUM": 0,
    "PRODUCT": 1,
    "MIN": 2,
    "MAX": 3,
    "BOR": 7,
    "BAND": 8,
    "BXOR": 9,
    "AVG": 10,
}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_its_names(module):
    found = importlib.import_module(module)
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


def test_the_registry_has_upstreams_names():
    registry = bagua.torch_api.algorithms.GlobalAlgorithmRegistry
    assert set(registry.available_algorithms()) >= set(REGISTERED.split())


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.__name__)
def test_a_class_has_its_members(owner):
    assert [name for name in CLASSES[owner].split() if not hasattr(owner, name)] == []


@pytest.mark.parametrize("module", ["communication", "data_parallel.functional"])
def test_reduce_operations_have_upstreams_numbers(module):
    found = importlib.import_module(f"bagua.torch_api.{module}").ReduceOp
    assert {op.name: int(op) for op in found} == REDUCE_OPS


#: Slow to import, torch.distributed.checkpoint by a second that every process would pay,
#: or not there in every environment.
NOT_IMPORTED = (
    *("torch.distributed.checkpoint", "torch._dynamo", "torch._inductor", "sympy"),
    *("sqlite3", "prometheus_client", "tensorboard"),
)


def test_importing_takes_nothing_along_that_is_slow_or_optional():
    found = f"[m for m in sys.modules if m.startswith({NOT_IMPORTED})]"
    source = f"import sys, bagua.comm_hooks; print({found})"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
