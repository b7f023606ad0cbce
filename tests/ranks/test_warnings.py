"""Warnings stand at the line of the user's code that led to them, once per job."""

import os
import threading
import warnings
from functools import partial
from pathlib import Path

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua._core.group import environment, warn as warn_module
from bagua._core.group.warn import warn
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from support import training

PACKAGE = Path(__file__).resolve().parents[2] / "python"


class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)


def recorded(function):
    """(text, the source line that is shown) of each warning of `function`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    shown = [(str(one.message), Path(one.filename), one.lineno) for one in caught]
    return [(text, path.read_text().splitlines()[line - 1].strip()) for text, path, line in shown]


@training.with_group
def warn_in_many_places():
    def leave_out_a_layer():
        model = bagua.wrap(Half(), [], GradientAllReduceAlgorithm())
        model(torch.ones(2, 4)).sum().backward()

    def ask_for_useless_residuals():
        ByteGradAlgorithm(codec="fp16", error_feedback=True)

    def say_what_is_of_this_rank():
        warn(f"rank {dist.get_rank()}", each_rank=True)

    def say_from_a_thread():
        thread = threading.Thread(target=warn, args=("from a thread",))
        thread.start()
        thread.join()

    acts = [leave_out_a_layer, ask_for_useless_residuals]
    acts += [say_what_is_of_this_rank, say_from_a_thread]
    return [recorded(act) for act in acts]


class NotToBeAsked:
    def compare_set(self, *_):
        raise AssertionError("the store was asked")


@training.with_group
def fork_and_warn():
    """(local rank, warnings) of a forked child, and how it ended."""
    ends, begins = os.pipe()
    warn_module.speak_through(NotToBeAsked())
    environment.set_nodes(lambda: pytest.fail("the store was asked"))
    child = os.fork()
    if child == 0:
        count = len(recorded(lambda: warn("in a child")))
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(name, None)
        os.write(begins, f"{bagua.get_local_size() - 2} {count}".encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    place = tuple(map(int, os.read(ends, 100).split()))
    return [place, status]


def test_a_warning_stands_at_the_users_line_and_comes_once_per_job(ranks):
    first, second = ranks(2, warn_in_many_places)
    unused, useless, own, threads = (one + other for one, other in zip(first, second, strict=True))
    ((text, line),) = unused
    assert "no gradient in this step for unused." in text
    assert line == "model(torch.ones(2, 4)).sum().backward()"
    ((text, line),) = useless
    assert "error_feedback=True" in text
    assert line == 'ByteGradAlgorithm(codec="fp16", error_feedback=True)'
    assert [text for text, _ in own] == ["rank 0", "rank 1"]
    ((text, line),) = threads
    assert line in ("thread.start()", "thread.join()")


def test_a_module_that_the_package_imports_is_not_the_user():
    inner = partial(warn, "while it imports")
    for module in ("enum", "sympy.core", "torch.fx", "bagua._sync"):
        names = {"__name__": module, "inner": inner}
        exec("def call():\n    inner()\n", names)
        inner = names["call"]

    def wrap():
        inner()

    assert recorded(wrap) == [("while it imports", "inner()")]


def test_before_there_is_a_group_rank_0_speaks(monkeypatch):
    for rank, count in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert len(recorded(lambda: warn("before"))) == count


def test_a_forked_child_leaves_its_parents_connection_to_the_store_alone(ranks):
    assert ranks(2, fork_and_warn) == [[(0, 1), 0]] * 2


def test_no_module_warns_past_the_one_that_knows_the_users_line():
    """Two are imported before it: their warnings are of the import."""
    allowed = {"bagua/_core/group/warn.py", "bagua/__init__.py", "mlbench_core/__init__.py"}
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "warnings.warn" in path.read_text()
    }
    assert found == allowed
