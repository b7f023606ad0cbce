"""Situations of users of torch's DistributedDataParallel, under torch's class and under ours.

The table is in the files that `table.py` names. A situation is a test, of torch and of both of
ours, on three ranks: a first, a last and one between, a sum that depends on its order, and a mean
that is rounded.
"""

import gc
import re
import traceback
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks.situations import judging, rows
from ranks.situations.houses import HOUSES, NotApplicableError
from ranks.situations.judging import Outcome
from ranks.situations.table import THEMES, markdown, table
from support.processes.pool import Pool

SIZE = 3
ROWS = [pytest.param(row, id=f"{theme}-{row.name}") for theme in THEMES for row in table(theme)]


def act(situation, house):
    """The outcome of a situation on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            values = situation(HOUSES[house], dist.get_rank(), dist.get_world_size())
            outcome = Outcome("done", values)
        except NotApplicableError:
            outcome = Outcome("absent")
        except Exception:  # noqa: BLE001 - everything is reported
            outcome = Outcome("raised", text=traceback.format_exc())
    gc.collect()
    outcome.warnings = [str(warning.message) for warning in caught]
    return outcome


class Stage:
    """Runs situations on ranks, which are replaced after an error: it may have changed them."""

    def __init__(self):
        self.pool = Pool()

    def run(self, row, house):
        """The outcome of each rank."""
        try:
            outcomes = self.pool(SIZE, act, row.run, house, fresh=row.alone, timeout=25.0)
        except AssertionError as error:
            return [Outcome("gone", text=str(error))] * SIZE
        if any(rank.kind == "raised" for rank in outcomes):
            self.pool.close()
            self.pool = Pool()
        return outcomes


@pytest.fixture(scope="module")
def stage():
    stage = Stage()
    yield stage
    stage.pool.close()


@pytest.mark.parametrize("row", ROWS)
def test_a_situation_is_as_in_torch_or_as_documented(stage, row):
    theirs = stage.run(row, "torch")
    bad = []
    for house in HOUSES:
        outcomes = theirs if house == "torch" else stage.run(row, house)
        verdict, text = judging.judge(row, house, theirs, outcomes)
        if verdict not in (row.of(house).kind, judging.ABSENT):
            bad.append(f"{house}: {verdict}\n{text}")
    if bad:
        pytest.fail("\n".join(bad), pytrace=False)


def test_every_refusal_and_difference_from_torch_has_a_reason():
    for row in (row for theme in THEMES for row in table(theme)):
        for house, expected in row.expected.items():
            if expected.kind in (rows.REFUSED, rows.BETTER, rows.WARNED):
                assert expected.reason, f"{row.name}, {house}"


def test_the_documentation_has_the_table_and_its_sum():
    document = Path(__file__).with_name("README.md")
    assert markdown() in document.read_text(), markdown()
    counts = [map(int, found) for found in re.findall(r"\| (\d+) of (\d+) \|", markdown())]
    alike, total = map(sum, zip(*counts, strict=True))
    page = document.parents[3] / "docs" / "migrating.md"
    assert f"{alike} of {total} situations" in page.read_text()
    assert f"The other {total - alike}:" in page.read_text()
