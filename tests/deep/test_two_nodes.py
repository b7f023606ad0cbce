"""torchrun in two network namespaces at once, with the commands of docs/multi-node.md."""

import json
import re
from pathlib import Path

import pytest
from support.processes import fork_server, two_nodes
from support.processes.fork_server import FORKED_PYTHON
from support.processes.networks import needs_namespaces, network

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(two_nodes.__file__)
ADDRESSES = {"10.0.0.1": 0, "10.0.0.2": 1}  # of the documentation, by node

pytestmark = needs_namespaces

COMMAND = re.compile(r"^GLOO_SOCKET_IFNAME=(\S+) torchrun (.*) train\.py$", re.MULTILINE)


def documented_commands(flag):
    """Arguments of the two documented commands that contain `flag`, by node."""
    text = (REPOSITORY / "docs/multi-node.md").read_text()
    found = [(device, line) for device, line in COMMAND.findall(text) if flag in line]
    assert [device for device, _ in found] == [network.DEVICE] * 2
    return [line for _, line in found]


def run_documented(flag, folder, algorithms):
    """What each rank wrote, by rank."""
    with network.Network(2) as link:
        commands = []
        for line in documented_commands(flag):
            for address, node in ADDRESSES.items():
                line = line.replace(address, link.address(node))
            torchrun = [FORKED_PYTHON, "-m", "torch.distributed.run", *line.split()]
            commands.append([*torchrun, str(SCRIPT), str(folder), *algorithms])
        env = fork_server.variables() | {"RES_OPTIONS": "timeout:1 attempts:1"}
        link.run(commands, env=env, timeout=100)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_documented("--node_rank", tmp_path_factory.mktemp("static"), two_nodes.ALGORITHMS)


def assert_two_nodes_of_two(results):
    places = [(r["rank"], r["node"], r["local_rank"], r["local_size"]) for r in results]
    assert places == [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 2), (3, 1, 1, 2)]


def test_two_nodes_are_seen(results):
    assert_two_nodes_of_two(results)
    for result in results:
        for name, seen in result["algorithms"].items():
            sending = [op for op in seen["ops"] if not op.startswith("UpdateMomentum")]
            assert sending, name
            assert all("Hierarchical(2 nodes" in op for op in sending), name


def test_joining_takes_no_time(results):
    assert max(result["init_seconds"] for result in results) < 10.0


@pytest.mark.parametrize("name", two_nodes.ALGORITHMS)
def test_algorithms_keep_their_promise(results, name):
    _, expected = two_nodes.ALGORITHMS[name]
    for result in results:
        seen = result["algorithms"][name]
        assert seen["equal"] == expected.ranks_agree
        assert seen["equal_after_rest"] == expected.agree_after_rest
        assert seen["astray"] < expected.astray


@pytest.mark.parametrize("name", two_nodes.ALGORITHMS)
def test_bytes_between_nodes_equal_the_counters(results, name):
    for result in results:
        seen = result["algorithms"][name]
        leads = result["local_rank"] == 0
        assert ("leaders" in seen["sent"]) == leads
        assert set(seen["sent"]) <= {"leaders", "node"}
        if not leads:
            continue
        # Of the control messages of both ranks, two thirds go to the other node.
        counted = seen["sent"]["leaders"] + 2 * seen["control"] * 2 / 3
        assert seen["measured"] == pytest.approx(counted, rel=0.02)
        share = seen["sent"]["leaders"] / (two_nodes.STEPS * result["bytes_of_model"])
        assert share == pytest.approx(two_nodes.ALGORITHMS[name][1].share, rel=0.02)


def test_the_elastic_rendezvous_of_the_documentation_works_too(tmp_path):
    results = run_documented("--rdzv_backend=c10d", tmp_path, ["bytegrad"])
    assert_two_nodes_of_two(results)
    assert all(result["algorithms"]["bytegrad"]["equal"] for result in results)
