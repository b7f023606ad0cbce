"""Shaped networks in namespaces, and the counters compared with what left the device."""

import os
import subprocess
import sys

import pytest
from support.processes.networks import needs_namespaces, network
from support.programs.benchmark_programs import BENCHMARKS, load

check_counters = load("check_counters")


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@needs_namespaces
def test_counters_agree_with_the_network_device():
    entries = check_counters.check(3, megabytes=2.0)
    assert len(entries) == 5 * 3
    assert [entry for entry in entries if not entry["ok"]] == []


@needs_namespaces
def test_ranks_reach_each_other_and_everything_is_removed_afterwards():
    own = f"bagua{os.getpid()}n"  # other programs may have networks too
    listen = (
        "import socket; s, _ = socket.create_server(('', 5000)).accept()\n"
        "print(sum(len(piece) for piece in iter(lambda: s.recv(1 << 16), b'')))"
    )
    send = (
        "import os, socket, time\n"
        "while True:\n"
        "    try: s = socket.create_connection((os.environ['MASTER_ADDR'], 5000)); break\n"
        "    except ConnectionRefusedError: time.sleep(0.05)\n"
        "s.sendall(bytes(100_000))\n"
    )
    with network.Network(2, rate_mbit=100) as link:
        start = link.bytes_sent(1)
        ended = link.run([[sys.executable, "-c", source] for source in (listen, send)], timeout=20)
        assert ended[0].stdout == "100000\n"
        assert link.bytes_sent(1) - start == pytest.approx(100_000, rel=0.02)
        left_running = link.popen(0, [sys.executable, "-c", "import time; time.sleep(99)"])
        assert own in namespaces()
    assert left_running.returncode is not None
    assert own not in namespaces()


WRAP_BEHIND_A_QUEUE = """
import os, socket, threading
import torch
import torch.distributed as dist
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm

bagua.init_process_group()
server = socket.create_server(("", 5000))
dist.barrier()
if dist.get_rank() == 0:
    receiver, _ = server.accept()
    def send():
        while True:
            receiver.sendall(bytes(1 << 16))
    threading.Thread(target=send, daemon=True).start()
else:
    sender = socket.create_connection((os.environ["MASTER_ADDR"], 5000))
    def receive():
        while sender.recv(1 << 16):
            pass
    for _ in range(100):  # until the queue is full
        assert sender.recv(1 << 14)
    threading.Thread(target=receive, daemon=True).start()
dist.barrier()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = bagua.wrap(model, [optimizer], GradientAllReduceAlgorithm())
print(model.bagua_stats()["network"]["round_trip_ms"], flush=True)
dist.barrier()
os._exit(0)
"""


@needs_namespaces
def test_ranks_are_not_far_behind_a_queue_that_somebody_fills():
    with network.Network(2, rate_mbit=20) as link:
        commands = [[sys.executable, "-c", WRAP_BEHIND_A_QUEUE]] * 2
        for ended in link.run(commands, {"BAGUA_COMM": "gloo"}, timeout=60):
            assert 0 < float(ended.stdout) < 5


HOLD = """
import sys, time
sys.path.insert(0, {benchmarks!r})
from network import Network
with Network(1):
    print("made", flush=True)
    time.sleep(60)
"""


@needs_namespaces
def test_a_program_that_is_killed_leaves_nothing_for_long():
    source = HOLD.format(benchmarks=str(BENCHMARKS))
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"made\n"
        assert f"bagua{program.pid}n0hub" in namespaces()
        program.kill()
        program.wait()
    with network.Network(1):
        pass
    assert f"bagua{program.pid}n" not in namespaces()


def test_without_root_the_message_says_so(monkeypatch):
    monkeypatch.setattr(network.shutil, "which", lambda program: program)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(network.NetworkUnavailableError, match="need root"), network.Network(2):
        pass


def test_impossible_networks_are_refused():
    with pytest.raises(ValueError, match="1 to 200 ranks"):
        network.Network(0)
    with pytest.raises(ValueError, match="rate must be positive"):
        network.Network(2, rate_mbit=0)
