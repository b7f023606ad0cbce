"""Launchers that tell a process its place in variables other than torchrun's."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from bagua._core.group import variables
from bagua._core.group.variables import integer

# Numbers of Slurm's steps from here on are batch scripts and interactive shells, not srun's tasks.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


class Launcher(NamedTuple):
    """Names of a launcher's variables; of ``size`` the first that is set."""

    program: str
    rank: str
    size: tuple[str, ...]
    local_rank: str = ""
    local_size: str = ""
    node: str = ""


class Place(NamedTuple):
    """The place of this process in the job that ``launcher`` has started; None: not told."""

    launcher: Launcher
    size_variable: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int | None


def _of_mpi(program: str, prefix: str) -> Launcher:
    size, local = (f"{prefix}_SIZE",), f"{prefix}_LOCAL"
    return Launcher(program, f"{prefix}_RANK", size, f"{local}_RANK", f"{local}_SIZE")


# The first one that has set its variables counts: mpirun may run inside of a task of srun.
_LAUNCHERS = (
    _of_mpi("Open MPI's mpirun", "OMPI_COMM_WORLD"),
    _of_mpi("MVAPICH's mpirun", "MV2_COMM_WORLD"),
    _of_mpi("jsrun", "JSM_NAMESPACE"),
    Launcher("flux run", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_LOCAL_ID"),
    _of_mpi("horovodrun", "HOROVOD")._replace(node="HOROVOD_CROSS_RANK"),
    Launcher(
        "submitit",
        "SUBMITIT_LOCAL_GLOBALID",
        ("SUBMITIT_LOCAL_NTASKS",),
        "SUBMITIT_LOCAL_LOCALID",
        node="SUBMITIT_LOCAL_NODEID",
    ),
    Launcher("mpiexec", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _of_mpi("mpiexec", "PMI"),
    Launcher("mpirun", "MPI_RANKID", ("MPI_NRANKS",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "SLURM_LOCALID",
        node="SLURM_NODEID",
    ),
)
# They tell the rank alone, and stand beside the variables of others.
_RANK_ONLY = {"PMIX_RANK": "a launcher with PMIx", "ALPS_APP_PE": "aprun"}


def place() -> Place | None:
    """What a launcher other than torchrun says; None where there is none.

    A place without a local rank takes the local numbers of another launcher that tells the same
    rank and size, such as those of srun where PMI has none.

    Raises ValueError for a variable that is not a number in its range, and where only the rank is
    told.
    """
    first: Place | None = None
    for launcher in _LAUNCHERS:
        if (found := _read(launcher)) is None:
            continue
        first = first or found
        if found[2:4] == first[2:4] and first.local_rank is None:
            first = Place(*first[:4], *found[4:])
    told = next((name for name in _RANK_ONLY if name in os.environ), None)
    if first is None and told is not None and "SLURM_JOB_ID" not in os.environ:
        raise ValueError(
            f"{_RANK_ONLY[told]} has set {told}={os.environ[told]}, but no variable tells how many "
            "processes there are: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each of "
            f"them, or start torchrun on each machine; to train alone, unset {told}"
        )
    return first


def _read(launcher: Launcher) -> Place | None:
    if launcher.rank not in os.environ or _is_other_start(launcher):
        return None
    name = next((name for name in launcher.size if name in os.environ), None)
    if name is None:
        return None
    rank, size = integer(launcher.rank, 0), integer(name, 1)
    if not 0 <= rank < size:
        raise ValueError(f"{launcher.rank}={rank} is not a rank of {name}={size} processes")
    local = (launcher.local_rank, launcher.local_size, launcher.node)
    numbers = [integer(name, 0) if name in os.environ else None for name in local]
    if launcher.program == "srun":
        numbers[1] = _tasks_of_node(numbers[2])
    return Place(launcher, name, rank, size, *numbers)


def _is_other_start(launcher: Launcher) -> bool:
    """Whether the variables were inherited, and do not mean that this process is one of several."""
    if launcher.program == "horovodrun":
        return "BAGUA_STARTED_HOROVOD" in os.environ
    if launcher.program != "srun" or "SLURM_JOB_ID" not in os.environ:
        return False
    # A batch script and a shell of salloc have the job's number of tasks, and rank 0 at most.
    step = os.environ.get("SLURM_STEP_ID", "")
    return integer(launcher.rank, 0) == 0 and (
        not step.isdecimal() or int(step) >= _FIRST_SPECIAL_STEP
    )


def _tasks_of_node(node: int | None) -> int | None:
    """From a list such as "4(x2),1": tasks of two nodes, and of the third."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE")
    after = 0
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text or ""):
        after += int(nodes or 1)
        if node is not None and node < after:
            return int(tasks)
    return None


def adopt_place() -> bool:
    """Give this process torchrun's variables from those of another launcher.

    Returns False, and changes nothing, where none has started several processes.

    Raises:
        ValueError: the launcher has started several, and this process cannot tell which of them it
            is, or where they meet.
    """
    found = place()
    if found is None or found.size == 1:
        return False
    said = (
        f"{found.launcher.program} has started {found.size} processes "
        f"({found.size_variable}={found.size}), this one as {found.launcher.rank}={found.rank}"
    )
    alone = f"to train alone, unset {found.launcher.rank}"
    if variables.parent_process() is not None:
        raise ValueError(
            f"{said}, but multiprocessing has started this process from one of them: set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT in it, or call "
            f"torch.distributed.init_process_group(rank=..., world_size=...) before; {alone}"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"{said}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, "
            f"so they cannot meet. {_how_to_set(found.launcher)}. Or start torchrun, once on each "
            f"machine; {alone}"
        )
    os.environ.update(RANK=str(found.rank), WORLD_SIZE=str(found.size))
    if found.local_rank is not None:
        os.environ["LOCAL_RANK"] = str(found.local_rank)
    return True


def _how_to_set(launcher: Launcher) -> str:
    if launcher.program == "srun":
        return (
            'Before srun: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | '
            "head -n 1) MASTER_PORT=29500"
        )
    if launcher.program == "Open MPI's mpirun":
        return (
            "Name the machine of rank 0 and a free port there: mpirun -x MASTER_ADDR=10.0.0.1 "
            "-x MASTER_PORT=29500 (on one machine MASTER_ADDR=127.0.0.1)"
        )
    return (
        "Export the address of the machine of rank 0 and a free port there to all of them: "
        "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 (on one machine MASTER_ADDR=127.0.0.1)"
    )
