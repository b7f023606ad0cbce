"""Views that synchronizers have of a wrapped module, its buckets and its algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops.contract.operation import BucketView, Operation
from bagua._sync.asynchronous_average import AsynchronousAverage

__all__ = ["Algorithm", "Bucket", "Wrapper"]


class Bucket(BucketView, Protocol):
    """A bucket under construction; see ``BaguaBucket``."""

    ops: list[Operation]
    part: int  # of the plan
    watched: bool
    sampled: _C.Sampled | None
    asynchronous: AsynchronousAverage | None

    def bytes(self) -> int: ...

    def named_views(self) -> list[tuple[str, torch.Tensor]]: ...

    def copy_in(self, index: int) -> None: ...

    def copy_out(self) -> None: ...

    def check_flatten(self) -> bool: ...


class Algorithm(Protocol):
    """An algorithm at work; see ``AlgorithmImpl``."""

    opens_at_forward: bool
    marks_in_backward: bool
    shares_parameters: bool
    steps_in_backward: bool

    def overrides(self, method: str) -> bool: ...

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, torch.nn.Parameter], None]: ...

    def init_pre_backward_hook(self, bagua_ddp: Any) -> Callable[[], None]: ...

    def init_post_backward_hook(self, bagua_ddp: Any) -> Callable[[], None]: ...

    def init_post_optimizer_step_hook(
        self, bagua_ddp: Any
    ) -> Callable[[torch.optim.Optimizer], None]: ...


class Wrapper(Protocol):
    """The wrapper of a module; see ``BaguaDistributedDataParallel``. It is held weakly."""

    bagua_module_name: str
    bagua_optimizers: list[torch.optim.Optimizer]
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    process_group: BaguaProcessGroup

    @property
    def bagua_algorithm(self) -> Algorithm: ...

    @property
    def bagua_buckets(self) -> Sequence[Bucket]: ...

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def communicates_in_backward(self) -> bool: ...

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]: ...

    def bagua_floating_buffers(self) -> list[tuple[str, torch.Tensor]]: ...

    def bagua_whole_buffers(self) -> list[torch.Tensor]: ...

    def weights_sample(self) -> _C.WeightsSample | None: ...

    def open_round_in_backward(self) -> None: ...

    def after_gradients(self) -> None: ...
