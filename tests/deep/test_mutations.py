"""Some mutations of Python, one per family that has any. All of them: mutations/mutate.py.

That the named tests pass without them is what `make test` shows.
"""

import itertools

import pytest
from deep.mutations.mutate import mutations, try_python

#: The first that still applies: a change of the code may have taken others' texts away, which the
#: program tells as stale.
SAMPLE = [
    next(group)
    for _, group in itertools.groupby(
        (mutation for mutation in mutations() if mutation.in_python and mutation.applies),
        key=lambda mutation: mutation.family,
    )
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", SAMPLE, ids=lambda mutation: mutation.family)
def test_a_mutation_is_caught(mutation):
    verdict, text = try_python(mutation)
    assert verdict == "caught", f"{mutation.name}: {verdict}\n{text}"


def test_every_family_has_ten_mutations_with_names_of_their_own():
    families = [mutation.family for mutation in mutations()]
    assert all(families.count(family) >= 10 for family in families)
    assert len({(mutation.family, mutation.name) for mutation in mutations()}) == len(families)
