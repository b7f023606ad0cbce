"""Types of the C++ core. The contracts are in the headers under csrc/."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.distributed_c10d import Backend, Store

class BaguaError(RuntimeError): ...
class BaguaTimeoutError(BaguaError): ...
class BaguaMismatchError(BaguaError): ...

# Codecs.

class Codec:
    @property
    def name(self) -> str: ...
    @property
    def block_numel(self) -> int: ...
    def payload_bytes(self, dtype: torch.dtype, chunk_numel: int) -> int: ...
    def encode(self, x: torch.Tensor, chunks: int = 1) -> torch.Tensor: ...
    def decode(
        self, payload: torch.Tensor, chunks: int, dtype: torch.dtype, chunk_numel: int
    ) -> torch.Tensor: ...
    def decode_add(
        self, payload: torch.Tensor, dtype: torch.dtype, sum: torch.Tensor, weight: float = 1.0
    ) -> None: ...
    def encode_into(self, x: torch.Tensor, chunks: int, payload: torch.Tensor) -> None: ...
    def encode_residual(self, x: torch.Tensor, chunks: int, payload: torch.Tensor) -> None: ...
    def decode_into(self, payload: torch.Tensor, chunks: int, x: torch.Tensor) -> None: ...

def make_codec(name: str, device: str = "cpu") -> Codec: ...
def has_cuda_codecs() -> bool: ...
def payload_checksum(payload: torch.Tensor) -> int: ...
def instruction_set() -> str: ...
def codec_names() -> list[str]: ...

# Parts of sparse messages.

def top_k(x: torch.Tensor, k: int) -> torch.Tensor: ...
def index_coding(n: int, k: int) -> str: ...
def pack_indices(indices: torch.Tensor, n: int) -> torch.Tensor: ...
def unpack_indices(bytes: torch.Tensor, k: int, n: int) -> torch.Tensor: ...
def sparse_message_bytes(numel: int, k: int, values: torch.dtype) -> int: ...

# Communicators.

class ReduceOp:
    SUM: ReduceOp
    AVG: ReduceOp
    MIN: ReduceOp
    MAX: ReduceOp

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None: ...
    def all_gather(self, input: torch.Tensor, output: torch.Tensor) -> None: ...
    def all_to_all(self, input: torch.Tensor, output: torch.Tensor) -> None: ...
    def broadcast(self, tensor: torch.Tensor, root: int) -> None: ...
    def exchange(
        self, sends: list[tuple[torch.Tensor, int]], recvs: list[tuple[torch.Tensor, int]]
    ) -> None: ...
    def expect(self, recvs: list[tuple[torch.Tensor, int]]) -> None: ...
    @property
    def shares_memory(self) -> bool: ...
    def shorten_paths(self) -> None: ...
    def abort(self, reason: str) -> None: ...

class ThreadHub:
    def __init__(self, size: int, timeout: float) -> None: ...

class ThreadCommunicator(Communicator):
    def __init__(self, hub: ThreadHub, rank: int) -> None: ...

MOST_RANKS_TOLD_DIRECTLY: int
FRAME_BYTES: int

class C10dCommunicator(Communicator):
    def __init__(self, backend: Backend) -> None: ...

class HostCommunicator(Communicator):
    def __init__(self, inner: Communicator) -> None: ...

class SharedMemoryCommunicator(Communicator): ...

class Gathering:
    def __init__(
        self,
        store: Store,
        key: str,
        rank: int,
        size: int,
        timeout: float,
        counted: bool = False,
    ) -> None: ...
    def bring(self, text: str | bytes) -> None: ...
    def texts(self, timeout: float | None = None, *, finish: bool = True) -> list[bytes]: ...
    def share_memory(
        self, node: int, refusal: str = ""
    ) -> tuple[SharedMemoryCommunicator | None, str, bool]: ...
    def give_up(self, reason: str) -> None: ...
    def finish(self) -> None: ...
    def forget(self) -> None: ...
    def stores(
        self, transports: int, exchange: Callable[[bytes], list[bytes]] | None = None
    ) -> list[Store]: ...

has_nccl: bool

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

class CountingCommunicator(Communicator):
    def __init__(self, inner: Communicator) -> None: ...
    def counted_apart(self) -> CountingCommunicator: ...
    def traffic(self) -> dict[str, int]: ...

class Blame:
    THIS_RANK: Blame
    MAYBE_OTHER: Blame

class Board:
    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        straggler_after_s: float = 0.0,
        on_straggler: Callable[[str], None] | None = None,
    ) -> None: ...
    def seat(
        self,
        name: str,
        members: list[int],
        *,
        title: str = "",
        unit: str = "round",
        per_round: bool = False,
    ) -> FailureBoard: ...
    def leave(self, process_ends: bool = False) -> None: ...

class FailureBoard:
    def __init__(self, store: Store, rank: int, size: int) -> None: ...
    def publish(self, reason: str, blame: Blame = ...) -> None: ...
    def poll(self) -> str | None: ...
    def publish_exit(self, rounds: int) -> None: ...
    def poll_exit(self, round: int) -> str | None: ...
    def beat(
        self,
        round: int,
        text: str,
        waits: bool = False,
        on_news: Callable[[str], None] | None = None,
        on_never: Callable[[str], None] | None = None,
    ) -> None: ...
    def survey(self, round: int, unit: str = "round", everyone: bool = False) -> str: ...
    def diagnose(
        self,
        seen: str,
        number: int,
        unit: str = "round",
        everyone: bool = False,
        peer: int | None = None,
    ) -> str: ...

class OpenedSockets:
    def __init__(self) -> None: ...
    def keep_from_children(self) -> None: ...
    def give_up_after(self, seconds: float) -> None: ...
    def control_congestion_by(self, algorithm: str) -> bool: ...
    def round_trip_us(self) -> int: ...

def torch_sockets_give_up_after(seconds: float, store_port: int) -> None: ...
def interruptible(function: Callable[..., Any], *arguments: Any) -> Any: ...
def keys_of(store: Store) -> list[str]: ...
def is_timeout_of_transport(text: str) -> bool: ...
def watch_collectives() -> None: ...
def watched_collectives() -> list[tuple[str, str]]: ...

# Ops.

class Scratch:
    def __init__(self) -> None: ...

class BucketOp:
    def describe(self) -> str: ...
    def run(
        self, flat: torch.Tensor, step: int = 1, grad_scale: float = 1.0, bucket: str = "eager"
    ) -> None: ...

class RoundOutcome:
    def __init__(self) -> None: ...
    def leave(self, round: int) -> None: ...
    @property
    def newest(self) -> int: ...

class Sampled(BucketOp):
    def __init__(self, inner: BucketOp) -> None: ...
    def request(self, places: torch.Tensor) -> None: ...
    def take(self) -> tuple[torch.Tensor, torch.Tensor, float] | None: ...

class RoundMemory:
    def __init__(self, initial: list[torch.Tensor], outcome: RoundOutcome) -> None: ...
    def value(self, i: int) -> torch.Tensor: ...
    def next(self, i: int) -> torch.Tensor: ...
    def leave(self, step: int, finite: bool) -> None: ...
    def set(self, i: int, value: torch.Tensor) -> None: ...

class AllReduce(BucketOp):
    def __init__(
        self, communicator: Communicator, op: ReduceOp, flat: torch.Tensor = ...
    ) -> None: ...

class SparseGradient:
    local: torch.Tensor | None
    def __init__(self) -> None: ...
    @property
    def result(self) -> torch.Tensor | None: ...

class AllReduceRows(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        scratch: Scratch,
        gradient: SparseGradient,
        sizes: list[int],
        op: ReduceOp,
    ) -> None: ...

class CompressedAllReduce(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        codec: Codec,
        scratch: Scratch,
        op: ReduceOp,
        *,
        checksum: bool = False,
        memory: RoundMemory | None = None,
        padding: int = 0,
        shards: Communicator | None = None,
    ) -> None: ...

def part_stride(numel: int, parts: int) -> int: ...

class Hierarchical(BucketOp):
    def __init__(
        self,
        node: Communicator,
        inner: BucketOp | None,
        ranks: int,
        nodes: int,
        op: ReduceOp,
        codec: Codec | None = None,
        scratch: Scratch | None = None,
    ) -> None: ...

class CompressedReduceScatter(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        codec: Codec,
        scratch: Scratch,
        *,
        divisor: float,
        memory: RoundMemory | None = None,
        checksum: bool = False,
    ) -> None: ...

class CompressedAllGather(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        codec: Codec,
        scratch: Scratch,
        *,
        checksum: bool = False,
    ) -> None: ...

class ShardedHierarchical(BucketOp):
    def __init__(
        self,
        node: Communicator,
        inner: list[BucketOp | None],
        scratch: Scratch,
        ranks: int,
        nodes: int,
        op: ReduceOp,
        device: str = "cpu",
    ) -> None: ...

class AverageWeights(BucketOp):
    def __init__(
        self, peer_weight: torch.Tensor, communications: torch.Tensor, inner: BucketOp
    ) -> None: ...

def shift_one_peer(rank: int, size: int, step: int) -> int: ...

class Gossip(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        communications: torch.Tensor,
        weights: list[int],
        scratch: Scratch,
    ) -> None: ...

class NeighborAverage(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        own_weight: float,
        neighbors: list[tuple[int, float]],
        scratch: Scratch,
    ) -> None: ...

class UpdateMomentum(BucketOp):
    def __init__(
        self,
        memories: list[torch.Tensor],
        offsets: list[int],
        strides: list[list[int]],
        betas: torch.Tensor,
        scratch: Scratch,
    ) -> None: ...

class LowRank(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        scratch: Scratch,
        numel: int,
        matrices: list[tuple[int, int, int, int]],
        *,
        warm_start: bool,
        error_feedback: bool,
        seed: int,
        memory: RoundMemory,
    ) -> None: ...

def checksum_on_device(payload: torch.Tensor) -> int: ...
def all_finite(tensor: torch.Tensor) -> bool: ...
def orthonormalise(batch: torch.Tensor) -> torch.Tensor: ...

class CompressedGossip(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        codec: Codec,
        scratch: Scratch,
        weight: torch.Tensor,
        left_peer_weight: torch.Tensor,
        right_peer_weight: torch.Tensor,
        mix_left: float,
        mix_right: float,
        *,
        checksum: bool = False,
    ) -> None: ...

class Sparse(BucketOp):
    def __init__(
        self,
        communicator: Communicator,
        scratch: Scratch,
        numel: int,
        k: int,
        memory: RoundMemory,
        *,
        checksum: bool = False,
    ) -> None: ...

class ErrorFeedbackAllReduce(BucketOp):
    def __init__(
        self, communicator: Communicator, scratch: Scratch, numel: int, memory: RoundMemory
    ) -> None: ...

class PythonOp(BucketOp):
    def __init__(self, function: Callable[[str], None]) -> None: ...

class CommHookOp(BucketOp):
    def __init__(
        self,
        hook: Callable[..., Any],
        state: Any,
        *,
        index: int,
        count: int,
        parameters: list[torch.Tensor],
        offsets: list[int],
    ) -> None: ...

# Local training.

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

# Engine.

class Adopt:
    NONE: Adopt
    GRAD_VIEW: Adopt
    GRAD_COPY: Adopt
    SPARSE: Adopt

class Slot:
    def __init__(
        self,
        name: str,
        offset: int,
        sizes: list[int],
        strides: list[int],
        adopt: Adopt,
        parameter: torch.Tensor | None = None,
        sparse: SparseGradient | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...

class Bucket:
    def __init__(
        self,
        name: str,
        flat: torch.Tensor,
        slots: list[Slot],
        ops: list[BucketOp],
        adopt_scale: float = 1.0,
        part: int = 0,
    ) -> None: ...

class Lane:
    def __init__(
        self, buckets: list[Bucket], communicators: list[CountingCommunicator]
    ) -> None: ...

class WeightsSample:
    def __init__(self, named: list[tuple[str, torch.Tensor]], every: int) -> None: ...
    def take(self, round: int) -> tuple[int, int, list[int]] | None: ...
    def take_ns(self, round: int) -> int: ...
    def describe(self) -> list[str]: ...
    @property
    def windows(self) -> int: ...

class Engine:
    def __init__(
        self,
        lanes: list[Lane],
        *,
        name: str,
        fingerprint: int,
        incarnation: int,
        timeout_s: float,
        control: CountingCommunicator,
        board: FailureBoard | None = None,
        straggler_after_s: float = 0.0,
        on_straggler: Callable[[str], None] | None = None,
        weights: WeightsSample | None = None,
        clock: ManualClock | None = None,
    ) -> None: ...
    def begin_round(
        self,
        grad_scale: float = 1.0,
        *,
        frozen: int = 0,
        has_inputs: bool = True,
        part: int | None = None,
        samples: float | None = None,
        samples_later: bool = False,
    ) -> None: ...
    def note_forward(self) -> None: ...
    def await_agreement(self) -> None: ...
    def mark_ready(self, slot: int) -> bool: ...
    def mark_all(self) -> None: ...
    def marked(self, slot: int) -> bool: ...
    def exchange_used(self, used: list[int]) -> None: ...
    def wait(self) -> None: ...
    def settle(self) -> None: ...
    def fail(self, reason: str, timed_out: bool) -> NoReturn: ...
    def abort(self, reason: str) -> None: ...
    def stop(self, agreed: bool = ...) -> None: ...
    @property
    def round(self) -> int: ...
    @property
    def round_open(self) -> bool: ...
    @property
    def weight(self) -> float: ...
    @property
    def slots(self) -> int: ...
    @property
    def used(self) -> list[int]: ...
    def stats(self) -> dict[str, Any]: ...

def end_drops() -> None: ...

class GradientPath:
    def __init__(
        self,
        engine: Engine,
        *,
        install_hooks: bool,
        find_unused: bool,
        static_graph: bool = False,
        weights: list[tuple[str, torch.Tensor]] = ...,
        open_round: Callable[[], None] | None = None,
        before_backward: Callable[[], None] | None = None,
        after_backward: Callable[[], None] | None = None,
        after_gradients: Callable[[], None] | None = None,
        on_unused: Callable[[list[str]], None] | None = None,
        on_past_wrapper: Callable[[str], None] | None = None,
    ) -> None: ...
    @property
    def in_backward(self) -> bool: ...
    @property
    def communicating(self) -> bool: ...
    def begin_forward(self, communicates: bool) -> None: ...
    def begin_round(
        self, grad_scale: float = 1.0, result_scale: float = 1.0, samples: float | None = None
    ) -> None: ...
    def watch(self, outputs: list[torch.Tensor]) -> None: ...
    def adopt(self, slot: int) -> None: ...
    def answer_with_zeros(self) -> None: ...
    def remove_hooks(self) -> None: ...

def has_torch_reducer(parameter: torch.Tensor) -> bool: ...

class PlanGuard:
    def __init__(self, names: list[str], dicts: list[Any], ignored: set[str] = ...) -> None: ...
    def difference(self, dicts: list[Any], unfreezing: bool = ...) -> str: ...
    def moved(self, dicts: list[Any]) -> bool: ...
    def accept_places(self, names: list[str], dicts: list[Any], ignored: set[str]) -> bool: ...
    def accept_unfrozen(self) -> None: ...
    def reduced_by_torch(self) -> str: ...
    def trains(self, dicts: list[Any]) -> bool: ...

class OverwriteWatch:
    def __init__(self, weights: list[torch.Tensor]) -> None: ...
    def end(self) -> list[int]: ...

# Lanes of jobs, and of rounds that repeat.

class GradientBucket:
    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        parameters: list[torch.Tensor],
        offsets: list[int],
    ) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def buffer(self) -> torch.Tensor: ...
    @property
    def parameters(self) -> list[torch.Tensor]: ...
    @property
    def offsets(self) -> list[int]: ...

class BucketOperations:
    def __init__(
        self,
        name: str,
        description: str,
        ops: list[BucketOp],
        scale: float = 1.0,
        memory: RoundMemory | None = None,
    ) -> None: ...

class Posted:
    def wait(self) -> None: ...
    @property
    def done(self) -> bool: ...

class Weighed:
    HERE: Weighed
    BEFORE: Weighed
    NOT: Weighed

class DynamicLane:
    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        ops: list[CountingCommunicator],
        control: CountingCommunicator,
        board: FailureBoard | None = None,
    ) -> None: ...
    def post(
        self,
        operations: BucketOperations,
        flat: torch.Tensor,
        *,
        round: int,
        grad_scale: float = 1.0,
        samples: float | None = None,
        weighed: Weighed = ...,
    ) -> Posted: ...
    def check(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def transport_failed(self, reason: str) -> None: ...
    def waits_outside(self, text: str) -> None: ...
    @property
    def weight(self) -> float: ...
    def stop(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class DdpHook:
    def __init__(
        self,
        lane: DynamicLane,
        operations: Callable[[GradientBucket, int], BucketOperations],
        *,
        grad_scale: Callable[[], float] | None = None,
        outcome: RoundOutcome | None = None,
    ) -> None: ...
    @property
    def round(self) -> int: ...
    def register(self, reducer: Any) -> None: ...
    def add_samples(self, number: float) -> None: ...
    def settle(self) -> None: ...
    def renew(self, round: int) -> None: ...

class ManualClock:
    def __init__(self) -> None: ...
    def turn(self, seconds: float) -> None: ...
    @property
    def readings(self) -> int: ...
    @property
    def waiting(self) -> int: ...

class PeriodicLane:
    def __init__(
        self,
        communicator: CountingCommunicator,
        weights: list[torch.Tensor],
        *,
        name: str,
        interval_s: float,
        timeout_s: float,
        board: FailureBoard | None = None,
        clock: ManualClock | None = None,
    ) -> None: ...
    def resume(self) -> None: ...
    def ask_to_pause(self) -> None: ...
    def pause(self, limit_s: float | None = None) -> bool: ...
    def check(self) -> None: ...
    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def stop(self) -> None: ...
    @property
    def inside(self) -> bool: ...
    @property
    def at_gate(self) -> bool: ...
    @property
    def running(self) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
