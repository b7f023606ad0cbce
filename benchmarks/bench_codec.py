"""Speed of the codecs: GB/s, and speed relative to a memcpy of the same bytes.

    python benchmarks/bench_codec.py [--device cpu] [--mib 64] [--repeats 41] [--json]
    python benchmarks/bench_codec.py --device cuda [--mib 32 128] [--repeats 41] [--json]

On CUDA: see codec_on_cuda.py. On CPU: one thread, preallocated buffers, one chunk; all candidates
take turns within one process. GB/s and ratios count the bytes of the uncompressed tensor. Plain
torch and FBGEMM (the row-wise quantiser that torch ships, rows of 2048) allocate their results:
they have no other form. Every codec is checked against its error bound before it is timed. With
--json the results are printed as JSON instead of a table; both keep them under
build/benchmarks/. Exits with 1 if a target is missed.
"""

import argparse
import ctypes
import json
import sys

import codec_on_cuda
import torch
from bagua import _C
from common import machine, timed_in_turns, write_results

BLOCK_NUMEL = 2048
# What must be reached: speed over that of the second name in the same run.
TARGETS = {
    ("minmax_uint8 encode", "memcpy"): 0.75,
    ("block_uint8 encode", "memcpy"): 1.4,
    ("minmax_uint8 decode", "memcpy"): 1.4,
    ("block_uint8 decode", "memcpy"): 1.4,
    ("minmax_uint8 decode_add", "memcpy"): 1.35,
    ("block_uint8 decode_add", "memcpy"): 1.35,
    ("int4_block encode", "memcpy"): 0.9,
    ("int4_block decode", "memcpy"): 1.2,
    ("int4_block decode_add", "memcpy"): 1.3,
    ("int4_block encode_residual", "memcpy"): 0.55,
    ("bit2_block encode", "memcpy"): 0.75,
    ("block_uint8 encode", "FBGEMM rows encode"): 0.9,
    ("block_uint8 encode", "plain torch encode"): 6.0,
}
# Least bits per element -> bound of the relative error of normal numbers.
RELATIVE_ERRORS = {16: 0.004, 8: 0.02, 4: 0.2, 2: 0.35}


def plain_torch_encode(x, codes):
    """block_uint8's steps as one would write them with torch's operators."""
    rows = x.view(-1, BLOCK_NUMEL)
    low, high = rows.aminmax(dim=1, keepdim=True)
    scale = 255 / (high - low + 1e-7)
    lower = (high * scale).round() - 255
    codes.copy_(((rows * scale).round() - lower).clamp_(0, 255).view(-1))
    return scale, lower


def check(codec, x):
    """A benchmark of wrong results is worth nothing."""
    decoded = codec.decode(codec.encode(x), 1, x.dtype, x.numel())
    error = (decoded - x).norm() / x.norm()
    bits = codec.payload_bytes(x.dtype, x.numel()) * 8 // x.numel()
    bound = next(bound for least, bound in RELATIVE_ERRORS.items() if bits >= least)
    if not error <= bound:
        raise RuntimeError(f"{codec.name} is off by {error}, more than {bound}")


def codec_candidates(x, out, total):
    candidates = {}
    for name in _C.codec_names():
        codec = _C.make_codec(name)
        check(codec, x)
        payload = codec.encode(x)
        residual = x.clone()
        candidates |= {
            f"{name} encode": lambda c=codec, p=payload: c.encode_into(x, 1, p),
            f"{name} encode_residual": lambda c=codec, p=payload, r=residual: c.encode_residual(
                r, 1, p
            ),
            f"{name} decode": lambda c=codec, p=payload: c.decode_into(p, 1, out),
            f"{name} decode_add": lambda c=codec, p=payload: c.decode_add(p, x.dtype, total, 0.5),
        }
    return candidates


def peer_candidates(x, out):
    rows = x.view(-1, BLOCK_NUMEL)
    codes = torch.empty(x.numel(), dtype=torch.uint8)
    half = x.bfloat16()
    scale, lower = plain_torch_encode(x, codes)
    prepack = torch.ops.quantized.embedding_bag_byte_prepack
    unpack = torch.ops.quantized.embedding_bag_byte_unpack
    packed = prepack(rows)

    def plain_torch_decode():
        torch.div(codes.view(rows.shape) + lower, scale, out=out.view(rows.shape))

    return {
        "plain torch encode": lambda: plain_torch_encode(x, codes),
        "plain torch decode": plain_torch_decode,
        "FBGEMM rows encode": lambda: prepack(rows),
        "FBGEMM rows decode": lambda: unpack(packed),
        "torch bf16 copy": lambda: half.copy_(x),
    }


def measure(mib, repeats):
    torch.manual_seed(0)
    x = torch.randn(mib * 2**18)
    out, total = torch.empty_like(x), torch.zeros_like(x)
    size = x.numel() * x.element_size()
    candidates = {"memcpy": lambda: ctypes.memmove(out.data_ptr(), x.data_ptr(), size)}
    candidates |= codec_candidates(x, out, total) | peer_candidates(x, out)
    seconds = timed_in_turns(candidates, repeats, warmup=2)
    memcpy = seconds["memcpy"]
    return {
        name: {
            "median_s": each["median"],
            "min_s": each["min"],
            "gb_per_s": size / each["median"] / 1e9,
            "x_memcpy": memcpy["median"] / each["median"],
            "x_memcpy_of_minima": memcpy["min"] / each["min"],
        }
        for name, each in seconds.items()
    }


def compare(rows):
    return [
        {
            "what": name,
            "over": other,
            "target": target,
            "reached": rows[other]["median_s"] / rows[name]["median_s"],
        }
        for (name, other), target in TARGETS.items()
    ]


def show(results):
    print(f"{results['machine']['processor']}, {results['mib']} MiB of float32, one thread")
    print(f"{'':26}{'median ms':>10}{'min ms':>9}{'GB/s':>8}{'x memcpy':>10}")
    for name, row in results["rows"].items():
        print(
            f"{name:26}{row['median_s'] * 1e3:10.2f}{row['min_s'] * 1e3:9.2f}"
            f"{row['gb_per_s']:8.1f}{row['x_memcpy']:10.2f}"
        )
    for each in results["targets"]:
        verdict = "ok" if each["reached"] >= each["target"] else "MISSED"
        ratio = f"{each['reached']:.2f} x {each['over']}"
        print(f"{each['what']:26}{ratio:>28}, target {each['target']:.2f}: {verdict}")


def run_on_cpu(mib, repeats):
    torch.set_num_threads(1)
    rows = measure(mib, repeats)
    return {
        "machine": machine(),
        "device": "cpu",
        "mib": mib,
        "repeats": repeats,
        "rows": rows,
        "targets": compare(rows),
    }


def run_on_cuda(sizes, repeats):
    if not torch.cuda.is_available():
        sys.exit(f"bench_codec --device cuda: no CUDA device (torch {torch.__version__})")
    if not _C.has_cuda_codecs():
        sys.exit("bench_codec --device cuda: bagua was built without CUDA kernels: docs/cuda.md")
    rows, missing = codec_on_cuda.measure(sizes, repeats)
    return {
        "machine": machine(),
        "device": "cuda",
        "gpu": codec_on_cuda.hardware(),
        "repeats": repeats,
        "rows": rows,
        "missing": missing,
        "targets": codec_on_cuda.targets(rows),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mib", type=int, nargs="+", help="sizes of the float32 tensor; CPU: one")
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()

    if arguments.device == "cuda":
        results = run_on_cuda(arguments.mib or codec_on_cuda.SIZES_MIB, arguments.repeats)
        write_results("bench_codec_cuda", results)
        missed = [each for each in results["targets"] if not each["reached"]]
        show_table = codec_on_cuda.show
    else:
        mib, *more = arguments.mib or [64]
        if more:
            parser.error("--mib takes one size on CPU")
        results = run_on_cpu(mib, arguments.repeats)
        write_results("bench_codec", results)
        missed = [each for each in results["targets"] if each["reached"] < each["target"]]
        show_table = show
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show_table(results)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
