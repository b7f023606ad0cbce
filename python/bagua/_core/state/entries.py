"""Values of options and of state as entries: JSON that names nothing to import, and tensors.

docs/wire-format.md, "Optimizer state", lists them. Classes and functions travel by their names,
which a reader looks up among those that it holds itself (:func:`held`). Entries are checked before
any value is made.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn, TypeAlias

import torch

from bagua._core.state.reduced import (
    Reduced,
    makes_keys,
    name_of,
    rebuilt,
    reduced,
    standard,
)
from bagua._core.state.shards import is_sharded, local

Entry: TypeAlias = dict[str, Any]

#: Whose elements travel unchanged, or as their bytes.
PLAIN_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *PLAIN_DTYPES,
        *(torch.uint16, torch.uint32, torch.uint64),
        *(each for name, each in vars(torch).items() if re.match(r"float8_", name)),
    )
}
_MOST_DEPTH = 16
_PARTS = "arguments", "state", "items", "pairs"  # of a value that pickling makes
_MOST_BITS = 4096  # of an integer: JSON reads no longer ones
_OF_TORCH = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, (torch.dtype, torch.layout, torch.memory_format))
}
_SEQUENCES: dict[str, type] = {each.__name__: each for each in (list, tuple, set, frozenset)}
_NUMPY = re.compile(r"[<>|][biufcmMSU]\d{1,9}(\[\d{0,9}[A-Za-z]{1,2}\])?", re.ASCII)
_REMEDY = (
    "Wrap before the optimizer has state, leave this optimizer out of bagua.wrap, or keep "
    "the value in an attribute of the optimizer, which each rank sets itself."
)


#: Classes whose values have other kinds of entries, as have those of numpy and of :func:`_is_own`.
_WITH_ENTRIES = (
    *(type(None), bool, int, float, str, complex, bytes, bytearray, *_SEQUENCES.values(), dict),
    *(torch.Tensor, torch.device, torch.dtype, torch.layout, torch.memory_format),
)


class UnknownNameError(ValueError):
    """An entry has the name of a class or a function that the reader does not hold."""


def held(roots: Iterable[Any]) -> dict[str, Any]:
    """By name: classes and functions in values, and those that the user has allowed torch."""
    found, seen = allowed_by_user(), dict[int, Any]()  # which keeps what _inside() makes alive
    left = [(root, 0) for root in roots]
    while left:
        value, depth = left.pop()
        if id(value) in seen or depth > _MOST_DEPTH or isinstance(value, torch.Tensor):
            continue
        seen[id(value)] = value
        own = value if _is_named(value) else type(value) if _is_own(value) else None
        if (other := _reduced(value)) is not None:
            own = other.made
        if own is not None:
            found[_name_of(own)] = own
        left += [(each, depth + 1) for each in _inside(value)]
    return found


def allowed_by_user() -> dict[str, Any]:
    """By name: what :func:`torch.serialization.add_safe_globals` was given."""
    given = torch.serialization.get_safe_globals()
    pairs = (each if isinstance(each, tuple) else (each, _name_of(each)) for each in given)
    return {str(name): each for each, name in pairs}


def beyond_archives(value: Any, trusted: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether a value holds what ``torch.load(weights_only=True)`` does not read, but entries do.

    ``trusted``: classes of :func:`allowed_by_user`, of which torch writes the values.
    """
    if isinstance(value, torch.Tensor):
        return _holds_tensors(value)
    if depth > _MOST_DEPTH:
        return False
    if _is_own(value) or _is_named(value):
        return _name_of(value if _is_named(value) else type(value)) not in trusted
    if isinstance(value, (frozenset, torch.memory_format)) or _of_numpy(value):
        return True
    if (other := _reduced(value)) is not None:
        return _name_of(other.made) not in trusted
    return any(beyond_archives(each, trusted, depth + 1) for each in _inside(value))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, also inside of lists, dicts and dataclasses."""
    found, left = [], [(value, 0)]
    while left:
        value, depth = left.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif depth <= _MOST_DEPTH:
            left += [(each, depth + 1) for each in _inside(value)]
    return found


def _holds_tensors(value: Any) -> bool:
    """Whether a tensor has no memory itself but keeps other tensors, such as codes and scales."""
    return hasattr(type(value), "__tensor_flatten__") and not is_sharded(value)


def _inside(value: Any) -> list[Any]:
    if (other := _reduced(value)) is not None:
        return other.parts()
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*value]
    return _fields_of(value) if _is_own(value) and not isinstance(value, Enum) else []


def _reduced(value: Any) -> Reduced | None:
    """How pickling makes a value that has no entry of another kind."""
    of_torch = isinstance(value, (torch.nn.Module, torch.optim.Optimizer))
    if of_torch or isinstance(value, _WITH_ENTRIES) or _is_own(value):
        return None
    return (
        None if isinstance(value, type) or _is_named(value) or _of_numpy(value) else reduced(value)
    )


def _fields_of(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [*value]
    return [getattr(value, each.name, None) for each in dataclasses.fields(value)]


def _is_own(value: Any) -> bool:
    """Whether the value is of a class that a program has made: an enum, dataclass or namedtuple."""
    if isinstance(value, type):
        return False
    named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    return isinstance(value, Enum) or dataclasses.is_dataclass(value) or named_tuple


def _is_named(value: Any) -> bool:
    """Whether pickling would write a name only: of a class, or of a function of a module."""
    if not isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return False
    return isinstance(value.__module__, str) and "<" not in value.__qualname__


def _name_of(value: Any) -> str:
    if isinstance(value, type):
        return name_of(value)
    return f"{value.__module__}.{value.__qualname__}"


def _of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # which torch does not need
    return numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray, numpy.dtype))


class Writer:
    """Describes values; ``tensors`` are those that the entries so far announce, in order."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._around: set[int] = set()  # ids of the values that the one under way is in

    def entry(self, value: Any, where: str, depth: int = 0) -> Entry:
        """TypeError, which names ``where``, for what is not sent."""
        if depth > _MOST_DEPTH:
            raise TypeError(f"{where} is nested deeper than {_MOST_DEPTH} levels. {_REMEDY}")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if _is_own(value):
            return self._own(value, where, depth)
        made = self._of_numpy(value, where) if _of_numpy(value) else _leaf_of(value)
        if made is not None:
            return made
        if isinstance(value, dict):
            pairs = [
                [self._key(k, where), self.entry(v, _within(where, k), depth + 1)]
                for k, v in value.items()
            ]
            return {"dict": pairs}
        for kind, each in _SEQUENCES.items():
            if isinstance(value, (list, tuple, set, frozenset)) and isinstance(value, each):
                if kind.endswith("set"):  # whose order differs between processes
                    return {kind: sorted((self._key(item, where) for item in value), key=str)}
                return {kind: [self.entry(item, where, depth + 1) for item in value]}
        if (other := _reduced(value)) is not None and id(value) not in self._around:
            return self._made(value, other, where, depth)
        raise TypeError(
            f"optimizer entry {where} is a {type(value).__name__}; only what pickling makes by a "
            "call of a class that a module holds, and that does not hold itself, can be sent or "
            f"saved. {_REMEDY}"
        )

    def _made(self, value: Any, other: Reduced, where: str, depth: int) -> Entry:
        if not _is_named(other.made):
            raise TypeError(f"optimizer entry {where} is of a class inside a function. {_REMEDY}")
        if tensors_in(other.arguments):
            raise TypeError(
                f"optimizer entry {where} is a {type(value).__name__}, which pickling calls with "
                f"tensors. {_REMEDY}"
            )
        self._around.add(id(value))
        parts = other.arguments, other.state, other.items, other.pairs
        entries = [self.entry(each, where, depth + 1) for each in parts]
        self._around.remove(id(value))
        own = {"own": _name_of(other.made), "new": other.new}
        return own | dict(zip(_PARTS, entries, strict=True))

    def _key(self, key: Any, where: str) -> Entry:
        entry = self.entry(key, f"{where}: the key {key!r:.80}")
        if not _is_hashable(entry):
            raise TypeError(f"optimizer entry {where} has the key {key!r:.80}. {_REMEDY}")
        return entry

    def _tensor(self, value: torch.Tensor, where: str) -> Entry:
        if _holds_tensors(value):
            raise TypeError(
                f"optimizer entry {where} is a {type(value).__name__}, a tensor that holds others, "
                f"which cannot be sent or saved. {_REMEDY}"
            )
        dtype, mine = str(value.dtype).removeprefix("torch."), local(value)
        if dtype not in DTYPES or mine.layout != torch.strided or mine.is_meta:
            raise TypeError(
                f"optimizer entry {where} is a tensor of {value.dtype} and {mine.layout} on "
                f"{mine.device}, which cannot be sent or saved. {_REMEDY}"
            )
        self.tensors.append(mine)
        return {"tensor": dtype, "shape": list(mine.shape), "device": value.device.type}

    def _own(self, value: Any, where: str, depth: int) -> Entry:
        name = _name_of(type(value))
        if isinstance(value, Enum):
            if value.name in type(value).__members__:
                return {"own": name, "member": value.name}
            return {"own": name, "member": int(value.value)}  # several flags
        fields = _fields_of(value)
        return {"own": name, "fields": [self.entry(each, where, depth + 1) for each in fields]}

    def _of_numpy(self, value: Any, where: str) -> Entry | None:
        numpy = sys.modules["numpy"]
        dtype = value if isinstance(value, numpy.dtype) else value.dtype
        if isinstance(value, (str, bytes)):
            return _leaf_of(value)
        if not _NUMPY.fullmatch(dtype.str):
            raise TypeError(f"optimizer entry {where} is of numpy's dtype {dtype}. {_REMEDY}")
        if dtype is value:
            return {"dtype": dtype.str}
        if isinstance(value, numpy.generic):
            return {"scalar": dtype.str, "hex": value.tobytes().hex()}
        data = bytearray(value.tobytes())
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        shape = list(value.shape)
        return {"array": dtype.str, "shape": shape, "bytes": self._tensor(flat.cpu(), where)}


def _leaf_of(value: Any) -> Entry | None:
    """The entry of a value that holds no others; None: it is something else."""
    if value is None or isinstance(value, bool):
        return {"value": value}
    if isinstance(value, int):
        return {"value": int(value)} if value.bit_length() <= _MOST_BITS else None
    if isinstance(value, (float, str)):
        return {"value": float(value) if isinstance(value, float) else str.__str__(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    return {"own": _name_of(value)} if _is_named(value) else None


def _is_hashable(entry: Entry) -> bool:
    for kind in ("tuple", "frozenset"):
        if kind in entry:
            return all(map(_is_hashable, entry[kind]))
    if "new" in entry:
        return makes_keys(entry["own"])
    others = {"tensor", "array", "list", "set", "dict", "bytearray", "fields"}
    return not others & entry.keys()


def _has_tensors(entry: Any) -> bool:
    if isinstance(entry, dict):
        return "tensor" in entry or any(map(_has_tensors, entry.values()))
    return isinstance(entry, list) and any(map(_has_tensors, entry))


def _within(where: str, key: Any) -> str:
    return f"{where}[{key!r:.82}]"


# Reading.


def _plain(entry: Entry) -> Any:
    value = entry["value"]
    if value is not None and not isinstance(value, (int, float, str)):
        raise ValueError("is not a plain value")
    return value


def _dtype_of_numpy(text: Any) -> Any:
    if not _NUMPY.fullmatch(text):
        raise ValueError("is of no dtype of numpy that is sent")
    import numpy

    return numpy.dtype(text)


def _scalar(entry: Entry) -> Any:
    dtype, data = _dtype_of_numpy(entry["scalar"]), bytes.fromhex(entry["hex"])
    if dtype.kind in "SU" or len(data) != dtype.itemsize:
        raise ValueError(f"is not a {dtype} of {len(data)} bytes")
    import numpy

    return numpy.frombuffer(data, dtype)[0]


#: Of the entries that hold no others, by their kinds; any Exception where they are wrong.
_LEAVES: dict[str, Callable[[Entry], Any]] = {
    "value": _plain,
    "complex": lambda entry: complex(*entry["complex"]),
    "bytes": lambda entry: bytes.fromhex(entry["bytes"]),
    "bytearray": lambda entry: bytearray.fromhex(entry["bytearray"]),
    "size": lambda entry: torch.Size(entry["size"]),
    "torch": lambda entry: _OF_TORCH[entry["torch"]],
    "device": lambda entry: torch.device(entry["device"]),
    "dtype": lambda entry: _dtype_of_numpy(entry["dtype"]),
    "scalar": _scalar,
}
_KINDS = {
    "tensor": {"tensor", "shape", "device"},
    "array": {"array", "shape", "bytes"},
    "scalar": {"scalar", "hex"},
    "member": {"own", "member"},
    "fields": {"own", "fields"},
    "new": {"own", "new", *_PARTS},
    **{kind: {kind} for kind in (*_SEQUENCES, "dict", "own")},
    **{kind: {kind} for kind in _LEAVES.keys() - {"scalar"}},
}


class Reader:
    """Checks entries, and makes the values of those that it has checked.

    Args:
        names: returns what :func:`held` has found; called where an entry has a name.
        devices: this rank's, by type.
    """

    def __init__(
        self, names: Callable[[], Mapping[str, Any]], devices: Mapping[str, torch.device]
    ) -> None:
        self._names = names
        self._found: Mapping[str, Any] | None = None
        self.devices = dict(devices)

    def refuse(self, why: str) -> NoReturn:
        raise ValueError(why)

    def check_tensor(self, entry: Entry, where: str) -> None:
        """Refuse what :meth:`tensor` could not make."""
        raise NotImplementedError

    def tensor(self, entry: Entry, old: Any) -> torch.Tensor:
        """The tensor of an entry: the next one; ``old``: the value in its place."""
        raise NotImplementedError

    def check(self, entry: Any, where: str, depth: int = 0) -> None:
        kind = _kind_of(entry)
        if kind is None:
            self.refuse(f"{where} is not a tensor, value, list or tuple, nor another entry")
        if depth > _MOST_DEPTH:
            self.refuse(f"{where} is nested deeper than {_MOST_DEPTH} levels")
        if kind == "tensor":
            self.check_tensor(entry, where)
        elif kind == "array":
            self._check_array(entry, where, depth)
        elif "own" in entry:
            self._check_own(kind, entry, where)
        elif kind in _LEAVES:
            try:
                _LEAVES[kind](entry)
            except Exception as error:  # noqa: BLE001 - what torch and numpy refuse, and how
                text = str(error)[:80]
                why = text if kind == "value" else f"is not a valid {kind} ({text})"
                self.refuse(f"{where} {why}")
        for inner, name in self._inside(kind, entry, where):
            self.check(inner, name, depth + 1)
        if kind == "new":
            self._check_made(entry, where)

    def _inside(self, kind: str, entry: Entry, where: str) -> Iterator[tuple[Any, str]]:
        content = entry.get(kind)
        if kind in _SEQUENCES or kind == "fields":
            if not isinstance(content, list):
                self.refuse(f"{where} is not a list of entries")
            for item in content:
                yield item, where
                if kind.endswith("set") and not _is_hashable(item):
                    self.refuse(f"{where} is a {kind} of what cannot be in one")
        elif kind == "new":
            for part in _PARTS:
                yield entry[part], where
        elif kind == "dict":
            pairs = content if isinstance(content, list) else [None]
            for pair in pairs:
                if not isinstance(pair, list) or len(pair) != 2:
                    self.refuse(f"{where} is not a list of keys and entries")
                yield pair[0], f"{where}: a key"
                if not _is_hashable(pair[0]):
                    self.refuse(f"{where} has a key that cannot be one: {str(pair[0])[:80]}")
                yield pair[1], _within(where, pair[0].get("value", "..."))

    def _check_array(self, entry: Entry, where: str, depth: int) -> None:
        self.check(entry["bytes"], where, depth + 1)
        shape, data = entry["shape"], entry["bytes"]
        try:
            item = _dtype_of_numpy(entry["array"]).itemsize
            right = all(type(n) is int and n >= 0 for n in shape) and item > 0
            right = right and isinstance(shape, list) and len(shape) <= 32
            right = right and math.prod(max(n, 1) for n in shape) * item < 2**62
            right = right and data["shape"] == [item * math.prod(shape)]
            right = right and data["tensor"] == "uint8" and data["device"] == "cpu"
        except Exception as error:  # noqa: BLE001 - as above
            self.refuse(f"{where} is not an array ({str(error)[:80]})")
        if not right:
            self.refuse(f"{where} is not an array of shape {str(shape)[:80]}")

    def _check_own(self, kind: str, entry: Entry, where: str) -> None:
        name = entry["own"]
        own = self._named(name) if isinstance(name, str) else None
        if own is None:
            raise UnknownNameError(
                f"{where} needs {str(name)[:80]!r}, which this rank's own optimizer does not hold. "
                "Give the options of that optimizer a value of it before, or allow it on every "
                "rank by torch.serialization.add_safe_globals([...])."
            )
        if kind == "new":
            kinds = [_kind_of(entry[part]) for part in _PARTS]
            right = kinds[:1] + kinds[2:] == ["tuple", "list", "dict"]
            right = right and isinstance(own, type) and isinstance(entry["new"], bool)
            right = right and not _has_tensors(entry["arguments"])
        elif kind == "member":
            try:
                right = issubclass(own, Enum) and isinstance(_member(own, entry), own)
            except Exception as error:  # noqa: BLE001 - an enum's own code
                self.refuse(f"{where} has no member of {name[:80]} ({str(error)[:80]})")
        else:
            count = len(entry["fields"]) if isinstance(entry.get("fields"), list) else None
            right = count == (None if kind == "own" else _count_of(own))
        if not right:
            self.refuse(f"{where} is not a {name[:80]}: the class of this rank is another one")

    def _named(self, name: str) -> Any:
        """The class or function of that name; None: this rank holds none."""
        if (known := standard(name)) is not None:
            return known
        if self._found is None:
            self._found = self._names()
        return self._found.get(name)

    def _check_made(self, entry: Entry, where: str) -> None:
        """Make the value, or as much of it as has no tensors, which are still to come."""
        parts = _PARTS[:1] if _has_tensors(entry) else _PARTS
        try:
            made = self._make(entry, parts)
            if _is_hashable(entry):
                hash(made)  # some values of such classes have none, as Decimal("sNaN")
        except Exception as error:  # noqa: BLE001 - a class's own code
            self.refuse(f"{where} is not a {entry['own'][:80]} ({str(error)[:80]})")

    def _make(self, entry: Entry, parts: Iterable[str] = _PARTS) -> Any:
        values: dict[str, Any] = {"state": None, "items": [], "pairs": {}}
        values |= {part: self.value(entry[part]) for part in parts}
        return rebuilt(Reduced(self._named(entry["own"]), entry["new"], **values))

    def value(self, entry: Entry, old: Any = None) -> Any:
        """The value of a checked entry; ``old``: the value in its place, whose memory is kept."""
        kind = _kind_of(entry)
        if kind == "tensor":
            return self.tensor(entry, old)
        if kind == "array":
            import numpy

            data = self.tensor(entry["bytes"], None).numpy()
            return numpy.ndarray(entry["shape"], numpy.dtype(entry["array"]), buffer=data)
        if kind == "device":
            return self.devices.get(entry["device"], _LEAVES[kind](entry))
        if "own" in entry:
            return self._own(kind, entry)
        if kind == "dict":
            made = copy.copy(old) if isinstance(old, dict) else {}
            made.clear()
            self.fill(made, entry, old if isinstance(old, dict) else {})
            return made
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([self.value(item) for item in entry[kind]])
        return _LEAVES[str(kind)](entry)

    def fill(self, target: dict[Any, Any], entry: Entry, old: Mapping[Any, Any]) -> None:
        """Put the values of a ``dict`` into ``target``; ``old``: those in their places."""
        for key_entry, value in entry["dict"]:
            key = self.value(key_entry)
            target[key] = self.value(value, old.get(key))

    def _own(self, kind: str | None, entry: Entry) -> Any:
        own = self._named(entry["own"])
        if kind == "own":
            return own
        if kind == "new":
            return self._make(entry)
        if kind == "member":
            return _member(own, entry)
        items = [self.value(item) for item in entry["fields"]]
        if issubclass(own, tuple):
            return tuple.__new__(own, items)
        made = object.__new__(own)
        for field, item in zip(dataclasses.fields(own), items, strict=True):
            object.__setattr__(made, field.name, item)
        return made


def _member(own: Any, entry: Entry) -> Any:
    member = entry["member"]
    return own[member] if isinstance(member, str) else own(member)


def _count_of(own: Any) -> int | None:
    """How many fields the values of a class have; None: they have none."""
    if not isinstance(own, type):
        return None
    if issubclass(own, Enum):
        return -1
    if issubclass(own, tuple):
        return len(getattr(own, "_fields", ()))
    return len(dataclasses.fields(own)) if dataclasses.is_dataclass(own) else -1


def _kind_of(entry: Any) -> str | None:
    if not isinstance(entry, dict):
        return None
    return next((kind for kind, keys in _KINDS.items() if entry.keys() == keys), None)


class Kept(Reader):
    """Reads entries whose tensors came with them."""

    def __init__(self, tensors: list[torch.Tensor], names: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(names, {})
        self._unchecked, self._left = iter(tensors), iter(tensors)

    def check_tensor(self, entry: Entry, where: str) -> None:
        tensor = next(self._unchecked, None)
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            self.refuse(f"{where} has no tensor")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if [dtype, list(tensor.shape)] != [entry["tensor"], entry["shape"]]:
            self.refuse(f"{where} is not the tensor that came with it")

    def tensor(self, entry: Entry, old: Any) -> torch.Tensor:
        return next(self._left)


def described(value: Any, where: str) -> tuple[Entry, list[torch.Tensor]]:
    """A value as an entry and its tensors, which :func:`undescribed` takes back."""
    writer = Writer()
    return writer.entry(value, where), writer.tensors


def undescribed(
    entry: Any, tensors: list[torch.Tensor], where: str, names: Callable[[], Mapping[str, Any]]
) -> Any:
    """ValueError where they are not of :func:`described`, UnknownNameError for other classes."""
    reader = Kept(tensors, names)
    reader.check(entry, where)
    return reader.value(entry)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A value of a state that torch's optimizers would take apart, or read as letters."""

    value: Any


def load_state(owner: Any, state: Any) -> None:
    """``owner.load_state_dict(state)``; an optimizer gets the values of its state to the letter.

    torch makes each value that can be iterated anew of its items, also texts, bytes and arrays.
    """
    if isinstance(owner, torch.optim.Optimizer) and isinstance(state, Mapping) and "state" in state:
        owner.load_state_dict({**state, "state": boxed(state["state"])})
        unboxed(owner.state)
    else:
        owner.load_state_dict(state)


def boxed(value: Any) -> Any:
    """A value that torch's ``load_state_dict`` gives back to the letter, for :func:`unboxed`."""
    if isinstance(value, (torch.Tensor, _Whole)) or not isinstance(value, Iterable):
        return value
    if isinstance(value, Mapping):
        return {key: boxed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(boxed, value))
    return _Whole(value)


def unboxed(value: Any) -> Any:
    """What was given to :func:`boxed`; dicts are changed in place."""
    if isinstance(value, _Whole):
        return value.value
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = unboxed(item)
        return value
    return type(value)(map(unboxed, value)) if type(value) in (list, tuple) else value
