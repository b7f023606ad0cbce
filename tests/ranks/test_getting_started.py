"""The first script of the documentation, as it stands."""

import re
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs/examples/getting_started.py"


def test_it_learns_and_counts_its_bytes(run_script):
    first, second = run_script(2, SCRIPT)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first.stdout)]
    assert len(losses) == 4
    assert losses[-1] < min(0.01, losses[0])
    sent = [int(number) for number in re.findall(r"(\d+) bytes sent", first.stdout)]
    parameters = 64 * 3 + 65
    assert sent == sorted(sent)
    assert 0 < sent[-1] < 200 * parameters * 4
    assert second.stdout == ""
