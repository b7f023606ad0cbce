"""CompressedAllReduce with error feedback on thread ranks, against its oracle."""

import torch
from bagua import _C
from bagua._core.state.ledger import Page
from oracle.compressed_all_reduce import parts, with_residuals
from support.cases import over
from support.threads.op_ranks import (
    BAD_NUMEL,
    BAD_VALUES,
    MORE_THAN_A_PIECE,
    OPS,
    assert_same_bits,
    inputs,
    per_codec,
    per_ranks_and_dtype,
    run_rounds,
)

SIZES = [1, 31, 1000, 4099]
ROUNDS = 3

RANKS = [2, 3, 4]


def memory_of(numel, rank, ranks, dtype=torch.float32):
    flat = torch.empty(numel, dtype=dtype)
    return Page.of_parts(flat, [], _C.RoundOutcome(), range(ranks), rank).memory


def op_of(comm, codec, memory, op="mean", padding=0):
    return _C.CompressedAllReduce(
        comm, _C.make_codec(codec), _C.Scratch(), OPS[op], memory=memory, padding=padding
    )


def residual_rounds(n, codec, brought, scale=1.0, op="mean", padding=0):
    """By rank: every round's bucket, residual and residual of the part. brought: by round."""

    def make(comm):
        memory = memory_of(brought[0][0].numel(), comm.rank, n, dtype=brought[0][0].dtype)
        return op_of(comm, codec, memory, op, padding), memory, (0, 2)

    return run_rounds(n, make, brought, scale)


def assert_bits_of_the_oracle(n, codec, brought, scale=1.0, op="mean", padding=0):
    numel = brought[0][0].numel()
    results = residual_rounds(n, codec, brought, scale, op, padding)
    wide = torch.promote_types(brought[0][0].dtype, torch.float32)
    errors = [torch.zeros(numel, dtype=wide)] * n
    servers = [torch.zeros(size, dtype=wide) for _, size in parts(numel, n)]
    for number, values in enumerate(brought):
        expected, errors, servers = with_residuals(
            codec, values, errors, servers, scale, op == "mean", padding
        )
        assert_same_bits([result[number][0] for result in results])
        for rank in range(n):
            found, error, server = results[rank][number]
            assert torch.equal(found, expected), f"round {number + 1}, rank {rank}"
            assert torch.equal(error, errors[rank])
            assert torch.equal(server, servers[rank])


@per_codec
@per_ranks_and_dtype(RANKS)
def test_rounds_have_the_bits_of_the_oracle(n, codec, dtype):
    for numel in SIZES:
        brought = [inputs(n, numel, dtype, salt) for salt in range(ROUNDS)]
        assert_bits_of_the_oracle(n, codec, brought)


@per_codec
@over(dtype=[torch.float32, torch.float64, torch.float16])
def test_a_scale_a_sum_and_padding_have_the_bits_of_the_oracle(codec, dtype):
    brought = [[values * 64 for values in inputs(3, 1200, dtype, s)] for s in range(ROUNDS)]
    for values in (values for round_values in brought for values in round_values):
        values[-7:] = 0
    assert_bits_of_the_oracle(3, codec, brought, scale=64.0, op="sum", padding=7)


@over(codec=["int4_block", "bit2_block", "minmax_uint8"])
def test_parts_of_several_pieces_have_the_bits_of_the_oracle(codec):
    brought = [inputs(2, 2 * MORE_THAN_A_PIECE, torch.float32, salt) for salt in range(2)]
    assert_bits_of_the_oracle(2, codec, brought)


@over(bad=BAD_VALUES.values())
@per_codec
def test_a_round_that_is_not_finite_changes_no_residual(codec, bad):
    values = [inputs(3, BAD_NUMEL, torch.float32, salt) for salt in range(3)]
    values[1][2][7000] = bad
    results = residual_rounds(3, codec, values)
    for _, second, third in results:
        assert not second[0].isfinite().all()
        assert third[0].isfinite().all()
    errors = [first[1] for first, _, _ in results]
    servers = [first[2] for first, _, _ in results]
    expected, _, _ = with_residuals(codec, values[2], errors, servers)
    for first, second, third in results:
        assert torch.equal(second[1], first[1])
        assert torch.equal(second[2], first[2])
        assert torch.equal(third[0], expected)


def test_one_rank_pays_what_is_owed_and_then_owes_nothing():
    memory = memory_of(300, 0, 1)
    memory.set(0, torch.full((300,), 0.5))
    memory.set(2, torch.full((300,), 0.25))
    comm = _C.ThreadCommunicator(_C.ThreadHub(1), 0)
    flat = torch.ones(300)
    op_of(comm, "int4_block", memory).run(flat, grad_scale=2.0)
    assert torch.equal(flat, torch.full((300,), 2.5))
    assert not memory.value(0).any()
    assert not memory.value(2).any()
