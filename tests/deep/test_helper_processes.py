"""Children of a rank: none delays the news of its end, or touches what it uses."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch.distributed as dist
from bagua import _C
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from support import faults

TESTS = str(Path(__file__).parents[1])
SECONDS_UNTIL_TOLD = 6.0  # 4, and what a busy machine adds; without the news it is the timeout


def start_a_helper(how):
    """A child that lives as long as the test; returns its pid."""
    if how == "fork":
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid
    sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
    return subprocess.Popen(sleeper, close_fds=False, start_new_session=True).pid


@faults.with_bagua_group
def lose_a_rank_with_a_helper(how):
    model, optimizer = faults.wrapped(algorithm=ByteGradAlgorithm(hierarchical=False))
    faults.step(model, optimizer)
    store = dist.distributed_c10d._get_default_store()
    if faults.is_last():
        store.set("helper", str(start_a_helper(how)))
        os.kill(os.getpid(), signal.SIGKILL)
    helper = int(store.get("helper"))
    try:
        return faults.steps_until_error(model, optimizer)
    finally:
        os.kill(helper, signal.SIGKILL)


@pytest.mark.parametrize(("how", "transport"), [("fork", "shm"), ("exec", "gloo")])
def test_a_helper_that_outlives_its_rank_does_not_delay_the_news(how, transport, run_script):
    script = (
        f"import sys; sys.path.insert(0, {TESTS!r})\n"
        "from deep.test_helper_processes import lose_a_rank_with_a_helper\n"
        f"print(lose_a_rank_with_a_helper({how!r}))\n"
    )
    survivor, killed = run_script(2, script, env={"BAGUA_COMM": transport})
    assert killed.returncode == -signal.SIGKILL
    text, seconds = eval(survivor.stdout.splitlines()[-1])
    assert "rank 1 was killed" in text
    assert seconds < SECONDS_UNTIL_TOLD


def in_a_child(function):
    """(exit status, output) of a forked process that calls `function` and ends as Python does."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        status = 0
        try:
            function()
        except BaseException:  # noqa: BLE001 - as at the end of a script
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.pythonapi.Py_Exit(status)
    os.close(writing)
    with open(reading) as output:
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


ALGORITHMS = {
    "exact": GradientAllReduceAlgorithm(),
    "4 bits": ByteGradAlgorithm(codec="int4_block", error_feedback=True, hierarchical=False),
}


@faults.with_bagua_group
def fork_in_training(name, what):
    model, optimizer = faults.wrapped(algorithm=ALGORITHMS[name])
    faults.step(model, optimizer)
    loss = faults.loss_of(model)
    children = {
        "exit": lambda: None,
        "train": lambda: faults.step(model, optimizer),
        "backward": loss.backward,
    }
    seen = in_a_child(children[what])
    loss.backward()
    optimizer.step()
    for _ in range(3):
        faults.step(model, optimizer)
    return seen, model.bagua_stats()["rounds"]


@pytest.mark.parametrize(("name", "transport"), [("exact", "gloo"), ("4 bits", "shm")])
def test_a_forked_child_touches_nothing_that_its_parent_uses(ranks, name, transport):
    for what in ("exit", "train", "backward"):
        env = {"BAGUA_COMM": transport}
        # A child that ends as Python does ends all that tests before have left in its process, too.
        answers = ranks(2, fork_in_training, name, what, init=False, env=env, fresh=True)
        for (status, text), rounds in answers:
            assert rounds == 5
            if what == "exit":
                assert (status, text) == (0, ""), what
            else:
                assert status == 1, (what, text)
                assert "belongs to process" in text
                assert "copy.deepcopy" in text


def test_sockets_opened_since_are_kept_from_children_and_give_up_and_no_others():
    with socket.socket() as before, socket.socket() as gone:
        before.set_inheritable(True)
        number = gone.fileno()
        opened = _C.OpenedSockets()
        gone.close()  # another socket takes its number
        with socket.socket() as first, socket.socket() as second:
            for since in (first, second):
                since.set_inheritable(True)
            assert number in (first.fileno(), second.fileno())
            opened.keep_from_children()
            opened.give_up_after(2.5)
            limits = [
                one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                for one in (before, first, second)
            ]
            assert limits == [0, 2500, 2500]
            assert [one.get_inheritable() for one in (before, first, second)] == [
                True,
                False,
                False,
            ]
