"""The script of docs/slow-networks.md trains islands of ranks, and resumes to the bit."""

import json
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/islands.py"
RUN = """
import runpy, sys
sys.argv = ["islands.py", *{arguments!r}]
runpy.run_path({path!r}, run_name="__main__")
"""


def run_example(run_script, *arguments):
    """The figures that each of four ranks prints."""
    text = RUN.format(arguments=[str(a) for a in arguments], path=str(EXAMPLE))
    ends = run_script(4, text, timeout=100.0)
    for end in ends:
        assert end.returncode == 0, end.stderr
    return [json.loads(end.stdout.splitlines()[-1]) for end in ends]


def test_two_islands_share_a_sharded_model_and_go_on_from_a_checkpoint(run_script, tmp_path):
    whole = run_example(run_script, "--interval", 10, "--rounds", 8)
    for rank in whole:
        assert rank["accuracy"] == whole[0]["accuracy"] > 0.85
        assert rank["weights"] == whole[0]["weights"]
        # In 4 bits an eighth of a shard, and some bytes to say that all are there.
        shard = 4 * (64 * 256 + 256 + 256 * 10 + 10) / 2
        assert rank["bytes_per_round"] < 0.2 * shard
    saved = tmp_path / "saved"
    run_example(run_script, "--interval", 10, "--rounds", 4, "--checkpoint", saved)
    resumed = run_example(run_script, "--interval", 10, "--rounds", 8, "--checkpoint", saved)
    assert {rank["weights"] for rank in resumed} == {whole[0]["weights"]}
