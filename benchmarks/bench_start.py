"""Costs of a start, a wrap, some steps and an end with many ranks: DDP and each algorithm.

    python benchmarks/bench_start.py [--ranks 2 8 16 32 64] [--arms ddp exact]
        [--nodes 2] [--names refuse|silent|host] [--count] [--steps 20] [--idle 5] [--quick]

Ranks are forked from one process that has imported torch and bagua; each is a node, so gloo
connects them, or they share `--nodes`. Arms of one number of ranks run one after the other: compare
within a row. Prints for each arm the slowest rank's seconds of init, wrap, first step and end, the
median step, descriptors, sockets, threads and MiB that a rank has more after the steps than before,
and the share of a core that an idle rank takes.

--count puts a proxy before the job's store: requests, bytes and connections per rank of the start,
of the wrap, of the steps and of idling, and the keys at the end. Seconds of such a run include the
proxy. --names: the name server of a network namespace of the program (root) refuses at once, or
never answers; host: the machine's own network. Ranks that have not ended after `--limit` seconds
are killed, and the arm is reported so.
Prints JSON lines; the last ones are kept in build/benchmarks/start.json.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks
import torch.distributed.optim
import torch.nn as nn
from common import keep_cases
from store_proxy import OF_TORCH, StoreProxy

ADDRESS = "10.98.0.1"  # in the namespace; no file of names has it
CLONE_NEWNS, CLONE_NEWNET, MS_REC_PRIVATE, MS_BIND = 0x20000, 0x40000000, 0x44000, 0x1000


def algorithms():
    """Each arm of bagua: a function of the parameters, which gives algorithm and optimizer."""
    from bagua.torch_api.algorithms import Algorithm, QAdamAlgorithm, QAdamOptimizer

    def named(name, **arguments):
        def make(parameters):
            return Algorithm.init(name, **arguments), torch.optim.SGD(parameters, lr=0.01)

        return make

    def q_adam(parameters):
        optimizer = QAdamOptimizer(parameters, lr=0.01, warmup_steps=5)
        return QAdamAlgorithm(optimizer, hierarchical=False), optimizer

    flat = {"hierarchical": False}
    return {
        "exact": named("gradient_allreduce"),
        "bytegrad": named("bytegrad"),
        "bytegrad_flat": named("bytegrad", **flat),
        "decentralized": named("decentralized", **flat, peer_selection_mode="shift_one"),
        "low_precision": named("low_precision_decentralized", **flat),
        "async": named("async", sync_interval_ms=200, warmup_steps=2),
        "qadam": q_adam,
        "sparse": named("sparse", ratio=0.01),
        "power_sgd": named("power_sgd", warmup_steps=0),
        "diloco": named("diloco", interval=5),
        "auto": named("auto"),
    }


def held():
    """Descriptors, sockets, threads and MiB that only this process has."""
    files = [os.readlink(f"/proc/self/fd/{name}") for name in _descriptors()]
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            mib = int(line.split()[1]) / 1024
    return {
        "descriptors": len(files),
        "sockets": sum(file.startswith("socket:") for file in files),
        "threads": len(os.listdir("/proc/self/task")),
        "mib": mib,
    }


def _descriptors():
    return [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]


class Rank:
    """The body of one rank. `sync`: waits for all ranks and the parent, where that counts."""

    def __init__(self, arm, options, sync):
        self.arm, self.options, self.sync = arm, options, sync
        self.figures = {}

    def run(self):
        before = held()
        self.sync("begin")
        with self.timed("init"):
            library = self._init()
        self.sync("start")
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
        model = nn.Sequential(*layers, nn.Linear(64, 10))
        with self.timed("wrap"):
            model, optimizer = self._wrap(model)
        self.sync("wrap")
        inputs, labels = torch.randn(8, 64), torch.randint(0, 10, (8,))

        def step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

        with self.timed("first_step"):
            step()
        seconds = []
        for _ in range(self.options.steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        self.figures["step"] = statistics.median(seconds)
        self.figures |= {name: value - before[name] for name, value in held().items()}
        self.sync("steps")
        busy = time.process_time()
        time.sleep(self.options.idle)
        self.figures["idle_percent"] = 100 * (time.process_time() - busy) / self.options.idle
        self.sync("idle")
        with self.timed("end"):
            library.destroy_process_group()
        return self.figures

    @contextlib.contextmanager
    def timed(self, name):
        start = time.perf_counter()
        yield
        self.figures[name] = time.perf_counter() - start

    def _init(self):
        if self.arm == "ddp":
            dist.init_process_group("gloo")
            return dist
        import bagua.torch_api as bagua

        bagua.init_process_group()
        return bagua

    def _wrap(self, model):
        if self.arm == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
            return wrapped, torch.optim.SGD(model.parameters(), lr=0.01)
        algorithm, optimizer = algorithms()[self.arm](model.parameters())
        return model.with_bagua([optimizer], algorithm), optimizer


class Job:
    """`ranks` forked ranks of one arm; `phase` has all of them pass a point together."""

    PHASES = ("begin", "start", "wrap", "steps", "idle")

    def __init__(self, arm, ranks, options, store):
        self._pipes = []
        self._pids = []
        for rank in range(ranks):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                for pipe in [ours, *self._pipes]:
                    pipe.close()
                _become(arm, rank, ranks, options, store, theirs)
            theirs.close()
            self._pipes.append(ours)
            self._pids.append(pid)
        self._deadline = time.monotonic() + options.limit

    def await_all(self):
        """One message of each rank, or TimeoutError, or RuntimeError of the rank that ended."""
        waiting = dict(enumerate(self._pipes))
        messages = {}
        while waiting:
            left = self._deadline - time.monotonic()
            ready, _, _ = select.select(list(waiting.values()), [], [], max(0, left))
            if not ready:
                raise TimeoutError(f"{len(waiting)} of {len(self._pipes)} ranks are not there yet")
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                message = waiting.pop(rank).recv(1 << 16)
                if not message:
                    raise RuntimeError(f"rank {rank} has ended; its error is above")
                messages[rank] = json.loads(message)
        return [messages[rank] for rank in sorted(messages)]

    def go_on(self):
        for pipe in self._pipes:
            pipe.send(b"go")

    def end(self):
        for pipe, pid in zip(self._pipes, self._pids, strict=True):
            pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _become(arm, rank, ranks, options, store, pipe):
    local = ranks // options.nodes if options.nodes else 1
    host, port = store
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank % local),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)

    def sync(_):
        pipe.send(b"{}")
        if not pipe.recv(16):
            os._exit(1)

    status = 1
    try:
        pipe.send(json.dumps(Rank(arm, options, sync).run()).encode())
        pipe.recv(16)
        status = 0
    finally:
        if status:
            traceback.print_exc(limit=-3)
        os._exit(status)


def measure(arm, ranks, options, host):
    """The figures of one arm: of seconds and resources the largest of all ranks."""
    with StoreProxy(host) as proxy:
        counted, store = [], proxy.address if options.count else proxy.behind
        job = Job(arm, ranks, options, store)
        try:
            for _ in Job.PHASES:
                job.await_all()
                counted.append(proxy.counts())
                job.go_on()
            figures = job.await_all()
            counted.append(proxy.counts())
        except (TimeoutError, RuntimeError) as error:
            return {"failed": str(error)}
        finally:
            job.end()
    found = {name: max(rank[name] for rank in figures) for name in figures[0]}
    found["keys"] = counted[-1]["keys"] - counted[0]["keys"]
    if options.count:
        found |= requests_of_phases(counted, ranks, options)
    return found


def requests_of_phases(counted, ranks, options):
    asked = {}
    for phase, before, after in zip(
        (*Job.PHASES[1:], "end"), counted[:-1], counted[1:], strict=True
    ):
        kinds = {
            kind: number - before["requests"].get(kind, 0)
            for kind, number in after["requests"].items()
            if kind not in OF_TORCH
        }
        sent = sum(after["bytes"].values()) - sum(before["bytes"].values())
        asked[phase] = {
            "requests": sum(kinds.values()) / ranks,
            "bytes": sent / ranks,
            "connections": (after["connections"] - before["connections"]) / ranks,
            "kinds": {kind: number / ranks for kind, number in kinds.items() if number},
        }
    asked["idle"]["requests_per_second"] = asked["idle"]["requests"] / options.idle
    return {"asked": asked, "longest_request": counted[-1]["longest"]}


def enter_namespace(names):
    """A network of this process and its children, whose name server refuses, or never answers."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWNS) != 0:
        sys.exit(f"bench_start: --names {names} needs root: {os.strerror(ctypes.get_errno())}")
    libc.mount(None, b"/", None, MS_REC_PRIVATE, None)
    servers = Path(tempfile.mkstemp()[1])
    servers.write_text("nameserver 127.0.0.1\n")
    if libc.mount(bytes(servers), b"/etc/resolv.conf", None, MS_BIND, None) != 0:
        sys.exit("bench_start: /etc/resolv.conf cannot be replaced")
    for command in ("link set lo up", f"address add {ADDRESS}/24 dev lo"):
        subprocess.run(["ip", *command.split()], check=True)
    if names == "refuse":
        return None
    mute = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    mute.bind(("127.0.0.1", 53))
    return mute


def _import_lazily_loaded():
    """Imports what torch would at the first optimizer and the first DDP, for seconds."""
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.1).step()
    importlib.import_module("torch._dynamo")


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16, 32, 64])
    parser.add_argument("--arms", nargs="+", default=["ddp", *algorithms()])
    parser.add_argument("--nodes", type=int, default=0, help="0: each rank is one")
    parser.add_argument("--names", choices=["refuse", "silent", "host"], default="refuse")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--idle", type=float, default=5.0)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--quick", action="store_true", help="2 and 8 ranks, idle for a second")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.idle = [2, 8], 1.0
    for ranks in options.ranks:
        if options.nodes and ranks % options.nodes:
            parser.error(f"{ranks} ranks do not make {options.nodes} equal nodes")
    return options


def main():
    if os.environ.get("OMP_NUM_THREADS") != "1":  # or torch has threads, which no fork takes along
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            os.environ | {"OMP_NUM_THREADS": "1"},
        )
    options = parse()
    server = None if options.names == "host" else enter_namespace(options.names)
    host = "127.0.0.1" if options.names == "host" else ADDRESS
    _import_lazily_loaded()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(
            f"bench_start: {threads} threads, which no fork takes along: set OMP_NUM_THREADS=1"
        )
    cases = []
    for ranks in options.ranks:
        for arm in options.arms:
            case = {
                "arm": arm,
                "ranks": ranks,
                "nodes": options.nodes or ranks,
                "names": options.names,
                "counted": options.count,
            }
            cases.append(case | measure(arm, ranks, options, host))
            print(json.dumps(cases[-1]), flush=True)
            keep_cases("start", cases, list(case))
    if server is not None:
        server.close()


if __name__ == "__main__":
    main()
