"""Ranks that are far from each other: network namespaces, joined by an emulated wide area.

    with WideArea(2, rtt_ms=80, mbit=200) as link:
        link.path(0, 1, loss_percent=0.1)
        ends = run_on_network(link, script, meanwhile=lambda output_of: link.cut(0, 1))

tests/cpp/wide_area has the emulator, one process in user space. It needs root, /dev/net/tun and
g++. Everything can be changed while ranks run, from any thread.
"""

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import threading
import time

import pytest
from support.processes.networks import network
from support.programs import cpp_programs

__all__ = ["WideArea", "needs_wide_area", "wait_for"]

DEVICE = "wan0"
TUN = "/dev/net/tun"
BYTES_OF_A_PACKET = 1500
CLONE_NEWNET = 0x40000000


def why_unavailable():
    """The reason why no WideArea can be made here, or None."""
    if reason := network.why_unavailable():
        return reason
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        return f"{TUN}: {error.strerror}"
    return None if shutil.which("g++") else "g++ not found"


_missing = why_unavailable()
needs_wide_area = pytest.mark.skipif(_missing is not None, reason=f"no wide area: {_missing}")


class WideArea:
    """A context manager: `ranks` namespaces, whose device wan0 leads to all others.

    `rtt_ms`: of every pair; half of it is the delay of a path. `mbit`: of the connection of each
    namespace, up and down; None: any rate. `congestion`: their default for TCP; reno takes a lost
    packet for congestion, as the usual cubic does, which not every kernel allows here; None: the
    machine's. Serves `run_on_network` as a `Network` does.
    """

    def __init__(self, ranks, rtt_ms=0.0, mbit=None, seed=1, congestion="reno"):
        self.ranks = ranks
        self._network = network.Network(ranks)
        self._beginning = rtt_ms, mbit
        self._seed = seed
        self._congestion = congestion
        self._open = contextlib.ExitStack()
        self._asking = threading.Lock()

    def __enter__(self):
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._network)
            self._process = opened.enter_context(self._start())
            assert self._process.stdout.readline() == "ready\n", "the emulator has not begun"
            opened.callback(self._process.stdin.close)  # which ends it
            for rank in range(self.ranks):
                self._set_up(rank)
            self._open = opened.pop_all()
        rtt_ms, mbit = self._beginning
        self.path("*", "*", delay_ms=rtt_ms / 2)
        self.node("*", up_mbit=mbit or 0, down_mbit=mbit or 0, queue_ms=max(200, 2 * rtt_ms))
        return self

    def __exit__(self, *_):
        self._open.close()

    def _start(self):
        names = [self.namespace(rank) for rank in range(self.ranks)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([program(), str(self._seed), *names], **pipes, text=True)

    def _set_up(self, rank):
        self._network.set_link(rank, "down")  # the way around
        for words in (
            ["address", "add", f"{self.address(rank)}/24", "dev", DEVICE],
            ["link", "set", DEVICE, "mtu", str(BYTES_OF_A_PACKET), "txqueuelen", "4000", "up"],
        ):
            subprocess.run(["ip", "-n", self.namespace(rank), *words], check=True)
        if self._congestion is not None:
            setting = f"net.ipv4.tcp_congestion_control={self._congestion}"
            command = ["ip", "netns", "exec", self.namespace(rank), "sysctl", "-q", "-w", setting]
            subprocess.run(command, check=True)

    def namespace(self, rank):
        return self._network.namespace(rank)

    def address(self, rank):
        return f"10.88.0.{rank + 1}"

    def environment(self, rank):
        return self._network.environment(rank) | {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
            "NODE_RANK": str(rank),
            "MASTER_ADDR": self.address(0),
            "GLOO_SOCKET_IFNAME": DEVICE,
        }

    def path(self, one, other, **settings):
        """The way from one rank to another, in this direction; "*" stands for all ranks.

        delay_ms, jitter_ms; loss_percent, in bursts of `burst` packets (mean); reorder_percent,
        duplicate_percent; rate_mbit; mtu: larger packets vanish; cut: 1, all packets do. 0: not.
        """
        self._set("path", one, other, **settings)

    def node(self, rank, **settings):
        """The connection of a rank.

        up_mbit, down_mbit; queue_ms: what waits longer is dropped; nat_ms: a router that forgets
        TCP connections that are idle for so long, and gives the next packet another port;
        firewall_ms: one that drops it.
        """
        self._set("node", rank, **settings)

    def cut(self, one, other):
        """Lose all packets between two ranks, in both directions."""
        self.path(one, other, cut=1)
        self.path(other, one, cut=1)

    def mend(self, one, other):
        self.path(one, other, cut=0)
        self.path(other, one, cut=0)

    def counts(self):
        """Of each path, by (from, to): packets, bytes, lost, full, cut, large, forgotten."""
        found = json.loads(self._ask("counts"))
        return {tuple(map(int, key.split())): value for key, value in found.items()}

    def socket(self, rank, kind=socket.SOCK_DGRAM):
        """A socket in the namespace of a rank, bound to its address, that waits ten seconds."""
        made = []

        def make():  # in a thread that ends in the namespace
            with open(f"/run/netns/{self.namespace(rank)}") as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
            made.append(socket.socket(socket.AF_INET, kind))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        made[0].bind((self.address(rank), 0))
        made[0].settimeout(10.0)
        return made[0]

    def _set(self, *words, **settings):
        answer = self._ask(*words, *(f"{key}={value}" for key, value in settings.items()))
        if answer != "ok":
            raise ValueError(answer)

    def _ask(self, *words):
        with self._asking:
            self._process.stdin.write(" ".join(map(str, words)) + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline().strip()


def program():
    """The emulator, compiled."""
    compiles = ["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror"]

    def make(folder):
        source = "tests/cpp/wide_area/wide_area.cpp"
        cpp_programs.command([*compiles, source, "-o", folder / "wide_area"])

    folders = ["tests/cpp/wide_area"]
    return str(cpp_programs.kept("wide_area", make, *compiles, folders=folders) / "wide_area")


def wait_for(output_of, rank, text, seconds=90.0):
    """Return once a rank has printed `text`; for `meanwhile` of `run_on_network`."""
    deadline = time.monotonic() + seconds
    while text not in (output := output_of(rank)):
        assert time.monotonic() < deadline, f"rank {rank} does not print {text!r}: {output}"
        assert "told" not in output, output  # an error, with which it has ended
        time.sleep(0.01)
