"""Chunked sparse means on thread ranks: bytes, the oracle's bits, residuals, bad values."""

import pytest
import torch
from bagua import _C
from oracle import chunked_sparse as oracle
from support.threads.op_ranks import BAD_VALUES, assert_same_bits, inputs, per_ranks
from support.threads.thread_ranks import run_thread_ranks

K, DECAY, ROUNDS = 64, 0.95, 4
SIZES = [0, 1, 63, 4095, 4096, 4097, 3 * 4096 + 1000]
DTYPES = {"f32": torch.float32, "f64": torch.float64}


def run_rounds(n, rounds, k=K, decay=DECAY, padding=0, checksum=False):
    """By rank: the bucket and the residual after each round. `rounds`: what ranks bring."""
    numel, dtype = rounds[0][0].numel(), rounds[0][0].dtype

    def run(comm):
        error = torch.zeros(numel, dtype=dtype)
        count = torch.zeros(1, dtype=torch.int64)
        memory = _C.RoundMemory([error, count], _C.RoundOutcome())
        op = _C.ChunkedSparse(
            comm,
            _C.Scratch(),
            k=k,
            decay=decay,
            numel=numel - padding,
            memory=memory,
            checksum=checksum,
        )
        seen = []
        for step, brought in enumerate(rounds):
            flat = brought[comm.rank].clone()
            op.run(flat, step=step + 1)
            seen.append((flat, memory.value(0).clone()))
        return seen

    return run_thread_ranks(n, run)


def bring(n, numel, dtype=torch.float32, rounds=ROUNDS):
    return [inputs(n, numel, dtype, salt=17 * step) for step in range(rounds)]


@per_ranks
@pytest.mark.parametrize("numel", SIZES)
def test_every_round_has_the_bits_of_the_oracle(n, numel):
    rounds = bring(n, numel)
    results = run_rounds(n, rounds)
    errors = [torch.zeros(numel)] * n
    for step, brought in enumerate(rounds):
        expected, errors = oracle.mean(brought, errors, K, DECAY)
        assert_same_bits([seen[step][0] for seen in results])
        assert torch.equal(results[0][step][0], expected), f"round {step}"
        for rank in range(n):
            assert torch.equal(results[rank][step][1], errors[rank]), f"round {step}, rank {rank}"


@pytest.mark.parametrize("k", [1, 65, 300, 342, 4096])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_any_part_of_a_chunk_is_sent(k, dtype):
    rounds = bring(3, 5000, dtype)
    results = run_rounds(3, rounds, k)
    errors = [torch.zeros(5000, dtype=dtype)] * 3
    for step, brought in enumerate(rounds):
        expected, errors = oracle.mean(brought, errors, k, DECAY)
        assert torch.equal(results[2][step][0], expected)
        assert torch.equal(results[1][step][1], errors[1])


@pytest.mark.parametrize(
    ("numel", "k"), [(4096, 64), (10000, 64), (5000, 300), (5000, 1000), (1, 64), (0, 1)]
)
def test_messages_have_the_bytes_of_the_oracle(numel, k):
    [x] = inputs(1, numel, torch.float32)
    left = x.clone()
    message = _C.take_chunks(left, k)
    assert message.numpy().tobytes() == oracle.payload(x, k)
    assert message.numel() + 32 == _C.chunked_message_bytes(numel, k)
    assert torch.equal(left, x - oracle.sent_of(x, k))


def test_a_message_is_a_141st_of_the_bucket():
    assert 4 * 4096 * 100 / 141.3 < _C.chunked_message_bytes(4096 * 100, 64) < 4 * 4096 * 100 / 140


def test_the_example_of_the_specification():
    """One of four elements is sent, and half of the residual is kept."""
    rounds = [[torch.tensor([1.0, 2.0, 3.0, 4.0])] * 2] * 3
    seen = run_rounds(2, rounds, k=1, decay=0.5)[0]
    sent = [flat.tolist() for flat, _ in seen]
    assert sent == [[0, 0, 0, 4], [0, 0, 4.5, 0], [0, 0, 0, 6]]
    assert seen[-1][1].tolist() == [1.75, 3.5, 3.0, 0.0]


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_what_is_not_sent_is_in_the_residual(decay):
    """The mean of e after T rounds = sum over t of decay^(T - t) (mean of g_t - result of t)."""
    rounds = bring(3, 5000, torch.float64, rounds=20)
    results = run_rounds(3, rounds, decay=decay)
    owed = torch.zeros(5000, dtype=torch.float64)
    for step, brought in enumerate(rounds):
        owed = decay * owed + sum(brought) / 3 - results[0][step][0]
    found = sum(seen[-1][1] for seen in results) / 3
    assert found.abs().max() > 1, "something is owed"
    torch.testing.assert_close(found, owed, rtol=1e-12, atol=1e-12)


def test_all_elements_are_a_round_trip_of_the_codec():
    [x] = inputs(1, 4096, torch.float32)
    flat = run_rounds(2, [[x, x]], k=4096)[0][0][0]
    assert torch.equal(flat, oracle.round_trip("bit2_block", x))


def test_padding_is_never_sent():
    """A chunk of zeros and few others: padding would be sent as the smaller magnitude."""
    brought = [torch.zeros(200) for _ in range(2)]
    for values in brought:
        values[:3] = torch.tensor([1.0, 2.0, -3.0])
    for flat, error in run_rounds(2, [brought] * 3, k=4096, padding=150)[1]:
        assert flat[:3].all()
        assert not flat[50:].any()
        assert not error[50:].any()


@pytest.mark.parametrize("bad", BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_bad_value_reaches_all_ranks_and_no_memory(bad):
    rounds = bring(3, 5000)
    rounds[2][1][4500] = bad
    results = run_rounds(3, rounds)
    for seen in results:
        assert not seen[2][0].isfinite().all()
        assert torch.equal(seen[2][1], seen[1][1]), "memory is as it was"
        assert seen[3][0].isfinite().all()
    assert_same_bits([seen[3][0] for seen in results])


def test_checksums_change_no_result():
    rounds = bring(2, 5000)
    plain, checked = run_rounds(2, rounds), run_rounds(2, rounds, checksum=True)
    assert torch.equal(plain[0][-1][0], checked[1][-1][0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": 0}, "sends 1 to all of them, not 0"),
        ({"k": 4097}, "sends 1 to all of them, not 4097"),
        ({"decay": 1.5}, r"decay = 1.5 must be from 0 to 1"),
        ({"numel": 11}, "of at least 11 elements"),
    ],
    ids=str,
)
def test_arguments_out_of_their_range_are_refused(change, text):
    memory = _C.RoundMemory([torch.zeros(10), torch.zeros(1, dtype=torch.int64)], _C.RoundOutcome())
    comm = _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
    arguments = {"k": 1, "decay": 0.5, "numel": 10} | change
    with pytest.raises(ValueError, match=text):
        _C.ChunkedSparse(comm, _C.Scratch(), memory=memory, **arguments)


def test_a_bucket_that_does_not_fit_is_refused_by_name():
    memory = _C.RoundMemory([torch.zeros(10), torch.zeros(1, dtype=torch.int64)], _C.RoundOutcome())
    comm = _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
    op = _C.ChunkedSparse(comm, _C.Scratch(), k=1, decay=0.5, numel=10, memory=memory)
    for flat in (torch.zeros(11), torch.zeros(10, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"does not fit the residual"):
            op.run(flat)
