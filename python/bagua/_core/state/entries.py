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
from datetime import timedelta
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn, TypeAlias

import torch

from bagua._core.state.shards import local

Entry: TypeAlias = dict[str, Any]

#: Whose elements travel as they are, or as their bytes.
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


#: Made of whole numbers, or None: the class, and the arguments that make a value of it.
_MADE: dict[str, tuple[type, Callable[[Any], list[Any]]]] = {
    "range": (range, lambda value: [value.start, value.stop, value.step]),
    "slice": (slice, lambda value: [value.start, value.stop, value.step]),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds]),
}


def _is_short(number: Any) -> bool:
    return number is None or (type(number) is int and number.bit_length() <= _MOST_BITS)


class UnknownNameError(ValueError):
    """An entry has the name of a class or a function that the reader does not hold."""


def held(roots: Iterable[Any]) -> dict[str, Any]:
    """By name: classes and functions in values, and those that the user has allowed torch."""
    found, seen = allowed_by_user(), set()
    left = [(root, 0) for root in roots]
    while left:
        value, depth = left.pop()
        if id(value) in seen or depth > _MOST_DEPTH or isinstance(value, torch.Tensor):
            continue
        seen.add(id(value))
        own = value if _is_named(value) else type(value) if _is_own(value) else None
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
    if isinstance(value, torch.Tensor) or depth > _MOST_DEPTH:
        return False
    if _is_own(value) or _is_named(value):
        return _name_of(value if _is_named(value) else type(value)) not in trusted
    unread = (frozenset, torch.memory_format, range, slice, timedelta)
    if isinstance(value, unread) or _of_numpy(value):
        return True
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


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*value]
    return _fields_of(value) if _is_own(value) and not isinstance(value, Enum) else []


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
    return f"{value.__module__}.{value.__qualname__}"


def _of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # which torch does not need
    return numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray, numpy.dtype))


class Writer:
    """Describes values; ``tensors`` are those that the entries so far announce, in order."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

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
        raise TypeError(
            f"optimizer entry {where} is a {type(value).__name__}; only tensors, numbers, texts, "
            "None, dtypes, arrays of numpy, enums, ranges, slices, timedeltas, functions of "
            "modules, and lists, tuples, sets, "
            f"dicts and dataclasses of them can be sent or saved. {_REMEDY}"
        )

    def _key(self, key: Any, where: str) -> Entry:
        entry = self.entry(key, f"{where}: the key {key!r:.80}")
        if not _is_hashable(entry):
            raise TypeError(f"optimizer entry {where} has the key {key!r:.80}. {_REMEDY}")
        return entry

    def _tensor(self, value: torch.Tensor, where: str) -> Entry:
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
    for kind, (made, arguments) in _MADE.items():
        if type(value) is made:
            return {kind: arguments(value)} if all(map(_is_short, arguments(value))) else None
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
    others = {"tensor", "array", "list", "set", "dict", "bytearray", "fields", "slice"}
    return not others & entry.keys()


def _within(where: str, key: Any) -> str:
    return f"{where}[{key!r:.82}]"


# Reading.


def _plain(entry: Entry) -> Any:
    value = entry["value"]
    if value is not None and not isinstance(value, (int, float, str)):
        raise ValueError("is no plain value")
    return value


def _dtype_of_numpy(text: Any) -> Any:
    if not _NUMPY.fullmatch(text):
        raise ValueError("is of no dtype of numpy that is sent")
    import numpy

    return numpy.dtype(text)


def _scalar(entry: Entry) -> Any:
    dtype, data = _dtype_of_numpy(entry["scalar"]), bytes.fromhex(entry["hex"])
    if dtype.kind in "SU" or len(data) != dtype.itemsize:
        raise ValueError(f"is no {dtype} of {len(data)} bytes")
    import numpy

    return numpy.frombuffer(data, dtype)[0]


def _made(entry: Entry) -> Any:
    ((kind, arguments),) = entry.items()
    if not isinstance(arguments, list) or len(arguments) != 3 or not all(map(_is_short, arguments)):
        raise ValueError("is not made of three whole numbers")
    return _MADE[kind][0](*arguments)


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
    **dict.fromkeys(_MADE, _made),
}
_KINDS = {
    "tensor": {"tensor", "shape", "device"},
    "array": {"array", "shape", "bytes"},
    "scalar": {"scalar", "hex"},
    "member": {"own", "member"},
    "fields": {"own", "fields"},
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
            self.refuse(f"{where} is no tensor, value, list or tuple, nor another entry")
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
                why = str(error)[:80] if kind == "value" else f"is no {kind} ({str(error)[:80]})"
                self.refuse(f"{where} {why}")
        for inner, name in self._inside(kind, entry, where):
            self.check(inner, name, depth + 1)

    def _inside(self, kind: str, entry: Entry, where: str) -> Iterator[tuple[Any, str]]:
        content = entry.get(kind)
        if kind in _SEQUENCES or kind == "fields":
            if not isinstance(content, list):
                self.refuse(f"{where} is no list of entries")
            for item in content:
                yield item, where
                if kind.endswith("set") and not _is_hashable(item):
                    self.refuse(f"{where} is a {kind} of what cannot be in one")
        elif kind == "dict":
            pairs = content if isinstance(content, list) else [None]
            for pair in pairs:
                if not isinstance(pair, list) or len(pair) != 2:
                    self.refuse(f"{where} is no list of keys and entries")
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
            self.refuse(f"{where} is no array ({str(error)[:80]})")
        if not right:
            self.refuse(f"{where} is no array of shape {str(shape)[:80]}")

    def _check_own(self, kind: str, entry: Entry, where: str) -> None:
        name = entry["own"]
        self._found = self._names() if self._found is None else self._found
        if not isinstance(name, str) or name not in self._found:
            raise UnknownNameError(
                f"{where} needs {str(name)[:80]!r}, which this rank's own optimizer does not hold. "
                "Give the options of that optimizer a value of it before, or allow it on every "
                "rank by torch.serialization.add_safe_globals([...])."
            )
        own = self._found[name]
        if kind == "member":
            try:
                right = issubclass(own, Enum) and isinstance(_member(own, entry), own)
            except Exception as error:  # noqa: BLE001 - an enum's own code
                self.refuse(f"{where} has no member of {name[:80]} ({str(error)[:80]})")
        else:
            count = len(entry["fields"]) if isinstance(entry.get("fields"), list) else None
            right = count == (None if kind == "own" else _count_of(own))
        if not right:
            self.refuse(f"{where} is no {name[:80]}: the class of this rank is another one")

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
        assert self._found is not None
        own = self._found[entry["own"]]
        if kind == "own":
            return own
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
