"""Ranks that mpirun and `torch.multiprocessing.spawn` start."""

import os
import shutil
import subprocess
import sys

import pytest
from bagua.torch_api.env import find_free_network_port as free_port

TRAINS = """
import os, sys
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = bagua.wrap(model, [optimizer], GradientAllReduceAlgorithm())
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
place = [bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(), bagua.get_local_size()]
text = " ".join(map(str, [*place, float(model.weight.sum())]))
os.write(1, f"trained {text}\\n".encode())
"""

SPAWNS = """
import os, sys
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    exec(open(sys.argv[1]).read().replace("bagua.init_process_group()", ""))

if __name__ == "__main__":
    mp.spawn(work, (int(sys.argv[2]),), nprocs=2)
"""


def run(*command):
    of_launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in of_launchers}
    return subprocess.run(
        [*map(str, command)], env=env, capture_output=True, text=True, timeout=100, check=False
    )


def assert_one_job(end):
    lines = sorted(line for line in end.stdout.splitlines() if line.startswith("trained"))
    places = [line.split()[1:5] for line in lines]
    assert places == [["0", "2", "0", "2"], ["1", "2", "1", "2"]], end.stdout + end.stderr
    assert len({line.split()[5] for line in lines}) == 1, lines
    assert end.returncode == 0, end.stderr


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "trains.py"
    path.write_text(TRAINS)
    return path


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: install openmpi-bin")
@pytest.mark.timeout(240)
def test_ranks_of_mpirun_are_one_job_or_learn_how_to_be_one(script):
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    where = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
    assert_one_job(run(*mpirun, *where, sys.executable, script))
    end = run(*mpirun, sys.executable, script)
    assert end.returncode != 0
    assert "trained" not in end.stdout
    assert "Open MPI's mpirun has started 2 processes (OMPI_COMM_WORLD_SIZE=2)" in end.stderr
    assert "mpirun -x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=29500" in end.stderr


@pytest.mark.timeout(120)
def test_ranks_of_spawn_have_the_numbers_of_torchs_group(script, tmp_path):
    spawns = tmp_path / "spawns.py"
    spawns.write_text(SPAWNS)
    assert_one_job(run(sys.executable, spawns, script, free_port()))
