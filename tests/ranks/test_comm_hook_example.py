"""The script of docs/comm_hooks.md runs, and the page shows it."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "docs/examples/comm_hook.py"
RUN = """
import runpy, sys
sys.argv = ["comm_hook.py", "--algorithm", {algorithm!r}, "--steps", "60"]
runpy.run_path({path!r}, run_name="__main__")
"""
# Share of the bytes that the exact algorithm sends.
AT_MOST = {"exact": 1.0, "bytegrad": 0.26, "power_sgd": 0.1, "sparse": 0.1}


def run_example(run_script, algorithm):
    """The loss of the first rank and the bytes that it sent per step."""
    ends = run_script(2, RUN.format(algorithm=algorithm, path=str(EXAMPLE)))
    for end in ends:
        assert end.returncode == 0, end.stderr
    loss, sent = re.match(rf"{algorithm}: loss ([\d.]+), (\d+) bytes sent", ends[0].stdout).groups()
    return float(loss), int(sent)


@pytest.mark.parametrize("algorithm", AT_MOST)
def test_the_example_learns_with_fewer_bytes(run_script, algorithm):
    parameters = 32 * 256 + 256 + 256 * 256 + 256 + 256 + 1
    loss, sent = run_example(run_script, algorithm)
    assert 0 < loss < 0.5
    assert sent <= AT_MOST[algorithm] * 4 * parameters


def test_the_page_names_every_algorithm_of_the_example():
    page = (REPOSITORY / "docs/comm_hooks.md").read_text()
    for algorithm in AT_MOST:
        assert f"`{algorithm}`" in page or f'"{algorithm}"' in page, algorithm
    assert "examples/comm_hook.py" in page
