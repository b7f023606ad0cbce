"""Real ranks for tests: processes that are started once and used by every test.

A start costs tenths of a second (see fork_server.py), a call milliseconds. Each call has a store
and a gloo group of its own, so tests do not see each other's keys; what a test leaves in its own
module's globals stays in the processes.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from support.processes import fork_server
from support.processes.fork_server import FORKED_PYTHON, Interpreter

MAX_RANKS = 8
WORKER = Path(__file__).with_name("worker.py")
SECONDS_AFTER_FIRST_FAILURE = 10.0
SECONDS_FOR_STACKS = 2.0
# torch's stores look up the name of every client; without a name server that answers, each look-up
# may stop them for five seconds. For this process, which serves them, and for the ranks.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def torchrun_environment(rank, size, port):
    """What torchrun sets for one of `size` ranks on one node, its store at `port`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"test-{port}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def run_without_torchrun(command, timeout=220):
    """The finished process of a program that starts its ranks by itself."""
    launcher = torchrun_environment(0, 1, 0)
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": launcher["GLOO_SOCKET_IFNAME"]}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def run_forked(*arguments, env=None, timeout=100.0):
    """The finished process of `python arguments`, with torch imported; so have ranks of torchrun.

    env: variables beside this process's.
    """
    variables = {"OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        [FORKED_PYTHON, *map(str, arguments)],
        env=os.environ | fork_server.variables() | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def torchrun(size, *arguments, **options):
    """As `run_forked`: torchrun with so many ranks on this host."""
    command = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}")
    return run_forked(*command, *arguments, **options)


def new_store():
    """A store on a free port, served by this process as torchrun's agent does."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Worker:
    """One process of the pool, its connection and its files."""

    def __init__(self, folder, number):
        self.stacks = Path(folder) / f"stacks-{number}"
        self.log = Path(folder) / f"log-{number}"
        self.connection, theirs = multiprocessing.Pipe()
        with theirs, open(self.log, "w") as log:
            self.process = Interpreter(
                WORKER,
                [self.stacks],
                number=number,
                stdin=theirs,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def log_tail(self):
        text = self.log.read_text(errors="replace").strip()
        return f"\nits output ends with:\n{text[-2000:]}" if text else ""

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Pool:
    """`pool(n, function, *args)`: runs `function(*args)` on n ranks, returns the n results by rank.

    function: at the top level of an importable file (a test file is one); arguments and results
    must pickle. On the ranks RANK, WORLD_SIZE, MASTER_PORT and the rest are set as by torchrun, and
    the default process group exists (gloo, with the call's timeout; `init=False`: not yet).
    timeout: seconds until ranks that have not answered are killed. fresh=True: processes of its
    own, for tests that change their process. env: variables for this call, a dict or one dict per
    rank.

    Raises AssertionError with the traceback of every rank that failed, the Python stacks of those
    that hang and the exit code of those that died. The pool starts anew after such a failure.
    """

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="bagua-ranks-")
        self._workers = []
        self._started = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End all processes."""
        self._kill()
        self._folder.cleanup()

    def __call__(self, n, function, *args, timeout=60.0, fresh=False, env=None, init=True):
        if fresh:
            with Pool() as own:
                return own(n, function, *args, timeout=timeout, env=env, init=init)
        if not 1 <= n <= MAX_RANKS:
            raise ValueError(f"the pool has 1 to {MAX_RANKS} ranks, not {n}")
        while len(self._workers) < n:
            self._workers.append(Worker(self._folder.name, self._started))
            self._started += 1
        workers = self._workers[:n]
        store = new_store()
        for rank, worker in enumerate(workers):
            own_env = env[rank] if isinstance(env, (list, tuple)) else env or {}
            call = {
                "sys_path": sys.path,
                "work": pickle.dumps((function, args)),
                "env": torchrun_environment(rank, n, store.port) | own_env,
                "timeout": timeout,
                "init": init,
            }
            with contextlib.suppress(BrokenPipeError):  # it died: _collect says so
                worker.connection.send(call)
        return self._results(function, workers, timeout)

    def _results(self, function, workers, timeout):
        answers = _collect(workers, timeout)
        if all(kind == "returned" for kind, _ in answers):
            return [pickle.loads(result) for _, result in answers]
        self._kill()
        reports = [
            f"--- rank {rank} {'returned' if kind == 'returned' else text}"
            for rank, (kind, text) in enumerate(answers)
        ]
        name = f"{function.__module__}.{function.__qualname__}"
        raise AssertionError("\n".join([f"{name} failed on {len(workers)} ranks", *reports]))

    def _kill(self):
        for worker in self._workers:
            worker.kill()
        self._workers = []


def _collect(workers, timeout):
    """One (kind, content) per worker; kind is returned, raised, died or hangs.

    1. Wait for answers until the deadline, which comes nearer when the first rank fails.
    2. Ask those that have not answered for their stacks.
    """
    answers = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(workers) and (left := deadline - time.monotonic()) > 0:
        waiting = {w.connection: rank for rank, w in enumerate(workers) if rank not in answers}
        for connection in multiprocessing.connection.wait(list(waiting), left):
            rank = waiting[connection]
            answers[rank] = _answer(workers[rank])
            if answers[rank][0] != "returned":
                deadline = min(deadline, time.monotonic() + SECONDS_AFTER_FIRST_FAILURE)
    hanging = [rank for rank in range(len(workers)) if rank not in answers]
    for rank in hanging:
        workers[rank].process.send_signal(signal.SIGUSR1)
    if hanging:
        time.sleep(SECONDS_FOR_STACKS)
    for rank in hanging:
        stacks = workers[rank].stacks.read_text() if workers[rank].stacks.exists() else ""
        answers[rank] = ("hangs", f"hangs after {timeout:g} s (or a failure elsewhere):\n{stacks}")
    return [answers[rank] for rank in range(len(workers))]


def _answer(worker):
    try:
        kind, content = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        return "died", f"died with exit code {worker.process.wait()}{worker.log_tail()}"
    return (kind, content) if kind == "returned" else (kind, f"raised\n{content}")


def run_script(n, script, args=(), env=None, timeout=60.0, anew=False):
    """Run a script in n processes with torchrun's environment and wait for their end.

    script: a Path, or source text. env: variables for all ranks. timeout: seconds until processes
    that have not ended are made to write their Python stacks and AssertionError is raised.
    anew=True: by the `python` of the command line, for what fork_server.py says it does not do.
    Returns a subprocess.CompletedProcess with returncode, stdout and stderr per rank.
    """
    store = new_store()
    of_ranks = [torchrun_environment(rank, n, store.port) | (env or {}) for rank in range(n)]
    with tempfile.TemporaryDirectory(prefix="bagua-script-") as folder:
        return _run(Path(folder), script, args, of_ranks, timeout, Popen if anew else Interpreter)


def run_on_network(link, script, args=(), env=None, timeout=60.0, meanwhile=None):
    """As `run_script`, one process in each namespace of a `Network`, whose rank 0 has the store.

    meanwhile: is called once they are started, with what reads the output so far of a rank.
    """
    of_ranks = [link.environment(rank) | (env or {}) for rank in range(link.ranks)]

    def start(script, args, *, number, **options):
        namespace = link.namespace(number)
        return Interpreter(script, args, number=number, namespace=namespace, **options)

    with tempfile.TemporaryDirectory(prefix="bagua-script-") as folder:
        return _run(Path(folder), script, args, of_ranks, timeout, start, meanwhile)


class Popen(subprocess.Popen):
    """A process of the `python` of the command line."""

    def __init__(self, script, args, *, number, **options):
        super().__init__([sys.executable, str(script), *map(str, args)], **options)


def _run(folder, script, args, env, timeout, start, meanwhile=None):
    path = script
    if not isinstance(script, Path):
        path = folder / "script.py"
        path.write_text(script)
    processes = []
    for rank, own_env in enumerate(env):
        variables = os.environ | {"PYTHONFAULTHANDLER": "1"} | own_env
        with (
            open(os.devnull) as nothing,
            _file(folder, rank, "out", "w") as out,
            _file(folder, rank, "err", "w") as err,
        ):
            files = {"stdin": nothing, "stdout": out, "stderr": err}
            processes.append(start(path, args, number=rank, env=variables, **files))
    try:
        if meanwhile is not None:
            meanwhile(lambda rank: (folder / f"out-{rank}").read_text())
        late = _wait_for_end(processes, timeout)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    done = []
    for rank, process in enumerate(processes):
        with _file(folder, rank, "out") as out, _file(folder, rank, "err") as err:
            code = process.returncode
            done.append(subprocess.CompletedProcess([path, *args], code, out.read(), err.read()))
    if late:
        reports = [f"--- rank {r}:\n{end.stdout}{end.stderr}" for r, end in enumerate(done)]
        raise AssertionError("\n".join([f"ranks {late} did not end in {timeout:g} s", *reports]))
    return done


def _file(folder, rank, name, mode="r"):
    return open(Path(folder) / f"{name}-{rank}", mode, errors="replace")


def _wait_for_end(processes, timeout):
    """The ranks that had not ended in time; SIGABRT made them write their stacks."""
    late = []
    deadline = time.monotonic() + timeout
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for rank in late:
        processes[rank].send_signal(signal.SIGABRT)
    for rank in late:
        try:
            processes[rank].wait(SECONDS_FOR_STACKS)
        except subprocess.TimeoutExpired:
            processes[rank].kill()
            processes[rank].wait()
    return late
