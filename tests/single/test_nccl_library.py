"""Choice of the NCCL library, and the real one of the wheel as far as it works without a GPU."""

import importlib.metadata
import json
import os

import pytest
import torch
from bagua import _C
from bagua._core.group import connections as _transport
from bagua.torch_api import env
from support.processes.pool import run_script

if not _C.has_nccl:
    pytest.skip("this build has no nccl.h", allow_module_level=True)

from support.programs.fake_nccl import nccl_wheel

LIBRARY = str(nccl_wheel() / "lib" / "libnccl.so.2")
needs_no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch has loaded NCCL")


def json_of(script, **variables):
    """What a script of its own process prints as JSON: NCCL stays out of this one."""
    env = {"NCCL_SOCKET_IFNAME": "lo", "LIBRARY": LIBRARY, **variables}
    (done,) = run_script(1, script, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def versions_installed():
    names = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
    return {d.version for d in importlib.metadata.distributions() if d.metadata["Name"] in names}


FIND = """
import ctypes, json, os, torch
from bagua import _C
first = _C.NcclLibrary.find(["/nowhere/libnccl.so.2", os.environ["LIBRARY"]])
second = _C.NcclLibrary.find(["/nowhere/libnccl.so.2"])
print(json.dumps([first.path, first.version, second.path]))
"""


@needs_no_cuda
def test_the_first_library_that_loads_is_taken_and_stays_the_only_one():
    path, version, second = json_of(FIND)
    assert os.path.samefile(path, LIBRARY)
    assert second == path
    assert version in versions_installed()


NOWHERE = """
import json, torch
from bagua import _C
try:
    _C.NcclLibrary.find(["/nowhere/a.so", "/nowhere/b.so"])
except _C.BaguaError as error:
    print(json.dumps(str(error)))
"""


@needs_no_cuda
def test_no_library_is_an_error_with_the_paths_and_the_remedy():
    message = json_of(NOWHERE)
    assert "the process has no libnccl.so.2 and tried:\n  /nowhere/a.so: " in message
    assert "\n  /nowhere/b.so: " in message
    for remedy in ("nvidia-nccl", "BAGUA_NCCL_LIBRARY", "BAGUA_COMM=c10d"):
        assert remedy in message


def test_a_library_that_is_not_nccl_is_refused():
    with pytest.raises(_C.BaguaError, match=r"libm\.so\.6 has no ncclGetVersion"):
        _C.NcclLibrary.open("libm.so.6")


CONNECT = """
import json, threading, time, torch, torch.distributed as dist
from bagua import _C
library = _C.NcclLibrary.open({path!r})
store = dist.HashStore()
outcomes = [None, None]
def connect(rank):
    start = time.monotonic()
    try:
        _C.NcclCommunicator(library, store, rank, 2, torch.device("cpu"), 20.0)
    except Exception as error:
        outcomes[rank] = type(error).__name__, str(error), time.monotonic() - start
ranks = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
for rank in ranks: rank.start()
for rank in ranks: rank.join()
print(json.dumps([len(store.get("id")), outcomes]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nccl_makes_an_id_and_fails_to_connect_with_a_typed_error():
    id_bytes, outcomes = json_of(CONNECT.format(path=LIBRARY))
    assert id_bytes == 128
    for rank, (name, message, seconds) in enumerate(outcomes):
        assert name == "BaguaError"
        assert f"rank {rank} of 2: connecting through NCCL failed: " in message
        assert seconds < 20
    assert any("NCCL reports unhandled cuda error" in message for _, message, _ in outcomes)


def test_the_library_of_the_wheel_comes_before_those_of_torch_and_the_loader(monkeypatch):
    monkeypatch.delenv("BAGUA_NCCL_LIBRARY", raising=False)
    paths = _transport.nccl_paths()
    assert os.path.samefile(paths[0], LIBRARY)
    assert paths[-1] == "libnccl.so.2"
    monkeypatch.setenv("BAGUA_NCCL_LIBRARY", "/opt/nccl/libnccl.so.2")
    assert _transport.nccl_paths() == ["/opt/nccl/libnccl.so.2"]


@pytest.mark.parametrize(
    ("value", "choice", "through"),
    [
        (None, None, "nccl"),
        ("", None, "nccl"),
        ("nccl", "nccl", "nccl"),
        ("c10d", "c10d", "c10d"),
        ("gloo", "gloo", "gloo"),
        ("shm", "shm", "nccl"),
        ("auto", "auto", "nccl"),
    ],
    ids=["unset", "empty", "nccl", "c10d", "gloo", "shm", "auto"],
)
def test_bagua_comm_chooses_the_transport_of_cuda_tensors(monkeypatch, value, choice, through):
    if value is None:
        monkeypatch.delenv("BAGUA_COMM", raising=False)
    else:
        monkeypatch.setenv("BAGUA_COMM", value)
    assert env.get_comm() == choice
    assert _transport.cuda_transport() == through


def test_any_other_bagua_comm_is_refused(monkeypatch):
    monkeypatch.setenv("BAGUA_COMM", "mpi")
    with pytest.raises(ValueError, match="BAGUA_COMM='mpi' must be nccl, c10d, gloo, shm or auto"):
        _transport.cuda_transport()
