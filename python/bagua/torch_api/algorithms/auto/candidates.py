"""The candidates of ``AutoAlgorithm``: which there are, and what each loses of a gradient."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bagua import _C
from bagua._foresight.candidate import Candidate
from bagua.torch_api.algorithms.base import Algorithm

__all__ = ["Loss", "algorithm_of", "as_candidates", "default_candidates", "exact", "loss_of"]

_SUPPORTED = ("gradient_allreduce", "bytegrad", "power_sgd", "sparse")
_DEFAULT_CODEC = "block_uint8"


@dataclass(frozen=True)
class Loss:
    """The way in which an algorithm loses a part of a gradient.

    Attributes:
        key: name of the measured error; empty: nothing is lost.
        feedback: whether a residual sends it with later gradients.
    """

    key: str
    feedback: bool = False


def loss_of(candidate: Candidate) -> Loss:
    """The loss of a candidate, by its name and arguments."""
    arguments = candidate.arguments
    feedback = arguments.get("error_feedback")
    if candidate.algorithm == "bytegrad":
        return Loss(arguments.get("codec", _DEFAULT_CODEC), bool(feedback))
    if candidate.algorithm == "power_sgd":
        return Loss(f"rank {arguments.get('rank', 1)}", feedback is not False)
    if candidate.algorithm == "sparse":
        kind = "random" if arguments.get("random_sparse") else "largest"
        return Loss(f"{kind} {arguments.get('ratio', 0.01)}", feedback is not False)
    return Loss("")


def lanes_of_the_environment() -> int:
    """Communication threads of every engine (``BAGUA_LANES``), which no candidate changes."""
    return int(os.environ.get("BAGUA_LANES", "1"))


def exact(hierarchical: bool | str = False) -> Candidate:
    """Exact gradients."""
    arguments = {"hierarchical": hierarchical} if hierarchical else {}
    return Candidate("gradient_allreduce", arguments, lanes=lanes_of_the_environment())


#: Why low-rank and sparse gradients are taken only where users name them: gradients of the first
#: steps are of lower rank than later ones, so that their measured error promises too much.
NOT_BY_DEFAULT = "can end worse, with AdamW above all: name it in candidates= to allow it"


def default_candidates(nodes: Sequence[int]) -> tuple[list[Candidate], dict[Candidate, str]]:
    """The candidates where users name none, and those of them that are not taken, with the reason.

    Args:
        nodes: the number of ranks of each node.
    """
    several = len(nodes) > 1 and max(nodes) > 1
    forms: list[bool | str] = [False, True, "sharded"] if several else [False]
    eight = {"codec": _DEFAULT_CODEC}
    four = {"codec": "int4_block", "error_feedback": True}
    found = [exact(form) for form in forms]
    found += [Candidate("bytegrad", {"hierarchical": form, **eight}) for form in forms]
    found += [
        Candidate("bytegrad", {"hierarchical": form, **four}) for form in forms if form != "sharded"
    ]
    shown = [Candidate("power_sgd", {"rank": 4}), Candidate("sparse", {"ratio": 0.01})]
    lanes = lanes_of_the_environment()
    found = [replace(candidate, lanes=lanes) for candidate in [*found, *shown]]
    return found, dict.fromkeys(found[-len(shown) :], NOT_BY_DEFAULT)


def as_candidates(given: Sequence[str | Candidate]) -> list[Candidate]:
    """Candidates as users give them: objects, or names with default arguments.

    Raises:
        TypeError: an element is neither.
        ValueError: none, one twice, an algorithm that is not chosen from, or arguments that it
            refuses.
    """
    lanes = lanes_of_the_environment()
    found: list[Candidate] = []
    for one in given:
        if isinstance(one, str):
            arguments = {"hierarchical": False} if one == "bytegrad" else {}
            one = Candidate(one, arguments)
        if not isinstance(one, Candidate):
            raise TypeError(
                f"AutoAlgorithm: candidates are names or Candidate(name, arguments), not {one!r}"
            )
        if one.algorithm not in _SUPPORTED:
            raise ValueError(
                f"AutoAlgorithm: '{one.algorithm}' is not chosen by measuring: it changes more "
                f"than the gradients' way. Candidates are {', '.join(_SUPPORTED)}."
            )
        one = replace(one, lanes=lanes)
        if one in found:
            raise ValueError(f"AutoAlgorithm: candidate {one.label()} is given twice")
        algorithm_of(one)
        found.append(one)
    if not found:
        raise ValueError("AutoAlgorithm: candidates=[] leaves nothing to choose; pass None for all")
    return found


def algorithm_of(candidate: Candidate) -> Algorithm:
    """The algorithm with the candidate's arguments.

    Raises:
        ValueError: it does not take them.
    """
    try:
        return Algorithm.init(candidate.algorithm, **candidate.arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"AutoAlgorithm: candidate {candidate.label()}: {error}") from error


def codecs_of(candidates: Sequence[Candidate]) -> list[str]:
    """Names of the codecs that the candidates use, each once."""
    known = _C.codec_names()
    keys = dict.fromkeys(loss_of(candidate).key for candidate in candidates)
    keys |= dict.fromkeys(str(c.arguments["codec"]) for c in candidates if c.arguments.get("codec"))
    return [key for key in keys if key in known]
