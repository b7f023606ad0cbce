"""The wrapper and its algorithm, as the other files of this folder see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from bagua._core.group.process_group import BaguaProcessGroup
from bagua._guard.guard import Guard, GuardAtWork
from bagua._sync.wrapper import Algorithm

__all__ = ["Owner", "WorkingAlgorithm"]


class WorkingAlgorithm(Algorithm, Protocol):
    """See ``AlgorithmImpl``."""

    broadcast_buffers: bool
    ranks_agree: bool | None
    reads_grad_scale: bool
    complex_parameters: bool
    sparse_gradients: bool
    default_guard: Guard | None
    refuses_guard: str

    def init_tensors(self, bagua_ddp: Any) -> list[torch.Tensor]: ...

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool
    ) -> Any: ...

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None: ...

    def mark_pending(self, bagua_ddp: Any) -> bool: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def carry_over(self, state: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]: ...


class Owner(Protocol):
    """See ``BaguaDistributedDataParallel``."""

    bagua_module_name: str
    bagua_optimizers: list[torch.optim.Optimizer]
    bagua_train_step_counter: int
    bagua_buckets: Any
    process_group: BaguaProcessGroup
    gradient_as_bucket_view: bool
    find_unused_parameters: bool
    static_graph: bool
    broadcast_buffers: bool
    guard: GuardAtWork | None

    @property
    def bagua_algorithm(self) -> WorkingAlgorithm: ...

    @property
    def module(self) -> torch.nn.Module: ...

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]: ...

    def rebuild(self) -> None: ...
