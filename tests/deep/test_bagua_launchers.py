"""Bagua's launchers are torchrun."""

import pytest
from support.processes.pool import run_forked

PRINTS = """
import os, sys
import bagua.torch_api as bagua
bagua.init_process_group()
text = [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
words = ["ranks", *text, str(os.environ.get("BAGUA_DEFAULT_BUCKET_SIZE")), *sys.argv[1:]]
os.write(1, (" ".join(words) + "\\n").encode())  # in one piece: both ranks write to one pipe
"""


def launch(folder, launcher, *arguments):
    script = folder / "prints.py"
    script.write_text(PRINTS)
    command = ["-m", f"bagua.distributed.{launcher}", "--nproc_per_node", "2", "--standalone"]
    return run_forked(*command, *arguments, script, "--own", "7")


@pytest.mark.parametrize("launcher", ["run", "launch"])
def test_a_launcher_starts_the_ranks(tmp_path, launcher):
    end = launch(tmp_path, launcher)
    assert end.returncode == 0, end.stderr
    expected = [f"ranks {rank} 2 {rank} 2 None --own 7" for rank in range(2)]
    assert sorted(end.stdout.splitlines()) == expected


def test_arguments_of_baguas_launcher_are_taken(tmp_path):
    end = launch(
        tmp_path,
        "launch",
        *["--bagua_service_port", "29501", "--autotune_level", "1", "--enable_bagua_net"],
        *["--default_bucket_size", "4096", "--logdir", tmp_path / "logs"],
    )
    assert end.returncode == 0, end.stderr
    assert "--bagua_service_port, --autotune_level, --enable_bagua_net: no effect" in end.stderr
    assert "Algorithm.init('auto')" in end.stderr
    written = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert sorted(written) == [f"ranks {rank} 2 {rank} 2 4096 --own 7\n" for rank in range(2)]


def test_the_exit_code_is_that_of_torchrun(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    end = run_forked("-m", "bagua.distributed.run", "--standalone", tmp_path / "fails.py")
    assert end.returncode == 1
    assert "exitcode" in end.stderr
