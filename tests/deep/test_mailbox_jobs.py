"""The example of a mailbox: three islands as processes, of which one is killed and comes back."""

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
from support.processes import fork_server
from support.processes.fork_server import FORKED_PYTHON

EXAMPLE = Path(__file__).parents[2] / "docs/examples/mailbox.py"

KILLS_ITS_USER = """
import os, runpy, signal, sys
from bagua._outer.mailbox import claims
from bagua._outer.mailbox.rounds import MailboxRanks

claims._BEAT, claims._SILENCE = 0.3, 3.0
confirm, rounds = MailboxRanks.confirm, 0

def count(self, engine):
    global rounds
    rounds += 1
    if rounds == int(os.environ["DIES_IN"]):
        os.kill(os.getpid(), getattr(signal, os.environ["BY"]))
    confirm(self, engine)

MailboxRanks.confirm = count
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments, **variables):
    """An island as a process."""
    variables |= fork_server.variables() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [FORKED_PYTHON, *map(str, arguments)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def outputs_of_one_anchor(islands, rounds):
    """Output of islands until their end, after so many rounds, with one anchor."""
    try:
        outputs = [each.communicate(timeout=90)[0].decode() for each in islands]
    finally:
        for each in islands:
            each.kill()
    found = [re.search(rf"rounds={rounds} loss=.* anchor=(\S+)", text) for text in outputs]
    assert all(found), outputs
    assert len({each[1] for each in found}) == 1, outputs
    return outputs


def start(folder, island, dies_in=0, by="SIGKILL"):
    script = folder / "kill.py"
    script.write_text(KILLS_ITS_USER)
    # All three are needed in each round, so that none is through before the third is back.
    options = "--island", island, "--quorum", "3", "--secret", "of these three islands"
    return run(
        script, EXAMPLE, "--url", f"file://{folder}/run", *options, DIES_IN=str(dies_in), BY=by
    )


def test_an_island_that_is_killed_or_leaves_comes_back_and_all_end_with_one_anchor(tmp_path):
    for by, status in (("SIGKILL", -9), ("SIGTERM", 0)):
        (tmp_path / by).mkdir()
        goes_and_comes_back(tmp_path / by, by, status)


def goes_and_comes_back(tmp_path, by, status):
    islands = [start(tmp_path, name) for name in ("oslo", "paris")]
    killed = start(tmp_path, "rome", dies_in=5, by=by)
    try:
        text = killed.communicate(timeout=90)[0].decode()
        assert killed.returncode == status, text
        islands.append(start(tmp_path, "rome"))
        outputs_of_one_anchor(islands, rounds=20)
    finally:
        for each in (*islands, killed):
            each.kill()


#: An island whose storage answers until the first round is launched, and then no more.
HANGS = """
import itertools, sys, threading
import bagua.torch_api as bagua
import torch
from bagua._outer.mailbox.store import Folder
from bagua.torch_api.algorithms import DiLoCoAlgorithm, Mailbox

hung = threading.Event()

def hangs(name):
    original = getattr(Folder, name)
    def call(self, *args):
        if hung.is_set():
            threading.Event().wait()
        return original(self, *args)
    setattr(Folder, name, call)

for name in ("create", "replace", "read", "names", "remove"):
    hangs(name)
bagua.init_process_group()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mailbox = Mailbox(sys.argv[1], island="oslo", quorum=2, leave_within=10.0)
algorithm = DiLoCoAlgorithm(interval=4, overlap_steps=2, elastic=mailbox)
bagua.wrap(model, [optimizer], algorithm)
try:
    for step in itertools.count(1):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if step == 4:
            hung.set()
            print("hangs", flush=True)
finally:
    bagua.destroy_process_group()
    print("has left", flush=True)
"""


def test_an_island_leaves_within_a_short_notice_while_its_storage_hangs(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    island = run(script, tmp_path / "mailbox")
    try:
        assert island.stdout.readline() == b"hangs\n"
        island.terminate()  # after the notice it is killed by SIGTERM, with another status
        text = island.communicate(timeout=60)[0].decode()
    finally:
        island.kill()
    assert island.returncode == 0, text
    assert "has left" in text


#: A rank of an island of shards, which may be killed before or behind its file of a round.
SHARDS = """
import os, signal, sys
import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua._outer.mailbox import claims
from bagua._outer.mailbox.box import Box
from bagua.torch_api.algorithms import DiLoCoAlgorithm, Mailbox, OuterSGD
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

url, island, dies = sys.argv[1:]
claims._BEAT, claims._SILENCE = 0.3, 3.0
mail, mailed = Box.mail, 0

def mails(self, file):
    global mailed
    mailed += file.path.startswith("round-")
    if dies == "before" and mailed == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    mail(self, file)
    if dies == "behind" and mailed == 4:
        os.kill(os.getpid(), signal.SIGKILL)

Box.mail = mails
bagua.init_process_group()
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mailbox = Mailbox(url, island=island, quorum=2, keep=3, secret="of these two islands")
algorithm = DiLoCoAlgorithm(OuterSGD(), 4, codec="int4_block", overlap_steps=1, elastic=mailbox)
bagua.wrap(model, [optimizer], algorithm)
while model.bagua_algorithm.outer_rounds < 10:
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
loop = model.bagua_algorithm._loop
digest = "".join(f"{value.sum().item().hex()}" for value in loop.state.named().values())
print(f"rounds={model.bagua_algorithm.outer_rounds} loss=0 anchor={digest}", flush=True)
bagua.destroy_process_group()
"""


def start_ranks(folder, island, dies="never"):
    """The ranks of an island of shards, of which the second may die."""
    script = folder / "shards.py"
    script.write_text(SHARDS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    url = f"file://{folder}/run"
    return [
        run(script, url, island, dies if rank else "never", RANK=f"{rank}", **place)
        for rank in range(2)
    ]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("dies", ["before", "behind"])
def test_an_island_of_shards_of_which_a_rank_is_killed_comes_back(tmp_path, dies):
    oslo, paris = start_ranks(tmp_path, "oslo"), start_ranks(tmp_path, "paris", dies)
    again = []
    try:
        assert paris[1].wait(timeout=90) == -9, paris[1].stdout.read()
        # Before its file the island does not count, whatever its first rank has mailed.
        if dies == "before":
            assert not list(tmp_path.glob("run/round-000000003/from-paris-*"))
        paris[0].kill()
        paris[0].communicate(timeout=60)
        again = start_ranks(tmp_path, "paris")
        for rank in range(2):
            outputs_of_one_anchor([oslo[rank], again[rank]], rounds=10)
    finally:
        for each in (*oslo, *paris, *again):
            each.kill()
