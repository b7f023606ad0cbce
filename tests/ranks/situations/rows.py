"""A row of the table of situations, and what may be expected of each house in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ranks.situations.houses import OURS

SAME, BETTER, REFUSED, RAISES, WARNED, ABSENT = (
    "same",
    "better",
    "refused",
    "raises",
    "warned",
    "absent",
)


@dataclass(frozen=True)
class Expectation:
    """Behaviour of an implementation in a situation.

    kind:
    - `same`: torch's values; after a warning that matches `text`, if there is one.
    - `better`: torch is wrong, and `oracle(rank, size)` gives the right values.
    - `refused`: an exception whose text matches `text`, on every rank; with an oracle if torch is
      wrong.
    - `raises`: as torch does, with a text of its own that matches.
    - `warned`: values may differ from torch's; a warning matches `text`.
    - `absent`: the house has no such member, by its documentation.

    reason: for the table of the documentation.
    """

    kind: str
    reason: str = ""
    text: str = ""
    oracle: Callable[[int, int], dict] | None = None


@dataclass(frozen=True)
class Row:
    """A situation: `run(wrap, rank, size)` gives a dict of values, by name.

    expected: by house. right: what torch itself gives, `right(rank, size)`, where it is worth
    saying; some names are enough. alone: processes of its own, for situations that leave their
    process changed. limit: seconds until it counts as hanging. tolerance: relative, of values in
    float32.
    """

    run: Callable[..., dict]
    expected: dict = field(default_factory=dict)
    right: Callable[[int, int], dict] | None = None
    alone: bool = False
    limit: float = 25.0
    tolerance: float = 1e-5

    @property
    def name(self):
        return self.run.__name__

    def of(self, house):
        """The expectation of a house."""
        return self.expected.get(house, Expectation(SAME))


def row(run, *, both=None, klass=None, method=None, right=None, **more):
    """A row; `both` is expected of the class and of `with_bagua`, or each on its own."""
    expected: dict[str, Any] = {}
    for house, own in zip(OURS, (klass, method), strict=True):
        if own or both:
            expected[house] = own or both
    return Row(run, expected, right, **more)


def same(warning):
    """torch's values, after a warning that torch does not give."""
    return Expectation(SAME, "", warning)


def better(oracle, reason):
    """torch is wrong; the oracle's values are right."""
    return Expectation(BETTER, reason, oracle=oracle)


def refused(text, reason, oracle=None):
    """An error that matches `text`; the reason is one that a user accepts.

    oracle: right values, where torch gives wrong ones. Without it torch's are right.
    """
    return Expectation(REFUSED, reason, text, oracle)


def raises(text):
    """An error where torch raises one too."""
    return Expectation(RAISES, "", text)


def warned(text, reason):
    """Not torch's values, and a warning says so."""
    return Expectation(WARNED, reason, text)


def absent(reason):
    """The house has no such member."""
    return Expectation(ABSENT, reason)


ONLY_CLASS = absent("a member or an argument of the class only")
