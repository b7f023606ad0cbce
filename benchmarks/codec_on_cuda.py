"""Speed of the codecs on a GPU relative to its memory, for bench_codec --device cuda.

The roofline of a call that reads r bytes and writes w is a device-to-device copy of (r + w) / 2
bytes, which moves as many, in the same run. Calls go round over sets of buffers that together are
several times the second-level cache, so that nothing is found there from before; they are captured
into one CUDA graph, so that what Python and the driver take is not counted. What cannot be captured
is launched call by call, and marked.

Whole ops are rounds of a CompressedAllReduce among ranks that are threads and share the GPU, with
the host's part: their roofline is the copy of what their kernels and messages move.
"""

import statistics
import subprocess
import threading
import time

import torch
from bagua import _C

MIB = 2**20
SIZES_MIB = [1, 8, 32, 128]
TARGET, TARGET_FROM_MIB = 0.85, 32
TARGET_STEPS = ("encode", "decode")
# Encoders that read their input twice: for the range of a chunk, then for its codes.
READ_TWICE = ("minmax_uint8",)
OP_RANKS = 4
OP_CODECS = ("block_uint8", "int4_block", "bf16")
BYTES_IN_TURN = 512 * MIB
BLOCK_NUMEL = 2048


class Candidate:
    """Something to measure. make(x) gives the call on buffers of its own, and the bytes it moves.

    make: x, f32 on the device -> (function without arguments, bytes read + written).
    """

    def __init__(self, name, make):
        self.name = name
        self.make = make


def size_of(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def codec_candidates(device_type, dtype=torch.float32):
    found = []
    for name in _C.codec_names():
        codec = _C.make_codec(name, device_type)

        def encode(x, codec=codec):
            x = x.to(dtype)
            payload = codec.encode(x)
            moved = size_of(x, payload) + (size_of(x) if codec.name in READ_TWICE else 0)
            return lambda: codec.encode_into(x, 1, payload), moved

        def decode(x, codec=codec):
            out = x.to(dtype)
            payload = codec.encode(out)
            return lambda: codec.decode_into(payload, 1, out), size_of(payload, out)

        def decode_add(x, codec=codec):
            payload, total = codec.encode(x.to(dtype)), torch.zeros_like(x)
            moved = size_of(payload, total, total)
            return lambda: codec.decode_add(payload, dtype, total, 0.5), moved

        for step in (encode, decode, decode_add):
            of = "" if dtype == torch.float32 else " of bf16"
            found.append(Candidate(f"{name} {step.__name__}{of}", step))
    return found


def moved_by_all_reduce(codec, numel, ranks):
    """Bytes of memory that a rank's round moves: the other parts are encoded and decoded, the own
    one is summed, encoded and decoded in one kernel, and every message is read and written."""
    part = -(-numel // ranks)
    payload = codec.payload_bytes(torch.float32, part)
    others = ranks - 1
    own = others * payload + 4 * part + payload + 4 * part
    return others * 2 * (4 * part + payload) + own + 2 * others * 2 * payload


def all_reduce_seconds(name, mib, repeats, device_type):
    """Median seconds of a round of all ranks, which are threads, from the host's first call until
    the device is done."""
    hub, meet = _C.ThreadHub(OP_RANKS, 60.0), threading.Barrier(OP_RANKS)
    seconds, failures = [], []

    def run(rank):
        try:
            codec = _C.make_codec(name, device_type)
            comm = _C.ThreadCommunicator(hub, rank)
            op = _C.CompressedAllReduce(comm, codec, _C.Scratch(), _C.ReduceOp.AVG)
            flat = torch.randn(mib * MIB // 4, device=device_type)
            for turn in range(repeats + 3):
                meet.wait()
                begin = time.perf_counter()
                op.run(flat)
                if device_type == "cuda":
                    torch.cuda.synchronize()
                meet.wait()
                if rank == 0 and turn >= 3:
                    seconds.append(time.perf_counter() - begin)
        except Exception as error:  # noqa: BLE001 - raised below, and nobody waits for this rank
            failures.append(error)
            meet.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(OP_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return statistics.median(seconds)


def measure_op(name, mib, repeats, device_type, bytes_in_turn):
    """One row: a whole CompressedAllReduce."""
    seconds = all_reduce_seconds(name, mib, repeats, device_type)
    codec = _C.make_codec(name, device_type)
    moved = OP_RANKS * moved_by_all_reduce(codec, mib * MIB // 4, OP_RANKS)
    what = f"all-reduce {name}"
    return row_of(what, mib, moved, (seconds, False), repeats, device_type, bytes_in_turn)


def cast_candidates():
    found = []
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):

        def narrow(x, dtype=dtype):
            half = x.to(dtype)
            return lambda: half.copy_(x), size_of(x, half)

        def widen(x, dtype=dtype):
            half, out = x.to(dtype), torch.empty_like(x)
            return lambda: out.copy_(half), size_of(half, out)

        found += [Candidate(f"torch {name} cast", narrow), Candidate(f"torch {name} back", widen)]
    return found


def bitsandbytes_candidates():
    from bitsandbytes import functional

    def encode(x):
        codes, state = functional.quantize_blockwise(x, blocksize=BLOCK_NUMEL)
        moved = size_of(x, codes, state.absmax)
        return lambda: functional.quantize_blockwise(x, blocksize=BLOCK_NUMEL), moved

    def decode(x):
        codes, state = functional.quantize_blockwise(x, blocksize=BLOCK_NUMEL)
        out = torch.empty_like(x)
        moved = size_of(codes, state.absmax, out)
        return lambda: functional.dequantize_blockwise(codes, state, out=out), moved

    return [Candidate("bitsandbytes encode", encode), Candidate("bitsandbytes decode", decode)]


def torchao_candidates():
    from torchao.quantization import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    block = (1, BLOCK_NUMEL)

    def quantise(rows):
        scale, zero = choose_qparams_affine(rows, MappingType.ASYMMETRIC, block, torch.uint8)
        return quantize_affine(rows, block, scale, zero, torch.uint8), scale, zero

    def encode(x):
        rows = x.view(-1, BLOCK_NUMEL)
        return lambda: quantise(rows), size_of(x, *quantise(rows))

    def decode(x):
        codes, scale, zero = quantise(x.view(-1, BLOCK_NUMEL))
        moved = size_of(codes, scale, zero, x)
        return lambda: dequantize_affine(codes, block, scale, zero, torch.uint8), moved

    return [Candidate("torchao encode", encode), Candidate("torchao decode", decode)]


def peers():
    """Candidates of libraries that are installed, and a word about each that is not."""
    found, missing = [], {}
    for name, make in (("bitsandbytes", bitsandbytes_candidates), ("torchao", torchao_candidates)):
        try:
            found += make()
        except ImportError:
            missing[name] = "not installed"
    return found, missing


def check(device_type):
    """A benchmark of wrong results is worth nothing."""
    x = torch.randn(MIB // 4 + 3, generator=torch.Generator().manual_seed(0))
    for name in _C.codec_names():
        payload = _C.make_codec(name, device_type).encode(x.to(device_type))
        if not torch.equal(payload.cpu(), _C.make_codec(name).encode(x)):
            raise RuntimeError(f"{name} does not write on {device_type} what it writes on cpu")


def device_seconds(calls, repeats):
    """Median seconds of one of `calls`, run one after the other, and whether as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        run, captured = graph.replay, True
    except RuntimeError:  # the library allocates or synchronises in a way that graphs refuse
        torch.cuda.synchronize()
        run, captured = (lambda: [call() for call in calls]), False
    seconds = []
    for turn in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if turn >= 3:
            seconds.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(seconds), captured


def copy_calls(moved, sets, device_type):
    pairs = [torch.empty(2, moved // 2, dtype=torch.uint8, device=device_type) for _ in range(sets)]
    return [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]


def measure_one(candidate, mib, repeats, device_type, bytes_in_turn):
    """One row: speed, and share of the roofline; or what went wrong in somebody else's code."""
    numel = mib * MIB // 4
    sets = max(2, bytes_in_turn // (mib * MIB))
    generator = torch.Generator(device_type).manual_seed(0)
    made = [
        candidate.make(torch.randn(numel, generator=generator, device=device_type))
        for _ in range(sets)
    ]
    moved = made[0][1]
    timing = device_seconds([call for call, _ in made], repeats)
    del made
    return row_of(candidate.name, mib, moved, timing, repeats, device_type, bytes_in_turn)


def row_of(what, mib, moved, timing, repeats, device_type, bytes_in_turn):
    """The row of `what`, which has moved so many bytes, beside a copy of as many.

    timing: (seconds, whether as one graph).
    """
    seconds, captured = timing
    sets = max(2, bytes_in_turn // moved)
    copy_seconds, _ = device_seconds(copy_calls(moved, sets, device_type), repeats)
    return {
        "what": what,
        "mib": mib,
        "median_s": seconds,
        "moved_bytes": moved,
        "gb_per_s": moved / seconds / 1e9,
        "copy_gb_per_s": moved / copy_seconds / 1e9,
        "share": copy_seconds / seconds,
        "graph": captured,
    }


def measure(sizes, repeats, device_type="cuda", bytes_in_turn=BYTES_IN_TURN):
    """All rows, and a word about each library that could not be measured."""
    check(device_type)
    others, missing = peers()
    own = [
        *codec_candidates(device_type),
        *codec_candidates(device_type, torch.bfloat16),
        *cast_candidates(),
    ]
    how = (repeats, device_type, bytes_in_turn)
    rows = [measure_one(c, mib, *how) for mib in sizes for c in own]
    rows += [measure_op(name, mib, *how) for mib in sizes for name in OP_CODECS]
    for candidate in others:
        try:
            rows += [measure_one(candidate, m, repeats, device_type, bytes_in_turn) for m in sizes]
        except Exception as error:  # noqa: BLE001 - somebody else's code: reported
            missing[candidate.name] = f"failed: {type(error).__name__}: {error}"
    return rows, missing


def targets(rows):
    """The rows that must reach the target, each with whether it does."""
    return [
        {**row, "target": TARGET, "reached": row["share"] >= TARGET}
        for row in rows
        if row["mib"] >= TARGET_FROM_MIB
        and row["what"] in {f"{n} {step}" for n in _C.codec_names() for step in TARGET_STEPS}
    ]


def hardware():
    """Identity of a result on a GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        said = []
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": said[0] if said else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def show(results):
    gpu = results["gpu"]
    print(f"{gpu['gpu']}, driver {gpu['driver']}, torch {gpu['torch']}, CUDA {gpu['cuda']}")
    print(f"{'':26}{'MiB':>5}{'median us':>11}{'GB/s':>8}{'copy GB/s':>11}{'share':>7}")
    for row in results["rows"]:
        mark = "" if row["graph"] else "  (call by call)"
        print(
            f"{row['what']:26}{row['mib']:5}{row['median_s'] * 1e6:11.1f}{row['gb_per_s']:8.0f}"
            f"{row['copy_gb_per_s']:11.0f}{row['share']:7.2f}{mark}"
        )
    for name, why in results["missing"].items():
        print(f"{name}: {why}")
    for row in results["targets"]:
        verdict = "ok" if row["reached"] else "MISSED"
        print(
            f"{row['what']:26}{row['mib']:5} MiB: {row['share']:.2f} of the roofline, "
            f"target {row['target']:.2f}: {verdict}"
        )
