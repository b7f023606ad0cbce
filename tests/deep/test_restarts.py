"""Ranks killed under torchrun: the restarted job ends with the same weights, bit for bit."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from bagua._core.state import step_folder as _step_folder
from support import training
from support.checkpoint_training import file
from support.processes import pool, restarting

REPOSITORY = Path(__file__).parents[2]
# At random moments, after those that are chosen; `make soak` asks for 20.
RESTARTS = int(os.environ.get("BAGUA_TEST_RESTARTS", "0"))


def torchrun(size, restarts, *script, timeout=100.0):
    """Run the script to its end, which must be a good one; what was printed."""
    options = (f"--max-restarts={restarts}", "--monitor_interval=0.05")
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    done = pool.torchrun(size, *options, *script, env=env, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def ends(folder, size):
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(size)]


def assert_same_ends(expected, folder):
    """Every algorithm's weights, on every rank; asynchronous ones only end."""
    found = ends(folder, len(expected))
    for rank, of_rank in enumerate(expected):
        for name in restarting.ALGORITHMS:
            if name != "async":
                assert found[rank][name][1] == of_rank[name][1], f"{name}, rank {rank}"
    return found


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    """Final state of each of three ranks without a fault."""
    return ranks(
        3, restarting.uninterrupted, str(tmp_path_factory.mktemp("uninterrupted")), timeout=100.0
    )


@pytest.mark.timeout(300 + 30 * RESTARTS)
def test_ranks_killed_at_any_moment_cost_no_bit_of_any_algorithms_weights(uninterrupted, tmp_path):
    seed = int(os.environ.get("BAGUA_TEST_SEED", random.randrange(2**31)))
    print("seed", seed)
    moments = random.Random(seed)
    plan = [
        {"rank": 1, "step": 8, "where": "backward"},
        {"rank": 2, "step": 15, "where": "saving"},
    ] + [
        {"rank": moments.randrange(3), "step": 20, "where": "any", "seconds": moments.uniform(0, 4)}
        for _ in range(RESTARTS)
    ]
    seconds = 200 + 30 * RESTARTS
    torchrun(3, len(plan), restarting.__file__, tmp_path, json.dumps(plan), timeout=seconds)
    for of_rank in assert_same_ends(uninterrupted, tmp_path):
        # Whatever is first in turn had been saved at 10 when its ranks died in the saving of 15.
        begins = [first for first, _ in of_rank.values()]
        assert begins[0] >= 10
        assert min(begins) >= 5
    assert not list(tmp_path.glob("*/.step*")), "what was half-written is gone"


KILLS_ITS_USER = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

steps, last_step = 0, int(sys.argv[1])
dies = (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0")

def count(*_):
    global steps
    steps += 1
    if steps == last_step and dies:
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(count)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def saved_bits(folder, rank):
    """By path what the last checkpoint has: of a tensor its bits."""
    own, _ = _step_folder.read(file(folder, 30, rank).parent)
    return {
        path: training.bits([value]) if isinstance(value, torch.Tensor) else value
        for path, value in own.items()
    }


def test_the_example_ends_as_if_nothing_had_happened(run_script, tmp_path):
    script, example = tmp_path / "kill.py", REPOSITORY / "docs/examples/resume.py"
    script.write_text(KILLS_ITS_USER)
    arguments = ["--steps", 30, "--save-every", 10, "--folder"]
    killed = torchrun(2, 1, script, 27, example, *arguments, tmp_path / "killed")
    quiet = run_script(2, example, [*arguments, tmp_path / "quiet"])[0].stdout
    assert "exitcode: -9" in killed
    assert killed.count("step 20: loss") == quiet.count("step 30: loss") == 1
    for rank in (0, 1):
        assert saved_bits(tmp_path / "killed", rank) == saved_bits(tmp_path / "quiet", rank)
