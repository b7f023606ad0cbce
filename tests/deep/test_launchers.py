"""Ranks that mpirun, srun, `torch.multiprocessing.spawn` and variables of a pod start."""

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys

import pytest
from bagua.torch_api.env import find_free_network_port as free_port
from support.processes import slurm

TRAINS = """
import os, signal, sys
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = bagua.wrap(model, [optimizer], GradientAllReduceAlgorithm())
for step in range(3):
    if os.environ.get("KILLED") == str(bagua.get_rank()) and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
place = [bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(), bagua.get_local_size()]
text = " ".join(map(str, [*place, float(model.weight.detach().sum())]))
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


def environment(**more):
    of_launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in of_launchers}
    return env | {name: str(value) for name, value in more.items()}


def run(*command, **env):
    command, env = [*map(str, command)], environment(**env)
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )


def assert_one_job(end):
    """Returns what its ranks have said of their weights."""
    lines = sorted(line for line in end.stdout.splitlines() if line.startswith("trained"))
    places = [line.split()[1:5] for line in lines]
    assert places == [["0", "2", "0", "2"], ["1", "2", "1", "2"]], end.stdout + end.stderr
    (weights,) = {line.split()[5] for line in lines}
    assert end.returncode == 0, end.stderr
    return weights


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "trains.py"
    path.write_text(TRAINS)
    return path


@pytest.fixture(scope="module")
def of_torchrun(tmp_path_factory):
    """What ranks of torchrun say of their weights."""
    path = tmp_path_factory.mktemp("torchrun") / "trains.py"
    path.write_text(TRAINS)
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    return assert_one_job(run(sys.executable, *torchrun, path))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: install openmpi-bin")
@pytest.mark.timeout(240)
def test_ranks_of_mpirun_are_one_job_or_learn_how_to_be_one(script, of_torchrun):
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    where = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
    assert assert_one_job(run(*mpirun, *where, sys.executable, script)) == of_torchrun
    killed = run(*mpirun, *where, sys.executable, script, KILLED=1)
    assert killed.returncode != 0
    assert re.search("process rank 1 with PID .* exited on signal 9", killed.stderr)
    end = run(*mpirun, sys.executable, script)
    assert end.returncode != 0
    assert "trained" not in end.stdout
    assert "Open MPI's mpirun has started 2 processes (OMPI_COMM_WORLD_SIZE=2)" in end.stderr
    assert "mpirun -x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=29500" in end.stderr


@pytest.mark.timeout(120)
def test_ranks_of_spawn_have_the_numbers_of_torchs_group(script, tmp_path, of_torchrun):
    spawns = tmp_path / "spawns.py"
    spawns.write_text(SPAWNS)
    assert assert_one_job(run(sys.executable, spawns, script, free_port())) == of_torchrun
    killed = run(sys.executable, spawns, script, free_port(), KILLED=1)
    assert killed.returncode != 0
    assert "ProcessExitedException: process 1 terminated with signal SIGKILL" in killed.stderr


@pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))
@pytest.mark.timeout(300)
def test_ranks_of_srun_are_one_job_or_learn_how_to_be_one(script, tmp_path, of_torchrun):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    srun = ("srun", "--ntasks=2", sys.executable, script)
    with slurm.slurm(tmp_path) as found:
        assert assert_one_job(run(*srun, **found, **where)) == of_torchrun
        killed = run(*srun, **found, **where, KILLED=1)
        end = run(*srun, **found)
    assert killed.returncode != 0
    assert "task 1: Killed" in killed.stderr
    assert "BaguaError: rank 1 was killed, stopped or cut off" in killed.stderr
    assert end.returncode != 0
    assert "srun has started 2 processes (SLURM_STEP_NUM_TASKS=2)" in end.stderr


@pytest.mark.timeout(120)
def test_pods_with_a_rank_and_a_size_are_one_job(script, of_torchrun):
    """Kubernetes' PyTorchJob says no local numbers."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2}
    with concurrent.futures.ThreadPoolExecutor(2) as pods:
        ranks = [pods.submit(run, sys.executable, script, **env, RANK=rank) for rank in range(2)]
        ends = [rank.result() for rank in ranks]
    for end in ends:
        assert end.returncode == 0, end.stderr
    both = "".join(end.stdout for end in ends)
    assert assert_one_job(subprocess.CompletedProcess([], 0, both, "")) == of_torchrun
