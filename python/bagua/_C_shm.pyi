"""Types of ``bagua._C`` for ranks of one host; there is no such module at run time."""

from torch.distributed.distributed_c10d import Store

from bagua._C import Communicator

class SharedMemoryCommunicator(Communicator): ...

def share_memory(
    store: Store, rank: int, size: int, node: int, timeout: float, refusal: str = ""
) -> tuple[SharedMemoryCommunicator | None, str, bool]: ...
