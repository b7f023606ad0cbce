"""Types of ``bagua._C`` for operations of sharded training; there is no such module at run time."""

from bagua._C import BucketOp, Codec, Communicator, ReduceOp, RoundMemory, Scratch

class CompressedReduceScatter(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        codec: Codec,
        scratch: Scratch,
        *,
        divisor: float,
        memory: RoundMemory | None = None,
        checksum: bool = False,
    ) -> None: ...

class CompressedAllGather(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        codec: Codec,
        scratch: Scratch,
        *,
        checksum: bool = False,
    ) -> None: ...

class ShardedHierarchical(BucketOp):
    def __init__(
        self,
        node: Communicator,
        inner: list[BucketOp | None],
        scratch: Scratch,
        ranks: int,
        nodes: int,
        op: ReduceOp,
    ) -> None: ...
