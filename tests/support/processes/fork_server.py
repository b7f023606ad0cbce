"""Python processes that have torch imported when they start: forked from a server that has.

Importing torch and making the first optimizer cost four seconds of a processor. `Interpreter` runs
a script as `python script arguments` would, in a process forked from one that has paid them:
`__main__`, arguments, variables, files 0 to 2, the end of the interpreter and the exit status are
the script's own. The server imports nothing of bagua. There are two, and ranks take them in turn:
each has its own hash seed and addresses, so neighbours order their sets differently, as ranks do.
Programs that start `python` themselves are given `FORKED_PYTHON`, and `variables()` for their
environment.

Variables that are read only when a process begins are the server's: PYTHON* (but
PYTHONFAULTHANDLER), malloc's, and those that torch reads at its import. Tests about these start
Python anew.
"""

import array
import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

SERVERS = 2
CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
FORKED_PYTHON = str(Path(__file__).with_name("forked_python"))
SERVE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport fork_server"
SERVE += "\nfork_server.serve()"


class Interpreter:
    """A process that runs a script, in the words of subprocess.Popen. Thread-safe.

    number: which server forks it, modulo their number; a rank. env: all its variables. stdin,
    stdout, stderr: open files or their numbers, which stay the caller's. namespace: the name of a
    network namespace for it (root only), without the /sys that `ip netns exec` would mount.
    """

    def __init__(self, script, args=(), *, env, number=0, stdin, stdout, stderr, namespace=None):
        ours, theirs = os.pipe()
        self._status = open(ours)  # noqa: SIM115 - closed when the process has ended
        files = [f if isinstance(f, int) else f.fileno() for f in (stdin, stdout, stderr)]
        request = {
            "argv": [str(script), *map(str, args)],
            "env": dict(env),
            "cwd": os.getcwd(),
            "network": namespace,
        }
        try:
            _server(number % SERVERS).send(request, [*files, theirs])
        finally:
            os.close(theirs)
        self._reading = threading.Lock()
        self.pid = int(self._line())
        self.returncode = None

    def poll(self):
        with self._reading:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self.returncode = int(self._line())
                self._status.close()
            return self.returncode

    def wait(self, timeout=None):
        """Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0.0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            select.select([self._status], [], [], 0.1 if left is None else min(left, 0.1))
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _line(self):
        line = self._status.readline()
        assert line, "the server of forked interpreters has died"
        return line


def variables():
    """The variables that `FORKED_PYTHON` needs, and torchrun to start its ranks with it."""
    names = ":".join(_server(number).path for number in range(SERVERS))
    return {"PYTHON_EXEC": FORKED_PYTHON, "BAGUA_FORK_SERVERS": names}


class _Server:
    """The server's process and the socket to it; it ends when the socket closes.

    Attributes:
        path: of the socket where `FORKED_PYTHON` finds it.
    """

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = tempfile.mkdtemp(prefix="bagua-fork-")
        atexit.register(_remove, folder, os.getpid())
        self.path = f"{folder}/server"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.path)
        listener.listen(64)
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(theirs.fileno()), str(listener.fileno())],
            pass_fds=[theirs.fileno(), listener.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        listener.close()

    def send(self, request, files):
        """One packet, so that threads may send at the same time."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        self._socket.sendmsg([json.dumps(request).encode()], rights)


def _remove(folder, owner):
    if os.getpid() == owner:  # and no process forked from it
        shutil.rmtree(folder, ignore_errors=True)


_starting = threading.Lock()
_servers = {}


def _server(number):
    """The one server of that number: a second one would end with its socket, and tell no status."""
    with _starting:
        if number not in _servers:
            _servers[number] = _Server()
        return _servers[number]


def _import_torch():
    """Everything of torch that ranks would import for seconds; starts no threads.

    Asks for no accelerator: that would initialise its driver, which no child could use then. So the
    optimizer whose first step imports the compiler is SGD; Adam asks at each step.
    """
    import torch
    import torch.distributed
    import torch.distributed.algorithms.ddp_comm_hooks
    import torch.distributed.optim
    import torch.func
    import torch.utils.checkpoint

    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.1).step()
    assert len(os.listdir("/proc/self/task")) == 1, "only a process of one thread may be forked"
    gc.collect()
    gc.freeze()  # or every child would copy this process's memory to collect it


def serve():
    """The body of a server; in a child it returns when the script has ended."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    ended, wakes = os.pipe()
    for end in (ended, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    _import_torch()
    reports = {}
    clients = {}  # connections of FORKED_PYTHON: pids; None before there is one
    while True:
        ready, _, _ = select.select([requests, ended, listener, *clients], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _report_ends(reports)
        if listener in ready:
            clients[listener.accept()[0]] = None
        for asks in ready:
            if asks is not requests and asks not in clients:
                continue
            request, files = _received(asks)
            if not request:
                _hang_up(asks, clients, reports)
                continue
            if asks is not requests:
                files.append(os.dup(asks.fileno()))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for own in (requests, listener, *clients):
                    own.close()
                for own in (ended, wakes, files.pop(), *reports.values()):
                    os.close(own)
                return _become(files, **json.loads(request))
            if asks is not requests:
                clients[asks] = pid
            reports[pid] = files.pop()
            _tell(reports[pid], pid)
            for theirs in files:
                os.close(theirs)


def _received(asks):
    """A request and its files; empty where the other side is gone."""
    with contextlib.suppress(ConnectionResetError):  # it had not read its last answer
        return socket.recv_fds(asks, 1 << 20, 4)[:2]
    return b"", []


def _tell(report, number):
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for it any more
        os.write(report, b"%d\n" % number)


def _hang_up(asks, clients, reports):
    """A script ends with the FORKED_PYTHON that stands for it, the server with its owner."""
    if asks not in clients:
        os._exit(0)
    pid = clients.pop(asks)
    asks.close()
    if pid in reports:
        os.kill(pid, signal.SIGKILL)


def _report_ends(reports):
    """Writes the exit status of every child that has ended to the one who asked for it."""
    while reports:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        report = reports.pop(pid)
        _tell(report, os.waitstatus_to_exitcode(status))
        os.close(report)


def _enter(path, kind):
    with open(path) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), kind) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {path}")


def _enter_namespaces(pid):
    """Those of another process for networks and mounts, where they are not ours."""
    for name, kind in (("net", CLONE_NEWNET), ("mnt", CLONE_NEWNS)):
        path = f"/proc/{pid}/ns/{name}"
        if os.stat(path).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            _enter(path, kind)


def _become(files, argv, env, cwd, network=None, namespaces=None):
    """Run the script in `__main__` of this process, the frames of the server below it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if network is not None:
        _enter(f"/run/netns/{network}", CLONE_NEWNET)
    if namespaces is not None:
        _enter_namespaces(namespaces)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.modules["numpy"].random.seed()
    del sys.modules["fork_server"]
    if argv[0] == "-u":
        del argv[0]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=True)
    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        sys.path[:2] = [cwd]  # for this folder, and that of -c
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = argv
    sys.path[:2] = [str(Path(argv[0]).resolve().parent)]
    # A new module: the collection at the end does not see what the old one, frozen, refers to.
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    vars(main).update(__file__=argv[0], __builtins__=builtins)
    code = compile(Path(argv[0]).read_bytes(), argv[0], "exec")
    exec(code, vars(main))
