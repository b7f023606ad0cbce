"""torchrun in two network namespaces at once, with the commands of docs/multi-node.md."""

import json
import re
from pathlib import Path

import pytest
from support.processes import fork_server, two_nodes
from support.processes.fork_server import FORKED_PYTHON
from support.processes.networks import needs_namespaces, network

REPOSITORY = Path(__file__).parents[2]
ADDRESSES = {"10.0.0.1": 0, "10.0.0.2": 1}  # of the documentation, by node
COMMAND = re.compile(r"^GLOO_SOCKET_IFNAME=(\S+) torchrun (.*) train\.py$", re.MULTILINE)


def documented_commands(flag):
    """Arguments of the two documented commands that contain `flag`, by node."""
    text = (REPOSITORY / "docs/multi-node.md").read_text()
    found = [(device, line) for device, line in COMMAND.findall(text) if flag in line]
    assert [device for device, _ in found] == [network.DEVICE] * 2
    return [line for _, line in found]


@needs_namespaces
@pytest.mark.parametrize("flag", ["--node_rank", "--rdzv_backend=c10d"])
def test_the_documented_commands_train_hierarchically_and_bytes_are_counted(flag, tmp_path):
    with network.Network(2) as link:
        commands = []
        for line in documented_commands(flag):
            for address, node in ADDRESSES.items():
                line = line.replace(address, link.address(node))
            torchrun = [FORKED_PYTHON, "-m", "torch.distributed.run", *line.split()]
            commands.append([*torchrun, two_nodes.__file__, str(tmp_path)])
        env = fork_server.variables() | {"RES_OPTIONS": "timeout:1 attempts:1"}
        link.run(commands, env=env, timeout=100)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    places = [result["place"] for result in results]
    assert places == [[0, 0, 0, 2], [1, 0, 1, 2], [2, 1, 0, 2], [3, 1, 1, 2]]
    assert max(result["init_seconds"] for result in results) < 10.0
    assert len({result["bits"] for result in results}) == 1
    for result in results:
        assert result["ops"]
        assert all("Hierarchical(2 nodes" in op for op in result["ops"])
    for result in results[::2]:
        # Of the control messages of both ranks, two thirds go to the other node.
        counted = result["sent"]["leaders"] + 2 * result["control"] * 2 / 3
        assert result["measured"] == pytest.approx(counted, rel=0.02)
        share = result["sent"]["leaders"] / (two_nodes.STEPS * result["bytes_of_model"])
        assert share == pytest.approx(0.251, rel=0.02)
    assert [set(result["sent"]) for result in results[1::2]] == [{"node"}] * 2
