"""The job: how processes join and leave it, and groups of its ranks."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.connections import (
    Connections,
    call_until,
    check_open_files,
    fingerprint,
)
from bagua._core.group.interfaces import (
    choose_interface,
    forget_interface,
    forget_places,
    tell_place,
    where_ranks_listen,
)
from bagua._core.group.process_group import (
    BaguaProcessGroup,
    Island,
    begin_job,
    close_all,
    get_default_group,
    is_initialized,
    set_default_group,
    this_job,
)
from bagua._core.group.rendezvous import (
    agree_on_incarnation,
    connect_store,
    count_visits,
    keep_connections,
    number_in,
    refuse_stale_addresses,
    rendezvous,
)
from bagua._core.group.warn import warn

_DEFAULT = "0"  # name of the default group
_ELASTIC = "bagua_elastic"  # name of torch's backend in an elastic job
_ISLANDS = "islands"
_LONGEST_LINE = 300  # characters of an error, repeated in one line
_LONGEST_TIMEOUT = timedelta(days=36_500)


def _default_backend() -> str:
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if cuda else "gloo"


def _check_timeout(call: str, timeout: timedelta | None) -> None:
    if timeout is None or timedelta(0) < timeout <= _LONGEST_TIMEOUT:
        return
    raise ValueError(
        f"{call}(timeout={timeout!r}): it must be positive, and at most 100 years: clocks count "
        "nanoseconds in 63 bits. For ranks that may be very late take timedelta(days=30)"
    )


def init_process_group(
    store: c10d.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    local_world_size: int = -1,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    elastic: bool = False,
) -> None:
    """Join the processes of this job.

    Works under ``torchrun``, with an already initialised ``torch.distributed`` (which is then
    used unchanged), with a ``store`` of your own, under ``mpirun``, ``srun`` and other launchers
    where ``MASTER_ADDR`` and ``MASTER_PORT`` are set, and alone (world size 1) where neither
    ``RANK`` nor ``WORLD_SIZE`` is set and no launcher has started several processes. After a
    restart by ``torchrun --max-restarts`` nothing is read that the processes before have left in
    the store.

    Args:
        store: key-value store that all processes share; needs ``rank``, ``world_size`` and
            ``local_world_size``, which are then written to the environment.
        backend: of torch.distributed; default gloo, and NCCL for CUDA tensors where there is a
            GPU.
        timeout: after which a rank that does not answer is given up (default 30 minutes).
        elastic: algorithms with ``elastic=True`` can take in ranks that come back. A process that
            is started while the others train belongs to the job from its ``bagua.wrap`` on.
            torch's default group then has a rank and a size, and no collectives.

    Raises:
        RuntimeError: called twice, or torch.distributed was initialised and an argument differs
            (``elastic`` needs one that is not), or was initialised by addresses that may be of
            processes before a restart.
        BaguaTimeoutError: ranks do not come; rank 0 names them.
        BaguaError: a rank or the job's store was lost in the process.
        TypeError: ``store`` is none; a backend is given by its name.
        ValueError: a rank or size is missing or out of range, ``timeout`` is not positive or is
            over 100 years, or a launcher has started several processes and does not tell where
            they meet.

    Example::

        import bagua.torch_api as bagua

        bagua.init_process_group(timeout=timedelta(minutes=5))  # under torchrun
        print(bagua.get_rank(), bagua.get_world_size())
        bagua.destroy_process_group()
    """
    if is_initialized():
        raise RuntimeError(
            "bagua.init_process_group was called already; call bagua.destroy_process_group() first"
        )
    if elastic and (dist.is_initialized() or backend is not None):
        raise RuntimeError(
            "init_process_group(elastic=True) makes torch.distributed's default group itself, "
            "without a backend that would need all ranks: drop backend=, and torch's own "
            "init_process_group()"
        )
    _check_timeout("init_process_group", timeout)
    if text := env.asked_for_autotuning():
        warn(text)
    comes_back, connections = False, None
    if dist.is_initialized():
        if store is not None or backend is not None:
            raise RuntimeError(
                "torch.distributed is initialised already: its store and backend are used. Drop "
                "store= and backend=, or call bagua.init_process_group() instead of torch's."
            )
        refuse_stale_addresses(getattr(c10d, "_default_pg_init_method", None))
        begin_job(count_visits(c10d._get_default_store(), dist.get_rank()))
    else:
        rank, world_size, store = rendezvous(store, rank, world_size, local_world_size, timeout)
        patience = timeout or c10d.default_pg_timeout
        at_work = None
        if elastic:
            from bagua._core.group.membership import announce, job_at_work

            at_work = job_at_work(store, _DEFAULT)
        comes_back = at_work is not None
        begin_job(at_work or agree_on_incarnation(store, rank, world_size, patience))
        if elastic:
            announce(store, this_job().incarnation)
            _register_elastic()
            backend = _ELASTIC
        choose_interface(store)
        # A process that comes back meets nobody here: the others have long been through.
        connections = Connections(
            _store_of(_DEFAULT, store),
            0 if comes_back else rank,
            [rank] if comes_back else list(range(world_size)),
            patience,
        )
        fresh_keys = c10d.PrefixStore(f"bagua/{this_job().incarnation}/torch", store)
        backend = backend or _default_backend()
        _make_torch_group(fresh_keys, backend, connections, rank, world_size, timeout)
        this_job().made_torchs_group = True
    _make_default_group(timeout, comes_back, connections)


def _make_torch_group(
    store: c10d.Store,
    backend: str,
    connections: Connections,
    rank: int,
    world_size: int,
    timeout: timedelta | None,
) -> None:
    with connections.collective_phase("init_process_group"):
        connects = "gloo" in backend
        if connects:
            check_open_files(world_size - 1)
        sockets = _C.OpenedSockets()
        if connects:
            tell_place(store, rank)
        try:
            call_until(
                connections.connecting(),
                lambda: dist.init_process_group(
                    backend, store=store, rank=rank, world_size=world_size, timeout=timeout
                ),
            )
        except RuntimeError as error:
            listening = where_ranks_listen(store, world_size)
            late = _C.is_timeout_of_transport(str(error))
            raise (_C.BaguaTimeoutError if late else _C.BaguaError)(
                f"{listening}The ranks could not connect to each other: {error}"
            ) from error
        sockets.keep_from_children()
        sockets.give_up_after(connections.timeout.total_seconds())
        if connects:  # each to all others, which have come to the meeting of nodes before
            connections.node_of_ranks()
        if connects and rank == 0:
            forget_places(store)


def _make_default_group(
    timeout: timedelta | None, comes_back: bool, connections: Connections | None
) -> None:
    """``connections``: those over which torch's group was made, if it was not there already."""
    if timeout is None:
        timeout = _timeout_of(c10d._get_default_group())
    keys = _store_of(_DEFAULT) if connections is None else connections.store
    keep_connections(keys, timeout)
    members = [dist.get_rank()] if comes_back else range(dist.get_world_size())
    group = BaguaProcessGroup(members, _DEFAULT, keys, timeout, connections=connections)
    keep_connections(keys, timeout)  # those that were accepted while the store's got its options
    group.waits_to_join = comes_back
    set_default_group(group)
    _end_in_one_line()
    _leave_with_forked_process()


def _end_in_one_line() -> None:
    """Have an uncaught error of bagua's end a rank's output with one short line.

    It stands below hundreds: a traceback, a line about every rank, and torchrun's report.
    """
    print_whole = sys.excepthook

    def print_and_repeat(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        print_whole(kind, error, trace)
        # torch's init_process_group puts its own hook around those before.
        if sys.excepthook is print_and_repeat and isinstance(error, _C.BaguaError):
            rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
            text = (str(error).splitlines() or [""])[0]
            if len(text) > _LONGEST_LINE:
                text = text[: _LONGEST_LINE - 4] + " ..."
            sys.stderr.write(f"bagua: {rank}{kind.__name__}: {text}\n")

    sys.excepthook = print_and_repeat


# Collectives of torch's group, by the names that torch.distributed calls.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allgather_coalesced"),
    *("gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base"),
    *("reduce_scatter_tensor_coalesced", "send", "recv", "recv_anysource"),
)


def _register_elastic() -> None:
    if _ELASTIC not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            _ELASTIC,
            lambda store, rank, size, timeout: _NoTransport(rank, size),  # type: ignore[call-arg]
            devices=["cpu", "cuda"],
        )


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "torch.distributed's collectives do not work in an elastic job: its groups cannot lose "
        "members, nor be joined. bagua.get_rank() and bagua.get_world_size() do; so do bagua's own "
        "collectives, among the ranks of the moment."
    )


class _NoTransport(dist.ProcessGroup):
    """torch's default group of an elastic job: a rank and a world size."""

    def getBackendName(self) -> str:
        return _ELASTIC


for _name in _COLLECTIVES:
    setattr(_NoTransport, _name, _refuse)


def _store_of(group_name: str, keys: c10d.Store | None = None) -> c10d.Store:
    prefix = f"bagua/{this_job().incarnation}/{group_name}"
    return c10d.PrefixStore(prefix, keys or c10d._get_default_store())


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        return c10d.default_pg_timeout
    return timeout if isinstance(timeout, timedelta) else c10d.default_pg_timeout


def get_backend() -> str:
    """Name of the torch.distributed backend of the default group."""
    get_default_group()
    return str(dist.get_backend())


def new_group(ranks: Sequence[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """A group of some of the ranks. Every process calls it, in the same order.

    Raises:
        ValueError: a rank is out of range or occurs twice.
    """
    default = get_default_group()
    members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    if len(set(members)) != len(members) or not members:
        raise ValueError(f"new_group: ranks {members} must be distinct and not empty")
    outside = [r for r in members if not 0 <= r < dist.get_world_size()]
    if outside:
        raise ValueError(
            f"new_group: rank(s) {outside} are not in the world of {dist.get_world_size()}"
        )
    job = this_job()
    job.new_groups += 1
    # Ranks may be in groups that they make in one call, with other members each.
    name = f"{job.new_groups}.{fingerprint([str(sorted(members))]):x}"
    return BaguaProcessGroup(members, name, _store_of(name), default.timeout, stream)


def connect_islands(
    store: c10d.Store | str, island: int, islands: int, timeout: timedelta | None = None
) -> BaguaProcessGroup:
    """The group in which this process meets those of its rank in other islands.

    An island is a separate job, with its own ``torchrun`` and world of torch, of which the others
    know nothing: when one of its ranks is lost, torchrun ends and starts all of them. All processes
    of all islands call this after ``init_process_group()``, and give the group to ``bagua.wrap``.
    With ``DiLoCoAlgorithm(elastic=True)`` the others go on without a lost island, and one that is
    started again comes back there.

    Args:
        store: of all islands, or its address as ``"host:port"``: a ``TCPStore`` that outlives them.
            That of torchrun's agent of one island does while that agent lives.
        island: number of this one, from 0. One of ``islands`` or more joins a job at work.
        islands: how many there are at the start.
        timeout: after which an island that does not answer is given up; default that of the
            default group.

    Raises:
        RuntimeError: before ``init_process_group()``.
        ValueError: ``island`` is negative, ``store`` no address, ``timeout`` not positive or over
            100 years, or an island has another number of ranks than those before it.
        BaguaError: the store cannot be reached, or islands do not come.

    Example::

        bagua.init_process_group()
        group = bagua.communication.connect_islands("10.0.0.1:29500", island=0, islands=2)
        model = bagua.wrap(
            model, [optimizer], DiLoCoAlgorithm(elastic=True), process_group=group
        )
    """
    from bagua._core.group.membership import announce, job_at_work

    inside = get_default_group()
    if island < 0 or islands < 1:
        raise ValueError(f"connect_islands: island={island} of islands={islands} is none")
    _check_timeout("connect_islands", timeout)
    timeout = timeout or inside.timeout
    keys = c10d.PrefixStore(
        f"bagua/{_ISLANDS}", connect_store(store, timeout) if isinstance(store, str) else store
    )
    keep_connections(keys, timeout)
    comes_back, name = False, 0
    if inside.rank == 0:
        at_work = job_at_work(keys, _ISLANDS)
        comes_back = at_work is not None
        if at_work is None and island >= islands:
            raise _C.BaguaError(
                f"island {island} joins a job of {islands} islands, from 0, that is at work, and "
                "there is none. Start those first, all of them with elastic=True"
            )
        incarnation = at_work or agree_on_incarnation(
            keys, island, islands, timeout, called="island", call="connect_islands()"
        )
        announce(keys, incarnation)
        name = int(incarnation, 16)
    # A name has 64 bits, a number of the collective 63.
    back, high, low = inside.connections.reduce_numbers(
        "connecting the islands", _C.ReduceOp.MAX, int(comes_back), *divmod(name, 2**32)
    )
    everyone = c10d.PrefixStore(f"bagua/{high * 2**32 + low:016x}/{_ISLANDS}", keys)
    size = number_in(everyone.compare_set("ranks", "", str(inside.size)), "ranks", 1 << 31)
    if size != inside.size:
        raise ValueError(
            f"connect_islands: island {island} has {inside.size} ranks, others have {size}. Each "
            "rank meets that of its number in other islands: give all equally many"
        )
    group = BaguaProcessGroup(
        [island] if back else range(islands),
        _ISLANDS,
        c10d.PrefixStore(f"rank{inside.rank}", everyone),
        timeout,
        island=Island(island, inside, everyone),
    )
    group.waits_to_join = bool(back)
    return group


def from_torch_group(group: dist.ProcessGroup, stream: Any = None) -> BaguaProcessGroup:
    """The bagua group with the members of a torch group, which alone call it."""
    return from_ranks(dist.get_process_group_ranks(group), group, stream)


def from_ranks(
    ranks: Sequence[int], like: dist.ProcessGroup, stream: Any = None
) -> BaguaProcessGroup:
    """A bagua group of ``ranks`` with the time-out of ``like``. Only the members call it."""
    members = "-".join(map(str, ranks))
    counted = this_job().counted
    counted[members] += 1  # equal on all members
    name = f"torch/{members}/{counted[members]}"
    return BaguaProcessGroup(ranks, name, _store_of(name), _timeout_of(like), stream)


def group_of_mesh(group: Any) -> Any:
    """The torch group of a ``DeviceMesh`` of one dimension; anything else unchanged."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        names = group.mesh_dim_names
        slices = [f'mesh["{name}"]' for name in names or ()]
        remedy = " or ".join(slices) or "mesh.get_group(dimension)"
        raise ValueError(
            f"process_group is a DeviceMesh of {group.ndim} dimensions, and one group "
            f"communicates: pass {remedy}, the dimension over which ranks have different data"
        )
    return group.get_group()


def as_bagua_group(group: Any, stream: Any = None) -> BaguaProcessGroup:
    """Whatever a user passes as ``process_group=``: None, a torch group, a mesh or one of ours.

    ``stream`` is for a torch group that has no bagua group yet.
    """
    group = group_of_mesh(group)
    if group is None:
        return get_default_group()
    if isinstance(group, BaguaProcessGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        get_default_group()
        known = this_job().of_torch
        if group not in known:
            known[group] = from_torch_group(group, stream)
        return known[group]
    raise TypeError(
        "process_group must be None, a torch.distributed.ProcessGroup, a DeviceMesh of one "
        f"dimension or a BaguaProcessGroup, not {type(group).__name__}"
    )


def known_bagua_group(group: dist.ProcessGroup) -> BaguaProcessGroup:
    known = this_job().of_torch
    if group not in known:
        raise RuntimeError("this process group has no bagua group: call group.bagua_patch() first")
    return known[group]


def ensure_initialised() -> None:
    """Make bagua's default group over torch.distributed's if there is none. All ranks call it.

    It is made again when the script has destroyed torch's and initialised another.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call torch.distributed.init_process_group() or "
            "bagua.init_process_group() first"
        )
    world = dist.group.WORLD
    assert world is not None
    if is_initialized():
        made_over = this_job().made_over
        if made_over is None or made_over() is world:
            return
        destroy_process_group()
    init_process_group()
    this_job().made_over = weakref.ref(world)


def destroy_process_group() -> None:
    """Stop all wrapped models' communication and leave the group.

    Called automatically at exit. torch.distributed's own default group is destroyed too if
    :func:`init_process_group` made it.

    Raises:
        BaguaError: a device has failed at the last steps, and no step has raised that. All is
            destroyed nevertheless.
    """
    _destroy()


def _destroy(process_ends: bool = False) -> None:
    job = this_job()
    try:
        close_all(process_ends)
    finally:
        job.of_torch.clear()
        if job.made_torchs_group and dist.is_initialized():
            dist.destroy_process_group()
            forget_interface()
        job.made_torchs_group = False


def _leave(process: int) -> None:
    # A gloo group that outlives the interpreter may abort the process; a forked child has no
    # threads to stop.
    if os.getpid() != process:
        return
    try:
        _destroy(process_ends=True)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _C.end_drops()


def _leave_with_forked_process() -> None:
    """multiprocessing ends forked processes, such as those of a notebook, without ``atexit``."""
    global _leaving_process
    util = sys.modules.get("multiprocessing.util")
    if util is not None and os.getpid() != _leaving_process:
        _leaving_process = os.getpid()
        util.Finalize(None, _leave_forked, (os.getpid(),), exitpriority=0)


def _leave_forked(process: int) -> None:
    error = sys.exc_info()[1]
    if getattr(error, "code", error):  # None also for SystemExit of a process that ends well
        sys.last_value = error
    _leave(process)


def _keep_torch_groups() -> None:
    """In a forked child: the destructors of torch's groups wait for threads of the parent."""
    if is_initialized() and dist.is_initialized():
        for group in c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_leaving_process = os.getpid()
atexit.register(_leave, _leaving_process)
os.register_at_fork(after_in_child=_keep_torch_groups)
