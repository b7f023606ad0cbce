"""The scripts of docs/islands.md train islands of ranks, and resume to the bit."""

import json
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"
ROUNDS, SAVED = 8, 4


def run_example(run_script, script, *arguments):
    """The figures that each of four ranks prints."""
    ends = run_script(4, EXAMPLES / script, arguments, timeout=100.0)
    for end in ends:
        assert end.returncode == 0, end.stderr
    return [json.loads(end.stdout.splitlines()[-1]) for end in ends]


def whole_and_resumed(run_script, script, folder):
    """What ranks print after all rounds in one run, and in two with a checkpoint between them."""
    common = (run_script, script, "--interval", 10, "--rounds")
    whole = run_example(*common, ROUNDS)
    run_example(*common, SAVED, "--checkpoint", folder)
    return whole, run_example(*common, ROUNDS, "--checkpoint", folder)


def test_two_islands_share_a_sharded_model_and_go_on_from_a_checkpoint(run_script, tmp_path):
    whole, resumed = whole_and_resumed(run_script, "islands.py", tmp_path / "saved")
    for rank in whole:
        assert rank["accuracy"] == whole[0]["accuracy"] > 0.85
        assert rank["weights"] == whole[0]["weights"]
        # In 4 bits an eighth of a shard, and some bytes to say that all are there.
        shard = 4 * (64 * 256 + 256 + 256 * 10 + 10) / 2
        assert rank["bytes_per_round"] < 0.2 * shard
    assert {rank["weights"] for rank in resumed} == {whole[0]["weights"]}


def test_two_pipelines_meet_stage_by_stage_and_go_on_from_a_checkpoint(run_script, tmp_path):
    whole, resumed = whole_and_resumed(run_script, "pipeline_islands.py", tmp_path / "saved")
    for stage, parameters in ((0, 64 * 256 + 256), (1, 256 * 10 + 10)):
        of_islands = whole[stage], whole[2 + stage]
        assert of_islands[0] == of_islands[1]
        assert of_islands[0]["bytes_per_round"] < 0.2 * 4 * parameters
        after = {resumed[stage]["weights"], resumed[2 + stage]["weights"]}
        assert after == {of_islands[0]["weights"]}
    assert whole[1]["accuracy"] > 0.85


def test_lightning_trains_islands(run_script):
    ends = run_example(run_script, "integrations/lightning_islands.py", "--epochs", 4)
    shard = 4 * (64 * 256 + 256 + 256 * 10 + 10) / 2
    for rank in ends:
        assert rank["accuracy"] == ends[0]["accuracy"] > 0.85
        assert rank["rounds"] == 5  # 11 steps an epoch, a round every 10 and one at the end
        assert rank["bytes_sent"] < 5 * 0.2 * shard
