"""torch's tests of DistributedDataParallel that its own class passes on a CPU, and what ours fails.

`python -m deep.torch_suite.run --ddp torch` says which they are for another version of torch.
"""

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
    "test_sync_bn_logged",
    "test_verify_model_across_rank_with_logger",
]

#: Tests that make a DistributedDataParallel and that torch's own class does not pass, and why.
NOT_HERE = {
    "test_DistributedDataParallel": "a static graph's ranks train apart once loaded",
    "test_ddp_device": "asks for the index of a GPU",
    "test_ddp_logging_data_gpu": "asks for the index of a GPU",
    "test_ddp_has_finalized": "torch skips it",
    "test_ddp_profiling_execution_trace": "torch skips it",
    "test_ddp_sync_bn_training_vs_eval": "torch skips it",
}

TESTS = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_DistributedDataParallel_non_default_stream",
    "test_DistributedDataParallel_requires_grad",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_apply_optim_in_backward",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_ddp_apply_optim_in_backward_ignored_params",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_compile_static_graph",
    "test_ddp_create_graph",
    "test_ddp_device_mesh_initialization",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_hook_pickling_powerSGD",
    "test_ddp_ignore_params_arg",
    "test_ddp_inference",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_model_diff_shape_across_ranks",
    "test_ddp_multiple_nested_unused_params_err_ignore_params",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_native_mixed_precision_ignored_params",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_profiling_autograd_profiler",
    "test_ddp_profiling_torch_profiler",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_static_graph_nested_types",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_ddp_zero_output_features",
    "test_get_data_parallel_params",
    "test_grads_same_across_ranks_with_no_sync",
    "test_invalid_static_graph",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_stateless_api_with_ddp",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
    "test_verify_model_across_rank_without_logger",
]

# Why ours does not pass a test.
#: Tests that look for events of gloo, which ranks of one host do not use by default.
OVER_GLOO = {"test_ddp_profiling_autograd_profiler", "test_ddp_profiling_torch_profiler"}
PROFILER = "looks for the Reducer's events in a profile: search_unused_parameters, gloo:all_reduce"
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
    "test_ddp_profiling_autograd_profiler": (PROFILER, "0 not greater than or equal to 1"),
    "test_ddp_profiling_torch_profiler": (PROFILER, "0 not greater than or equal to 1"),
    "test_ddp_unused_params_rebuild_buckets_exception": (UNUSED, "error not raised"),
    "test_invalid_static_graph": (
        STATIC,
        "Your training graph has changed|RuntimeError not raised",
    ),
}
