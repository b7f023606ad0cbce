"""``AutoAlgorithm``: tries candidates in real training steps, and keeps the fastest."""

from __future__ import annotations

import inspect
import logging
import math
import statistics
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.saved_values import check_state
from bagua._core.state.snapshot import sparse_parameters
from bagua._core.state.statistics import less_for
from bagua._sync.synchronizer import Synchronizer
from bagua.torch_api.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    GlobalAlgorithmRegistry,
    Groups,
    StepHook,
)
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.guard import Guard

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = ["AutoAlgorithm", "AutoAlgorithmImpl", "Selection", "Trial"]

_log = logging.getLogger("bagua")
#: Steps of a trial that are not timed, and those that are.
WARM_UP, TIMED = 3, 10
#: A candidate that loses more has to be faster by this share: a smaller gain is noise.
WORTH = 0.03
#: Where exact gradients take so many times as long, a fifth of a step with 4 bits is waiting.
FAR = 2.5
#: A rank that computes for so many times as long as the others is told to get a smaller batch.
SLOWEST = 1.25
#: The choice is made anew when steps take this many times as long in so many windows in a row.
SLOWER, WINDOWS = 1.5, 3
#: A window has the steps of so many seconds, within these limits.
_WINDOW_SECONDS, _LEAST_STEPS, _MOST_STEPS = 2.0, 20, 500


class AutoAlgorithm(Algorithm):
    """Tries candidates in the first steps of a training, and keeps the fastest whose error is
    allowed.

    Exact gradients come first, then each candidate trains for three warm-up steps and ten timed
    ones. The time of a step is the median, on the rank where it is longest; the error is that of
    the candidate's first round, measured by a guard (:class:`~bagua.torch_api.Guard`;
    ``bagua.wrap(guard=...)`` replaces it). All ranks choose the same. Exact gradients stay unless
    another candidate is 3 % faster. A choice that loses more later than the guard allows is
    replaced by exact gradients. When steps become slower by half for long, all candidates are tried
    again.

    ``module.bagua_stats()["choice"]`` has the table of all candidates, which the first rank logs.

    Ranks hold the same bits after every step. All candidates communicate gradients: time alone
    cannot decide for algorithms that change the training in other ways.

    Args:
        candidates: beside exact gradients: algorithms, or their names. None: ``bytegrad`` with 8
            bits, and with 4 bits and error feedback.
        max_error: relative error of the communicated mean, or with error feedback residual over the
            gradient, that is allowed. 0.3 admits 4 bits (0.1 to 0.2), which end within 0.01 of the
            loss of exact gradients under AdamW, and keeps out 2 bits (0.34 and more), which end
            0.07 above it.

    Raises:
        TypeError, ValueError: an argument of another kind or out of range, by name.
        KeyError: a name that is not registered.

    Example::

        model = bagua.wrap(model, [optimizer], AutoAlgorithm(max_error=0.1))
        ...  # 42 steps
        model.bagua_stats()["choice"]
    """

    def __init__(
        self, candidates: Sequence[str | Algorithm] | None = None, *, max_error: float = 0.3
    ) -> None:
        if isinstance(candidates, str):
            raise TypeError(f"AutoAlgorithm: candidates is a list of names: ['{candidates}']")
        if not 0 <= max_error < math.inf:
            raise ValueError(f"AutoAlgorithm: max_error={max_error} must be 0 or a positive number")
        if candidates is None:
            four_bits = ByteGradAlgorithm(codec="int4_block", error_feedback=True)
            candidates = [ByteGradAlgorithm(), four_bits]
        self.candidates = _as_candidates(candidates)
        self.max_error = max_error

    def describe(self) -> str:
        return f"{super().describe()} candidates {[label_of(one) for one in self.candidates]}"

    def reify(self, process_group: BaguaProcessGroup) -> AutoAlgorithmImpl:
        return AutoAlgorithmImpl(process_group, self)


def _as_candidates(given: Sequence[str | Algorithm]) -> list[Algorithm]:
    """Candidates as users give them, without exact gradients, which are always there."""
    found: dict[str, Algorithm] = {}
    for one in given:
        algorithm = Algorithm.init(one) if isinstance(one, str) else one
        if not isinstance(algorithm, Algorithm):
            raise TypeError(f"AutoAlgorithm: candidates are names or algorithms, not {one!r}")
        label = label_of(algorithm)
        if label in found:
            raise ValueError(f"AutoAlgorithm: candidate {label} is given twice")
        found[label] = algorithm
    found.pop(label_of(GradientAllReduceAlgorithm()), None)
    return list(found.values())


def label_of(algorithm: Algorithm) -> str:
    """The algorithm as a call without defaults, such as ``bytegrad(codec='int4_block')``."""
    registered = GlobalAlgorithmRegistry.items()
    names = (name for name, entry in registered if entry["algorithm"] is type(algorithm))
    parameters = inspect.signature(type(algorithm)).parameters
    words = [
        f"{name}={value!r}"
        for name, value in sorted(vars(algorithm).items())
        if name in parameters and value != parameters[name].default
    ]
    name = next(names, type(algorithm).__name__)
    return f"{name}({', '.join(words)})" if words else name


@dataclass(eq=False)
class Trial:
    algorithm: Algorithm
    label: str
    seconds: float | None = None  # of a step; None: not tried
    error: float | None = None  # what the guard found that its first round loses
    excluded: str = ""  # the reason for which it is not tried again


class Selection:
    """Tries candidates one after another, chooses one, and tries again when steps become slow.

    All ranks make the same calls, and choose the same, by numbers that they ``agree`` on: the
    largest. The first of ``trials`` is exact, and never excluded.
    """

    at_work: Trial  # the candidate that is to communicate now
    chosen: bool  # False: it is being tried

    def __init__(
        self, trials: Sequence[Trial], max_error: float, agree: Callable[[float], float]
    ) -> None:
        self.trials = list(trials)
        self.why = ""  # the choice was made, or the trials were begun
        self.turns = 0  # how often the candidates were tried to the end
        self._max_error = max_error
        self._agree = agree
        self._reference: float | None = None  # seconds of a step since the choice
        self._try_all()

    def _try_all(self) -> None:
        for trial in self.trials:
            trial.seconds = trial.error = None
        self._queue = [trial for trial in self.trials if not trial.excluded]
        self.chosen = False
        self._next()

    def _next(self) -> None:
        self.at_work = self._queue.pop(0)
        self._warm_up = WARM_UP
        self._seconds: list[float] = []
        self._ended: float | None = None

    def choose(self, trial: Trial, why: str) -> None:
        """Take ``trial`` without measuring; the next window of steps becomes the reference."""
        self.at_work, self.chosen, self.why = trial, True, why
        self._reference, self._slow_windows, self._seconds = None, 0, []
        self._ended = None

    def step_ended(self, now: float, error: float | None, breached: bool) -> bool:
        """Count a step of the candidate at work; whether another one is at work from now on.

        ``now``: seconds on this rank's clock. ``error``: what the guard found that its last round
        lost; None: nothing was measured. ``breached``: it loses more than the guard allows.
        """
        before, trial, chosen = self._ended, self.at_work, self.chosen
        self._ended = now
        if trial.error is None:
            trial.error = error
        if breached:
            trial.excluded = "lost more than the guard allows"
            if chosen:
                self.choose(self.trials[0], f"{trial.label} {trial.excluded}")
        elif before is None:
            return False
        elif self._warm_up > 0 and not chosen:
            self._warm_up -= 1
            return False
        else:
            self._seconds.append(now - before)
        if not chosen:
            self._try_on(trial)
        elif not breached:
            self._watch()
        return self.at_work is not trial or self.chosen is not chosen

    def _try_on(self, trial: Trial) -> None:
        if len(self._seconds) < TIMED and not trial.excluded:
            return
        if not trial.excluded:
            trial.seconds = self._agree(statistics.median(self._seconds))
        if self._queue:
            self._next()
        else:
            self._choose_best()

    def _choose_best(self) -> None:
        """Take the one that loses least among those within 3 % of the fastest that is allowed."""
        allowed = [trial for trial in self.trials if not self.refusal_of(trial)]
        fastest = min(_seconds(trial) for trial in allowed)
        near = [trial for trial in allowed if _seconds(trial) * (1 - WORTH) <= fastest]
        best = min(near, key=lambda trial: trial.error or 0.0)
        exact, seconds = self.trials[0], _seconds(best)
        why = f"{seconds * 1e3:.1f} ms a step, {_seconds(exact) * 1e3:.1f} ms with exact gradients"
        if _seconds(exact) >= FAR * seconds:
            why += (
                "; steps still wait for the network, where DiLoCoAlgorithm would send once in many "
                "steps"
            )
        if best is exact:
            why = f"{seconds * 1e3:.1f} ms a step, and nothing allowed is {WORTH:.0%} faster"
        self.turns += 1
        self.choose(best, why)
        self._set_reference(seconds)

    def refusal_of(self, trial: Trial) -> str:
        """The reason for which a trial is not taken; empty: it may be."""
        if trial.excluded or trial is self.trials[0]:
            return trial.excluded
        if trial.error is None:
            return "its error was not measured"
        if trial.error > self._max_error:
            return f"error above {self._max_error:g}"
        return ""

    def _set_reference(self, seconds: float) -> None:
        self._reference = seconds
        steps = math.ceil(_WINDOW_SECONDS / max(seconds, 1e-6))
        self._window = min(max(steps, _LEAST_STEPS), _MOST_STEPS)

    def _watch(self) -> None:
        if len(self._seconds) < (_LEAST_STEPS if self._reference is None else self._window):
            return
        seconds = self._agree(statistics.median(self._seconds))
        self._seconds = []
        if self._reference is None:
            self._set_reference(seconds)
            return
        self._slow_windows = self._slow_windows + 1 if seconds > SLOWER * self._reference else 0
        if self._slow_windows < WINDOWS or all(trial.excluded for trial in self.trials[1:]):
            return
        self._try_all()
        self.why = (
            f"steps take {seconds * 1e3:.1f} ms, {self._reference * 1e3:.1f} ms when it was chosen"
        )

    def values(self) -> dict[str, Any]:
        table = [
            {
                "candidate": trial.label,
                "seconds": trial.seconds,
                "error": trial.error,
                "refusal": self.refusal_of(trial) if self.chosen else trial.excluded,
            }
            for trial in self.trials
        ]
        return {
            "state": "chosen" if self.chosen else "trying",
            "chosen": self.at_work.label if self.chosen else None,
            "why": self.why,
            "turns": self.turns,
            "table": table,
        }

    def table_text(self) -> str:
        lines = []
        for trial in self.trials:
            mark = "*" if trial is self.at_work else " "
            time_ = "" if trial.seconds is None else f"{trial.seconds * 1e3:.1f} ms"
            error = "" if trial.error is None else f"error {trial.error:.2g}"
            line = f"{mark} {time_:>10}  {error:13} {trial.label}"
            refusal = self.refusal_of(trial)
            lines.append(f"{line} ({refusal})" if refusal else line)
        return "\n".join(lines)


def _seconds(trial: Trial) -> float:
    return math.inf if trial.seconds is None else trial.seconds


class AutoAlgorithmImpl(AlgorithmImpl):
    """Implementation of :class:`AutoAlgorithm`: an inner one at work, and the selection."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, process_group: BaguaProcessGroup, arguments: AutoAlgorithm) -> None:
        super().__init__(process_group)
        connections = process_group.connections
        everything = [GradientAllReduceAlgorithm(), *arguments.candidates]
        self._ddp: weakref.ref[Session] | None = None
        self.selection = Selection(
            [Trial(algorithm, label_of(algorithm)) for algorithm in everything],
            arguments.max_error,
            lambda seconds: _largest(connections, seconds),
        )
        impls = [algorithm.reify(process_group) for algorithm in everything]
        for trial, impl in zip(self.selection.trials, impls, strict=True):
            if not (impl.traits.ranks_agree and impl.traits.steps_on_gradients):
                raise ValueError(
                    f"AutoAlgorithm: candidate {trial.label} changes more than the way of "
                    "gradients, so that the time of a step does not decide for it"
                )
        self._impls = dict(zip(self.selection.trials, impls, strict=True))
        self.advice = ""  # after a choice, equal on all ranks
        self._last: tuple[float, float] | None = None
        self._own: list[float] = []  # seconds of the trial's steps in which this rank computed
        self._build()

    def _build(self) -> None:
        """Have the candidate that is to communicate do so in the buckets that are made next."""
        self._built = self.selection.at_work
        self.inner = self._built.algorithm.reify(self.process_group)
        traits = [impl.traits for impl in self._impls.values()]
        # All candidates must permit something; what the one at work cannot communicate it is not
        # chosen for.
        self.traits = replace(
            self.inner.traits,
            takes_uneven_inputs=all(one.takes_uneven_inputs for one in traits),
            takes_unfrozen=all(one.takes_unfrozen for one in traits),
            shares_parameters=all(one.shares_parameters for one in traits),
            remembers_gradients=any(one.remembers_gradients for one in traits),
            reset_gives_state=False,
            default_guard=Guard(),
        )

    # Buckets.

    def need_reset(self) -> bool:
        ddp = None if self._ddp is None else self._ddp()
        joining = ddp is not None and ddp.joining is not None
        other = self._built is not self.selection.at_work
        # Inside join() ranks without inputs have no forward in which they would rebuild.
        return (other and not joining) or self.inner.need_reset()

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        if self._ddp is None:
            self._ddp = weakref.ref(bagua_ddp)
            self._exclude_unsupported(bagua_ddp)
        if self._built is not self.selection.at_work:
            self.inner.close()
            self._build()
        return self.inner.init_tensors(bagua_ddp)

    def tensors_to_buckets(self, tensors: Groups, do_flatten: bool) -> list[BaguaBucket]:
        return self.inner.tensors_to_buckets(tensors, do_flatten)

    def init_operations(self, bagua_ddp: Session, bucket: BaguaBucket) -> None:
        self.inner.init_operations(bagua_ddp, bucket)

    def make_synchronizer(self, bagua_ddp: Session) -> Synchronizer:
        return self.inner.make_synchronizer(bagua_ddp)

    # Hooks.

    def overrides(self, method: str) -> bool:
        own = ("init_operations", "init_post_backward_hook")
        return method in own or self.inner.overrides(method)

    def init_forward_pre_hook(self, bagua_ddp: Session) -> Callable[[Any], None]:
        return self.inner.init_forward_pre_hook(bagua_ddp)

    def init_backward_hook(self, bagua_ddp: Session) -> Callable[[str, torch.nn.Parameter], None]:
        return self.inner.init_backward_hook(bagua_ddp)

    def init_pre_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        return self.inner.init_pre_backward_hook(bagua_ddp)

    def init_post_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        def finish() -> None:
            self.inner.init_post_backward_hook(bagua_ddp)()
            self._step_ended(bagua_ddp)

        return finish

    def init_post_optimizer_step_hook(self, bagua_ddp: Session) -> StepHook:
        return self.inner.init_post_optimizer_step_hook(bagua_ddp)

    def mark_pending(self, bagua_ddp: Session) -> bool:
        return self.inner.mark_pending(bagua_ddp)

    def close(self) -> None:
        self.inner.close()

    # The choice.

    def statistics(self) -> dict[str, Any]:
        return {"choice": self.selection.values() | {"advice": self.advice}}

    def _exclude_unsupported(self, bagua_ddp: Session) -> None:
        """Exclude what cannot communicate the module's gradients; choose where one is left."""
        named = bagua_ddp.bagua_build_params()
        sparse = any(id(p) in sparse_parameters(bagua_ddp.module) for _, p in named)
        complex_ = any(parameter.is_complex() for _, parameter in named)
        exact, *others = self.selection.trials
        for trial in others:
            impl = self._impls[trial]
            if sparse and not impl.traits.sparse_gradients:
                trial.excluded = "the model has sparse gradients"
            elif complex_ and not impl.traits.complex_parameters:
                trial.excluded = "the model has complex parameters"
        if self.process_group.size == 1:
            self.selection.choose(exact, "one rank")
        elif all(trial.excluded for trial in others):
            self.selection.choose(exact, "the only candidate")

    def _step_ended(self, bagua_ddp: Session) -> None:
        selection, guard = self.selection, bagua_ddp.guard
        # Inside join() ranks without inputs are in no step: ranks would count differently.
        if bagua_ddp.joining is not None or self._built is not selection.at_work:
            return
        if not selection.chosen:
            _wait_for(bagua_ddp.bagua_buckets)
        error = None if guard is None else guard.loss()
        breached = guard is not None and guard.breached
        now = self.clock()
        if not selection.chosen:
            self._note_own_part(now, bagua_ddp.stats()["exposed_ns"] / 1e9)
        if not selection.step_ended(now, error, breached):
            return
        own, self._own, self._last = self._own, [], None
        if not selection.chosen:
            return
        self.advice = self._advice_of(own)
        if self.process_group.connections.rank == 0:
            _log.info(
                "module '%s': auto takes %s: %s\n%s",
                bagua_ddp.bagua_module_name,
                selection.at_work.label,
                selection.why,
                "\n".join(filter(None, (selection.table_text(), self.advice))),
            )

    def _note_own_part(self, now: float, blocked: float) -> None:
        """``blocked``: seconds so far in which this rank waited for communication."""
        if self._last is not None:
            self._own.append(now - self._last[0] - (blocked - self._last[1]))
        self._last = now, blocked

    def _advice_of(self, own: Sequence[float]) -> str:
        """Which rank is slow, by the time that each one computes. All ranks call it alike."""
        if not own:
            return self.advice  # a choice was left without a trial
        microseconds = max(0, round(statistics.median(own) * 1e6))
        what = "comparing the ranks for AutoAlgorithm"
        found = self.process_group.connections.gather_numbers(what, microseconds)
        slowest = max(range(len(found)), key=found.__getitem__)
        usual = statistics.median(found[:slowest] + found[slowest + 1 :])
        slow = usual > 0 and found[slowest] >= SLOWEST * usual
        rank = self.process_group.ranks[slowest]
        return less_for(rank, found[slowest] / usual) if slow else ""

    # State for checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The choice and the state of the algorithm that was chosen.

        Returns:
            ``choice``, its name and arguments as a text, empty until the choice is made; then also
            the entries of that algorithm, if its buckets are made.
        """
        selection = self.selection
        if not selection.chosen:
            return {"choice": ""}
        built = self._built is selection.at_work
        return {"choice": selection.at_work.label} | (self.inner.state_dict() if built else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` on every rank, after ``bagua.wrap``: nothing is tried then.

        The buckets of the choice are built at once. A state that was saved before the choice
        changes nothing.

        Raises:
            ValueError: the state is of another algorithm, model or candidates; names the entry.
        """
        check_state(state, type(self).__name__)
        if "choice" not in state:
            raise ValueError(
                "AutoAlgorithm: the state has no 'choice': it is of another algorithm. Wrap with "
                "that algorithm, or leave its state out"
            )
        if state["choice"] == "":
            return
        choice, trials = state["choice"], self.selection.trials
        chosen = next((trial for trial in trials if trial.label == choice), None)
        if chosen is None:
            labels = ", ".join(trial.label for trial in trials)
            raise ValueError(
                f"AutoAlgorithm: 'choice' is {str(choice)[:80]!r} in the state, which is none of "
                f"the candidates {labels}; wrap with the candidates of the training that saved it"
            )
        if not (self.selection.chosen and self.selection.at_work is chosen):
            self.selection.choose(chosen, "restored from a checkpoint")
        bagua_ddp = None if self._ddp is None else self._ddp()
        if bagua_ddp is not None and self._built is not chosen:
            bagua_ddp.rebuild()
        inner = {key: value for key, value in state.items() if key != "choice"}
        if inner or not self.inner.state_dict():
            self.inner.load_state_dict(inner)


def _largest(connections: Connections, value: float) -> float:
    """The largest of all ranks' values, which are not negative; the same bits on all ranks."""
    # The bits of numbers that are not negative have their order, read as whole numbers.
    (bits,) = struct.unpack("q", struct.pack("d", value))
    what = "comparing steps for AutoAlgorithm"
    (bits,) = connections.reduce_numbers(what, _C.ReduceOp.MAX, bits)
    (largest,) = struct.unpack("d", struct.pack("q", bits))
    return float(largest)


def _wait_for(buckets: Sequence[BaguaBucket]) -> None:
    """Block until the device has ended the step; the host runs ahead of it otherwise."""
    for device in {bucket.backend_tensor.device for bucket in buckets}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
