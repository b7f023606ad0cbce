"""The script of docs/comm_hooks.md."""

import re
from pathlib import Path

from support.cases import over

REPOSITORY = Path(__file__).resolve().parents[2]
# Share of the bytes that the exact algorithm sends.
AT_MOST = {"exact": 1.0, "bytegrad": 0.26, "power_sgd": 0.1, "sparse": 0.1}


@over(algorithm=AT_MOST)
def test_the_example_learns_with_fewer_bytes(run_script, algorithm):
    example = REPOSITORY / "docs/examples/comm_hook.py"
    ends = run_script(2, example, ["--algorithm", algorithm, "--steps", "60"])
    for end in ends:
        assert end.returncode == 0, end.stderr
    loss, sent = re.match(rf"{algorithm}: loss ([\d.]+), (\d+) bytes sent", ends[0].stdout).groups()
    parameters = 32 * 256 + 256 + 256 * 256 + 256 + 256 + 1
    assert 0 < float(loss) < 0.5
    assert int(sent) <= AT_MOST[algorithm] * 4 * parameters
