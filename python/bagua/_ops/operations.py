"""Operations of buckets, a function for each: what ranks compare of it, how a lane makes it in C++.

Steps and bytes of each are in the header of the C++ op, whose name it has. The function says what
the method of ``BaguaBucket`` or the algorithm that calls it does not: ``group`` are the ranks that
communicate (None: those of the lane), ``hierarchical`` means exact inside a node, and one
``outcome`` is shared by all buckets whose memory changes together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from bagua import _C
from bagua._core.compression import low_rank_matrices, number_sent, sparse_mean
from bagua._core.group import environment
from bagua._core.group.connections import Connections, Peers, by_node, everyone, on_ring
from bagua._core.group.process_group import BaguaProcessGroup, Hierarchy
from bagua._core.state.ledger import Page

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

#: Bagua's spelling of its codec.
_ALIASES = {"MinMaxUInt8": "minmax_uint8"}
#: Choice of a rank's peers.
_PEER_SELECTION_MODES = ("all", "shift_one")

#: A message of a codec that is larger than this share of the exact one is not worth it.
_WORTH_ENCODING = 0.75
_MANY = 2**16  # elements, beside which frames and ranges do not count

Members = _C.CountingCommunicator


@dataclass
class Lane:
    """One lane under construction; its communicators are connected on demand."""

    name: str  # unique within the job
    device: torch.device
    group: BaguaProcessGroup  # for operations that name none
    sums_of_torch: bool = False  # see Connections.connect
    peers: Peers = everyone  # of all its operations, see Connections.connect
    beside: Sequence[str] = ()  # of the first lane, see Connections.connect
    scratch: _C.Scratch = field(default_factory=_C.Scratch)
    #: By (connections, whether for shares, purpose): "all", "node", "leaders", and for shares
    #: "leaders" with a number.
    communicators: dict[tuple[Connections, bool, str], Members] = field(default_factory=dict)
    _shares: dict[Connections, tuple[Members, list[Members | None]]] = field(default_factory=dict)

    @property
    def by_purpose(self) -> list[tuple[str, Members]]:
        return [(purpose, members) for (*_, purpose), members in self.communicators.items()]

    def connections(self, group: BaguaProcessGroup | None) -> Connections:
        return (group or self.group).connections

    def communicator(self, group: BaguaProcessGroup | None) -> Members:
        connections = self.connections(group)
        key = (connections, False, "all")
        if key not in self.communicators:
            self.communicators[key] = connections.connect(
                f"{self.name}/all",
                self.device,
                sums_of_torch=self.sums_of_torch,
                peers=self.peers,
                beside=self.beside if connections is self.group.connections else (),
            )
        return self.communicators[key]

    def nodes(self, group: BaguaProcessGroup | None) -> tuple[Members, Members | None]:
        """This rank's node and, on its leader, the leaders of the nodes if there are several."""
        connections = self.connections(group)
        if (connections, False, "node") not in self.communicators:
            node, leaders = connections.connect_nodes(self.name, self.device, self.peers)
            self.communicators[connections, False, "node"] = node
            if leaders is not None:
                self.communicators[connections, False, "leaders"] = leaders
        leaders = self.communicators.get((connections, False, "leaders"))
        return self.communicators[connections, False, "node"], leaders

    def shares(self, group: BaguaProcessGroup | None) -> tuple[Members, list[Members | None]]:
        """This rank's node and, for each share, the ranks that have it; None where this has not."""
        connections = self.connections(group)
        if connections not in self._shares:
            node, between = connections.connect_shares(self.name, self.device, self.peers)
            self._shares[connections] = node, between
            self.communicators[connections, True, "node"] = node
            for number, members in enumerate(between):
                if members is not None:
                    self.communicators[connections, True, f"leaders{number}"] = members
        return self._shares[connections]


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """One operation of a bucket.

    Attributes:
        name: of the C++ op.
        arguments: by name, equal on all ranks: a part of the plan's fingerprint.
        make: the C++ op. Every rank of the group calls it, in the same order: it may connect.
        group: whose ranks communicate; None: that of the lane.
        page: its state.
        approximates: what a guard can compare, the mean of what the ranks put in, or weights of
            their own; None: nothing, it is exact or of another kind.
        averages: whether the result is a mean, not a sum.
        peers: with whom a rank exchanges messages.
        one_order: whether all ranks must run the module's buckets one after the other.
        of_divided: the operation of equal result for gradients that were divided by the number of
            ranks on their way into the bucket; None: there is none.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[Lane, BaguaBucket], _C.BucketOp]
    group: BaguaProcessGroup | None = None
    page: Page | None = None
    approximates: Literal["mean", "weights"] | None = None
    averages: bool = True
    peers: Peers = everyone
    one_order: bool = False
    of_divided: Operation | None = None

    def describe(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.arguments.items())])

    def residual(self) -> torch.Tensor | None:
        """The residual of the whole bucket; None: there is no error feedback."""
        error = None if self.page is None else self.page.memory.value(0)
        return error if error is not None and error.numel() else None


def make_ops(lane: Lane, bucket: BaguaBucket) -> tuple[list[_C.BucketOp], float]:
    """The C++ ops of a bucket, and the factor of gradients that enter it.

    gloo has no mean: dividing takes a pass over memory, which is free where the gradient is copied
    anyway. So the mean of gradients is the sum of divided gradients, as in torch's DDP.
    """
    specs, scale = bucket.ops, 1.0
    if bucket.gradients and bucket.backend_tensor.device.type == "cpu" and len(specs) == 1:
        divided = specs[0].of_divided
        if divided is not None:
            specs, scale = [divided], 1.0 / (divided.group or lane.group).size
    ops = [spec.make(lane, bucket) for spec in specs]
    if bucket.watched:
        ops[-1] = bucket.sampled = _C.Sampled(ops[-1])
    return ops, scale


# Among whom an op communicates.


def among(
    lane: Lane,
    group: BaguaProcessGroup | None,
    hierarchical: Hierarchy,
    make: Callable[[Members], _C.BucketOp],
    reduce: _C.ReduceOp = _C.ReduceOp.AVG,
    codec: _C.Codec | None = None,
) -> _C.BucketOp:
    """The op that ``make`` makes among all ranks or, if ``hierarchical``, between the nodes.

    ``codec``: of payloads that have the op's whole result, and travel in a node in its place.
    """
    if not hierarchical:
        return make(lane.communicator(group))
    if hierarchical == "sharded":
        connections = lane.connections(group)
        nodes = len(connections.leaders())
        node, between = lane.shares(group)
        inner = [None if members is None else make(members) for members in between]
        device = str(lane.device)
        return _C.ShardedHierarchical(
            node, inner, lane.scratch, connections.size, nodes, reduce, device
        )
    return _hierarchical(lane, group, lane.connections(group).size, reduce, make, codec)


def among_weighted(
    lane: Lane,
    group: BaguaProcessGroup | None,
    hierarchical: bool,
    make: Callable[[Members, list[int]], _C.BucketOp],
) -> _C.BucketOp:
    """An op that weighs its members, ranks or nodes, by their numbers of ranks itself."""
    connections = lane.connections(group)
    if not hierarchical:
        return make(lane.communicator(group), [1] * connections.size)
    sizes = [len(node) for node in by_node(connections.node_of_ranks())]
    # Not to weigh twice: to Hierarchical all nodes are as large as this one.
    ranks = len(connections.own_node()) * len(sizes)
    return _hierarchical(lane, group, ranks, _C.ReduceOp.AVG, lambda leaders: make(leaders, sizes))


def _hierarchical(
    lane: Lane,
    group: BaguaProcessGroup | None,
    ranks: int,
    reduce: _C.ReduceOp,
    between_leaders: Callable[[Members], _C.BucketOp],
    codec: _C.Codec | None = None,
) -> _C.BucketOp:
    node, leaders = lane.nodes(group)
    inner = None if leaders is None else between_leaders(leaders)
    nodes = len(lane.connections(group).leaders())
    return _C.Hierarchical(node, inner, ranks, nodes, reduce, codec, lane.scratch)


# Sums and means.


def all_reduce(
    bucket: BaguaBucket,
    hierarchical: Hierarchy = False,
    average: bool = True,
    group: BaguaProcessGroup | None = None,
) -> Operation:
    """Sum or mean of the bucket, in its own dtype."""
    _check_hierarchy(bucket, "AllReduce", hierarchical, shares=True)
    reduce = _reduce_op(average)
    divisible = average and not hierarchical

    def make(lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        if not hierarchical and bucket.gradients and bucket.owns_memory:
            return _C.AllReduce(lane.communicator(group), reduce, bucket.backend_tensor)
        return among(lane, group, hierarchical, lambda ranks: _C.AllReduce(ranks, reduce), reduce)

    return Operation(
        name="AllReduce",
        arguments={"hierarchical": hierarchical, "average": average},
        make=make,
        group=group,
        peers=on_ring,
        of_divided=all_reduce(bucket, average=False, group=group) if divisible else None,
    )


def all_reduce_rows(
    gradient: _C.SparseGradient,
    sizes: list[int],
    average: bool,
    group: BaguaProcessGroup | None,
) -> Operation:
    """Sum or mean of a gradient that holds some rows only, which are gathered from all ranks.

    ``gradient`` is shared by the slot and the C++ op; ``sizes`` are those of the parameter.
    """

    def make(lane: Lane, _: BaguaBucket) -> _C.BucketOp:
        everyone = lane.communicator(group)
        return _C.AllReduceRows(everyone, lane.scratch, gradient, sizes, _reduce_op(average))

    arguments = {"sizes": sizes, "average": average}
    return Operation(name="AllReduceRows", arguments=arguments, make=make, group=group)


def codec_named(compression: str) -> str:
    codec = _ALIASES.get(compression, compression)
    _C.make_codec(codec)
    return codec


@lru_cache(maxsize=1024)  # asked in each collective of FSDP2
def worth_encoding(codec: str, dtype: torch.dtype, numel: int) -> bool:
    """Whether messages of so many elements are large enough for ``codec``.

    Exact ones are as small, or nearly, because of the frame and the ranges beside the codes. A
    codec that saves little of any message takes all.
    """
    if dtype.is_complex:
        return True  # which is refused later
    encoder = _C.make_codec(codec)
    encoded = torch.float32 if dtype == torch.float64 else dtype

    def most(numel: int) -> float:
        return _WORTH_ENCODING * numel * dtype.itemsize

    own = encoder.payload_bytes(encoded, numel) + _C.FRAME_BYTES
    return own <= most(numel) or encoder.payload_bytes(encoded, _MANY) > most(_MANY)


def worth_compressing(
    codec: str,
    dtype: torch.dtype,
    numel: int,
    hierarchical: Hierarchy,
    group: BaguaProcessGroup,
) -> bool:
    """Whether the parts of a bucket are :func:`worth_encoding`; equal on all ranks."""
    connections = group.connections
    parts = len(connections.leaders()) if hierarchical is True else connections.size
    return worth_encoding(codec, dtype, max(1, -(-numel // parts)))


def compressed_all_reduce(
    bucket: BaguaBucket,
    codec: str,
    hierarchical: Hierarchy = False,
    average: bool = True,
    group: BaguaProcessGroup | None = None,
    *,
    outcome: _C.RoundOutcome | None = None,
) -> Operation:
    """Sum or mean of the bucket in f32: compressed parts are exchanged twice.

    ``outcome``: of error feedback, whose residuals are of whole buckets: with ``group``, and not
    for ``hierarchical="sharded"``. None: no error feedback.
    """
    _check_hierarchy(bucket, "CompressedAllReduce", hierarchical, shares=True)
    codec, reduce = codec_named(codec), _reduce_op(average)
    page: Page | None = None
    if outcome is not None:
        assert group is not None
        page = _page_of_parts(bucket, outcome, group, bool(hierarchical))

    def compressed(lane: Lane, bucket: BaguaBucket, members: Members) -> _C.BucketOp:
        return _C.CompressedAllReduce(
            members,
            _C.make_codec(codec, str(lane.device)),
            lane.scratch,
            reduce,
            checksum=environment.get_checksum(),
            memory=None if page is None else page.memory,
            padding=0 if page is None else _padding(bucket),
        )

    def make(lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        between = partial(compressed, lane, bucket)
        # In a node of CPUs the result lies in shared memory, and decoding it costs more.
        has_result = page is None and lane.device.type == "cuda"
        payloads = _C.make_codec(codec, str(lane.device)) if has_result else None
        return among(lane, group, hierarchical, between, reduce, payloads)

    arguments = {"hierarchical": hierarchical, "average": average, "codec": codec}
    return Operation(
        name="CompressedAllReduce",
        arguments=arguments | {"error_feedback": page is not None},
        make=make,
        group=group,
        page=page,
        approximates="mean",
        averages=average,
    )


def exact_mean(
    bucket: BaguaBucket,
    outcome: _C.RoundOutcome,
    hierarchical: bool,
    group: BaguaProcessGroup,
) -> Operation:
    """The exact mean of the bucket, beside compressed ones with error feedback.

    Residuals that a checkpoint has, of other ranks' larger parts, are added to it and end with it.
    """
    page = _page_of_parts(bucket, outcome, group, hierarchical, exact=True)

    def make(lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        numel = bucket.backend_tensor.numel()

        def exact(members: Members) -> _C.BucketOp:
            return _C.ErrorFeedbackAllReduce(members, lane.scratch, numel, page.memory)

        return among(lane, group, hierarchical, exact)

    return Operation(
        name="ErrorFeedbackAllReduce",
        arguments={"hierarchical": hierarchical},
        make=make,
        group=group,
        page=page,
        peers=on_ring,
    )


def _page_of_parts(
    bucket: BaguaBucket,
    outcome: _C.RoundOutcome,
    group: BaguaProcessGroup,
    hierarchical: bool,
    exact: bool = False,
) -> Page:
    connections = group.connections
    members = list(range(connections.size))
    if hierarchical:
        members = connections.leaders()
    flat, named = bucket.backend_tensor, bucket.named_views()
    return Page.of_parts(flat, named, outcome, members, connections.rank, exact=exact)


def update_momentum(
    bucket: BaguaBucket, memories: Sequence[torch.Tensor], betas: torch.Tensor
) -> Operation:
    """Gradients become momenta in place, ``beta * memory + (1 - beta) * gradient``.

    Another operation averages them next. ``memories``: the momenta so far, one per tensor, of its
    shape and dtype, in unscaled units; they are only read. ``betas``: f64 on CPU, one per tensor;
    may be written between two rounds.
    """
    named = bucket.named_views()
    for (name, view), memory in zip(named, memories, strict=True):
        if (memory.shape, memory.dtype) != (view.shape, view.dtype):
            raise ValueError(
                f"bucket '{bucket.name}': the momentum of '{name}' is {memory.dtype} "
                f"{tuple(memory.shape)}, its gradient is {view.dtype} {tuple(view.shape)}"
            )
    offsets = [int(view.storage_offset()) for _, view in named]
    strides = [list(view.stride()) for _, view in named]

    def make(lane: Lane, _: BaguaBucket) -> _C.BucketOp:
        return _C.UpdateMomentum(list(memories), offsets, strides, betas, lane.scratch)

    return Operation(name="UpdateMomentum", make=make)


def low_rank(
    bucket: BaguaBucket,
    rank: int,
    outcome: _C.RoundOutcome,
    hierarchical: bool = False,
    group: BaguaProcessGroup | None = None,
    *,
    min_compression_rate: float = 2.0,
    warm_start: bool = True,
    error_feedback: bool = True,
    seed: int = 0,
) -> Operation:
    flat, named = bucket.backend_tensor, bucket.named_views()
    matrices = low_rank_matrices(named, rank, min_compression_rate)
    page = Page(flat, named, outcome, error_feedback=error_feedback, matrices=matrices, seed=seed)
    drawn = {"warm_start": warm_start, "error_feedback": error_feedback, "seed": seed}

    def approximated(lane: Lane, bucket: BaguaBucket, members: Members) -> _C.BucketOp:
        return _C.LowRank(
            members,
            lane.scratch,
            bucket.backend_tensor.numel(),
            list(matrices.values()),
            warm_start=warm_start,
            error_feedback=error_feedback,
            seed=seed,
            memory=page.memory,
        )

    def make(lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        return among(lane, group, hierarchical, partial(approximated, lane, bucket))

    return Operation(
        name="LowRank",
        arguments={"hierarchical": hierarchical, "matrices": matrices, **drawn},
        make=make,
        group=group,
        peers=on_ring,
        page=page,
        approximates="mean",
    )


def sparse(
    bucket: BaguaBucket,
    ratio: float,
    outcome: _C.RoundOutcome,
    hierarchical: bool = False,
    group: BaguaProcessGroup | None = None,
    *,
    error_feedback: bool = True,
) -> Operation:
    k = number_sent(bucket.backend_tensor.numel(), ratio)
    page = Page(bucket.backend_tensor, bucket.named_views(), outcome, error_feedback=error_feedback)

    def selected(lane: Lane, bucket: BaguaBucket, members: Members) -> _C.BucketOp:
        return sparse_mean(members, lane.scratch, bucket.backend_tensor, k, page.memory)

    def make(lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        return among(lane, group, hierarchical, partial(selected, lane, bucket))

    return Operation(
        name="Sparse",
        arguments={"hierarchical": hierarchical, "error_feedback": error_feedback, "k": k},
        make=make,
        group=group,
        page=page,
        approximates="mean",
    )


# Weights with peers.


@dataclass(frozen=True, eq=False, kw_only=True)
class AverageWeights(Operation):
    """The mean of weights in a memory beside the bucket's, which is unchanged.

    ``peer_weight``: that memory. ``communications``: how often the op has run, one int64, written
    by the op; whoever goes on from a checkpoint sets it before the next communication.
    """

    peer_weight: torch.Tensor
    communications: torch.Tensor

    def copy_back_peer_weight(self, bucket: BaguaBucket) -> None:
        """Give the tensors of ``bucket`` the averaged values: after waiting for it."""
        with torch.no_grad():
            bucket.backend_tensor.copy_(self.peer_weight)
        bucket.copy_out()


def check_peer_selection_mode(mode: str) -> None:
    if mode not in _PEER_SELECTION_MODES:
        raise ValueError(
            f"unknown peer_selection_mode '{mode}'; known: {', '.join(_PEER_SELECTION_MODES)}"
        )


def average_weights(
    bucket: BaguaBucket,
    peer_weight: torch.Tensor,
    hierarchical: bool,
    peer_selection_mode: str,
    group: BaguaProcessGroup | None,
) -> AverageWeights:
    """The mean with all ranks or with one peer, in ``peer_weight``."""
    _check_hierarchy(bucket, "AverageWeights", hierarchical)
    check_peer_selection_mode(peer_selection_mode)
    flat = bucket.backend_tensor
    if (peer_weight.shape, peer_weight.dtype) != (flat.shape, flat.dtype):
        raise ValueError(
            f"bucket '{bucket.name}': peer_weight is {peer_weight.dtype} "
            f"{tuple(peer_weight.shape)}, the bucket is {flat.dtype} {tuple(flat.shape)}"
        )
    communications = torch.zeros((), dtype=torch.int64, device="cpu")

    def with_all(members: Members) -> _C.BucketOp:
        return _C.AllReduce(members, _C.ReduceOp.AVG)

    def with_peer(lane: Lane, members: Members, sizes: list[int]) -> _C.BucketOp:
        return _C.Gossip(members, communications, sizes, lane.scratch)

    def make(lane: Lane, _: BaguaBucket) -> _C.BucketOp:
        if peer_selection_mode == "all":
            averaging = among(lane, group, hierarchical, with_all)
        else:
            averaging = among_weighted(lane, group, hierarchical, partial(with_peer, lane))
        return _C.AverageWeights(peer_weight, communications, averaging)

    return AverageWeights(
        name="AverageWeights",
        arguments={"hierarchical": hierarchical, "peers": peer_selection_mode},
        make=make,
        group=group,
        approximates="weights",
        peers=on_ring if peer_selection_mode == "all" else in_other_half,
        peer_weight=peer_weight,
        communications=communications,
    )


def in_other_half(rank: int, size: int) -> set[int]:
    """Peers of ``shift_one_peer`` in C++, one after the other."""
    half = size // 2
    if size % 2:
        return everyone(rank, size)
    return set(range(half, size) if rank < half else range(half))


def mixing_weights(sizes: list[int], member: int) -> tuple[float, float]:
    """The weights of the left and the right neighbour of ``member`` on a ring of ``sizes``.

    A third each among equals. Otherwise Metropolis-Hastings: a member takes less from a smaller
    one, so that the mean weighted by size is unchanged.
    """
    own = sizes[member]
    neighbours = (sizes[member - 1], sizes[(member + 1) % len(sizes)])
    left, right = (min(1.0, size / own) / 3 for size in neighbours)
    return left, right


def compressed_gossip(
    bucket: BaguaBucket,
    replicas: Mapping[str, torch.Tensor],
    hierarchical: bool,
    codec: str,
    group: BaguaProcessGroup | None,
) -> Operation:
    """Mixing with both neighbours on a ring, through compressed differences from replicas.

    ``replicas``: ``weight``, the neighbours' replica of this rank, bit for bit; and of both
    neighbours ``left`` and ``right``. They are changed by the op.
    """
    _check_hierarchy(bucket, "CompressedGossip", hierarchical)
    codec, flat = codec_named(codec), bucket.backend_tensor
    for name, replica in replicas.items():
        if (replica.shape, replica.dtype) != (flat.shape, torch.float32):
            raise ValueError(
                f"bucket '{bucket.name}': the replica '{name}' is {replica.dtype} "
                f"{tuple(replica.shape)}, it must be torch.float32 {tuple(flat.shape)}"
            )

    def mixed(lane: Lane, members: Members, sizes: list[int]) -> _C.BucketOp:
        left, right = mixing_weights(sizes, members.rank)
        return _C.CompressedGossip(
            members,
            _C.make_codec(codec, str(lane.device)),
            lane.scratch,
            replicas["weight"],
            replicas["left"],
            replicas["right"],
            left,
            right,
            checksum=environment.get_checksum(),
        )

    def make(lane: Lane, _: BaguaBucket) -> _C.BucketOp:
        return among_weighted(lane, group, hierarchical, partial(mixed, lane))

    return Operation(
        name="CompressedGossip",
        arguments={"hierarchical": hierarchical, "codec": codec},
        make=make,
        group=group,
        approximates="weights",
        peers=on_ring,
    )


# Functions of users.


def python_function(function: Callable[[str], None]) -> Operation:
    return Operation(name="PythonOp", make=lambda *_: _C.PythonOp(function))


def comm_hook(hook: Callable[..., Any], state: Any) -> Operation:
    """A communication hook of torch's DistributedDataParallel: ``hook(state, GradBucket)``.

    Hooks use process groups of the user's, which must see one order.
    """

    def make(_: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        index, count = bucket.position
        return _C.CommHookOp(
            hook,
            state,
            index=index,
            count=count,
            parameters=bucket.tensors,
            offsets=[slot.offset for slot in bucket.slots()],
        )

    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return Operation(name="CommHookOp", arguments={"hook": name}, make=make, one_order=True)


def _reduce_op(average: bool) -> _C.ReduceOp:
    return _C.ReduceOp.AVG if average else _C.ReduceOp.SUM


def _padding(bucket: BaguaBucket) -> int:
    return 0 if bucket.padding_tensor is None else bucket.padding_tensor.numel()


def _check_hierarchy(
    bucket: BaguaBucket, name: str, hierarchical: Hierarchy, *, shares: bool = False
) -> None:
    """Raise ValueError for another value; ``shares``: the op can run on shares of the bucket."""
    if isinstance(hierarchical, str) and not (shares and hierarchical == "sharded"):
        known = "True, False or 'sharded'" if shares else "True or False"
        raise ValueError(
            f"bucket '{bucket.name}': hierarchical={hierarchical!r} must be {known} for {name}"
        )
