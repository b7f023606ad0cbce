"""Boards and meetings of many ranks, which are threads: budgets, a killed rank, a killed store."""

import signal
import time

from support.processes.members import Members

KILLED = "rank 3 was killed, stopped or cut off, or left by os._exit(): silent for over a second"
STORE = "The job's store does not answer"
#: Of one member, of an address in gloo's message with 64 ranks; and meetings of a wrap beside that
#: of nodes.
ADDRESS_BYTES, MEETINGS = 800, 3


def begin(members):
    """Seconds of the slowest member's start and wrap."""
    seconds = members.all("enter"), members.all("wrap", MEETINGS, ADDRESS_BYTES)
    return sum(max(each.values()) for each in seconds)


def requests_per_second(members):
    """Requests of the member that asks most, long enough that one more or less is little."""
    before = members.all("requests")
    time.sleep(10.0)
    after = members.all("requests")
    return max(
        (after[rank][1] - count) / (after[rank][0] - at) for rank, (at, count) in before.items()
    )


def seconds_until_killed_is_named(members):
    """Of the slowest member, after member 3 has died; all others name it."""
    members.all("wait", but=[3])
    died = members.all("lose", only=[3])[3]
    told = members.all("diagnose", but=[3])
    wrong = {rank: text for rank, (_, text) in told.items() if not text.startswith(KILLED)}
    assert not wrong, dict(list(wrong.items())[:3])
    return max(at for at, _ in told.values()) - died


def seconds_until_failure_is_told(members):
    members.all("wait", but=[3])
    failed = members.all("publish", only=[5])[5]
    told = members.all("told", but=[3, 5])
    assert {text for news in told.values() for _, text in news} == {"rank 5: out of paper"}
    return max(news[0][0] for news in told.values()) - failed


def say_that_the_store_is_gone(members, how=signal.SIGKILL):
    """All members, within seconds."""
    start = time.monotonic()
    members.stop_store(how)
    told = members.all("diagnose", but=[3])
    assert all(text.startswith(STORE) for _, text in told.values())
    return max(at for at, _ in told.values()) - start


def test_64_members_meet_name_a_killed_one_and_tell_that_the_store_is_gone():
    with Members(64, processes=2) as members:
        assert begin(members) < 30.0
        assert seconds_until_killed_is_named(members) < 5.0
        assert seconds_until_failure_is_told(members) < 5.0
        assert say_that_the_store_is_gone(members) < 10.0


def test_64_members_ask_for_no_more_than_their_budget():
    with Members(64, processes=2, counted=True) as members:
        begin(members)
        assert (
            max(count for _, count in members.all("requests").values()) <= 40 + 4 * 6 + 20
        )  # and time's
        members.all("compute")
        assert requests_per_second(members) <= 2.6  # heartbeats
        members.all("wait")
        assert requests_per_second(members) <= 4.0  # and the news
