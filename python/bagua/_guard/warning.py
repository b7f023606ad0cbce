"""The warning of a breach: bucket, figure, threshold, what is done, and remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagua._ops.contract.watch import EIGHT_BITS

__all__ = ["breach_text"]

_WHAT = {
    "relative_error": "the relative error of the communicated mean",
    "residual": "the residual of error feedback over the gradient",
    "consensus": "the ranks' distance from the mean of their weights, over its norm,",
}
_REMEDY = {
    "relative_error": "take a codec with more bits or with a range per block "
    '(codec="block_uint8"), error feedback, or gradient_allreduce',
    "residual": "send more (a larger ratio=, rank= or codec=), compress momentum instead of "
    "gradients (QAdamAlgorithm), or take bytegrad",
    "consensus": 'average more often (communication_interval=1) or with all (peers "all"), lower '
    "the learning rate, or take an algorithm that averages gradients",
}


def breach_text(module_name: str, names: Sequence[str], breach: Mapping[str, Any]) -> str:
    """The warning, of a bucket with tensors ``names``.

    ``breach``: as in ``bagua_stats()["guard"]["breaches"]``.
    """
    figure = breach["figure"]
    tensors = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return (
        f"module '{module_name}', bucket '{breach['bucket']}' ({tensors}): {_WHAT[figure]} is "
        f"{breach['value']:.3g} before round {breach['round']}, above the threshold of "
        f"{figure}={breach['threshold']:g}. {_done(breach)} What helps: {_REMEDY[figure]}."
    )


def _done(breach: Mapping[str, Any]) -> str:
    rounds, eight_bits = breach["exact_rounds"], breach["eight_bit_rounds"]
    if eight_bits:
        return (
            f"The guard has the bucket averaged in 8 bits ({EIGHT_BITS}) for {eight_bits} rounds, "
            "on all ranks, and exactly if that is not enough."
        )
    if rounds == 0:
        return "It is averaged exactly already."
    exact = "for good" if rounds is None else f"for {rounds} rounds"
    return f"The guard has the bucket averaged exactly {exact}, on all ranks."
