"""What a module was when it was wrapped: its parameters, its buffers, and what is ignored."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from bagua import _C

__all__ = ["ModuleSnapshot", "ignored_names", "warn_past_wrapper", "warn_unused"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ModuleSnapshot:
    """Remembers a module without holding it.

    Raises:
        TypeError, NotImplementedError: a parameter cannot be communicated; names it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.ignored = ignored_names(module)
        self._check_parameters(module)
        # What is ignored may change, a module of which everything is ignored too.
        free = set(self.ignored) | {
            name
            for name, child in module.named_modules()
            if name and self._all_ignored(name, child)
        }
        names: list[str] = []
        self._dicts: list[Any] = []
        for name, child in module.named_modules():
            if name not in free:
                names.append(name)
                self._dicts += [child._parameters, child._modules]
        self._guard = _C.PlanGuard(names, self._dicts, free)

    def _all_ignored(self, prefix: str, child: torch.nn.Module) -> bool:
        names = [f"{prefix}.{name}" for name, _ in child.named_parameters()]
        return bool(names) and all(name in self.ignored for name in names)

    def trained(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        """``(name, parameter)``: trainable, not ignored, no expert; shared ones once."""
        return [(name, p) for name, p in self.common_parameters(module) if p.requires_grad]

    def common_parameters(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        """``(name, parameter)``: not ignored, no expert; frozen ones too, shared ones once."""
        named = list(module.named_parameters(remove_duplicate=False))
        ignored = {id(p) for name, p in named if name in self.ignored}
        return [
            (name, p)
            for name, p in module.named_parameters()
            if id(p) not in ignored and not getattr(p, "expert", False)
        ]

    def state(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """All parameters that are not ignored, frozen ones too, without autograd."""
        return [p.data for name, p in module.named_parameters() if name not in self.ignored]

    def buffers(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """All buffers that are not ignored."""
        return [b for name, b in module.named_buffers() if name not in self.ignored]

    def equal_everywhere(
        self, module: torch.nn.Module, with_buffers: bool
    ) -> list[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` of what the ranks of a synchronous algorithm have in common."""
        named = [(name, p.data) for name, p in self.common_parameters(module)]
        if with_buffers:
            named += [(name, b) for name, b in module.named_buffers() if name not in self.ignored]
        return named

    def floating_buffers(self, module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        """``(name, buffer)`` of the buffers that have a mean."""
        return [
            (name, b)
            for name, b in module.named_buffers()
            if b.is_floating_point() and name not in self.ignored
        ]

    def check(self, module_name: str) -> None:
        """Compare with the module as it is now: Note [Plan guard] in the C++ core.

        Raises:
            BaguaError: names the first difference.
        """
        difference = self._guard.difference(self._dicts)
        if difference:
            raise _C.BaguaError(
                f"module '{module_name}': {difference} since with_bagua, so it would train "
                "unsynchronised. Call with_bagua again, on every rank, after such a change."
            )

    def all_frozen(self) -> bool:
        """Whether no parameter that was trainable at the wrap is so now."""
        return self._guard.all_frozen()

    def describe(self, module: torch.nn.Module) -> list[str]:
        """One line per parameter and buffer, equal on all ranks."""
        lines = [
            f"parameter {name}: {tuple(p.shape)} {p.dtype} {p.device.type}"
            f"{'' if p.requires_grad else ' frozen'}"
            for name, p in module.named_parameters()
        ]
        lines += [
            f"buffer {name}: {tuple(b.shape)} {b.dtype} {b.device.type}"
            for name, b in module.named_buffers()
        ]
        return [*lines, f"ignored {self.ignored}"]

    def _check_parameters(self, module: torch.nn.Module) -> None:
        for name, child in module.named_modules():
            weight = f"{name}.weight" if name else "weight"
            sparse = isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse
            if sparse and weight not in self.ignored:
                raise NotImplementedError(
                    f"'{weight}' has sparse gradients, buckets are dense: use sparse=False, or put "
                    "its name into _bagua_params_and_buffers_to_ignore"
                )
        for name, parameter in self.trained(module):
            if parameter.dtype not in _DTYPES:
                raise TypeError(
                    f"parameter '{name}' is {parameter.dtype}; float16, bfloat16, float32 and "
                    "float64 can be communicated. Put its name into "
                    "_bagua_params_and_buffers_to_ignore."
                )


def ignored_names(module: torch.nn.Module) -> list[str]:
    """Names of the parameters and buffers that the user has excluded."""
    names: set[str] = set()
    for attribute in (
        "_bagua_params_and_buffers_to_ignore",
        "_ddp_params_and_buffers_to_ignore",
    ):
        names.update(getattr(module, attribute, []))
    if "_orig_mod" in module._modules:  # torch.compile(model), whose names were given to the model
        names = {f"_orig_mod.{name.removeprefix('_orig_mod.')}" for name in names}
    return sorted(names)


def warn_unused(module_name: str, names: list[str]) -> None:
    """Name the parameters that backward did not reach."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    warnings.warn(
        f"module '{module_name}': no gradient in this step for {shown}; zeros were sent. Pass "
        "find_unused_parameters=True to leave .grad alone where no rank used a parameter.",
        stacklevel=2,
    )


def warn_past_wrapper(module_name: str, name: str) -> None:
    """Say that a backward is this rank's own, because no forward of the wrapper was before it."""
    warnings.warn(
        f"module '{module_name}': parameter '{name}' received a gradient, but not from a forward "
        "of the wrapped module, so it is this rank's own and was not communicated. Call the "
        "wrapped module itself, not its forward(), a part of it or what is inside the wrapper; "
        "inside no_sync() where local gradients are meant.",
        stacklevel=2,
    )
