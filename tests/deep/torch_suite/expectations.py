"""torch's tests of DistributedDataParallel that its own class passes on a CPU, and what ours fails.

`python -m deep.torch_suite.run --ddp torch` says whether it does for another version of torch.
"""

import ast
from pathlib import Path

import torch

#: Tests that make a DistributedDataParallel and ask for private members of torch's class.
PRIVATE_MEMBERS = [
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_comm_hook_logging",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_logging_data_cpu",
    "test_ddp_python_error_logged",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_sink_noclone",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_inputs",
    "test_detect_ddp_is_actually_static",
    "test_different_graph_across_ranks",
    "test_skip_all_reduce_unused_parameters",
    "test_static_graph_api_cpu",
    "test_verify_model_across_rank_with_logger",
]

#: Tests that make a DistributedDataParallel and that torch's own class does not pass, and why.
NOT_HERE = {
    "test_DistributedDataParallel": "a static graph's ranks train apart once loaded",
    "test_ddp_device": "asks for the index of a GPU",
    "test_ddp_logging_data_gpu": "asks for the index of a GPU",
    "test_ddp_has_finalized": "torch skips it",
    "test_ddp_profiling_execution_trace": "torch skips it",
}

SUITE = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"


def _functions():
    """Each function of the class with torch's tests, and the names that it uses."""
    tree = ast.parse(SUITE.read_text())
    outer = next(node for node in tree.body if getattr(node, "name", "") == "DistributedTest")
    (tests,) = outer.body
    functions = {}
    for node in tests.body:
        if isinstance(node, ast.FunctionDef):
            names = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
            functions[node.name] = names | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return functions


def _users_of(*names):
    """The tests that use one of the names, by themselves or by a function they call."""
    users = set(names)
    while more := {name for name, used in FUNCTIONS.items() if used & users} - users:
        users |= more
    return {name for name in users if name.startswith("test_")}


FUNCTIONS = _functions()
#: Tests that make a DistributedDataParallel, without those of SyncBatchNorm, which needs a GPU.
DDP_TESTS = _users_of("DistributedDataParallel") - _users_of("SyncBatchNorm")
#: All others: those of another version of torch need no list.
TESTS = sorted(DDP_TESTS - {*PRIVATE_MEMBERS, *NOT_HERE})

# Why ours does not pass a test.
#: Tests that look for events of gloo, which ranks of one host do not use by default.
OVER_GLOO = {"test_ddp_profiling_autograd_profiler", "test_ddp_profiling_torch_profiler"}
PROFILER = (
    "looks for the Reducer's events in a profile: search_unused_parameters, gloo:all_reduce; "
    "a bucket of 1 KiB is added in one message of ours"
)
UNUSED = (
    "expects an error for unused parameters without find_unused_parameters; ours goes on, and all "
    "ranks stay equal"
)
STATIC = (
    "expects torch's words where a static graph changes; ours has its own where more parameters "
    "are used, and goes on where fewer are"
)
MIXED = "mixed_precision is refused: autocast does this"
DEPRECATED = "torch 2.13 deprecates broadcast_buffers, older versions have nothing else"

#: Test: why, and what it says when it fails.
FAILURES = {
    "test_ddp_broadcast_buffers_deprecation_warning": (DEPRECATED, "0 not greater than 0"),
    "test_ddp_multiple_nested_unused_params_err_ignore_params": (UNUSED, "error was not raised"),
    "test_ddp_multiple_nested_unused_params_error": (UNUSED, "error was not raised"),
    **{
        f"test_ddp_native_mixed_precision_{which}": (MIXED, "mixed_precision")
        for which in (
            "grad_as_bucket_view_no_set_grad_none",
            "grad_as_bucket_view_set_grad_to_none",
            "ignored_params",
            "no_grad_as_bucket_view_no_set_grad_none",
            "no_grad_as_bucket_view_set_grad_to_none",
        )
    },
    "test_ddp_profiling_autograd_profiler": (PROFILER, "Expected 6 but got 0"),
    "test_ddp_profiling_torch_profiler": (PROFILER, "Expected 6 but got 0"),
    "test_ddp_unused_params_rebuild_buckets_exception": (UNUSED, "error not raised"),
    "test_invalid_static_graph": (
        STATIC,
        "Your training graph has changed|RuntimeError not raised",
    ),
}
