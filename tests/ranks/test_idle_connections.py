"""Idle connections of a job: routers forget them, so the kernel probes them."""

import socket

from bagua._tools.doctor.links import Post

SECONDS = 20  # the group's timeout

EVERY_DOOR = f"""
import os, socket, stat, time
from datetime import timedelta
import torch
import torch.distributed as dist
from bagua.comm_hooks import register
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import DiLoCoAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

TIMEOUT = timedelta(seconds={SECONDS})


def sockets():
    '''Of every TCP connection: its ends, and milliseconds and seconds that the kernel waits.'''
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as one:
                if one.type != socket.SOCK_STREAM or one.family == socket.AF_UNIX:
                    continue
                options = [one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
                for option in (
                    *(socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE),
                    *(socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT),
                ):
                    options.append(one.getsockopt(socket.IPPROTO_TCP, option))
                found.append((one.getsockname()[1], one.getpeername()[1], *options))
        except OSError:  # the folder itself, or a socket that listens
            pass
    return found


def check(way, fewest):
    deadline = time.monotonic() + 10.0  # a thread that has just connected may not be done
    while True:
        found = sockets()
        kept = (1, {SECONDS}000, 5, 5, 3), (1, 1800000, 30, 30, 3)  # the latter: of BAGUA_TOP
        known = [one for one in found if one[2:] in kept]
        if known == found or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert found == known, (way, os.environ["MASTER_PORT"], found)
    assert len(found) >= fewest, (way, found)
    print(way, len(found), flush=True)
    dist.barrier() if way != "elastic" else None


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def linear():
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(*algorithm):
    model, optimizer = linear()
    model = model.with_bagua([optimizer], *algorithm)
    for _ in range(2):
        step(model, optimizer)
    return model


dist.init_process_group("gloo", timeout=TIMEOUT)  # torch first
model, optimizer = linear()
hooked = torch.nn.parallel.DistributedDataParallel(model)
register(hooked, "bytegrad")
step(hooked, optimizer)
model, optimizer = linear()
module = DistributedDataParallel(model)
step(module, optimizer)
check("torch's group", 4)
del hooked, module, model
bagua.destroy_process_group()
dist.destroy_process_group()

bagua.init_process_group(timeout=TIMEOUT)
kept = [train(), train(DiLoCoAlgorithm(interval=1))]
bagua.allreduce_inplace(torch.ones(3))
check("own group", 6)
del kept
bagua.destroy_process_group()

agent = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
rank = int(os.environ["RANK"])
if rank == 0:  # the process that serves a store
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    agent.set("port", str(store.port))
else:
    store = dist.TCPStore("127.0.0.1", int(agent.get("port")), is_master=False, timeout=TIMEOUT)
del agent
bagua.init_process_group(store, rank, 2, 2, timeout=TIMEOUT)
kept = train()
check("store of one's own", 4)
bagua.destroy_process_group()
del store, kept

bagua.init_process_group(timeout=TIMEOUT, elastic=True)
kept = train(DiLoCoAlgorithm(interval=1, elastic=True))
check("elastic", 4)
"""


def test_the_kernel_probes_every_idle_connection_of_a_rank(run_script):
    env = {"BAGUA_COMM": "gloo", "BAGUA_TOP": "1"}
    for end in run_script(2, EVERY_DOOR, env=env):
        assert end.returncode == 0, end.stdout + end.stderr
        assert len(end.stdout.splitlines()) == 4, end.stdout


def test_the_kernel_probes_the_doctors_connections():
    posts = [Post("127.0.0.1", rank, bytes(32), timeout=8.0) for rank in range(2)]
    try:
        assert posts[0].open_all({1: posts[1].place}) == {}
        for post, other in zip(posts, (1, 0), strict=True):
            connection = post.connection(other)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
    finally:
        for post in posts:
            post.close()
