"""`bagua doctor` names the broken link, version or setting, within a bounded time.

More faults: test_doctor_faults.py.
"""

import os
import re
import subprocess
import sys

import pytest
from support.processes import fork_server
from support.processes.fork_server import FORKED_PYTHON
from support.processes.pool import run_on_network
from support.programs.benchmark_programs import load

network = load("network")
unavailable = network.why_unavailable()
needs_namespaces = pytest.mark.skipif(
    unavailable is not None, reason=f"no network namespaces: {unavailable}"
)

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


def torchrun(**variables):
    command = [FORKED_PYTHON, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "bagua", "doctor"]
    env = os.environ | fork_server.variables() | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


def test_torchrun_fails_where_something_is_broken():
    end = torchrun(GLOO_SOCKET_IFNAME="none0")
    assert end.returncode == 1
    page = words(end.stdout)
    for rank in range(2):
        assert re.search(rf"BROKEN: rank {rank} \(\S+\): GLOO_SOCKET_IFNAME=none0 is no", page), (
            page
        )
    assert "No fault found" not in page


def test_torchrun_starts_it_and_a_good_job_has_no_fault():
    end = torchrun()
    assert end.returncode == 0, end.stdout + end.stderr
    assert end.stdout.endswith("No fault found.\n")
    assert list(measured(end.stdout)) == [(0, 1)]
    assert max(map(len, end.stdout.splitlines())) <= 80
    exact, compressed = re.findall(r"relative error (\S+),", end.stdout)
    assert float(exact) < 1e-6 < 1e-4 < float(compressed) < 0.05


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
    assert "all-reduce of 0.4 MB" in page, "a slow link is no reason to check no sum"
    assert [end.stdout for end in ends[1:]] == ["", ""]


def test_a_store_that_falls_silent_at_the_start_is_told(run_script):
    before = "if rank == 1: examine.agree_on_incarnation = lambda *_: time.sleep(999)"
    first, second = run_script(2, script(before, ["--start", "2"]), timeout=SECONDS)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "BROKEN: rank 0 of 2: rank 1 did not come within 2 s" in first.stderr
    assert "BROKEN: rank 1: the job's store has stopped answering" in second.stderr


FAULTS = {
    "version": (
        'if rank == 1: bagua.__version__ = "0.9"',
        r"BROKEN: ranks differ in the version of bagua: \S+ on rank 0, 0\.9 on rank 1",
    ),
    "exited": (
        "if rank == 1: examine.measure = lambda *_: os._exit(9)",
        r"BROKEN: rank 1 \(\S+\) has stopped answering .* Its process has ended",
    ),
}


def assert_a_fault_of_rank_1_is_named(run_script, before, expected):
    first, second = run_script(2, script(before), timeout=SECONDS)
    assert first.returncode == 1, first.stdout + first.stderr
    assert second.returncode != 0
    assert re.search(expected, words(first.stdout)), first.stdout


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_rank_is_named(run_script, name):
    assert_a_fault_of_rank_1_is_named(run_script, *FAULTS[name])
