"""The programs of tools/gpu_hour that import bagua: smoke, two, steps, kernels and small.

usage: programs_on_gpu.py NAME    (GPU_HOUR_DEVICE: cuda, or cpu in a dry run; GPU_HOUR_OUT)
"""

import contextlib
import datetime
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

import bagua.torch_api as bagua
import test_algorithms
import test_communicators
import test_several_gpus
import torch
import torch.distributed as dist
from bagua import _C
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from support.every_algorithm import ALGORITHMS, SYNCHRONOUS, made, wrapped
from support.processes.pool import Pool, new_store, torchrun_environment
from support.shared_gpu import hosts_that_share_a_gpu
from support.threads.low_rank_ranks import Rank
from support.threads.sparse_ranks import make, memory_of
from support.threads.thread_ranks import run_thread_ranks
from torch.nn.parallel import DistributedDataParallel

DEVICE = os.environ["GPU_HOUR_DEVICE"]
OUT = Path(os.environ["GPU_HOUR_OUT"])
DRY = DEVICE == "cpu"
results = []


def attempt(name, body, *args):
    """Runs the body and prints a line; whether it raised nothing. Failures are kept."""
    begin = time.monotonic()
    try:
        said, passed = body(*args), True
    except BaseException as error:  # noqa: BLE001 - reported
        said, passed = f"{type(error).__name__}: {error}", False
        traceback.print_exc()
    seconds = round(time.monotonic() - begin, 3)
    results.append({"what": name, "passed": passed, "seconds": seconds, "said": said})
    print(f"{'ok    ' if passed else 'FAILED'} {name} ({seconds} s) {str(said)[:600]}", flush=True)
    return passed


def few(names):
    """All of them, and the first alone in a dry run."""
    return list(names)[:1] if DRY else list(names)


def synchronize():
    if not DRY:
        torch.cuda.synchronize()


# ---- smoke: the first contact of every part, in one process ----


def match_codecs():
    """Compares bytes and values of all codecs with those of the CPU."""
    wrong = []
    for name in _C.codec_names():
        ours, reference = _C.make_codec(name, DEVICE), _C.make_codec(name)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for numel in (1, 31, 2047, 2048, 2049, 70_001):
                for shift in (0, 1):
                    generator = torch.Generator().manual_seed(numel)
                    x = torch.randn(numel + shift, generator=generator).to(dtype)
                    expected = reference.encode(x[shift:].contiguous())
                    payload = ours.encode(x.to(DEVICE)[shift:])
                    decoded = ours.decode(payload, 1, dtype, numel).cpu()
                    same = torch.equal(payload.cpu(), expected)
                    same &= torch.equal(decoded, reference.decode(expected, 1, dtype, numel))
                    wrong += [] if same else [(name, str(dtype), numel, shift)]
    assert not wrong, f"{len(wrong)} differ: {wrong[:12]}"


@contextlib.contextmanager
def alone():
    """A group of this process alone."""
    store = new_store()
    os.environ.update(torchrun_environment(0, 1, store.port), TEST_DEVICE=DEVICE)
    bagua.init_process_group(timeout=datetime.timedelta(seconds=60))
    try:
        yield
    finally:
        bagua.destroy_process_group()


def train_alone(name):
    """Four steps of one rank: hooks, buckets, streams and the end."""
    with alone():
        model, optimizer = wrapped(name, training.network())
        for step in range(4):
            training.train(model, optimizer, [training.batch(step, 0)])
        synchronize()
        assert all(p.isfinite().all() for p in model.parameters())


def smoke():
    attempt("a tensor", lambda: torch.zeros(1, device=DEVICE).add_(1).item())
    attempt("codecs", match_codecs)
    for name in few(list(ALGORITHMS)):
        attempt(f"alone: {name}", train_alone, name)


# ---- two: NCCL between processes that share the GPU and claim to be hosts of their own ----


def on_hosts(n, function, *args, of_rank=({},) * 4, seconds=90):
    """The function's results on n ranks, over NCCL; over gloo in a dry run."""
    hosts = [{}] * n if DRY else hosts_that_share_a_gpu(n)
    env = [host | more for host, more in zip(hosts, of_rank, strict=False)]
    with Pool() as pool:  # processes of its own: CUDA and NCCL read their variables once
        return pool(n, function, *args, env=env, timeout=seconds)


def train_two(name, env):
    ours = on_hosts(2, test_algorithms.train, name, of_rank=[env] * 2)
    with Pool() as pool:
        theirs = pool(2, test_algorithms.train, name, env=env)
    pairs = zip(ours, theirs, strict=True)
    difference = max(float((a[1] - b[1]).abs().max()) for a, b in pairs)
    assert difference <= test_algorithms.TOLERANCE.get(name, test_algorithms.COARSE), difference
    return f"largest difference from the CPU's weights: {difference:.2e}"


def train_nodes(hierarchical):
    nodes = environment_of_nodes((2, 2))
    between = test_several_gpus.between_nodes
    found = on_hosts(4, between, "bytegrad", hierarchical, of_rank=nodes, seconds=120)
    test_several_gpus.assert_near_ddp(found, test_several_gpus.ALGORITHMS["bytegrad"])


def two():
    if not attempt("two ranks conform", on_hosts, 2, test_communicators.conform, DEVICE):
        print("NCCL takes no two ranks on one GPU here: the rest of this step is left out")
        return
    first = ("gradient_allreduce", "bytegrad", "qadam", "power_sgd", "sparse")
    for name in few(first):
        attempt(f"two ranks: {name}", train_two, name, test_algorithms.ONE_BUCKET)
    for hierarchical in few([True, "sharded"]):
        attempt(f"two nodes of two ranks: {hierarchical}", train_nodes, hierarchical)
    attempt("two ranks: async", on_hosts, 2, test_algorithms.average_asynchronously)
    for name in few(first[:2]):
        attempt(f"two ranks, two lanes: {name}", train_two, name, test_algorithms.TWO_LANES)
    for name in [] if DRY else [n for n in SYNCHRONOUS if n not in first]:
        attempt(f"two ranks: {name}", train_two, name, test_algorithms.ONE_BUCKET)


# ---- steps: what a step of two ranks costs that share the GPU, and a trace ----


WIDTH = 64 if DRY else 2048
STEPS = 2 if DRY else 20


def large_model(layers):
    pairs = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(layers)]
    return torch.nn.Sequential(*(each for pair in pairs for each in pair)).to(DEVICE)


def time_steps(model, optimizer, steps=STEPS, warm_up=5):
    """Median milliseconds of a step until all is enqueued, and until it is done."""
    x = torch.randn(256, WIDTH, device=DEVICE)
    issued, done = [], []
    for _ in range(steps + warm_up):
        synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        issued.append(1e3 * (time.perf_counter() - begin))
        synchronize()
        done.append(1e3 * (time.perf_counter() - begin))
    return {"host_ms": statistics.median(issued[warm_up:]), "ms": statistics.median(done[warm_up:])}


@training.with_group
def times_of_a_rank(name):
    """A step without communication, under torch's DDP, or under an algorithm."""
    training.device()
    model = large_model(24)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if name == "ddp":
        group = dist.new_group(backend="gloo" if DRY else "nccl")
        return time_steps(DistributedDataParallel(model, process_group=group), optimizer)
    if name != "plain":
        model.with_bagua([optimizer], made(name))
    return time_steps(model, optimizer)


def time_two(name):
    import programs_on_gpu  # under a name that ranks can import

    return on_hosts(2, programs_on_gpu.times_of_a_rank, name)


@training.with_group
def trace(name, folder):
    """Times of a step of this rank; rank 0 writes a trace."""
    training.device()
    model = large_model(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.with_bagua([optimizer], made(name))
    times = time_steps(model, optimizer)
    with torch.profiler.profile() as profile:
        time_steps(model, optimizer, steps=3, warm_up=0)
    if dist.get_rank() == 0:
        profile.export_chrome_trace(f"{folder}/{name}.json")
    return times


def trace_two(name):
    import programs_on_gpu  # under a name that ranks can import

    with tempfile.TemporaryDirectory() as folder:
        times = on_hosts(2, programs_on_gpu.trace, name, folder)
        written = Path(folder, f"{name}.json").read_bytes()
    (OUT / "trace.json.gz").write_bytes(gzip.compress(written))
    return times


def steps():
    for name in few(("plain", "ddp", "gradient_allreduce", "bytegrad", "power_sgd", "sparse")):
        attempt(f"a step of two ranks: {name}", time_two, name)
    attempt("a trace of two ranks: bytegrad", trace_two, "bytegrad")


# ---- kernels: each main kernel a few times, for ncu ----


def run_codecs(numel):
    for dtype in (torch.float32, torch.bfloat16):
        for name in _C.codec_names():
            codec = _C.make_codec(name, DEVICE)
            x = torch.randn(numel, device=DEVICE).to(dtype)
            payload = codec.encode(x)
            codec.decode_into(payload, 1, x)
            codec.decode_add(payload, dtype, torch.zeros(numel, device=DEVICE), 0.5)


def run_reduces(numel):
    for name in ("block_uint8", "int4_block", "minmax_uint8"):

        def reduce(comm, codec=name):
            ours = _C.make_codec(codec, DEVICE)
            op = _C.CompressedAllReduce(comm, ours, _C.Scratch(), _C.ReduceOp.AVG)
            op.run(torch.randn(numel, device=DEVICE))

        run_thread_ranks(8, reduce, timeout=60.0)


def run_scatters(numel):
    """Sums without a codec behind them, of payloads and of plain elements."""

    def reduce(comm):
        codec = _C.make_codec("block_uint8", DEVICE)
        scatter = _C.CompressedReduceScatter(comm, codec, _C.Scratch(), divisor=2.0)
        scatter.run(torch.randn(numel, device=DEVICE))
        mean, shares = _C.ReduceOp.AVG, [None, None]
        shares[comm.rank] = _C.AllReduce(comm, mean)
        sharded = _C.ShardedHierarchical(comm, shares, _C.Scratch(), 4, 2, mean, DEVICE)
        sharded.run(torch.randn(numel, device=DEVICE))

    run_thread_ranks(2, reduce, timeout=60.0)


def run_sparse(numel):
    def reduce(comm):
        for k in (numel // 100, numel // 10):  # packed indices, and a bitmap
            op = make(comm, "top-k", numel, k, memory_of(numel, torch.float32, device=DEVICE))
            op.run(torch.randn(numel, device=DEVICE), step=1)

    run_thread_ranks(2, reduce, timeout=60.0)


def run_low_rank(rows):
    matrices = [(i * rows * 1024, rows, 1024, 4) for i in range(6)]
    long = 7 * rows
    matrices.append((6 * rows * 1024, long, 256, 4))
    numel = 6 * rows * 1024 + long * 256

    def reduce(comm):
        rank = Rank(comm, numel=numel, matrices=matrices, device=DEVICE)
        rank.run(torch.randn(numel, device=DEVICE), 1)

    run_thread_ranks(2, reduce, timeout=60.0)


def run_kernels(numel, rows):
    attempt("codecs", run_codecs, numel)
    attempt("all-reduces", run_reduces, numel)
    attempt("scatters", run_scatters, numel)
    attempt("sparse", run_sparse, numel)
    attempt("low rank", run_low_rank, rows)
    synchronize()


def kernels():
    run_kernels(*((2**12, 32) if DRY else (2**25, 4096)))


# ---- small: likewise, of three tiles and a part, for racecheck ----


def small():
    run_kernels(3 * 2048 + 80, 32)


def main():
    program = sys.argv[1]
    programs = (smoke, two, steps, kernels, small)
    {each.__name__: each for each in programs}[program]()
    failed = [row["what"] for row in results if not row["passed"]]
    file = OUT / "results.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | {program: results}, indent=1, default=str))
    print(f"{len(results) - len(failed)} of {len(results)} passed; failed: {failed or 'none'}")
    sys.stdout.flush()
    os._exit(bool(failed))  # what hangs at exit is not this program's subject


if __name__ == "__main__":
    main()
