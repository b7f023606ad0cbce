"""Helpers for tests of ops: ranks, sizes, inputs, and one run on thread ranks."""

import torch
from bagua import _C
from oracle import codec as oracle
from support.cases import looped, over
from support.threads.thread_ranks import run_thread_ranks

RANKS = [1, 2, 3, 4, 7]
SIZES = [1, 31, 1000, 4096, 14337]
MORE_THAN_A_PIECE = 131072 + 2048 + 5  # of one rank's part
CODECS = _C.codec_names()
DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
}
COMPLEX = [torch.complex64, torch.complex128]
OPS = {"sum": _C.ReduceOp.SUM, "mean": _C.ReduceOp.AVG}

per_ranks = over(n=RANKS)
per_codec = over(codec=CODECS)
per_dtype = over(dtype=DTYPES.values())


def per_ranks_and_dtype(ranks, dtypes=DTYPES):
    """Every number of ranks with float32, and every other dtype on 3 ranks.

    An op cuts its parts by rank and converts their elements by dtype: one does not see the other.
    """
    cases = [(n, dtypes["f32"]) for n in ranks]
    cases += [(3, dtype) for name, dtype in dtypes.items() if name != "f32"]
    return lambda test: looped(test, ("n", "dtype"), lambda fixtures: cases)


per_op = over(op=OPS)


def inputs(n, numel, dtype, salt=0):
    """One tensor per rank, of scales that differ along it as layers' gradients do."""
    if dtype.is_complex:
        parts = inputs(n, 2 * numel, dtype.to_real(), salt)
        return [torch.view_as_complex(part.view(-1, 2)) for part in parts]
    generator = torch.Generator().manual_seed(1000 * n + numel + salt)
    scales = 10.0 ** torch.linspace(-3, 1, max(1, numel))
    return [(torch.randn(numel, generator=generator) * scales[:numel]).to(dtype) for _ in range(n)]


def assert_reduced(result, brought, op):
    """`result` is the exact sum or mean, up to the rounding of its dtype."""
    dtype = result.dtype
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-5)
    if dtype in (torch.float64, torch.complex128):
        tolerance = 1e-12
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stack = torch.stack(brought).to(wide)
    divisor = len(brought) if op == "mean" else 1
    error = (result.to(wide) - stack.sum(0) / divisor).abs()
    assert (error <= tolerance * stack.abs().sum(0) / divisor).all()


def step_of(codec):
    """Twice the largest error of a round trip of values of magnitude 1."""
    return 2 * oracle.CODECS[codec].error


def compressed(comm, codec, op):
    return _C.CompressedAllReduce(comm, _C.make_codec(codec), _C.Scratch(), OPS[op])


def make_op(comm, kind, op="mean"):
    return _C.AllReduce(comm, OPS[op]) if kind == "exact" else compressed(comm, kind, op)


def run_op(n, make, brought):
    """The ranks' buckets after one run of `make(communicator)` on copies of `brought`."""

    def run(comm):
        flat = brought[comm.rank].clone()
        make(comm).run(flat)
        return flat

    return run_thread_ranks(n, run)


def run_rounds(n, make, brought, scale=1.0):
    """By rank, after each round: the bucket and tensors that the op remembers.

    make: for a communicator, the op, its memory and which tensors of it. brought: by round.
    """

    def run(comm):
        op, memory, remembered = make(comm)
        seen = []
        for step, values in enumerate(brought, start=1):
            flat = values[comm.rank].clone()
            op.run(flat, step=step, grad_scale=scale)
            seen.append((flat, *(memory.value(i).clone() for i in remembered)))
        return seen

    return run_thread_ranks(n, run)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(results):
    for rank, result in enumerate(results):
        assert torch.equal(bits(result), bits(results[0])), f"rank {rank} differs from rank 0"


BAD_VALUES = {"nan": float("nan"), "plus-inf": float("inf"), "minus-inf": -float("inf")}
BAD_NUMEL = 3 * 5000  # three parts of two whole blocks and a shorter one
BAD_PLACES = {
    "first": 0,
    "end-of-block": 2047,
    "start-of-block": 2048,
    "start-of-last-partial-block": 4096,
    "end-of-part": 4999,
    "start-of-part": 5000,
    "in-the-last-partial-block": 14500,
    "last": BAD_NUMEL - 1,
}
