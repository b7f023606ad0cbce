"""Places that other launchers than torchrun give their processes, from their variables."""

import os
from unittest import mock

import bagua.torch_api as bagua
import pytest
import torch.distributed as dist
from bagua.__main__ import main
from bagua._core.group import environment, launchers, rendezvous

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def text_of(**variables):
    return {name: str(value) for name, value in variables.items()}


def numbers(prefix, *values, names=("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")):
    return {f"{prefix}_{name}": str(value) for name, value in zip(names, values, strict=True)}


SRUN = text_of(SLURM_PROCID=4, SLURM_NTASKS=5, SLURM_LOCALID=0, SLURM_NODEID=2)
#: A launcher's variables, and rank, size, local rank, local size and node: None where none tells.
TOLD = [
    (numbers("OMPI_COMM_WORLD", 3, 4, 1, 2), (3, 4, 1, 2, None)),
    (numbers("MV2_COMM_WORLD", 3, 4, 1, 2), (3, 4, 1, 2, None)),
    (numbers("JSM_NAMESPACE", 3, 4, 1, 2), (3, 4, 1, 2, None)),
    (numbers("HOROVOD", 3, 4, 1, 2) | {"HOROVOD_CROSS_RANK": "1"}, (3, 4, 1, 2, 1)),
    (text_of(FLUX_TASK_RANK=3, FLUX_JOB_SIZE=4, FLUX_TASK_LOCAL_ID=1), (3, 4, 1, None, None)),
    (
        numbers("SUBMITIT_LOCAL", 1, 2, 1, 0, names=("GLOBALID", "NTASKS", "LOCALID", "NODEID")),
        (1, 2, 1, None, 0),
    ),
    (
        text_of(PMI_RANK=3, PMI_SIZE=4, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=2),
        (3, 4, 1, 2, None),
    ),
    (numbers("PMI", 3, 4, 1, 2), (3, 4, 1, 2, None)),
    (text_of(MPI_RANKID=3, MPI_NRANKS=4, MPI_LOCALRANKID=1), (3, 4, 1, None, None)),
    (SRUN, (4, 5, 0, None, 2)),
    (SRUN | STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, (4, 5, 0, 1, 2)),
    (SRUN | STEP | text_of(SLURM_NTASKS=9, SLURM_STEP_NUM_TASKS=5), (4, 5, 0, None, 2)),
    # PMI of Slurm, which has no local numbers.
    (SRUN | STEP | text_of(PMI_RANK=4, PMI_SIZE=5), (4, 5, 0, None, 2)),
    # mpirun inside of a task of srun.
    (SRUN | STEP | numbers("OMPI_COMM_WORLD", 1, 2, 1, 2), (1, 2, 1, 2, None)),
    (numbers("OMPI_COMM_WORLD", 1, 2, 1, 2) | {"PMIX_RANK": "1"}, (1, 2, 1, 2, None)),
]
#: A batch script or a shell has the numbers of its job, and is one process.
ALONE = [
    {},
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
    {"SLURM_JOB_ID": "7"} | text_of(SLURM_NTASKS=4, SLURM_PROCID=0, SLURM_LOCALID=0),
    {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(0xFFFFFFFA)}
    | text_of(SLURM_NTASKS=4, SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=0),
    {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    | text_of(SLURM_NTASKS=4, SLURM_STEP_NUM_TASKS=1, SLURM_PROCID=0),
    numbers("OMPI_COMM_WORLD", 0, 1, 0, 1),
    numbers("HOROVOD", 1, 2, 1, 2) | {"BAGUA_STARTED_HOROVOD": "1"},
    MEETING,
]


def in_environment(**variables):
    return mock.patch.dict(os.environ, {"PATH": os.environ["PATH"]} | variables, clear=True)


def places():
    getters = [bagua.get_rank, bagua.get_world_size, bagua.get_local_rank, bagua.get_local_size]
    return tuple(getter() for getter in getters)


def test_a_launchers_variables_tell_the_place():
    for variables, expected in TOLD:
        with in_environment(**variables):
            assert launchers.place()[2:] == expected, variables
            told = places()
            assert told[:2] == expected[:2], variables
            local_rank, local_size, node = expected[2:]
            assert told[2:] == (local_rank, 1 if local_size is None else local_size), variables
            assert environment.get_node_rank() == (node or 0), variables


def test_processes_of_a_launcher_meet_where_its_variables_say():
    for variables, (rank, size, local_rank, *_) in TOLD:
        with in_environment(**variables, **MEETING):
            assert rendezvous.is_one_of_several()
            written = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
            assert written == [str(rank), str(size), str(local_rank)], variables


def test_a_process_without_others_is_alone():
    for variables in ALONE:
        with in_environment(**variables):
            before = dict(os.environ)
            assert not rendezvous.is_one_of_several(), variables
            assert places() == (0, 1, 0, 1), variables
            bagua.init_process_group()
            try:
                assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            finally:
                bagua.destroy_process_group()
            assert os.environ == before


def test_variables_of_torchrun_win():
    ours = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for variables, _ in TOLD:
        with in_environment(**variables, **ours):
            assert rendezvous.is_one_of_several()
            assert places() == (1, 2, 1, 2), variables


def refused(variables):
    with in_environment(**variables):
        before = dict(os.environ)
        with pytest.raises(ValueError, match=r"RANK|PROCID|GLOBALID|PE") as raised:
            bagua.init_process_group()
        assert os.environ == before
        assert not dist.is_initialized()
        return str(raised.value)


def test_a_launcher_that_does_not_tell_where_to_meet_is_named_with_the_remedy():
    mpirun = numbers("OMPI_COMM_WORLD", 1, 2, 1, 2)
    text = refused(mpirun)
    assert "Open MPI's mpirun has started 2 processes (OMPI_COMM_WORLD_SIZE=2)" in text
    assert "MASTER_ADDR and MASTER_PORT are not set" in text
    assert "mpirun -x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=29500" in text
    text = refused(mpirun | {"MASTER_ADDR": "10.0.0.1"})
    assert "MASTER_PORT is not set" in text
    text = refused(SRUN | STEP)
    assert "srun has started 5 processes (SLURM_NTASKS=5), this one as SLURM_PROCID=4" in text
    assert "export MASTER_ADDR=$(scontrol show hostnames" in text
    for variables, _ in TOLD:
        text = refused(variables)
        assert "torchrun" in text
        assert "to train alone, unset" in text


def test_the_doctor_names_a_launcher_that_does_not_tell_enough(capsys):
    with in_environment(**numbers("OMPI_COMM_WORLD", 1, 2, 1, 2)):
        assert main(["doctor"]) == 2
    assert "bagua doctor: Open MPI's mpirun has started 2 processes" in capsys.readouterr().err


def test_impossible_and_missing_numbers_are_named():
    text = refused({"PMIX_RANK": "1"})
    assert "PMIX_RANK=1, but no variable tells how many processes there are" in text
    text = refused({"PMI_RANK": "2", "PMI_SIZE": "2"})
    assert text == "PMI_RANK=2 is not a rank of PMI_SIZE=2 processes"
    text = refused({"PMI_RANK": "x", "PMI_SIZE": "2"})
    assert text == "environment variable PMI_RANK='x' is not an integer"


def test_a_child_of_multiprocessing_does_not_take_its_parents_place():
    with mock.patch("bagua._core.group.variables.parent_process", return_value=object()):
        text = refused(numbers("OMPI_COMM_WORLD", 1, 2, 1, 2) | MEETING)
        assert "multiprocessing has started this process from one of them: set RANK" in text
        with in_environment(), pytest.warns(RuntimeWarning, match="it trains alone") as said:
            bagua.init_process_group()
        bagua.destroy_process_group()
    assert [warning.filename for warning in said] == [__file__]


def test_torchs_group_wins_over_all_variables():
    stale = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    for variables in [stale, *(told for told, _ in TOLD)]:
        with in_environment(**variables):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            try:
                assert places() == (0, 1, 0, 1), variables
                assert environment.get_node_rank() == 0, variables
            finally:
                dist.destroy_process_group()


def test_ranks_of_a_store_at_a_loopback_address_are_on_one_host():
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        assert environment.is_loopback(host)
    for host in ("", "10.0.0.1", "127.example.org"):
        assert not environment.is_loopback(host)


def test_a_node_that_nobody_numbers_is_the_host():
    with in_environment():
        here = environment.get_node_number()
        assert 0 <= here < 2**31
        assert here == environment.get_node_number()
        with mock.patch("socket.gethostname", return_value="another"):
            assert environment.get_node_number() != here
    with in_environment(NODE_RANK="3"):
        assert environment.get_node_number() == 3
