"""The warning of a breach: bucket, figure, threshold and remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    figure, rounds = breach["figure"], breach["exact_rounds"]
    tensors = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    exact = "for good" if rounds is None else f"for {rounds} rounds"
    done = f"The guard has the bucket averaged exactly {exact}, on all ranks."
    if rounds == 0:
        done = "It is averaged exactly already."
    return (
        f"module '{module_name}', bucket '{breach['bucket']}' ({tensors}): {_WHAT[figure]} is "
        f"{breach['value']:.3g} before round {breach['round']}, above the threshold of "
        f"{figure}={breach['threshold']:g}. {done} What helps: {_REMEDY[figure]}."
    )
