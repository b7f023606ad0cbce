"""Types of ``bagua._C`` for dynamic lanes; there is no such module at run time."""

from collections.abc import Callable
from typing import Any

import torch

from bagua._C import BucketOp, CountingCommunicator, FailureBoard, RoundMemory, RoundOutcome

class GradientBucket:
    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        parameters: list[torch.Tensor],
        offsets: list[int],
    ) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def buffer(self) -> torch.Tensor: ...
    @property
    def parameters(self) -> list[torch.Tensor]: ...
    @property
    def offsets(self) -> list[int]: ...

class BucketOperations:
    def __init__(
        self,
        name: str,
        description: str,
        ops: list[BucketOp],
        scale: float = 1.0,
        memory: RoundMemory | None = None,
    ) -> None: ...

class Posted:
    def wait(self) -> None: ...
    @property
    def done(self) -> bool: ...

class DynamicLane:
    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        ops: list[CountingCommunicator],
        control: CountingCommunicator,
        board: FailureBoard | None = None,
    ) -> None: ...
    def post(
        self,
        operations: BucketOperations,
        flat: torch.Tensor,
        *,
        round: int,
        grad_scale: float = 1.0,
    ) -> Posted: ...
    def check(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def transport_failed(self, reason: str) -> None: ...
    def stop(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class DdpHook:
    def __init__(
        self,
        lane: DynamicLane,
        operations: Callable[[GradientBucket, int], BucketOperations],
        *,
        grad_scale: Callable[[], float] | None = None,
        outcome: RoundOutcome | None = None,
    ) -> None: ...
    @property
    def round(self) -> int: ...
    def register(self, reducer: Any) -> None: ...
    def settle(self) -> None: ...
    def renew(self, round: int) -> None: ...
