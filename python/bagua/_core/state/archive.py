"""Archives of ``torch.save`` that another program may have written: checked, then read by torch.

``torch.load(weights_only=True)`` runs no code of the archive. But it unpacks compressed records,
and calls a few constructors with any arguments, which may allocate by a number of the archive.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from bagua._core.state.entries import allowed_by_user

_MOST_RECORDS = 2**20
#: A value that is used in several places counts in each of them.
_MOST_ITEMS, _DEEPEST = 2**22, 100
_NUMBER = {"BININT", "BININT1", "BININT2", "LONG1"}
_TEXT = {"BINUNICODE", "SHORT_BINSTRING"}
_ENCODE = "_codecs encode"
#: What a state consists of: its name, and what torch.save writes next. So no argument is a number
#: by which memory is allocated, and none is a value that another call has returned.
_NEXT: dict[str, set[str]] = {
    "__builtin__ bytearray": {_ENCODE, "EMPTY_TUPLE"},
    "__builtin__ complex": {"BINFLOAT"},
    "__builtin__ set": {"EMPTY_LIST"},
    _ENCODE: _TEXT,
    "collections Counter": {"EMPTY_DICT"},
    "collections OrderedDict": {"EMPTY_TUPLE"},
    "torch Size": {"EMPTY_TUPLE", "MARK", *_NUMBER},
    "torch device": _TEXT,
    "torch.serialization _get_layout": _TEXT,
    "torch._utils _rebuild_parameter": {
        *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
    },
    "torch._utils _rebuild_sparse_tensor": {"torch.serialization _get_layout"},
    "torch._utils _rebuild_tensor_v2": {"MARK"},
    "torch._utils _rebuild_tensor_v3": {"MARK"},
}
_STORAGE = re.compile(r"torch [A-Z][A-Za-z0-9]*Storage|torch.storage UntypedStorage")
_WITHOUT_CALLS = {
    *("PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT", "BINPERSID", "REDUCE"),
    *("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "TUPLE", "TUPLE1", "TUPLE2"),
    *("TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", *_NUMBER, *_TEXT),
}


def load_archive(data: bytes) -> Any:
    """The value that ``torch.save`` has written, on the CPU.

    Memory and time are bounded by the length of ``data``. Raises any Exception where it is not
    such an archive, or holds more than :mod:`torch.save` writes of plain data.
    """
    records = read_records(data)
    _check_program(records["data.pkl"])
    # An archive that was packed here means the same to torch as to the checks above.
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, record in records.items():
            archive.writestr(f"archive/{name}", record)
    packed.seek(0)
    value = torch.load(packed, map_location="cpu", weights_only=True)
    _check_extent(value)
    return value


def read_records(data: bytes) -> dict[str, bytes]:
    """The records of an archive by their names, such as ``data.pkl`` and ``data/0``."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        sizes = [entry.file_size for entry in entries]
        if len(entries) > _MOST_RECORDS or sum(sizes) > len(data):
            raise ValueError(f"its {len(entries)} records are longer than the archive")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("a record is compressed")
        records = {entry.filename.partition("/")[2]: archive.read(entry) for entry in entries}
    if len(records) != len(entries):
        raise ValueError("two records have one name")
    return records


def _check_program(program: bytes) -> None:
    """Refuse a pickle that calls functions other than those of :data:`_NEXT`, and those as there.

    Classes that the user allows by ``torch.serialization.add_safe_globals`` are trusted.
    """
    trusted = {*allowed_by_user()}
    memo: dict[Any, str] = {}
    last, allowed = "", None
    for operation, argument, _ in pickletools.genops(io.BytesIO(program)):
        kind = operation.name
        if kind in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = last
            continue
        if kind in ("BINGET", "LONG_BINGET"):
            kind = memo[argument]
            kind = kind if " " in kind or kind in _TEXT else "AGAIN"
        elif kind == "GLOBAL":
            kind = str(argument)
        elif kind not in _WITHOUT_CALLS and not (trusted and kind in ("NEWOBJ", "BUILD")):
            raise ValueError(f"its pickle has {kind}, which no state needs")
        if allowed is not None and kind not in allowed:
            raise ValueError(f"its pickle has {kind} behind {last}")
        last, allowed = kind, _allowed_after(kind, trusted)


def _allowed_after(kind: str, trusted: set[str]) -> set[str] | None:
    """What may come behind; None: anything."""
    if kind in _NEXT:
        return _NEXT[kind]
    if _STORAGE.fullmatch(kind):
        return _TEXT
    module, _, name = kind.partition(" ")
    dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    if name and not dtype and f"{module}.{name}" not in trusted:
        raise ValueError(
            f"its pickle names {module}.{name}, which is not plain data; a class of yours is "
            "allowed by torch.serialization.add_safe_globals"
        )
    return None


def _check_extent(value: Any) -> None:
    """Refuse values that are nested too deeply, or are endless where references are followed."""
    left, items = [(value, 0)], 0
    while left:
        value, depth = left.pop()
        inner: list[Any] = []
        if isinstance(value, Mapping):
            inner = [*value, *value.values()]
        elif isinstance(value, (list, tuple, set)):
            inner = [*value]
        elif isinstance(value, torch.Tensor):
            _check_elements(value)
        items += len(inner)
        if depth > _DEEPEST or items > _MOST_ITEMS:
            raise ValueError("its values are nested too deeply, or too many")
        left += [(each, depth + 1) for each in inner]


def _check_elements(value: torch.Tensor) -> None:
    """Refuse a tensor with more elements than it has memory."""
    if value.layout == torch.strided:
        parts = [value]
    elif value.layout == torch.sparse_coo:
        parts = [value._indices(), value._values()]
    else:
        parts = []
    for part in parts:
        if math.prod(part.shape) * part.element_size() > part.untyped_storage().nbytes():
            raise ValueError(f"a tensor of shape {tuple(part.shape)} has less memory")
