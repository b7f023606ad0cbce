"""CompressedReduceScatter and CompressedAllGather on thread ranks, against their oracles."""

import pytest
import torch
from bagua import _C
from oracle.codec import payload_bytes
from oracle.sharded import all_gather, reduce_scatter
from single.test_checksums import BUCKET, NUMEL, every_bit, part_of_all_reduce
from support.cases import over
from support.threads.op_ranks import (
    BAD_VALUES,
    DTYPES,
    MORE_THAN_A_PIECE,
    assert_same_bits,
    bits,
    inputs,
    per_codec,
    per_ranks_and_dtype,
)
from support.threads.thread_ranks import run_thread_ranks

PARTS = [1, 31, 1000, 4099]  # elements
RANKS = [1, 2, 3, 4]
MORE_THAN_A_SEGMENT = 9 * 131072 + 5  # of one part
FRAME_BYTES = 32

per_ranks = over(n=RANKS)


def scattering(comm, codec, divisor=1.0, **options):
    return _C.CompressedReduceScatter(
        comm, _C.make_codec(codec), _C.Scratch(), divisor=divisor, **options
    )


def gathering(comm, codec, **options):
    return _C.CompressedAllGather(comm, _C.make_codec(codec), _C.Scratch(), **options)


def own_part(comm, flat):
    return flat.chunk(comm.size)[comm.rank] if flat.numel() else flat


def reduce_on_ranks(n, codec, brought, divisor=1.0):
    """Every rank's part of the result."""

    def run(comm):
        flat = brought[comm.rank].clone()
        scattering(comm, codec, divisor).run(flat)
        return own_part(comm, flat).clone()

    return run_thread_ranks(n, run)


def gather_on_ranks(n, codec, shares):
    """Every rank's bucket."""

    def run(comm):
        flat = torch.full((n * shares[0].numel(),), 7.0, dtype=shares[0].dtype)
        own_part(comm, flat).copy_(shares[comm.rank])
        gathering(comm, codec).run(flat)
        return flat

    return run_thread_ranks(n, run)


@per_codec
@per_ranks_and_dtype(RANKS)
def test_reduce_scatter_gives_the_bits_of_its_oracle(n, codec, dtype):
    for part, divisor in zip(PARTS, (float(n), 1.0, 0.25, float(n)), strict=True):
        brought = inputs(n, n * part, dtype)
        results = reduce_on_ranks(n, codec, brought, divisor)
        expected, _ = reduce_scatter(codec, brought, divisor)
        for rank in range(n):
            assert torch.equal(results[rank], expected[rank]), f"{part}, rank {rank}"


@per_codec
@per_ranks_and_dtype(RANKS)
def test_all_gather_gives_the_bits_of_its_oracle_on_every_rank(n, codec, dtype):
    for part in PARTS:
        shares = inputs(n, part, dtype)
        results = gather_on_ranks(n, codec, shares)
        assert_same_bits(results)
        assert torch.equal(results[0], all_gather(codec, shares)), part


def assert_bits_of_the_oracles(codec, part):
    brought = inputs(2, 2 * part, torch.float32)
    expected, _ = reduce_scatter(codec, brought, 2.0)
    for result, own in zip(reduce_on_ranks(2, codec, brought, 2.0), expected, strict=True):
        assert torch.equal(result, own)
    shares = inputs(2, part, torch.float32)
    results = gather_on_ranks(2, codec, shares)
    assert_same_bits(results)
    assert torch.equal(results[0], all_gather(codec, shares))


@per_codec
def test_parts_of_several_pieces_give_the_bits_of_the_oracles(codec):
    assert_bits_of_the_oracles(codec, MORE_THAN_A_PIECE)


def test_parts_of_several_segments_give_the_bits_of_the_oracles():
    assert_bits_of_the_oracles("block_uint8", MORE_THAN_A_SEGMENT)


def test_an_empty_bucket_is_left_alone():
    for make in (scattering, gathering):

        def run(comm, make=make):
            flat = torch.zeros(0)
            make(comm, "block_uint8").run(flat)
            return flat.numel()

        assert run_thread_ranks(3, run) == [0, 0, 0]


@per_codec
@per_ranks
def test_payloads_and_frames_are_sent_and_nothing_else(n, codec):
    part = 4099

    def run(comm):
        traffic = []
        for make in (scattering, gathering):
            counting = _C.CountingCommunicator(comm)
            make(counting, codec).run(torch.zeros(n * part))
            traffic.append(counting.traffic())
        return traffic

    message = FRAME_BYTES + payload_bytes(codec, torch.float32, part)
    for of_both in run_thread_ranks(n, run):
        for traffic in of_both:
            assert traffic["bytes_sent"] == (n - 1) * message
            assert traffic["messages_sent"] == n - 1


# Non-finite values.


@per_codec
@over(bad=BAD_VALUES.values())
def test_a_bad_value_reaches_the_owner_of_its_part_and_no_other(codec, bad):
    part = 5000
    for culprit in range(3):
        for owner in range(3):
            brought = inputs(3, 3 * part, torch.float32)
            brought[culprit][owner * part + 2047] = bad
            results = reduce_on_ranks(3, codec, brought, 3.0)
            for rank, result in enumerate(results):
                assert result.isfinite().all() == (rank != owner)
            assert not results[owner][2047].isfinite()


@per_codec
@over(bad=BAD_VALUES.values())
def test_a_bad_weight_reaches_every_rank(codec, bad):
    shares = inputs(3, 5000, torch.float32)
    shares[1][2047] = bad
    results = gather_on_ranks(3, codec, shares)
    assert_same_bits(results)
    assert not results[0][5000 + 2047].isfinite()
    assert results[0][:5000].isfinite().all()


# Error feedback.


def memory(numel, outcome):
    return _C.RoundMemory([torch.zeros(numel), torch.zeros(1, dtype=torch.int64)], outcome)


def remembering_rounds(comm, codec, rounds, divisor, grad_scale):
    """(own parts by round, residuals after each round)."""
    kept = memory(rounds[0][0].numel(), outcome := _C.RoundOutcome())
    op = scattering(comm, codec, divisor, memory=kept)
    parts, residuals = [], []
    for step, brought in enumerate(rounds, 1):
        flat = brought[comm.rank].clone()
        op.run(flat, step=step, grad_scale=grad_scale)
        parts.append(own_part(comm, flat).clone())
        residuals.append(kept.value(0).clone())
    del outcome
    return parts, residuals


@per_codec
@per_ranks_and_dtype(RANKS, {name: DTYPES[name] for name in ("f32", "f16", "bf16")})
def test_error_feedback_gives_the_bits_of_its_oracle(n, codec, dtype):
    scale = 4.0
    rounds = [inputs(n, n * 3001, dtype, salt=salt) for salt in range(3)]
    found = run_thread_ranks(n, remembering_rounds, codec, rounds, float(n), scale)
    errors = [torch.zeros(n * 3001) for _ in range(n)]
    for step, brought in enumerate(rounds):
        expected, errors = reduce_scatter(codec, brought, float(n), errors, scale)
        for rank, (parts, residuals) in enumerate(found):
            assert torch.equal(parts[step], expected[rank]), f"round {step}, rank {rank}"
            assert torch.equal(residuals[step], errors[rank]), f"round {step}, rank {rank}"


def test_an_overflow_on_one_rank_leaves_the_memory_of_all_ranks_as_it_was():
    n, part = 3, 64
    good = inputs(n, n * part, torch.float32)
    bad = [x.clone() for x in good]
    bad[1][0] = float("inf")  # in rank 0's part

    def run(comm):
        _, residuals = remembering_rounds(comm, "int4_block", [good, bad, good], 1.0, 1.0)
        return residuals

    for first, after_bad, last in run_thread_ranks(n, run):
        assert first.abs().max() > 0
        assert torch.equal(first, after_bad)
        assert last.isfinite().all()
        assert not torch.equal(last, first)


def test_memory_that_does_not_fit_is_refused():
    comm = _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
    outcome = _C.RoundOutcome()
    double = _C.RoundMemory(
        [torch.zeros(8, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)], outcome
    )
    with pytest.raises(ValueError, match="needs a float32 memory"):
        scattering(comm, "block_uint8", memory=double)
    op = scattering(comm, "block_uint8", memory=memory(8, outcome))
    with pytest.raises(ValueError, match=r"bucket 'the bucket' \(9 elements.*does not fit"):
        op.run(torch.zeros(9), bucket=BUCKET)
    with pytest.raises(ValueError, match=r"does not fit the error"):
        op.run(torch.zeros(8, dtype=torch.float64), bucket=BUCKET)


# Refusals.


@over(make=[scattering, gathering])
def test_a_bucket_that_the_ranks_do_not_divide_is_refused(make):
    comm = _C.ThreadCommunicator(_C.ThreadHub(3, 1.0), 0)
    with pytest.raises(ValueError, match=r"bucket 'the bucket': 10 elements .* into 3 equal parts"):
        make(comm, "block_uint8").run(torch.zeros(10), bucket=BUCKET)


@over(make=[scattering, gathering])
def test_integers_are_refused(make):
    comm = _C.ThreadCommunicator(_C.ThreadHub(2, 1.0), 0)
    with pytest.raises(_C.BaguaError, match=r"takes float32.*not Int"):
        make(comm, "block_uint8").run(torch.zeros(4, dtype=torch.int32))


@over(divisor=[0.0, -1.0, float("nan"), float("inf")])
def test_a_divisor_is_a_positive_number(divisor):
    comm = _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
    with pytest.raises(ValueError, match="the divisor must be a positive number"):
        scattering(comm, "block_uint8", divisor)


def test_the_ops_describe_themselves():
    comm = _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
    assert scattering(comm, "fp16", 3.0, checksum=True).describe() == (
        "CompressedReduceScatter(fp16, divided by 3, ranks 1, checksum)"
    )
    remembering = scattering(comm, "fp16", memory=memory(4, _C.RoundOutcome()))
    assert "error feedback" in remembering.describe()
    assert gathering(comm, "fp16").describe() == "CompressedAllGather(fp16, ranks 1)"


# Damaged messages.


def texts_of_damage(make, codec, damaged, checksum):
    """Rank 0's errors where rank 1 sends each of `damaged`; its bucket keeps its bits."""

    def run(comm):
        if comm.rank == 1:
            for message in damaged:
                comm.exchange([(message, 0)], [(torch.empty_like(message), 0)])
            return None
        op = make(comm, codec, checksum=checksum)
        texts = []
        for _ in damaged:
            flat = torch.linspace(-1, 2, 32)
            other = flat[16:].clone()
            with pytest.raises(_C.BaguaMismatchError) as caught:
                op.run(flat, bucket=BUCKET)
            assert torch.equal(bits(flat[16:]), bits(other))
            texts.append(str(caught.value))
        return texts

    return run_thread_ranks(2, run)[0]


@per_codec
@over(make=[scattering, gathering], checksum=[False, True])
def test_every_damaged_frame_is_found_and_with_a_checksum_every_damaged_message(
    make, codec, checksum
):
    message = part_of_all_reduce(codec, torch.linspace(-3, 1, NUMEL), checksum)
    damaged = every_bit(message, 3) if checksum else every_bit(message)[: 8 * FRAME_BYTES]
    for text in texts_of_damage(make, codec, damaged, checksum):
        assert f"bucket '{BUCKET}'" in text
        assert f"the payload from rank 1{'' if checksum else ' does not match'}" in text


@over(checksum=[False, True], make=[scattering, gathering])
def test_the_message_of_the_description_is_taken(make, checksum):
    theirs = torch.linspace(-3, 1, NUMEL)
    message = part_of_all_reduce("fp16", theirs, checksum)

    def run(comm):
        if comm.rank == 1:
            comm.exchange([(message, 0)], [(torch.empty_like(message), 0)])
            return None
        flat = torch.zeros(32)
        make(comm, "fp16", checksum=checksum).run(flat, bucket=BUCKET)
        return flat[:16] if make is scattering else flat[16:]

    assert torch.equal(run_thread_ranks(2, run)[0], theirs.half().float())
