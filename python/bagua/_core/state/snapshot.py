"""Snapshot of a module at its wrap: parameters, buffers, and ignored names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from bagua import _C
from bagua._core.group.warn import warn
from bagua._core.state.shards import (
    has_fsdp,
    is_sharded,
    local,
    place_of,
    refuse_unaveraged,
    reshard,
)

if TYPE_CHECKING:
    from bagua.torch_api.algorithms.base import AlgorithmImpl

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX_DTYPES = (torch.complex64, torch.complex128)
_IGNORE = "_bagua_params_and_buffers_to_ignore"
#: Buffers of batch and instance norms that have a mean over the ranks.
_STATISTICS = ("running_mean", "running_var")


class ModuleSnapshot:
    """Remembers a module without holding it.

    ``averaged_inside``: torch averages gradients between other ranks than those that communicate,
    which is right.
    """

    def __init__(self, module: torch.nn.Module, *, averaged_inside: bool = False) -> None:
        self._averaged_inside = averaged_inside
        reshard(module)
        self.ignored = ignored_names(module)
        names, self._dicts, free = self._places(module)
        self._guard = _C.PlanGuard(names, self._dicts, free)
        self.sharded = any(is_sharded(p) for p in module.parameters())
        # By id, which the guard keeps from being used again; pruning changes names.
        self._trained = {
            id(p): name for name, p in self.common_parameters(module) if p.requires_grad
        }

    def _places(self, module: torch.nn.Module) -> tuple[list[str], list[Any], set[str]]:
        """Names of modules, their dictionaries, and names of what may change."""
        # Ignored tensors may change, and so may a module whose tensors are all ignored.
        free = self.ignored | {
            name
            for name, child in module.named_modules()
            if name and self._all_ignored(name, child)
        }
        kept = [(name, child) for name, child in module.named_modules() if name not in free]
        return [name for name, _ in kept], _dictionaries(kept), free

    def _follow(self, module: torch.nn.Module) -> bool:
        """Accept other names and places of the same parameters; whether there were any."""
        self.show_shards(module)
        if not self._guard.moved(self._dicts):
            return False
        names, dicts, free = self._places(module)
        accepted = self._guard.accept_places(names, dicts, free)
        if accepted:
            self._dicts = dicts
        return accepted

    def show_shards(self, module: torch.nn.Module) -> None:
        """Undo FSDP2's exchange of sharded parameters for whole ones, where it is in force."""
        if self.sharded and self._guard.moved(self._dicts):
            reshard(module)

    def _all_ignored(self, prefix: str, child: torch.nn.Module) -> bool:
        names = [f"{prefix}.{name}" for name, _ in child.named_parameters()]
        return bool(names) and all(name in self.ignored for name in names)

    def trained(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        """``(name at the wrap, parameter)``: not ignored, no expert, shared ones once.

        Trainable at the wrap or accepted since, also where they are frozen now.
        """
        self.show_shards(module)
        known = self._trained
        return [(known[id(p)], p) for _, p in self.common_parameters(module) if id(p) in known]

    def unfrozen(self, module: torch.nn.Module) -> list[str]:
        named = self.common_parameters(module)
        return [name for name, p in named if p.requires_grad and id(p) not in self._trained]

    def accept_unfrozen(self, module: torch.nn.Module) -> None:
        for name, parameter in self.common_parameters(module):
            if parameter.requires_grad:
                self._trained.setdefault(id(parameter), name)
        self._guard.accept_unfrozen()

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
        """Parameters that are not ignored, frozen ones too; of shards those of this rank."""
        return [local(p.data) for name, p in module.named_parameters() if name not in self.ignored]

    def buffers(self, module: torch.nn.Module) -> list[torch.Tensor]:
        return [b for name, b in module.named_buffers() if name not in self.ignored]

    def frozen(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Parameters that no algorithm communicates, of shards those of this rank."""
        known = self._trained
        return [local(p.data) for _, p in self.common_parameters(module) if id(p) not in known]

    def mean_buffers(
        self, module: torch.nn.Module, chosen: Sequence[str] | None
    ) -> dict[str, torch.Tensor]:
        """Buffers that have a mean over the ranks, by name.

        ``chosen``: their names, in which ``*`` stands for any text; None: the statistics of batch
        and instance norms. ValueError for a name that no floating-point buffer has.
        """
        buffers = {
            name: b
            for name, b in module.named_buffers()
            if b.is_floating_point() and name not in self.ignored
        }
        if chosen is None:
            chosen = [
                f"{path}.{key}".lstrip(".")
                for path, child in module.named_modules()
                if isinstance(child, _NormBase)
                for key in _STATISTICS
            ]
            return {name: buffers[name] for name in chosen if name in buffers}
        for pattern in chosen:
            if not any(fnmatchcase(name, pattern) for name in buffers):
                raise ValueError(
                    f"mean_buffers: '{pattern}' is not the name of a floating-point buffer; the "
                    f"module has {', '.join(buffers) or 'none'}"
                )
        return {
            name: b
            for name, b in buffers.items()
            if any(fnmatchcase(name, pattern) for pattern in chosen)
        }

    def check(self, module: torch.nn.Module, module_name: str, *, unfreezing: bool = False) -> bool:
        """Compare with the present module: Note [Plan guard] in the C++ core.

        Returns whether parameters were unfrozen and nothing else differs, if ``unfreezing``.
        BaguaError names the first difference.
        """
        self.show_shards(module)
        difference = self._guard.difference(self._dicts)
        if difference and self._follow(module):
            difference = self._guard.difference(self._dicts)
        unfrozen = bool(difference) and unfreezing
        if unfrozen:
            difference = self._guard.difference(self._dicts, unfreezing=True)
        if difference:
            raise _C.BaguaError(
                f"module '{module_name}': {difference} since bagua.wrap, so it would train "
                "unsynchronised. Call bagua.wrap again, on every rank, after such a change."
            )
        second = self.second_wrapper()
        if second:
            raise _C.BaguaError(f"module '{module_name}': {second}")
        return unfrozen

    def second_wrapper(self) -> str:
        """An error if torch averages gradients too: Note [Torch's reducer] in the C++ core."""
        name = self._guard.reduced_by_torch()
        if not name or self._averaged_inside:
            return ""
        return (
            f"the gradient of parameter '{name}' is averaged by torch's DistributedDataParallel or "
            "replicate() too, so it would be wrong. Wrap the module once, by bagua or by torch; "
            "accelerator.prepare() and fabric.setup() wrap by torch."
        )

    def trains(self, module: torch.nn.Module) -> bool:
        """Whether a backward through the present module can reach its trained parameters.

        Not where all are frozen, nor inside a ``functional_call`` with leaves in place of all.
        """
        self._follow(module)
        return self._guard.trains(self._dicts)

    def describe(self, module: torch.nn.Module) -> list[str]:
        """One line per parameter and buffer, equal on all ranks.

        What is ignored may differ between the ranks in shape and name: sharded embeddings do.
        """
        sparse = sparse_parameters(module)
        lines = [
            f"parameter {name}: {tuple(p.shape)} {p.dtype} {p.device.type}"
            f"{'' if p.requires_grad else ' frozen'}{' sparse' if id(p) in sparse else ''}"
            f"{f' {place_of(p)}' if is_sharded(p) else ''}"
            for name, p in module.named_parameters()
            if name not in self.ignored
        ]
        lines += [
            f"buffer {name}: {tuple(b.shape)} {b.dtype} {b.device.type}"
            for name, b in module.named_buffers()
            if name not in self.ignored
        ]
        return lines

    def refuse_buffers(self, module: torch.nn.Module) -> None:
        """Raise where a buffer cannot get the values of another rank; names it."""
        for name, buffer in module.named_buffers():
            if name not in self.ignored and (why := _not_writable(buffer)):
                raise TypeError(
                    f"buffer '{name}' is {why}, so no other rank's values can be written into it: "
                    f"register a plain tensor, such as a clone() of it, or put its name into "
                    f"{_IGNORE}"
                )

    def refuse_unsupported(self, module: torch.nn.Module, algorithm: AlgorithmImpl) -> None:
        """Raise where ``algorithm`` cannot communicate a parameter that is trained; names it."""
        if second := self.second_wrapper():
            raise RuntimeError(f"module '{type(module).__name__}': {second}")
        chosen = type(algorithm).__name__.removesuffix("Impl")
        sparse = sparse_parameters(module)
        if has_fsdp(module):
            refuse_unaveraged(f"module '{type(module).__name__}'", self.trained(module))
        for name, parameter in self.trained(module):
            if is_sharded(parameter) and not algorithm.traits.takes_shards:
                raise TypeError(
                    f"parameter '{name}' is a DTensor, of a module that torch shards or "
                    "parallelises (fully_shard, replicate with a mesh, parallelize_module), which "
                    f"{chosen} cannot communicate: compress what FSDP2 sends by "
                    "bagua.fsdp.compress(model), average islands of sharded ranks by "
                    "DiLoCoAlgorithm, wrap a module of plain parameters, or put its name into "
                    f"{_IGNORE}"
                )
            if id(parameter) in sparse and not algorithm.traits.sparse_gradients:
                raise NotImplementedError(
                    f"'{name}' has sparse gradients, which {chosen} cannot communicate: pass "
                    "sparse=False to the embedding, use GradientAllReduceAlgorithm, or put the "
                    f"name into {_IGNORE}"
                )
            if parameter.dtype in _COMPLEX_DTYPES and not algorithm.traits.complex_parameters:
                raise TypeError(
                    f"parameter '{name}' is {parameter.dtype}, which {chosen} cannot "
                    "communicate: use GradientAllReduceAlgorithm, keep the parameter as "
                    "torch.view_as_real of it, or put its name into "
                    f"{_IGNORE}"
                )
            if parameter.dtype not in (*_DTYPES, *_COMPLEX_DTYPES):
                raise TypeError(
                    f"parameter '{name}' is {parameter.dtype}; float16, bfloat16, float32, "
                    "float64, complex64 and complex128 can be communicated. Put its name into "
                    f"{_IGNORE}."
                )


def _not_writable(buffer: torch.Tensor) -> str:
    """Why values of another rank cannot be written into a buffer; "": they can."""
    if buffer.layout != torch.strided or buffer.is_quantized:
        return "sparse or quantised"
    if buffer.is_inference():
        return "of torch.inference_mode()"
    if any(n > 1 and step == 0 for n, step in zip(buffer.shape, buffer.stride(), strict=True)):
        return "expanded"
    return "a lazy negative" if buffer.is_neg() else ""


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """Ids of the parameters whose gradients have sparse layout.

    They are weights of embeddings with ``sparse=True`` and of nothing else: a layer that shares
    such a weight makes its gradients dense.
    """
    sparse, dense = set[int](), set[int]()
    for child in module.modules():
        embeds = isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse
        members = {id(p) for p in child._parameters.values() if p is not None}
        (sparse if embeds else dense).update(members)
    return sparse - dense


def guard_of(module: torch.nn.Module) -> tuple[_C.PlanGuard, list[Any]]:
    """A guard of all parameters and modules, and the dictionaries that it compares."""
    named = list(module.named_modules())
    dicts = _dictionaries(named)
    return _C.PlanGuard([name for name, _ in named], dicts), dicts


def _dictionaries(named: Sequence[tuple[str, torch.nn.Module]]) -> list[Any]:
    return [d for _, child in named for d in (child._parameters, child._modules)]


def ignored_names(module: torch.nn.Module) -> set[str]:
    attributes = (_IGNORE, "_ddp_params_and_buffers_to_ignore")
    names = {name for attribute in attributes for name in getattr(module, attribute, [])}
    if "_orig_mod" in module._modules:  # torch.compile(model), whose names were given to the model
        names = {f"_orig_mod.{name.removeprefix('_orig_mod.')}" for name in names}
    return names


def sample(named: Sequence[tuple[str, torch.Tensor]], every: int) -> _C.WeightsSample | None:
    """The sample of ``named`` that the core compares, all of it in ``every`` rounds; None: nothing.

    Parameters are held, not their memory: ``parameter.data = x`` is seen. Those on another device
    than most are left out, and tensor subclasses, whose values may lie anywhere.
    """
    plain = [
        (name, tensor)
        for name, tensor in named
        if type(tensor) in (torch.nn.Parameter, torch.Tensor) and tensor.layout == torch.strided
    ]
    sizes: Counter[torch.device] = Counter()
    for _, tensor in plain:
        if not tensor.is_meta:
            sizes[tensor.device] += tensor.numel()
    if not sizes.total():
        return None
    device, _ = sizes.most_common(1)[0]
    return _C.WeightsSample([(n, t) for n, t in plain if t.device == device], every)


def warn_unused(module_name: str, names: list[str]) -> None:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    warn(
        f"module '{module_name}': no gradient in this step for {shown}; zeros were sent. Pass "
        "find_unused_parameters=True to leave .grad alone where no rank used a parameter."
    )


def warn_past_wrapper(module_name: str, name: str) -> None:
    warn(
        f"module '{module_name}': parameter '{name}' received a gradient, but not from a forward "
        "of the wrapped module, so it is this rank's own and was not communicated. Call the "
        "wrapped module itself, not its forward(), a part of it or what is inside the wrapper; "
        "inside no_sync() where local gradients are meant."
    )
