"""Types of ``bagua._C`` for NCCL; there is no such module at run time."""

import torch
from torch.distributed.distributed_c10d import Store

from bagua._C import Communicator

class NcclLibrary:
    @staticmethod
    def find(paths: list[str]) -> NcclLibrary: ...
    @staticmethod
    def open(path: str) -> NcclLibrary: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str: ...

class NcclCommunicator(Communicator):
    def __init__(
        self,
        library: NcclLibrary,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        *,
        alone_too: bool = False,
    ) -> None: ...
    def split(self, members: list[int]) -> NcclCommunicator | None: ...
    def invalidate_if_aborted(self, result: torch.Tensor) -> None: ...
    def failure(self) -> str | None: ...
