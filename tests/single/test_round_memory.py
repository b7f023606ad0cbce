"""State of ops is committed once the whole round was finite, in every bucket."""

import pytest
import torch
from bagua import _C


def two_memories():
    outcome = _C.RoundOutcome()
    return [_C.RoundMemory([torch.zeros(3), torch.zeros(1)], outcome) for _ in range(2)]


def write(memory, step, value, finite=True):
    memory.next(0).fill_(value)
    memory.next(1).fill_(-value)
    memory.leave(step, finite)


def read(memory):
    return [memory.value(0)[0].item(), memory.value(1)[0].item()]


def test_one_lane_may_be_a_round_ahead():
    first, second = two_memories()
    write(first, 1, 1.0)
    write(second, 1, 1.0)
    write(first, 2, 2.0)  # before the second has looked back at round 1
    assert read(second) == [1, -1]
    write(second, 2, 2.0)
    assert read(first) == read(second) == [2, -2]


def test_set_replaces_uncommitted_values():
    first, second = two_memories()
    write(first, 1, 1.0)
    first.set(0, torch.full((3,), 7.0))
    write(second, 1, 1.0)
    assert read(first) == [7, 0]


@pytest.mark.parametrize("other", [torch.zeros(2), torch.zeros(3, dtype=torch.float64)])
def test_set_refuses_tensors_that_do_not_fit(other):
    memory, _ = two_memories()
    with pytest.raises(ValueError, match="tensor 0"):
        memory.set(0, other)
