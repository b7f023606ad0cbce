"""Sentences of `bagua doctor` about measurements that no single machine can make."""

import pytest
from bagua._tools.doctor import train
from bagua._tools.doctor.links import Measured, all_pairs, rounds_of_pairs
from bagua._tools.doctor.verdict import (
    Card,
    card_from,
    findings_of_cards,
    findings_of_links,
    own_card,
)

FAST = Measured(1e-4, 0.0, 100e6, 100e6)
SLOW = FAST._replace(received=10e6)


def cards(nodes, **changes):
    """A rank per entry of `nodes`; changes: by field, {rank: value}."""
    own = own_card("cpu")._replace(address="10.0.0.1", port=5, interface="eth0")
    result = {}
    for rank, node in enumerate(nodes):
        changed = {field: values[rank] for field, values in changes.items() if rank in values}
        result[rank] = own._replace(node=node, host=f"host{node}", **changed)
    return result


def texts(found, broken=True):
    return [finding.text for finding in found if finding.broken == broken]


def links(nodes, slow=(), unreachable=(), broke=(), tolerance=4.0, least=0.0, speeds=FAST):
    measured = {pair: speeds for pair in all_pairs(len(nodes))}
    measured |= dict.fromkeys(slow, SLOW)
    for pair in unreachable:
        measured.pop(tuple(sorted(pair)), None)
    reasons = dict.fromkeys(unreachable, "refused")
    return findings_of_links(
        cards(nodes), reasons, measured, dict.fromkeys(broke, "late"), tolerance, least
    )


def both(*pairs):
    return [direction for a, b in pairs for direction in ((a, b), (b, a))]


SLOW_NODE = [(0, 2), (0, 3), (1, 2), (1, 3), (2, 4), (2, 5), (3, 4), (3, 5)]
SPEED = "10.0 MB/s (80 Mbit/s); the fastest link between nodes has 100.0 MB/s"
#: (nodes, what is measured, the words of the fault)
FAULTS = {
    "one-link-cut": (
        [0, 1, 2, 3],
        {"unreachable": both((1, 3))},
        ["the link between ranks 1 and 3 (host1 at 10.0.0.1 and host3 at"],
    ),
    "a-rank-without-any-link": (
        [0, 1, 2, 3],
        {"unreachable": both((0, 2), (1, 2), (2, 3))},
        ["rank 2 (host2) is cut off: no connection between it and ranks 0, 1, 3"],
    ),
    "one-direction-closed": (
        [0, 1, 2],
        {"unreachable": [(2, 1)]},
        ["rank 2 cannot open a connection to rank 1 (", "firewall before rank 1"],
    ),
    "broken-under-load": ([0, 1], {"broke": [(0, 1)]}, ["ranks 0 and 1", "Compare the MTU"]),
    "a-slow-node": (
        [0, 0, 1, 1, 2, 2],
        {"slow": SLOW_NODE},
        ["all links between ranks 2, 3 (host1) and other nodes are slow: 10.0"],
    ),
    "a-slow-link": (
        [0, 1, 2, 3],
        {"slow": [(1, 2)]},
        ["the link between ranks 1 and 2 (", SPEED],
    ),
    "slow-for-the-users-tolerance": ([0, 1, 2, 3], {"slow": [(1, 2)], "tolerance": 9.0}, [SPEED]),
    "inside-a-node-below-the-limit": (
        [0, 0, 0],
        {"slow": [(0, 1)], "least": 20e6},
        ["the link between ranks 0 and 1 ("],
    ),
}


@pytest.mark.parametrize(("nodes", "measured", "words"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_link_is_told_in_one_sentence(nodes, measured, words):
    (text,) = texts(links(nodes, **measured))
    assert all(word in text for word in words)


def test_good_links_say_nothing():
    assert links([0, 0, 1, 1]) == []
    assert links([0, 0, 0], slow=[(0, 1)]) == []
    assert texts(links([0, 1, 2, 3], slow=[(1, 2)], tolerance=11.0)) == []


def test_where_nobody_reaches_anybody_each_link_is_named():
    assert len(texts(links([0, 1, 2], unreachable=both(*all_pairs(3))))) == 3


def test_a_loopback_address_is_the_advice():
    listed = cards([0, 1], address={1: "127.0.1.1"}, reason={1: "address of the host name b"})
    unreachable = dict.fromkeys(both((0, 1)), "refused")
    (text,) = texts(findings_of_links(listed, unreachable, {}, {}, 4.0, 0.0))
    assert "host1 listens at 127.0.1.1 (address of the host name b)" in text
    assert "set GLOO_SOCKET_IFNAME" in text


def test_directions_and_clocks_that_differ_are_remarks():
    found = links([0, 1, 1], slow=[(0, 1), (1, 2)], tolerance=11.0)
    assert texts(found) == []
    (text,) = texts(found, broken=False)
    assert text.startswith("the link between ranks 0 and 1 (")
    assert "100.0 MB/s (800 Mbit/s) from rank 0 to rank 1, 10.0 MB/s (80 Mbit/s) back" in text
    assert links([0, 1], speeds=FAST._replace(sent=60e6)) == []
    found = links([0, 1], speeds=FAST._replace(ahead=-3600.0))
    assert texts(found) == []
    (text,) = texts(found, broken=False)
    assert "clock of rank 1 (host1) is 3600.0 s behind that of rank 0" in text


def test_differences_that_training_refuses_are_faults_and_others_remarks():
    found = findings_of_cards(
        cards([0, 1, 2], torch={2: "2.12.0"}, python={1: "3.10.1"}, mtu={0: 1500, 1: 9000, 2: 1500})
    )
    (text,) = texts(found)
    assert text.startswith("ranks differ in the version of torch: ")
    assert text.endswith("2.12.0 on rank 2")
    remarks = texts(found, broken=False)
    assert [text.split(":")[0] for text in remarks] == [
        "ranks differ in the version of Python",
        "ranks differ in the MTU of the interface",
    ]
    assert "1500 on ranks 0, 2, 9000 on rank 1" in remarks[1]


@pytest.mark.parametrize("nodes", [[0], [0, 1], [0, 0, 1, 1], [0, 1, 0, 2, 2, 1, 0]], ids=str)
def test_rounds_hold_each_pair_once_and_no_node_twice(nodes):
    pairs = all_pairs(len(nodes))
    rounds = rounds_of_pairs(nodes, pairs)
    assert sorted(pair for chosen in rounds for pair in chosen) == pairs
    for chosen in rounds:
        touched = [node for pair in chosen for node in {nodes[rank] for rank in pair}]
        assert len(touched) == len(set(touched))


BAD_CARDS = {
    "no_object": 3,
    "a_field_less": {"host": "a"},
    "another_type": own_card("cpu")._asdict() | {"port": "x"},
    "a_boolean": own_card("cpu")._asdict() | {"node": True},
}


@pytest.mark.parametrize("word", BAD_CARDS.values(), ids=BAD_CARDS.keys())
def test_what_is_no_card_is_refused(word):
    assert card_from(word) is None


def test_cards_cannot_steer_the_terminal():
    word = own_card("cpu")._asdict() | {"host": "\x1b[2Jhost" + "x" * 1000}
    card = card_from(word)
    assert isinstance(card, Card)
    assert card.host.startswith("?[2Jhost")
    assert len(card.host) == 200


def test_weights_that_must_be_equal_or_finite_and_are_not_are_faults_of_a_training():
    ddp = train.Row("torch DDP", [0.2, 0.4], 1e6, equal=True, must=True, finite=True)
    own = ddp._replace(name="async", seconds=[0.1, 0.2], equal=False, must=False)
    text, code = train.page([ddp, own], 2, "cpu")
    assert code == 0
    assert "No fault found." in text
    assert "0.1500   2.00x     1.000  own" in text
    for row, fault in (
        (own._replace(must=True), "async: ranks hold different weights after equal steps"),
        (own._replace(finite=False), "async: weights are not finite on some rank"),
    ):
        text, code = train.page([ddp, row], 2, "cpu")
        assert code == 1
        assert f"BROKEN: {fault}\n" in text
        assert "No fault found" not in text
