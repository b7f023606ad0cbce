"""attacks/run.py: every named attack is refused as its table says, and one that is not is told."""

from pathlib import Path

import pytest
from bagua import BaguaError
from support.programs.benchmark_programs import load_file

RUN = Path(__file__).parents[2] / "attacks/run.py"


@pytest.fixture(scope="module")
def attacks():
    return load_file(RUN)


def test_every_attack_is_refused_with_its_words(attacks, capsys):
    assert attacks.main() == 0
    told = capsys.readouterr().out
    assert told.count("    refused: ") == len(attacks.ATTACKS) >= 30
    assert len({attack.name for attack in attacks.ATTACKS}) == len(attacks.ATTACKS)


def test_an_attack_that_succeeds_or_is_refused_in_other_words_is_told(attacks, capsys):
    def refused(_):
        raise BaguaError("no")

    made = [attacks.Attack("a/taken", "it", lambda _: [1], "")]
    made += [
        attacks.Attack("a/other", "it", refused, "yes"),
        attacks.Attack("b", "it", refused, "no"),
    ]
    assert attacks.main(made) == 2
    assert capsys.readouterr().out.count("NOT REFUSED") == 2
    assert attacks.main(made, part="b") == 0
