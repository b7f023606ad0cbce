"""The codecs' table and the arguments that the binding refuses."""

import pytest
import torch
from bagua import _C
from oracle import codec as oracle

NAMES = list(oracle.CODECS)


def test_names_and_blocks_come_from_one_table():
    assert _C.codec_names() == NAMES
    assert [_C.make_codec(name).name for name in NAMES] == NAMES
    assert [_C.make_codec(name).block_numel for name in NAMES] == [
        codec.block for codec in oracle.CODECS.values()
    ]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=f"'zip'.*{', '.join(NAMES)}"):
        _C.make_codec("zip")


def call(method, *arguments):
    return lambda codec: getattr(codec, method)(*arguments)


F32, BYTES = torch.float32, torch.zeros(96, dtype=torch.uint8)
MISTAKES = {
    "float64": (call("encode", torch.zeros(4, dtype=torch.float64)), "float32, float16"),
    "strided": (call("encode", torch.zeros(4, 4).t()), "contiguous"),
    "sparse": (call("encode", torch.zeros(4).to_sparse()), "contiguous"),
    "other device": (call("encode", torch.zeros(4, device="meta")), "CPU tensor"),
    "no chunks": (call("encode", torch.zeros(4), 0), "chunks must be at least 1"),
    "unequal chunks": (call("encode", torch.zeros(4), 3), r"4 elements .* 3 equal chunks"),
    "negative size": (call("payload_bytes", F32, -1), "must not be negative"),
    "short payload": (call("decode", BYTES, 2, F32, 32), "has 128 bytes, got 96"),
    "payload of floats": (call("decode", torch.zeros(64), 1, F32, 32), "uint8"),
    "odd address": (call("decode", BYTES[1:65], 1, F32, 32), "multiple of 4"),
    "half sum": (call("decode_add", BYTES, F32, torch.zeros(64).half()), "sum must be float32"),
    "short buffer": (call("encode_into", torch.zeros(65), 1, BYTES), "has 128 bytes, got 96"),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_refused_by_name(mistake, message):
    with pytest.raises(ValueError, match=message):
        mistake(_C.make_codec("block_uint8"))
