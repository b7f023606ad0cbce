"""The scripts of docs/examples/integrations learn as their exact counterparts, with fewer bytes."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import pytest
from support.processes.pool import run_without_torchrun

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLES = REPOSITORY / "docs/examples/integrations"
SCRIPTS = [path.name for path in sorted(EXAMPLES.glob("*.py"))]
#: Without --algorithm: test_fsdp_example.py and test_island_example.py run these.
WITHOUT_ALGORITHM = {"fsdp.py", "lightning_islands.py"}
PAGES = REPOSITORY / "docs/integrations"


def run(script, algorithm):
    """The line that a rank prints, from the script as a whole."""
    from integrations import accelerate_state

    accelerate_state.forget()
    before, sys.argv = sys.argv, [script, "--algorithm", algorithm]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    finally:
        sys.argv = before
    return result_in(output.getvalue())


def result_in(output):
    return json.loads(next(line for line in output.splitlines() if line.startswith('{"rank"')))


@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - WITHOUT_ALGORITHM))
def test_an_example_is_as_good_as_exact_with_a_quarter_of_the_bytes(ranks, script):
    exact, compressed = (ranks(2, run, script, name) for name in ("exact", "bytegrad"))
    for results in (exact, compressed):
        assert [result["rank"] for result in results] == [0, 1]
        assert results[0]["weights"] == results[1]["weights"]
    assert exact[0]["accuracy"] > 0.95
    assert compressed[0]["accuracy"] > exact[0]["accuracy"] - 0.01
    assert compressed[0]["bytes_sent"] <= 0.27 * exact[0]["bytes_sent"]


@pytest.mark.timeout(240)  # two processes import torch and Lightning
def test_lightning_starts_the_processes_by_itself():
    """As `python lightning_digits.py`, without torchrun."""
    end = run_without_torchrun([sys.executable, EXAMPLES / "lightning_digits.py", "--epochs", "3"])
    assert end.returncode == 0, end.stderr
    results = [line for line in end.stdout.replace("}{", "}\n{").splitlines() if '"rank"' in line]
    weights = {json.loads(line)["weights"] for line in results}
    assert len(results) == 2
    assert len(weights) == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_names_the_script(script):
    pages = "".join(path.read_text() for path in PAGES.glob("*.md"))
    assert f"examples/integrations/{script}" in pages
