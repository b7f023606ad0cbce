"""A row of the table of situations, and what may be expected of each house in it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ranks.situations.houses import OURS

SAME, BETTER, REFUSED, RAISES, WARNED = "same", "better", "refused", "raises", "warned"


@dataclass(frozen=True)
class Expectation:
    """Behaviour of an implementation in a situation.

    kind:
    - `same`: torch's values; after a warning that matches `text`, if there is one.
    - `better`: torch is wrong, and `oracle(rank, size)` gives the right values.
    - `refused`: an exception whose text matches `text`, on every rank; with an oracle if torch is
      wrong.
    - `raises`: as torch does, with another text that matches.
    - `warned`: values may differ from torch's; a warning matches `text`.

    reason: for the table of the documentation.
    """

    kind: str
    reason: str = ""
    text: str = ""
    oracle: Callable[[int, int], dict] | None = None


@dataclass(frozen=True)
class Row:
    """A situation: `run(wrap, rank, size)` gives a dict of values, by name.

    expected: by house, what is not torch's values. alone: processes of its own, for situations
    that leave their process changed.
    """

    run: Callable[..., dict]
    expected: dict = field(default_factory=dict)
    alone: bool = False

    @property
    def name(self):
        return self.run.__name__

    def of(self, house):
        """The expectation of a house."""
        return self.expected.get(house, Expectation(SAME))


def row(run, *, both=None, klass=None, method=None, alone=False):
    """A row; `both` is expected of the class and of `with_bagua`, or each on its own."""
    owns = zip(OURS, (klass or both, method or both), strict=True)
    return Row(run, {house: own for house, own in owns if own}, alone)


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
