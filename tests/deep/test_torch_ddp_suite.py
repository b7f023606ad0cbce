"""torch's own tests of DistributedDataParallel, with our class in place of torch's."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from deep.torch_suite.expectations import (
    DDP_TESTS,
    FAILURES,
    NOT_HERE,
    PRIVATE_MEMBERS,
    TESTS,
)
from support.processes import fork_server
from support.processes.fork_server import FORKED_PYTHON

TESTS_FOLDER = Path(__file__).parents[1]
PROGRAM = "deep.torch_suite.run"


class Outcomes:
    """What becomes of the tests, which one program runs in their order."""

    def __init__(self, names):
        environment = os.environ | fork_server.variables() | {"OMP_NUM_THREADS": "1"}
        self._program = subprocess.Popen(
            [FORKED_PYTHON, "-m", PROGRAM, *names],
            cwd=TESTS_FOLDER,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._known = {}

    def __getitem__(self, name):
        while name not in self._known:
            line = self._program.stdout.readline()
            assert line, f"{PROGRAM} ended with {self._program.wait()} before {name}"
            outcome = json.loads(line)
            self._known[outcome["name"]] = outcome
        return self._known[name]

    def close(self):
        self._program.terminate()
        self._program.wait()


@pytest.fixture(scope="module")
def outcomes(request):
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", None) == test_of_torch.__name__
    ]
    running = Outcomes(chosen)
    yield running
    running.close()


@pytest.mark.timeout(300)  # the first waits for imports, all for those before them
@pytest.mark.parametrize("name", TESTS)
def test_of_torch(name, outcomes):
    outcome, said = outcomes[name]["outcome"], "\n".join(outcomes[name]["ranks"])
    reason, text = FAILURES.get(name, ("", ""))
    if not reason and outcome != "passed":
        pytest.fail(f"{outcome}:\n{said}", pytrace=False)
    if reason and outcome != "failed":
        pytest.fail(f"{outcome}; take it off the list of FAILURES: {reason}", pytrace=False)
    if reason and not re.search(text, said):
        pytest.fail(f"fails for another reason than this: {reason}\n{said}", pytrace=False)


def test_most_of_torchs_tests_pass():
    """A new version of torch may have no test of a name that a list has."""
    assert set(FAILURES) <= set(TESTS)
    assert {*PRIVATE_MEMBERS, *NOT_HERE} <= DDP_TESTS
    assert len(TESTS) - len(FAILURES) >= 52
