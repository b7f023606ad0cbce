"""The arguments of ``bagua simulate``, its predictions and its tables."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bagua._foresight import profile_file
from bagua._foresight.candidate import Candidate
from bagua._foresight.cost import predict
from bagua._foresight.prediction import Prediction
from bagua._foresight.profile import Link, Profile
from bagua._tools.simulate.candidates import DEFAULTS, EXACT, candidate_from

__all__ = ["DESCRIPTION", "add_arguments", "main", "tables"]

DESCRIPTION = """\
Predicts the seconds of a training step for other numbers of ranks and other
links, from a profile:

  bagua profile train.py                      # writes profile.json
  bagua simulate --profile profile.json --ranks 8,64,512 --gbps 1,10

Each table has a column for each number of ranks: milliseconds of a step, and
how many times as fast as exact gradients it is. Compression also changes what
a step learns: docs/algorithms.md and docs/curves.md.
"""

_Number = TypeVar("_Number", int, float)
_ROW = "{:<56}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bagua simulate``."""
    parser.add_argument(
        "--profile", type=_profile, required=True, metavar="FILE", help="of bagua profile"
    )
    parser.add_argument(
        "--ranks", type=_list_of(int), metavar="N,N", help="numbers of ranks (the profile's)"
    )
    parser.add_argument(
        "--gbps",
        type=_list_of(float),
        metavar="G,G",
        help="Gbit/s between nodes, each way (the profile's link)",
    )
    parser.add_argument(
        "--latency-ms",
        type=_list_of(float),
        metavar="L,L",
        help="milliseconds from node to node, one way (the profile's)",
    )
    parser.add_argument(
        "--inside-gbps",
        type=_positive(float),
        metavar="G",
        help="Gbit/s between ranks of a node (the profile's)",
    )
    parser.add_argument(
        "--ranks-per-node", type=_positive(int), metavar="N", help="(the profile's largest node)"
    )
    parser.add_argument(
        "--algorithms",
        type=_candidate,
        nargs="+",
        metavar="NAME[:ARGUMENT=VALUE,...]",
        help="as in Algorithm.init, such as bytegrad:codec=int4_block,hierarchical=False",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")


def main(arguments: argparse.Namespace) -> int:
    """Print the predictions; returns the exit code."""
    profile: Profile = arguments.profile
    if arguments.ranks_per_node is not None:
        size = arguments.ranks_per_node
        full, rest = divmod(max(profile.ranks, size), size)
        nodes = (size,) * full + ((rest,) if rest else ())
        profile = replace(profile, ranks=sum(nodes), nodes=nodes)
    ranks = arguments.ranks or [arguments.profile.ranks]
    candidates = arguments.algorithms or list(DEFAULTS)
    inside = profile.inside
    if arguments.inside_gbps is not None:
        known = inside or profile.between
        inside = replace(known, bandwidth=arguments.inside_gbps * 1e9 / 8, messages=None)
    results = [
        {"link": link, "inside": inside, "rows": _rows(profile, candidates, ranks, link, inside)}
        for link in _links(profile.between, arguments.gbps, arguments.latency_ms)
    ]
    if arguments.json:
        text = json.dumps([_values(result) for result in results], indent=2) + "\n"
    else:
        text = tables(results, ranks)
    sys.stdout.write(text)
    return 0


def tables(results: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str:
    """A table for each link: milliseconds, and the speed over that of exact gradients."""
    parts = []
    for result in results:
        link: Link = result["link"]
        lines = [
            f"{link.bandwidth * 8 / 1e9:g} Gbit/s, {link.latency * 1e3:g} ms between nodes",
            _ROW.format("") + "".join(f"{f'{number} ranks':>19}" for number in ranks),
        ]
        for candidate, predictions, exact in result["rows"]:
            cells = [
                f"{_milliseconds(found.step):>12} {f'{one.step / found.step:.2f}x':>6}"
                for found, one in zip(predictions, exact, strict=True)
            ]
            lines.append(_ROW.format(candidate.label()) + "".join(cells))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _rows(
    profile: Profile,
    candidates: Sequence[Candidate],
    ranks: Sequence[int],
    between: Link,
    inside: Link | None,
) -> list[tuple[Candidate, list[Prediction], list[Prediction]]]:
    def predictions(candidate: Candidate) -> list[Prediction]:
        return [
            predict(profile, candidate, ranks=number, between=between, inside=inside)
            for number in ranks
        ]

    exact = predictions(EXACT)
    return [(candidate, predictions(candidate), exact) for candidate in candidates]


def _links(
    known: Link, gbps: Sequence[float] | None, milliseconds: Sequence[float] | None
) -> list[Link]:
    """The profile's link, or links of other speeds, whose use of a core stays per byte."""
    links = [known]
    if gbps is not None:
        links = [replace(known, bandwidth=speed * 1e9 / 8, messages=None) for speed in gbps]
    if milliseconds is None:
        return links
    return [replace(link, latency=one / 1e3) for link in links for one in milliseconds]


def _values(result: dict[str, Any]) -> dict[str, Any]:
    link: Link = result["link"]
    return {
        "gbps": link.bandwidth * 8 / 1e9,
        "latency_ms": link.latency * 1e3,
        "algorithms": [
            {
                "algorithm": candidate.algorithm,
                "arguments": dict(candidate.arguments),
                "steps": [
                    {
                        "step_seconds": found.step,
                        "exposed_seconds": found.exposed,
                        "bytes_sent": found.bytes_sent,
                        "speed_over_exact": one.step / found.step,
                    }
                    for found, one in zip(predictions, exact, strict=True)
                ],
            }
            for candidate, predictions, exact in result["rows"]
        ],
    }


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{max(0, min(3, 2 - int(math.log10(seconds * 1e3))))}f} ms"


def _profile(path: str) -> Profile:
    try:
        return profile_file.read_profile(Path(path))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _candidate(word: str) -> Candidate:
    try:
        return candidate_from(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(kind: type[_Number]) -> Callable[[str], _Number]:
    def read(text: str) -> _Number:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"'{text}' is no positive number")
        return value

    return read


def _list_of(kind: type[_Number]) -> Callable[[str], list[_Number]]:
    read = _positive(kind)
    return lambda text: [read(word) for word in text.split(",")]
