"""The harness itself: results by rank, independent calls, failures that say what happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import fork_server, pool
from support.processes.fork_server import FORKED_PYTHON


def sum_of_ranks(offset):
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), int(os.environ["RANK"])


def raise_on_rank_one():
    if dist.get_rank() == 1:
        raise KeyError("the reason")


def hang_on_rank_one():
    while os.environ["RANK"] == "1":
        time.sleep(0.1)


def exit_on_rank_one():
    if dist.get_rank() == 1:
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os._exit(7)


def process_id_and_variable():
    return os.getpid(), os.environ.get("ONLY_THIS_CALL"), dist.is_initialized()


def test_an_exception_is_shown_with_its_rank_and_traceback(ranks):
    with pytest.raises(AssertionError, match=r"(?s)rank 0 returned.*rank 1 raised.*'the reason'"):
        ranks(2, raise_on_rank_one)
    assert ranks(2, sum_of_ranks, 0) == [(0, 1.0, 0), (1, 1.0, 1)]


def test_a_hang_is_shown_with_its_stack(ranks):
    ranks(2, process_id_and_variable)  # starts them: the limit is for the function alone
    with pytest.raises(AssertionError, match=r"(?s)rank 1 hangs.*in hang_on_rank_one"):
        ranks(2, hang_on_rank_one, timeout=3.0, init=False)


def test_a_death_is_shown_with_exit_code_and_output(ranks):
    with pytest.raises(AssertionError, match=r"(?s)rank 1 died with exit code 7.*last words"):
        ranks(2, exit_on_rank_one)


def test_a_script_that_hangs_shows_its_stack():
    source = "import time\ndef slow():\n    time.sleep(60)\nslow()"
    with pytest.raises(AssertionError, match=r"(?s)ranks \[0\] did not end in 1 s.*in slow"):
        pool.run_script(1, source, timeout=1.0)


ENDS = """
import atexit, os, signal, sys
sys.path[0] == os.path.dirname(os.path.abspath(__file__)) or sys.exit("another folder")
atexit.register(print, "at exit of", __name__)
class Held:
    def __del__(self, getpid=os.getpid, write=os.write):
        write(1, b"held to the end\\n")
held = Held()
{last}
"""


LASTS = pytest.mark.parametrize(
    ("last", "code", "words"),
    [
        ("", 0, ""),
        ("sys.exit('wrong')", 1, "wrong\n"),
        ("raise KeyError('a key')", 1, "in <module>\n    raise KeyError('a key')\nKeyError"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt"),
        ("os.abort()", -6, "Fatal Python error: Aborted"),
    ],
    ids=["end", "exit", "exception", "SIGKILL", "SIGINT", "abort"],
)


@pytest.mark.parametrize("anew", [False, True], ids=["forked", "anew"])
@LASTS
def test_a_forked_script_ends_as_one_started_anew(run_script, last, code, words, anew):
    source = ENDS.format(last=f"signal.signal(signal.SIGINT, signal.default_int_handler)\n{last}")
    (done,) = run_script(1, source, anew=anew)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    said = "at exit of __main__\nheld to the end\n"
    assert done.stdout == (said if code in (0, 1, -2) else ""), done.stdout


def forked_python(*arguments, **options):
    """A `python` that a launcher would start."""
    return subprocess.Popen(
        [FORKED_PYTHON, *map(str, arguments)],
        env=os.environ | fork_server.variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@LASTS
def test_the_python_of_launchers_ends_as_its_script(tmp_path, last, code, words):
    path = tmp_path / "script.py"
    begin = (
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nprint(sys.argv[1], os.getcwd())"
    )
    path.write_text(f"import os, signal, sys\n{begin}\n{last}\n")
    process = forked_python("-u", path, "word", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out == f"word {tmp_path}\n"
    if code != -6:  # of an abort Python writes where pytest has asked it to
        assert words in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_script_ends_with_the_python_that_stands_for_it(tmp_path, number):
    path = tmp_path / "script.py"
    path.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    process = forked_python(path)
    script = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(timeout=20) == -number
    wait_until(lambda: not Path(f"/proc/{script}").exists(), "the script's end")
    process.communicate()


def wait_until(happened, what):
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline, f"{what} does not come"
        time.sleep(0.01)


def test_a_signal_to_a_process_that_has_just_ended_does_nothing(tmp_path, monkeypatch):
    script = tmp_path / "ends.py"
    script.write_text("")
    with open(os.devnull) as nothing:
        process = fork_server.Interpreter(
            script, env=os.environ, stdin=nothing, stdout=nothing, stderr=nothing
        )
    process.wait(60)
    monkeypatch.setattr(process, "poll", lambda: None)  # as before its server has told the end
    process.kill()
