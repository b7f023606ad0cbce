"""Messages of compressed all-reduces, and frames that differ between ranks."""

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
    def run(comm):
        codec, step, bucket = (("fp16", 1, "b"), theirs)[comm.rank]
        with pytest.raises(_C.BaguaMismatchError) as caught:
            compressed(comm, codec, "mean").run(torch.ones(64), step=step, bucket=bucket)
        return str(caught.value)

    first, second = run_thread_ranks(2, run)
    assert words in first
    assert "rank 0 does not match" in second
