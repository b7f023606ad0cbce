"""Types of ``bagua._C`` for what a guard puts around operations; no such module at run time."""

import torch

from bagua._C import BucketOp, Communicator, RoundMemory

class Sampled(BucketOp):
    def __init__(self, inner: BucketOp) -> None: ...
    def request(self, places: torch.Tensor) -> None: ...
    def take(self) -> tuple[torch.Tensor, torch.Tensor, float] | None: ...

class Fallback(BucketOp):
    def __init__(self, usual: BucketOp, other: BucketOp) -> None: ...
    def use_other(self, other: bool) -> None: ...

class SettleResiduals(BucketOp):
    def __init__(
        self, exact: BucketOp, memory: RoundMemory, part: tuple[int, int, int] | None = None
    ) -> None: ...

class MeanOfWeights(BucketOp):
    def __init__(
        self, communicator: Communicator, share: float, replicas: list[torch.Tensor]
    ) -> None: ...
