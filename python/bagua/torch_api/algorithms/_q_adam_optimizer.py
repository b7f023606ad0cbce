"""``QAdamOptimizer``: Adam that can continue from an averaged first moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adam import adam

from bagua._sync.optimizer_steps import only_makes_state

if TYPE_CHECKING:
    from bagua.torch_api.algorithms.q_adam import QAdamAlgorithmImpl


#: Elements of a parameter that a step on a CPU works on at a time.
CACHED = 131072


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam with a warm-up, after which the second moment is frozen (Tang et al., ICML 2021).

    The first ``warmup_steps`` steps are those of ``torch.optim.Adam(foreach=False)``, bit for bit.
    Later steps ``t``, with the second moment ``v`` as the warm-up of ``w`` steps left it::

        m <- beta1 m + (1 - beta1) (g + weight_decay p)
        d <- m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^w) + eps)
        p <- p - lr * min(max(d, -c), c), with c = max(1, (1 - beta1) / sqrt(1 - beta2))

    The bias correction of ``v`` is frozen with it. In Bagua it goes on counting, and steps grow by
    up to ``1 / sqrt(1 - beta2^w)``: 3.2 times after 100 steps with the default betas.

    ``c``, 3.2 with the default betas, is Adam's own bound of a step (Kingma and Ba, ICLR 2015,
    section 2.1). A frozen ``v`` does not keep it: an element whose gradient was zero in the
    warm-up, as behind an inactive ReLU, would move by ``lr m / eps`` later.

    With ``QAdamAlgorithm`` the mean over ranks of ``beta1 m + (1 - beta1) g`` travels in 8 bits
    after the warm-up: when ``backward()`` returns, ``.grad`` holds that mean, the momentum, which
    ``step()`` takes over. Weight decay is added in ``step()``, where it loses nothing and all ranks
    add the same. Alone, this is an optimizer like any other, which computes ``m`` from ``.grad``.

    Args:
        params: parameters or parameter groups, as any optimizer takes them. ``lr``, ``betas``,
            ``eps`` and ``weight_decay`` may differ between groups and may be scheduled.
        lr: learning rate.
        warmup_steps: steps of exact Adam, at least 1. Take enough of them for ``v`` to tell the
            scale of every element.
        betas: decay of the first and of the second moment, in [0, 1).
        eps: added to the denominator.
        weight_decay: L2 penalty, as in ``torch.optim.Adam``.

    Raises:
        ValueError: an argument out of its range, or groups with different ``warmup_steps``.

    Example::

        optimizer = QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=100)
        model = bagua.wrap(model, [optimizer], QAdamAlgorithm(optimizer))
    """

    freezes_second_moment = True  # after the warm-up
    _source: weakref.ref[QAdamAlgorithmImpl] | None = None  # copies and pickles have none

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "warmup_steps": warmup_steps,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        warm_ups = sorted({group["warmup_steps"] for group in self.param_groups})
        if len(warm_ups) > 1:
            self.param_groups.pop()
            raise ValueError(f"warmup_steps must be equal in all groups, not {warm_ups}")

    @property
    def warmup_steps(self) -> int:
        """Number of steps of exact Adam; a checkpoint that is loaded brings its own."""
        return int(self.param_groups[0]["warmup_steps"])

    @property
    def completed_steps(self) -> int:
        """Number of steps done: of the parameter that had a gradient most often."""
        return max((int(step) for step in self._steps()), default=0)

    @property
    def compressed_steps(self) -> int:
        return max(0, self.completed_steps - self.warmup_steps)

    @property
    def warming_up(self) -> bool:
        """Whether the next step is one of the warm-up."""
        last = self.warmup_steps
        return not any(step >= last for step in self._steps())

    def _steps(self) -> Iterator[float]:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if state:
                    yield state["step"].item()

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """``step``, ``exp_avg`` and ``exp_avg_sq`` of a parameter, made where there are none."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` evaluates the model with gradients and returns the loss."""
        loss = None
        if only_makes_state():
            for parameter in (p for group in self.param_groups for p in group["params"]):
                self.state_of(parameter)
            return loss
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        source = self._source() if self._source is not None else None
        averaged = source is not None and source.compressing
        if averaged and source is not None and self._has_gradients():
            source.use_momentum()
        warming_up = not averaged and self.warming_up
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if warming_up:
                self._warm_up(group, parameters)
            else:
                self._step_later(group, parameters, averaged)
        return loss

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for group in self.param_groups for p in group["params"])

    def _warm_up(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self.state_of(parameter) for parameter in parameters]
        adam(
            parameters,
            [parameter.grad for parameter in parameters],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_later(
        self, group: dict[str, Any], parameters: list[torch.Tensor], averaged: bool
    ) -> None:
        """A step after the warm-up of parameters of one group, which have gradients.

        ``averaged``: the gradients are momenta.
        """
        by_step: dict[int, list[tuple[Any, ...]]] = {}
        for parameter in parameters:
            state = self.state_of(parameter)
            state["step"] += 1
            tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            by_step.setdefault(int(state["step"]), []).append(tensors)
        for step, of_parameters in by_step.items():
            for pieces in _at_a_time(of_parameters):
                _move(group, averaged, step, pieces)


def _at_a_time(of_parameters: list[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """All at once on a device; on CPU rows of one parameter that stay in a core's cache."""
    if not all(tensors[0].is_cpu for tensors in of_parameters):
        yield of_parameters
        return
    for tensors in of_parameters:
        first = tensors[0]
        if first.ndim == 0 or first.numel() <= CACHED:
            yield [tensors]
            continue
        rows = max(1, CACHED * len(first) // first.numel())
        for piece in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
            yield [piece]


def _move(group: dict[str, Any], averaged: bool, step: int, tensors: list[tuple[Any, ...]]) -> None:
    """Step ``step``, after the warm-up, of (parameter, gradient, first and second moment)."""
    parameters, gradients, momenta, squares = (
        list(column) for column in zip(*tensors, strict=True)
    )
    beta1, beta2 = group["betas"]
    if averaged:
        torch._foreach_copy_(momenta, gradients)
    else:
        torch._foreach_lerp_(momenta, gradients, 1 - beta1)
    if group["weight_decay"] != 0:
        torch._foreach_add_(momenta, parameters, alpha=(1 - beta1) * group["weight_decay"])
    scale = (1 - beta2 ** min(step, group["warmup_steps"])) ** 0.5
    # The class's d is `moves / ratio`.
    ratio = (1 - beta1**step) / scale
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominators, scale * group["eps"])
    moves = torch._foreach_div(momenta, denominators)
    longest = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5) * ratio
    torch._foreach_clamp_max_(moves, longest)
    torch._foreach_clamp_min_(moves, -longest)
    torch._foreach_add_(parameters, moves, alpha=-float(group["lr"]) / ratio)


def _check(group: dict[str, Any]) -> None:
    if not group["lr"] >= 0:
        raise ValueError(f"lr={group['lr']} must not be negative")
    if not group["eps"] >= 0:
        raise ValueError(f"eps={group['eps']} must not be negative")
    if not all(0 <= beta < 1 for beta in group["betas"]) or len(group["betas"]) != 2:
        raise ValueError(f"betas={group['betas']} must be two numbers in [0, 1)")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight_decay={group['weight_decay']} must not be negative")
    if not group["warmup_steps"] >= 1:
        raise ValueError(f"warmup_steps={group['warmup_steps']} must be at least 1 step")
