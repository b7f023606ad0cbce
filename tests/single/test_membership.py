"""Agreement on members through a store; ranks are threads, and heartbeats of the dead end."""

import itertools
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from bagua import BaguaError
from bagua._core.group import links, membership
from bagua._core.group.membership import Membership, newest
from bagua._core.group.rendezvous import number_in
from support.counting_store import CountingStore

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def short_silence(monkeypatch):
    monkeypatch.setattr(membership, "SECONDS_OF_SILENCE", 1.5)


@pytest.fixture
def founded():
    """A store and the memberships of three ranks, 0 to 2."""
    store = dist.HashStore()
    members = [Membership(store, rank, TIMEOUT) for rank in range(3)]
    at_once(*(lambda m=m: m.found([0, 1, 2]) for m in members))
    return store, members


def at_once(*calls):
    """Results, or BaguaErrors, of calls at the same time."""

    def outcome(call):
        try:
            return call()
        except BaguaError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))


def changes(members, least=2):
    return at_once(*(lambda m=m: m.change({"rounds": m._rank}, least) for m in members))


def test_a_silent_member_is_lost_and_the_others_agree(founded):
    store, members = founded
    del members[1]._life  # heartbeats end
    first, second = changes([members[0], members[2]])
    assert first == second
    assert (first.generation, first.members, first.lost, first.joined) == (1, [0, 2], [1], [])
    assert first.reports == {0: {"rounds": 0}, 2: {"rounds": 2}}
    assert sorted(newest(store).members) == [0, 2]


def test_a_member_that_was_taken_for_dead_raises(founded):
    _, members = founded
    name, members[1]._life = members[1]._life.name, None
    changes([members[0], members[2]])
    members[1]._life = SimpleNamespace(name=name)  # as of a process that was stopped for a while
    (error,) = changes([members[1]])
    assert "rank 1 was taken for dead by rank(s) 0, 2" in str(error)


def test_too_few_raise_on_all(founded):
    _, members = founded
    del members[0]._life
    for error in changes(members[1:], least=3):
        assert "rank(s) 0 of 3 were lost, and the 2 left are fewer than quorum=3" in str(error)


def test_a_rank_that_comes_back_is_in_the_next_generation(founded):
    store, members = founded
    del members[1]._life
    back = Membership(store, 1, TIMEOUT)
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(lambda: back.join(back.ask()))
        while members[0].requests() == 0:
            pass
        stayed = changes([members[0], members[2]])
        joined = asking.result(20)
    assert (joined.members, joined.joined) == ([0, 1, 2], [1])
    assert [stay.joined for stay in stayed] == [[1], [1]]
    assert joined.reports == stayed[0].reports == {0: {"rounds": 0}, 2: {"rounds": 2}}
    assert members[0].requests() == 0


def test_a_request_of_the_dead_is_passed_over(founded):
    store, members = founded
    gone = Membership(store, 1, TIMEOUT)
    gone.ask()
    del gone._life, members[1]._life
    for change in changes([members[0], members[2]]):
        assert (change.members, change.joined) == ([0, 2], [])


def test_nobody_joins_a_job_that_is_gone(founded):
    store, members = founded
    for member in members:
        del member._life
    back = Membership(store, 1, TIMEOUT)
    request = back.ask()
    with pytest.raises(
        BaguaError, match="no member of generation 0, rank\\(s\\) 0, 1, 2, is alive"
    ):
        back.join(request)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"members": 3}', '{"members": {"a": 1}}', "7"])
def test_what_strangers_write_is_refused(founded, text):
    store, members = founded
    store.set("members", text)
    (error,) = changes(members[:1])
    assert "under 'members', which is not of the form that it should be" in str(error)


def decided(members, **changed):
    """The decision after the first generation of ``members``, with what is ``changed`` in it."""
    lives = {member._rank: member._life.name for member in members}
    return membership.Decision(1, lives, **changed).text()


def test_decisions_without_the_counters_that_members_need_are_refused(founded):
    store, members = founded
    for reports in ({}, {0: {}}, {0: {"steps": 3}}, {0: {"rounds": -1}}):
        store.set("members", decided(members, reports=reports))
        for rank in range(3):
            member = Membership(store, rank, TIMEOUT, counts=["rounds"])
            member.generation, member.lives = 0, members[0].lives
            (error,) = changes([member])
            assert "under 'members', which is not of the form" in str(error), reports
            with pytest.raises(BaguaError, match="under 'members'"):
                member.join(int(members[rank]._life.name, 16))
    store.set("members", decided(members, reports={0: {"rounds": 3, "more": 0}}))
    member = Membership(store, 1, TIMEOUT, counts=["rounds"])
    assert member.join(int(members[1]._life.name, 16)).reports[0]["rounds"] == 3


def test_who_has_said_that_it_leaves_is_told_from_the_lost(founded):
    _, members = founded
    members[1].leave()
    assert [(change.lost, change.left) for change in changes([members[0], members[2]])] == [
        ([1], [1])
    ] * 2


def test_the_others_decide_on_the_members_when_the_first_that_came_is_dead(founded):
    store, members = founded
    store.append("generation1/here", '[0, {"rounds": 0}, null]\n')
    del members[0]._life
    begin = time.monotonic()
    for change in changes(members[1:]):
        assert (change.members, change.lost) == ([0, 1, 2], []), "it had come"
    assert time.monotonic() - begin < TIMEOUT.total_seconds(), "half of what they wait at most"
    del members[0]
    assert [change.lost for change in changes(members)] == [[0]] * 2


class LostStore(dist.Store):
    """A store whose host is gone."""

    def _gone(self, *_):
        raise dist.DistNetworkError("connection reset by peer")

    set = get = check = append = wait = compare_set = _gone


def test_a_lost_store_is_an_error_that_says_so(founded):
    _, members = founded
    members[0]._store = LostStore()
    (error,) = changes(members[:1])
    assert "the job's store does not answer" in str(error)
    assert members[0].requests() == 0


def gathered(members, grace=20.0, least=2, apart=0.3):
    """What members find that come to a round one after the other, so many seconds apart."""

    def come(place):
        time.sleep(apart * place)
        return members[place].gather(least, grace)

    return at_once(*(lambda place=place: come(place) for place in range(len(members))))


def test_members_that_all_come_change_nothing(founded):
    _, members = founded
    assert gathered(members) == gathered(members) == [(False, False)] * 3
    found = changes(members)
    assert found == [found[0]] * 3
    assert (found[0].members, found[0].lost) == ([0, 1, 2], [])


def test_a_living_member_is_late_after_the_grace_and_returns_as_it_is(founded):
    _, members = founded
    begin = time.monotonic()
    assert gathered(members[:2], grace=0.2) == [(True, False)] * 2
    assert time.monotonic() - begin < 1.4, "it lives: nobody waits until it is silent"
    assert members[2].gather(2, 0.2) == (True, True)
    changed = changes(members[:2])
    assert [(change.members, change.lost) for change in changed] == [([0, 1], [2])] * 2
    request = members[2].ask(returns=True)
    assert gathered(members[:2]) == [(True, False)] * 2, "before the round it is taken in"
    *stayed, back = at_once(
        lambda: members[0].change({"rounds": 0}, 2),
        lambda: members[1].change({"rounds": 1}, 2),
        lambda: members[2].join(request),
    )
    assert stayed == [back] * 2
    assert (back.members, back.joined, back.returned) == ([0, 1, 2], [], [2])
    assert gathered(members) == [(False, False)] * 3


def test_a_member_that_is_late_again_waits_for_the_generation_after(founded):
    _, members = founded
    for generation in (1, 2):
        assert gathered(members[:2], grace=0.2) == [(True, False)] * 2
        assert members[2].gather(2, 0.2) == (True, True)
        request = members[2].ask(returns=True)  # before the others have changed
        found = at_once(
            lambda request=request: members[2].join(request),
            *(lambda m=m: time.sleep(0.3) or m.change({"rounds": 0}, 2) for m in members[:2]),
        )
        assert [change.generation for change in found] == [generation] * 3
        assert [change.returned for change in found] == [[2]] * 3


def test_who_has_not_looked_for_a_while_takes_nobody_for_dead(founded, monkeypatch):
    store, (_, other, _) = founded
    pulse, now = membership.Pulse(store), time.monotonic()
    pulse.look([other._life.name])
    monkeypatch.setattr(membership, "time", SimpleNamespace(monotonic=lambda: now + 1000))
    assert not pulse.silent(other._life.name)


def test_a_round_does_not_wait_for_the_dead(founded):
    _, members = founded
    del members[2]._life
    begin = time.monotonic()
    assert gathered(members[:2], grace=20.0) == [(True, False)] * 2
    assert time.monotonic() - begin < 10


def test_the_others_decide_when_the_first_that_came_is_dead(founded):
    store, members = founded
    store.append("generation0/round1/here", "[0]\n")
    del members[0]._life
    begin = time.monotonic()
    assert gathered(members[1:2], grace=0.2) == [(True, False)]
    assert time.monotonic() - begin < TIMEOUT.total_seconds() / 2
    (change,) = changes(members[1:2], least=1)
    assert (change.members, change.lost) == ([1], [0, 2])


def rounds_changes_and_returns(members, times):
    """Rounds with a grace; then one rank dies, comes back and is taken in before the next."""
    for _ in range(times):
        assert gathered(members, apart=0) == [(False, False)] * 3
        rank = members.pop()._rank
        members.insert(0, Membership(members[0]._store, rank, TIMEOUT))
        request = members[0].ask()
        assert gathered(members[1:], grace=0.1, apart=0) == [(True, False)] * 2
        change = [lambda m=m: m.change({"rounds": 1}, 2) for m in members[1:]]
        joined, *_ = at_once(lambda request=request: members[0].join(request), *change)
        assert joined.joined == [rank]


@pytest.mark.timeout(120)
def test_neither_rounds_nor_changes_nor_returns_leave_keys(founded):
    store, members = founded
    kinds, keys = [], []
    for _ in range(6):
        assert gathered(members, apart=0) == [(False, False)] * 3
        keys.append(store.num_keys())
    assert keys[-1] == keys[2]
    for _ in range(2):
        rounds_changes_and_returns(members, 2)
        kinds.append(sorted(re.sub("life/[^/]*|[0-9]+", "", key) for key in store.list_keys()))
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) < 20, kinds
    assert not store.get("asking")


def requests_of(stores, calls):
    """The most requests, without heartbeats, that a store has got in calls at the same time, and
    how many times one that waits looked meanwhile."""
    for store in stores:
        store.requests.clear()
    begin = time.monotonic()
    at_once(*calls)
    looks = 5 + int((time.monotonic() - begin) / membership._PAUSES[1])
    return max(store.requests.total() - store.requests["set"] for store in stores), looks


def test_a_round_and_a_change_ask_the_store_for_as_much_with_many_members_as_with_two():
    for size in (2, 16):
        inner = dist.HashStore()
        stores = [CountingStore(inner) for _ in range(size)]
        members = [Membership(stores[rank], rank, TIMEOUT) for rank in range(size)]
        at_once(*(partial(m.found, [*range(size)]) for m in members))
        for calls in (
            [partial(m.gather, size, 20.0) for m in members],
            [partial(m.change, {"rounds": 1}, size) for m in members],
        ):
            asked, looks = requests_of(stores, calls)
            assert asked <= 8 + 6 * looks, (size, asked, looks)
    assert 2 / membership._OF_CHANGES[1] <= 4.0  # a second, while members change


def test_members_that_do_not_decide_ask_twice_a_look(monkeypatch):
    inner, looks = dist.HashStore(), []
    stores = [CountingStore(inner, apart=["life/"]) for _ in range(2)]
    members = [Membership(stores[rank], rank, TIMEOUT) for rank in range(2)]
    at_once(*(partial(member.found, [0, 1]) for member in members))
    inner.append("generation1/here", '[0, {"rounds": 0}, null]\n')
    stores[1].requests.clear()

    def take(pause):
        looks.append(stores[1].requests.total())
        if len(looks) == 9:
            at_once(partial(members[0].change, {"rounds": 0}, 2))

    monkeypatch.setattr(membership.Pause, "take", take)
    assert members[1].change({"rounds": 1}, 2).members == [0, 1]
    # Its own line, who is here, and the decision; then these two and the decision alone in turn.
    # A heartbeat of the first one is a third request, which is not counted.
    assert looks == [3, 4, 6, 7, 9, 10, 12, 13, 15]
    assert stores[1].requests.total() == 16


def changes_with_links(members, monkeypatch, *bad, least=2):
    """Changes after a failure of members of which those pairs have lost their link."""
    own, ask, asked = threading.local(), links.Links.ask, set()

    def answers(self, places):
        asked.update((own.rank, other) for other in places)
        found = ask(self, places).items()
        return {other: reached and {own.rank, other} not in bad for other, reached in found}

    def change(member):
        own.rank = member._rank
        return member.change({"rounds": member._rank}, least, failed=True)

    with monkeypatch.context() as patched:
        patched.setattr(links.Links, "ask", answers)
        found = at_once(*(partial(change, member) for member in members))
    assert asked == {*itertools.permutations([member._rank for member in members], 2)}
    return found


def test_of_each_bad_link_one_end_goes_and_both_are_named(founded, monkeypatch):
    _, members = founded
    found = changes_with_links(members, monkeypatch)
    assert [(change.members, change.apart) for change in found] == [([0, 1, 2], [])] * 3
    *stay, error = changes_with_links(members, monkeypatch, {1, 2})
    assert stay[0] == stay[1]
    assert (stay[0].members, stay[0].lost, stay[0].apart) == ([0, 1], [2], [(1, 2)])
    assert "rank 2 is left out, and rank(s) 0, 1 go on: ranks 1 and 2 do not reach" in str(error)
    for error in changes_with_links(members[:2], monkeypatch, {0, 1}):
        assert "rank 1 is left out" in str(error) or (
            "rank(s) 1 of 2 were lost (ranks 0 and 1 do not reach each other), and the 1 left"
            in str(error)
        )


def test_the_member_with_most_bad_links_goes():
    assert links.left_out([]) == []
    assert links.left_out([(0, 3)]) == [3]
    assert links.left_out([(0, 1), (0, 2), (0, 3)]) == [0]
    assert links.left_out([(0, 1), (2, 3), (1, 3)]) == [3, 1]


def answers_of(asks, places):
    """What comes until all that are asked now have answered, which takes 0.6 s at most."""
    new, found = {*places} - {*asks._asked}, {}
    while not new <= {*found}:
        found |= asks.ask(places)
        time.sleep(0.01)
    return found


def test_links_are_asked_over_tcp_whatever_listens_there(monkeypatch):
    monkeypatch.setattr(links, "PATIENCE", 0.3)
    door, closed, mute = links.Links(), links.Links(), socket.create_server(("127.0.0.1", 0))
    closed.close()
    places = {
        1: door.place,
        2: closed.place,
        3: links.Place(*mute.getsockname(), "0" * 16),
        4: door.place._replace(token="0" * 16),
    }
    with mute:
        assert answers_of(door, places) == {1: True, 2: False, 3: False, 4: False}
        assert door.ask(places) == {}, "each is asked once, and told once"
        assert answers_of(door, {**places, 5: door.place}) == {5: True}
    door.close()
    other = links.Links()
    assert answers_of(other, {1: door.place}) == {1: False}
    other.close()


@pytest.mark.parametrize(
    "line",
    [
        "[7]",
        '[1, {"rounds": "x"}, null]',
        '[1, {"steps": 1}, null]',
        '[1, {"\\u001b[2J": 1}, null]',
        '[1, {"rounds": 1}, ["example.org", 80, "0123456789abcdef"]]',
        '[1, {"rounds": 1}, ["10.0.0.1", 99999, "0123456789abcdef"]]',
        "x" * 10**6,
    ],
)
def test_lines_of_strangers_in_a_change_are_refused_with_their_key(founded, line):
    store, members = founded
    store.append("generation1/here", f"{line}\n")
    (error,) = changes(members[:1])
    assert "under 'generation1/here', which is not of the form that it should be" in str(error)
    assert len(str(error)) < 400
    assert str(error).isprintable()


def test_words_of_strangers_are_refused_with_their_key_wherever_they_are_read():
    calls = {
        "asking": lambda member: member.requests(),
        "generation0/round1/late": lambda member: member.gather(1, 0.1),
        "generation0/round1/here": lambda member: member.gather(1, 0.1),
        "generation1/links": lambda member: member.change({"rounds": 1}, 1, failed=True),
        "members": lambda member: member.join(7),
    }
    for key, call in calls.items():
        for word in (
            b"\xff\xfe",
            "[1e999]",
            "[[1]]",
            "9" * 30,
            "\x1b]0;owned\x07",
            '[1,"\x1b",false]',
        ):
            store = dist.HashStore()
            member = Membership(store, 0, TIMEOUT)
            member.found([0])
            store.set(key, word)
            with pytest.raises(
                BaguaError, match=f"under '{key}', which is not of the form"
            ) as error:
                call(member)
            assert str(error.value).isprintable()


def test_numbers_outside_of_their_range_are_refused_with_their_key():
    assert number_in(b"7", "ranks", 8) == 7
    for word in (b"8", b"-1", b"1.0", b"true", b'"1"', b"[1]", b"1e999", b"0" * 21, b"\xff"):
        with pytest.raises(BaguaError, match="under 'ranks', which is not a number from 0 to 7"):
            number_in(word, "ranks", 8)
