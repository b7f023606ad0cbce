"""Strategies given to an outer loop: the ranks' weights in the mean, and the loss of a rank.

``elastic.py`` and ``mailbox`` have what elastic training takes, and are imported by it alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops import operations
from bagua._ops.operations import Operation

if TYPE_CHECKING:
    from bagua._outer.loop import Fragment, OuterLoop, OuterState, Schedule
    from bagua.torch_api.bucket import BaguaBucket


@dataclass(frozen=True)
class Elastic:
    """Training goes on without ranks that are lost after the warm-up.

    A round that fails changes nothing; in the next training forward the others agree through the
    job's store on who is left. After ``init_process_group(elastic=True)`` a rank that is started
    again comes back in ``bagua.wrap``; so does an island after ``connect_islands``.

    Args:
        quorum: ranks, or islands, that a round needs: all raise when fewer are left.
        grace: seconds that a round waits for late ranks at most. Once the quorum has come it
            waits twice as long as that took, at least a second, and goes on without the others; a
            late rank's steps count in its next round, divided where they are more than an
            interval's. None: it waits for all that live.
        leave_within: seconds in which a process that gets SIGTERM leaves, see ``bagua.leave``.

    Raises:
        ValueError: ``quorum``, ``grace`` or ``leave_within`` is not positive.

    Example::

        algorithm = DiLoCoAlgorithm(elastic=Elastic(quorum=2))
    """

    quorum: int = 2
    grace: float | None = None
    leave_within: float = 30.0
    mails = False  # rounds are files

    def __post_init__(self) -> None:
        if not 0 < self.leave_within <= 86_400:
            raise ValueError(
                f"{type(self).__name__}: leave_within={self.leave_within} must be positive "
                "seconds, a day at most"
            )
        if self.grace is not None and not self.grace > 0:
            raise ValueError(f"Elastic: grace={self.grace} must be positive seconds")
        if self.quorum < 1:
            raise ValueError(f"Elastic: quorum={self.quorum} must be at least 1")


class FixedRanks:
    """A lost rank is an error. ``ElasticRanks`` goes on without it."""

    failure: _C.BaguaError | None = None  # of a round since the ranks changed last
    change_due = False  # the ranks have to agree anew on who they are
    postponed: int | None = None  # the fragment whose round is made after that
    counted = True  # this rank's part is in the result that was received last
    #: Words for those whose parts of it are not finite, "" of nobody; None: the ranks gather them.
    broken: str | None = None

    def mean(
        self,
        bucket: BaguaBucket,
        codec: str | None,
        hierarchical: bool,
        group: BaguaProcessGroup,
        outcome: _C.RoundOutcome | None,
    ) -> Operation:
        """Average a bucket over the ranks; ``outcome``: of error feedback, if there is any."""
        if codec is None:
            return operations.all_reduce(bucket, hierarchical, group=group)
        return operations.compressed_all_reduce(
            bucket, codec, hierarchical, group=group, outcome=outcome
        )

    def gathered(self, part: int) -> bool:
        """The round of a fragment is due: whether to make it now, with these ranks."""
        return True

    def weights(self, own: RankWeights, schedule: Schedule) -> RankWeights:
        """The ranks' weights in the rounds of a new state: ``own``, which it may wrap."""
        return own

    def resume(self, loop: OuterLoop) -> None:
        """A checkpoint has been loaded, and no step has been made since."""

    def order(self, fragments: Iterable[Fragment]) -> Iterable[Fragment]:
        """The rounds of ``sync()``, which is to make one of each of ``fragments``."""
        return fragments

    def attempt(self, rounds: Callable[[], None], *, due: bool) -> None:
        """Call ``rounds``, which makes some; ``due``: one is launched."""
        rounds()

    def held(self) -> AbstractContextManager[None]:
        """What fails inside between ranks may be raised by :meth:`receive` instead."""
        return nullcontext()

    def confirm(self, engine: _C.Engine) -> None:
        """A round was launched: have ``Engine.wait`` return when all ranks have its result."""

    def receive(self, engine: _C.Engine) -> None:
        """Wait until all ranks have the result of the round under way."""
        engine.wait()

    def complete(self, receive: Callable[[], None]) -> None:
        """Call ``receive`` where no round is made: for a checkpoint, or before another plan."""
        receive()

    def claim(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A plan is about to be built of parameters; the module wrapped before has ended its own.

        ValueError: these ranks cannot meet with such parameters.
        """

    def inherited_state(self) -> OuterState | None:
        """The state that a new plan goes on with; None: it begins."""
        return None

    @property
    def agrees(self) -> bool:
        """Whether :meth:`begin` is a collective call of all ranks."""
        return False

    def begin(self, loop: OuterLoop) -> None:
        """A plan has just been built: agree on what it goes on with."""

    def change(self, loop: OuterLoop, name: str, replace: Callable[[bool], None]) -> None:
        """Agree on the ranks where :attr:`change_due`, and replace the plan."""

    def close(self) -> None:
        """The module is wrapped again or closed."""

    def stats(self) -> dict[str, Any]:
        """More of the statistics of rounds."""
        return {}


class SinceRound:
    """A number by fragment since its last round, and what it was at the launch under way."""

    def __init__(self, fragments: int) -> None:
        self.numbers = torch.zeros(fragments, 2, dtype=torch.float64, device="cpu")

    def add(self, number: float) -> None:
        self.numbers[:, 0] += number

    def launch(self, part: int) -> float:
        self.numbers[part, 1] = self.numbers[part, 0]
        return float(self.numbers[part, 0])

    def launched(self, part: int) -> float:
        return float(self.numbers[part, 1])

    def settle(self, part: int, most: float = math.inf) -> None:
        """Take away what the launch had, but no more than ``most``."""
        self.numbers[part] -= min(self.launched(part), most)

    def forget(self, part: int) -> None:
        self.numbers[part] = 0


class RankWeights:
    """All ranks count alike."""

    by_samples = False

    def count(self, samples: float) -> None:
        """This rank trains on so many more."""

    def step(self) -> None:
        """This rank has made a step."""

    def launch(self, part: int, name: str) -> float | None:
        """The samples that fragment ``part``, which is launched, is of; None: ranks count alike.

        ``name``: of the module.
        """
        return None

    def weight(self, part: int) -> float:
        """Of this rank in the round of fragment ``part`` that it launches."""
        return 1.0

    def intervals(self, part: int) -> float:
        """By which the change of fragment ``part``, which has been launched, is divided."""
        return 1.0

    def settle(self, part: int) -> None:
        """The last round of a fragment has been made: this rank's part is in the anchor."""

    def fail(self, part: int) -> None:
        """The last round of a fragment has failed on all ranks, and the next one carries it."""

    def forget(self, part: int) -> None:
        """The weights of a fragment are its anchor: nothing has been trained."""

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of this rank's; writes into the tensors take effect."""
        yield from ()

    def copy(self) -> RankWeights:
        return copy.deepcopy(self)


class SampleWeights(RankWeights):
    """Weighs pseudo-gradients by the samples that ranks have trained on since the last round."""

    by_samples = True

    def __init__(self, fragments: int) -> None:
        self._samples = SinceRound(fragments)
        self._said = False

    def count(self, samples: float) -> None:
        self._samples.add(samples)
        self._said = True

    def launch(self, part: int, name: str) -> float | None:
        samples = self._samples.launch(part)
        if not self._said and not samples:
            raise _C.BaguaError(
                f"module '{name}': weight=\"samples\", but this rank has not said any: call "
                "model.bagua_samples() before the forward of each step"
            )
        return samples

    def weight(self, part: int) -> float:
        return self._samples.launched(part)

    def settle(self, part: int) -> None:
        self._samples.settle(part)

    def forget(self, part: int) -> None:
        self._samples.forget(part)

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "samples", self._samples.numbers
