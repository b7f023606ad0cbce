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
        files = [f if isinstance(f, int) else f.fileno() for f in (stdin, stdout, stderr)]
        request = {
            "argv": [str(script), *map(str, args)],
            "env": dict(env),
            "cwd": os.getcwd(),
            "namespaces": [] if namespace is None else [f"/run/netns/{namespace}"],
        }
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(_server(number % SERVERS).path)
        socket.send_fds(self._server, [json.dumps(request).encode()], files)
        self._reading = threading.Lock()
        self.pid = self._answer()
        self.returncode = None

    def poll(self):
        with self._reading:
            if self.returncode is None and select.select([self._server], [], [], 0)[0]:
                self.returncode = self._answer()
                self._server.close()
            return self.returncode

    def wait(self, timeout=None):
        """Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0.0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            select.select([self._server], [], [], 0.1 if left is None else min(left, 0.1))
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _answer(self):
        number = self._server.recv(64)
        assert number, "the server of forked interpreters has died"
        return int(number)


def variables():
    """The variables that `FORKED_PYTHON` needs, and torchrun to start its ranks with it."""
    names = ":".join(_server(number).path for number in range(SERVERS))
    return {"PYTHON_EXEC": FORKED_PYTHON, "BAGUA_FORK_SERVERS": names}


class _Server:
    """The server's process; it ends with this one, when its input does.

    Attributes:
        path: of the socket where it is found.
    """

    def __init__(self):
        folder = tempfile.mkdtemp(prefix="bagua-fork-")
        atexit.register(_remove, folder, os.getpid())
        self.path = f"{folder}/server"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.path)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(listener.fileno())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )


def _remove(folder, owner):
    if os.getpid() == owner:  # and no process forked from it
        shutil.rmtree(folder, ignore_errors=True)


_starting = threading.Lock()
_servers = {}


def _server(number):
    """The one server of that number."""
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
    """The body of a server; in a script's process it returns when the script has ended."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    _import_torch()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _attend(client)
        client.close()


def _attend(client):
    """Start the client's script and tell its pid and its end; without a client it ends, too."""
    request, files = socket.recv_fds(client, 1 << 20, 3)[:2]
    pid = os.fork()
    if pid == 0:
        client.close()
        return _become(files, **json.loads(request))
    for theirs in files:
        os.close(theirs)
    _tell(client, pid)
    child = os.pidfd_open(pid)
    ready, _, _ = select.select([child, client], [], [])
    if child not in ready:
        os.kill(pid, signal.SIGKILL)
    _tell(client, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _tell(client, number):
    with contextlib.suppress(OSError):  # it is gone
        client.send(b"%d" % number)


def _enter(namespace):
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _become(files, argv, env, cwd, namespaces=()):
    """Run the script in `__main__` of this process, the frames of the server below it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    own = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "mnt")]
    for namespace in namespaces:
        if os.stat(namespace).st_ino not in own:
            _enter(namespace)
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
