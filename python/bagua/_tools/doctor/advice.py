"""The algorithm that the measured links ask for, by the formulae of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Mapping

from bagua._core.group.environment import congestion_controls
from bagua._tools.doctor.links import Measured
from bagua._tools.doctor.verdict import Card, Pair, slowest_direction
from bagua._tools.plan import command
from bagua._tools.step_cost import (
    FAR,
    ROUNDS,
    Setting,
    choice,
    fitting_interval,
    share_of_rounds,
    step_seconds,
)

#: Share of the segments from which on it is told.
_MUCH_AGAIN = 0.0005

_CALLS = {
    "gradient_allreduce": "GradientAllReduceAlgorithm()",
    "bytegrad, 8 bits": "ByteGradAlgorithm()",
    "bytegrad, 4 bits": 'ByteGradAlgorithm(codec="int4_block", error_feedback=True)',
}


def advice(
    cards: Mapping[int, Card],
    links: Mapping[Pair, Measured],
    parameters: float,
    compute: float,
) -> tuple[str, str]:
    """A sentence with the slowest link and the algorithm, and the command that says more of it.

    Args:
        links: at least one.
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
    measured = f"{_number(trip * 1e3)} ms there and back, {_number(rate / 125e3)} Mbit/s"
    if again >= _MUCH_AGAIN:
        measured += f", {again:.1%} of the segments sent again"
        if trip >= 2 * FAR and "bbr" not in (known := congestion_controls()):
            control = known[0] if known else "TCP's control of congestion"
            measured += f", which slow {control} down, but not BBR (modprobe tcp_bbr, everywhere)"
    setting = Setting(compute, 4 * parameters, rate, trip / 2)
    sentence = (
        f"{measured}, the slowest of the links {'between nodes' if between else 'of one node'}. "
        f"For a model of {_number(parameters / 1e6)} million parameters, of which a rank alone "
        f"computes a step in {_number(compute)} s, take {_choice(setting, ranks)}"
    )
    return sentence, command(setting, ranks)


def _choice(setting: Setting, ranks: int) -> str:
    exact = step_seconds("gradient_allreduce", setting, ranks)
    name = choice(setting, ranks)
    if name != ROUNDS:
        seconds = step_seconds(name, setting, ranks)
        others = "" if seconds == exact else f", {_number(exact)} s with exact gradients"
        return f"{_CALLS[name]}: a step takes {_number(seconds)} s{others}"
    interval = fitting_interval(setting, ranks)
    share = share_of_rounds(setting._replace(interval=interval), ranks)
    four_bits = step_seconds("bytegrad, 4 bits", setting, ranks)
    return (
        f'DiLoCoAlgorithm(interval={interval}, codec="int4_block"): a round every {interval} steps '
        f"takes {share:.0%} of the time. With gradients a step takes {_number(exact)} s, in 4 bits "
        f"{_number(four_bits)} s"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
