"""Entries of a state dict: what may be loaded, and what is refused by name."""

import pytest
import torch
from bagua._core.state import saved_values as _saved_values

REMEDY = "load another"


@pytest.mark.parametrize("value", [0, 7, 7.0, 2**63 - 1, torch.tensor(7), torch.tensor([7])])
def test_a_count_is_a_whole_number(value):
    assert _saved_values.saved_count({"steps": value}, "steps", "A") == int(value)


@pytest.mark.parametrize(
    "value",
    [-1, 0.5, float("nan"), float("inf"), True, None, "7", 2**63, [7], torch.ones(2)],
    ids=str,
)
def test_invalid_counts_are_refused_by_name(value):
    with pytest.raises(ValueError, match=r"A: 'steps' is .* in the state; it must be"):
        _saved_values.saved_count({"steps": value}, "steps", "A")


def test_a_missing_entry_is_named():
    with pytest.raises(ValueError, match="the state has no 'steps'"):
        _saved_values.saved_count({}, "steps", "A")
    with pytest.raises(ValueError, match="the state has no 'error': load another"):
        _saved_values.saved_tensor({}, "error", torch.zeros(3), REMEDY)


BAD_TENSORS = {
    "shape": torch.zeros(1),
    "complex": torch.zeros(3, dtype=torch.complex64),
    "sparse": torch.zeros(3).to_sparse(),
    "text": "x",
    "list": [1.0, 2.0, 3.0],
}


@pytest.mark.parametrize("value", BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_values_that_cannot_be_copied_are_refused(value):
    with pytest.raises(ValueError, match=r"'error' is .* in the state.*: load another"):
        _saved_values.saved_tensor({"error": value}, "error", torch.zeros(3), REMEDY)


@pytest.mark.parametrize("value", [-1, 2.5, torch.tensor(-(2**63)), torch.tensor(1.0)], ids=str)
def test_a_counter_that_cannot_be_is_refused(value):
    counter = torch.zeros((), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'communications' is .* must be a non-negative integer"):
        _saved_values.saved_tensor({"communications": value}, "communications", counter, REMEDY)


def test_valid_values_are_returned():
    value = torch.ones(3, dtype=torch.float64)
    assert _saved_values.saved_tensor({"e": value}, "e", torch.zeros(3), REMEDY) is value
    found = _saved_values.saved_tensor({"e": 2.0}, "e", torch.zeros(()), REMEDY)
    assert found.item() == 2.0


@pytest.mark.parametrize("state", [None, [], 3, {1: 2}, {"a": 1, None: 2}], ids=str)
def test_invalid_states_are_refused(state):
    with pytest.raises(ValueError, match="A: a state is a dict with names as keys"):
        _saved_values.check_state(state, "A")
