"""Some mutations of Python, one of every third family. All of them: mutations/mutate.py.

That the named tests pass without them is what `make test` shows.
"""

import itertools

import pytest
from deep.mutations.mutate import ROOT, mutations, try_python

FIRSTS = [
    next(family)
    for _, family in itertools.groupby(
        (mutation for mutation in mutations() if mutation.in_python),
        key=lambda mutation: mutation.family,
    )
][::3]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", FIRSTS, ids=lambda mutation: mutation.family)
def test_a_mutation_is_caught(mutation):
    verdict, text = try_python(mutation)
    assert verdict == "caught", f"{mutation.name}: {verdict}\n{text}"


def test_mutations_change_what_is_there_and_name_tests_that_exist():
    stale = [f"{each.family}: {each.name}" for each in mutations() if not each.applies]
    assert not stale, "their `old` is not in the file, or not once: write down what stands there"
    files = {test.partition("::")[0] for each in mutations() for test in each.tests}
    missing = sorted(name for name in files if ".py" in name and not (ROOT / name).exists())
    assert not missing


def test_every_family_has_ten_mutations_with_names_of_their_own():
    families = [mutation.family for mutation in mutations()]
    assert all(families.count(family) >= 10 for family in families)
    assert len({(mutation.family, mutation.name) for mutation in mutations()}) == len(families)
