"""A short run of the fuzzing program that needs no torch; `make fuzz` runs all of them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.programs.cpp_programs import ROOT, build

SECONDS = 1.5
SOURCES = [
    *(f"tests/fuzz/{name}.cpp" for name in ("driver", "mutation", "fuzz_codec")),
    *(f"csrc/codec/{name}.cpp" for name in ("chunk_codec_cpu", "factory", "index_code", "no_cuda")),
    "csrc/math/checksum.cpp",
    "csrc/op/wire/frame.cpp",
]
FLAGS = "-std=c++20 -O1 -g1 -ffp-contract=off -fsanitize=address,undefined"
FLAGS += " -fno-sanitize-recover=all -Wall -Wextra -Werror -Icsrc -Itests/fuzz"

pytestmark = [
    pytest.mark.timeout(400),  # the first run compiles
    pytest.mark.skipif(shutil.which("g++") is None, reason="the program is built by g++"),
]


@pytest.fixture(scope="module")
def program():
    texts = "".join(Path(file).read_text() for file in sorted((ROOT / "tests/fuzz").iterdir()))
    return build("fuzz_codec", [*FLAGS.split(), *SOURCES], key=texts)


def run(program, *arguments, cwd=None):
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=cwd
    )


@pytest.mark.parametrize("target", ["decode", "encode", "indices", "frame"])
def test_a_decoder_takes_arbitrary_bytes(program, target, tmp_path):
    done = run(program, "--target", target, "--seconds", SECONDS, "--seed", 7, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(rf"{target}: (\d+) inputs in .* s, seed 7\n", done.stdout)
    assert found, done.stdout
    assert int(found[1]) >= 1000


def test_an_input_from_a_file_is_run_and_an_unknown_target_is_refused(program, tmp_path):
    (tmp_path / "input").write_bytes(bytes(100))
    done = run(program, "--target", "frame", tmp_path / "input")
    assert done.returncode == 0
    assert done.stdout.endswith(" passed\n")
    assert run(program, "--target", "no such").returncode == 2
