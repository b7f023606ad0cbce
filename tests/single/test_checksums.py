"""Messages of compressed ops: what is changed, or of another round, is found before it is used."""

from functools import partial

import pytest
import torch
from bagua import _C
from oracle import frame
from oracle.codec import pad
from support.cases import over
from support.threads.op_ranks import CODECS, inputs, per_ranks, run_op
from support.threads.sparse_ranks import memory_of
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


# Messages of ops: what is sent is described, what arrives changed is refused.

X = torch.linspace(-3, 1, 2 * NUMEL)


def message_of(codec, part, with_checksum, step=1, bucket=BUCKET):
    of = frame.fingerprint(codec, frame.DTYPES["f32"], NUMEL, 0, bucket)
    payload = _C.make_codec(codec).encode(part).numpy().tobytes()
    return bytes_of(frame.message(payload, of, step, with_checksum))


def gossip(comm, codec, scratch, **options):
    replicas = [torch.zeros(NUMEL) for _ in range(3)]
    return _C.CompressedGossip(comm, codec, scratch, *replicas, 0.3, 0.3, **options), replicas


def without_replicas(make):
    return lambda *arguments, **options: (make(*arguments, **options), [])


#: (op between two ranks and its replicas, elements of its bucket, those of rank 0 that it sends
#: first, those that keep their bits where the first message is refused)
FIRST, SECOND, ALL = slice(NUMEL), slice(NUMEL, 2 * NUMEL), slice(2 * NUMEL)
OPS_WITH_FRAMES = {
    "all-reduce": (
        without_replicas(partial(_C.CompressedAllReduce, op=_C.ReduceOp.SUM)),
        *(2 * NUMEL, SECOND, ALL),
    ),
    "reduce-scatter": (
        without_replicas(partial(_C.CompressedReduceScatter, divisor=2.0)),
        *(2 * NUMEL, SECOND, SECOND),
    ),
    "all-gather": (without_replicas(_C.CompressedAllGather), 2 * NUMEL, FIRST, SECOND),
    "gossip": (gossip, NUMEL, FIRST, ALL),
}
per_op_with_frames = pytest.mark.parametrize(
    ("make", "numel", "sent", "kept"), OPS_WITH_FRAMES.values(), ids=OPS_WITH_FRAMES
)


def refusals(make, codec, with_checksum, numel, kept, bad, before=()):
    """(text of rank 0's error, what it sent first) for each of `bad` messages of rank 1.

    before: valid messages that rank 1 sends first, in each round.
    """

    def run(comm):
        if comm.rank == 1:
            received = []
            for last in bad:
                incoming = [torch.empty_like(last) for _ in (*before, last)]
                for message, place in zip([*before, last], incoming, strict=True):
                    comm.exchange([(message, 0)], [(place, 0)])
                received.append(incoming[0])
            return received
        op, replicas = make(comm, _C.make_codec(codec), _C.Scratch(), checksum=with_checksum)
        texts = []
        for _ in bad:
            flat = X[:numel].clone()
            with pytest.raises(_C.BaguaMismatchError) as caught:
                op.run(flat, bucket=BUCKET)
            assert torch.equal(flat[kept], X[:numel][kept])
            assert not any(replica.any() for replica in replicas)
            texts.append(str(caught.value))
        return texts

    return list(zip(*run_thread_ranks(2, run), strict=True))


def flipped(message, bit):
    message = message.clone()
    message[bit // 8] ^= 1 << bit % 8
    return message


def every_bit(message, step):
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


def assert_corruption_is_told(texts, message):
    behind = [text for text in texts if "corrupted on the way" in text]
    assert len(behind) > len(texts) // 2
    expected = int.from_bytes(message[24:32].numpy().tobytes(), "little")
    for text in texts:
        assert f"bucket '{BUCKET}'" in text
        assert "the payload from rank 1" in text
    for text in behind[-3:]:  # the checksum itself is as it was
        assert f"bucket '{BUCKET}', round 1: the payload from rank 1 was corrupted" in text
        assert f"the checksum of its {message.numel() - 32} bytes is " in text
        assert f", expected {expected}." in text


@per_op_with_frames
@over(codec=CODECS)
def test_no_changed_message_gets_into_a_bucket(make, numel, sent, kept, codec):
    message = message_of(codec, X[FIRST], with_checksum=True)
    bad = every_bit(message, 5) + other_changes(message)
    found = refusals(make, codec, True, numel, kept, bad)
    assert_corruption_is_told([text for text, _ in found], message)


@over(codec=CODECS)
def test_no_changed_result_of_an_all_reduce_gets_into_a_bucket(codec):
    message = message_of(codec, X[FIRST], with_checksum=True)
    bad = every_bit(message, 7) + other_changes(message)
    make, numel, *_ = OPS_WITH_FRAMES["all-reduce"]
    found = refusals(make, codec, True, numel, SECOND, bad, before=[message])
    assert_corruption_is_told([text for text, _ in found], message)


@per_op_with_frames
@over(codec=CODECS, with_checksum=[False, True])
def test_the_bytes_are_those_of_the_description(make, numel, sent, kept, codec, with_checksum):
    """A frame of the other kind is refused by its magic, and one with a bit changed."""
    other = message_of(codec, X[FIRST], not with_checksum)
    own = message_of(codec, X[FIRST], with_checksum)
    bad = [other, *(flipped(own, bit) for bit in range(8 * 32))]
    (magic, first), *frames = refusals(make, codec, with_checksum, numel, kept, bad)
    assert "magic is" in magic
    assert torch.equal(first, message_of(codec, X[sent], with_checksum))
    assert all(f"bucket '{BUCKET}'" in text for text, _ in frames)


OTHERS = {
    "codec": (("bf16", {}), "fingerprint of codec, dtype and sizes"),
    "round": (("fp16", {"step": 2}), "round is 2, expected 1"),
    "bucket": (("fp16", {"bucket": "other"}), "fingerprint of codec, dtype and sizes"),
}


@per_op_with_frames
@over(theirs=OTHERS.values())
def test_equal_sizes_do_not_hide_a_difference_between_ranks(make, numel, sent, kept, theirs):
    (codec, options), words = theirs
    message = message_of(codec, X[FIRST], False, **options)
    ((text, _),) = refusals(make, "fp16", False, numel, kept, [message])
    assert text.startswith(f"bucket '{BUCKET}': the payload from rank 1 does not match")
    assert words in text


def sparse_message(x, k, with_checksum=True, step=1, bucket=BUCKET):
    """The k largest of `x`, as docs/wire-format.md has them."""
    numel, dtype = x.numel(), {torch.float32: 6, torch.float64: 7}[x.dtype]
    indices = _C.top_k(x, k)
    values = pad(x[indices.long()].numpy().tobytes())
    payload = values + _C.pack_indices(indices, numel).numpy().tobytes()
    of = frame.fingerprint(f"sparse {_C.index_coding(numel, k)}", dtype, numel, k, bucket)
    return bytes_of(frame.message(payload, of, step, with_checksum))


def sparse_refusals(x, k, bad, with_checksum):
    message = sparse_message(x, k, with_checksum)

    def run(comm):
        if comm.rank == 1:
            for last in bad:
                everyone = torch.empty(2 * last.numel(), dtype=torch.uint8)
                comm.all_gather(last, everyone)
                assert torch.equal(everyone[: last.numel()], message)
            return None
        memory = memory_of(x.numel(), x.dtype)
        op = _C.Sparse(comm, _C.Scratch(), x.numel(), k, memory, checksum=with_checksum)
        texts = []
        for _ in bad:
            flat = x.clone()
            with pytest.raises(_C.BaguaMismatchError) as caught:
                op.run(flat, bucket=BUCKET)
            assert not (with_checksum and flat.any()), "nothing has been added to the sum"
            assert not memory.value(0).any()
            texts.append(str(caught.value))
        return texts

    return run_thread_ranks(2, run)[0]


@over(k=[3, 40], dtype=[torch.float32, torch.float64])
def test_no_changed_sparse_message_is_added(k, dtype):
    x = inputs(1, 300, dtype)[0]
    message = sparse_message(x, k)
    bad = every_bit(message, 3) + other_changes(message)
    assert_corruption_is_told(sparse_refusals(x, k, bad, with_checksum=True), message)


def test_sparse_messages_of_another_kind_are_refused_without_a_checksum_too():
    x = inputs(1, 1000, torch.float32)[0]
    other_round = sparse_message(x, 20, False, step=2)
    other_bucket = sparse_message(x, 20, False, bucket="other")
    damaged = sparse_message(x, 20, False)
    damaged[-32:] = 255
    bad = [other_round, other_bucket, torch.zeros_like(damaged), damaged]
    of_round, of_bucket, of_zeros, of_indices = sparse_refusals(x, 20, bad, with_checksum=False)
    peer = f"bucket '{BUCKET}': the payload from rank 1"
    assert f"{peer} does not match: round is 2, expected 1" in of_round
    assert "fingerprint" in of_bucket
    assert "magic" in of_zeros
    assert f"{peer} was corrupted on the wire" in of_indices
    assert "must ascend below 1000" in of_indices


@per_ranks
def test_a_checksum_changes_no_result(n):
    brought = inputs(n, 1000, torch.float32)
    for codec in CODECS:
        plain, checked = (
            run_op(
                n,
                lambda comm, codec=codec, checksum=checksum: _C.CompressedAllReduce(
                    comm, _C.make_codec(codec), _C.Scratch(), _C.ReduceOp.AVG, checksum=checksum
                ),
                brought,
            )
            for checksum in (False, True)
        )
        assert all(map(torch.equal, plain, checked))
