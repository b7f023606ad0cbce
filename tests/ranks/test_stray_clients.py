"""Listening sockets of a training process; strangers who connect to them change nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from bagua.torch_api.env import find_free_network_port as free_port
from support import training
from support.every_algorithm import wrapped
from support.processes import stray_clients
from support.processes.sockets import listening

STEPS = 150


def train(name, barrier_of=None):
    """Digests of the weights after every tenth step; `barrier_of` is called once it has begun."""
    model = training.network()
    model, optimizer = wrapped(name, model)
    digests = []
    for step in range(STEPS):
        if step == 1 and barrier_of is not None:
            barrier_of()
        training.train(model, optimizer, [training.batch(step, dist.get_rank())])
        if step % 10 == 0:
            digests.append(training.model_bits(model))
    digests.append(training.model_bits(model))
    return digests


@training.with_group
def train_among_strangers(name):
    undisturbed = train(name)
    strangers = None

    def let_them_come():
        nonlocal strangers
        own = [port for _, port in listening().values()]
        ports = {port for ports in training.gather(own) for port in ports}
        everyone = sorted({*ports, int(os.environ["MASTER_PORT"])})
        if dist.get_rank() == 0:
            strangers = subprocess.Popen(
                [sys.executable, stray_clients.__file__, *map(str, everyone)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert strangers.stdout.readline() == "begun\n"
        dist.barrier()

    disturbed = train(name, let_them_come)
    report = None
    if strangers is not None:
        said, _ = strangers.communicate("stop\n", timeout=30)
        assert strangers.returncode == 0
        report = json.loads(said)
    return undisturbed, disturbed, report


@pytest.mark.parametrize("name", ["gradient_allreduce", "low_precision_decentralized"])
def test_strangers_at_every_port_leave_training_bit_identical(ranks, name):
    results = ranks(2, train_among_strangers, name)
    for undisturbed, disturbed, _ in results:
        assert len(set(undisturbed)) > 10
        assert disturbed == undisturbed
    report = results[0][2]
    assert report["rounds"] >= 2
    assert len(report["counts"]) >= 3  # the store and a listener of gloo on each rank
    for port, kinds in report["counts"].items():
        for kind, connected in kinds.items():
            assert connected > 0, f"no {kind} got through to port {port}"


LISTENERS = """
import json, sys
sys.path[:0] = {paths!r}
from support.processes import stray_clients
from support.processes.sockets import listening

seen = {{}}  # inode: who has made it

def noting(what, make):
    def wrapper(*args, **kwargs):
        before = listening()
        try:
            return make(*args, **kwargs)
        finally:
            seen.update((inode, what) for inode in listening().keys() - before.keys())
    return wrapper

assert listening() == {{}}
import torch
import torch.distributed as dist
assert listening() == {{}}
import bagua.torch_api as bagua
import mlbench_core.aggregation.pytorch.centralized as centralized
assert listening() == {{}}, "import bagua listens"

where = sys.modules["torch.distributed.rendezvous"]
where.TCPStore = noting("TCPStore", where.TCPStore)
for name in ("init_process_group", "ProcessGroupGloo"):  # of the script's group, and of ours
    setattr(dist, name, noting("gloo", getattr(dist, name)))
from support import training
from support.every_algorithm import ALGORITHMS, wrapped

bagua.init_process_group()
rank = dist.get_rank()
for name in ALGORITHMS:
    model, optimizer = wrapped(name, training.network())
    training.train(model, optimizer, [training.batch(step, rank) for step in range(4)])
    now = listening()
    assert seen.keys() >= now.keys(), (name, now, seen)
model.bagua_algorithm.abort(model)
aggregation = centralized.AllReduceAggregation(world_size=2)
aggregation.agg_grad()(training.network(), "avg_world")
bagua.communication.barrier()
now = listening()
print(json.dumps([[seen.get(inode), *place] for inode, place in now.items()]))
bagua.destroy_process_group()
"""


def test_every_listening_socket_is_torchs(run_script, tmp_path):
    script = LISTENERS.format(paths=[str(Path(__file__).parents[1])])
    # Here rank 0 has the store, which otherwise torchrun's agent has.
    own_store = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    done = run_script(2, script, env=own_store)
    everything = []
    for rank, end in enumerate(done):
        assert end.returncode == 0, end.stderr
        for who, address, port in json.loads(end.stdout.splitlines()[-1]):
            everything.append((rank, who, address))
            assert who in ("gloo", "TCPStore"), f"{address}:{port} is nobody's"
            # The interface that GLOO_SOCKET_IFNAME names, here the loopback.
            assert address == "127.0.0.1" or who == "TCPStore"
    assert {(rank, who) for rank, who, _ in everything} == {
        (0, "TCPStore"),
        (0, "gloo"),
        (1, "gloo"),
    }
