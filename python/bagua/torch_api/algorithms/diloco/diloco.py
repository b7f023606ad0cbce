"""DiLoCo: an outer optimizer on the mean of what the ranks have learnt by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._sync.outer.outer_loop import Schedule
from bagua._sync.outer.outer_sgd import GrowingMomentum, OuterSGD
from bagua.torch_api._residuals.means import is_wide, warn_of_useless_residuals
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.algorithms.diloco.fragments import (
    Fragments,
    check_fragments,
    fragments_described,
    number_of,
)
from bagua.torch_api.algorithms.diloco.implementation import DiLoCoAlgorithmImpl

__all__ = ["DiLoCoAlgorithm", "DiLoCoAlgorithmImpl", "Elastic"]


@dataclass(frozen=True)
class Elastic:
    """Training goes on without ranks that are lost after the warm-up.

    A round that fails changes nothing; in the next training forward the others agree through the
    job's store on who is left. After ``init_process_group(elastic=True)`` a rank that is started
    again comes back in ``with_bagua``.

    Args:
        min_ranks: all ranks raise when fewer are left.

    Raises:
        ValueError: ``min_ranks`` is not positive.
    """

    min_ranks: int = 2

    def __post_init__(self) -> None:
        if self.min_ranks < 1:
            raise ValueError(f"Elastic: min_ranks={self.min_ranks} must be at least 1")


class DiLoCoAlgorithm(Algorithm):
    """Ranks train by themselves; every ``interval`` optimizer steps an outer step joins them.

    All ranks hold an anchor of the weights, in float32, and its momentum. In a round each sends its
    pseudo-gradient, the anchor minus its weights; the outer optimizer steps on the anchor with the
    ranks' mean, and the weights become the anchor (DiLoCo, Douillard et al. 2023). Nothing is
    sent between rounds. The moments of the optimizers given to ``with_bagua`` stay on their rank.

    Steps are counted when the last of those optimizers has stepped, or a ``GradScaler`` has skipped
    its step. So gradient accumulation needs no ``no_sync()``. All ranks make equally many steps.

    Args:
        outer_optimizer: ``OuterSGD(lr=1.0, momentum=0.0)`` is local SGD; ``nesterov=False`` is
            SlowMo. None: begins as local SGD and raises momentum to (0.7, 0.8) as far as rounds
            keep a direction.
        interval: steps from one round to the next.
        fragments: parts of the model that are averaged one after the other, at equal distances in
            the interval: a number, which deals out the layers of the longest ``ModuleList`` or
            ``Sequential`` in turn, what is outside of it to the last; lists of names of
            modules; or a function from a parameter's name to its fragment's number.
        overlap_steps: steps from the launch of a fragment's average to the use of its result, below
            the steps from one fragment to the next; 0: it is waited for. Weights keep what they
            learn meanwhile.
        codec: for the pseudo-gradients, a name of ``bagua._C.codec_names()``; None: float32.
        error_feedback: each rank adds to its pseudo-gradients what the codec has taken from those
            of the last round, and likewise to the mean of its part of a bucket. Takes 8 bytes per
            parameter, and 8 / ranks. None: with codecs of less than 16 bits.
        hierarchical: exact inside a node, ``codec`` between the nodes' leaders.
        weight: of a rank in the mean: ``"ranks"``, all alike; or ``"samples"``, the square of those
            that it has trained on since the last round, which the training loop counts by
            ``model.bagua_algorithm.count_samples(n)``.
        warmup_steps: iterations with exact all-reduce of gradients before the first local step.
        elastic: training goes on without lost ranks, see :class:`Elastic`; True: ``Elastic()``.
            False: a lost rank is an error.

    Raises:
        TypeError: ``outer_optimizer`` is no :class:`OuterSGD`, ``elastic`` no :class:`Elastic`.
        ValueError: unknown codec, or an argument out of its range; from ``with_bagua``: no
            optimizer, or fragments that do not fit the module.
    """

    def __init__(
        self,
        outer_optimizer: OuterSGD | None = None,
        interval: int = 100,
        *,
        fragments: Fragments = 1,
        overlap_steps: int = 0,
        codec: str | None = None,
        error_feedback: bool | None = None,
        hierarchical: bool = False,
        weight: Literal["ranks", "samples"] = "ranks",
        warmup_steps: int = 0,
        elastic: Elastic | bool = False,
    ) -> None:
        if outer_optimizer is not None and not isinstance(outer_optimizer, OuterSGD):
            raise TypeError(
                f"DiLoCoAlgorithm: outer_optimizer is an OuterSGD, such as OuterSGD(lr=0.7), not "
                f"{outer_optimizer!r}"
            )
        if interval < 1:
            raise ValueError(f"interval={interval} must be at least 1 optimizer step")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must be 0 or more iterations")
        if overlap_steps < 0:
            raise ValueError(f"overlap_steps={overlap_steps} must be 0 or more")
        if weight not in ("ranks", "samples"):
            raise ValueError(f'weight={weight!r} must be "ranks" or "samples"')
        check_fragments(fragments)
        if (number := number_of(fragments)) is not None:
            Schedule(interval, number, overlap_steps)
        self.outer_optimizer = GrowingMomentum() if outer_optimizer is None else outer_optimizer
        self.interval = interval
        self.fragments = fragments
        self.overlap_steps = overlap_steps
        self.codec = codec
        self.error_feedback = _feedback_of(codec, error_feedback)
        self.hierarchical = hierarchical
        self.weight = weight
        self.warmup_steps = warmup_steps
        self.elastic = _elastic_of(elastic)

    def describe(self) -> str:
        fragments = fragments_described(self.fragments)
        shown = f"fragments={fragments} {self.elastic} {self.outer_optimizer}"
        return f"{super().describe()} {shown}"

    def reify(self, process_group: BaguaProcessGroup) -> DiLoCoAlgorithmImpl:
        return DiLoCoAlgorithmImpl(process_group, self)


def _feedback_of(codec: str | None, error_feedback: bool | None) -> bool:
    """Whether residuals are kept. Raises ValueError for an unknown codec."""
    if codec is not None:
        _C.make_codec(codec)
    if error_feedback is None:
        error_feedback = codec is not None and not is_wide(codec)
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback={error_feedback!r} must be True, False or None")
    warn_of_useless_residuals("DiLoCoAlgorithm", codec, error_feedback)
    return error_feedback and codec is not None


def _elastic_of(elastic: Elastic | bool) -> Elastic | None:
    if isinstance(elastic, bool):
        return Elastic() if elastic else None
    if not isinstance(elastic, Elastic):
        raise TypeError(
            f"DiLoCoAlgorithm: elastic is True, False or Elastic(min_ranks=2), not {elastic!r}"
        )
    return elastic
