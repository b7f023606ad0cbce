"""Seeded changes to valid bytes and to valid values: what fuzzing tests in Python try."""

import copy
import json
import random

import torch

__all__ = ["attempt", "chances", "changed_bytes", "changed_value", "json_of"]

#: Values that something may have where another kind is expected.
STRANGE = (
    *(None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0),
    *(float("nan"), float("inf"), "", "x", "rank0/error/", "7" * 5000, "\x00\ud7ff", b"\xff"),
    *([], [[]], {}, {"a": {}}, {1: 2}, (), set(), object, range(3)),
)


def strange_value(chance):
    if chance.random() < 0.7:
        return chance.choice(STRANGE)
    dtype = chance.choice([torch.float32, torch.int64, torch.complex64, torch.bool, torch.uint8])
    shape = chance.choice([(), (0,), (1,), (3,), (7, 5), (5, 7), (1, 1, 1)])
    made = torch.zeros(shape, dtype=dtype)
    return made.to_sparse() if made.dim() and chance.random() < 0.1 else made


def changed_value(chance, value):
    """A copy of a nested value in which one to three things are something else."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.03 or not isinstance(value, (dict, list)):
            value = strange_value(chance)
        else:
            _change_inside(chance, value)
    return value


def _change_inside(chance, value):
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = chance.choice(keys)
    inner = value[key]
    if isinstance(inner, (dict, list)) and inner and chance.random() < 0.8:
        _change_inside(chance, inner)
        return
    what = chance.random()
    if what < 0.2:
        del value[key]
    elif what < 0.35 and isinstance(value, dict):
        value[chance.choice([*keys, "x", "params", "tensor", 3, None])] = value.pop(key)
    elif what < 0.45 and isinstance(value, list):
        value.append(inner)
    else:
        value[key] = strange_value(chance)


def changed_bytes(chance, data):
    """A copy of ``data`` with one to eight changes; one time in eight random bytes."""
    if chance.random() < 0.125:
        return chance.randbytes(chance.randrange(200))
    data = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(data) + 1)
        end = at + chance.randint(1, 16)
        match chance.randrange(5):
            case 0:
                data[at : at + 1] = chance.randbytes(1)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[chance.randrange(len(data) + 1) :][:16]
            case 3:
                data[at:end] = chance.choice(
                    [b"9" * 30, b"-1", b"[" * 40, b"1e999", b"null", b'"', b"\xff", b"{}", b"true"]
                )
            case _:
                del data[at:]
    return bytes(data)


def json_of(chance, value):
    """The text of a changed value that JSON can say."""
    while True:
        try:
            return json.dumps(changed_value(chance, value)).encode()
        except (TypeError, ValueError, UnicodeEncodeError):
            continue


def chances(count, seed):
    """``count`` random generators, each named by a number that makes it again."""
    return ((number, random.Random(f"{seed} {number}")) for number in range(count))


def attempt(kind, function, *arguments):
    """(what the call returns, "") or (None, the message of its exception, which is a ``kind``)."""
    try:
        return function(*arguments), ""
    except kind as error:
        return None, str(error)
