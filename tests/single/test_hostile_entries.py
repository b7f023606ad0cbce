"""Entries of values that pickling would make, as another program may have written them."""

import collections

import pytest
import torch
from bagua._core.state.entries import UnknownNameError, described, held, undescribed

NONE = {"value": None}


def entry(own, *arguments, new=False, **parts):
    empty = {"state": NONE, "items": {"list": []}, "pairs": {"dict": []}}
    return {"own": own, "new": new, "arguments": {"tuple": list(arguments)}, **empty, **parts}


def read(one, tensors=(), roots=()):
    return undescribed(one, list(tensors), "x", lambda: held(roots))


TENSOR = {"tensor": "float32", "shape": [1], "device": "cpu"}
REFUSED = [
    (entry("builtins.range", {"value": "1"}), "x is not a builtins.range"),
    (
        entry("builtins.range", {"value": 0}, {"value": 1}, {"value": 0}),
        "x is not a builtins.range",
    ),
    (entry("decimal.Decimal", {"value": "one"}), "x is not a decimal.Decimal"),
    (entry("decimal.Decimal", {"value": "sNaN"}), "x is not a decimal.Decimal"),
    (entry("pathlib.PosixPath", {"value": 3}), "x is not a pathlib.PosixPath"),
    (entry("datetime.timedelta", {"value": 10**10}), "x is not a datetime.timedelta"),
    (entry("uuid.UUID", new=True, state={"value": 3}), "x is not a uuid.UUID"),
    (entry("collections.deque", items={"tuple": []}), "x is not a collections.deque: the class of"),
    (entry("collections.deque", TENSOR), "x is not a collections.deque: the class of"),
    (entry("collections.deque", new=1), "x is not a collections.deque: the class of"),
    (
        {"dict": [[entry("collections.deque"), NONE]]},
        "x has a key that cannot be one",
    ),
]


@pytest.mark.parametrize(("one", "text"), REFUSED)
def test_an_entry_that_its_class_refuses_is_a_value_error(one, text):
    with pytest.raises(ValueError, match=text):
        read(one, [torch.ones(1)])


@pytest.mark.parametrize("name", ["subprocess.Popen", "os.system", "fractions.Fraction", 7])
def test_a_class_that_the_reader_does_not_hold_is_not_called(name):
    with pytest.raises(UnknownNameError, match=f"x needs '{name}'"):
        read(entry(name, {"value": "true"}))


def test_a_function_that_the_reader_holds_is_not_called():
    with pytest.raises(ValueError, match="x is not a torch"):
        read(entry("torch.nn.functional.relu", NONE), roots=[torch.nn.functional.relu])


def test_values_with_tensors_come_back():
    value = collections.deque([torch.ones(2), (3, torch.zeros(1))], maxlen=4)
    one, tensors = described(value, "x")
    made = read(one, tensors)
    assert type(made) is collections.deque
    assert made.maxlen == 4
    assert torch.equal(made[0], torch.ones(2))
    assert torch.equal(made[1][1], torch.zeros(1))
