"""`bagua doctor` on links that are cut, and beside ranks that hang or compute something else."""

import time

import pytest
from deep.test_doctor import (
    assert_a_fault_of_rank_1_is_named,
    examine_on,
    measured,
    needs_namespaces,
    network,
    words,
)


@needs_namespaces
def test_a_cut_link_names_its_two_ranks():
    with network.Network(3) as link:
        link.cut(1, 2)
        ends = examine_on(link)
    assert [end.returncode for end in ends] == [1, 1, 1], ends[0].stdout + ends[0].stderr
    page = words(ends[0].stdout)
    assert "BROKEN: the link between ranks 1 and 2 (" in page
    assert "10.99.0.2" in page
    assert "10.99.0.3" in page
    assert "is cut: no connection in either direction (no answer within 3 s)" in page
    assert page.count("BROKEN") == 1
    assert measured(ends[0].stdout).keys() == {(0, 1), (0, 2)}


@needs_namespaces
def test_a_rank_that_never_reaches_the_store_is_named_on_both_sides():
    with network.Network(3) as link:
        link.set_link(2, "down")
        ends = examine_on(link)
    assert [end.returncode for end in ends] == [1, 1, 1]
    assert "BROKEN: rank 0 of 3: rank 2 did not come within 20 s" in ends[0].stderr
    assert "BROKEN: rank 1" in ends[1].stderr
    assert "BROKEN: rank 2 of 3" in ends[2].stderr
    assert "cannot reach the job's store at 10.99.0.1:29500" in ends[2].stderr
    assert "on the host of rank 0" in ends[2].stderr


@needs_namespaces
def test_a_link_that_is_cut_while_it_is_measured_names_both_ends():
    pauses = """
measure = examine.measure
def announced(connection, first, most):
    print("measuring", flush=True)
    time.sleep(1.0)
    return measure(connection, first, most)
examine.measure = announced
"""

    def cut(output_of):
        deadline = time.monotonic() + 30.0
        while not all("measuring" in output_of(rank) for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        link.set_link(1, "down")

    with network.Network(2) as link:
        first, second = examine_on(link, pauses, cut, arguments=["--device", "cpu"])
    assert (first.returncode, second.returncode) == (1, 1)
    page = words(first.stdout)
    assert "BROKEN: rank 1 (" in page, page
    assert "or the link between ranks 0 and 1 is cut" in page
    assert "0 - 1 no answer" in page
    assert "the link between rank 1 and the host of rank 0 is cut" in second.stderr


@needs_namespaces
def test_a_limit_of_the_users_holds_for_every_link():
    with network.Network(2, rate_mbit=40) as link:
        good = examine_on(link, arguments=["--at-least", "2"])
        bad = examine_on(link, arguments=["--at-least", "20"])
    assert [end.returncode for end in good] == [0, 0], good[0].stdout
    assert [end.returncode for end in bad] == [1, 1]
    assert "the link between ranks 0 and 1 (" in words(bad[0].stdout)
    assert "is slow: 4." in words(bad[0].stdout)


FAULTS = {
    "interface": (
        'if rank == 1: os.environ["GLOO_SOCKET_IFNAME"] = "none0"',
        r"BROKEN: rank 1 \(\S+\): GLOO_SOCKET_IFNAME=none0 is no interface with an address",
    ),
    "result": (
        "if rank == 1: sums._input = lambda rank: sums.torch.ones(sums.ELEMENTS)",
        r"BROKEN: the exact all-reduce is wrong on ranks 0, 1: relative error",
    ),
    "hanging": (
        "if rank == 1: examine.measure = lambda *_: (time.sleep(40), os._exit(9))",
        r"BROKEN: rank 1 \(\S+\) has stopped answering",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_rank_is_named(run_script, name):
    assert_a_fault_of_rank_1_is_named(run_script, *FAULTS[name])
