"""Operations that call Python: functions of users, and communication hooks of torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bagua import _C
from bagua._ops.contract.lane import Lane
from bagua._ops.contract.operation import Operation

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["CommHookFunction", "PythonFunction"]


@dataclass(frozen=True)
class PythonFunction(Operation):
    """A user's function, called with the bucket's name on the lane's thread."""

    function: Callable[[str], None]

    def describe(self) -> str:
        return "python"

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        return _C.PythonOp(self.function)


@dataclass(frozen=True, eq=False)
class CommHookFunction(Operation):
    """A communication hook of torch's DistributedDataParallel: ``hook(state, GradBucket)``."""

    hook: Callable[..., Any]
    state: Any
    one_order = True  # hooks use process groups of the user's, which must see one order

    def describe(self) -> str:
        return f"comm hook {getattr(self.hook, '__qualname__', type(self.hook).__qualname__)}"

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        index, count = bucket.position
        return _C.CommHookOp(
            self.hook,
            self.state,
            index=index,
            count=count,
            parameters=bucket.tensors,
            offsets=[slot.offset for slot in bucket.slots()],
        )
