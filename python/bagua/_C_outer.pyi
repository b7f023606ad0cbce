"""Types of local training; the contracts are in csrc/op/outer/."""

import torch

from bagua._C import BucketOp, Communicator, RoundMemory, Scratch

SPARSE_CHUNK_NUMEL: int

def outer_step(
    anchors: list[torch.Tensor],
    momenta: list[torch.Tensor],
    means: list[torch.Tensor],
    *,
    lr: float,
    mu: float,
    nesterov: bool,
) -> None: ...
def inner_product(a: list[torch.Tensor], b: list[torch.Tensor]) -> float: ...
def take_deltas(
    weights: list[torch.Tensor],
    anchors: list[torch.Tensor],
    deltas: list[torch.Tensor],
    launched: list[torch.Tensor] = [],
) -> None: ...
def take_anchors(weights: list[torch.Tensor], anchors: list[torch.Tensor]) -> None: ...
def merge_anchors(
    weights: list[torch.Tensor],
    anchors: list[torch.Tensor],
    launched: list[torch.Tensor],
) -> None: ...
def chunked_message_bytes(numel: int, k: int) -> int: ...
def take_chunks(x: torch.Tensor, k: int) -> torch.Tensor: ...

class ChunkedSparse(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        scratch: Scratch,
        *,
        k: int,
        decay: float,
        numel: int,
        memory: RoundMemory,
        checksum: bool = False,
    ) -> None: ...
