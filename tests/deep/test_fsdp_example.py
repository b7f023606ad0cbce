"""The script of docs/integrations/fsdp.md trains, saves, resumes, and sends what the page says."""

import json
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "docs/examples/integrations/fsdp.py"
EPOCHS = 8


def run_example(run_script, *arguments, ranks=2):
    """The figures that rank 0 prints."""
    ends = run_script(ranks, EXAMPLE, arguments, timeout=200.0)
    for end in ends:
        assert end.returncode == 0, end.stderr
    return json.loads(ends[0].stdout)


@pytest.fixture(scope="module")
def exact(run_script):
    return run_example(run_script, "--codec", "none", "--epochs", EPOCHS)


def test_the_example_reaches_its_exact_counterpart_with_a_quarter_of_the_bytes(
    run_script, exact, tmp_path
):
    # In two parts, of which the second goes on where the first has ended.
    run_example(run_script, "--epochs", EPOCHS // 2, "--checkpoint", tmp_path)
    resumed = run_example(run_script, "--epochs", EPOCHS, "--checkpoint", tmp_path)
    whole = run_example(run_script, "--epochs", EPOCHS)
    assert exact["accuracy"] > 0.9
    assert abs(whole["accuracy"] - exact["accuracy"]) <= 0.01
    exact_bytes = 4 * whole["parameters"] / 2
    assert 0.25 * exact_bytes < whole["gradient_bytes_per_step"] <= 0.27 * exact_bytes
    assert resumed["steps"] == whole["steps"] / 2
    assert resumed["weights"] == whole["weights"]
    assert resumed["weights"] != exact["weights"]


def test_8_bit_weights_reach_the_accuracy_too(run_script, exact):
    compressed = run_example(run_script, "--weights", "--epochs", EPOCHS)
    assert abs(compressed["accuracy"] - exact["accuracy"]) <= 0.015


def test_replicas_on_three_nodes_reach_the_accuracy_of_exact_ones(run_script):
    arguments = ("--replicas", 3, "--epochs", 3)
    exact = run_example(run_script, *arguments, "--codec", "none", ranks=6)
    compressed = run_example(run_script, *arguments, ranks=6)
    assert exact["accuracy"] > 0.8
    assert abs(compressed["accuracy"] - exact["accuracy"]) <= 0.02
    # As many as an exact all-reduce of three sends.
    of_a_shard = 4 * compressed["parameters"] / 2 * 4 / 3
    assert 0.25 * of_a_shard < compressed["gradient_bytes_per_step"] <= 0.27 * of_a_shard
    assert compressed["weights"] != exact["weights"]


@pytest.mark.timeout(820)  # four runs, each of which may take 200 s
def test_4_bits_with_residuals_between_copies_reach_the_loss_and_resume(run_script, tmp_path):
    arguments = ("--replicas", 2, "--epochs")
    four = ("--codec", "int4_block", "--residuals")
    exact = run_example(run_script, *arguments, 30, "--codec", "none", ranks=4)
    run_example(run_script, *arguments, 15, *four, "--checkpoint", tmp_path, ranks=4)
    resumed = run_example(run_script, *arguments, 30, *four, "--checkpoint", tmp_path, ranks=4)
    whole = run_example(run_script, *arguments, 30, *four, ranks=4)
    assert whole["steps"] == 2 * resumed["steps"] == exact["steps"] >= 300
    assert abs(whole["loss"] - exact["loss"]) <= 0.01
    assert resumed["weights"] == whole["weights"] != exact["weights"]
    of_a_shard = 4 * whole["parameters"] / 2  # an exact all-reduce of two sends as much
    assert 0.125 * of_a_shard < whole["gradient_bytes_per_step"] <= 0.15 * of_a_shard


def test_the_page_shows_the_script_and_its_arguments():
    page = (REPOSITORY / "docs/integrations/fsdp.md").read_text()
    assert "examples/integrations/fsdp.py" in page
    for argument in ("weights=True", "error_feedback=True", "reduce_scatter", "block_uint8"):
        assert argument in page
