"""DiLoCo: an outer optimizer on the mean of what the ranks have learnt by themselves."""

from __future__ import annotations

import math
from typing import Literal

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._sync.outer.outer_sgd import OuterSGD
from bagua._sync.outer.schedule import Schedule
from bagua._sync.outer.shares import Weight
from bagua.torch_api._residuals.means import is_wide, warn_of_useless_residuals
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.algorithms.diloco.fragments import (
    Fragments,
    check_fragments,
    fragments_described,
    number_of,
)
from bagua.torch_api.algorithms.diloco.implementation import DiLoCoAlgorithmImpl

__all__ = ["DiLoCoAlgorithm", "DiLoCoAlgorithmImpl"]


class DiLoCoAlgorithm(Algorithm):
    """Ranks train by themselves; every ``interval`` optimizer steps an outer step joins them.

    All ranks hold an anchor of the weights, in float32, and its momentum. In a round each sends its
    pseudo-gradient, the anchor minus its weights; the outer optimizer steps on the anchor with the
    ranks' mean, and the weights become the anchor (DiLoCo, Douillard et al. 2023). Nothing is
    sent between rounds. The moments of the optimizers given to ``with_bagua`` stay on their rank.

    Steps are counted when the last of those optimizers has stepped, or a ``GradScaler`` has skipped
    its step. So gradient accumulation needs no ``no_sync()``. All ranks make equally many steps,
    unless there is a ``max_interval``.

    Args:
        outer_optimizer: ``OuterSGD(lr=1.0, momentum=0.0)`` is local SGD; ``nesterov=False`` is
            SlowMo.
        interval: steps from one round to the next.
        fragments: parts of the model that are averaged one after the other, at equal distances in
            the interval: a number, which deals out the layers of the longest ``ModuleList`` or
            ``Sequential`` in turn, what is outside of it to the last; lists of names of
            modules; or a function from a parameter's name to its fragment's number.
        overlap_steps: steps from the launch of a fragment's average to the use of its result, below
            the steps from one fragment to the next; 0: it is waited for.
        merge: weights that meet a late anchor: ``"keep"`` adds what they have learnt since the
            launch to it; a number from 0 to 1 is their share in the mean of both.
        codec: for the pseudo-gradients, a name of ``bagua._C.codec_names()``; None: float32.
        error_feedback: each rank adds to its pseudo-gradients what the codec has taken from those
            of the last round, and likewise to the mean of its part of a bucket. Takes 8 bytes per
            parameter, and 8 / ranks. None: with codecs of less than 16 bits. ``"weights"``: what
            the codec takes stays in the rank's weights, which then are not the anchor after a
            round; for weights of float32 or float64, without ``hierarchical`` and ``elastic``.
        hierarchical: exact inside a node, ``codec`` between the nodes' leaders.
        inner: ``"local"``: each rank trains by itself. ``"node"``: the ranks of a node average
            their gradients exactly in each step, and so train as one; between nodes nothing is
            sent but in rounds, by their leaders (``hierarchical=True``).
        weight: of a rank in the mean: ``"ranks"``, all alike; ``"samples"``, the square of those
            that it has trained on since the last round, which the training loop counts by
            ``model.bagua_algorithm.count_samples(n)``, with ``max_interval`` over its steps; or
            ``"steps"``, those that it has made since.
        max_interval: no rank waits for a slower one: after ``interval`` steps it asks for a round
            and trains on until all have asked, at most so many steps. Training then depends on
            the ranks' speeds. None: ranks wait after ``interval`` steps.
        guard: leave a rank out of a round if the norm of what it has learnt is not finite, or,
            after 120 rounds, more than three standard deviations above the mean of its former
            ones. It starts again from the anchor.
        outer_clip: the mean pseudo-gradient of a fragment is scaled to a norm of at most this.
        warmup_steps: iterations with exact all-reduce of gradients before the first local step.
        average_buffers: floating buffers get the ranks' mean in each round, exactly, others the
            first rank's values; False: they stay each rank's own.
        outer_device: ``"cpu"`` keeps anchor, momentum, residuals and buckets in host memory, and
            sends from there: for weights on a GPU, whose memory then holds nothing more than they
            need. None: on the device of the weights.
        elastic: training goes on without ranks that are lost after the warm-up. A round that fails
            changes nothing; in the next training forward the others agree through the job's store
            on who is left. After ``init_process_group(elastic=True)`` a rank that is started again
            comes back in ``with_bagua``. False: a lost rank is an error.
        min_ranks: with ``elastic`` all ranks raise when fewer are left.

    Raises:
        TypeError: ``outer_optimizer`` is no :class:`OuterSGD`.
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
        merge: Literal["keep"] | float = "keep",
        codec: str | None = None,
        error_feedback: bool | Literal["weights"] | None = None,
        hierarchical: bool = False,
        inner: Literal["local", "node"] = "local",
        weight: Weight = "ranks",
        max_interval: int | None = None,
        guard: bool = False,
        outer_clip: float | None = None,
        warmup_steps: int = 0,
        average_buffers: bool = True,
        outer_device: Literal["cpu"] | None = None,
        elastic: bool = False,
        min_ranks: int = 2,
    ) -> None:
        outer_optimizer = OuterSGD() if outer_optimizer is None else outer_optimizer
        if not isinstance(outer_optimizer, OuterSGD):
            raise TypeError(
                f"DiLoCoAlgorithm: outer_optimizer is an OuterSGD, such as OuterSGD(lr=0.7), not "
                f"{outer_optimizer!r}"
            )
        if interval < 1:
            raise ValueError(f"interval={interval} must be at least 1 optimizer step")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must be 0 or more iterations")
        if outer_clip is not None and not (math.isfinite(outer_clip) and outer_clip > 0):
            raise ValueError(f"outer_clip={outer_clip} must be a positive norm, or None")
        if codec is not None:
            _C.make_codec(codec)
        if error_feedback is None:
            error_feedback = codec is not None and not is_wide(codec)
        if error_feedback not in (True, False, "weights"):
            raise ValueError(f'error_feedback={error_feedback!r} must be True, False or "weights"')
        warn_of_useless_residuals("DiLoCoAlgorithm", codec, bool(error_feedback))
        if weight not in ("ranks", "steps", "samples"):
            raise ValueError(f'weight={weight!r} must be "ranks", "steps" or "samples"')
        if overlap_steps < 0:
            raise ValueError(f"overlap_steps={overlap_steps} must be 0 or more")
        if merge != "keep" and (isinstance(merge, str) or not 0 <= merge <= 1):
            raise ValueError(f'merge={merge!r} must be "keep" or a share from 0 to 1')
        if inner not in ("local", "node"):
            raise ValueError(f'inner={inner!r} must be "local" or "node"')
        if inner == "node" and max_interval is not None:
            raise ValueError(
                'inner="node" takes no max_interval: the ranks of a node make the same steps'
            )
        if inner == "node" and elastic:
            raise ValueError(
                'inner="node" cannot be elastic: a rank that is lost ends its node\'s steps. Take '
                'inner="local", or start again from a checkpoint'
            )
        if outer_device not in (None, "cpu"):
            raise ValueError(
                f'outer_device={outer_device!r} must be "cpu", or None, where the weights are'
            )
        if min_ranks < 1:
            raise ValueError(f"min_ranks={min_ranks} must be at least 1")
        if error_feedback == "weights" and (hierarchical or inner == "node" or elastic):
            raise ValueError(
                'error_feedback="weights" has no form for hierarchical=True, inner="node" or '
                "elastic=True; take error_feedback=True"
            )
        if error_feedback == "weights" and merge != "keep":
            raise ValueError(f'error_feedback="weights" takes merge="keep", not {merge!r}')
        check_fragments(fragments)
        if (number := number_of(fragments)) is not None:
            Schedule(interval, number, overlap_steps, max_interval)
        self.outer_optimizer = outer_optimizer
        self.interval = interval
        self.fragments = fragments
        self.overlap_steps = overlap_steps
        self.merge = merge
        self.codec = codec
        self.error_feedback = False if codec is None else error_feedback
        self.hierarchical = hierarchical or inner == "node"
        self.inner = inner
        self.weight = weight
        self.max_interval = max_interval
        self.guard = guard
        self.outer_clip = outer_clip
        self.warmup_steps = warmup_steps
        self.average_buffers = average_buffers
        self.outer_device = outer_device
        self.elastic = elastic
        self.min_ranks = min_ranks

    def describe(self) -> str:
        fragments = fragments_described(self.fragments)
        weighs = f"weight={self.weight} guard={self.guard}"
        return f"{super().describe()} fragments={fragments} {weighs} {self.outer_optimizer}"

    def reify(self, process_group: BaguaProcessGroup) -> DiLoCoAlgorithmImpl:
        return DiLoCoAlgorithmImpl(process_group, self)
