"""Bytes of sparse messages, and messages that are damaged or of another round."""

import contextlib

import torch
from bagua import _C
from support.threads.sparse_ranks import make, memory_of
from support.threads.thread_ranks import run_thread_ranks


def test_the_bytes_on_the_wire_are_as_computed():
    def run(comm):
        counting = _C.CountingCommunicator(comm)
        make(counting, "top-k", 10000, 100, memory_of(10000, torch.float32)).run(torch.ones(10000))
        return counting.traffic()["bytes_sent"]

    size = _C.sparse_message_bytes(10000, 100, torch.float32)
    assert size == 32 + 416 + 192  # a frame, 100 values, 100 indices of 14 bits
    assert run_thread_ranks(3, run) == [2 * size] * 3


NUMEL, K = 1000, 20  # indices of 10 bits, packed


def message_of(numel=NUMEL, k=K, **of_round):
    """The bytes that the op sends, as a rank sees them that only listens."""

    def run(comm):
        if comm.rank == 0:
            with contextlib.suppress(_C.BaguaError):  # of the zeros that it is sent
                flat = torch.arange(float(numel))
                make(comm, "top-k", numel, k, memory_of(numel, flat.dtype)).run(flat, **of_round)
            return None
        size = _C.sparse_message_bytes(numel, k, torch.float32)
        both = torch.empty(2 * size, dtype=torch.uint8)
        comm.all_gather(torch.zeros(size, dtype=torch.uint8), both)
        return both[:size].clone()

    return run_thread_ranks(2, run)[1]


def error_for(message, numel=NUMEL, k=K):
    """The op's error for a peer's message; None if it accepts it."""

    def run(comm):
        if comm.rank == 1:
            comm.all_gather(message, torch.empty(2 * message.numel(), dtype=torch.uint8))
            return None
        flat = torch.zeros(numel)
        memory = memory_of(numel, flat.dtype)
        try:
            make(comm, "top-k", numel, k, memory).run(flat)
        except _C.BaguaMismatchError as error:
            assert not memory.value(0).any()
            return str(error)
        return None

    return run_thread_ranks(2, run)[0]


def test_a_message_that_fits_is_taken():
    assert error_for(message_of()) is None


def test_messages_of_another_round_or_bucket_are_refused_and_the_peer_is_named():
    said = error_for(message_of(step=2))
    assert "bucket 'eager': the payload from rank 1 does not match: round is 2, expected 1" in said
    assert "fingerprint" in error_for(message_of(bucket="other"))
    assert "magic" in error_for(torch.zeros_like(message_of()))


def test_damaged_indices_are_refused_and_the_peer_is_named():
    message = message_of()
    message[-32:] = 255
    said = error_for(message)
    assert "bucket 'eager': the payload from rank 1 was corrupted on the wire" in said
    assert "must ascend below 1000" in said
