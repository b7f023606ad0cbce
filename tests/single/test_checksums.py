"""Checksums of compressed messages: what is changed on the way is found before it is used."""

import pytest
import torch
from bagua import _C
from oracle import frame
from oracle.codec import pad
from support.threads.op_ranks import CODECS, compressed, inputs, per_codec, per_ranks, run_op
from support.threads.sparse_ranks import make, memory_of
from support.threads.thread_ranks import run_thread_ranks

NUMEL = 16  # of each of two parts
BUCKET = "the bucket"


def bytes_of(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def random_payload(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("size", [0, 4, 32, 96, 100, 4096, 100000])
def test_the_checksum_is_that_of_the_description_on_every_device(size):
    payload = random_payload(size)
    for case in (payload, torch.full_like(payload, 255), torch.zeros_like(payload)):
        expected = frame.checksum(case.numpy().tobytes())
        assert _C.payload_checksum(case) == expected
        assert _C.checksum_on_device(case) == expected


def test_large_payloads_are_summed_piece_by_piece_on_devices():
    payload = random_payload(4 * (2**22 + 5))
    assert _C.checksum_on_device(payload) == _C.payload_checksum(payload)


def test_every_changed_word_two_flipped_bits_and_every_swap_change_the_checksum():
    payload = random_payload(256)
    seen = {_C.payload_checksum(payload): "nothing"}
    words = payload.view(torch.int32)

    def distinct(change, changed):
        value = _C.payload_checksum(changed.view(torch.uint8))
        assert seen.setdefault(value, change) != "nothing", change

    for i in range(words.numel()):
        for value in (0, -1, 1 << 31, 1, int(words[i]) + 1, int(words[i]) ^ 0x01010101):
            changed = words.clone()
            changed[i] = (value + 2**31) % 2**32 - 2**31
            if changed[i] != words[i]:
                distinct(f"word {i} to {value}", changed)
        for j in range(i):
            changed = words.clone()
            changed[i], changed[j] = words[j], words[i]
            distinct(f"words {i} and {j} swapped", changed)
    for first in range(0, 8 * payload.numel(), 3):
        for second in range(first + 1, 8 * payload.numel(), 61):
            changed = payload.clone()
            for bit in (first, second):
                changed[bit // 8] ^= 1 << bit % 8
            distinct(f"bits {first} and {second}", changed)


def test_a_payload_is_cpu_bytes_in_words():
    for wrong in (torch.zeros(6, dtype=torch.uint8), torch.zeros(8)):
        with pytest.raises(ValueError, match="a payload is"):
            _C.payload_checksum(wrong)
        with pytest.raises(ValueError, match="a payload is"):
            _C.checksum_on_device(wrong)


# What arrives instead of a message.


def flipped(message, bit):
    message = message.clone()
    message[bit // 8] ^= 1 << bit % 8
    return message


def every_bit(message, step=1):
    return [flipped(message, bit) for bit in range(0, 8 * message.numel(), step)]


def other_changes(message):
    """Changed payloads: words swapped, content moved, cut off, and left out."""
    head, payload = message[:32], message[32:]
    words = payload.view(torch.int32)
    differ = [i for i in range(words.numel()) if words[i] != words[0]]
    swapped = words.clone()
    swapped[0], swapped[differ[0]] = words[differ[0]], words[0]
    zeros = torch.zeros(8, dtype=torch.uint8)
    cut = payload.clone()
    cut[4 * differ[0] :] = 0
    changes = [swapped.view(torch.uint8), torch.cat([zeros, payload[:-8]]), cut]
    changes.append(torch.cat([payload[8:], zeros]))
    return [torch.cat([head, change]) for change in changes if not torch.equal(change, payload)]


def refused(count, run):
    """`run` reports a corrupted payload in each of `count` calls."""
    for number in range(count):
        with pytest.raises(_C.BaguaMismatchError) as caught:
            run()
        assert f"bucket '{BUCKET}'" in str(caught.value), number
        assert "the payload from rank 1" in str(caught.value), number
        yield str(caught.value)


def encoded(codec, x):
    return _C.make_codec(codec).encode(x).numpy().tobytes()


def part_of_all_reduce(codec, x, with_checksum=True):
    of = frame.fingerprint(codec, frame.DTYPES["f32"], NUMEL, 0, BUCKET)
    return bytes_of(frame.message(encoded(codec, x), of, with_checksum=with_checksum))


def damaged_all_reduce(codec, before, bad):
    """The texts of rank 0's errors; `before`: the valid messages that come first, `bad`: one of
    them follows. In each round, rank 0's bucket keeps what was in it, but for what was valid."""

    def run(comm):
        if comm.rank == 1:
            for last in bad:
                for message in [*before, last]:
                    comm.exchange([(message, 0)], [(torch.empty_like(message), 0)])
            return None
        op = _C.CompressedAllReduce(
            comm, _C.make_codec(codec), _C.Scratch(), _C.ReduceOp.SUM, checksum=True
        )
        brought = torch.linspace(-1, 2, 2 * NUMEL)
        texts = []
        for _ in bad:
            flat = brought.clone()
            texts += refused(1, lambda flat=flat: op.run(flat, bucket=BUCKET))
            assert torch.equal(flat[NUMEL:], brought[NUMEL:])
            assert torch.equal(flat[:NUMEL], brought[:NUMEL]) == (not before)
        return texts

    return run_thread_ranks(2, run)[0]


@pytest.mark.parametrize("phase", ["scatter", "gather"])
@per_codec
def test_no_changed_message_of_an_all_reduce_gets_into_a_bucket(codec, phase):
    message = part_of_all_reduce(codec, torch.linspace(-3, 1, NUMEL))
    before = [message] if phase == "gather" else []
    bad = every_bit(message, 1 if phase == "scatter" else 7) + other_changes(message)
    texts = damaged_all_reduce(codec, before, bad)
    assert len(texts) == len(bad)
    sent = int.from_bytes(message[24:32].numpy().tobytes(), "little")
    behind = [text for text in texts if "corrupted on the way" in text]
    assert len(behind) > len(texts) // 2
    for text in behind[-5:]:
        assert f"bucket '{BUCKET}', round 1: the payload from rank 1 was corrupted" in text
        assert f"the checksum of its {message.numel() - 32} bytes is " in text
        assert f", expected {sent}." in text


@per_codec
def test_the_bytes_of_an_all_reduce_are_those_of_the_description(codec):
    """With a checksum and without; a frame of the other kind is refused by its magic."""
    x = torch.linspace(-3, 1, 2 * NUMEL)

    def run(comm, theirs):
        if comm.rank == 1:
            incoming = torch.empty_like(theirs)
            comm.exchange([(theirs, 0)], [(incoming, 0)])
            return incoming
        op = _C.CompressedAllReduce(
            comm, _C.make_codec(codec), _C.Scratch(), _C.ReduceOp.SUM, checksum=with_checksum
        )
        with pytest.raises(_C.BaguaMismatchError, match="magic is"):
            op.run(x.clone(), bucket=BUCKET)
        return None

    for with_checksum in (False, True):
        other = part_of_all_reduce(codec, x[:NUMEL], not with_checksum)
        expected = part_of_all_reduce(codec, x[NUMEL:], with_checksum)
        assert torch.equal(run_thread_ranks(2, run, other)[1], expected)


@per_codec
def test_no_changed_message_of_a_neighbour_gets_into_a_replica(codec):
    x = torch.linspace(-3, 1, NUMEL)
    message = part_of_all_reduce(codec, x)
    bad = every_bit(message, 5) + other_changes(message)

    def run(comm):
        if comm.rank == 1:
            for last in bad:
                comm.exchange([(last, 0)], [(torch.empty_like(last), 0)])
            return
        replicas = [torch.zeros(NUMEL) for _ in range(3)]
        op = _C.CompressedGossip(
            comm, _C.make_codec(codec), _C.Scratch(), *replicas, 0.3, 0.3, checksum=True
        )
        flat = x.clone()
        for _ in refused(len(bad), lambda: op.run(flat, bucket=BUCKET)):
            assert torch.equal(flat, x)
            assert not any(replica.any() for replica in replicas)

    run_thread_ranks(2, run)


def sparse_message(x, k):
    """The k largest of `x`, as docs/wire-format.md has them."""
    numel, dtype = x.numel(), {torch.float32: 6, torch.float64: 7}[x.dtype]
    indices = _C.top_k(x, k)
    values = pad(x[indices.long()].numpy().tobytes())
    payload = values + _C.pack_indices(indices, numel).numpy().tobytes()
    of = frame.fingerprint(f"sparse {_C.index_coding(numel, k)}", dtype, numel, k, BUCKET)
    return bytes_of(frame.message(payload, of, with_checksum=True))


@pytest.mark.parametrize("k", [3, 40], ids=["packed", "bitmap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_no_changed_sparse_message_is_added(k, dtype):
    x = inputs(1, 300, dtype)[0]
    message = sparse_message(x, k)
    bad = every_bit(message, 3) + other_changes(message)

    def run(comm):
        if comm.rank == 1:
            for last in bad:
                everyone = torch.empty(2 * last.numel(), dtype=torch.uint8)
                comm.all_gather(last, everyone)
                assert torch.equal(everyone[: last.numel()], message)
            return
        memory = memory_of(x.numel(), dtype)
        op = _C.Sparse(comm, _C.Scratch(), x.numel(), k, memory, checksum=True)
        flat = x.clone()

        def once():
            flat.copy_(x)
            op.run(flat, bucket=BUCKET)

        for _ in refused(len(bad), once):
            assert not flat.any()  # nothing has been added to the sum

    run_thread_ranks(2, run)


@pytest.mark.parametrize("kind", CODECS)
@per_ranks
def test_a_checksum_changes_no_result(n, kind):
    brought = inputs(n, 1000, torch.float32)
    plain = run_op(n, lambda comm: compressed(comm, kind, "mean"), brought)
    checked = run_op(
        n,
        lambda comm: _C.CompressedAllReduce(
            comm, _C.make_codec(kind), _C.Scratch(), _C.ReduceOp.AVG, checksum=True
        ),
        brought,
    )
    for a, b in zip(plain, checked, strict=True):
        assert torch.equal(a, b)


def test_ops_say_that_they_have_a_checksum():
    alone = _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
    codec, scratch = _C.make_codec("fp16"), _C.Scratch()
    plain = make(alone, "top-k", 5, 2, memory_of(5, torch.float32)).describe()
    checked = _C.Sparse(alone, scratch, 5, 2, memory_of(5, torch.float32), checksum=True).describe()
    assert (plain, checked) == ("Sparse(2 of 5, ranks 1)", "Sparse(2 of 5, ranks 1, checksum)")
    op = _C.CompressedAllReduce(alone, codec, scratch, _C.ReduceOp.AVG, checksum=True)
    assert op.describe() == "CompressedAllReduce(fp16, mean, ranks 1, checksum)"
