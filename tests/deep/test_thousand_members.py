"""Jobs of many ranks on one machine, whose store is near or far: their start and their ends."""

import signal

import pytest
from ranks import test_many_members as many
from support.processes.members import Members

pytestmark = pytest.mark.timeout(600)
SIZE, PROCESSES = 1024, 4


def test_1024_members_wrap_in_half_a_minute_of_two_cores_and_miss_a_lost_store():
    with Members(SIZE, PROCESSES) as members:
        before = members.processor_seconds()
        many.begin(members)
        taken = members.processor_seconds() - before
        print(f"wrapped in {taken:.1f} s of a core")
        assert taken < 60.0  # 30 of two cores
        members.all("wait", but=[3])
        assert many.say_that_the_store_is_gone(members) < 20.0


def test_512_members_name_a_killed_one_and_hear_of_a_failure():
    """Not 1,024: on two cores some of so many find the store silent."""
    with Members(SIZE // 2, PROCESSES) as members:
        many.begin(members)
        before = members.processor_seconds()
        seconds = many.seconds_until_killed_is_named(members)
        taken = members.processor_seconds() - before
        print(f"named in {seconds:.1f} s, {taken:.1f} s of a core")
        assert many.seconds_until_failure_is_told(members) < 15.0
        assert many.say_that_the_store_is_gone(members) < 20.0


def test_1024_members_ask_for_no_more_than_64_do():
    with Members(SIZE, PROCESSES, counted=True) as members:
        members.all("enter")
        members.all("wrap", 0, 0)
        members.all("compute")
        assert many.requests_per_second(members) <= 2.6
        members.all("wait")
        assert many.requests_per_second(members) <= 4.0


def test_members_far_from_their_store_name_a_killed_one_rightly():
    for rtt_ms in (50, 200):
        with Members(64, processes=2, rtt_ms=rtt_ms) as members:
            assert many.begin(members) < 60.0
            assert many.seconds_until_killed_is_named(members) < 10.0
            assert many.say_that_the_store_is_gone(members, signal.SIGSTOP) < 10.0
