"""The algorithm that the measured links ask for, by the formulae of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Mapping

from bagua._tools.doctor.links import Measured
from bagua._tools.doctor.verdict import Card, Pair, slowest_direction
from bagua._tools.step_cost import Setting, step_seconds

_HIDDEN = 0.5  # share of the compute behind which communication hides
_CODEC = 3e9  # bytes a second that a core encodes
_ENOUGH = 1.1  # times the compute alone, which a step may take
_INTERVALS = (50, 100, 200, 500, 1000, 2000)  # of DiLoCo
_SHARE = 0.1  # of the time, which rounds may take
# Names of the formulae, and calls. From the first on, each changes the training more.
_GRADIENTS = {
    "gradient_allreduce": "GradientAllReduceAlgorithm()",
    "bytegrad, 8 bits": "ByteGradAlgorithm()",
    "bytegrad, 4 bits": 'ByteGradAlgorithm(codec="int4_block", error_feedback=True)',
}


def advice(
    cards: Mapping[int, Card],
    links: Mapping[Pair, Measured],
    parameters: float,
    compute: float,
) -> str:
    """A sentence with the slowest link and the algorithm. At least one link was measured.

    Args:
        parameters: of the model, in float32.
        compute: seconds of a step of one rank alone.
    """
    between = {
        pair: link for pair, link in links.items() if cards[pair[0]].node != cards[pair[1]].node
    }
    chosen = (between or links).values()
    rate, trip = min(map(slowest_direction, chosen)), max(2 * link.latency for link in chosen)
    again = max(link.again for link in chosen)
    ranks = len({card.node for card in cards.values()}) if between else len(cards)
    measured = f"{_number(trip * 1e3)} ms there and back, {_number(rate / 125e3)} Mbit/s" + (
        f", {again:.1%} of the segments sent again" if again >= 0.0005 else ""
    )
    setting = Setting(compute, 4 * parameters, rate, trip / 2, _HIDDEN, _CODEC, _INTERVALS[0])
    return (
        f"{measured}, the slowest of the links {'between nodes' if between else 'of one node'}. "
        f"For a model of {_number(parameters / 1e6)} million parameters, of which a rank alone "
        f"computes a step in {_number(compute)} s, take {_choice(setting, ranks)}"
    )


def _choice(setting: Setting, ranks: int) -> str:
    exact = step_seconds("gradient_allreduce", setting, ranks)
    for name, call in _GRADIENTS.items():
        seconds = step_seconds(name, setting, ranks)
        if seconds <= _ENOUGH * setting.compute:
            others = "" if seconds == exact else f", {_number(exact)} s with exact gradients"
            return f"{call}: a step takes {_number(seconds)} s{others}"
    for interval in _INTERVALS:
        seconds = step_seconds("diloco, 4 bits", setting._replace(interval=interval), ranks)
        share = 1 - setting.compute / seconds
        if share <= _SHARE:
            break
    four_bits = step_seconds("bytegrad, 4 bits", setting, ranks)
    return (
        f'DiLoCoAlgorithm(interval={interval}, codec="int4_block"): a round every {interval} steps '
        f"takes {share:.0%} of the time. With gradients a step takes {_number(exact)} s, in 4 bits "
        f"{_number(four_bits)} s"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
