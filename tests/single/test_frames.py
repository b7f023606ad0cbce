"""Messages of compressed all-reduces, and their reaction to foreign payloads."""

import pytest
import torch
from bagua import _C
from oracle.codec import payload_bytes
from oracle.compressed_all_reduce import parts
from support.cases import over
from support.threads.op_ranks import (
    compressed,
    per_codec,
    per_ranks,
)
from support.threads.thread_ranks import run_thread_ranks

FRAME_BYTES = 32


@per_codec
@per_ranks
@over(numel=[4096, 4099, 14337])
def test_compressed_all_reduce_sends_payloads_and_frames_and_nothing_else(n, codec, numel):
    def run(comm):
        counting = _C.CountingCommunicator(comm)
        compressed(counting, codec, "mean").run(torch.zeros(numel))
        return counting.traffic()

    sizes = [
        payload_bytes(codec, torch.float32, part) if part else 0 for _, part in parts(numel, n)
    ]
    for rank, traffic in enumerate(run_thread_ranks(n, run)):
        scattered = sum(FRAME_BYTES + size for peer, size in enumerate(sizes) if peer != rank)
        gathered = (n - 1) * (FRAME_BYTES + sizes[rank])
        assert traffic["bytes_sent"] == scattered + gathered
        assert traffic["messages_sent"] == 2 * (n - 1)
        assert traffic["bytes_received"] == scattered + gathered


def garbage(comm, numel, first_word):
    """A message of another library version: the right sizes, other bytes."""
    message = torch.zeros(FRAME_BYTES + payload_bytes("block_uint8", torch.float32, numel // 2))
    message = message.to(torch.uint8)
    message[:8] = torch.frombuffer(bytearray(first_word), dtype=torch.uint8)
    incoming = torch.empty_like(message)
    comm.exchange([(message, 0)], [(incoming, 0)])
    comm.exchange([(message, 0)], [(incoming, 0)])


@over(first_word=[b"\0" * 8, b"BGframe1"])
def test_a_payload_that_does_not_match_names_bucket_and_peer(first_word):
    caught = []

    def run(comm):
        if comm.rank == 1:
            try:
                garbage(comm, 4096, first_word)
            except _C.BaguaError:
                return  # rank 0 is gone by the second message
        try:
            compressed(comm, "block_uint8", "mean").run(torch.ones(4096), bucket="the bucket")
        except _C.BaguaMismatchError as error:
            caught.append(str(error))
            comm.abort(str(error))

    run_thread_ranks(2, run)
    assert len(caught) == 1
    assert "bucket 'the bucket': the payload from rank 1 does not match" in caught[0]


def frames_differ(mine, theirs):
    """The error of rank 0 when two ranks run slightly different all-reduces of equal size."""
    errors = [None, None]

    def run(comm):
        codec, step, bucket = (mine, theirs)[comm.rank]
        try:
            op = compressed(comm, codec, "mean")
            op.run(torch.ones(64), step=step, bucket=bucket)
        except _C.BaguaMismatchError as error:
            errors[comm.rank] = str(error)

    run_thread_ranks(2, run)
    return errors


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (("bf16", 1, "b"), "fingerprint of codec, dtype and sizes"),
        (("fp16", 2, "b"), "round is 2, expected 1"),
        (("fp16", 1, "c"), "fingerprint of codec, dtype and sizes"),
    ],
    ids=["codec", "round", "bucket"],
)
def test_equal_sizes_do_not_hide_a_difference_between_ranks(theirs, words):
    first, second = frames_differ(("fp16", 1, "b"), theirs)
    assert words in first
    assert "rank 0 does not match" in second
