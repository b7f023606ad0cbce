"""The page that the doctor prints."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from bagua._tools.doctor.cards import Card
from bagua._tools.doctor.links import Measured
from bagua._tools.doctor.sums import ELEMENTS
from bagua._tools.doctor.verdict import Finding, Pair, slowest_direction
from bagua._tools.report import printable

__all__ = ["page"]

_COLUMNS = 80
_MOST_FINDINGS = 30


def page(
    cards: Mapping[int, Card],
    links: Mapping[Pair, Measured | str],
    sums: Mapping[int, Any],
    findings: Sequence[Finding],
    most_links: int,
) -> str:
    """The report on a cluster, in lines of at most 80 columns.

    ``links``: by pair, the measurement or the word for why there is none. ``most_links``: how many
    lines of links there are at most; the slowest are shown.
    """
    parts = [_ranks(cards, links), _versions(cards), _links(links, most_links), _sums(sums)]
    return "\n".join([*(part for part in parts if part), _verdict(findings)])


def _ranks(cards: Mapping[int, Card], links: Mapping[Pair, Measured | str]) -> str:
    nodes = len({card.node for card in cards.values()})
    lines = [f"{len(cards)} rank(s) on {nodes} node(s)", ""]
    places = {rank: f"{card.address or 'none'} {card.interface}" for rank, card in cards.items()}
    width = max(map(len, ["address", *places.values()]))
    lines.append(f"{'rank':>4}  {'node':>4}  {'host':<20}  {'address':<{width}}  {'clock':>9}")
    for rank, card in cards.items():
        link = links.get((0, rank))
        clock = "-" if rank and not isinstance(link, Measured) else "reference"
        if isinstance(link, Measured):
            far = abs(link.ahead) >= 10
            clock = f"{link.ahead:+.0f} s" if far else f"{link.ahead * 1e3:+.1f} ms"
        host = f"{card.host[:20]:<20}"
        lines.append(f"{rank:>4}  {card.node:>4}  {host}  {places[rank]:<{width}}  {clock:>9}")
    return "\n".join(lines) + "\n"


def _versions(cards: Mapping[int, Card]) -> str:
    first = next(iter(cards.values()), None)
    if first is None:
        return ""
    text = (
        f"rank 0 has bagua {first.bagua} (built for torch {first.built_for}), torch {first.torch}, "
        f"Python {first.python}, CPU loops {first.loops}, CUDA kernels {first.kernels}, device "
        f"{first.device}"
    )
    return _wrapped(text, "") + "\n"


def _links(links: Mapping[Pair, Measured | str], most: int) -> str:
    if not links:
        return ""

    def speed(link: Measured | str) -> float:
        return slowest_direction(link) if isinstance(link, Measured) else 0.0

    shown = sorted(links, key=lambda pair: speed(links[pair]))[:most]
    lines = [
        f"{'ranks':>11}  {'latency':>10}  {'MB/s there':>10}  {'MB/s back':>10}  "
        f"{'Mbit/s there':>12}  {'Mbit/s back':>12}"
    ]
    for pair in sorted(shown):
        link, name = links[pair], f"{pair[0]:>4} - {pair[1]:>4}"
        if isinstance(link, Measured):
            there, back = link.sent / 1e6, link.received / 1e6
            lines.append(
                f"{name}  {link.latency * 1e3:>7.3f} ms  {there:>10.1f}  {back:>10.1f}  "
                f"{8 * there:>12.0f}  {8 * back:>12.0f}"
            )
        else:
            lines.append(f"{name}  {link}")
    if len(shown) < len(links):
        lines.append(f"the slowest {len(shown)} of {len(links)} links; --all shows all")
    return "\n".join(lines) + "\n"


def _sums(sums: Mapping[int, Any]) -> str:
    results = [result for result in sums.values() if isinstance(result, dict)]
    if not results:
        return ""
    lines = [f"all-reduce of {ELEMENTS * 4 / 1e6:.1f} MB, against the mean that torch computes"]
    for name in results[0]:
        error = max(result[name]["error"] for result in results)
        seconds = max(result[name]["seconds"] for result in results)
        lines.append(f"  {name:<6} relative error {error:.1e}, {seconds * 1e3:.1f} ms")
    return "\n".join(lines) + "\n"


def _verdict(findings: Sequence[Finding]) -> str:
    broken = [finding.text for finding in findings if finding.broken]
    remarks = [finding.text for finding in findings if not finding.broken]
    lines = [_wrapped(text, "BROKEN: ") for text in broken[:_MOST_FINDINGS]]
    if len(broken) > _MOST_FINDINGS:
        lines.append(f"and {len(broken) - _MOST_FINDINGS} more")
    lines += [_wrapped(text, "note: ") for text in remarks[:_MOST_FINDINGS]]
    if not broken:
        lines.append("No fault found.")
    return "\n".join(lines) + "\n"


def _wrapped(text: str, start: str) -> str:
    return textwrap.fill(
        start + printable(text), _COLUMNS, subsequent_indent="  ", break_on_hyphens=False
    )
