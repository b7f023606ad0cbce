"""Types of local training; the contracts are in csrc/op/outer/."""

import torch

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
