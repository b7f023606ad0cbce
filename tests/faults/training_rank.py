"""One rank of a training in which something goes wrong; runs in a process forked for it.

What it did is in `rank-<rank>.jsonl` of the case's folder, a line per event: {"step", "bits",
"finite"} after every step, {"error", "text", "step"} for a BaguaError, {"done": true} at the end.
"""

import ctypes
import datetime
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua._core.group.rendezvous import tcp_store
from bagua.torch_api.algorithms import Algorithm
from faults import memory_cgroup
from faults.cases import STEPS, TIMEOUT
from support import every_algorithm, training
from support.processes.pool import torchrun_environment
from torch import nn

AT_A_LINE = {"interrupt at a line": signal.SIGINT, "terminate at a line": signal.SIGTERM}
PACKAGE = f"{Path(bagua.__file__).parents[1]}/"
LINES = 30  # of bagua, in a second of the case; a step has some tens
WORDS = b"\x1b[2J", b"9" * 30, b"\xff\xfe", b"3 0 1 x" * 10**5, b"", b"-1", b"[" * 9000
EXIT_OF_AN_ERROR = 7  # as a script that ends by itself when training cannot go on
ASYNC_STEPS, ASYNC_PAUSE = 200, 0.02


class Journal:
    """The events of one rank, whole lines at once: its process may end at any moment."""

    def __init__(self, folder, rank):
        self._file = os.open(
            Path(folder) / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )

    def write(self, **event):
        os.write(self._file, (json.dumps({"time": time.monotonic()} | event) + "\n").encode())


def write_words():
    """Overwrite what ranks have written on the boards of their groups."""
    store = tcp_store(dist.distributed_c10d._get_default_store()).clone()
    for number, key in enumerate(key for key in store.list_keys() if "/board/" in key):
        store.set(key, WORDS[number % len(WORDS)])


class Injection:
    """Does what the case says, on the victim, at the place and step."""

    def __init__(self, case, rank, folder, journal):
        self.case, self.folder, self.journal = case, Path(folder), journal
        self.mine = case.fault != "none" and rank == case.victim
        self.step = -1
        self.lines = 0
        self.train = None

    def begin(self):
        """The time of place "any" runs from here: what torch does before is its own."""
        if self.mine and self.case.place == "any":
            timer = threading.Timer(self.case.seconds, self.act)
            timer.daemon = True
            timer.start()

    def at(self, place):
        """Called wherever something can go wrong."""
        due = place == "wrap" or self.step == self.case.step
        if self.mine and due and place == self.case.place:
            self.act()

    def act(self):
        fault = self.case.fault
        if fault in AT_A_LINE:
            sys.settrace(self._count_lines)
            return
        self.journal.write(fault=fault, step=self.step)
        if fault == "kill with a helper" and os.fork() == 0:
            self._outlive()
        if fault in ("kill", "kill with a helper"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if fault == "no memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))
            torch.empty(2**30)
        if fault == "fork":
            self._train_in_a_child()
        if fault == "memory cgroup":
            memory_cgroup.fill(memory_cgroup.make())
        if fault == "words":
            write_words()
        if fault == "exit":
            os._exit(3)
        if fault == "raise":
            raise ZeroDivisionError("of the user")
        if fault in ("stop", "pause"):
            (self.folder / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "slow":
            time.sleep(self.case.seconds)
        if fault == "hold":
            while not (self.folder / "over").exists():
                time.sleep(0.02)
        if fault == "leave":
            bagua.destroy_process_group()
            raise SystemExit(0)
        if fault == "store killed":
            (self.folder / "kill store").touch()
            while (self.folder / "kill store").exists():
                time.sleep(0.005)
        if fault == "store stopped":
            (self.folder / "stop store").touch()
            while (self.folder / "stop store").exists():
                time.sleep(0.005)

    def _count_lines(self, frame, event, _):
        """A tracer: the signal comes after so many lines of bagua, wherever that is."""
        if PACKAGE not in frame.f_code.co_filename or frame.f_code.co_name == "__del__":
            return None
        self.lines += event == "line"
        if self.lines == 1 + int(LINES * self.case.seconds):
            sys.settrace(None)
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.journal.write(fault=self.case.fault, step=self.step, where=where)
            signal.raise_signal(AT_A_LINE[self.case.fault])
        return self._count_lines

    def _outlive(self):
        """A data loader whose parent is dead: it has all that it has inherited."""
        while self.folder.exists() and not (self.folder / "over").exists():
            time.sleep(0.02)
        os._exit(0)

    def _train_in_a_child(self):
        """Raises if a child did, or did not end as a script that is refused: at its first round,
        which some algorithms have after several steps of the optimizer."""
        pid = os.fork()
        if pid == 0:
            self.mine = False
            try:
                for _ in range(STEPS):
                    self.train()
            except bagua.BaguaError:
                if training.device_type() == "cuda":
                    os._exit(EXIT_OF_AN_ERROR)  # as data loaders end; C's exit takes ten seconds
                ctypes.pythonapi.Py_Exit(EXIT_OF_AN_ERROR)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != EXIT_OF_AN_ERROR:
            raise AssertionError(f"a forked child that trains ended with {status}")

    def on_gradient(self, gradient):
        if self.step == self.case.step and self.mine and self.case.fault in ("nan", "inf"):
            self.journal.write(fault=self.case.fault, step=self.step)
            gradient = gradient.clone()
            gradient.view(-1)[1] = float(self.case.fault)
            return gradient
        self.at("backward")
        return None


def build(case, rank):
    """(model, optimizer) of this rank: another one where that is the fault."""
    fault = case.fault if rank == case.victim else "none"
    torch.manual_seed(0)
    hidden = 9 if fault == "other shape" else 8
    layers = [nn.Linear(training.FEATURES, hidden), nn.BatchNorm1d(hidden), nn.Tanh()]
    if fault == "other order":
        layers = [nn.Linear(training.FEATURES, hidden), nn.Tanh(), nn.BatchNorm1d(hidden)]
    model = nn.Sequential(*layers, nn.Linear(hidden, training.OUTPUTS)).to(training.device())
    if fault == "other dtype":
        model = model.double()
    if fault == "other buckets":
        os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = "200"
    if fault != "other algorithm":
        return every_algorithm.wrapped(case.algorithm, model)
    other = "bytegrad" if case.algorithm == "gradient_allreduce" else "gradient_allreduce"
    optimizer = training.sgd(model)
    return model.with_bagua([optimizer], Algorithm.init(other)), optimizer


def train(case, rank, folder, journal):
    """All steps, with the fault among them."""
    injection = Injection(case, rank, folder, journal)
    bagua.init_process_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    injection.begin()
    injection.at("wrap")
    model, optimizer = build(case, rank)
    model[-1].register_forward_hook(lambda *_: injection.at("forward"))
    model[0].weight.register_hook(injection.on_gradient)
    optimizer.register_step_pre_hook(lambda *_: injection.at("optimizer"))
    asynchronous = case.algorithm == "async"
    dtype = model[0].weight.dtype
    for step in range(ASYNC_STEPS if asynchronous else STEPS):
        injection.step = step
        inputs, targets = training.batch(step, rank, rows=8)

        def train(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype)).backward()
            optimizer.step()

        injection.train = train
        injection.at("between")
        train()
        if asynchronous:
            time.sleep(ASYNC_PAUSE)
        parameters = list(model.parameters())
        finite = all(bool(p.isfinite().all()) for p in parameters)
        journal.write(step=step, bits=training.bits(parameters), finite=finite)
    if asynchronous:
        model.bagua_algorithm.abort(model)
    return model


def main(case, rank, port, folder):
    """Returns the exit status."""
    with open(Path(folder) / f"output-{rank}", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(torchrun_environment(rank, case.ranks, port))
    os.environ.update(BAGUA_LANES=str(case.lanes), BAGUA_DEFAULT_BUCKET_SIZE="400")
    if case.store != "agent":
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    journal = Journal(folder, rank)
    try:
        train(case, rank, folder, journal)
        journal.write(done=True)
        bagua.destroy_process_group()
    except bagua.BaguaError as error:
        journal.write(error=type(error).__name__, text=str(error))
        return EXIT_OF_AN_ERROR
    return 0
