"""benchmarks/curves.py: what it keeps and evaluates; and a short run."""

import argparse
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
curves, report = map(importlib.import_module, ("curves", "curve_report"))


def run_of(losses, sent=1e6):
    numbers = range(1, len(losses) + 1)
    return {
        "step": [10 * i for i in numbers],
        "loss": losses,
        "accuracy": [0.5 for _ in losses],
        "bytes": [sent * i for i in numbers],
    }


def test_steps_to_a_loss_lie_between_two_measurements():
    curves = [run_of([4.0, 2.0, 1.0]), run_of([4.0, 2.0, 0.0])]
    assert report.steps_until(curves, 4.0) == 10
    assert report.steps_until(curves, 3.0) == 15
    assert report.steps_until(curves, 0.5) == 30
    assert report.steps_until(curves, 0.4) == math.inf


def test_time_to_the_loss_of_exact_gradients_is_of_the_same_seeds():
    def arm(seconds, *curves):
        return {"seeds": dict(enumerate(map(run_of, curves))), "seconds": {"200": seconds}}

    exact = arm(3.0, [4.0, 2.0, 1.0], [4.0, 2.2, 1.0])  # equal ends: no noise
    assert report.sooner(exact, exact, "200", 0) == 1
    assert report.sooner(arm(1.0, [4.0, 2.0, 0.0]), exact, "200", 0) == pytest.approx(90 / 25)
    # 20 of the 25 steps are exact ones
    assert report.sooner(arm(1.0, [4.0, 2.0, 0.0]), exact, "200", 20) == pytest.approx(90 / 65)
    assert math.isnan(report.sooner(arm(1.0, [4.0, 2.0, 1.1]), exact, "200", 0))
    assert math.isnan(report.sooner(arm(1.0), exact, "200", 0))
    noisy = arm(3.0, [4.0, 2.0, 1.0], [4.0, 2.0, 1.1])  # half of the interval is 0.635
    slower = report.sooner(arm(3.0, [4.0, 2.0, 1.6]), noisy, "200", 0)
    assert slower == pytest.approx(0.812, abs=1e-3)


@pytest.mark.parametrize(
    ("losses", "words", "cell"),
    [
        ([1.01, 1.09, 0.95], "yes", "+0.000"),
        ([1.5, 1.6, 1.55], "worse", "**+0.533**"),
        ([0.5, 0.6, 0.55], "better", "-0.467"),
        ([1.5], "one seed", "(+0.500)"),
        ([1.01, math.nan, 0.95], "worse", "**NaN**"),
        ([1.0, 1.1, 3.0], "unclear", "(+0.683)"),
    ],
)
def test_a_verdict_compares_seed_by_seed_and_marks_the_difference(losses, words, cell):
    exact = {seed: run_of([loss]) for seed, loss in enumerate([1.0, 1.1, 0.95])}
    arm = {seed: run_of([loss]) for seed, loss in enumerate(losses)}
    assert report.verdict(arm, exact) == words
    assert report.above_of(arm, exact) == cell


def test_runs_that_are_kept_are_not_made_again(tmp_path):
    results = tmp_path / "curves.json"
    curves.keep(results, curves.key_of("digits", "exact", 2, "seed", 0), run_of([1.0]))
    curves.keep(results, curves.key_of("digits", "exact", 2, "200", 0), 0.5)
    arguments = argparse.Namespace(
        results=results,
        tasks=["digits"],
        arms=["exact", "qadam"],
        ranks=[2],
        seeds=[0, 1],
        rates=["200"],
    )
    trained, timed = curves.missing(arguments)
    assert trained["runs"] == [("exact", 1), ("qadam", 0), ("qadam", 1)]
    assert (timed["rate"], timed["runs"]) == ("200", [("qadam", 0)])
    assert not results.with_suffix(".new").exists()


def test_the_page_has_a_row_for_each_algorithm(tmp_path):
    results = tmp_path / "curves.json"
    for seed, shift in enumerate([0.0, 0.05, 0.1]):
        for arm, losses in {"exact": [3.0, 1.0], "bytegrad": [2.0, 1.0]}.items():
            run = run_of([loss + shift for loss in losses], sent=2e6 if arm == "exact" else 5e5)
            curves.keep(results, curves.key_of("digits", arm, 2, "seed", seed), run)
    for arm, seconds in {"exact": 0.4, "bytegrad": 0.1}.items():
        curves.keep(results, curves.key_of("digits", arm, 2, "200", 0), seconds)
    report.write_page(curves.kept(results), tmp_path / "curves.md", ["exact", "bytegrad"])
    page = (tmp_path / "curves.md").read_text()
    assert "| bytegrad | +0.000 |\n" in page
    assert "| exact | 1.050 ± 0.124 | 50.0% | 1.00 |\n" in page
    assert "| bytegrad | 1.050 ± 0.124 | 50.0% | 4.13 |\n" in page
    assert "Speed-up" in page
    assert "Not trained yet" in page
    assert "- digits with 4 ranks: everything\n" in page
    assert "- digits with 2 ranks" not in page


def test_a_quick_run_trains_on_real_data():
    command = [sys.executable, BENCHMARKS / "curves.py", "--quick"]
    end = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert end.returncode == 0, end.stderr
    runs = json.loads(end.stdout)
    exact, bytegrad = runs.values()
    assert exact["loss"][-1] < exact["loss"][0]
    assert bytegrad["step"][-1] == 24
    assert 0.24 < bytegrad["bytes"][-1] / exact["bytes"][-1] < 0.27


def test_data_that_is_missing_is_named_with_the_remedy(tmp_path):
    command = [sys.executable, BENCHMARKS / "curves.py", "--tasks", "fashion"]
    command += ["--fashion-mnist", tmp_path, "--results", tmp_path / "curves.json"]
    end = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert end.returncode == 1
    assert "train-images-idx3-ubyte.gz is not there" in end.stderr
    assert "dataset-fashion-mnist" in end.stderr
