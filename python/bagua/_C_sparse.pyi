"""Types of what ``_C`` has for sparse messages (csrc/binding/bind_sparse.cpp)."""

import torch

from bagua._C import BucketOp, Communicator, RoundMemory, Scratch

def top_k(x: torch.Tensor, k: int) -> torch.Tensor: ...
def index_coding(n: int, k: int) -> str: ...
def pack_indices(indices: torch.Tensor, n: int) -> torch.Tensor: ...
def unpack_indices(bytes: torch.Tensor, k: int, n: int) -> torch.Tensor: ...
def random_order(n: int, seed: int, number: int) -> torch.Tensor: ...
def sparse_message_bytes(numel: int, k: int, values: torch.dtype, device: torch.device) -> int: ...

class Sparse(BucketOp):
    def __init__(
        self, communicator: Communicator, scratch: Scratch, numel: int, k: int, memory: RoundMemory
    ) -> None: ...

class RandomSparse(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        scratch: Scratch,
        numel: int,
        k: int,
        seed: int,
        memory: RoundMemory,
    ) -> None: ...

class SettledAllReduce(BucketOp):
    def __init__(
        self, communicator: Communicator, scratch: Scratch, numel: int, memory: RoundMemory
    ) -> None: ...
