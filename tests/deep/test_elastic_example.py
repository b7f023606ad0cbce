"""The examples of elastic jobs under agents of torchrun's: a rank, and a rank of an island, die."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from bagua.torch_api import env
from support.processes import fork_server
from support.processes.fork_server import FORKED_PYTHON

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
ROUNDS = 30

KILLS_ITS_USER = """
import os, runpy, signal, sys, time
from bagua._core.group import membership
from bagua._outer.elastic import ElasticRanks

membership.SECONDS_OF_SILENCE = 2.0
confirm, rounds = ElasticRanks.confirm, 0
own = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
dies = own == (os.environ.get("DIES"), "0")

def count(self, engine):
    global rounds
    rounds += 1
    if dies and rounds == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    members, all_of_them = self._membership, int(os.environ["MEMBERS"])
    waits = rounds == 20 and members._life is not None and len(members.lives) < all_of_them
    while waits and not members.requests():
        time.sleep(0.05)  # those that are left must not be through before it is back
    confirm(self, engine)

ElasticRanks.confirm = count
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_agents(folder, example, jobs, victim):
    """The outputs of agents, one for each of `jobs`: the agent's arguments, and the script's.

    In its fifth round a rank dies, of the agent and with the rank there that `victim` says.
    """
    script = folder / "kill.py"
    script.write_text(KILLS_ITS_USER)
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MEMBERS": str(len(jobs))}
    agents = []
    for number, (of_agent, of_script) in enumerate(jobs):
        command = [
            *(FORKED_PYTHON, "-m", "torch.distributed.run", *of_agent, "--max-restarts=1"),
            *("--monitor_interval=0.05", str(script), str(EXAMPLES / example), *of_script),
            *("--rounds", str(ROUNDS), "--interval", "4"),
        ]
        dies = {"DIES": str(victim[1])} if number == victim[0] else {}
        with open(folder / f"{number}.out", "w") as output:
            agents.append(
                subprocess.Popen(
                    command,
                    env=os.environ | fork_server.variables() | variables | dies,
                    cwd=folder,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [agent.wait(200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    outputs = [(folder / f"{number}.out").read_text() for number in range(len(jobs))]
    assert codes == [0] * len(jobs), "\n---\n".join(output[-3000:] for output in outputs)
    return outputs


@pytest.mark.timeout(300)
def test_a_rank_killed_under_its_agent_comes_back(tmp_path):
    master = ["--master-addr=127.0.0.1", f"--master-port={env.find_free_network_port()}"]
    jobs = [
        (["--nnodes=3", f"--node-rank={node}", "--nproc_per_node=1", *master], [])
        for node in range(3)
    ]
    outputs = run_agents(tmp_path, "elastic.py", jobs, (0, 0))
    assert "begins after 0 outer rounds, ranks [0, 1, 2]" in outputs[0]
    assert outputs[0].count("ranks [0, 1, 2]\n") == 2
    for output in outputs[1:]:
        assert "lost rank(s) 0 in outer round 5, rank(s) 1, 2 go on" in output
        assert "rank(s) 0 came back before outer round" in output
        assert f"round {ROUNDS}: loss" in output
        # An agent may add that the agent of node 0, which has their store, has ended before it.
        assert "ranks=[0, 1, 2]" in [line for line in output.splitlines() if "ranks=" in line][-1]
    assert torch.load(tmp_path / "elastic.pt", weights_only=True).keys() >= {"0.weight"}


@pytest.mark.timeout(300)
def test_an_island_of_which_a_rank_is_killed_comes_back(tmp_path):
    ports = [env.find_free_network_port() for _ in range(2)]
    jobs = [
        (
            ["--nproc_per_node=2", "--master-addr=127.0.0.1", f"--master-port={port}"],
            ["--store", f"127.0.0.1:{ports[0]}", "--islands", "2", "--island", str(island)],
        )
        for island, port in enumerate(ports)
    ]
    whole, broken = run_agents(tmp_path, "elastic_islands.py", jobs, (1, 1))
    assert "lost island(s) 1 in outer round 5, island(s) 0 go on" in whole
    assert "island(s) 1 came back before outer round" in whole
    assert broken.count("begins after 0 outer rounds, islands [0, 1]") == 1
    assert broken.count("outer rounds, islands [0, 1]") == 2
    anchors = [re.findall(r"anchor: loss [\d.]+", output) for output in (whole, broken)]
    assert len(anchors[0]) == 2
    assert sorted(anchors[0]) == sorted(anchors[1])
