"""A process that is killed in the middle of writing checkpoints loses none that it has finished."""

import os
import subprocess
import sys

import pytest
import torch
from bagua._core.state import checkpoint_file as _checkpoint_file

# `make soak` asks for more.
KILLS = int(os.environ.get("BAGUA_TEST_KILLED_WRITERS", "60"))

# Children that write version after version of one file, each killed at a random moment: torch is
# imported once, and each child is a fork of what has no threads yet.
SCRIPT = """
import itertools, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from bagua._core.state import checkpoint_file as _checkpoint_file

folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
moments = random.Random(seed)
path = folder / "step-000000001.rank-0-of-1.pt"
reader, writer = os.pipe()

def write(version):
    content = {"version": version, "tensor": torch.full((50_000,), float(version))}
    _checkpoint_file.write(path, content, version)

def write_for_ever(first):
    for version in itertools.count(first):
        write(version)
        os.write(writer, version.to_bytes(8, "little"))

# A busy machine takes longer for each, so kills come within some times of what one takes.
begin = time.monotonic()
for version in range(1, 6):
    write(version)
longest = 4 * (time.monotonic() - begin) / 5 + 0.01
first = finished = version
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
    in_the_middle += any(folder.glob(".*.part"))
    version = _checkpoint_file.check(path)
    # What was told to be finished is there, or the one that was about to be told.
    assert version in (finished, finished + 1), (kill, version, finished)
    content = _checkpoint_file.read(path)
    assert content["version"] == version
    assert torch.equal(content["tensor"], torch.full((50_000,), float(version)))
    finished = version
print(finished - first, in_the_middle)
"""


@pytest.mark.timeout(60 + KILLS)
def test_the_newest_finished_checkpoint_survives_a_kill_at_any_moment(tmp_path):
    seed = int.from_bytes(os.urandom(4), "little")
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path), str(KILLS), str(seed)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=50 + KILLS)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    finished, in_the_middle = map(int, done.stdout.split())
    assert finished > 0
    assert in_the_middle > KILLS // 10, "hardly any kill came while something was being written"


def test_a_file_is_what_torch_reads_and_says_when_any_of_its_bytes_is_changed(tmp_path):
    path = tmp_path / "file.pt"
    content = {"tensor": torch.arange(300.0), "list": [1, (2.0, None)]}
    _checkpoint_file.write(path, content, 7)
    assert _checkpoint_file.check(path) == 7
    assert torch.equal(torch.load(path, weights_only=True)["tensor"], content["tensor"])
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(_checkpoint_file.DamagedFile):
            _checkpoint_file.check(path)
    for length in range(0, len(whole), 11):
        path.write_bytes(whole[:length])
        with pytest.raises(_checkpoint_file.DamagedFile):
            _checkpoint_file.check(path)


def test_files_of_a_killed_process_are_removed_by_the_next_save(tmp_path):
    path = tmp_path / "file.pt"
    (tmp_path / f".{path.name}.123.part").write_bytes(b"half")
    _checkpoint_file.write(path, {}, 1)
    assert list(tmp_path.iterdir()) == [path]
