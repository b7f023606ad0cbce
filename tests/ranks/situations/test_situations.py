"""Situations of users of torch's DistributedDataParallel, under torch's class and under ours.

The table is in the files that `themes.py` names. All situations that were selected run once, in a
process of their own that forks the ranks; each is then a test, of torch and of both of ours.
"""

import os
import pickle
import re
import subprocess
from pathlib import Path

import pytest
from ranks.situations import judging, rows, themes
from ranks.situations.houses import HOUSES
from ranks.situations.table import markdown
from support.processes import fork_server
from support.processes.fork_server import FORKED_PYTHON

PROGRAM = Path(__file__).with_name("report.py")
#: Three ranks have a first, a last and one between, a sum that depends on its order, and a mean
#: that is rounded. report.py runs all situations on two ranks, too.
SIZE = 3

#: The first test waits for all.
pytestmark = pytest.mark.timeout(900)

ROWS = [
    pytest.param(theme, row, id=f"{theme}-{row.name}") for theme, row in themes.all_rows().values()
]


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory):
    """{(situation, house, size): (verdict, text)} of all that were selected."""
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    folder = tmp_path_factory.mktemp("situations")
    names, saved, output = folder / "names", folder / "verdicts", folder / "output"
    names.write_text("\n".join(case["row"].name for case in selected if "row" in case))
    arguments = ["--brief", "--select", names, "--size", str(SIZE), "--save", saved]
    with output.open("w") as file:
        subprocess.run(
            [FORKED_PYTHON, PROGRAM, *arguments],
            stdout=file,
            stderr=file,
            env=os.environ | fork_server.variables() | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
    assert saved.exists(), output.read_text(errors="replace")[-4000:]
    return pickle.loads(saved.read_bytes())


@pytest.mark.parametrize(("theme", "row"), ROWS)
def test_a_situation_is_as_in_torch_or_as_documented(verdicts, theme, row):
    bad = []
    for house in HOUSES:
        verdict, text = verdicts[row.name, house, SIZE]
        if verdict not in judging.GOOD:
            bad.append(f"{theme}.{row.name}, {house}: {verdict}\n{text}")
    if bad:
        pytest.fail("\n".join(bad), pytrace=False)


def test_the_table_is_large_and_its_names_are_unique():
    names = [row.name for theme in themes.THEMES for row in themes.table(theme)]
    assert len(names) == len(set(names)) >= 200


def test_every_refusal_and_difference_from_torch_has_a_reason():
    for _, row in themes.all_rows().values():
        for house, expected in row.expected.items():
            if expected.kind in (rows.REFUSED, rows.BETTER, rows.WARNED, rows.ABSENT):
                assert expected.reason, f"{row.name}, {house}"


def test_the_documentation_has_the_table_and_its_sum():
    table = markdown()
    document = Path(__file__).with_name("README.md")
    assert table in document.read_text(), "put in what report.py --markdown prints"
    counts = [map(int, found) for found in re.findall(r"\| (\d+) of (\d+) \|", table)]
    alike, total = map(sum, zip(*counts, strict=True))
    page = document.parents[3] / "docs" / "migrating.md"
    assert f"{alike} of {total} situations" in page.read_text()
    assert f"The other {total - alike}:" in page.read_text()
