"""The progress of a round, decided without threads: Notes [Rounds] and [Launch order]."""

import itertools

import pytest
from bagua import _C

# Two lanes: buckets 0 (slots 0, 1) and 1 (slot 2); bucket 2 (slots 3, 4).
LANES = [[2, 1], [2]]


def opened(alone=True):
    state = _C.RoundState(LANES)
    state.begin(alone=alone)
    return state


def test_nothing_is_open_before_the_first_round():
    state = _C.RoundState(LANES)
    assert (state.open, state.number, state.text()) == (False, 0, "between two rounds")


def test_a_round_is_untouched_until_a_slot_is_marked_and_complete_after_the_last():
    state = opened()
    assert (state.untouched, state.complete, state.unmarked) == (True, False, 5)
    for slot in range(5):
        assert not state.marked(slot)
        state.mark(slot)
        assert state.marked(slot)
    assert (state.untouched, state.complete, state.unmarked) == (False, True, 0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))), ids=str)
def test_buckets_launch_once_and_in_order_within_their_lane(order):
    state = opened()
    launched = [pair for slot in order for pair in state.mark(slot)]
    assert [bucket for lane, bucket in launched if lane == 0] == [0, 1]
    assert [bucket for lane, bucket in launched if lane == 1] == [2]


def test_a_full_bucket_waits_for_those_before_it_in_its_lane_only():
    state = opened()
    assert state.mark(2) == []
    assert state.mark(3) == []
    assert state.mark(4) == [(1, 2)]
    assert [state.launched(bucket) for bucket in range(3)] == [False, False, True]
    assert state.mark(0) == []
    assert state.mark(1) == [(0, 0), (0, 1)]
    assert all(state.launched(bucket) for bucket in range(3))


def test_launched_buckets_and_exchanges_are_waited_for():
    state = opened()
    assert state.launched_done
    state.mark(3)
    state.mark(4)
    assert not state.launched_done
    state.bucket_done()
    assert state.launched_done
    state.exchange_begins()
    assert not state.launched_done
    state.exchange_done()
    assert state.launched_done


def test_a_round_ends_only_when_every_slot_is_marked():
    state = opened()
    state.mark(0)
    state.end()
    assert state.open
    for slot in range(1, 5):
        state.mark(slot)
    state.end()
    assert not state.open
    assert state.number == 1


def test_a_round_is_agreed_on_when_the_ranks_say_so_and_alone_at_once():
    assert opened(alone=True).agreed
    state = opened(alone=False)
    assert not state.agreed
    state.agree(1)
    assert state.agreed
    state.begin(alone=False)
    assert not state.agreed


def test_the_next_round_starts_from_nothing():
    state = opened()
    for slot in range(5):
        state.mark(slot)
    state.begin(alone=True)
    assert (state.number, state.untouched, state.launched_done) == (2, True, True)
    assert not any(state.marked(slot) for slot in range(5))
    assert not any(state.launched(bucket) for bucket in range(3))
    assert state.mark(2) == []


def test_the_text_counts_tensors_and_buckets():
    state = opened()
    state.mark(3)
    state.mark(4)
    state.bucket_done()
    assert state.text() == "computing, 2 of 5 tensors are ready, 1 of 3 buckets are done"
    for slot in range(3):
        state.mark(slot)
    assert state.text() == "communicating, 1 of 3 buckets are done"


def test_a_round_of_a_part_is_over_when_its_buckets_are():
    state = _C.RoundState([[2, 1, 1], [2]], [0, 1, 0, 1])
    state.begin(alone=True, part=1)
    assert (state.untouched, state.complete, state.unmarked) == (True, False, 3)
    assert [state.marked(slot) for slot in range(6)] == [True, True, False, True, False, False]
    assert state.text() == "computing, 0 of 3 tensors are ready, 0 of 2 buckets are done"
    state.mark(2)
    assert [state.launched(bucket) for bucket in range(4)] == [False, True, False, False]
    state.bucket_done()
    assert state.launched_done
    state.mark(4)
    state.mark(5)
    assert (state.untouched, state.complete) == (False, True)
    state.bucket_done()
    assert state.launched_done
    state.end()
    assert not state.open
    state.begin(alone=True)
    assert state.unmarked == 6, "a round without a part is of all"


def test_a_slot_that_does_not_exist_is_refused():
    with pytest.raises(IndexError):
        opened().marked(5)
