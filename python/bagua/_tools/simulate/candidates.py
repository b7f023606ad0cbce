"""Algorithms as words of a command line."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence

from bagua._foresight.candidate import Candidate
from bagua._foresight.cost import KNOWN
from bagua.torch_api.algorithms import GlobalAlgorithmRegistry

__all__ = ["DEFAULTS", "EXACT", "candidate_from"]

#: What the others are compared with.
EXACT = Candidate("gradient_allreduce")

#: Of each algorithm its usual form, and the strongest one that a user would try first.
DEFAULTS: Sequence[Candidate] = (
    EXACT,
    Candidate("bytegrad"),
    Candidate("bytegrad", {"codec": "int4_block", "error_feedback": True}),
    Candidate("power_sgd", {"rank": 4}),
    Candidate("sparse", {"ratio": 0.01}),
    Candidate("decentralized", {"peer_selection_mode": "shift_one"}),
    Candidate("low_precision_decentralized"),
    Candidate("async"),
    Candidate("diloco", {"interval": 50}),
    Candidate("diloco", {"interval": 50, "codec": "int4_block"}),
    Candidate("sparse_loco", {"interval": 50}),
)


def candidate_from(word: str) -> Candidate:
    """The candidate of ``name`` or ``name:argument=value,argument=value``.

    Raises:
        ValueError: an unknown algorithm or argument, or no such form; names it.
    """
    name, _, rest = word.partition(":")
    if name not in KNOWN:
        raise ValueError(f"unknown algorithm '{name}'; known: {', '.join(sorted(KNOWN))}")
    known = inspect.signature(GlobalAlgorithmRegistry.get(name)).parameters
    arguments = {}
    for pair in filter(None, rest.split(",")):
        key, equals, text = pair.partition("=")
        if not equals or key not in known:
            raise ValueError(
                f"'{pair}' is no argument=value of {name}; its arguments: {', '.join(known)}"
            )
        try:
            arguments[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            arguments[key] = text
    return Candidate(name, arguments)
