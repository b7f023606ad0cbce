"""Compressed gradients, and weights, in torch's FSDP2 (``torch.distributed.fsdp.fully_shard``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.job import as_bagua_group, ensure_initialised, from_ranks
from bagua._core.group.process_group import BaguaProcessGroup, get_default_group
from bagua._core.state.ledger import Ledger, Page
from bagua._core.state.saved_values import check_state
from bagua._core.state.shards import is_sharded, refuse_unaveraged, reshard
from bagua._core.state.snapshot import guard_of, ignored_names
from bagua._ops.operations import Lane, codec_named, worth_encoding
from bagua._sync.handle import LaneHandle
from bagua._sync.hooks import outside_graphs_lazily
from bagua._sync.samples import SaidSamples
from bagua.fsdp._collectives import AllGather, ReduceScatter, all_reduce_can_be_replaced
from bagua.torch_api._patch import watch_fully_shard
from bagua.torch_api._session import is_owned

__all__ = ["Handle", "compress"]

_HOOKS = ("set_custom_reduce_scatter", "set_custom_all_gather")
_compressed: weakref.WeakSet[FSDPModule] = weakref.WeakSet()
watch_fully_shard()


# The ranks over which torch has sharded and replicated a model.


@dataclass(frozen=True)
class Groups:
    """Ranks that communicate for one model.

    ``shards``: those of one copy of the model; None with ``replicate()``. ``replicas``: those that
    hold the same shards of all copies; None without hybrid sharding.
    """

    everyone: BaguaProcessGroup
    shards: BaguaProcessGroup | None
    replicas: BaguaProcessGroup | None


def mesh_of(model: torch.nn.Module) -> tuple[DeviceMesh, list[str]]:
    """The mesh of all sharded parameters and, for each of its dimensions, a field of Groups."""
    found: tuple[DeviceMesh, list[str]] | None = None
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue  # ignored by fully_shard
        placements = parameter.placements
        fields = ["shards" if p.is_shard() else "replicas" for p in placements]
        known = all(p.is_shard() or p.is_replicate() for p in placements)
        if not known or fields not in (["shards"], ["replicas"], ["replicas", "shards"]):
            raise NotImplementedError(
                f"bagua.fsdp.compress: parameter '{name}' has the placements {placements}: tensor "
                "parallelism is not supported. Shard over a mesh of one dimension, or of two of "
                "which the second shards (HSDP): fully_shard(module, mesh=mesh['replicate', "
                "'shard'])"
            )
        if found is not None and (parameter.device_mesh, fields) != found:
            raise NotImplementedError(
                f"bagua.fsdp.compress: parameter '{name}' is sharded over {parameter.device_mesh}, "
                f"others over {found[0]}; all must be sharded over one mesh"
            )
        found = (parameter.device_mesh, fields)
    if found is None:
        raise ValueError("bagua.fsdp.compress: the model has no sharded parameters")
    return found


def bagua_groups(mesh: DeviceMesh, fields: list[str]) -> Groups:
    """The groups of :func:`mesh_of`'s result. All ranks of the mesh call it."""
    ranks = mesh.mesh.flatten().tolist()
    of_dimensions: list[dist.ProcessGroup] = [mesh.get_group(i) for i in range(mesh.ndim)]
    if ranks == get_default_group().ranks:
        everyone = as_bagua_group(None)
    elif mesh.ndim == 1:
        everyone = as_bagua_group(of_dimensions[0])
    else:
        everyone = from_ranks(ranks, of_dimensions[0])
    if mesh.ndim == 1:
        groups = {fields[0]: everyone}
    else:
        groups = dict(zip(fields, map(as_bagua_group, of_dimensions), strict=True))
    return Groups(everyone, groups.get("shards"), groups.get("replicas"))


# The communication at work.


@dataclass(frozen=True)
class Options:
    """Arguments of ``compress``; ``read_scale`` returns the factor that gradients carry."""

    codec: str
    weights: bool
    reduce_scatter: bool
    error_feedback: bool
    read_scale: Callable[[], float]


class Handle(LaneHandle):
    """Compressed communication at work; made by :func:`compress`.

    It works as long as the model, whether the handle is kept or not.
    """

    def __init__(
        self,
        model_name: str,
        options: Options,
        groups: Groups,
        lane: Lane,
        wrap: str,
        numels: Mapping[str, int],
    ) -> None:
        connections = lane.group.connections
        # In this order on every rank, or two would wait for each other.
        both = [groups.shards, groups.replicas]
        members = {group: lane.communicator(group) for group in both if group is not None}
        ledger = Ledger(
            "bagua.fsdp",
            lambda: connections,
            only_same_ranks="residuals are of shards, so load them with the number of ranks that "
            "saved them, or leave them out",
            pages=options.error_feedback,
        )
        super().__init__(model_name, lane, wrap, ledger)
        self._groups = groups
        self._members = members
        self._codec_name = options.codec
        self._codec = _C.make_codec(options.codec, str(lane.device))
        self._operations: dict[tuple[Any, ...], _C.BucketOperations] = {}
        outcome = _C.RoundOutcome()
        pages = {}
        for module, numel in numels.items():
            if options.reduce_scatter and groups.shards is not None:
                flat = torch.empty(numel * groups.shards.size, device=lane.device)
                pages[module, "shards"] = Page(flat, [(module, flat)], outcome)
            if groups.replicas is not None:
                flat = torch.empty(numel, device=lane.device)
                pages[module, "replicas"] = _page_of_replicas(module, flat, groups, outcome)
        ledger.take(*pages.values())
        self._memories = {place: page.memory for place, page in pages.items()}
        self._sums_by_torch = not options.reduce_scatter and groups.replicas is None
        self.rounds = Rounds(self._memories, outcome, options.read_scale)

    @property
    def has_replicas(self) -> bool:
        return self._groups.replicas is not None

    def is_of_replicas(self, group: dist.ProcessGroup | None) -> bool:
        replicas = self._groups.replicas
        return replicas is not None and dist.get_process_group_ranks(group) == replicas.ranks

    def bagua_samples(self, number: SupportsFloat) -> None:
        """Say how many samples, or tokens, this rank's next training forward is of.

        As ``bagua_samples`` of a wrapped module; numbers of forwards whose backwards reduce nothing
        (``set_requires_gradient_sync(False)``) add up.

        Raises:
            ValueError: a number that is not finite, or negative.
            NotImplementedError: gradients are reduced by torch alone.
        """
        if self._sums_by_torch:
            raise NotImplementedError(
                "bagua.fsdp: bagua_samples() after compress(reduce_scatter=False), which leaves "
                "gradients to torch, without weights of ranks: leave reduce_scatter out"
            )
        self.rounds.said.add(number)

    # Calls of the collectives, on autograd's threads and the main thread, one at a time.

    def reduce_scatter(
        self, module: str, flat: torch.Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """Sum ``flat``, 1-D, over all ranks; its part of this rank has the result / ``divisor``."""
        self.rounds.reduce(module, "shards")
        memory = self._memories.get((module, "shards"))
        members = self._of(module, group, self._groups.shards)
        exact = memory is None and self.is_small(flat, members.size)

        def make() -> _C.BucketOp:
            if exact:
                return _C.AllReduce(members, _C.ReduceOp.SUM)
            return _C.CompressedReduceScatter(
                members,
                self._codec,
                self._lane.scratch,
                divisor=divisor,
                memory=memory,
                checksum=env.get_checksum(),
            )

        if memory is not None:
            self._check_numel(module, flat, memory)
        self._run(f"{module}.gradients", flat, (divisor, exact), make)
        if exact:
            flat.div_(divisor)

    def is_small(self, flat: torch.Tensor, parts: int) -> bool:
        """Whether so many parts of ``flat`` would gain nothing by the codec; equal on all ranks."""
        part = max(1, -(-flat.numel() // parts))
        return not worth_encoding(self._codec_name, flat.dtype, part)

    def multiply(self, module: str, flat: torch.Tensor) -> None:
        """Before torch reduces ``flat`` over shards: the replicas' sum is divided by all samples.

        This is the only agreement of HSDP in a step, and it comes after torch's message.
        """
        if not self.has_replicas:
            return
        self.rounds.reduce(module, "shards")
        self.rounds.multiplied.add(module)
        if self.rounds.samples is not None:
            flat.mul_(self.rounds.samples) if self.rounds.samples else flat.zero_()

    def all_reduce(self, module: str, flat: torch.Tensor, mean: bool) -> None:
        """Replace ``flat``, 1-D, by its mean or sum over all replicas."""
        assert self._groups.replicas is not None
        self.rounds.reduce(module, "replicas")
        weighed = self.rounds.weighed(module)
        members = self._members[self._groups.replicas]
        shards = self._groups.shards
        memory = self._memories.get((module, "replicas"))
        op = _C.ReduceOp.AVG if mean else _C.ReduceOp.SUM
        exact = memory is None and self.is_small(flat, members.size)

        def make() -> _C.BucketOp:
            if exact:
                return _C.AllReduce(members, op)
            return _C.CompressedAllReduce(
                members,
                self._codec,
                self._lane.scratch,
                op,
                checksum=env.get_checksum(),
                memory=memory,
                shards=self._members[shards] if memory is not None and shards else None,
            )

        if memory is not None:
            self._check_numel(module, flat, memory)
        self._run(f"{module}.replicas", flat, (mean, exact), make, weighed)

    def all_gather(self, module: str, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Fill ``flat``, 1-D, of which this rank's part is there, with the parts of all ranks."""
        members = self._of(module, group, self._groups.shards)

        def make() -> _C.BucketOp:
            return _C.CompressedAllGather(
                members,
                self._codec,
                self._lane.scratch,
                checksum=env.get_checksum(),
            )

        self._run(f"{module}.weights", flat, (), make, _C.Weighed.NOT)

    @contextmanager
    def outside_the_lane(self, what: str, module: str) -> Iterator[None]:
        """Have waits and failures of torch's own collectives inside told as those of the lane."""
        self._running.check()
        self._running.waits_outside(f"{what} of '{module}'")
        try:
            yield
        except RuntimeError as error:
            self._running.transport_failed(f"{what} of '{module}': {error}")
            self._running.check()
            raise
        finally:
            self._running.waits_outside("")

    def _run(
        self,
        bucket: str,
        flat: torch.Tensor,
        arguments: tuple[Any, ...],
        make: Callable[[], _C.BucketOp],
        weighed: _C.Weighed = _C.Weighed.HERE,
    ) -> None:
        key = (bucket, flat.dtype, flat.device, *arguments)
        if key not in self._operations:
            op = make()
            self._operations[key] = _C.BucketOperations(bucket, op.describe(), [op])
        self._running.post(
            self._operations[key],
            flat,
            round=max(1, self.rounds.number),
            grad_scale=self.rounds.grad_scale,
            samples=self.rounds.samples,
            weighed=weighed,
        ).wait()

    def _of(
        self, module: str, group: dist.ProcessGroup, expected: BaguaProcessGroup | None
    ) -> _C.CountingCommunicator:
        """The communicator of ``expected``, which must be the ranks of ``group``."""
        ranks = dist.get_process_group_ranks(group)
        if expected is None or ranks != expected.ranks:
            raise NotImplementedError(
                f"bagua.fsdp: module '{module}' of '{self._name}' communicates over ranks {ranks}, "
                f"but over {expected.ranks if expected else 'none'} when compress() was called; "
                "call it after the last fully_shard"
            )
        return self._members[expected]

    def _check_numel(self, module: str, flat: torch.Tensor, memory: _C.RoundMemory) -> None:
        expected = memory.value(0).numel()
        if flat.numel() != expected:
            raise RuntimeError(
                f"bagua.fsdp: the gradients of '{module}' have {flat.numel()} elements, but its "
                f"residual has {expected}: parameters were frozen, unfrozen or left without a "
                "gradient, which error_feedback=True does not allow. Call "
                "set_reduce_scatter_unused_params(True), where torch has it, and freeze before "
                "compress()"
            )

    def _settle(self) -> None:
        self.rounds.settle()

    def _restore(self, state: Mapping[str, Any]) -> None:
        check_state(state, "bagua.fsdp")
        if bool(state) != bool(self._memories):
            arguments = "without" if state else "with"
            raise ValueError(
                f"bagua.fsdp: the state has {sorted(state)[:3]}, but compress() was called "
                f"{arguments} error_feedback=True"
            )
        super()._restore(state)


def _page_of_replicas(
    module: str, flat: torch.Tensor, groups: Groups, outcome: _C.RoundOutcome
) -> Page:
    """Residuals of the reduction between copies of the model, of ``flat``, a rank's shard."""
    assert groups.replicas is not None
    shard = groups.shards.rank if groups.shards else 0
    name = f"{module}.replicas/shard{shard}"  # other shards are other elements
    replicas = groups.replicas
    return Page.of_parts(flat, [(name, flat)], outcome, range(replicas.size), replicas.rank)


class Rounds:
    """Numbers the reductions of gradients by rounds, and ends what is remembered with them.

    In a backward torch reduces the gradients of every module once over its shards, with hybrid
    sharding once over its replicas, or not at all where no parameter of the module has one. So a
    round ends where a module comes again, or a forward has come. Graph tasks do not tell rounds
    apart: a reentrant checkpoint has several in one backward.
    """

    def __init__(
        self,
        memories: Mapping[tuple[str, str], _C.RoundMemory],
        outcome: _C.RoundOutcome,
        read_scale: Callable[[], float],
    ) -> None:
        self._memories = memories
        self._outcome = outcome
        self._read_scale = read_scale
        self._came: set[tuple[str, str]] = set()  # (module, ranks)
        self._ended = True
        self.said = SaidSamples()
        self.samples: float | None = None  # of the round
        self.multiplied: set[str] = set()  # modules whose replicas have still to divide
        self.number = 0
        self.grad_scale = 1.0

    def end(self) -> None:
        """A forward begins, outside of any backward."""
        self._ended = True

    def reduce(self, module: str, over: str) -> None:
        """The gradients of ``module`` are about to be reduced over its "shards" or "replicas"."""
        if self._ended or (module, over) in self._came:
            self.settle()
            self._ended = False
            self.number += 1
            self._came = set()
            if self.multiplied and self.samples is not None:
                raise _C.BaguaError(
                    f"bagua.fsdp: the gradients of '{min(self.multiplied)}' were reduced over "
                    "their shards again before their replicas (set_requires_all_reduce(False)), "
                    "which bagua_samples() does not allow: use set_requires_gradient_sync(False)"
                )
            self.samples, self.multiplied = self.said.take(), set()
            self.grad_scale = self._read_scale()
        self._came.add((module, over))

    def weighed(self, module: str) -> _C.Weighed:
        """Where what replicas are about to reduce is multiplied by this rank's weight."""
        if module in self.multiplied:
            self.multiplied.remove(module)
            return _C.Weighed.BEFORE
        summed = (module, "shards") in self._came
        return _C.Weighed.NOT if summed else _C.Weighed.HERE

    def settle(self) -> None:
        """Between rounds: memories hold what they are to hold in the next one."""
        if self.number == 0:
            return
        for place in self._memories.keys() - self._came:
            self._outcome.leave(self.number)
            self._came.add(place)
        for memory in self._memories.values():
            memory.value(0)


class Watch:
    """Refuses parameters of ``model`` that are trained and not averaged, whenever they appear.

    Where torch has shards it may show whole parameters, whose places are known from the start.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._shards = weakref.WeakKeyDictionary(
            {
                module: {
                    key for key, p in module._parameters.items() if p is not None and is_sharded(p)
                }
                for module in model.modules()
            }
        )
        self._called = False
        self._look(model)

    def before_forward(self, module: torch.nn.Module) -> None:
        """Raise BaguaError where there are such parameters since the last look.

        ``module``: the model, or a part that a model without a forward has called.
        """
        model = self._model()
        self._called |= module is model
        looks = module is model or not self._called
        if looks and model is not None and self._guard.difference(self._dicts):
            self._look(model)

    def _look(self, model: torch.nn.Module) -> None:
        ignored = ignored_names(model)
        plain = [
            (f"{prefix}.{key}".lstrip("."), p)
            for prefix, module in model.named_modules()
            for key, p in module._parameters.items()
            if p is not None and key not in self._shards.get(module, ()) and not is_owned(p)
        ]
        refuse_unaveraged(
            f"bagua.fsdp.compress: '{type(model).__name__}'",
            [(name, p) for name, p in plain if name not in ignored],
        )
        self._guard, self._dicts = guard_of(model)


# Beginning it.


def compress(
    model: torch.nn.Module,
    codec: str = "block_uint8",
    *,
    weights: bool = False,
    reduce_scatter: bool | None = None,
    error_feedback: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Handle:
    """Have every FSDP module of ``model`` reduce its gradients through ``codec``.

    Every rank calls it, once, after the last ``fully_shard`` and before the first forward.
    Initialises bagua over ``torch.distributed`` if that has not been done.

    Args:
        model: after ``fully_shard`` on a mesh of one dimension, or of two with hybrid sharding
            (HSDP), or after ``replicate()``.
        codec: ``"block_uint8"`` or another one of docs/wire-format.md. The all-reduce over replicas
            always goes through it.
        weights: whether weights are gathered through the codec, too. Shards and checkpoints stay
            exact; forward and backward see rounded weights, equal on all ranks.
        reduce_scatter: whether the reduce-scatter of gradients over the shards goes through the
            codec. Default: with a mesh of one dimension yes; with hybrid sharding no, as shards are
            near each other then.
        error_feedback: whether each rank adds to its gradients what compression has taken from
            those of the last step. Takes 8 bytes per parameter of the whole model on every rank;
            for the all-reduce over R replicas 8 + 8 / R per parameter of the rank's shard.
        grad_scaler: the scaler that the loss is multiplied with, if there is one; needed for
            ``error_feedback`` only.

    Returns:
        Statistics and residuals. It need not be kept.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: no module of it is sharded, the codec is unknown, or an argument asks for
            nothing.
        NotImplementedError: tensor parallelism, several meshes, or a torch without the interface.
        RuntimeError: the model is compressed already.
        BaguaMismatchError: the ranks' models or arguments differ.
        BaguaError: a rank did not come, or was lost; a parameter is trained that is not sharded,
            now or in a later forward, and not among the ``ignored_params`` of ``fully_shard``.

    Example::

        fully_shard(model)
        handle = compress(model)
        loss_function(model(inputs), targets).backward()
        handle.stats()["total"]["bytes_sent"]
    """
    modules = _sharded_modules(model)
    reshard(model)
    codec = codec_named(codec)
    mesh, fields = mesh_of(model)
    if reduce_scatter is None:
        reduce_scatter = fields == ["shards"]
    _check_arguments(fields, weights, reduce_scatter, error_feedback)
    watch = Watch(model) if mesh.size() > 1 else None
    ensure_initialised()
    groups = bagua_groups(mesh, fields)
    scaled = error_feedback and grad_scaler is not None and grad_scaler.is_enabled()
    options = Options(
        codec=codec,
        weights=weights,
        reduce_scatter=reduce_scatter,
        error_feedback=error_feedback,
        read_scale=grad_scaler.get_scale if scaled and grad_scaler else lambda: 1.0,
    )
    names = _names_of_groups(modules, type(model).__name__)
    handle = _connect(model, names, mesh.device_type, groups, options, scaled)
    for module, name in names.items():
        _install(module, name, handle, options)
    _watch_forwards(model, modules, handle.rounds, watch)
    return handle


def _check_arguments(
    fields: list[str], weights: bool, reduce_scatter: bool, error_feedback: bool
) -> None:
    sharded, replicated = "shards" in fields, "replicas" in fields
    if not sharded and (weights or reduce_scatter):
        name = "weights" if weights else "reduce_scatter"
        raise ValueError(
            f"bagua.fsdp.compress: {name}=True, but no parameter is sharded: after replicate() "
            "ranks exchange nothing but the all-reduce of gradients; leave it out"
        )
    if not (replicated or weights or reduce_scatter):
        raise ValueError(
            "bagua.fsdp.compress: reduce_scatter=False without weights=True compresses nothing: "
            "the mesh has no replicas. Leave reduce_scatter out"
        )
    if error_feedback and not (replicated or reduce_scatter):
        raise ValueError(
            "bagua.fsdp.compress: error_feedback=True, but reduce_scatter=False leaves gradients "
            "exact; leave one of them out"
        )
    if replicated and not all_reduce_can_be_replaced():
        raise NotImplementedError(
            "bagua.fsdp.compress: torch.distributed.all_reduce of torch "
            f"{torch.__version__} does not honour __torch_function__, by which the all-reduce over "
            "replicas is compressed; shard over a mesh of one dimension"
        )


def _connect(
    model: torch.nn.Module,
    names: dict[FSDPModule, str],
    device_type: str,
    groups: Groups,
    options: Options,
    scaled: bool,
) -> Handle:
    model_name = type(model).__name__
    description = [
        f"{options.codec} weights={options.weights} reduce_scatter={options.reduce_scatter} "
        f"error_feedback={options.error_feedback} scaled={scaled}"
    ]
    description += [
        f"module {name}" for name, m in model.named_modules() if isinstance(m, FSDPModule)
    ]
    description += [f"{name}: {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    connections = groups.everyone.connections
    with connections.collective_phase(f"compressing the communication of '{model_name}'"):
        connections.agree("the model or the arguments of bagua.fsdp.compress", description)
        wrap = connections.next_wrap()
        # Groups of shards and replicas have separate names for what is wrapped.
        lane_name = f"{groups.everyone.group_name}/{wrap}/lane0"
        lane = Lane(lane_name, torch.device(device_type), groups.everyone)
        numels = {}
        if options.error_feedback:
            numels = _shard_numels(model, names, groups.shards.size if groups.shards else 1)
        handle = Handle(model_name, options, groups, lane, wrap, numels)
        # A rank must not go on while another is still connecting to it.
        connections.reduce_numbers("compressing the communication", _C.ReduceOp.SUM, 0)
    return handle


def _sharded_modules(model: Any) -> dict[str, FSDPModule]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"bagua.fsdp.compress takes a torch.nn.Module, not {type(model).__name__}")
    missing = [hook for hook in _HOOKS if not hasattr(FSDPModule, hook)]
    if missing:
        raise NotImplementedError(
            f"bagua.fsdp.compress needs FSDPModule.{missing[0]}, which torch {torch.__version__} "
            "does not have; torch 2.11 to 2.13 have it"
        )
    modules = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not modules:
        raise ValueError(
            f"bagua.fsdp.compress: no module of '{type(model).__name__}' is sharded; call "
            "torch.distributed.fsdp.fully_shard(model) first (FSDP1's FullyShardedDataParallel is "
            "not supported)"
        )
    for name, module in modules.items():
        if module in _compressed:
            raise RuntimeError(
                f"bagua.fsdp.compress: module '{name}' is compressed already; call it once, on the "
                "outermost module"
            )
    return modules


def _names_of_groups(modules: dict[str, FSDPModule], model_name: str) -> dict[FSDPModule, str]:
    """A name for each module; modules that were sharded together communicate under one."""
    names: dict[FSDPModule, str] = {}
    first: dict[int, str] = {}
    for name, module in modules.items():
        names[module] = first.setdefault(id(module._get_fsdp_state()), name or model_name)
    return names


def _shard_numels(
    model: torch.nn.Module, names: dict[FSDPModule, str], shards: int
) -> dict[str, int]:
    """Elements of a shard of each module's gradients, all of one size through padding."""
    numels: dict[str, int] = {}

    def visit(module: torch.nn.Module, owner: str | None) -> None:
        owner = names[module] if isinstance(module, FSDPModule) else owner
        for parameter in module.parameters(recurse=False):
            if owner is None or parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            if isinstance(parameter, DTensor):
                placement: Any = parameter.placements[-1]
                length = parameter.size(placement.dim) if placement.is_shard() else 1
                rows = parameter.numel() // max(1, length)
                numels[owner] = numels.get(owner, 0) + -(-length // shards) * rows
        for child in module.children():
            visit(child, owner)

    seen: set[torch.nn.Parameter] = set()
    visit(model, None)
    return numels


def _watch_forwards(
    model: torch.nn.Module, modules: dict[str, FSDPModule], rounds: Rounds, watch: Watch | None
) -> None:
    """Begin another round, and look for plain parameters, at forwards of the outermost modules."""

    @outside_graphs_lazily
    def before_forward(module: torch.nn.Module, _: Any) -> None:
        if torch._C._current_graph_task_id() >= 0:
            return  # recomputed for an activation checkpoint
        rounds.end()
        rounds.said.forward_begins(torch.is_grad_enabled())
        if watch is not None and torch.is_grad_enabled():
            watch.before_forward(module)

    sharded: list[Any] = list(modules.values())
    inner = {child for module in sharded for child in module.modules() if child is not module}
    for module in {model, *sharded} - inner:
        # Before torch exchanges shards for whole parameters.
        module.register_forward_pre_hook(before_forward, prepend=True)


def _install(module: FSDPModule, name: str, handle: Handle, options: Options) -> None:
    reduce_scatter: Any = ReduceScatter(handle, name, options.reduce_scatter)
    all_gather: Any = AllGather(handle, name, options.weights)
    module.set_custom_reduce_scatter(reduce_scatter)
    module.set_custom_all_gather(all_gather)
    if options.error_feedback and hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
    _compressed.add(module)
