"""A process that is killed in the middle of writing checkpoints loses none that it has finished."""

import os
import subprocess
import sys

import pytest
import torch
from bagua._core.state import step_folder as _step_folder

# `make soak` asks for more.
KILLS = int(os.environ.get("BAGUA_TEST_KILLED_WRITERS", "30"))

# Children that write step after step, each killed at a random moment: torch is imported once, and
# each child is a fork of what has no threads yet.
SCRIPT = """
import itertools, os, random, signal, sys, time
from pathlib import Path
import torch
import torch.distributed.checkpoint
torch.set_num_threads(1)
from bagua._core.state import step_folder as _step_folder

folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
moments = random.Random(seed)
reader, writer = os.pipe()

def write(step):
    _step_folder.clear(folder)
    place = _step_folder.place_of(folder, step)
    leaves = {("step",): step, ("tensor",): torch.full((50_000,), float(step))}
    part = _step_folder.part_of(_step_folder.hidden(place), 0)
    _step_folder.publish(place, _step_folder.write(part, leaves))
    for older in _step_folder.steps(folder)[:-2]:
        _step_folder.remove(_step_folder.place_of(folder, older))

def write_for_ever(first):
    for step in itertools.count(first):
        write(step)
        os.write(writer, step.to_bytes(8, "little"))

# A busy machine takes longer for each, so kills come within some times of what one takes.
begin = time.monotonic()
for step in range(1, 6):
    write(step)
longest = 4 * (time.monotonic() - begin) / 5 + 0.01
first = finished = step
in_the_middle = 0
for kill in range(kills):
    child = os.fork()
    if child == 0:
        write_for_ever(finished + 1)
    time.sleep(moments.uniform(0.0, longest))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.set_blocking(reader, False)
    while True:
        try:
            finished = int.from_bytes(os.read(reader, 8), "little")
        except BlockingIOError:
            break
    in_the_middle += any(folder.glob(".step-*"))
    # What was told to be finished is there, or the one that was about to be told.
    found = _step_folder.steps(folder)
    assert found[-1] in (finished, finished + 1), (kill, found, finished)
    for step in found:
        place = _step_folder.place_of(folder, step)
        assert _step_folder.check(place, 0, 1) == 1
        leaves, _ = _step_folder.read(_step_folder.part_of(place, 0))
        assert leaves["step",] == step
        assert torch.equal(leaves["tensor",], torch.full((50_000,), float(step)))
    finished = found[-1]
print(finished - first, in_the_middle)
"""


@pytest.mark.timeout(60 + KILLS)
def test_finished_checkpoints_survive_a_kill_at_any_moment(tmp_path):
    seed = int.from_bytes(os.urandom(4), "little")
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path), str(KILLS), str(seed)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=50 + KILLS)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    finished, in_the_middle = map(int, done.stdout.split())
    assert finished > 0
    assert in_the_middle > KILLS // 10, "hardly any kill came while something was being written"


LEAVES = {
    ("tensor",): torch.arange(30.0),
    ("state", 0, "channels_last"): torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ("state", "0.channels_last"): torch.tensor(3, dtype=torch.bfloat16),
    ("none",): torch.empty(0, 2),
    ("complex",): torch.tensor([1 + 2j]),
    ("list",): [1, (2.0, None), torch.ones(1)],
    ("empty",): {},
}


def written(folder):
    place = _step_folder.place_of(folder, 7)
    part = _step_folder.part_of(_step_folder.hidden(place), 0)
    _step_folder.publish(place, _step_folder.write(part, LEAVES, more=[("a", 1)]))
    return place


def test_what_is_read_is_what_was_written(tmp_path):
    leaves, more = _step_folder.read(_step_folder.part_of(written(tmp_path), 0))
    assert more == {"more": [("a", 1)]}
    assert leaves.keys() == LEAVES.keys()
    for path, value in LEAVES.items():
        if isinstance(value, torch.Tensor):
            assert leaves[path].dtype == value.dtype
            assert leaves[path].stride() == value.stride()
            assert torch.equal(leaves[path], value)
    assert leaves["list",] == LEAVES["list",]
    assert leaves["empty",] == {}


def test_every_file_says_when_any_of_its_bytes_is_changed(tmp_path):
    place = written(tmp_path)
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"digests", "values.pt", "__0_0.distcp"}
    for path in files:
        whole = path.read_bytes()
        changes = [whole[:length] for length in range(0, len(whole), 61)]
        for index in range(0, len(whole), 37):
            changes.append(whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :])
        for changed in changes:
            path.write_bytes(changed)
            with pytest.raises(_step_folder.Damaged) as damaged:
                _step_folder.check(place, 0, 1)
            assert damaged.value.args[0] == path
        path.write_bytes(whole)
        assert _step_folder.check(place, 0, 1) == 1


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    half = tmp_path / ".step-000000003.part" / "rank-0"
    half.mkdir(parents=True)
    (half / "values.pt").write_bytes(b"half")
    assert _step_folder.steps(tmp_path) == []
    _step_folder.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
