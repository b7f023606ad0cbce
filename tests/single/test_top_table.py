"""The table of `bagua top` from publications."""

import pytest
from bagua._tools.top import publication_from, rows_of, table

BASE = {
    "world": 3,
    "rank": 0,
    "node": 0,
    "pid": 7,
    "number": 1,
    "at": 100.0,
    "every": 1.0,
    "host": "a",
    "ended": False,
    "rounds": 10,
    "bytes_sent": 1000,
    "bytes_received": 1000,
    "wire_ns": 0,
    "encode_ns": 0,
    "waiting_ns": 0,
    "exposed_ns": 0,
}


def two(blocked, **later):
    """Two publications of each rank, two seconds apart; blocked: seconds in between, by rank."""
    before = {rank: BASE | {"rank": rank} for rank in range(len(blocked))}
    now = {
        rank: word
        | {"number": 2, "at": 102.0, "rounds": 20, "bytes_sent": 4_001_000}
        | {"exposed_ns": int(blocked[rank] * 1e9), "wire_ns": 10**9, "encode_ns": 5 * 10**8}
        | later
        for rank, word in before.items()
    }
    return now, before


def rows(blocked, age=0.0, **later):
    now, before = two(blocked, **later)
    return rows_of(now, before, dict.fromkeys(now, age))


def test_rates_are_those_between_two_publications():
    (row,) = rows([1.0])
    assert (row.steps, row.sent, row.wire, row.encode, row.blocked) == (5.0, 2e6, 0.5, 0.25, 0.5)


@pytest.mark.parametrize(
    ("blocked", "slowest"),
    [([1.0, 0.1, 1.1], 1), ([0.1, 1.0], 0), ([1.0, 0.9, 1.1], None), ([0.1, 0.0, 0.1], None)],
    ids=str,
)
def test_the_straggler_is_the_rank_that_does_not_wait(blocked, slowest):
    marks = [row.mark for row in rows(blocked)]
    assert marks == ["slowest" if rank == slowest else "" for rank in range(len(blocked))]


def test_a_rank_that_has_left_or_is_silent_is_no_straggler():
    assert [row.mark for row in rows([1.0, 0.1], ended=True)] == ["ended", "ended"]
    assert [row.mark for row in rows([1.0, 0.1], age=6.0)] == ["silent", "silent"]
    assert [row.mark for row in rows([1.0, 0.1], age=4.0)] == ["", "slowest"]


@pytest.mark.parametrize(
    "later",
    [{"pid": 8}, {"at": 99.0}, {"rounds": 2, "bytes_sent": 1}],
    ids=["restarted", "other_clock", "counters_begin_anew"],
)
def test_counters_that_do_not_go_on_are_no_rates(later):
    (row,) = rows([1.0], **later)
    assert (row.steps, row.sent) == (0.0, 0.0)


def test_the_last_line_says_how_much_less_the_slowest_rank_is_to_get():
    lines = table(rows([1.0, 1.1, 0.9, 0.1]), 4, "bagua top: h:1")
    assert lines[-1] == "rank 3 takes 1.9 times as long: give it 0.53 of the batch"
    for blocked in ([1.0, 0.9, 1.1], [0.1, 0.0], [2.0, 0.1], [3.0, 0.1]):
        assert "batch" not in table(rows(blocked), len(blocked), "bagua top: h:1")[-1]


def test_lines_have_80_columns_whatever_the_numbers():
    extreme = {"host": "h" * 50, "rounds": 10**9, "bytes_sent": 2 * 10**15, "encode_ns": 10**10}
    lines = table(rows([0.1, 100.0, 100.0], **extreme), 3, "bagua top: " + "x" * 90)
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[2:]] == ["rank", "0", "1", "2"]
    usual = table(rows([0.1, 1.0, 1.0]), 3, "bagua top: h:1")
    assert usual[0] == "bagua top: h:1, 3 of 3 rank(s)"
    assert usual[3].endswith("slowest")
    assert max(map(len, usual)) <= 80


def changed(**fields):
    return BASE | fields


@pytest.mark.parametrize(
    "word", [None, 3, [], {}, changed(rank="0"), changed(rounds=True), changed(at=None)], ids=str
)
def test_what_is_no_publication_is_refused(word):
    assert publication_from(word) is None


def test_a_publication_cannot_steer_the_terminal():
    assert publication_from(changed(host="\x1b[2J\n"))["host"] == "?[2J?"
