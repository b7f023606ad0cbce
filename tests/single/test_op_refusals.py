"""Arguments and buckets that ops refuse, by name and with the values."""

import math

import pytest
import torch
from bagua import _C
from single.test_all_reduce_rows import ROWS, WIDTH, gradient
from single.test_compressed_gossip import THIRD
from single.test_sharded_ops import gathering, memory, scattering
from single.test_two_residuals import memory_of as memory_of_parts, op_of as with_residuals
from support.threads.low_rank_ranks import NUMEL, Rank
from support.threads.op_ranks import OPS, compressed
from support.threads.sparse_ranks import make as make_sparse, memory_of

SCRATCH = _C.Scratch()
CODEC = _C.make_codec("fp16")
F32, F64 = torch.float32, torch.float64


def first_of(ranks):
    return _C.ThreadCommunicator(_C.ThreadHub(ranks, 1.0), 0)


def zeros(numel, dtype=F32):
    return torch.zeros(numel, dtype=dtype)


def exact():
    return _C.AllReduce(first_of(1), OPS["mean"])


def gossip(*replicas, mixing=THIRD):
    return _C.CompressedGossip(first_of(1), CODEC, SCRATCH, *replicas, *mixing)


def neighbours(own, others):
    return _C.NeighborAverage(first_of(3), own, others, SCRATCH)


def sharded(ranks, ops):
    return _C.ShardedHierarchical(first_of(ranks), ops, SCRATCH, 2, 2, OPS["mean"])


def low_rank(*matrices):
    return Rank(first_of(1), numel=100, matrices=matrices)


def top_k(k, kept=None):
    return make_sparse(first_of(1), "top-k", 5, k, kept or memory_of(5, F32))


def rows(given=None, shape=(ROWS, WIDTH), op=OPS["mean"]):
    holder = _C.SparseGradient()
    holder.local = given
    return _C.AllReduceRows(first_of(1), SCRATCH, holder, list(shape), op)


def momentum(*memories, offsets=(0,), strides=((1,),), betas=None):
    betas = torch.full((len(memories),), 0.9, dtype=F64) if betas is None else betas
    return _C.UpdateMomentum(list(memories), list(offsets), [*map(list, strides)], betas, SCRATCH)


def two_residuals(numel, ranks=1):
    return with_residuals(first_of(ranks), "int4_block", memory_of_parts(numel, 0, ranks))


def memory_in(dtype):
    return _C.RoundMemory([zeros(8, dtype), zeros(1, torch.int64)], _C.RoundOutcome())


REPLICAS = r"replicas must be contiguous float32 .* equal length"
SUM_OR_MEAN = r"takes ReduceOp.SUM or ReduceOp.AVG"
MIXING = r"mixing weights .* must be above 0 and leave"
OWN_WEIGHT = r"'the bucket': peer_weight .* separate memory"
COMMUNICATIONS = "communications must be one int64"
OWN_MOMENTUM = r"'the bucket': the momentum of its slot 0 .* separate memory"
DIVISOR = "the divisor must be a positive number"
ONE = zeros(3)

#: (a call that makes an op, what it says)
MADE = [
    (lambda: _C.AllReduce(first_of(2), _C.ReduceOp.MAX), SUM_OR_MEAN),
    (lambda: _C.CompressedAllReduce(first_of(2), CODEC, SCRATCH, _C.ReduceOp.MIN), SUM_OR_MEAN),
    (lambda: rows(op=_C.ReduceOp.MAX), "takes ReduceOp"),
    (lambda: rows(shape=()), "at least one dimension"),
    (lambda: with_residuals(first_of(1), "fp16", memory_in(F32)), "remembers three tensors"),
    (lambda: scattering(first_of(1), "fp16", memory=memory_in(F64)), "needs a float32 memory"),
    *[
        (lambda divisor=divisor: scattering(first_of(1), "fp16", divisor), DIVISOR)
        for divisor in (0.0, -1.0, math.nan, math.inf)
    ],
    (
        lambda: _C.Hierarchical(first_of(2), None, 4, 2, OPS["mean"]),
        "leader of a node needs the inner op",
    ),
    (lambda: sharded(1, []), "0 shares for a node of 1 ranks"),
    (lambda: sharded(1, [exact(), None]), r"share 1 is of rank 0 of 1 .* needs an inner op"),
    (lambda: sharded(2, [exact(), exact()]), r"share 1 is not of rank 0 of 2 .* takes no inner op"),
    (lambda: gossip(zeros(3), zeros(3), zeros(4)), REPLICAS),
    (lambda: gossip(*(zeros(3, torch.float16) for _ in range(3))), REPLICAS),
    (lambda: gossip(*(zeros(4).view(2, 2) for _ in range(3))), REPLICAS),
    (lambda: gossip(ONE, ONE, zeros(3)), "replicas must be separate memory"),
    (lambda: gossip(zeros(3), zeros(3), zeros(3), mixing=(0.0, 0.3)), MIXING),
    (lambda: gossip(zeros(3), zeros(3), zeros(3), mixing=(0.5, 0.5)), MIXING),
    (lambda: low_rank((0, 4, 4, 5)), "rank 5"),
    (lambda: low_rank((0, 4, 4, 0)), "rank 0"),
    (lambda: low_rank((0, 4, 4, 1), (8, 4, 4, 1)), "overlaps"),
    (lambda: low_rank((90, 4, 4, 1)), "overlaps"),
    (lambda: _C.AverageWeights(zeros(3), zeros(1), exact()), COMMUNICATIONS),
    (lambda: _C.Gossip(first_of(1), zeros(2, torch.int64), [1], SCRATCH), COMMUNICATIONS),
    (
        lambda: _C.AverageWeights(zeros(4).view(2, 2), torch.tensor(0), exact()),
        "one dimension",
    ),
    (
        lambda: _C.Gossip(first_of(1), torch.tensor(0), [1, 1], SCRATCH),
        "a weight above 0 for each of its 1 members",
    ),
    (lambda: _C.Gossip(first_of(1), torch.tensor(0), [0], SCRATCH), "a weight above 0"),
    (lambda: top_k(0), "k = 0 must be between 1 and the 5 elements"),
    (lambda: top_k(6), "k = 6 must be between 1 and the 5 elements"),
    (
        lambda: top_k(1, _C.RoundMemory([zeros(5)], _C.RoundOutcome())),
        "Sparse remembers two tensors",
    ),
    (
        lambda: make_sparse(first_of(1), "exact", 6, 1, memory_of(5, F32)),
        r"the error must have 6 elements .* not 5",
    ),
    (lambda: neighbours(0.5, [(3, 0.5)]), "neighbour 3 is outside a group of size 3"),
    (lambda: neighbours(0.5, [(-1, 0.5)]), "neighbour -1 is outside"),
    (lambda: neighbours(0.5, [(1, 0.25), (1, 0.25)]), "rank 1 comes twice"),
    (lambda: neighbours(0.5, [(0, 0.5)]), "rank 0 comes twice"),
    (lambda: neighbours(0.5, [(1, 0.4)]), r"weights must add up to 1, they make 0\.9"),
    (lambda: neighbours(0.5, [(2, math.nan)]), "the weight of rank 2 is nan"),
    (lambda: momentum(ONE, betas=torch.ones(1)), "betas must be 1 contiguous float64"),
    (
        lambda: momentum(ONE, ONE, offsets=(0, 3), strides=((1,), (1,)), betas=zeros(1, F64)),
        "betas must be 2 contiguous",
    ),
    (lambda: momentum(ONE, offsets=(0, 1)), "one memory, offset and strides per slot"),
    (lambda: momentum(offsets=(), strides=()), "at least one slot"),
    (lambda: momentum(torch.zeros(3, requires_grad=True)), "without autograd"),
]


@pytest.mark.parametrize(("make", "words"), MADE)
def test_arguments_that_make_no_op_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


PARTS = r"'the bucket': 10 elements .* into 3 equal parts"
NO_INTEGERS = r"takes float32.*not Int"
FIT_OF_SPARSE = r"bucket 'the bucket' .* does not fit the error"


def averaged(peer_weight):
    return _C.AverageWeights(peer_weight, torch.tensor(0), exact())


#: (a call that makes an op, the bucket, what it says)
RUN = [
    (lambda: scattering(first_of(3), "fp16"), zeros(10), PARTS),
    (lambda: gathering(first_of(3), "fp16"), zeros(10), PARTS),
    (
        lambda: scattering(first_of(1), "fp16", memory=memory(8, _C.RoundOutcome())),
        *(zeros(9), r"bucket 'the bucket' \(9 elements.*does not fit"),
    ),
    (
        lambda: scattering(first_of(1), "fp16", memory=memory(8, _C.RoundOutcome())),
        *(zeros(8, F64), "does not fit the error"),
    ),
    (
        lambda: two_residuals(100, ranks=2),
        *(zeros(101), r"bucket 'the bucket' \(101 elements .* \(100 and 50"),
    ),
    (
        lambda: gossip(zeros(3), zeros(3), zeros(3)),
        *(zeros(4), r"'the bucket': replicas \(3 elements\) .* bucket \(4 elem"),
    ),
    (lambda: gossip(ONE, zeros(3), zeros(3)), ONE, "'the bucket': replicas"),
    (
        lambda: gossip(zeros(3), zeros(3), zeros(3)),
        *(zeros(3, torch.int64), "'the bucket' holds Long; only floating weights"),
    ),
    (lambda: Rank(first_of(1)).op, zeros(NUMEL, F64), "bucket 'the bucket'"),
    (lambda: averaged(zeros(4)), zeros(3), OWN_WEIGHT),
    (lambda: averaged(zeros(3, torch.float16)), zeros(3), OWN_WEIGHT),
    (lambda: averaged(ONE), ONE, OWN_WEIGHT),
    (lambda: top_k(1), zeros(4), FIT_OF_SPARSE),
    (lambda: top_k(1), zeros(5, F64), FIT_OF_SPARSE),
    (lambda: top_k(1), zeros(5, torch.int32), FIT_OF_SPARSE),
    (
        lambda: neighbours(1.0, []),
        *(zeros(3, torch.int64), r"'the bucket': .* floating-point numbers, not int64"),
    ),
    (lambda: momentum(zeros(4)), zeros(3), OWN_MOMENTUM),
    (lambda: momentum(zeros(3, torch.float16)), zeros(3), OWN_MOMENTUM),
    (lambda: momentum(ONE), ONE, OWN_MOMENTUM),
]


@pytest.mark.parametrize(("make", "flat", "words"), RUN)
def test_buckets_that_do_not_fit_are_refused(make, flat, words):
    op = make()
    with pytest.raises(ValueError, match=words):
        op.run(flat, bucket="the bucket")


OF_ANOTHER_KIND = [
    (lambda: compressed(first_of(2), "fp16", "mean"), zeros(4, torch.int32), NO_INTEGERS),
    (lambda: scattering(first_of(2), "fp16"), zeros(4, torch.int32), NO_INTEGERS),
    (lambda: gathering(first_of(2), "fp16"), zeros(4, torch.int32), NO_INTEGERS),
    (lambda: rows(torch.ones(ROWS, WIDTH)), zeros(1), "is dense"),
    (lambda: rows(gradient([1], F64)), zeros(1), "Double"),
    (lambda: rows(gradient([1], shape=(ROWS + 1, WIDTH))), zeros(1), r"\[24, 5\]"),
    (lambda: rows(torch.eye(ROWS, WIDTH).to_sparse()), zeros(1), "2 sparse dimensions"),
]


@pytest.mark.parametrize(("make", "flat", "words"), OF_ANOTHER_KIND)
def test_tensors_of_another_kind_are_refused(make, flat, words):
    op = make()
    with pytest.raises(_C.BaguaError, match=words):
        op.run(flat, bucket="the bucket")
