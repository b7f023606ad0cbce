"""Options and state of optimizers, of every type that is sent and saved."""

import collections
import dataclasses
import enum
import functools
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from uuid import UUID

import numpy as np
import torch

__all__ = ["StrangeSGD", "options", "shown", "strange_state"]


class Mode(enum.Enum):
    SLOW = "slow"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    ONE = 1


class Parts(enum.Flag):
    LEFT = 1
    RIGHT = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float
    inner: object = None


class Window:
    """A class without a decorator."""

    __slots__ = "__dict__", "size"

    def __init__(self, size, others):
        self.size = size
        self.others = others

    def __repr__(self):
        return f"Window({self.size}, {self.others})"


Bounds = collections.namedtuple("Bounds", "low high")


def options(factor):
    """By name; those of another ``factor`` are others, of the same types."""
    numbers = np.arange(6.0).reshape(2, 3) * factor
    return {
        "plain": [None, True, factor, -0.0, float("nan"), float("inf"), 2**70, "text", 1j * factor],
        "bytes": (b"\xff", bytearray([factor])),
        "scalars": [np.float32(0.1 * factor), np.float64(0.1), np.int8(3), np.bool_(True)],
        "dates": np.datetime64("2020-01-02", "ns"),
        "array": numbers,
        "arrays": [numbers[:, 0], np.zeros((0, 3), np.float16), np.array(1j), np.array(["ab"])],
        "dtypes": [torch.bfloat16, torch.float8_e4m3fn, np.dtype("f4"), np.float32, float],
        "torch": [torch.device("cpu"), torch.Size([2, factor]), torch.strided, torch.channels_last],
        "made": [range(1, 9, factor), slice(None, factor), timedelta(days=factor, microseconds=1)],
        "of the library": [
            *(Decimal("1.20"), Path("/a") / str(factor), PurePosixPath("b"), UUID(int=factor)),
            *(
                datetime(2026, 1, factor, tzinfo=timezone.utc),
                date(2026, 1, factor),
                SimpleNamespace(a=1),
            ),
            collections.deque([torch.full((2,), 1.0 * factor), factor], maxlen=3),
        ],
        "of a class": [Window(factor, {"rates": [0.5]}), functools.partial(shown, loosely=True)],
        "sets": [{1, "two", (3, None)}, frozenset(["a", Mode.SLOW])],
        "dict": {1: "one", "two": {2.5: [factor], (1, "x"): {}}, None: [], Mode.PAIR: 4, KEY: 5},
        "enums": [Mode.SLOW, Mode.PAIR, Level.ONE, Parts.LEFT | Parts.RIGHT],
        "dataclass": Settings(0.5 * factor, Settings(1, {3: np.float32(2)})),
        "named": Bounds(np.int64(factor), [torch.full((2,), 1.0 * factor)]),
        "functions": (torch.nn.functional.relu, shown, len),
        "tensors": [torch.full((2, 1), factor, dtype=d) for d in DTYPES],
        "tensor": torch.full((3,), factor, dtype=torch.float64),
    }


KEY = timedelta(days=2)
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.bool, torch.complex64)


def shown(value, loosely=False):
    """Text that differs where values or their types do; ``loosely``: but not tensors' dtypes."""
    if isinstance(value, torch.Tensor) and loosely:
        return str(value.to(torch.complex128).tolist())
    if isinstance(value, functools.partial):
        return f"partial {shown([value.func, value.args, value.keywords])}"
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        items = [shown(item, loosely) for item in value]
        ordered = isinstance(value, (list, tuple, collections.deque))
        return f"{type(value).__name__}{items if ordered else sorted(items)}"
    if isinstance(value, dict):
        return str(sorted((shown(key), shown(item, loosely)) for key, item in value.items()))
    return f"{type(value).__name__} {value.__qualname__ if callable(value) else repr(value)}"


class StrangeSGD(torch.optim.SGD):
    """SGD whose groups and state have all of :func:`options`, also under keys of no parameter."""

    def __init__(self, params, factor, state):
        super().__init__(params, lr=0.01)
        self.param_groups[0].update(options(factor))
        self.param_groups[0][7] = factor
        if state:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = options(factor) | {7: factor}
            self.state["global_step"] = factor
            self.state["history", 3] = options(factor)
            *others, last = self.param_groups[0]["params"]
            self.state[last] = factor
            if len(others) > 1:
                self.state[others[0]] = torch.full((3,), 1.0 * factor)


def strange_state(optimizer, loosely=False):
    """Text of all groups and state."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    others = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    states = [optimizer.state.get(parameter) for parameter in parameters]
    return [shown(value, loosely) for value in (groups, states, others)]
