"""`bagua doctor` names the broken link, version or setting, within a bounded time."""

import re
import subprocess
import sys
import time

import pytest
from bagua.torch_api.algorithms.base import GlobalAlgorithmRegistry
from support.processes.networks import needs_namespaces, network
from support.processes.pool import run_on_network, run_script, torchrun

DOCTOR = """
import os, sys, time
import bagua
from bagua.__main__ import main
from bagua._tools.doctor import examine, sums
rank = int(os.environ["RANK"])
{before}
sys.exit(main(["doctor", "--timeout", "3", "--start", "20", *{arguments!r}]))
"""
# The longest examination with one fault: to meet, to connect, to wait for words.
SECONDS = 60.0
# A rank per node, as the launcher of three machines sets it.
OWN_NODES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def script(before="", arguments=()):
    return DOCTOR.format(before=before, arguments=list(arguments))


def words(text):
    """The text of a page without its line breaks."""
    return " ".join(text.split())


def examine_on(link, before="", meanwhile=None, arguments=()):
    """The ends of all ranks, a node each."""
    return run_on_network(
        link, script(before, arguments), env=OWN_NODES, meanwhile=meanwhile, timeout=SECONDS
    )


def measured(page):
    """{(rank, rank): (MB/s there, MB/s back)} of a page."""
    rows = re.findall(r"^ *(\d+) - +(\d+) +\d+\.\d+ ms +([\d.]+) +([\d.]+) +\d+ +\d+$", page, re.M)
    return {(int(a), int(b)): (float(there), float(back)) for a, b, there, back in rows}


def test_torchrun_fails_where_something_is_broken():
    end = torchrun(2, "-m", "bagua", "doctor", env={"GLOO_SOCKET_IFNAME": "none0"})
    assert end.returncode == 1
    page = words(end.stdout)
    what = "GLOO_SOCKET_IFNAME=none0 is not an interface with an address"
    for rank in range(2):
        assert re.search(rf"BROKEN: rank {rank} \(\S+\): {what}", page), page
    assert "No fault found" not in page


def test_torchrun_starts_it_and_a_good_job_has_no_fault():
    end = torchrun(2, "-m", "bagua", "doctor")
    assert end.returncode == 0, end.stdout + end.stderr
    assert "\nNo fault found.\nadvice: " in end.stdout
    assert list(measured(end.stdout)) == [(0, 1)]
    assert max(map(len, end.stdout.splitlines())) <= 80
    exact, compressed = re.findall(r"relative error (\S+),", end.stdout)
    assert float(exact) < 1e-6 < 1e-4 < float(compressed) < 0.05


@pytest.mark.timeout(300)
def test_a_training_with_every_algorithm_is_compared_with_ddp():
    small = "from bagua._tools.doctor import train; train._TURNS = 1; train._HIDDEN = 256"
    program = script(small, ["--train", "--device", "cpu"])
    ends = run_script(2, program, timeout=3 * SECONDS)
    end = ends[0]
    assert [each.returncode for each in ends] == [0, 0], end.stdout + end.stderr
    assert ends[1].stdout == ""
    assert max(map(len, end.stdout.splitlines())) <= 80
    rows = re.findall(r"^(\S.*\S) +[\d.]+ +[\d.]+x +([\d.]+)  (equal|own)$", end.stdout, re.M)
    assert rows[0][::2] == ("torch DDP", "equal")
    names = {name for name, _ in GlobalAlgorithmRegistry.items()} - {"auto"}
    assert {name.split(",")[0] for name, *_ in rows[1:]} == names
    free = {name.split(",")[0] for name, _, weights in rows if weights == "own"}
    assert free <= {"decentralized", "low_precision_decentralized", "async"}
    sent = {name: float(text) for name, text, _ in rows}
    assert sent["gradient_allreduce, exact"] == sent["torch DDP"]
    assert 0.25 < sent["bytegrad, 8 bits"] / sent["torch DDP"] < 0.26
    assert "\nNo fault found.\n" in end.stdout


LEAVES = """
import os, sys
from bagua.__main__ import main
from bagua._tools.doctor import train
if os.environ["RANK"] == "1":
    train._Way.turn = lambda way: os._exit(3)
sys.exit(main(["doctor", "--train", "--device", "cpu"]))
"""


def test_a_rank_that_leaves_a_training_is_a_fault_for_the_others():
    first, second = run_script(2, LEAVES, timeout=3 * SECONDS)
    assert (first.returncode, second.returncode) == (1, 3)
    assert "BROKEN: " in first.stderr
    assert "No fault found" not in first.stdout


def test_without_a_launcher_it_tells_the_command():
    env = {"PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-m", "bagua", "doctor"]
    end = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert end.returncode == 2
    assert "torchrun --nproc-per-node 2 -m bagua doctor" in end.stderr


@needs_namespaces
def test_a_slow_link_is_named():
    with network.Network(3) as link:
        link.shape(2, 20)
        ends = examine_on(link)
    assert [end.returncode for end in ends] == [1, 1, 1], ends[0].stdout + ends[0].stderr
    page = ends[0].stdout
    rows = measured(page)
    assert rows.keys() == {(0, 1), (0, 2), (1, 2)}
    for pair in ((0, 2), (1, 2)):
        assert all(1.5 < speed < 2.6 for speed in rows[pair]), page
    assert min(rows[0, 1]) > 15.0
    assert "BROKEN: all links between rank 2" in words(page)
    assert page.count("BROKEN") == 1
    assert "all-reduce of 0.4 MB" in page, "a slow link is not a reason to check no sum"
    assert [end.stdout for end in ends[1:]] == ["", ""]


def test_a_store_that_falls_silent_at_the_start_is_told(run_script):
    before = "if rank == 1: examine.agree_on_incarnation = lambda *_: time.sleep(999)"
    first, second = run_script(2, script(before, ["--start", "2"]), timeout=SECONDS)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "BROKEN: rank 0 of 2: rank 1 did not come within 2 s" in first.stderr
    assert "BROKEN: rank 1: the job's store has stopped answering" in second.stderr


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
        ends = examine_on(link, arguments=["--start", "5"])
    assert [end.returncode for end in ends] == [1, 1, 1]
    assert "BROKEN: rank 0 of 3: rank 2 did not come within 5 s" in ends[0].stderr
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
        ends = examine_on(link, arguments=["--at-least", "20"])
    assert [end.returncode for end in ends] == [1, 1]
    assert "the link between ranks 0 and 1 (" in words(ends[0].stdout)
    assert "is slow: 4." in words(ends[0].stdout)


FAULTS = {
    "version": (
        'if rank == 1: bagua.__version__ = "0.9"',
        r"BROKEN: ranks differ in the version of bagua: \S+ on rank 0, 0\.9 on rank 1",
    ),
    "exited": (
        "if rank == 1: examine.measure = lambda *_: os._exit(9)",
        r"BROKEN: rank 1 \(\S+\) has stopped answering .* Its process has ended",
    ),
    "result": (
        "if rank == 1: sums._input = lambda rank: sums.torch.ones(sums.ELEMENTS)",
        r"BROKEN: the exact all-reduce is wrong on ranks 0, 1: relative error",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_rank_is_named(run_script, name):
    before, expected = FAULTS[name]
    first, second = run_script(2, script(before), timeout=SECONDS)
    assert first.returncode == 1, first.stdout + first.stderr
    assert second.returncode != 0
    assert re.search(expected, words(first.stdout)), first.stdout
