"""`bagua top` in a terminal, beside a job that trains."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from datetime import timedelta

import bagua.torch_api as bagua
import pytest
import torch.distributed as dist
from bagua.__main__ import main
from bagua._tools.top import stores_here
from support.processes.pool import new_store

# Rank 1 computes for longer than rank 0; both end when the file `stop` is there.
TRAINS = """
import os, time
from pathlib import Path
import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm

folder = Path({folder!r})
bagua.init_process_group()
rank = bagua.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.with_bagua([optimizer], GradientAllReduceAlgorithm())
(folder / f"port{{rank}}").write_text(os.environ["MASTER_PORT"])
stop = torch.zeros(1)
while not stop.item():
    optimizer.zero_grad()
    loss = model(torch.ones(4, 64)).square().mean()
    time.sleep(0.15 * rank)
    loss.backward()
    optimizer.step()
    stop.fill_((folder / "stop").exists())
    bagua.broadcast(stop, 0)
{after}
print("trained")
"""
TOP = [sys.executable, "-m", "bagua", "top"]
SECONDS = 60.0


@contextlib.contextmanager
def job(run_script, folder, variables, after=""):
    """A training job of two ranks; yields the address of its store."""
    ends = []
    source = TRAINS.format(folder=str(folder), after=after)
    thread = threading.Thread(
        target=lambda: ends.extend(run_script(2, source, env=variables, timeout=110.0))
    )
    thread.start()
    try:
        deadline = time.monotonic() + SECONDS
        while not (folder / "port0").exists() or not (folder / "port0").read_text():
            assert thread.is_alive(), ends
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"127.0.0.1:{(folder / 'port0').read_text()}"
    finally:
        (folder / "stop").touch()
        thread.join()
    assert [(end.returncode, end.stdout) for end in ends] == [(0, "trained\n")] * 2, ends


class Terminal:
    """A program in a pseudo-terminal of 80 columns and 24 lines."""

    def __init__(self, argv):
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        # A shell's background job ignores interrupts, and so would its children.
        argv = ["env", "--default-signal=INT", *argv]
        self.process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs)
        self._theirs = theirs
        self.text = ""

    def read_until(self, pattern):
        """The first screen in which the pattern is."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for screen in self.text.split("\x1b[H\x1b[J")[:-1]:
                if re.search(pattern, screen):
                    return screen.replace("\r", "")
            if select.select([self._ours], [], [], 0.1)[0]:
                self.text += os.read(self._ours, 1 << 16).decode()
            assert self.process.poll() is None, self.text
        raise AssertionError(f"no {pattern} in {self.text[-3000:]}")

    def interrupt(self):
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def end(self):
        """The exit code.

        Reads on: a program does not end while its output has no place in the terminal.
        """
        deadline = time.monotonic() + SECONDS
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, self.text[-3000:]
            if select.select([self._ours], [], [], 0.05)[0]:
                self.text += os.read(self._ours, 1 << 16).decode()
        os.close(self._ours)
        os.close(self._theirs)
        return code


def test_tables_of_a_job_name_the_rank_that_the_others_wait_for(run_script, tmp_path):
    with job(run_script, tmp_path, {"BAGUA_TOP": "0.2"}) as store:
        terminal = Terminal([*TOP, store, "--interval", "0.2"])
        screen = terminal.read_until(r"\n +1 .* slowest")
        lines = screen.strip("\n").splitlines()
        assert lines[0] == f"bagua top: {store}, 2 of 2 rank(s)"
        assert max(map(len, lines)) <= 80
        first, second = lines[3].split(), lines[4].split()
        assert (first[0], second[0], second[-1]) == ("0", "1", "slowest")
        assert float(first[3]) > 1.0, "steps a second"
        assert float(first[4]) > 0.0, "megabytes a second"
        assert int(first[8].rstrip("%")) > 40 > int(second[8].rstrip("%"))
        terminal.interrupt()
        assert terminal.end() == 0
        assert "Traceback" not in terminal.text
        assert_one_table_without_a_terminal(store)
        terminal = Terminal([*TOP, store, "--interval", "0.1"])
        terminal.read_until(r"\n +1 .* slowest")
        (tmp_path / "stop").touch()
        code = terminal.end()
    assert code in (0, 1), "the last publications were seen, or the store was gone before"


def assert_one_table_without_a_terminal(store):
    end = subprocess.run([*TOP, store, "--once"], capture_output=True, text=True, timeout=60)
    assert end.returncode == 0, end.stderr
    assert "\x1b" not in end.stdout
    rows, advice = end.stdout.splitlines()[3:5], end.stdout.splitlines()[5:]
    assert [line.split()[0] for line in rows] == ["0", "1"]
    assert all(float(line.split()[3]) > 0 for line in rows)
    assert not advice or re.match(r"rank \d takes .* give it", advice[1]), "of the present moment"


@pytest.mark.parametrize("variables", [{}, {"BAGUA_TOP": "0.05"}], ids=str)
def test_only_the_variable_starts_the_thread_that_publishes(run_script, tmp_path, variables):
    on = bool(variables)
    after = f"""
import threading
assert any(thread.name == "bagua-top" for thread in threading.enumerate()) == {on}
bagua.destroy_process_group()
assert not any(thread.name == "bagua-top" for thread in threading.enumerate())
"""
    with job(run_script, tmp_path, variables, after) as store:
        host, port = store.split(":")
        keys = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        if on:
            keys.wait(["bagua/top/0"], timedelta(seconds=SECONDS))
        assert keys.check(["bagua/top/0"]) == on


def test_a_wrong_variable_is_refused(monkeypatch):
    monkeypatch.setenv("BAGUA_TOP", "yes")
    with pytest.raises(ValueError, match="BAGUA_TOP='yes' must be a number of seconds, or 0"):
        bagua.env.get_top_seconds()


def test_without_a_job_the_variable_is_named(capsys):
    assert main(["top", "127.0.0.1:1", "--once"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "there is no job's store at 127.0.0.1:1" in err


def test_what_is_no_address_is_refused(capsys):
    assert main(["top", "29500"]) == 1
    assert "29500 is not a HOST:PORT" in capsys.readouterr().err


def test_jobs_of_this_machine_are_found():
    env = {"BAGUA_TOP": "1", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "29511"}
    off = env | {"BAGUA_TOP": "0", "MASTER_PORT": "29512"}
    started = [subprocess.Popen(["sleep", "60"], env={**os.environ, **own}) for own in (env, off)]
    try:
        found = stores_here()
        assert "10.1.2.3:29511" in found
        assert "10.1.2.3:29512" not in found
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_garbage_in_the_store_is_no_rank():
    store = new_store()
    for rank, word in enumerate(["{", "3", json.dumps({"rank": 0, "host": "\x1b[2J"})]):
        store.set(f"bagua/top/{rank}", word)
    terminal = Terminal([*TOP, f"127.0.0.1:{store.port}", "--interval", "0.1"])
    terminal.read_until("waiting for the ranks' first publication")
    terminal.interrupt()
    assert terminal.end() == 0
