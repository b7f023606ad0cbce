"""A Slurm of one machine: munged, slurmctld and slurmd of Debian, in a folder, for one test."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from bagua.torch_api.env import find_free_network_port as free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
SECONDS = 30  # until the node is idle
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing():
    """The reason why there can be no Slurm here, or None."""
    absent = [name for name in PROGRAMS if _path(name) is None]
    if absent:
        return f"no {absent[0]}: install slurmctld, slurmd, slurm-client and munge"
    return None if os.geteuid() == 0 else "slurmd needs root"


def _path(name):
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


@contextlib.contextmanager
def slurm(folder):
    """Variables of the environment with which srun finds it."""
    folder = Path(folder)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            controller=free_port(),
            daemon=free_port(),
        )
    )
    places = [f"--{name}={folder}/munge.{end}" for name, end in
              (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"),
               ("log-file", "log"), ("seed-file", "seed"))]  # fmt: skip
    env = os.environ | {"SLURM_CONF": str(configuration)}
    with contextlib.ExitStack() as daemons:
        for command in (
            ["munged", "--force", "--foreground", *places],
            ["slurmctld", "-D", "-i"],
            ["slurmd", "-D"],
        ):
            daemons.enter_context(_daemon(command, env, folder / f"{command[0]}.out"))
        _wait_for_the_node(env, folder)
        yield {"SLURM_CONF": str(configuration)}


@contextlib.contextmanager
def _daemon(command, env, output):
    with output.open("w") as file:
        process = subprocess.Popen(
            [_path(command[0]), *command[1:]], env=env, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_the_node(env, folder):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ask = ["sinfo", "--noheader", "--format=%t"]
        found = subprocess.run(ask, env=env, capture_output=True, text=True, check=False)
        if found.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    words = "\n".join(file.read_text() for file in folder.glob("*.out"))
    raise AssertionError(f"Slurm's node is {found.stdout} {found.stderr}\n{words}")
