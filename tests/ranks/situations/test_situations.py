"""Situations of users of torch's DistributedDataParallel, under torch's class and under ours.

The table is in the files that `themes.py` names. All situations that were selected run once, in a
process of their own that forks the ranks; each is then a test of its own.
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
#: that is rounded. Two ranks run where the members of a group, or those that are left, decide;
#: report.py runs all situations on both.
TWO_RANKS_TOO = ("communicating", "joining", "unused", "batch_norm")

#: The first test waits for all.
pytestmark = pytest.mark.timeout(900)

CASES = [
    (theme, row, size, house)
    for size in (2, 3)
    for theme, row in themes.all_rows().values()
    for house in HOUSES
    if size in row.sizes and (size == 3 or theme in TWO_RANKS_TOO)
]


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory):
    """{(situation, house, size): (verdict, text)} of all that were selected."""
    selected = [item for item in request.session.items if hasattr(item, "callspec")]
    cases = [item.callspec.params for item in selected if "house" in item.callspec.params]
    folder = tmp_path_factory.mktemp("situations")
    command = [FORKED_PYTHON, str(PROGRAM), "--brief"]

    def saved_at(size):
        return folder / f"verdicts-{size}"

    # Ranks wait more than they work, so the sizes run side by side.
    programs = {}
    for size in sorted({case["size"] for case in cases}):
        names = folder / f"names-{size}"
        names.write_text("\n".join({case["row"].name for case in cases if case["size"] == size}))
        with (folder / f"output-{size}").open("w") as output:
            programs[size] = subprocess.Popen(
                [*command, "--select", names, "--size", str(size), "--save", saved_at(size)],
                stdout=output,
                stderr=output,
                env=os.environ | fork_server.variables() | {"OMP_NUM_THREADS": "1"},
            )
    for program in programs.values():
        program.wait()
    found = {}
    for size in programs:
        saved = saved_at(size)
        assert saved.exists(), (folder / f"output-{size}").read_text(errors="replace")[-4000:]
        found |= pickle.loads(saved.read_bytes())
    return found


@pytest.mark.parametrize(
    ("theme", "row", "size", "house"),
    CASES,
    ids=[f"{theme}-{row.name}-{house}-{size}_ranks" for theme, row, size, house in CASES],
)
def test_a_situation_is_as_in_torch_or_as_documented(verdicts, theme, row, size, house):
    verdict, text = verdicts[row.name, house, size]
    if verdict not in judging.GOOD:
        pytest.fail(f"{theme}.{row.name}, {house}, {size} ranks: {verdict}\n{text}", pytrace=False)


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
