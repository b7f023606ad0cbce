"""``bagua plan``: seconds per step of a model over a link, by the formulae of docs/scaling.md."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from bagua._tools.step_cost import (
    ALGORITHMS,
    MOST_SHARE,
    ROUNDS,
    Setting,
    choice,
    fitting_interval,
    share_of_rounds,
    step_seconds,
)

SUMMARY = "predict the seconds of a step of your model over your link"
DESCRIPTION = """\
Predicts a step with exact, 8-bit and 4-bit gradients and with rounds of DiLoCo,
and names the line of code of each and the one to take. Nothing is measured:

  python -m bagua plan --parameters 124M --compute-seconds 4 --ranks 2 \\
      --rate-mbit 200 --rtt-ms 80

The last line of `bagua doctor` is this command with the slowest link that it has
measured.

exit code: 0, or 2 for wrong use
"""

#: Least and most of what steps of the README's tables took, relative to the prediction.
MEASURED = (0.6, 1.9)

_EXACT, _FOUR_BITS = "gradient_allreduce", "bytegrad, 4 bits"
_LOW_RANK = "power_sgd, rank 4"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_COLUMNS = 80
_DEFAULT_INTERVAL = 100  # of DiLoCoAlgorithm
_LINES = {
    _EXACT: ("exact gradients", '"gradient_allreduce"'),
    "bytegrad, 8 bits": ("gradients in 8 bits", '"bytegrad"'),
    _FOUR_BITS: (
        "gradients in 4 bits, error feedback",
        'ByteGradAlgorithm(codec="int4_block", error_feedback=True)',
    ),
    _LOW_RANK: ("PowerSGD, rank 4: with SGD, not with Adam", "PowerSGDAlgorithm()"),
    ROUNDS: ("DiLoCo in 4 bits, a round in {} steps", "bagua.algorithms.DiLoCoAlgorithm({})"),
}
_IMPORTS = """\
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import ByteGradAlgorithm, PowerSGDAlgorithm
"""
_LEFT_OUT = (
    "Left out: packets that get lost, the time in which TCP finds the rate again, stragglers, "
    "other jobs, cores that ranks share, memory, and the loss that an algorithm costs, of which "
    "docs/which-algorithm.md has measurements. Assumed: communication hides behind half of the "
    "computation, a core encodes 3 GB/s, PowerSGD sends 1 % of the bytes, which depends on the "
    f"shapes. Measured steps of README.md took {MEASURED[0]:g} to {MEASURED[1]:g} times as long "
    "as predicted from the nominal rate."
)


class Line(NamedTuple):
    """One way to train.

    Attributes:
        name: of the formula.
        what: in words.
        code: the call, as README.md has it.
        seconds: of a step.
        bytes: that a rank sends per step.
    """

    name: str
    what: str
    code: str
    seconds: float
    bytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measured = "; the last line of `bagua doctor` has it"
    for name, unit, kind, meaning in (
        ("--parameters", "N", _parameters, "that are trained: 124M, 7B, 124000000"),
        ("--compute-seconds", "S", _within(1e-6, 1e9), "of a step of one rank, without bagua.wrap"),
        ("--rate-mbit", "R", _within(1e-3, 1e9), f"Mbit/s of data on a rank's link{measured}"),
        ("--rtt-ms", "MS", _within(0, 1e6), f"milliseconds there and back{measured}"),
    ):
        parser.add_argument(name, type=kind, metavar=unit, help=meaning)
    parser.add_argument("--dtype", choices=_BYTES, default="float32", help="of gradients (float32)")
    parser.add_argument(
        "--ranks",
        type=_ranks,
        default=2,
        metavar="P",
        help="that use such a link: one per node, if nodes have several (2)",
    )


def main(arguments: argparse.Namespace) -> int:
    names = ("parameters", "compute_seconds", "rate_mbit", "rtt_ms")
    missing = [f"--{n.replace('_', '-')}" for n in names if getattr(arguments, n) is None]
    if missing:
        sys.stderr.write(
            f"bagua plan: {', '.join(missing)} missing. `torchrun --nproc-per-node 2 -m bagua "
            "doctor --millions N --compute S`, started as your training is, measures the link and "
            "prints the whole command\n"
        )
        return 2
    setting = Setting(
        compute=arguments.compute_seconds,
        bytes=4 * arguments.parameters,
        rate=arguments.rate_mbit * 125e3,
        latency=arguments.rtt_ms / 2e3,
        exact=_BYTES[arguments.dtype] / 4,
    )
    sys.stdout.write(page(setting, arguments.ranks, arguments.dtype))
    return 0


def command(setting: Setting, ranks: int) -> str:
    """The command line for gradients in float32, in lines of at most 80 columns."""
    return (
        f"python -m bagua plan --parameters {setting.bytes / 4e6:.6g}M "
        f"--compute-seconds {setting.compute:.4g} \\\n    --ranks {ranks} "
        f"--rate-mbit {setting.rate / 125e3:.4g} --rtt-ms {setting.latency * 2e3:.4g}"
    )


def lines(setting: Setting, ranks: int) -> list[Line]:
    """Gradients from the most exact ones on, then DiLoCo at the interval that fits.

    PowerSGD is among them if its steps take less than those of 4 bits.
    """
    interval = fitting_interval(setting, ranks)
    given = 'codec="int4_block"'
    if interval != _DEFAULT_INTERVAL:
        given = f"interval={interval}, {given}"
    found, own = [], setting._replace(interval=interval)
    for name, (what, algorithm) in _LINES.items():
        sent = ALGORITHMS[name](own, ranks).bytes
        code = f"bagua.wrap(model, [optimizer], {algorithm.format(given)})"
        seconds = step_seconds(name, own, ranks)
        found.append(Line(name, what.format(interval), code, seconds, sent))
    four_bits = next(line.seconds for line in found if line.name == _FOUR_BITS)
    return [line for line in found if line.name != _LOW_RANK or line.seconds < four_bits]


def page(setting: Setting, ranks: int, dtype: str) -> str:
    """The text that ``bagua plan`` prints; only lines of code have more than 80 columns."""
    found = lines(setting, ranks)
    given = (
        f"{setting.bytes / 4e6:,.4g} million parameters in {dtype}, of which a rank alone computes "
        f"a step in {setting.compute:.3g} s. {ranks} ranks, {setting.rate / 125e3:,.4g} Mbit/s, "
        f"{setting.latency * 2e3:.3g} ms there and back. Predicted, per rank:"
    )
    parts = [textwrap.fill(given, _COLUMNS), "", f"{'s/step':>10}  {'speed':>7}  {'MB/step':>9}"]
    for line in found:
        speed, sent = f"{found[0].seconds / line.seconds:.3g}x", f"{line.bytes / 1e6:.4g}"
        parts += [
            f"{line.seconds:>10.4g}  {speed:>7}  {sent:>9}  {line.what}",
            f"{'':>12}{line.code}",
        ]
    taken = next(line for line in found if line.name == choice(setting, ranks))
    parts += ["", _IMPORTS, textwrap.fill(_reason(setting, ranks, taken), _COLUMNS), ""]
    return "\n".join([*parts, textwrap.fill(_LEFT_OUT, _COLUMNS)]) + "\n"


def _reason(setting: Setting, ranks: int, taken: Line) -> str:
    if taken.name != ROUNDS:
        why = "the most exact of these whose step takes at most 1.1 times the computation"
        return f"Take {taken.what}: {why}."
    share = share_of_rounds(setting._replace(interval=fitting_interval(setting, ranks)), ranks)
    longest = "" if share <= MOST_SHARE else ", also with the longest interval that is tried"
    return (
        f"Take {taken.what}, for thousands of steps: with gradients steps wait for the network, "
        f"also in 4 bits. Rounds take {share:.0%} of the time{longest}."
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def _within(least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = _number(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} must be between {least:g} and {most:g}")
        return value

    return number


def _parameters(text: str) -> float:
    unit = _UNITS.get(text[-1:].upper())
    try:
        value = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e15:
        raise argparse.ArgumentTypeError(
            f"'{text}' must be a number of parameters up to 1e15, such as 124M, 7B or 124000000"
        )
    return value


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 65536:
        raise argparse.ArgumentTypeError(
            f"'{text}' must be a whole number from 2 to 65536: a rank alone sends nothing"
        )
    return int(text)
