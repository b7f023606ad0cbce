"""The frame in front of a payload and its checksum, from docs/wire-format.md, byte by byte."""

import struct

DTYPES = {"f32": 0, "f16": 1, "bf16": 2}


def checksum(payload):
    """64 bits of `payload` (bytes): its length and every word of 32 bits times a number."""
    words = struct.unpack(f"<{len(payload) // 4}I", payload)
    total = sum(w * (1 + i * 0x3C6EF372 % 2**32) for i, w in enumerate(words))
    return (len(payload) + total) % 2**64


def fingerprint(codec, dtype, part_numel, segment, bucket):
    """FNV-1a."""
    result = 0xCBF29CE484222325
    content = codec.encode() + struct.pack("<iqq", dtype, part_numel, segment) + bucket.encode()
    for byte in content:
        result = (result ^ byte) * 0x100000001B3 % 2**64
    return result


def message(payload, of, step=1, with_checksum=False):
    """A frame and `payload` (bytes); `of`: the fingerprint."""
    magic = b"BGcheck1" if with_checksum else b"BGframe1"
    last = checksum(payload) if with_checksum else len(payload)
    return magic + struct.pack("<QQQ", of, step, last) + payload
