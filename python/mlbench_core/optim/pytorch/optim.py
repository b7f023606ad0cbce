"""Optimizers of one process: mlbench-core's documented address."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mlbench_core.optim.pytorch._arguments import needed

__all__ = ["SignSGD", "SparsifiedSGD"]

Closure = Callable[[], Any] | None


class SparsifiedSGD(torch.optim.Optimizer):
    """SGD whose updates have few coordinates, and a memory of the others (Mem-SGD, Algorithm 1).

    Per parameter: m <- m + lr * gradient; the ``sparse_grad_size`` largest entries of m (or random
    ones) leave m and are subtracted from the weights. Stich, Cordonnier, Jaggi: "Sparsified SGD
    with Memory", 2018. The memory is float32, float64 for float64 parameters.

    What mlbench-core's did instead: it overwrote the weights with random numbers, ignored the
    learning rate, did not sparsify, and decayed weights by ``weight_decay`` whatever the learning
    rate. Here weights decay by ``lr * weight_decay`` of themselves. Gradients are left as they are.

    Args:
        params: parameters or groups of them, of any shapes.
        lr: learning rate.
        weight_decay: weight decay (L2 penalty), not sparsified.
        sparse_grad_size: number of coordinates per parameter and step; all, if it has fewer.
        random_sparse: random coordinates instead of the largest.
        seed: of the random coordinates; no global random generator is touched.

    Raises:
        ValueError: an argument is missing or out of range.
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float | None = None,
        weight_decay: float = 0,
        sparse_grad_size: int = 10,
        *,
        random_sparse: bool = False,
        seed: int = 0,
    ) -> None:
        # Checks
        owner = type(self).__name__
        rate = needed(lr, "lr", owner)
        if rate < 0 or weight_decay < 0:
            raise ValueError(f"lr={rate} and weight_decay={weight_decay} must not be negative")
        if sparse_grad_size < 1:
            raise ValueError(f"sparse_grad_size={sparse_grad_size} must be at least 1")

        defaults = {
            "lr": rate,
            "weight_decay": weight_decay,
            "sparse_grad_size": sparse_grad_size,
            "random_sparse": random_sparse,
            "seed": seed,
            "steps": 0,
        }
        super().__init__(needed(params, "params", owner), defaults)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Update the weights.

        Args:
            closure: computes the loss and the gradients; called once, before.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        owned = [(group, p) for group in self.param_groups for p in group["params"]]
        steps = [None if p.grad is None else group["lr"] * p.grad for group, p in owned]
        for (group, p), update in zip(owned, self._sparse(steps), strict=True):
            if update is not None:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update)
        for group in self.param_groups:
            group["steps"] += 1
        return loss

    def _sparse(self, steps: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Values subtracted from each parameter; ``steps``: learning rates times gradients."""
        updates: list[torch.Tensor | None] = []
        remaining = iter(steps)
        for group in self.param_groups:
            generator = torch.Generator().manual_seed(group["seed"] + group["steps"])
            for p, step in zip(group["params"], remaining, strict=False):
                updates.append(None if step is None else self._taken(group, p, step, generator))
        return updates

    def _taken(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        step: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Put a step into the memory of a parameter and take out the update."""
        state = self.state[parameter]
        if "memory" not in state:
            exact = torch.promote_types(parameter.dtype, torch.float32)
            state["memory"] = torch.zeros_like(parameter, dtype=exact)
        memory = state["memory"].add_(step)
        count = min(group["sparse_grad_size"], memory.numel())
        if group["random_sparse"]:
            chosen = torch.randperm(memory.numel(), generator=generator, device="cpu")
            chosen = chosen[:count].to(memory.device)
        else:
            chosen = memory.abs().flatten().topk(count, sorted=False).indices
        update = torch.zeros_like(step)
        update.view(-1)[chosen] = memory.flatten()[chosen].to(update.dtype)
        memory.sub_(update)
        return update

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, and the memory in its own precision."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, saved in state_dict["state"].items():
            if "memory" in saved:
                p = parameters[number]
                self.state[p]["memory"] = saved["memory"].to(p.device, copy=True)

    @torch.no_grad()
    def update_estimated_weights(self, iteration: int, sparse_vector_size: int) -> None:
        """Add the weights to their weighted average over the iterations.

        With tau = size of a parameter / ``sparse_vector_size`` iteration t has the weight
        (t + tau)^2, as in Theorem 2.4 of "Sparsified SGD with Memory".

        Args:
            iteration: t, counted from zero.
            sparse_vector_size: number of coordinates per step.
        """
        t = iteration
        for group in self.param_groups:
            for p in group["params"]:
                tau = p.numel() / sparse_vector_size
                weights_until_t = (t + 1) * (6 * tau**2 + 6 * t * tau + 2 * t**2 + t) / 6
                average = self.state[p].setdefault("estimated_w", p.detach().clone())
                average.lerp_(p, (t + tau) ** 2 / weights_until_t)

    def get_estimated_weights(self) -> list[torch.Tensor]:
        """The averages, in the order of the parameters; before the first, the weights."""
        return [
            self.state.get(p, {}).get("estimated_w", p.detach().clone())
            for group in self.param_groups
            for p in group["params"]
        ]


class SignSGD(torch.optim.SGD):
    """``torch.optim.SGD`` that takes the sign of its direction: x <- x - lr * sign(d).

    d is the gradient with weight decay, filtered by momentum as torch's. Bernstein et al.:
    "signSGD: Compressed Optimisation for Non-Convex Problems", 2018. Nothing is communicated.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        momentum: momentum factor.
        weight_decay: weight decay (L2 penalty).
        dampening: dampening for momentum.
        nesterov: Nesterov momentum.

    Raises:
        ValueError: an argument is missing or out of range.
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float | None = None,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            needed(params, "params", "SignSGD"),
            lr=needed(lr, "lr", "SignSGD"),
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Update the weights.

        Args:
            closure: computes the loss and the gradients; called once, before.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self._direction(group, p, p.grad).sign_(), alpha=group["lr"])
        return loss

    def _direction(
        self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        """A new tensor: the gradient with decay and momentum."""
        decayed = gradient.add(parameter, alpha=group["weight_decay"])
        momentum = group["momentum"]
        if momentum == 0:
            return decayed
        buffer = self.state[parameter].get("momentum_buffer")
        if buffer is None:
            buffer = self.state[parameter]["momentum_buffer"] = decayed.clone()
        else:
            buffer.mul_(momentum).add_(decayed, alpha=1 - group["dampening"])
        return decayed.add_(buffer, alpha=momentum) if group["nesterov"] else buffer.clone()
