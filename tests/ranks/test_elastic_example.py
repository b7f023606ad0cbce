"""The example of an elastic job, whose ranks have an agent of torchrun's each; one is killed."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from bagua.torch_api import env
from support.processes import fork_server
from support.processes.fork_server import FORKED_PYTHON

EXAMPLE = Path(__file__).parents[2] / "docs/examples/elastic.py"
ROUNDS = 30

KILLS_ITS_USER = """
import os, runpy, signal, sys, time
from bagua._core.group.elastic import pulse
from bagua._outer.elastic import ElasticRanks

pulse.SECONDS_OF_SILENCE = 2.0
confirm, rounds = ElasticRanks.confirm, 0
dies = (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("0", "0")

def count(self, engine):
    global rounds
    rounds += 1
    if dies and rounds == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    members = self._membership
    while rounds == 20 and len(members.lives) < 3 and not members.unsettled(members.requests()):
        time.sleep(0.05)  # the two that are left must not be through before it is back
    confirm(self, engine)

ElasticRanks.confirm = count
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.timeout(300)
def test_a_rank_killed_under_its_agent_comes_back(tmp_path):
    script = tmp_path / "kill.py"
    script.write_text(KILLS_ITS_USER)
    port = env.find_free_network_port()
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agents = []
    for node in range(3):
        command = [
            *(FORKED_PYTHON, "-m", "torch.distributed.run", "--nnodes=3", f"--node-rank={node}"),
            *("--nproc_per_node=1", "--master-addr=127.0.0.1", f"--master-port={port}"),
            *("--max-restarts=1", "--monitor_interval=0.05", str(script), str(EXAMPLE)),
            *("--rounds", str(ROUNDS), "--interval", "4"),
        ]
        with open(tmp_path / f"{node}.out", "w") as output:
            agents.append(
                subprocess.Popen(
                    command,
                    env=os.environ | fork_server.variables() | variables,
                    cwd=tmp_path,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [agent.wait(200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    outputs = [(tmp_path / f"{node}.out").read_text() for node in range(3)]
    assert codes == [0, 0, 0], "\n---\n".join(output[-3000:] for output in outputs)
    assert "begins after 0 outer rounds, ranks [0, 1, 2]" in outputs[0]
    assert outputs[0].count("ranks [0, 1, 2]\n") == 2
    for output in outputs[1:]:
        assert "lost rank(s) 0 in outer round 5, rank(s) 1, 2 go on" in output
        assert "rank(s) 0 came back before outer round" in output
        assert f"round {ROUNDS}: loss" in output
        assert "ranks=[0, 1, 2]" in output.splitlines()[-1]
    assert torch.load(tmp_path / "elastic.pt", weights_only=True).keys() >= {"0.weight"}
