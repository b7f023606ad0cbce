"""Files of a mailbox: what they hold, and how a reader trusts them.

Note [Letters]
A file is a head (magic, version, kind, how it is sealed, lengths), a seal over all the rest, fields
as JSON, and a body of raw bytes: docs/wire-format.md. A reader knows beforehand how long fields and
body may be, and compares lengths before it allocates. What differs in any way from the format is
``Damaged``. With a secret the seal is an HMAC, and run, round and island are fields, so that a file
of another run, round or island is refused like a forged one.

A contribution or an anchor of an island of shards has no body: its fields have the seals of the
files that hold the shards, in order. It is written when those are there.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bagua._core.state.entries import PLAIN_DTYPES
from bagua._core.state.step_folder import Damaged, refusing

_HEAD = struct.Struct("<8sHBBIQ")
_MAGIC, _VERSION = b"BAGUAbox", 1
_SEAL_BYTES = 32
_DIGEST, _HMAC = 0, 1
_ALIGNED = 64  # of the body, for tensors in it
FIXED_BYTES = _HEAD.size + _SEAL_BYTES

RUN, CONTRIBUTION, MANIFEST, ANCHOR, CLAIM, SHARD, ANCHOR_SHARD = range(1, 8)

#: Islands in a round at most: a table of them has a bound.
MOST_ISLANDS = 256
#: Ranks of an island of shards at most: their seals are in the fields of one file.
MOST_SHARDS = 512
MOST_ROUNDS = 10**9 - 1
MOST_FIELDS = 256 * (MOST_ISLANDS + 1)  # bytes of JSON
_ISLAND = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{16,64}", re.ASCII)
_MOST_WEIGHT = 2.0**63


@dataclass(frozen=True)
class Letter:
    """A file that has been checked. ``seal``: names its content."""

    fields: dict[str, Any]
    body: memoryview
    seal: str


def written(kind: int, fields: Mapping[str, Any], body: int, secret: bytes | None) -> bytearray:
    """A file whose body of so many bytes is zero, until :func:`sealed`."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-(FIXED_BYTES + len(text)) % _ALIGNED)
    sealing = _DIGEST if secret is None else _HMAC
    head = _HEAD.pack(_MAGIC, _VERSION, kind, sealing, len(text), body)
    data = bytearray(FIXED_BYTES + len(text) + body)
    data[: _HEAD.size] = head
    data[FIXED_BYTES : FIXED_BYTES + len(text)] = text
    return data


def body_of(data: bytearray) -> memoryview:
    """The body of a file that was just written."""
    *_, text, _ = _HEAD.unpack_from(data)
    return memoryview(data)[FIXED_BYTES + text :]


def sealed(data: bytearray, secret: bytes | None) -> str:
    """Seal a file whose body is written; the seal."""
    seal = _seal(data, secret)
    data[_HEAD.size : FIXED_BYTES] = seal
    return seal.hex()


def _seal(data: bytearray, secret: bytes | None) -> bytes:
    mac = hashlib.sha256() if secret is None else hmac.new(secret, digestmod="sha256")
    mac.update(memoryview(data)[: _HEAD.size])
    mac.update(memoryview(data)[FIXED_BYTES:])
    return mac.digest()


def opened(name: str, data: bytearray, kind: int, most_body: int, secret: bytes | None) -> Letter:
    """Check a file of a kind; Damaged names it. Runs nothing that it holds."""
    path = Path(name)
    if len(data) < FIXED_BYTES:
        raise Damaged(path, f"truncated: it has {len(data)} bytes")
    magic, version, found, sealing, text, body = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise Damaged(path, "it is not a file of a mailbox")
    if version != _VERSION or found != kind:
        raise Damaged(path, f"it is of version {version} and kind {found}, not 1 and {kind}")
    if text > MOST_FIELDS + most_body or body > most_body:
        raise Damaged(path, f"it claims {text} + {body} bytes, of {most_body} at most")
    if len(data) != FIXED_BYTES + text + body:
        raise Damaged(path, f"truncated or longer: {len(data)} bytes for {text} + {body}")
    if sealing != (_DIGEST if secret is None else _HMAC):
        raise Damaged(path, _OTHER_SEAL[secret is None])
    seal = _seal(data, secret)
    if not hmac.compare_digest(seal, bytes(data[_HEAD.size : FIXED_BYTES])):
        raise Damaged(path, "its seal differs: it was changed, or sealed with another secret")
    with refusing(path):
        fields = json.loads(bytes(data[FIXED_BYTES : FIXED_BYTES + text]))
        if type(fields) is not dict:
            raise ValueError("fields are not a table")
    return Letter(fields, memoryview(data)[FIXED_BYTES + text :], seal.hex())


_OTHER_SEAL = {
    True: "it is sealed with a secret, and this island has none: give secret=",
    False: "it is sealed without a secret, as everybody could",
}


def is_island(name: Any) -> bool:
    return type(name) is str and _ISLAND.fullmatch(name) is not None


def is_hex(text: Any) -> bool:
    return type(text) is str and _HEX.fullmatch(text) is not None


def seals_of(name: str, value: Any) -> tuple[str, ...]:
    """The seals of shards in order, of a field."""
    with refusing(Path(name)):
        if not (
            type(value) is list
            and len(value) <= MOST_SHARDS
            and all(is_hex(each) and len(each) == 2 * _SEAL_BYTES for each in value)
        ):
            raise ValueError("the shards are out of their range")
        return tuple(value)


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST_WEIGHT


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


@dataclass(frozen=True)
class Counted:
    """A contribution in a manifest: its island, the seal of its file, its weight in the mean."""

    island: str
    seal: str
    weight: float

    @property
    def name(self) -> str:
        """The name of its file, in the round's folder."""
        return f"from-{self.island}-{self.seal[:16]}"


@dataclass(frozen=True)
class Contribution:
    """Fields of a contribution.

    ``anchor``: a digest of what its pseudo-gradients are against. ``shards``: the seals of the
    shards' files, where there are several.
    """

    run: str
    island: str
    round: int
    part: int
    anchor: str
    weight: float
    shards: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        own = dict(vars(self))
        return own if self.shards else {key: own[key] for key in own if key != "shards"}

    def shard_name(self, shard: int) -> str:
        """The name of the file of a shard, in the round's folder."""
        return f"shard-{shard}-{self.island}-{self.shards[shard][:16]}"

    @staticmethod
    def of(name: str, fields: Mapping[str, Any]) -> Contribution:
        with refusing(Path(name)):
            shards = seals_of(name, fields.get("shards", []))
            read = Contribution(**{**fields, "shards": shards})
            if not (
                is_hex(read.run)
                and is_island(read.island)
                and is_hex(read.anchor)
                and _is_count(read.round, MOST_ROUNDS)
                and _is_count(read.part, MOST_ROUNDS)
                and _is_weight(read.weight)
            ):
                raise ValueError("a field is out of its range")
            return read


@dataclass(frozen=True)
class Manifest:
    """The islands that count in a round, in the order in which contributions are added."""

    run: str
    round: int
    part: int
    anchor: str
    author: str
    counted: list[Counted]

    def fields(self) -> dict[str, Any]:
        counted = [[each.island, each.seal, each.weight] for each in self.counted]
        return {**vars(self), "counted": counted}

    @staticmethod
    def of(name: str, fields: Mapping[str, Any]) -> Manifest:
        with refusing(Path(name)):
            rows = fields["counted"]
            if type(rows) is not list or not 0 < len(rows) <= MOST_ISLANDS:
                raise ValueError("the number of islands is out of range")
            counted = [Counted(*row) for row in rows]
            read = Manifest(**{**fields, "counted": counted})
            islands = [each.island for each in counted]
            if not (
                is_hex(read.run)
                and _is_count(read.round, MOST_ROUNDS)
                and _is_count(read.part, MOST_ROUNDS)
                and is_hex(read.anchor)
                and is_island(read.author)
                and all(is_island(island) for island in islands)
                and islands == sorted(set(islands))
                and all(is_hex(e.seal) and _is_weight(e.weight) for e in counted)
                and any(each.weight for each in counted)
            ):
                raise ValueError("a field is out of its range")
            return read


def last_rounds(name: str, rows: Any) -> dict[str, int]:
    """The last round in which each of some islands counted, of an anchor's field."""
    with refusing(Path(name)):
        found = {island: number for island, number in rows}
        if not (
            type(rows) is list
            and len(found) == len(rows) <= MOST_ISLANDS
            and all(is_island(each) and _is_count(found[each], MOST_ROUNDS) for each in found)
        ):
            raise ValueError("the islands that counted are out of their range")
        return found


def table_of(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, int]:
    """A table of tensors by name, and the bytes that :func:`pack` needs for their elements."""
    rows = [[name, _DTYPES[each.dtype], list(each.shape)] for name, each in tensors.items()]
    return json.dumps(rows).encode(), sum(tensor.nbytes for tensor in tensors.values())


def pack(tensors: Mapping[str, torch.Tensor], body: memoryview) -> None:
    """Write the elements of tensors, one after the other."""
    begin = 0
    for tensor in tensors.values():
        put(tensor, body[begin : begin + tensor.nbytes])
        begin += tensor.nbytes


def put(tensor: torch.Tensor, place: memoryview) -> None:
    """Write the elements of a tensor, of as many bytes as ``place`` has."""
    if tensor.numel():
        flat = tensor.detach().reshape(-1).contiguous()
        torch.frombuffer(place, dtype=torch.uint8).copy_(flat.view(torch.uint8))


def unpacked(name: str, table: Any, body: memoryview) -> dict[str, torch.Tensor]:
    """Tensors by name; Damaged where the first ``table`` bytes do not describe the others."""
    tensors, begin = dict[str, torch.Tensor](), 0
    with refusing(Path(name)):
        if not _is_count(table, len(body)):
            raise ValueError("the table ends behind the file")
        rows, body = json.loads(bytes(body[:table])), body[table:]
        for key, dtype, shape in rows:
            if type(key) is not str or key in tensors or len(shape) > 64:
                raise ValueError("two tensors have one name, or one has no shape")
            if not all(_is_count(size, 2**48) for size in shape):
                raise ValueError("a shape is out of its range")
            numel, like = math.prod(shape), _NAMES[dtype]
            if numel * like.itemsize > len(body) - begin:
                raise ValueError("a tensor ends behind the file")
            end = begin + numel * like.itemsize
            flat = torch.empty(numel, dtype=like, device="cpu")
            if numel:
                own = torch.frombuffer(body[begin:end], dtype=torch.uint8)
                flat.view(torch.uint8).copy_(own)
            tensors[key], begin = flat.view(shape), end
        if begin != len(body):
            raise ValueError("bytes are left")
    return tensors


_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in PLAIN_DTYPES}
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}
