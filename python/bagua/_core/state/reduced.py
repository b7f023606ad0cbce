"""Values of any class that pickling knows: what it would call, and with what.

Only classes are called (``cls(*arguments)``, ``cls.__new__(cls, *arguments)``), no functions.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

#: Classes of Python's library whose values every reader makes; none takes long by any arguments.
_STANDARD = {
    *("builtins.range", "builtins.slice", "collections.deque", "decimal.Decimal"),
    *("datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta"),
    *("datetime.timezone", "pathlib.PurePosixPath", "pathlib.PosixPath", "types.SimpleNamespace"),
    *("pathlib.PureWindowsPath", "uuid.UUID"),
}
#: Standard classes whose values cannot be keys.
_UNHASHABLE = {"builtins.slice", "collections.deque", "types.SimpleNamespace"}

#: The function by which pickling says that a class's ``__new__`` makes a value.
_BY_NEW = object().__reduce_ex__(2)[0]


class Reduced(NamedTuple):
    """As the protocol of pickling has it; ``new``: by the class's ``__new__``, not by a call."""

    made: type
    new: bool
    arguments: tuple[Any, ...]
    state: Any
    items: list[Any]
    pairs: dict[Any, Any]

    def parts(self) -> list[Any]:
        """The values that this one is made of."""
        return [*self.arguments, self.state, *self.items, self.pairs]


def reduced(value: Any) -> Reduced | None:
    """None where pickling does not know the value, or would call a function."""
    try:
        call, arguments, state, items, pairs = (*value.__reduce_ex__(2), None, None, None)[:5]
        new = call is _BY_NEW
        made, *arguments = (call, *arguments)[new:]
        if isinstance(made, type):
            return Reduced(made, new, tuple(arguments), state, [*(items or ())], dict(pairs or ()))
    except Exception:  # noqa: BLE001 - a class's own code, and texts for names
        pass
    return None


def standard(name: str) -> type | None:
    """A class of Python's own library that every reader knows."""
    if name not in _STANDARD:
        return None
    module, _, own = name.rpartition(".")
    found: type = getattr(importlib.import_module(module), own)
    return found


def name_of(made: type) -> str:
    """Module and name; those of a standard class are the same in every version of Python."""
    name = f"{made.__module__.partition('.')[0]}.{made.__qualname__}"
    return name if standard(name) is made else f"{made.__module__}.{made.__qualname__}"


def makes_keys(name: Any) -> bool:
    return isinstance(name, str) and name in _STANDARD - _UNHASHABLE


def rebuilt(reduced: Reduced) -> Any:
    """The value; any Exception where its class refuses it."""
    made, new, arguments, state, items, pairs = reduced
    value: Any = made.__new__(made, *arguments) if new else made(*arguments)
    if state is not None and hasattr(value, "__setstate__"):
        value.__setstate__(state)
    elif state is not None:
        plain, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        vars(value).update(plain or {})
        for name, item in (slots or {}).items():
            setattr(value, name, item)
    for item in items:
        value.append(item)
    for key, item in pairs.items():
        value[key] = item
    return value
