"""Shaped networks on one machine: a network namespace per rank, all on one bridge.

    with Network(ranks=2, rate_mbit=200) as network:
        processes = network.run([[sys.executable, "step.py"]] * 2)
        print(network.bytes_sent(0))

Needs Linux, root, and the programs `ip` and `tc` (Debian: iproute2). Each link passes through
a token bucket (tbf) in both directions, so a rank sends and receives at up to `rate_mbit` at the
same time; tbf counts packet headers, so 0.94 of that is payload. A machine with few cores measures
its scheduler once there are more ranks than cores. Shaping costs processor time for every packet,
which a network card would not: a quarter of a core per rank at 200 Mb/s, a twentieth with
mtu=9000.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

DEVICE = "eth0"  # the name inside every namespace
ETHERNET_BYTES = 14
HEADER_BYTES = ETHERNET_BYTES + 52  # IPv4 20, TCP 20 and its time stamp option 12
MIN_BURST_BYTES = 32 * 1024
BURST_SECONDS = 0.001  # what a token bucket may send at once; timers are not finer than that
QUEUE_SECONDS = "50ms"  # what waits longer in the bucket's queue is dropped
PORT = 29500  # inside the namespace of rank 0: nothing else is there
_counter = itertools.count()


class NetworkUnavailableError(RuntimeError):
    """This machine or user cannot make network namespaces; the message says why."""


def why_unavailable() -> str | None:
    """The reason why no Network can be made here, or None."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root; run as root"
    probe = f"bagua{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"the kernel refuses network namespaces ({made.stderr.strip()})"
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return None


class Network:
    """Namespaces for `ranks` ranks; rate_mbit: megabits per second each way, None: unshaped.
    mtu: the largest packet, in bytes.

    A context manager: everything, processes started here included, is gone when it ends, SIGTERM
    included (it becomes SystemExit); what a killed program left behind goes when the next network
    is made. Raises NetworkUnavailableError where it cannot be made, RuntimeError naming the command
    that failed.
    """

    def __init__(self, ranks: int, rate_mbit: float | None = None, mtu: int = 1500) -> None:
        if not 1 <= ranks <= 200:
            raise ValueError(f"a network has 1 to 200 ranks, not {ranks}")
        if rate_mbit is not None and rate_mbit <= 0:
            raise ValueError(f"the rate must be positive, not {rate_mbit} Mbit/s")
        self.ranks = ranks
        self.rate_mbit = rate_mbit
        self.mtu = mtu
        self._prefix = f"bagua{os.getpid()}n{next(_counter)}"
        self._namespaces: list[str] = []
        self._handles_sigterm = False
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        if reason := why_unavailable():
            raise NetworkUnavailableError(f"cannot make a shaped network: {reason}")
        _delete_abandoned()
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit_cleanly)
            self._handles_sigterm = True
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and delete the namespaces, and with them their devices."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes = []
        for namespace in self._namespaces:
            with contextlib.suppress(RuntimeError):
                _command("ip", "netns", "delete", namespace)
        self._namespaces = []
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._handles_sigterm = False

    def address(self, rank: int) -> str:
        """The IPv4 address of a rank."""
        return f"10.99.0.{rank + 1}"

    def namespace(self, rank: int) -> str:
        """The name of a rank's namespace, for ``ip -n``."""
        return f"{self._prefix}r{rank}"

    def environment(self, rank: int) -> dict[str, str]:
        """Variables that torchrun sets for this rank, and the device for gloo."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
        }

    def popen(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program in the namespace of a rank; its output is piped."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(rank), *argv],
            env=os.environ | self.environment(rank) | dict(env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self._processes.append(process)
        return process

    def run(
        self,
        rank_commands: Sequence[Sequence[str]],
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run one command per rank, at the same time; returns them by rank when all have ended.

        Raises RuntimeError with all outputs when one fails or the timeout (seconds) passes.
        """
        started = [self.popen(rank, argv, env) for rank, argv in enumerate(rank_commands)]
        deadline = time.monotonic() + timeout
        ended = []
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in started:
            process.kill()
            out, err = process.communicate()
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        if any(process.returncode != 0 for process in ended):
            reports = [
                f"--- rank {rank}: exit code {end.returncode}\n{end.stdout}{end.stderr}"
                for rank, end in enumerate(ended)
            ]
            raise RuntimeError("\n".join(["a rank failed or was too slow", *reports]))
        return ended

    def bytes_sent(self, rank: int) -> int:
        """Payload that a rank has sent so far: bytes on its device without packet headers."""
        shown = _command(
            "ip", "-n", self.namespace(rank), "-j", "-s", "link", "show", "dev", DEVICE
        )
        sent = json.loads(shown)[0]["stats64"]["tx"]
        return sent["bytes"] - HEADER_BYTES * sent["packets"]

    def shape(self, rank: int, rate_mbit: float) -> None:
        """Give the link of a rank another rate, in megabits per second each way."""
        for namespace, device in ((self.namespace(rank), DEVICE), (self._hub, f"port{rank}")):
            _shape(namespace, device, rate_mbit)

    def shape_inside(self, rank: int, rate_mbit: float) -> None:
        """Give the programs in a rank's namespace this rate from one to another, in total."""
        _command("ip", "-n", self.namespace(rank), "link", "set", "lo", "mtu", str(self.mtu))
        _shape(self.namespace(rank), "lo", rate_mbit)

    def set_link(self, rank: int, state: str) -> None:
        """Take the link of a rank ``"down"``, or ``"up"`` again."""
        _command("ip", "-n", self.namespace(rank), "link", "set", DEVICE, state)

    def cut(self, rank: int, other: int) -> None:
        """Lose all packets between two ranks, without a word to either; other links stay."""
        for one, peer in ((rank, other), (other, rank)):
            nobody = ["lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", DEVICE]
            neighbor = ["neighbor", "replace", self.address(peer), *nobody]
            _command("ip", "-n", self.namespace(one), *neighbor)

    @property
    def _hub(self) -> str:
        return f"{self._prefix}hub"

    def _build(self) -> None:
        # The bridge has a namespace too, so that the machine's own packet filters see nothing.
        hub = self._hub
        self._add_namespace(hub)
        _command("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _command("ip", "-n", hub, "link", "set", "bridge", "up")
        for rank in range(self.ranks):
            name, port = self.namespace(rank), f"port{rank}"
            self._add_namespace(name)
            pair = ["type", "veth", "peer", "name", DEVICE, "netns", name]
            _command("ip", "-n", hub, "link", "add", port, *pair)
            for namespace, device in ((hub, port), (name, DEVICE)):
                _command("ip", "-n", namespace, "link", "set", device, "mtu", str(self.mtu))
            _command("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            _command("ip", "-n", name, "address", "add", f"{self.address(rank)}/24", "dev", DEVICE)
            _command("ip", "-n", name, "link", "set", DEVICE, "up")
            if self.rate_mbit is not None:
                self.shape(rank, self.rate_mbit)

    def _add_namespace(self, name: str) -> None:
        _command("ip", "netns", "add", name)
        self._namespaces.append(name)
        _command("ip", "-n", name, "link", "set", "lo", "up")


def _shape(namespace: str, device: str, rate_mbit: float) -> None:
    burst = max(MIN_BURST_BYTES, int(rate_mbit * 1e6 / 8 * BURST_SECONDS))
    rate = ["rate", f"{rate_mbit}mbit", "burst", str(burst), "latency", QUEUE_SECONDS]
    _command("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate)


def _exit_cleanly(signal_number: int, _: object) -> None:
    raise SystemExit(128 + signal_number)


def _delete_abandoned() -> None:
    """Delete the namespaces of programs that were killed: their names carry a process id."""
    for line in _command("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = re.fullmatch(r"bagua(\d+)n\d+(hub|r\d+)", name)
        if owner and not os.path.exists(f"/proc/{owner[1]}"):
            with contextlib.suppress(RuntimeError):  # another program does the same right now
                _command("ip", "netns", "delete", name)


def _command(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
    return done.stdout


def bytes_on_the_device() -> int:
    """Payload that this rank, in a namespace, has sent: bytes on its device without headers."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", DEVICE)
    folder = Path("/sys/class/net") / device / "statistics"
    if not folder.exists():
        raise NetworkUnavailableError(f"there is no {device}: run on a rate that is a number")
    sent, packets = (int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    headers = HEADER_BYTES if device == DEVICE else HEADER_BYTES - ETHERNET_BYTES  # of a tunnel
    return sent - headers * packets
